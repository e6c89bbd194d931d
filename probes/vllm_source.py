"""An installed or unpacked vLLM as files: where it is, which version it says it is, and its modules as syntax trees.

Nothing here imports vLLM. ``importlib.util.find_spec`` of a top-level name only looks for the package; it does not run it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_VERSION = re.compile(r"""^(?:__version__|version)\b[^=\n]*=.*?['"]([^'"]+)['"]""", re.MULTILINE)
_DIST_INFO = re.compile(r"^vllm(?:[_-][A-Za-z_]+)?-(\d[^-]*)\.dist-info$", re.IGNORECASE)


class SourceError(ValueError):
    """No vLLM package can be read where one was looked for; the message says where."""


def find_package(path: str | None) -> Path:
    """Folder of the vLLM package: of an unpacked one at ``path`` (the package or the folder that holds it), or the installed one.

    Raises:
        SourceError: there is none.
    """
    if path is None:
        return _installed()
    given = Path(path)
    for candidate in (given, given / "vllm", given.parent if given.name == "__init__.py" else given):
        if (candidate / "model_executor").is_dir():
            return candidate.resolve()
    if not given.exists():
        raise SourceError(f"{path} does not exist")
    raise SourceError(f"{path} is not a vLLM package and holds none: there is no model_executor folder in it")


def _installed() -> Path:
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError) as exc:
        raise SourceError(f"no vLLM can be found in this interpreter: {exc}") from exc
    if spec is None:
        raise SourceError("no vLLM is installed in this interpreter")
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    for place in places:
        if (place / "model_executor").is_dir():
            return place.resolve()
    where = ", ".join(map(str, places)) or spec.origin or "an unknown place"
    raise SourceError(f"what is importable as vllm ({where}) has no model_executor folder")


def package_version(root: Path) -> str | None:
    """The version the package states: its ``_version.py`` (or a plain ``version.py``), else a dist-info folder beside it."""
    for name in ("_version.py", "version.py"):
        text = _read(root / name)
        found = _VERSION.findall(text) if text else []
        if found:
            return str(found[-1])
    try:
        names = sorted(entry.name for entry in root.parent.iterdir())
    except OSError:
        return None
    return next((match.group(1) for name in names if (match := _DIST_INFO.match(name))), None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


@dataclass
class Module:
    """One source file as a syntax tree."""

    name: str
    """Dotted, with the package: ``vllm.model_executor.kernels.linear``."""
    file: str
    """Relative to the folder that holds the package, with forward slashes: ``vllm/model_executor/…``."""
    tree: ast.Module
    is_package: bool = False

    def absolute(self, module: str | None, level: int) -> str:
        """The dotted name that ``from …module import`` means in this file."""
        if level == 0:
            return module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - level + (1 if self.is_package else 0)]
        return ".".join([*parts, module] if module else parts)


@dataclass
class SourceTree:
    """The package's modules, parsed on demand and once."""

    root: Path
    problems: list[str] = field(default_factory=list)
    _parsed: dict[Path, Module | None] = field(default_factory=dict)

    def files(self, below: str) -> Iterator[Path]:
        """Every Python file under a sub-folder, in a stable order."""
        yield from sorted((self.root / below).rglob("*.py"))

    def containing(self, below: str, needles: tuple[bytes, ...]) -> Iterator[Module]:
        """Modules under a sub-folder whose bytes hold one of the needles: parsing all of vLLM would take most of a minute."""
        for path in self.files(below):
            try:
                data = path.read_bytes()
            except OSError as exc:
                self.problems.append(f"{self.relative(path)} cannot be read: {exc.strerror or exc}")
                continue
            if any(needle in data for needle in needles):
                module = self.parse(path, data)
                if module is not None:
                    yield module

    def parse(self, path: Path, data: bytes | None = None) -> Module | None:
        """One file as a tree; None, with a sentence in ``problems``, when it is not readable Python."""
        if path not in self._parsed:
            self._parsed[path] = self._parse(path, data)
        return self._parsed[path]

    def _parse(self, path: Path, data: bytes | None) -> Module | None:
        file = self.relative(path)
        try:
            with warnings.catch_warnings():
                # Other people's invalid escapes are not our findings.
                warnings.simplefilter("ignore", SyntaxWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
                tree = ast.parse(path.read_bytes() if data is None else data, filename=file)
        except OSError as exc:
            self.problems.append(f"{file} cannot be read: {exc.strerror or exc}")
            return None
        except (SyntaxError, ValueError, RecursionError) as exc:
            line = getattr(exc, "lineno", None)
            self.problems.append(f"{file}{f', line {line}' if line else ''}, is not Python that this interpreter reads: {exc}")
            return None
        # The package may lie in a folder of another name; its own imports call it vllm.
        parts = ("vllm", *path.relative_to(self.root).with_suffix("").parts)
        package = parts[-1] == "__init__"
        return Module(".".join(parts[:-1] if package else parts), file, tree, package)

    def module(self, name: str) -> Module | None:
        """The module of a dotted name inside the package, or None."""
        parts = name.split(".")
        if parts[0] != "vllm":
            return None
        base = self.root.joinpath(*parts[1:])
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return self.parse(path)
        return None

    def relative(self, path: Path) -> str:
        """A file's path from the folder that holds the package."""
        try:
            return path.relative_to(self.root.parent).as_posix()
        except ValueError:
            return path.as_posix()
