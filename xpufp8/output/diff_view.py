"""A comparison for a person, as JSON, and as markdown."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

from xpufp8.output import Format
from xpufp8.output.text import clean

if TYPE_CHECKING:
    from xpufp8.diff import Comparison
    from xpufp8.diff_facts import Change

HEADINGS = {"regression": "Worse", "improvement": "Better", "change": "Changed"}
SHOWN = 20
"""Changes of one kind and area that a person is shown; JSON has all."""


def renderer(chosen: Format) -> Callable[[Comparison], str] | None:
    """How a comparison is written in a format; None for a format that is for reports alone."""
    return {Format.RICH: text, Format.JSON: to_json, Format.MARKDOWN: markdown}.get(chosen)


def to_json(comparison: Comparison) -> str:
    """The comparison as indented JSON, in ASCII."""
    return json.dumps(comparison.data(), indent=2, ensure_ascii=True) + "\n"


def _line(change: Change) -> str:
    """What changed, on one line."""
    if not change.before:
        said = f"new: {change.after}"
    elif not change.after:
        said = f"gone (was {change.before})"
    else:
        said = f"{change.before} → {change.after}"
    return " ".join(clean(f"{change.subject}: {said}").split())


def _groups(comparison: Comparison) -> list[tuple[str, str, list[str], int]]:
    """Heading, area, the lines shown, and how many were left out."""
    found = []
    for (kind, area), group in groupby(comparison.changes, key=lambda change: (change.kind, change.area)):
        lines = [_line(change) for change in group]
        found.append((HEADINGS[kind], area, lines[:SHOWN], max(0, len(lines) - SHOWN)))
    return found


def _summary(comparison: Comparison) -> str:
    if not comparison.changes:
        return "Nothing changed."
    worse = sum(change.kind == "regression" for change in comparison.changes)
    better = sum(change.kind == "improvement" for change in comparison.changes)
    return f"{worse} worse, {better} better, {len(comparison.changes) - worse - better} changed."


def text(comparison: Comparison) -> str:
    """The comparison as plain text."""
    lines = [clean(f"{comparison.before} → {comparison.after}"), _summary(comparison)]
    last = ""
    for heading, area, shown, more in _groups(comparison):
        lines += ["", heading] if heading != last else []
        last = heading
        lines += [f"  {area:<12}  {line}" for line in shown]
        lines += [f"  {'':<12}  and {more} more (--format json has all)"] if more else []
    return "\n".join(lines) + "\n"


def markdown(comparison: Comparison) -> str:
    """The comparison as a markdown list, to be pasted into an issue or a merge request."""
    from xpufp8.output.markdown import code, escape

    lines = [f"### xpufp8 diff: {code(comparison.before)} → {code(comparison.after)}", "", escape(_summary(comparison))]
    last = ""
    for heading, area, shown, more in _groups(comparison):
        lines += ["", f"#### {heading}", ""] if heading != last else []
        last = heading
        lines += [f"* {area}: {escape(line)}" for line in shown]
        lines += [f"* and {more} more (`--format json` has all)"] if more else []
    return "\n".join(lines) + "\n"
