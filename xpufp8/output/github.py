"""GitHub workflow commands: one annotation a finding, on config.json where that is the cause. The job summary is ``markdown``."""

from __future__ import annotations

from collections import Counter

from xpufp8.output import wording
from xpufp8.output.places import command_text, places
from xpufp8.output.text import clean
from xpufp8.report import Report

PER_LEVEL = 10
"""GitHub shows that many annotations of a level from one step and drops the rest without a word."""

LEVELS: dict[wording.State, str] = {"failing": "error", "repaired": "notice", "ignored": "notice", "unknown": "notice"}
"""Level of an annotation; one that fails without counting keeps its own severity, a warning at most."""


def render(report: Report) -> str:
    """The report as workflow commands, one a line, the verdict last. Findings beyond GitHub's limit are counted in the verdict's line."""
    shown: Counter[str] = Counter()
    lines: list[str] = []
    left_out = 0
    for entry in wording.entries(report):
        level = LEVELS.get(entry.state) or ("notice" if entry.finding.severity == "info" else "warning")
        shown[level] += 1
        # One place of each level is kept for the verdict.
        if shown[level] >= PER_LEVEL:
            left_out += 1
            continue
        lines.append(_annotation(level, entry, report))
    return "".join(line + "\n" for line in [*lines, _verdict(report, left_out)])


def _annotation(level: str, entry: wording.Entry, report: Report) -> str:
    finding = entry.finding
    first = next(iter(places(finding, report)), None)
    properties = {"title": f"{finding.code} {wording.title(finding)}"}
    if first and first.kind == "config" and not first.path.startswith("/"):
        properties = {"file": first.path} | ({"line": str(first.line)} if first.line else {}) | properties
    words = [f"{wording.HEADINGS[entry.state]}." if level == "notice" else "", wording.standing(entry.finding), finding.cause]
    if first and first.kind == "command":
        words.append(f"On the command line: {command_text(report)}")
    words += [f"Seen {wording.seen(evidence)}" for evidence in finding.evidence[:3]]
    words += [f"Do: {wording.remedy(fix, finding)}" for fix in finding.fixes]
    return command(level, "\n".join(word for word in words if word), **properties)


def _verdict(report: Report, left_out: int) -> str:
    level = {"unknown": "error", "not-servable": "error"}.get(report.verdict, "notice")
    if report.outcome is not None and report.outcome.exit_code == 0:
        level = "notice"
    text = wording.headline(report) + (f" {left_out} more findings are in the job summary." if left_out else "")
    if report.plan.shell and report.verdict != "unknown":
        text += f"\n{wording.command_title(report)}: {report.plan.shell}"
    return command(level, text, title=f"xpufp8: {report.verdict}")


def command(level: str, text: str, **properties: str) -> str:
    """One workflow command. Line ends and separators are encoded, so no text can end the command or start another."""
    said = ",".join(f"{name}={_encode(value, property_=True)}" for name, value in properties.items())
    return f"::{level} {said}::{_encode(text)}"


def _encode(text: str, *, property_: bool = False) -> str:
    text = clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    # Other characters at which a reader of lines may break one.
    text = "".join(" " if c in "\u0085\u2028\u2029\x0b\x0c" else c for c in text)
    return text.replace(":", "%3A").replace(",", "%2C") if property_ else text
