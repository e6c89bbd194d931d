"""Bytes of any log, as blocks that end at a line end: gzip unpacked, UTF-16 turned into UTF-8, memory bounded.

A block carries the number of its first line. A line too long for a block comes in pieces that overlap, all with the same
number, so that an error inside a line of 100 MB is still seen whole.
"""

from __future__ import annotations

import codecs
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 256 * 1024
"""Bytes asked of the stream at a time."""
LONGEST = 64 * 1024
"""A line is cut into pieces of this many bytes."""
OVERLAP = 4 * 1024
"""Bytes that the pieces of one long line share."""

GZIP_MAGIC = b"\x1f\x8b"
_WIDE = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass(frozen=True)
class Block:
    """Some whole lines, or a piece of one."""

    data: bytes
    first: int
    """Number of the first line in it, from 1."""


@dataclass
class Source:
    """A log being read. ``size`` (bytes) and ``lines`` count what was read, unpacked."""

    stream: BinaryIO
    size: int = 0
    lines: int = 0
    note: str = ""
    """What was wrong with the stream itself: a gzip file that ends early."""

    def chunks(self) -> Iterator[bytes]:
        """Unpacked UTF-8 bytes."""
        head = self.stream.read(CHUNK)
        while 0 < len(head) < 2:
            more = self.stream.read(CHUNK)
            if not more:
                break
            head += more
        if head.startswith(GZIP_MAGIC):
            yield from self._unpacked(head)
            return
        wide = _WIDE.get(head[:2])
        decoder = codecs.getincrementaldecoder(wide)("replace") if wide else None
        chunk = head[2:] if wide else head.removeprefix(codecs.BOM_UTF8)
        while chunk:
            yield decoder.decode(chunk).encode("utf-8", "replace") if decoder else chunk
            chunk = self.stream.read(CHUNK)

    def _unpacked(self, head: bytes) -> Iterator[bytes]:
        """Members of a gzip stream, one after another; a damaged one ends the reading, not the program."""
        unpacker = zlib.decompressobj(wbits=31)
        data = head
        try:
            while data:
                yield unpacker.decompress(data, CHUNK)
                data = unpacker.unconsumed_tail
                if unpacker.eof:
                    data = unpacker.unused_data.lstrip(b"\0") or self.stream.read(CHUNK).lstrip(b"\0")
                    if not data.startswith(GZIP_MAGIC[:1]):
                        return
                    unpacker = zlib.decompressobj(wbits=31)
                elif not data:
                    data = self.stream.read(CHUNK)
            self.note = "the gzip stream ends early"
        except zlib.error as exc:
            self.note = f"the gzip stream is damaged ({exc})"

    def blocks(self) -> Iterator[Block]:
        """Blocks of whole lines, and pieces of lines that are longer than ``LONGEST``."""
        rest = b""
        for chunk in self.chunks():
            self.size += len(chunk)
            data = rest + chunk if rest else chunk
            end = data.rfind(b"\n") + 1
            if end:
                yield from self._whole(data[:end])
            rest = data[end:]
            while len(rest) > LONGEST:
                yield Block(rest[:LONGEST], self.lines + 1)
                rest = rest[LONGEST - OVERLAP :]
        if rest:
            yield Block(rest, self.lines + 1)
            self.lines += 1

    def _whole(self, data: bytes) -> Iterator[Block]:
        first = self.lines + 1
        self.lines += data.count(b"\n")
        yield Block(data, first)
