"""The report for a person at a terminal: what is wrong, what was seen, what to do, in that order, readable at 80 columns."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from xpufp8.output.text import plain
from xpufp8.output.wording import command_title, headline, package_version, remedy, standing
from xpufp8.report import Finding, Report
from xpufp8.verdict import fixed

STYLE = {"error": "bold red", "warning": "yellow", "info": "cyan"}
WIDTH = 80
NARROWEST = 20
"""Columns below which a report is printed as if there were so many."""
EVIDENCE_SHOWN = 6
EVIDENCE_OF_UNKNOWN = 2


def render(report: Report, width: int = WIDTH) -> str:
    """The report as plain text, without colour, at a fixed width."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(view(report))
    out = console.file
    assert isinstance(out, io.StringIO)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def show(report: Report, console: Console) -> None:
    """Print the report to a console, which knows its width and whether colours are wanted.

    In a GitHub workflow a line that begins with ``::`` is a command to the runner, even behind blanks, and what a probe printed
    must not give one.
    """
    if os.environ.get("GITHUB_ACTIONS"):
        console.file.write(re.sub(r"(?m)^(\s*):(?=:)", r"\1: ", render(report)))
    else:
        console.print(view(report))


def view(report: Report) -> RenderableType:
    """The whole report."""
    counting = [f for f in report.findings if f.ignored is None]
    wrong = [f for f in counting if f.status == "fail" and not fixed(f)]
    cured = [f for f in counting if f.status == "fail" and fixed(f)]
    unknown = [f for f in counting if f.status == "unknown"]
    ignored = [f for f in report.findings if f.ignored is not None]
    parts: list[RenderableType] = [_head(report), _verdict(report), *_memory(report), Text()]
    for title, findings in (
        ("", wrong),
        ("Repaired by the plan", cured),
        ("Could not be told", unknown),
        ("Ignored", ignored),
    ):
        if findings and title:
            parts.append(Text(title, style="bold underline"))
        parts += [_finding(f, report) for f in findings]
    parts += _peers(report)
    if report.plan.shell:
        parts.append(_plan(report))
    parts += [plain(note, "yellow") for note in (report.outcome.notes if report.outcome else [])]
    parts.append(_probes(report))
    return Group(*parts)


def _memory(report: Report) -> list[RenderableType]:
    """One line on what a rank holds and how long a sequence fits, from the model trace."""
    facts = next((p.facts for p in report.probes if p.name == "model_trace"), {})
    memory = facts.get("memory")
    if not isinstance(memory, dict) or not memory.get("weight_bytes"):
        return []
    gib = 2.0**30
    words = [f"weights {memory['weight_bytes'] / gib:.2f} GiB a rank"]
    if memory.get("device_bytes"):
        words[0] += f" of {memory['device_bytes'] / gib:.1f}"
    if memory.get("kv_bytes_per_token"):
        words.append(f"KV cache {memory['kv_bytes_per_token'] / 1024:.0f} KiB a token")
    if memory.get("fits_max_model_len"):
        asked = f" (asked {memory['max_model_len']})" if memory.get("max_model_len") else ""
        words.append(f"longest --max-model-len {memory['fits_max_model_len']}{asked}")
    return [plain(f"{facts.get('mode', 'live')}: " + " · ".join(words), "dim")]


def _head(report: Report) -> Text:
    words = [f"xpufp8 {report.tool.version}", f"device {report.target.device}"]
    words += [f"{name} {version}" for name in ("vllm", "torch") if (version := package_version(report, name))]
    if report.target.model:
        words.append(f"model {report.target.model}")
    return plain(" · ".join(words), "dim")


def _verdict(report: Report) -> Text:
    styles = {"servable": "green", "servable-with-fixes": "green", "not-servable": "bold red", "unknown": "bold yellow"}
    return plain(headline(report), styles[report.verdict])


def _labelled(rows: Iterable[tuple[str, Text]]) -> Table:
    """Two columns: what kind of line it is, and the line, wrapped in its own column."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", width=8)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, text)
    return table


def _finding(finding: Finding, report: Report) -> RenderableType:
    del report
    mark = "unknown" if finding.status == "unknown" else finding.severity
    title = Text.assemble((mark.upper(), STYLE.get(mark, "bold")), " ", (finding.code, "bold"), "  ", plain(finding.title))
    if finding.subject:
        title.append_text(Text.assemble(": ", plain(finding.subject, "bold")))
    rows: list[tuple[str, Text]] = [("why", plain(finding.cause))]
    if said := standing(finding):
        rows.append(("policy", plain(said)))
    if finding.affects:
        rows.append(("hits", plain("; ".join(finding.affects))))
    shown = EVIDENCE_SHOWN if finding.status == "fail" else EVIDENCE_OF_UNKNOWN
    for at, evidence in enumerate(finding.evidence[:shown]):
        text = plain(f"{evidence.mode}: {evidence.observed}")
        if evidence.where:
            text.append_text(plain(f"  ({evidence.where})", "dim"))
        rows.append(("seen" if at == 0 else "", text))
    if len(finding.evidence) > shown:
        rows.append(("", plain(f"and {len(finding.evidence) - shown} more (--format json has all)", "dim")))
    for at, fix in enumerate(finding.fixes):
        rows.append(("do" if at == 0 else "or", plain(remedy(fix, finding))))
    return Padding(Group(title, Padding(_labelled(rows), (0, 0, 0, 2))), (0, 0, 1, 0))


def _plan(report: Report) -> RenderableType:
    plan = report.plan
    parts: list[RenderableType] = [plain(command_title(report), "bold underline"), Padding(plain(plan.shell), (0, 0, 0, 2))]
    rows = [(", ".join(r.codes), plain(r.sentence)) for r in plan.because]
    if rows:
        parts.append(Padding(_labelled(rows), (0, 0, 0, 2)))
    parts += [Padding(plain(f"first: {action}"), (0, 0, 0, 2)) for action in plan.host_actions]
    return Padding(Group(*parts), (0, 0, 1, 0))


def _peers(report: Report) -> list[RenderableType]:
    """The peer matrix, for a machine with several cards."""
    facts = next((p.facts for p in report.probes if p.name == "peer_access" and p.status == "ok"), {})
    if len(facts.get("cards") or []) < 2:
        return []
    from pydantic import TypeAdapter, ValidationError

    from probes.host_facts import PeerAccessFacts
    from xpufp8.output.topology import topology_table

    try:
        peers: PeerAccessFacts = TypeAdapter(PeerAccessFacts).validate_python(facts)
    except ValidationError:
        # A saved report of another version: what it says in other words is not drawn, and the rest is shown all the same.
        return []
    return [Padding(topology_table(peers), (0, 0, 1, 0))]


def _probes(report: Report) -> Text:
    words = [f"{p.name} {p.seconds:.1f} s" if p.status == "ok" else f"{p.name} {p.status.upper()}" for p in report.probes]
    return plain("probes  " + " · ".join(words), "dim")


class _Console(Console):
    """A console whose reader may go away without deciding our exit code."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console_for(stream: object | None = None, *, stderr: bool = False) -> Console:
    """A console that colours only on a terminal and never in a pipe."""
    del stream
    asked = os.environ.get("COLUMNS", "")
    # A width of nothing shows nothing.
    width = (
        (max(int(asked), NARROWEST) if int(asked) else WIDTH) if asked.isdecimal() else None if _is_terminal(stderr) else WIDTH
    )
    return _Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def _is_terminal(stderr: bool) -> bool:
    import sys

    return (sys.stderr if stderr else sys.stdout).isatty()
