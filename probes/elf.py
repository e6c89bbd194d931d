"""Shared objects read as ELF, and how the dynamic loader would look for what they need. Nothing is loaded.

pyelftools is staged beside the target half; it is imported inside the function that reads. The search follows ld.so(8): RPATH of
the object and of those that load it, unless the object has a RUNPATH; LD_LIBRARY_PATH; RUNPATH; the cache; the standard folders.
A name that the process has loaded already is never searched for again.
"""

from __future__ import annotations

import os
import re
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

CACHE_MAGIC = b"glibc-ld.so.cache1.1"
STANDARD = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/lib/{multiarch}", "/usr/lib/{multiarch}", "/usr/local/lib")
_GENERATION = re.compile(r"^(lib[^/]+?\.so)\.(\d+)(?:\.|$)")


class ElfError(ValueError):
    """A file is no shared object that can be read; the message says why."""


@dataclass(frozen=True)
class SharedObject:
    """What the loader reads of one object."""

    path: str
    machine: str
    bits: int
    soname: str | None = None
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    symbols_at: int | None = None
    """File offset of its dynamic symbol table."""
    strings_at: int | None = None
    hash_at: int | None = None
    """File offset of its GNU hash table."""


def read(path: str | Path) -> SharedObject:
    """Read one shared object's dynamic section.

    Raises:
        ElfError: it is empty, cut off, a Git LFS pointer or otherwise no ELF file.
        ImportError: pyelftools is not importable here.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.dynamic import DynamicSegment
    from elftools.elf.elffile import ELFFile

    try:
        with open(path, "rb") as stream:
            head = stream.read(64)
            if not head.startswith(b"\x7fELF"):
                raise ElfError(_what_it_is(head))
            stream.seek(0)
            elf = ELFFile(stream)
            segment = next((s for s in elf.iter_segments("PT_DYNAMIC") if isinstance(s, DynamicSegment)), None)
            return _described(str(path), elf.get_machine_arch(), elf.elfclass, segment)
    except OSError as error:
        raise ElfError(f"cannot be read: {error.strerror or error}") from error
    except (ELFError, AssertionError, AttributeError, KeyError, UnicodeDecodeError, ValueError, struct.error) as error:
        if isinstance(error, ElfError):
            raise
        raise ElfError("is cut off or damaged: its ELF structures cannot be read") from error


def _what_it_is(head: bytes) -> str:
    if not head:
        return "is empty"
    return "is a Git LFS pointer, not the file itself" if head.startswith(b"version https://git-lfs") else "is not an ELF file"


def _described(path: str, machine: str, bits: int, segment: object) -> SharedObject:
    """The fields of a PT_DYNAMIC segment; a file without one (static or split debug information) needs nothing."""
    if segment is None:
        return SharedObject(path, machine, bits)
    found: dict[str, list[str]] = {"DT_NEEDED": [], "DT_RPATH": [], "DT_RUNPATH": [], "DT_SONAME": []}
    for tag in segment.iter_tags():  # type: ignore[attr-defined] # pyelftools' segment, imported in the caller
        kind = tag.entry.d_tag
        if kind in found:
            found[kind].append(getattr(tag, kind[3:].lower()))
    tables = {name: segment.get_table_offset(name)[1] for name in ("DT_SYMTAB", "DT_STRTAB", "DT_GNU_HASH")}  # type: ignore[attr-defined] # as above
    return SharedObject(
        path, machine, bits,
        soname=next(iter(found["DT_SONAME"]), None),
        needed=tuple(found["DT_NEEDED"]),
        rpath=_folders(found["DT_RPATH"], path),
        runpath=_folders(found["DT_RUNPATH"], path),
        symbols_at=tables["DT_SYMTAB"],
        strings_at=tables["DT_STRTAB"],
        hash_at=tables["DT_GNU_HASH"],
    )  # fmt: skip


def _folders(entries: Iterable[str], path: str) -> tuple[str, ...]:
    """Search folders with the loader's variables put in. $LIB has another value on each distribution, so both are tried."""
    origin = str(Path(os.path.realpath(path)).parent)
    folders: list[str] = []
    for one in (part for entry in entries for part in entry.split(":") if part):
        text = one.replace("${ORIGIN}", origin).replace("$ORIGIN", origin).replace("${LIB}", "$LIB")
        libs = ("lib64", "lib", f"lib/{multiarch()}") if "$LIB" in text else ("",)
        folders += [os.path.normpath(text.replace("$LIB", lib)) for lib in libs]
    return tuple(folders)


def multiarch() -> str:
    """Debian's name for this machine's libraries: ``x86_64-linux-gnu``."""
    return f"{os.uname().machine}-linux-gnu"


def generation(name: str) -> tuple[str, str] | None:
    """``libsycl.so.8`` and ``libsycl.so.8.0.0`` as (``libsycl.so``, ``8``); None for a name without a number."""
    match = _GENERATION.match(name)
    return (match.group(1), match.group(2)) if match else None


