"""The report as one self-contained HTML file: it opens offline, asks for nothing, and runs no script but its own.

The template, style and script are in ``xpufp8/data/html``. A content security policy with their hashes keeps anything that a
probe saw from running, even if it got past the escaping.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpufp8.output import wording
from xpufp8.output.html_views import kernel_view, model_view, op_view, speed_view, timing_view, topology_view
from xpufp8.output.text import clean
from xpufp8.report import Report

if TYPE_CHECKING:
    from jinja2 import Template

DATA = Path(__file__).resolve().parent.parent / "data" / "html"
MARKS = {"servable": "✓", "servable-with-fixes": "✓", "not-servable": "✗", "unknown": "?"}


def render(report: Report) -> str:
    """The report as an HTML document."""
    from markupsafe import Markup

    safe = Report.model_validate(_clean(report.model_dump(mode="json")))
    style, script = (_source(name) for name in ("style.css", "script.js"))
    views: dict[str, Any] = {
        "model": model_view(safe),
        "ops": op_view(safe),
        "kernels": kernel_view(safe),
        "topology": topology_view(safe),
        "speeds": speed_view(safe),
        "timings": timing_view(safe),
    }
    return _template().render(
        report=safe,
        title=f"xpufp8: {safe.verdict}: {safe.target.model or 'installation'} on {safe.target.device}",
        mark=MARKS[safe.verdict],
        headline=wording.headline(safe),
        head=list(wording.head(safe)),
        command_title=wording.command_title(safe),
        notes=safe.outcome.notes if safe.outcome else [],
        groups=_groups(safe),
        sections=_sections(safe, views),
        # The project's own two files; everything else goes through the template's escaping.
        style=Markup(style),  # noqa: S704
        script=Markup(script),  # noqa: S704
        style_hash=_hash(style),
        script_hash=_hash(script),
        **views,
    )


def _clean(value: Any) -> Any:
    """The value without control characters and direction marks in any text."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(key)): _clean(inner) for key, inner in value.items()}
    return [_clean(inner) for inner in value] if isinstance(value, list) else value


@cache
def _source(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(DATA), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("report.html.jinja")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _groups(report: Report) -> list[dict[str, Any]]:
    """Findings by state, in the order that every format has."""
    found = wording.entries(report)
    groups = []
    for state, title in wording.HEADINGS.items():
        entries = [_entry(entry) for entry in found if entry.state == state]
        if entries:
            # "entries" and not "items": a template reads that name as the dictionary's own method.
            groups.append({"state": state, "title": title, "entries": entries})
    return groups


def _entry(entry: wording.Entry) -> dict[str, Any]:
    finding = entry.finding
    return {
        "finding": finding,
        "mark": "unknown" if finding.status == "unknown" else finding.severity,
        "title": wording.title(finding),
        "standing": wording.standing(entry.finding),
        "fixes": [wording.remedy(fix, finding) for fix in finding.fixes],
    }


def _sections(report: Report, views: dict[str, Any]) -> list[dict[str, Any]]:
    """What the navigation offers: only sections that are there."""
    sections: list[dict[str, Any]] = [{"id": "plan", "title": "Command", "count": None}] if report.plan.shell else []
    sections.append({"id": "findings", "title": "Findings", "count": len(report.findings)})
    for name, title in (("model", "Model"), ("ops", "Ops"), ("kernels", "Kernel tables"), ("topology", "Topology")):
        if views[name]:
            sections.append({"id": name, "title": title, "count": len(views["ops"]["rows"]) if name == "ops" else None})
    return [*sections, {"id": "timings", "title": "Timings", "count": None}]
