"""Which shared objects of the serving stack could load: libraries that are missing, of another generation, or of another torch.

torch is taken first, as in vLLM's processes: whatever ``import torch`` loads is there for everyone after it. Only extension
modules that this interpreter can import are followed, with all that they bring in; test libraries and plug-ins that are opened
on demand are not.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from probes import oneapi
from probes.elf import Loaded, Loader, SharedObject, generation, mapped_libraries, read_cache
from probes.facts import LibraryFact
from probes.packages import Place
from probes.symbols import undefined

NATIVE = (
    "vllm",
    "vllm_xpu_kernels",
    "intel_extension_for_pytorch",
    "oneccl_bindings_for_pytorch",
    "torchvision",
    "torchaudio",
    "triton",
)
"""Packages with extension modules that are read, torch before them. torchcodec is not among them: it carries one library for each
FFmpeg release and keeps the first that loads."""

ONE_PER_PROCESS = frozenset({"libsycl.so", "libccl.so", "libmpi.so", "libcudart.so"})
"""Libraries with process-wide state: objects that need different generations of one cannot share queues, communicators or streams."""

FLAVOUR_LIBRARIES = {
    "cuda": ("libtorch_cuda.so", "libc10_cuda.so", "libcudart.so"),
    "xpu": ("libtorch_xpu.so", "libc10_xpu.so", "libsycl.so"),
    "rocm": ("libtorch_hip.so", "libc10_hip.so", "libamdhip64.so"),
}
SKIP_FOLDERS = frozenset({"__pycache__", "include", "share", "test", "tests", "testing", "csrc"})
MOST_SYMBOLS = 12
DEEPEST = 4


@dataclass
class Libraries:
    """What was seen of the shared objects."""

    facts: list[LibraryFact] = field(default_factory=list)
    count: int = 0
    generations: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    flavours: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Package to its build flavour and the library that shows it."""
    torch_backends: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Entry:
    """One extension module."""

    name: str
    """Dotted: ``vllm_xpu_kernels._C``."""
    path: str


