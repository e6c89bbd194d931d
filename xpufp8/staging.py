"""The staging folder: the target half and its entry points, in one folder that PYTHONPATH can name.

Probes and repairs run in the target's interpreter, where xpufp8 may not be installed and nothing may be installed. A copy of
the target half, pyelftools (pure Python, which the ELF probes read with) and a ``*.dist-info`` with entry points is enough:
vLLM finds its plugins through ``importlib.metadata``, which reads every folder on the path.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

from xpufp8 import __version__

ENTRY_POINTS = {
    "vllm.general_plugins": ("xpufp8 = xpufp8.runtime.plugin:activate", "xpufp8_sim_general = xpufp8.simulate.plugin:activate"),
    "vllm.platform_plugins": ("xpufp8_sim = xpufp8.simulate.platform:plugin",),
}
"""Group to entry points, the same as in pyproject.toml (a test compares them)."""

PARTS = ("runtime", "simulate", "data")
SKIP = shutil.ignore_patterns("__pycache__", "*.pyc")


def cache_root() -> Path:
    """Folder for what may be lost: ``$XPUFP8_CACHE_DIR``, else the user's cache folder."""
    # Absolute, because children that find the target half through it work in other folders.
    return Path(os.environ.get("XPUFP8_CACHE_DIR") or platformdirs.user_cache_path("xpufp8")).absolute()


def _sources() -> Iterator[tuple[str, Path]]:
    """Every folder or file that is staged, with its place in the staging folder."""
    package = Path(__file__).parent
    yield "xpufp8/__init__.py", package / "__init__.py"
    for part in PARTS:
        yield f"xpufp8/{part}", package / part
    for name, place in (("probes", "probes"), ("elftools", "elftools")):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            yield place, Path(spec.origin).parent


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def _digest() -> str:
    """Hash of everything staged, so that an edited source is never served from an old folder."""
    seen = hashlib.sha256(repr((__version__, ENTRY_POINTS)).encode())
    for place, source in _sources():
        for file in _files(source):
            stat = file.stat()
            seen.update(f"{place}/{file.relative_to(source.parent)}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return seen.hexdigest()[:16]


def _write(folder: Path) -> None:
    for place, source in _sources():
        goal = folder / place
        goal.parent.mkdir(parents=True, exist_ok=True)
        if source.is_file():
            shutil.copy2(source, goal)
        else:
            shutil.copytree(source, goal, ignore=SKIP)
    points = "\n".join(f"[{group}]\n" + "\n".join(lines) + "\n" for group, lines in ENTRY_POINTS.items())
    write_distribution(folder, "xpufp8", __version__, points)


def write_distribution(folder: Path, name: str, version: str, entry_points: str = "") -> Path:
    """Write ``NAME-VERSION.dist-info`` into a folder: the metadata that ``importlib.metadata`` asks for, and nothing else."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    return info


def _whole(folder: Path) -> bool:
    """True when every staged file is there in its size: a crash or a full disk after the rename leaves some torn or empty."""
    try:
        for place, source in _sources():
            for file in _files(source):
                copy = folder / place if source.is_file() else folder / place / file.relative_to(source)
                if copy.stat().st_size != file.stat().st_size:
                    return False
    except OSError:
        return False
    return True


def _place(parent: str, key: str, fill: Callable[[Path], object], whole: Callable[[Path], bool] = Path.is_dir) -> Path:
    """A finished folder under the cache, made once: filled beside and renamed, so that two runs at once never see half of it.

    One that is not ``whole`` any more is put aside and made again.
    """
    for root in (cache_root(), Path(tempfile.gettempdir()) / f"xpufp8-{os.getuid()}"):
        goal = root / parent / key
        if goal.is_dir() and goal.stat().st_uid == os.getuid():  # code runs from here: never from a folder of somebody else
            if whole(goal):
                return goal
            _set_aside(goal)
        try:
            goal.parent.mkdir(parents=True, exist_ok=True)
            part = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=goal.parent))
        except OSError:
            continue  # a read-only or full cache is no reason to stop: the temporary folder does as well
        try:
            fill(part)
            part.chmod(0o755)
            part.rename(goal)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            if not goal.is_dir():
                continue
        return goal
    raise OSError("no folder can be written for the target half: set XPUFP8_CACHE_DIR to one that can")


def _set_aside(folder: Path) -> None:
    with contextlib.suppress(OSError):
        torn = Path(tempfile.mkdtemp(prefix=".torn-", dir=folder.parent))
        folder.rename(torn / folder.name)
        shutil.rmtree(torn, ignore_errors=True)


def stage() -> Path:
    """The staging folder for this version of xpufp8, made on first use.

    Raises:
        OSError: neither the cache folder nor the temporary folder can be written.
    """
    return _place("target", _digest(), _write, _whole)


def stage_metadata(name: str, version: str) -> Path:
    """A folder with just the metadata of NAME at VERSION, for a package that has none (repair ``metadata:vllm``)."""
    return _place("metadata", f"{name}-{version}", lambda folder: write_distribution(folder, name, version))
