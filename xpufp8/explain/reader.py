"""Bytes of any log, as blocks that end at a line end: gzip unpacked, UTF-16 turned into UTF-8, memory bounded.

A block carries the number of its first line. A line too long for a block comes in pieces that overlap, all with the same
number, so that an error inside a line of 100 MB is still seen whole.
"""

from __future__ import annotations

import codecs
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from xpufp8.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 256 * 1024
"""Bytes asked of the stream at a time."""
LONGEST = 64 * 1024
"""A line is cut into pieces of this many bytes."""
OVERLAP = 4 * 1024
"""Bytes that the pieces of one long line share."""

GZIP_MAGIC = b"\x1f\x8b"
PACKED = (
    (b"\xfd7zXZ\0", "xz data", "xz -dc"), (b"PK\x03\x04", "a zip archive", "unzip -p"), (b"PK\x05\x06", "a zip archive", "unzip -p"),
    (b"BZh", "bzip2 data", "bzip2 -dc"), (b"\x28\xb5\x2f\xfd", "zstd data", "zstd -dc"), (b"\x04\x22\x4d\x18", "lz4 data", "lz4 -dc"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x -so"), (b"Rar!\x1a\x07", "a rar archive", "unrar p"),
    (b"\x1f\x9d", "compress data", "zcat"), (GZIP_MAGIC, "gzip data inside gzip", "zcat FILE | zcat"),
)  # fmt: skip
"""How packed files begin, what they are, and what unpacks them to stdout."""
SAMPLE = 64 * 1024
"""Bytes from the start that tell a log from something else."""
STRANGE = 0.3
"""Share of characters that no text has, above which it is none. NUL bytes do not count: UTF-16 and dying machines write them."""
_NO_TEXT = re.compile(r"[\x01-\x07\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
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
    name: str = "LOG"
    size: int = 0
    lines: int = 0
    note: str = ""
    """What was wrong with the stream itself: a gzip file that ends early."""

    def chunks(self) -> Iterator[bytes]:
        """Unpacked UTF-8 bytes.

        Raises:
            UsageError: this is no log: an archive, another packing than gzip, binary data.
        """
        head = self.stream.read(CHUNK)
        while 0 < len(head) < 2:
            more = self.stream.read(CHUNK)
            if not more:
                break
            head += more
        if head.startswith(GZIP_MAGIC):
            unpacked = self._unpacked(head)
            first = b""
            for chunk in unpacked:
                first += chunk
                if len(first) >= 512:  # where a tar archive says that it is one
                    break
            refuse(first, self.name)
            yield first
            yield from unpacked
            return
        refuse(head, self.name)
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
        while data:
            before = unpacker.copy()
            try:
                yield unpacker.decompress(data, CHUNK)
            except zlib.error as exc:
                yield from _salvaged(before, data)
                self.note = f"the gzip stream is damaged ({str(exc).rpartition(': ')[2]})"
                return
            data = unpacker.unconsumed_tail
            if unpacker.eof:
                data = unpacker.unused_data.lstrip(b"\0") or self.stream.read(CHUNK).lstrip(b"\0")
                if not data.startswith(GZIP_MAGIC[:1]):
                    self.note = "what follows the gzip stream is none" if data else ""
                    return
                unpacker = zlib.decompressobj(wbits=31)
            elif not data:
                data = self.stream.read(CHUNK)
        self.note = "the gzip stream ends early"

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


def _salvaged(unpacker: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    """What a damaged piece holds before the damage: zlib gives it only when it is fed byte by byte."""
    found = []
    for at in range(len(data)):
        try:
            found.append(unpacker.decompress(data[at : at + 1]))
        except zlib.error:
            break
    yield b"".join(found)


def refuse(head: bytes, name: str) -> None:
    """See by its first bytes that something is no log.

    Raises:
        UsageError: it is packed, an archive, or no text.
    """
    for magic, what, tool in PACKED:
        if head.startswith(magic) and (magic != b"BZh" or head[4:10] == b"1AY&SY"):
            raise UsageError(f"LOG {name}: {what}, not a log; unpack it ({tool} FILE | xpufp8 explain -).")
    if head[257:262] == b"ustar":
        raise UsageError(f"LOG {name}: a tar archive, not a log; unpack it (tar -xOf FILE | xpufp8 explain -).")
    wide = _WIDE.get(head[:2])
    sample = head[:SAMPLE].replace(b"\0", b"") if wide is None else head[2 : SAMPLE + 2]
    text = sample.decode(wide or "utf-8", "replace")
    if head.startswith(b"\x7fELF") or len(_NO_TEXT.findall(text)) > STRANGE * len(text):
        raise UsageError(
            f"LOG {name}: binary data, not a log. Give the text that the server wrote; a packed log has to be unpacked."
        )
