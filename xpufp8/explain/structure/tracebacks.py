"""Python tracebacks, rebuilt a process at a time from lines that may be interleaved, prefixed, unindented or wrapped.

Chained exceptions are kept as a chain, cause first: the first member is where the trouble began, the last is what was
printed last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from probes.facts import Frame

if TYPE_CHECKING:
    from xpufp8.explain.structure.prefixes import Line

FRAME = re.compile(
    r"File \"(?P<file>[^\"]{1,400})\", line (?P<line>\d{1,7})(?:,? in (?P<function>.{1,200}))?$"
    r"|File (?P<nb_file>/\S{1,400}):(?P<nb_line>\d{1,7}), in (?P<nb_function>.{1,200})$"
)
HEADER = "Traceback (most recent call last)"
_NAMES = r"Error|Exception|Unsupported|Interrupt|Exit|Failure|Failed|Warning|Timeout|Group|Died|Lost|Signal|Abort|Refused|OutOfResources"
EXCEPTION = re.compile(
    rf"(?P<type>(?:[A-Za-z_]\w{{0,60}}\.){{0,12}}[A-Z]\w{{0,80}}(?:{_NAMES})|(?:[a-z_]\w{{0,60}}\.){{1,12}}[A-Z]\w{{1,80}})(?::\s?(?P<message>.*))?$"
)
"""The last line of a traceback: a class that is named like an exception, or any dotted class."""
CHAINS = {
    "The above exception was the direct cause of the following exception": "cause",
    "During handling of the above exception, another exception occurred": "context",
}
USER_CODE = "from user code"
_MARKERS = re.compile(r"[\s^~]{1,400}$")
PROCESSES = 500
"""Processes whose tracebacks are read at the same time."""
LIMIT = 300
"""Tracebacks kept of one log; those of the same shape count as one."""
LONGEST_MESSAGE = 60
"""Lines of a message that are kept."""
PATIENCE = 40
"""Lines after a message within which the next exception of the chain may be announced."""


@dataclass
class Traceback:
    """One exception as it was printed."""

    process: str
    first: int
    """Line number of its first line."""
    level: str = ""
    frames: list[Frame] = field(default_factory=list)
    frame_lines: list[int] = field(default_factory=list)
    type: str = ""
    """``module.Class``, empty when the log ends before it."""
    message: list[str] = field(default_factory=list)
    message_lines: list[int] = field(default_factory=list)
    """Line number of each line of the message."""
    line: int = 0
    """Line number of the exception itself."""
    last: int = 0
    relation: str = ""
    """How it follows the one before it in its chain: cause or context."""
    user_frames: list[Frame] = field(default_factory=list)
    """Frames that Dynamo prints under "from user code"."""

    @property
    def complete(self) -> bool:
        """True when the exception line was seen."""
        return bool(self.type)

    @property
    def name(self) -> str:
        """The class without its module."""
        return self.type.rsplit(".", 1)[-1]

    @property
    def shape(self) -> tuple[str, str, str, str]:
        """What two tracebacks of one fault share, whatever their process, time and numbers."""
        last = self.frames[-1] if self.frames else None
        place = f"{last.file}:{last.function}" if last else ""
        words = re.sub(r"\d+|0x[0-9a-f]+", "#", " ".join(self.message[:3]))[:200]
        return (self.type, words, place, str(len(self.frames)) if not self.type else "")


@dataclass
class Chain:
    """Exceptions of one event, the cause first."""

    members: list[Traceback]
    count: int = 1
    """How often it was seen, once in each worker for instance."""

    @property
    def root(self) -> Traceback:
        """The exception that the others followed from."""
        return self.members[0]

    @property
    def end(self) -> Traceback:
        """The exception that was printed last."""
        return self.members[-1]


@dataclass
class _Open:
    """A traceback being read."""

    traceback: Traceback
    partial: str = ""
    """Start of a frame line that was wrapped."""
    blank: int = 0
    source: str = ""
    logged: bool = False
    in_user_code: bool = False
    gap: int = 0
    """Lines in a row that were neither frame nor code."""
    over: bool = False
    """True when the message seems to have ended; what follows may still announce the next exception of the chain."""


class TracebackReader:
    """Feed it lines in order; it keeps the chains that it saw."""

    def __init__(self) -> None:
        self.chains: list[Chain] = []
        self.dropped = 0
        self._open: dict[str, _Open] = {}
        self._pending: dict[str, tuple[list[Traceback], str]] = {}
        """Process to the chain whose next member is announced, and how it relates."""
        self._shapes: dict[tuple[tuple[str, str, str, str], ...], Chain] = {}
        self._last_process = ""

    def feed(self, line: Line) -> None:
        """Take the next line of the log."""
        process = line.process
        if not process and not line.logged and self._last_process in self._open:
            # A bare line right after a prefixed one is its continuation: wrapped, or printed past the logger.
            process = self._last_process
        else:
            self._last_process = process
        text = line.text.strip()
        state = self._open.get(process)
        if HEADER in text:
            self._start(process, line)
            return
        relation = next((kind for words, kind in CHAINS.items() if words in text), None)
        if relation is not None:
            self._announce(process, relation)
            return
        if state is not None and state.partial:
            text = self._joined(process, line, state, text)
        match = FRAME.match(text)
        if text.startswith('File "') and len(text) < 500 and (match is None or not match["function"]):
            # Wrapped in the middle of a frame's line; the next line has the rest.
            (state or self._start(process, line)).partial = text
            return
        if match is not None:
            self._frame(process, line, match)
        elif state is not None:
            self._inside(process, state, line, text)

    def finish(self) -> None:
        """The log has ended: close what is open."""
        for process in list(self._open):
            self._close(process)
        for members, _ in self._pending.values():
            self._keep(members)
        self._pending.clear()

    def _joined(self, process: str, line: Line, state: _Open, text: str) -> str:
        """The rest of a frame's line put to its start; a start that was a whole frame after all is taken as one."""
        start, state.partial = state.partial, ""
        whole = FRAME.match(start)
        joined = FRAME.match(start + text)
        if whole is not None and (joined is None or not joined["function"]):
            self._frame(process, line, whole)
            return text
        return start + text

    def _start(self, process: str, line: Line) -> _Open:
        if process in self._open:
            self._close(process)
        state = _Open(Traceback(process, line.number, line.level, last=line.number), source=line.source, logged=line.logged)
        self._open[process] = state
        if len(self._open) > PROCESSES:
            self._close(next(iter(self._open)))
        if len(self._pending) > PROCESSES:
            members, _ = self._pending.pop(next(iter(self._pending)))
            self._keep(members)
        return state

    def _announce(self, process: str, relation: str) -> None:
        if process in self._open:
            state = self._open.pop(process)
            members, kind = self._pending.pop(process, ([], ""))
            state.traceback.relation = kind
            self._pending[process] = ([*members, state.traceback], relation)
        elif process in self._pending:
            self._pending[process] = (self._pending[process][0], relation)

    def _frame(self, process: str, line: Line, match: re.Match[str]) -> None:
        state = self._open.get(process)
        if state is None or (state.traceback.complete and not state.in_user_code):
            state = self._start(process, line)
        frame = Frame(
            match["file"] or match["nb_file"],
            int(match["line"] or match["nb_line"]),
            match["function"] or match["nb_function"] or "",
        )
        traceback = state.traceback
        if state.in_user_code:
            traceback.user_frames.append(frame)
        elif len(traceback.frames) < 400:
            traceback.frames.append(frame)
            traceback.frame_lines.append(line.number)
        traceback.last = line.number
        state.blank = state.gap = 0

    def _inside(self, process: str, state: _Open, line: Line, text: str) -> None:
        traceback = state.traceback
        if state.over:
            state.gap += 1
            if state.gap > PATIENCE:
                self._close(process)
            return
        if not text:
            state.blank += 1
            if state.blank > 3:
                self._end(process, state)
            return
        if traceback.complete:
            self._message(process, state, line, text)
            return
        if _MARKERS.match(text):
            return
        match = EXCEPTION.match(text)
        if match is not None and self._ends(line, state, match):
            traceback.type, traceback.line, traceback.last = match["type"], line.number, line.number
            traceback.message, traceback.message_lines = [match["message"] or ""], [line.number]
            traceback.level = traceback.level or line.level
            state.blank = 0
            return
        frames = traceback.user_frames if state.in_user_code else traceback.frames
        if frames and not frames[-1].code and state.gap == 0:
            last = frames[-1]
            frames[-1] = Frame(last.file, last.line, last.function, text[:200])
        traceback.last = line.number
        state.gap += 1
        if state.gap > 12:
            self._end(process, state)

    @staticmethod
    def _ends(line: Line, state: _Open, match: re.Match[str]) -> bool:
        """True when the line is the exception, not a line of code that reads like one (``Foo.Bar``, ``Name: type``)."""
        text = line.text
        if re.search(rf"(?:{_NAMES})$", match["type"]):
            return True
        return not text[:1].isspace() and match["message"] is not None and bool(state.traceback.frames)

    def _message(self, process: str, state: _Open, line: Line, text: str) -> None:
        traceback = state.traceback
        # A line with another tag (or a first tag after bare lines) is the logger's next record; so is a line after a gap
        # when the exception was printed without a logger.
        foreign = line.source != state.source or (line.logged and not state.logged) or (state.blank and not line.logged)
        if foreign and USER_CODE not in text and "Developer debug context" not in text:
            state.over = True
            return
        if USER_CODE in text:
            state.in_user_code = True
        state.blank = 0
        if len(traceback.message) < LONGEST_MESSAGE:
            traceback.message.append(text[:1000])
            traceback.message_lines.append(line.number)
            traceback.last = line.number

    def _end(self, process: str, state: _Open) -> None:
        """Nothing more is expected of it, but for the announcement of what followed."""
        if state.traceback.complete:
            state.over, state.gap = True, 0
        else:
            self._close(process)

    def _close(self, process: str) -> None:
        state = self._open.pop(process)
        members, kind = self._pending.pop(process, ([], ""))
        state.traceback.relation = kind
        self._keep([*members, state.traceback])

    def _keep(self, members: list[Traceback]) -> None:
        members = [member for member in members if member.complete or len(member.frames) > 1]
        if not members:
            return
        shape = tuple(member.shape for member in members)
        if shape in self._shapes:
            self._shapes[shape].count += 1
        elif len(self.chains) < LIMIT:
            self._shapes[shape] = chain = Chain(members)
            self.chains.append(chain)
        else:
            self.dropped += 1
