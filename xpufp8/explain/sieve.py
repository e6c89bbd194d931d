"""Which parts of a log are read line by line. The first megabytes are, whole; after that only what is new and suspicious.

A server's log repeats itself. A block is split into lines, digits are taken out, and lines of a shape that was seen before are
dropped by set arithmetic in C. What remains is searched for a few words, and only the surroundings of lines that hold one
are handed on. How much may be handed on grows with what was scanned, so time stays linear whatever the log holds.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from xpufp8.explain.reader import Block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WHOLE = 4 << 20
"""Bytes from the start that are read in full."""
SHARE = 64
"""After that, one byte in so many may be read around suspicious lines."""
BEFORE = 160
"""Lines read before a suspicious one: a traceback with its frames."""
AFTER = 60
NARROW = 3
"""Lines before and after, once the allowance is used up."""
REMEMBERED = 8 << 20
"""Bytes of line shapes that are remembered, twice."""
STRONG_BYTES = 16 << 20
"""Bytes of suspicious lines that are still searched for a signature's words once the allowance is used up."""
LONG = 8 * 1024
"""A line above this is not read whole, but around the words of signatures."""
AROUND = 2048
BESIDE = 300
"""Bytes before and after a suspicious word in which a signature's words are looked for."""
PLACES = 16
SPOTS = 64
"""Places of one word that are looked at in a long line."""

WORDS = (
    b"error", b"exception", b"unsupported", b"not support", b"failed", b"warning:", b"cannot ", b"attribute", b"abort", b"killed",
    b"available", b"fault", b"reset", b"|ccl_", b"ocloc", b"finish_reason", b"llm engine", b"startup complete",
)  # fmt: skip
"""In lower case. Every signature's literal must come with one of them in its line (a test checks it)."""
_DIGITS = b"0123456789"


class Sieve:
    """Hands on the blocks, or the parts of them, that deserve to be read."""

    def __init__(self, strong: Sequence[str] = ()) -> None:
        self.scanned = 0
        self.handed = 0
        self.unread = 0
        """Suspicious lines that were left out because the allowance was used up."""
        self._strong = tuple(literal.lower().encode() for literal in strong)
        """Literals of signatures: a line that holds one is read even when the allowance is used up."""
        self._checked = 0
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._weight = 0
        self._passed: tuple[Block, int] | None = None
        """The block before, and the index of its first line that was not handed on."""
        self._follow = 0
        """Lines still to hand on after a suspicious one."""

    def select(self, blocks: Iterator[Block]) -> Iterator[Block]:
        """The blocks to read, in order, none overlapping another."""
        for block in blocks:
            whole = self.scanned < WHOLE
            self.scanned += len(block.data)
            shapes = block.data.translate(None, _DIGITS).split(b"\n")
            if whole:
                self._fresh(shapes)
                self.handed += len(block.data)
                self._follow = AFTER
                yield block
                continue
            hot = self._hot(shapes)
            if hot or self._follow:
                yield from self._around(block, hot)
            else:
                self._passed = (block, 0)

    def _fresh(self, shapes: list[bytes]) -> list[bytes]:
        """The shapes that were not seen before, which from now on are.

        Two generations: when the young one is full it becomes the old one, and what only the old one held is forgotten.
        """
        fresh = list(set(shapes).difference(self._young, self._old))
        self._young.update(fresh)
        self._weight += sum(map(len, fresh)) + 90 * len(fresh)
        if self._weight > REMEMBERED:
            self._old, self._young, self._weight = self._young, set(), 0
        return fresh

    def _hot(self, shapes: list[bytes]) -> list[int]:
        """Indices of lines that are new and hold one of the words."""
        fresh = self._fresh(shapes)
        if not fresh:
            return []
        joined = b"\n".join(fresh).lower()
        ends: list[int] = []
        chosen: set[bytes] = set()
        for word in WORDS:
            at = joined.find(word)
            while at >= 0:
                ends = ends or list(accumulate(len(line) + 1 for line in fresh))
                index = bisect_right(ends, at)
                chosen.add(fresh[index])
                at = joined.find(word, ends[index])
        return [index for index, shape in enumerate(shapes) if shape in chosen] if chosen else []

    def _around(self, block: Block, hot: list[int]) -> Iterator[Block]:
        """The lines around the hot ones, the end of the block before included."""
        lines = block.data.split(b"\n")
        if lines and not lines[-1]:
            lines.pop()
        ranges: list[list[int]] = [[0, self._follow]] if self._follow else []
        self._follow = 0
        budget = WHOLE + (self.scanned - WHOLE) // SHARE - self.handed
        for index in hot:
            if len(lines[index]) > LONG:
                lines[index] = self._shortened(lines[index])
            before, after = (BEFORE, AFTER) if budget > 0 else (NARROW, NARROW)
            if not lines[index] or (budget <= 0 and not self._is_strong(lines[index])):
                self.unread += bool(lines[index])
                continue
            begin, end = index - before, index + 1 + after
            if ranges and begin <= ranges[-1][1]:
                begin = ranges[-1][1]
                ranges[-1][1] = max(end, begin)
            else:
                ranges.append([begin, end])
            budget -= sum(map(len, lines[max(0, begin) : end]))
        for begin, end in ranges:
            yield from self._look_back(-begin)
            self._passed = None
            data = b"\n".join(lines[max(0, begin) : end]) + b"\n"
            self.handed += len(data)
            yield Block(data, block.first + max(0, begin))
        reached = ranges[-1][1] if ranges else 0
        self._follow = max(0, reached - len(lines))
        self._passed = (block, reached) if reached < len(lines) else None

    def _look_back(self, count: int) -> Iterator[Block]:
        """The last ``count`` lines of the block before, as far as they were not handed on."""
        if self._passed is None or count <= 0:
            return
        block, first = self._passed
        lines = block.data.removesuffix(b"\n").split(b"\n")
        begin = max(first, len(lines) - count)
        if begin < len(lines):
            data = b"\n".join(lines[begin:]) + b"\n"
            self.handed += len(data)
            yield Block(data, block.first + begin)

    def _is_strong(self, line: bytes) -> bool:
        """True for a line with a signature's words, as long as there is allowance for looking."""
        if self._checked > STRONG_BYTES + (self.scanned - WHOLE) // SHARE:
            return False
        self._checked += len(line)
        lowered = line.lower()
        return any(literal in lowered for literal in self._strong)

    def _shortened(self, line: bytes) -> bytes:
        """Of a very long line what stands around a signature's words; empty when it holds none."""
        lowered = line.lower()
        spots: list[int] = []
        for word in WORDS:
            at = lowered.find(word)
            for _ in range(SPOTS):
                if at < 0:
                    break
                spots.append(at)
                at = lowered.find(word, at + BESIDE)
        kept: list[bytes] = []
        end = 0
        for at in sorted(spots):
            begin = max(end, at - BESIDE)
            end = max(end, at + BESIDE)
            if len(kept) < PLACES and any(literal in lowered[begin:end] for literal in self._strong):
                end = max(end, at + AROUND)
                kept.append(line[begin:end])
        return b" ".join(kept)
