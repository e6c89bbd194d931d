"""Whether the symbols that an extension takes from torch are exported by the torch that is installed.

A package built for another torch release loads only if every C++ symbol that it uses still exists; otherwise the import ends with
``undefined symbol: _ZN3c10…``. Symbol tables are read directly from the file (pyelftools builds an object for each of hundreds of
thousands of symbols, which takes seconds), through the GNU hash table that the dynamic loader itself uses.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from probes.elf import SharedObject

TORCH_SYMBOL = re.compile(
    rb"_Z(?:N|NK|TI|TV|TS|ZN)+(?:3c10|2at|5torch|6caffe2)|aoti_torch_|torch_(?:library|call|delete|get|new|dtype)_"
)
"""Symbols that only torch's own libraries can define."""

_ENTRY = struct.Struct("<IBBHQQ")
"""Elf64_Sym: name, info, other, section, value, size."""
LAYOUTS = frozenset({"x64", "AArch64", "RISC-V"})
"""Machines whose shared objects here are 64-bit and little-endian, as the structures below say."""
_UNDEFINED = 0
_GLOBAL = 1


@dataclass
class SymbolTable:
    """The dynamic symbol table of one 64-bit little-endian object, mapped."""

    data: mmap.mmap
    symbols: int
    strings: int
    buckets: int
    bucket_count: int
    first: int
    chains: int
    bloom: int
    bloom_words: int
    bloom_shift: int

    def name(self, offset: int) -> bytes:
        """The string at an offset of the string table."""
        start = self.strings + offset
        return self.data[start : self.data.find(b"\0", start)]

    def wanted(self) -> Iterator[bytes]:
        """Strong undefined symbols. They stand before the hashed ones, which are the defined."""
        for index in range(1, self.first):
            name, info, _, section, _, _ = _ENTRY.unpack_from(self.data, self.symbols + index * _ENTRY.size)
            if section == _UNDEFINED and info >> 4 == _GLOBAL:
                yield self.name(name)

    def exports(self, name: bytes, code: int) -> bool:
        """Whether a symbol is defined here. ``code`` is its GNU hash."""
        if not self.bucket_count:
            return False
        (word,) = struct.unpack_from("<Q", self.data, self.bloom + 8 * ((code // 64) % self.bloom_words))
        if not (word >> (code % 64)) & (word >> ((code >> self.bloom_shift) % 64)) & 1:
            return False
        (index,) = struct.unpack_from("<I", self.data, self.buckets + 4 * (code % self.bucket_count))
        while index >= self.first:
            (chain,) = struct.unpack_from("<I", self.data, self.chains + 4 * (index - self.first))
            if chain | 1 == code | 1:
                entry, _, _, section, _, _ = _ENTRY.unpack_from(self.data, self.symbols + index * _ENTRY.size)
                if section != _UNDEFINED and self.name(entry) == name:
                    return True
            if chain & 1:
                return False
            index += 1
        return False


@contextmanager
def mapped(one: SharedObject) -> Iterator[SymbolTable | None]:
    """The symbol table of an object while the block runs; None when it has no GNU hash table or another layout."""
    if one.machine not in LAYOUTS or one.symbols_at is None or one.strings_at is None or one.hash_at is None:
        yield None
        return
    with open(one.path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        count, first, words, shift = struct.unpack_from("<IIII", data, one.hash_at)
        bloom = one.hash_at + 16
        buckets = bloom + 8 * words
        yield SymbolTable(data, one.symbols_at, one.strings_at, buckets, count, first, buckets + 4 * count, bloom, words, shift)


def gnu_hash(name: bytes) -> int:
    """The loader's hash of a symbol name."""
    code = 5381
    for character in name:
        code = (code * 33 + character) & 0xFFFFFFFF
    return code


def undefined(one: SharedObject, providers: Iterable[SharedObject]) -> list[str]:
    """Symbols of torch that an object needs and none of the providers exports, sorted.

    Args:
        one: the extension.
        providers: torch's libraries and whatever else the extension brings in.
    """
    with mapped(one) as table:
        if table is None:
            return []
        wanted = {name: gnu_hash(name) for name in table.wanted() if TORCH_SYMBOL.match(name)}
    for provider in providers:
        if not wanted:
            break
        with mapped(provider) as exporting:
            if exporting is not None:
                wanted = {name: code for name, code in wanted.items() if not exporting.exports(name, code)}
    return sorted(name.decode("utf-8", "replace") for name in wanted)
