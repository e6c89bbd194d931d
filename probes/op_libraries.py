"""Reads the op schemas that stand as text in a shared object, without loading it.

``TORCH_LIBRARY(ns, m) { m.def("name(Tensor a) -> Tensor", &fn); … }`` leaves three traces in the file: the schema as a
NUL-terminated string in read-only data, a function ``TORCH_LIBRARY_init_<ns>`` whose code loads the address of that string, and a
static object ``TORCH_LIBRARY_static_init_<ns>``. The namespace of an op is therefore a fact of the binary, not of the file name:
``_C.abi3.so`` of vllm-xpu-kernels registers both ``_C`` and ``_C_cache_ops``. It is decided, best first, by

* ``registration function``: the string is loaded by the code of ``TORCH_LIBRARY_init_<ns>`` (``_FRAGMENT_``, ``STABLE_`` too);
* ``static initialiser``: the compiler has folded that function into the file's initialiser, which names the namespace's static
  object before it loads the strings of that namespace;
* ``file name``: symbols are stripped or the machine is not x86-64; then the stem of the file, as vLLM's build names it.

Addresses are found by reading the displacement of every ``lea reg, [rip + disp32]``: no disassembler is needed, and a wrong hit
would have to point exactly at the start of a schema.
"""

from __future__ import annotations

import bisect
import re
import struct
from pathlib import Path
from typing import IO, Any

from probes.op_schemas import OpSchema, SchemaError, parse

_STRING = re.compile(rb"(?<![^\x00])[A-Za-z_\s][^\x00]{5,}(?=\x00)")
_SCHEMA_SHAPE = re.compile(rb"\s*(?:\w+::)?\w+(?:\.\w+)?\s*\([^\x00]*\)\s*->\s*[\w(]")
_LEA = re.compile(rb"[\x48\x4c]\x8d[\x05\x0d\x15\x1d\x25\x2d\x35\x3d](....)", re.DOTALL)
_REGISTRATION = re.compile(r"(?:STABLE_)?TORCH_LIBRARY_(FRAGMENT_)?(static_)?init_(\w+)")
_FUNCTION = 2
_EXECUTABLE = 0x4
_SYMBOL = struct.Struct("<IBBHQQ")


def read_library(path: str | Path) -> list[OpSchema]:
    """Op schemas of one shared object, in the order in which its code registers them.

    Raises:
        ValueError: the file is not an ELF object.
        OSError: it cannot be read.
    """
    with open(path, "rb") as stream:
        return read_stream(stream, str(path))


def read_stream(stream: IO[bytes], library: str) -> list[OpSchema]:
    """The same from an open file (a member of a wheel). ``library`` is what the ops name as their origin.

    Raises:
        ValueError: it is not an ELF object.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        elf = ELFFile(stream)
        strings = _schema_strings(elf)
        if not strings:
            return []
        symbols = _Symbols(elf)
        loads = _loads(elf, {*strings, *symbols.static}) if elf.get_machine_arch() == "x64" else []
    except ELFError as exc:
        raise ValueError(f"{library} is not an ELF object: {exc}") from exc
    return _attribute(strings, symbols, loads, library)


def default_namespace(library: str) -> str:
    """Namespace that a library's file name suggests: ``pkg/_xpu_C.abi3.so`` gives ``_xpu_C``."""
    stem = Path(library).name.split(".")[0]
    return stem.removeprefix("lib").replace("-", "_")


def _schema_strings(elf: Any) -> dict[int, str]:
    """Address to schema, for every NUL-terminated string of the read-only data that parses as one."""
    found: dict[int, str] = {}
    for section in elf.iter_sections():
        if section["sh_type"] != "SHT_PROGBITS" or not section.name.startswith((".rodata", ".data.rel.ro")):
            continue
        data = section.data()
        for match in _STRING.finditer(data):
            text = match.group()
            # Cheap shape first: kernels leave hundreds of thousands of other strings.
            if b"->" not in text or not _SCHEMA_SHAPE.match(text):
                continue
            try:
                found[section["sh_addr"] + match.start()] = parse(text.decode("utf-8")).text
            except (SchemaError, UnicodeDecodeError):
                continue
    return found


