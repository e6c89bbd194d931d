"""Signatures against lines: each line together with the two that follow it from the same process, blanks aside."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from xpufp8.explain.signatures import squeeze

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpufp8.explain.signatures import Knowledge, Pattern, Signature
    from xpufp8.explain.structure.prefixes import Line

AHEAD = 2
"""Lines after the first that a match may reach into."""
WRAPPED = 60
"""Characters from which on a line may have been wrapped by a terminal or a forum."""
REACH = 3000
"""Squeezed characters on either side of a literal that a pattern sees."""
PROCESSES = 500
"""Processes whose last lines are kept; the one that was seen first is let go."""
SHAPES = 20_000
"""Line shapes whose candidates are remembered."""
LONGEST_SHAPE = 400
"""Characters of a line that is remembered."""
_BARE = frozenset({"context", "health", "stop"})
"""Kinds of which only the place matters."""
_NO_DIGITS = str.maketrans("", "", "013456789")
# The 2 stays: "200 OK" and "os error 28" are literals, and a status of another hundred must not pass for them.
KEPT = 40
"""Matches kept of one signature; later ones are only counted. Those of a context keep the first and the last of them."""

_TYPE = r"(?:[A-Za-z_]\w{0,60}\.){0,12}[A-Z]\w{1,80}"
_NAMED = r"(?:Error|Exception|Unsupported|Interrupt|Failure|OutOfResources|Exit)"
_HEAD = re.compile(
    rf"[\s>*#•·\-\"'`|(\[+:\d\]]{{0,12}}(?:{_TYPE}{_NAMED}:|Value error,|Assertion failed,|what\(\):|terminate called|oneCCL:|Error:"
    r"|Fatal Python error:"
    r"|[\w./-]{0,60}:? ?(?:fatal )?error:)"
)
"""A line that is an error message from its first word on."""
_LEADS = re.compile(rf"[\s>*#•·\-\"'`|(\[+:\d\]]{{0,12}}(?:{_TYPE}:\s{{0,3}}|The\s{{1,3}})?[\"'`]{{0,2}}$")
"""What may stand before a message that is still the head of its line."""
_QUOTED = re.compile(rf"(?:{_TYPE}{_NAMED}:\s{{0,3}}|with error\s{{0,3}}|[Ee]rror(?: message)?:\s{{0,3}})[\"'`]{{0,2}}$")
"""What stands before an error message that somebody quotes in full."""
_OTHER_REPORT = re.compile(
    r"\b[\w.-]{1,60}/[\w.-]{1,60}#\d{1,7}|/(?:issues|pull|discussions)/\d{1,7}|\b(?:see|like|similar to|same as) #\d{2,7}"
)


@dataclass(frozen=True)
class Match:
    """A signature seen at some lines."""

    signature: Signature
    lines: tuple[Line, ...]
    """The lines that the match spans."""
    start: int
    """Column in the first line."""
    groups: dict[str, str] = field(hash=False)
    decisive: bool = True
    """False for a mention: prose about an error, an INFO line, a reference to another report."""

    @property
    def first(self) -> int:
        """Number of the first line."""
        return self.lines[0].number

    @property
    def level(self) -> str:
        """Level of the first line."""
        return self.lines[0].level

    @property
    def process(self) -> str:
        """Who wrote the first line."""
        return self.lines[0].process


@dataclass
class _Window:
    """The last lines of one process."""

    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=AHEAD + 1))
    squeezed: deque[str] = field(default_factory=lambda: deque(maxlen=AHEAD + 1))
    candidates: deque[list[tuple[Signature, Pattern]]] = field(default_factory=lambda: deque(maxlen=AHEAD + 1))
    """Of each line, the patterns whose literal stands in it."""


class Matcher:
    """Feed it lines in order; it keeps what matched."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.matches: list[Match] = []
        self.counts: dict[str, int] = {}
        self._patterns: list[tuple[Signature, Pattern]] = [
            (signature, pattern) for signature in knowledge.signatures for pattern in signature.patterns
        ]
        self._longest = max((len(pattern.literal) for _, pattern in self._patterns), default=1)
        self._shapes: dict[str, list[tuple[Signature, Pattern]]] = {}
        self._windows: dict[str, _Window] = {}
        self._last = ""
        self._seen: set[tuple[str, int, int]] = set()
        self._kept: dict[str, deque[Match]] = {}

    def feed(self, line: Line) -> None:
        """Take the next line of the log."""
        text = squeeze(line.text)
        if not text:
            return
        process = line.process
        if not process and not line.logged and self._last in self._windows:
            process = self._last
        self._last = process
        window = self._windows.setdefault(process, _Window())
        if len(window.lines) == AHEAD + 1:
            self._match(window)
        window.lines.append(line)
        window.squeezed.append(text)
        window.candidates.append(self._candidates(text))
        if len(self._windows) > PROCESSES:
            self._drain(self._windows.pop(next(iter(self._windows))))

    def finish(self) -> None:
        """The log has ended: match what waits for more lines."""
        for window in self._windows.values():
            self._drain(window)
        self.matches.extend(match for kept in self._kept.values() for match in kept)
        self.matches.sort(key=lambda match: match.first)

    def _drain(self, window: _Window) -> None:
        while window.lines:
            self._match(window)
            window.lines.popleft()
            window.squeezed.popleft()
            window.candidates.popleft()

    def _match(self, window: _Window) -> None:
        """Match what begins in the first line of the window."""
        head = window.squeezed[0]
        candidates = window.candidates[0]
        if len(window.lines) > 1 and not window.lines[1].logged:
            # The next line may be the rest of this one: a pattern may begin here and find its literal there, or at the seam.
            more = [one for one in window.candidates[1] if one not in candidates]
            candidates = candidates + more
            candidates = candidates + self._across(head, window.squeezed[1], candidates)
        if not candidates:
            return
        text = "".join(window.squeezed)
        for signature, pattern in candidates:
            at = text.find(pattern.literal)
            while at >= 0:
                found = self._apply(signature, pattern, window, text, at, len(head))
                at = text.find(pattern.literal, at + REACH) if not found and len(text) > REACH else -1

    def _candidates(self, head: str) -> list[tuple[Signature, Pattern]]:
        """Patterns whose literal stands in a line; remembered by the line's shape, since logs repeat themselves."""
        shape = head.translate(_NO_DIGITS)
        known = self._shapes.get(shape)
        if known is None:
            known = [(signature, pattern) for signature, pattern in self._patterns if pattern.literal in head]
            if len(head) <= LONGEST_SHAPE:
                if len(self._shapes) >= SHAPES:
                    self._shapes.clear()
                self._shapes[shape] = known
        return known

    def _across(self, head: str, following: str, known: list[tuple[Signature, Pattern]]) -> list[tuple[Signature, Pattern]]:
        """Patterns whose literal was wrapped: it begins in one line and ends in the next."""
        seam = head[-self._longest :] + following[: self._longest]
        middle = min(len(head), self._longest)
        return [
            (signature, pattern) for signature, pattern in self._patterns
            if (at := seam.find(pattern.literal)) >= 0 and at < middle < at + len(pattern.literal) and (signature, pattern) not in known
        ]  # fmt: skip

    def _apply(self, signature: Signature, pattern: Pattern, window: _Window, text: str, at: int, head: int) -> bool:
        groups: dict[str, tuple[int, int]] = {}
        if pattern.regex is None:
            begin, end = at, at + len(pattern.literal)
        else:
            offset = max(0, at - REACH)
            match = pattern.regex.search(text, offset, at + REACH)
            if match is None:
                return False
            begin, end = match.span()
            groups = {name: match.span(name) for name, value in match.groupdict().items() if value is not None}
        if begin >= head:
            return False
        if signature.kind in _BARE:
            line = window.lines[0]
            if signature.quiet or _decisive(signature, line, 0):
                self._add(Match(signature, (line,), 0, {}))
            return True
        if self.counts.get(signature.name, 0) > 4 * KEPT:
            self.counts[signature.name] += 1
            return True
        lines, start, named = _locate(window, begin, end, groups, signature.phrases)
        key = (signature.name, lines[0].number, start // 50)
        if key in self._seen:
            return True
        if len(self._seen) < 100_000:
            self._seen.add(key)
        self._add(Match(signature, lines, start, named, decisive=_decisive(signature, lines[0], start)))
        return True

    def _add(self, match: Match) -> None:
        name = match.signature.name
        self.counts[name] = self.counts.get(name, 0) + 1
        if match.signature.kind in _BARE:
            if self.counts[name] <= KEPT:
                self.matches.append(match)
            else:
                self._kept.setdefault(name, deque(maxlen=KEPT)).append(match)
        elif self.counts[name] <= KEPT or (match.groups and self.counts[name] <= 4 * KEPT):
            self.matches.append(match)


def _locate(
    window: _Window, begin: int, end: int, groups: dict[str, tuple[int, int]], phrases: tuple[str, ...]
) -> tuple[tuple[Line, ...], int, dict[str, str]]:
    """From positions in the squeezed text back to lines, a column and the groups as they were written."""

    def at(position: int) -> tuple[int, int]:
        """Row and column of a squeezed position."""
        for row, squeezed in enumerate(window.squeezed):
            if position < len(squeezed):
                columns = (column for column, character in enumerate(window.lines[row].text) if not character.isspace())
                return row, next(islice(columns, position, None))
            position -= len(squeezed)
        return len(window.lines) - 1, len(window.lines[-1].text) - 1

    def written(first: int, last: int) -> tuple[int, str]:
        """Row of the first character, and the text between two positions."""
        (row, column), (end_row, end_column) = at(first), at(last - 1)
        if row == end_row:
            return row, window.lines[row].text[column : end_column + 1]
        between = [window.lines[index].text for index in range(row + 1, end_row)]
        return row, "\n".join((window.lines[row].text[column:], *between, window.lines[end_row].text[: end_column + 1]))

    opened, start = at(begin)
    named = {}
    for name, (first, last) in groups.items():
        row, value = written(first, last) if last > first else (0, "")
        named[name] = _phrase(value, row, window.lines) if name in phrases else _one_word(value, row, window.lines)
        if last == end:
            # What was cut off the group is no part of the match either.
            end = first + len("".join(named[name].split()))
    reached = at(max(begin, end - 1))[0]
    return tuple(window.lines)[opened : reached + 1], start, named


def _phrase(value: str, row: int, lines: Sequence[Line]) -> str:
    """A group of several words, up to the end of its line or of the lines that it was wrapped over."""
    parts = value.split("\n")
    words = parts[0].split()
    for offset, part in enumerate(parts[1:]):
        if not _wrapped(lines[row + offset], lines[row + offset + 1]):
            break
        words += part.split()
    return " ".join(words)


def _one_word(value: str, row: int, lines: Sequence[Line]) -> str:
    """A group up to its first blank; a line end does not count where the line was wrapped for want of width."""
    parts = value.split("\n")
    word = ""
    for part in parts:
        word += part.split(None, 1)[0] if part.split() else ""
        whole = len(part.split()) == 1 and part == part.rstrip()
        if not (whole and row < len(lines) - 1 and _wrapped(lines[row], lines[row + 1])):
            break
        row += 1
    return word


def _wrapped(line: Line, following: Line) -> bool:
    """True when the second line may be the rest of the first, cut at a width: the very next line, bare and no longer."""
    return (
        following.number == line.number + 1
        and not following.logged
        and not following.text[:1].isspace()
        and WRAPPED <= len(line.raw) >= len(following.raw)
    )


def _decisive(signature: Signature, line: Line, start: int) -> bool:
    """True when the line is the error itself, not talk about one."""
    if line.level in {"INFO", "DEBUG"}:
        return signature.quiet
    if line.logged or line.level in {"ERROR", "CRITICAL"}:
        return True
    before = line.text[max(0, start - 200) : start]
    heads = _HEAD.match(line.text) is not None
    if _OTHER_REPORT.search(line.text) and not heads:
        return False
    leads = start <= 200 and _LEADS.match(before) is not None
    return signature.prose or heads or leads or _QUOTED.search(before) is not None