def read_cache(path: str | Path = "/etc/ld.so.cache") -> dict[str, list[str]]:
    """The loader's cache, name to files; empty when there is none (musl, or a cache of another form)."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return {}
    start = data.find(CACHE_MAGIC)
    if start < 0 or len(data) < start + 48:
        return {}
    (count,) = struct.unpack_from("=I", data, start + len(CACHE_MAGIC))
    names: dict[str, list[str]] = {}
    for index in range(min(count, (len(data) - start - 48) // 24)):
        _, key, value = struct.unpack_from("=iII", data, start + 48 + 24 * index)
        name, file = (data[start + at : data.find(b"\0", start + at)].decode("utf-8", "replace") for at in (key, value))
        names.setdefault(name, []).append(file)
    return names


def mapped_libraries(maps: str | Path = "/proc/self/maps") -> dict[str, str]:
    """Libraries that this process has loaded, file name to path: Python's own, which every extension finds loaded."""
    try:
        lines = Path(maps).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    paths = {
        parts[5] for line in lines if len(parts := line.split(None, 5)) == 6 and ".so" in parts[5] and parts[5].startswith("/")
    }
    return {Path(path).name: path for path in sorted(paths)}


@dataclass
class Loaded:
    """What came of loading one object with everything it needs."""

    missing: dict[str, list[str]] = field(default_factory=dict)
    """Path of an object to the NEEDED names of it that nothing provides."""
    errors: dict[str, str] = field(default_factory=dict)
    """Objects that are no readable ELF files."""
    objects: list[SharedObject] = field(default_factory=list)
    """The object itself and all that it brings in."""


class Loader:
    """The dynamic loader's search, over files only.

    Args:
        library_path: value of LD_LIBRARY_PATH at the start of the process.
        cache: contents of ld.so.cache.
        mapped: libraries that are loaded before the first extension.
        standard: folders searched last.
    """

    def __init__(
        self, library_path: str = "", cache: dict[str, list[str]] | None = None, mapped: dict[str, str] | None = None,
        standard: Iterable[str] = STANDARD,
    ) -> None:  # fmt: skip
        self.library_path = tuple(folder or "." for folder in re.split("[:;]", library_path)) if library_path else ()
        self.cache = cache or {}
        self.standard = tuple(folder.format(multiarch=multiarch()) for folder in standard)
        self.loaded: dict[str, str] = dict(mapped or {})
        self.fallback: dict[str, str] = {}
        """Name to file for what a package loads by its full path before it is needed (its own libraries)."""
        self._read: dict[str, SharedObject | ElfError] = {}

    def object(self, path: str) -> SharedObject:
        """Read an object, once for every real file.

        Raises:
            ElfError: see :func:`read`.
        """
        real = os.path.realpath(path)
        if real not in self._read:
            try:
                self._read[real] = read(real)
            except ElfError as error:
                self._read[real] = error
        found = self._read[real]
        if isinstance(found, ElfError):
            raise found
        return found

    @property
    def count(self) -> int:
        """How many files were read."""
        return len(self._read)

    def load(self, path: str, *, keep: bool = True) -> Loaded:
        """Follow what an object needs, breadth first as the loader does, and note what nothing provides.

        Args:
            path: the object.
            keep: whether what was found counts as loaded for the next call.
        """
        result, before = Loaded(), dict(self.loaded)
        try:
            first = self.object(path)
        except ElfError as error:
            result.errors[path] = str(error)
            return result
        queue: deque[tuple[SharedObject, tuple[SharedObject, ...]]] = deque([(first, ())])
        seen = {first.path}
        while queue:
            one, loaders = queue.popleft()
            result.objects.append(one)
            if one.soname:
                self.loaded.setdefault(one.soname, one.path)
            for name in one.needed:
                if name in self.loaded:
                    continue  # its own needs were looked at when it was loaded
                file = self.find(name, one, loaders)
                if file is None:
                    result.missing.setdefault(one.path, []).append(name)
                    continue
                self.loaded.setdefault(Path(name).name, file)
                self._follow(file, one, loaders, queue, seen, result)
        if not keep:
            self.loaded = before
        return result

    def _follow(
        self, file: str, parent: SharedObject, loaders: tuple[SharedObject, ...],
        queue: deque[tuple[SharedObject, tuple[SharedObject, ...]]], seen: set[str], result: Loaded,
    ) -> None:  # fmt: skip
        try:
            found = self.object(file)
        except ElfError as error:
            result.errors[file] = str(error)
            return
        if found.path not in seen:
            seen.add(found.path)
            queue.append((found, (parent, *loaders)))

    def find(self, name: str, wanted_by: SharedObject, loaders: tuple[SharedObject, ...] = ()) -> str | None:
        """File that provides a NEEDED name for an object, or None."""
        if "/" in name:
            return name if Path(name).is_file() else None
        for candidate in self._candidates(name, wanted_by, loaders):
            if self._fits(candidate, wanted_by):
                return candidate
        return self.fallback.get(name)

    def _candidates(self, name: str, wanted_by: SharedObject, loaders: tuple[SharedObject, ...]) -> Iterator[str]:
        for folder in self.folders(wanted_by, loaders):
            yield f"{folder}/{name}"
        yield from self.cache.get(name, ())
        for folder in self.standard:
            yield f"{folder}/{name}"

    def folders(self, wanted_by: SharedObject, loaders: tuple[SharedObject, ...] = ()) -> Iterator[str]:
        """Folders searched before the cache, in the loader's order."""
        if not wanted_by.runpath:
            for one in (wanted_by, *loaders):
                if not one.runpath:
                    yield from one.rpath
        yield from self.library_path
        yield from wanted_by.runpath

    @staticmethod
    def _fits(path: str, wanted_by: SharedObject) -> bool:
        """Whether the file is ELF of the same word size: the loader passes over a 32-bit library of the same name."""
        try:
            with open(path, "rb") as stream:
                head = stream.read(5)
        except OSError:
            return False
        return not head.startswith(b"\x7fELF") or head[4:5] == (b"\x02" if wanted_by.bits == 64 else b"\x01")
