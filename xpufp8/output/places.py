"""Where a finding points: the model's config.json, the typed command line, or a file of the serving stack.

Formats that annotate files (sarif, github) share this, so that one finding never points at two places.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal
from urllib.parse import quote

from xpufp8.output.text import clean
from xpufp8.report import Evidence, Finding, Report

COMMAND = "vllm-serve-command.txt"
"""Name of the made-up file that holds the typed command, so that a region of it can be pointed at."""

FILE = re.compile(
    r"^(?P<path>[^\s:;,]+\.(?:py|so(?:\.\d+)*|json|toml|ya?ml|conf|txt|log))(?::(?P<line>[1-9]\d{0,6}))?(?=$|[\s:;,])"
)


@dataclass(frozen=True)
class Place:
    """A file, and what is known of the position in it. Lines and columns count from 1; ``end`` is one past the last column."""

    kind: Literal["config", "command", "file"]
    path: str
    line: int | None = None
    column: int | None = None
    end: int | None = None

    @property
    def uri(self) -> str:
        """The path as a URI reference: relative paths stay relative, as code scanning wants them."""
        path = PurePosixPath(self.path)
        return path.as_uri() if path.is_absolute() else quote(str(path))


def command_text(report: Report) -> str:
    """The command that was asked about, on one line."""
    words = ["vllm", "serve", *([report.target.model] if report.target.model else []), *report.target.vllm_args]
    return clean(shlex.join(words)).replace("\n", " ")


def config_path(report: Report) -> str | None:
    """The model's config.json as typed, or None when no model was asked about."""
    model = report.target.model
    if not model:
        return None
    model = clean(model).replace("\n", " ")
    return model if model.endswith(".json") else str(PurePosixPath(model) / "config.json")


def places(finding: Finding, report: Report) -> list[Place]:
    """Where the finding points, the cause first; none twice, and none at all where the evidence names no place.

    An option that is the finding's subject is its cause; then config.json and the command line where the evidence names them;
    then files and lines of the serving stack.
    """
    found: list[Place] = []
    if finding.subject.startswith("-"):
        found.append(_command(finding, report))
    kinds = [_place(evidence, finding, report) for evidence in finding.evidence]
    found += sorted((p for p in kinds if p is not None), key=lambda place: place.kind == "file")
    return list(dict.fromkeys(found))


def question(report: Report) -> Place:
    """Where to point when a format must point somewhere: at the model that was asked about, or else at the command."""
    config = config_path(report)
    return Place("config", config) if config else Place("command", COMMAND, 1)


def _place(evidence: Evidence, finding: Finding, report: Report) -> Place | None:
    config = config_path(report)
    if config and (evidence.probe == "config.json" or evidence.where.startswith("config.json")):
        line = re.match(r"config\.json:(\d+)", evidence.where)
        return Place("config", config, int(line[1]) if line else None)
    if "command line" in (evidence.probe, evidence.where):
        return _command(finding, report)
    match = FILE.match(clean(evidence.where))
    return Place("file", match["path"], int(match["line"]) if match["line"] else None) if match else None


def _command(finding: Finding, report: Report) -> Place:
    """The command, and the option's own columns where it stands there."""
    text = command_text(report)
    names = [
        finding.subject,
        *(fix.action.removeprefix("without ") for fix in finding.fixes if fix.action.startswith("without ")),
    ]
    for name in names:
        match = re.search(rf"(?<!\S){re.escape(clean(name))}(?=$|[\s=])", text) if name.startswith("-") else None
        if match:
            return Place("command", COMMAND, 1, match.start() + 1, match.end() + 1)
    return Place("command", COMMAND, 1)