class _Symbols:
    """Functions of the object by address, and the static objects that stand for namespaces."""

    def __init__(self, elf: Any) -> None:
        self.static: dict[int, str] = {}
        """Address of ``TORCH_LIBRARY_static_init_<ns>`` to the namespace."""
        self._starts: list[int] = []
        self._functions: list[tuple[int, int, str | None]] = []
        table = elf.get_section_by_name(".symtab")
        if table is None or elf.elfclass != 64 or not elf.little_endian:
            return
        names = elf.get_section(table["sh_link"]).data()
        mark = b"TORCH_LIBRARY_"
        for name_at, info, _, _, value, size in _SYMBOL.iter_unpack(table.data()):
            name = names[name_at : names.find(b"\x00", name_at)] if value else b""
            registered = _namespace_of(name.decode("utf-8", "replace")) if mark in name else None
            if registered is not None and registered[0]:
                self.static[value] = registered[1]
            elif info & 0xF == _FUNCTION and size:
                self._functions.append((value, size, registered[1] if registered else None))
        self._functions.sort(key=lambda function: function[0])
        self._starts = [function[0] for function in self._functions]

    def function_at(self, address: int) -> tuple[int, str | None] | None:
        """Start of the function that holds an address and, for a registration function, its namespace."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start, size, namespace = self._functions[at]
        return (start, namespace) if address < start + size else None


def _namespace_of(symbol: str) -> tuple[bool, str] | None:
    """Whether a registration symbol is the static object, and its namespace; None for another symbol.

    The Itanium mangling writes the length before a name (``_ZL21TORCH_LIBRARY_init__CRN5torch7LibraryE``), so a namespace ends
    where it ends, whatever letters follow.
    """
    at = symbol.find("TORCH_LIBRARY_")
    at = at - len("STABLE_") if symbol[:at].endswith("STABLE_") else at
    length = re.search(r"(\d+)$", symbol[:at])
    name = symbol[at : at + int(length.group(1))] if length else symbol[at:]
    match = _REGISTRATION.fullmatch(name)
    if match is None:
        return None
    fragment, static, namespace = match.groups()
    # A fragment ends in the counter that makes its name unique.
    return bool(static), re.sub(r"_\d+$", "", namespace) if fragment else namespace


def _loads(elf: Any, wanted: set[int]) -> list[tuple[int, int]]:
    """(code address, data address) of each instruction that loads one of the wanted addresses, in order of the code."""
    found: list[tuple[int, int]] = []
    for section in elf.iter_sections():
        if section["sh_type"] != "SHT_PROGBITS" or not section["sh_flags"] & _EXECUTABLE:
            continue
        base = section["sh_addr"]
        for match in _LEA.finditer(section.data()):
            target = base + match.end() + int.from_bytes(match.group(1), "little", signed=True)
            if target in wanted:
                found.append((base + match.start(), target))
    return found


def _attribute(strings: dict[int, str], symbols: _Symbols, loads: list[tuple[int, int]], library: str) -> list[OpSchema]:
    """Give each schema its namespace, in the order of registration."""
    ops: dict[int, OpSchema] = {}
    static: tuple[int, str] | None = None
    for code, target in loads:
        function = symbols.function_at(code)
        if target in symbols.static:
            static = (function[0] if function else -1, symbols.static[target])
            continue
        if function is not None and function[1] is not None:
            op = OpSchema(function[1], strings[target], library, "registration function")
        elif function is not None and static is not None and static[0] == function[0]:
            op = OpSchema(static[1], strings[target], library, "static initialiser")
        else:
            continue
        ops.setdefault(target, op)
    namespace = default_namespace(library)
    for address, text in strings.items():
        ops.setdefault(address, OpSchema(namespace, text, library, "file name"))
    return list(ops.values())
