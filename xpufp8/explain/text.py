"""Making log text safe to show: no control characters, no colour codes, no secrets, no endless lines."""

from __future__ import annotations

import re

from probes.redact import redact

ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]{0,32}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[PX^_][^\x1b]{0,512}\x1b\\|[ -/]{0,2}[0-~])?"
    r"|\x9b[0-?]{0,32}[@-~]"
)
"""ANSI escape sequences: CSI (colours), OSC (titles, links), DCS and the like, two-character ones."""
BARE_COLOURS = re.compile(r"\[\d{1,2}(?:;\d{1,2}){0,3}m")
"""Colour codes that lost their escape character on the way through a forum or a log collector."""
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""What a terminal acts upon, tabs and line feeds apart; and the marks that reorder text."""

SHOWN = 400
"""Characters of a log line that a report quotes."""


def clean(text: str) -> str:
    """The text without escape sequences and control characters. Markup such as ``[red]`` stays what it is: text."""
    if "\x1b" in text or "\x9b" in text:
        text = ESCAPES.sub("", text)
    if "m" in text and "[" in text:
        text = BARE_COLOURS.sub("", text)
    return CONTROLS.sub("", text)


def quote(text: str, *, start: int = 0, limit: int = SHOWN) -> str:
    """A line as a report quotes it: cleaned, redacted, and cut around ``start`` to ``limit`` characters."""
    text = redact(clean(text[max(0, start - 2 * limit) : start + 4 * limit]))
    start = min(start, 2 * limit)
    if len(text) > limit:
        begin = max(0, min(start - limit // 4, len(text) - limit))
        text = ("…" if begin else "") + text[begin : begin + limit] + ("…" if begin + limit < len(text) else "")
    return text.rstrip()
