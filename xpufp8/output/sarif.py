"""SARIF 2.1.0 for code scanning.

Written as plain data: the kept model classes (sarif-pydantic 0.6) have no notifications in an invocation, which is where
unknown observations belong. The tests hold the output against the schema of the standard.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from xpufp8.output import wording
from xpufp8.output.places import COMMAND, Place, command_text, places, question
from xpufp8.output.text import clean
from xpufp8.report import Finding, ProbeReport, Report, Severity

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
PACKAGES = "PACKAGES"
"""Base of relative paths of the serving stack (``vllm/…``): the target interpreter's site-packages."""

LEVELS: dict[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}
SECURITY = {"error": "error", "warning": "warning", "info": "recommendation"}
RESULTS = 5000
"""Code scanning shows that many results of a run."""


def render(report: Report) -> str:
    """The report as SARIF.

    What fails is a result: at its own level where it counts, as a note where a plan repairs it, with a suppression where a
    policy ignores it. What could not be told is a notification of the invocation, never a result.
    """
    data = {"$schema": SCHEMA, "version": "2.1.0", "runs": [_run(report)]}
    return json.dumps(data, indent=2, ensure_ascii=True) + "\n"


def _run(report: Report) -> dict[str, Any]:
    entries = wording.entries(report)
    failed = [entry for entry in entries if entry.finding.status == "fail"][:RESULTS]
    unknown = [entry for entry in entries if entry.finding.status == "unknown"]
    codes = sorted({entry.finding.code for entry in entries})
    index = {code: at for at, code in enumerate(codes)}
    driver = {
        "name": report.tool.name,
        "version": report.tool.version,
        "semanticVersion": report.tool.version,
        "rules": [_rule(code, [e.finding for e in entries if e.finding.code == code]) for code in codes],
    }
    artifact = {
        "location": {"uri": COMMAND},
        "contents": {"text": command_text(report) + "\n"},
        "description": {"text": "The command that was asked about."},
    }
    properties: dict[str, Any] = {"verdict": report.verdict, "device": report.target.device}
    properties |= {"simulated": report.target.simulated, "plan": clean(report.plan.shell)}
    if report.outcome is not None:
        properties["exitCode"] = report.outcome.exit_code
    return {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"xpufp8/{_id(report)}/", "description": {"text": wording.headline(report)}},
        "originalUriBaseIds": {PACKAGES: {"description": {"text": "site-packages of the target interpreter"}}},
        "columnKind": "unicodeCodePoints",
        "invocations": [_invocation(report, unknown, index)],
        "artifacts": [artifact],
        "results": [_result(entry, report, index) for entry in failed],
        "properties": properties,
    }


def _id(report: Report) -> str:
    """Names the diagnosis, so that two models or devices in one workflow do not overwrite each other's alerts."""
    return hashlib.sha256(f"{report.target.device}\n{command_text(report)}".encode()).hexdigest()[:12]


def _rule(code: str, findings: list[Finding]) -> dict[str, Any]:
    from xpufp8.pages import markdown
    from xpufp8.rules import AREAS, BY_CODE

    known = BY_CODE.get(code)
    title = known.title if known else clean(findings[0].title)
    severity: Severity = known.severity if known else findings[0].severity
    page = markdown(known) if known else title
    return {
        "id": code,
        "name": "".join(word[:1].upper() + word[1:] for word in "".join(c if c.isalnum() else " " for c in title).split()),
        "shortDescription": {"text": title + "."},
        "fullDescription": {"text": (known.page.split("\n\n")[0].replace("\n", " ") if known else title) or title},
        "help": {"text": page, "markdown": page},
        "defaultConfiguration": {"level": LEVELS[severity]},
        "properties": {"tags": [AREAS.get(code[:3], code[:3])], "precision": "high", "problem.severity": SECURITY[severity]},
    }


def _result(entry: wording.Entry, report: Report, index: dict[str, int]) -> dict[str, Any]:
    finding = entry.finding
    spots = places(finding, report) or [question(report)]
    level = "note" if entry.state == "repaired" else LEVELS[finding.severity]
    words = [
        finding.cause,
        wording.standing(entry.finding),
        wording.HEADINGS[entry.state] + "." if entry.state == "repaired" else "",
    ]
    words += [f"Seen {wording.seen(evidence)}" for evidence in finding.evidence]
    words += [f"Do: {wording.remedy(fix, finding)}" for fix in finding.fixes]
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": index[finding.code],
        "kind": "fail",
        "level": level,
        "message": {"text": clean("\n".join([f"{wording.title(finding)}.", *(word for word in words if word)]))},
        "locations": [_location(spots[0], finding)],
        "partialFingerprints": _fingerprints(finding, report),
        "properties": {"severity": finding.severity, "state": entry.state, "affects": [clean(part) for part in finding.affects]},
    }
    if spots[1:]:
        result["relatedLocations"] = [_location(place, finding) | {"id": at} for at, place in enumerate(spots[1:], 1)]
    if finding.ignored is not None:
        result["suppressions"] = [{"kind": "external", "status": "accepted", "justification": wording.standing(entry.finding)}]
    return result


def _location(place: Place, finding: Finding) -> dict[str, Any]:
    artifact: dict[str, Any] = {"uri": place.uri}
    if place.kind == "file" and not place.path.startswith("/"):
        artifact["uriBaseId"] = PACKAGES
    if place.kind == "command":
        artifact["index"] = 0
    region: dict[str, Any] = {"startLine": place.line or 1}
    if place.column is not None and place.end is not None:
        region |= {"startColumn": place.column, "endColumn": place.end}
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": artifact, "region": region}}
    if finding.subject:
        location["logicalLocations"] = [
            {"name": clean(finding.subject), "fullyQualifiedName": f"{finding.code}/{clean(finding.subject)}"}
        ]
    return location


def _fingerprints(finding: Finding, report: Report) -> dict[str, str]:
    """The same finding of the same question is the same alert, wherever in a file it is seen next time."""
    text = "\n".join([finding.code, finding.subject, report.target.device, report.target.model or ""])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"xpufp8/v1": digest, "primaryLocationLineHash": f"{digest[:16]}:1"}


def _invocation(report: Report, unknown: list[wording.Entry], index: dict[str, int]) -> dict[str, Any]:
    told = report.verdict != "unknown"
    invocation: dict[str, Any] = {"executionSuccessful": told}
    if report.outcome is not None:
        invocation |= {"exitCode": report.outcome.exit_code, "exitCodeDescription": wording.headline(report)}
    invocation["toolConfigurationNotifications"] = [_unknown(entry, index) for entry in unknown]
    invocation["toolExecutionNotifications"] = [_no_answer(p, told) for p in report.probes if p.status != "ok"]
    return invocation


def _unknown(entry: wording.Entry, index: dict[str, int]) -> dict[str, Any]:
    finding = entry.finding
    words = [f"Could not be told: {wording.title(finding)}.", finding.cause, wording.standing(entry.finding)]
    words += [f"Seen {wording.seen(evidence)}" for evidence in finding.evidence]
    return {
        "level": LEVELS[finding.severity] if finding.ignored is None else "note",
        "message": {"text": clean("\n".join(word for word in words if word))},
        "associatedRule": {"id": finding.code, "index": index[finding.code]},
    }


def _no_answer(probe: ProbeReport, told: bool) -> dict[str, Any]:
    level = "note" if probe.status == "skipped" else "warning" if told else "error"
    return {"level": level, "message": {"text": clean(f"The probe {probe.name} gave no answer ({probe.status}): {probe.detail}")}}