def shared_objects(folder: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """Files below a package that are shared objects by name."""
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError:
        return
    for one in entries:
        if one.is_dir(follow_symlinks=False):
            if depth and one.name not in SKIP_FOLDERS:
                yield from shared_objects(Path(one.path), depth - 1)
        elif one.name.endswith(".so") or ".so." in one.name:
            yield Path(one.path)


def entries(place: Place, files: Iterable[Path]) -> list[Entry]:
    """The extension modules among a package's shared objects. Those built for another Python are none: it never opens them."""
    found: list[Entry] = []
    for path in files:
        suffix = next((s for s in importlib.machinery.EXTENSION_SUFFIXES if path.name.endswith(s)), None)
        stem = path.name[: -len(suffix)] if suffix else ""
        if not stem or "." in stem or (stem.startswith("lib") and stem != "libtriton") or place.folder is None:
            continue
        parts = path.parent.relative_to(place.folder).parts
        found.append(Entry(".".join((place.name, *parts, stem)), str(path)))
    return found


def torch_entries(place: Place) -> list[Entry]:
    """What ``import torch`` loads: its global dependencies, then its extension module with everything behind it."""
    if place.folder is None:
        return []
    first = place.folder / "lib" / "libtorch_global_deps.so"
    found = [Entry("torch._C", str(first))] if first.is_file() else []
    return found + entries(place, sorted(place.folder.glob("_C.*so")))


def torch_backends(place: Place) -> list[str]:
    """Backends whose library the installed torch carries."""
    if place.folder is None:
        return []
    return [name for name in ("cpu", "cuda", "xpu", "hip") if (place.folder / "lib" / f"libtorch_{name}.so").is_file()]


class _Survey:
    """Takes one package after another and gathers what is wrong with its objects."""

    def __init__(self, loader: Loader, elsewhere: Sequence[Path]) -> None:
        self.loader = loader
        self.elsewhere = elsewhere
        self.facts: dict[str, LibraryFact] = {}
        self.generations: dict[str, dict[str, list[str]]] = {}
        self.flavours: dict[str, tuple[str, str]] = {}
        self.torch_objects: list[SharedObject] = []

    def torch(self, place: Place) -> None:
        """Load torch, as everything else finds it."""
        holder = place.holder
        if holder is not None:  # torch opens these itself when the loader does not find them
            self.loader.fallback = {p.name: str(p) for p in holder.glob("nvidia/*/lib/*.so*")}
        for entry in torch_entries(place):
            loaded = self.loader.load(entry.path)
            self.torch_objects += loaded.objects
            self._note("torch", entry, loaded)

    def package(self, place: Place) -> None:
        """Try each extension module of a package, torch being loaded."""
        if place.folder is None or place.holder is None:
            return
        files = list(shared_objects(place.folder))
        bundled = [p for folder in place.holder.glob(f"{place.name}.libs") for p in shared_objects(folder)]
        self.loader.fallback = {p.name: str(p) for p in (*files, *bundled)}
        for entry in entries(place, files):
            loaded = self.loader.load(entry.path, keep=False)
            self._note(place.name, entry, loaded)
            if not loaded.missing and not loaded.errors and self.torch_objects:
                self._symbols(place, entry, loaded)

    def _symbols(self, place: Place, entry: Entry, loaded: Loaded) -> None:
        providers = [*self.torch_objects, *loaded.objects]
        for one in loaded.objects:
            if one.path.startswith(f"{place.folder}/") and (names := undefined(one, providers)):
                fact = self._fact(one.path, place.name, one.needed)
                self.facts[one.path] = replace(fact, undefined=names[:MOST_SYMBOLS], loaded_by=[*fact.loaded_by, entry.name])

    def _fact(self, path: str, package: str, needed: Sequence[str]) -> LibraryFact:
        return self.facts.get(path) or LibraryFact(path, package, list(needed))

    def _note(self, package: str, entry: Entry, loaded: Loaded) -> None:
        by_path = {one.path: one for one in loaded.objects}
        for path, names in loaded.missing.items():
            fact = self._fact(path, package, by_path[path].needed)
            fact = replace(fact, loaded_by=sorted({*fact.loaded_by, entry.name}), missing=names)
            self.facts[path] = replace(
                fact, other_generation=self._others(by_path[path], names),
                elsewhere={n: str(found) for n in names if (found := self._elsewhere(n)) is not None},
            )  # fmt: skip
        for path, problem in loaded.errors.items():
            fact = self._fact(path, package, ())
            self.facts[path] = replace(fact, error=problem, loaded_by=sorted({*fact.loaded_by, entry.name}))
        for one in loaded.objects:
            self._note_needs(package, one)

    def _note_needs(self, package: str, one: SharedObject) -> None:
        for name in one.needed:
            parts = generation(name)
            if parts and parts[0] in ONE_PER_PROCESS:
                packages = self.generations.setdefault(parts[0], {}).setdefault(name, [])
                if package not in packages:
                    packages.append(package)
            stem = name.partition(".so")[0] + ".so"
            for flavour, libraries in FLAVOUR_LIBRARIES.items():
                if stem in libraries:
                    self.flavours.setdefault(package, (flavour, name))
        if "libtorch_cpu.so" in one.needed and package not in self.flavours and Path(one.path).name.startswith("_C"):
            self.flavours[package] = ("cpu", "libtorch_cpu.so")

    def _elsewhere(self, name: str) -> Path | None:
        return next((folder / name for folder in self.elsewhere if (folder / name).is_file()), None)

    def _others(self, one: SharedObject, names: Iterable[str]) -> dict[str, list[str]]:
        """For each missing name with a generation: the other generations of it that are there."""
        found: dict[str, list[str]] = {}
        for name in names:
            parts = generation(name)
            if parts is None:
                continue
            here = {known for known in (*self.loader.loaded, *self.loader.cache) if known.startswith(parts[0] + ".")}
            for folder in (*self.loader.folders(one), *self.loader.standard, *map(str, self.elsewhere)):
                here |= {p.name for p in Path(folder).glob(f"{parts[0]}.*")}
            others = sorted({f"{parts[0]}.{other[1]}" for text in here if (other := generation(text)) and other != parts})
            if others:
                found[name] = others
        return found


def beside_the_path(environ: Mapping[str, str], places: Mapping[str, Place], prefixes: Sequence[str]) -> list[Path]:
    """Folders that hold libraries of the stack and that the loader need not look in: the environment's own, torch's, oneAPI's."""
    folders = [Path(prefix) / "lib" for prefix in prefixes]
    torch = places.get("torch")
    if torch is not None and torch.folder is not None:
        folders.append(torch.folder / "lib")
        folders += sorted(torch.folder.parent.glob("nvidia/*/lib"))
    folders += oneapi.library_folders(oneapi.roots(environ))
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def observe_libraries(
    places: Mapping[str, Place], environ: Mapping[str, str] | None = None, prefixes: Sequence[str] | None = None,
) -> Libraries:  # fmt: skip
    """Read the shared objects of every package of the stack that has some.

    Args:
        places: import packages that are there.
        environ: environment of the process that would load them; this process's own by default.
        prefixes: prefixes of the Python installation; this interpreter's by default.
    """
    environ = os.environ if environ is None else environ
    result = Libraries(torch_backends=torch_backends(places["torch"]) if "torch" in places else [])
    loader = Loader(environ.get("LD_LIBRARY_PATH", ""), read_cache(), mapped_libraries())
    survey = _Survey(loader, beside_the_path(environ, places, prefixes or (sys.prefix, sys.base_prefix)))
    try:
        import elftools  # noqa: F401 - asked for here so that its absence is one fact and not an error of every object
    except ImportError as error:
        result.error = f"pyelftools is not importable in this interpreter ({error}), so shared objects were not read"
        return result
    if "torch" in places:
        survey.torch(places["torch"])
    for name in NATIVE:
        if name in places:
            survey.package(places[name])
    result.facts = sorted(survey.facts.values(), key=lambda fact: fact.path)
    result.count, result.generations, result.flavours = loader.count, survey.generations, survey.flavours
    return result
