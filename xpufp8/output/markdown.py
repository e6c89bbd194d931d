"""The report as GitHub-flavoured markdown: short, collapsible, to be pasted into an issue or shown as a job summary."""

from __future__ import annotations

import re

from xpufp8.output import wording
from xpufp8.output.text import clean
from xpufp8.report import Report

MARKS = {"servable": "✅", "servable-with-fixes": "🛠️", "not-servable": "❌", "unknown": "❔"}
SPECIAL = re.compile(r"([\\`*_\[\]<>|#~!&@])")
LONGEST = 60_000
"""Characters; an issue takes 65,536."""


def render(report: Report) -> str:
    """The report as markdown. Text that probes saw stands in code, where it can neither call people nor carry HTML."""
    parts = [f"### {MARKS[report.verdict]} xpufp8: {escape(wording.headline(report))}", ""]
    parts += ["| | |", "| --- | --- |", *(f"| {label} | {code(value)} |" for label, value in wording.head(report)), ""]
    if report.plan.shell:
        parts += [f"**{escape(wording.command_title(report))}**", "", fence(report.plan.shell, "sh"), ""]
        parts += [f"* {escape(', '.join(reason.codes))}: {escape(reason.sentence)}" for reason in report.plan.because]
        parts += [f"* first: {escape(action)}" for action in report.plan.host_actions]
        parts.append("")
    findings = [(entry.state, _finding(entry)) for entry in wording.entries(report)]
    for state, heading in wording.HEADINGS.items():
        group = [text for kind, text in findings if kind == state]
        parts += [f"#### {heading}", "", *group] if group else []
    parts += [f"> {escape(note)}" for note in (report.outcome.notes if report.outcome else [])]
    parts.append(_probes(report))
    text = "\n".join(parts)
    if len(text) > LONGEST:
        text = _shortened(parts)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def escape(text: str) -> str:
    """Text that markdown shows as it is, on one line. ``@`` and ``#`` stand in code: anywhere else they call people and link issues."""
    line = " ".join(clean(text).split())
    line = SPECIAL.sub(lambda m: f"`{m[1]}`" if m[1] in "@#" else ENTITIES.get(m[1], "\\" + m[1]), line)
    return re.sub(r"^([-+=]|\d+(?=[.)]))", lambda m: "\\" + m[1] if m[1] in "-+=" else m[1] + "\\", line)


def code(text: str) -> str:
    """A code span, safe inside a table."""
    line = " ".join(clean(text).split()).replace("|", "¦")
    ticks = "`" * (longest_run(line) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{pad}{line}{pad}{ticks}" if line else ""


def fence(text: str, language: str = "text") -> str:
    """A code block whose fence is longer than any that the text holds."""
    body = clean(text).replace("\t", "    ").strip("\n")
    ticks = "`" * max(3, longest_run(body) + 1)
    return f"{ticks}{language}\n{body}\n{ticks}"


def longest_run(text: str) -> int:
    """Length of the longest run of backticks."""
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def _finding(entry: wording.Entry) -> str:
    finding = entry.finding
    opened = " open" if entry.state == "failing" else ""
    mark = "unknown" if finding.status == "unknown" else finding.severity
    summary = f"<summary><b>{_html(clean(finding.code))}</b> {mark}: {_html(wording.title(finding))}</summary>"
    lines = [f"<details{opened}>{summary}", "", escape(finding.cause), ""]
    if said := wording.standing(entry.finding):
        lines += [f"*{escape(said)}*", ""]
    if finding.affects:
        lines += [f"Hits: {', '.join(code(part) for part in finding.affects)}", ""]
    if finding.evidence:
        lines += [fence("\n".join(wording.seen(evidence) for evidence in finding.evidence)), ""]
    lines += [f"* {escape(wording.remedy(fix, finding))}" for fix in finding.fixes]
    return "\n".join([*lines, "", "</details>", ""])


def _html(text: str) -> str:
    """Text inside a raw HTML line: markdown is not read there, and mentions must not be either."""
    line = " ".join(text.split())
    return re.sub(r"[&<>@#`]", lambda m: f"<code>{m[0]}</code>" if m[0] in "@#" else f"&#{ord(m[0])};", line)


def _probes(report: Report) -> str:
    names = [(_html(clean(probe.name)), probe) for probe in report.probes]
    words = [f"{name} {p.seconds:.1f} s" if p.status == "ok" else f"{name} **{p.status}**" for name, p in names]
    return f"<sub>probes: {' · '.join(words)}</sub>" if words else ""


def _shortened(parts: list[str]) -> str:
    """Whole parts up to the limit, and a line that says how many were left out."""
    kept: list[str] = []
    size = 0
    for part in parts:
        size += len(part) + 1
        if size > LONGEST - 200:
            break
        kept.append(part)
    return "\n".join([*kept, "", f"*{len(parts) - len(kept)} more parts were left out; `--format json` has all.*"])
