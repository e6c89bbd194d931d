"""One pass over a log of any size: read, sift, take lines apart, match, rebuild tracebacks, conclude."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from xpufp8.explain import signatures
from xpufp8.explain.conclude import Conclusion, conclude
from xpufp8.explain.matcher import Matcher
from xpufp8.explain.reader import Block, Source
from xpufp8.explain.sieve import Sieve
from xpufp8.explain.structure.deployment import Deployment
from xpufp8.explain.structure.prefixes import Line, parse, unwrap_json
from xpufp8.explain.structure.tracebacks import EXCEPTION, TracebackReader
from xpufp8.explain.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE = 8 * 1024
"""Characters of a long line that are looked at together."""
PIECE_OVERLAP = 1024
ERRORS_KEPT = 20
"""Lines of level ERROR kept from the start and from the end."""


@dataclass(frozen=True)
class Explanation:
    """What a log says, and what follows from it."""

    name: str
    lines: int
    size: int
    """Bytes of what was read, unpacked."""
    deployment: Deployment
    conclusion: Conclusion
    notes: tuple[str, ...] = ()
    """What bears on how far the log could be read."""
    damage: str = ""
    """Why the log is not there or not whole, as a sentence. What was never read may hold a failure."""

    @property
    def outcome(self) -> str:
        """``cause``, ``unknown`` or ``healthy``; a damaged or empty log is never healthy."""
        return "unknown" if self.damage and self.conclusion.outcome == "healthy" else self.conclusion.outcome


def explain_stream(stream: BinaryIO, *, name: str) -> Explanation:
    """Read a log to its end and say what it shows. Memory stays bounded and time linear, whatever the stream holds.

    Args:
        stream: bytes of a log, plain, gzipped or UTF-16; it is read once, forwards.
        name: what to call it in the report.

    Raises:
        OSError: the stream cannot be read.
        UsageError: it is no log but an archive, another packing than gzip, or binary data.
    """
    knowledge = signatures.load()
    source = Source(stream, name)
    sieve = Sieve([pattern.words for one in knowledge.signatures if one.kind == "cause" for pattern in one.patterns])
    matcher, tracebacks, deployment = Matcher(knowledge), TracebackReader(), Deployment()
    first_errors: list[Line] = []
    last_errors: deque[Line] = deque(maxlen=ERRORS_KEPT)
    for block in sieve.select(source.blocks()):
        for line in lines_of(block):
            matcher.feed(line)
            tracebacks.feed(line)
            deployment.read(line)
            if is_error(line):
                (first_errors if len(first_errors) < ERRORS_KEPT else last_errors).append(line)
    matcher.finish()
    tracebacks.finish()
    conclusion = conclude(matcher.matches, tracebacks.chains, [*first_errors, *last_errors], deployment, knowledge)
    notes = tuple(_notes(source, sieve, conclusion))
    return Explanation(name, source.lines, source.size, deployment, conclusion, notes, _damage(source))


def is_error(line: Line) -> bool:
    """True for a line that a logger marks as an error, and for an exception that was printed without one."""
    if line.level:
        return line.level in {"ERROR", "CRITICAL"} and bool(line.text.strip())
    match = EXCEPTION.match(line.text.strip()) if ":" in line.text[:120] and len(line.text) < PIECE else None
    return match is not None and match["type"].endswith(
        ("Error", "Exception", "Unsupported", "Failure", "Lost", "OutOfResources")
    )


def lines_of(block: Block) -> Iterator[Line]:
    """The lines of a block, taken apart. A carriage return inside a line (a progress bar) separates texts of one number."""
    number = block.first
    for raw in block.data.decode("utf-8", "replace").removesuffix("\n").split("\n"):
        for part in raw.split("\r") if "\r" in raw else (raw,):
            if part:
                yield from _line(number, part)
        if not raw.rstrip("\r"):
            yield Line(number, "")
        number += 1


def _line(number: int, raw: str) -> Iterator[Line]:
    for text in unwrap_json(raw).rstrip("\n").split("\n"):
        # Escaped line ends are what a traceback inside a JSON string, or of a structured logger, has.
        for part in text.replace('\\"', '"').split("\\n") if text.count("\\n") > 3 else (text,):
            cleaned = clean(part)
            if len(cleaned) <= PIECE:
                yield parse(number, cleaned)
                continue
            head = parse(number, cleaned)
            for start in range(0, len(head.text), PIECE - PIECE_OVERLAP):
                piece = head.text[start : start + PIECE]
                yield Line(number, piece, head.process, head.level, head.source, head.logged, piece)


def _damage(source: Source) -> str:
    if source.note:
        read = f"{source.lines} lines before that were read" if source.size else "nothing of it could be read"
        return f"{source.note[0].upper()}{source.note[1:]}; {read}."
    return "" if source.size else "The log is empty."


def _notes(source: Source, sieve: Sieve, conclusion: Conclusion) -> Iterator[str]:
    if damage := _damage(source):
        yield damage
    if sieve.unread:
        yield f"{sieve.unread} lines that speak of errors were not read one by one, because the log is full of them."
    if conclusion.mentions and conclusion.outcome == "healthy":
        yield "The text speaks of errors, but no line of it is one: nothing was concluded from that."
