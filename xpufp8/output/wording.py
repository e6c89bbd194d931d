"""Words and orders that every format shares, so that no two of them tell a different story of one report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from xpufp8.output.text import clean
from xpufp8.report import Evidence, Finding, Fix, Report
from xpufp8.verdict import counted, fixed, needed_for, remaining

State = Literal["failing", "remaining", "repaired", "ignored", "unknown"]
"""``failing``: makes the exit code 1. ``remaining``: fails without doing so. ``repaired``: a fix that was tried removes it."""

HEADINGS: dict[State, str] = {
    "failing": "In the way",
    "remaining": "Also noticed",
    "repaired": "Repaired by the plan",
    "unknown": "Could not be told",
    "ignored": "Ignored",
}
HOW = {"runtime": "runtime repair ", "flag": "option ", "env": "environment ", "host": ""}
VALIDATED = {"none": "not validated", "probe": "every probe that ran passes with it", "launch": "launched and answered"}
STANDINGS = {
    "servable": "This model can be served here as asked",
    "servable-with-fixes": "This model can be served here with the plan below",
    "not-servable": "This model will not be served here",
}
INSTALLED = {
    "servable": "FP8 models can be served with this installation",
    "servable-with-fixes": "FP8 models can be served with this installation and the repairs below",
    "not-servable": "Nothing will be served with this installation",
}
"""Where no model was named."""
NOT_SEEN = "numbers, speed and links between cards are not seen there"
SIMULATED = {
    "servable": f"On a simulated XPU nothing keeps this model from being served as asked ({NOT_SEEN})",
    "servable-with-fixes": f"On a simulated XPU nothing keeps this model from being served with the plan below ({NOT_SEEN})",
    "not-servable": "This model will not be served, as a simulated XPU shows",
}


@dataclass(frozen=True)
class Entry:
    """A finding and how it stands in its report."""

    finding: Finding
    state: State


def entries(report: Report) -> list[Entry]:
    """The findings with their states, grouped in the order of ``HEADINGS``; within a group the report's own order."""
    fail_on = report.outcome.fail_on if report.outcome else "error"
    failing = {id(f) for f in counted(report, fail_on)}

    def state(finding: Finding) -> State:
        if finding.ignored is not None:
            return "ignored"
        if finding.status == "unknown":
            return "unknown"
        if fixed(finding):
            return "repaired"
        return "failing" if id(finding) in failing else "remaining"

    order = list(HEADINGS)
    return sorted((Entry(f, state(f)) for f in report.findings), key=lambda entry: order.index(entry.state))


LOG_ONLY = {
    "servable": "No failure found in this log",
    "not-servable": "The log says why it failed",
    "unknown": "The log shows a failure whose cause is unknown",
}
"""Of a report whose only source is a log (``xpufp8 explain``): nothing was probed, so nothing is said of what would serve."""


def headline(report: Report) -> str:
    """The verdict in one sentence."""
    if [p.name for p in report.probes] == ["log"] and report.verdict in LOG_ONLY:
        damaged = report.verdict == "unknown" and not any(f.severity == "error" for f in report.findings)
        text = "The log is empty or damaged, and what was read shows no failure" if damaged else LOG_ONLY[report.verdict]
    elif report.verdict == "unknown":
        text = _no_verdict(report)
    elif report.target.model:
        text = (SIMULATED if report.target.simulated else STANDINGS)[report.verdict]
    else:
        text = INSTALLED[report.verdict] + (", as a simulated XPU shows" if report.target.simulated else "")
    left = [f for f in remaining(report.findings) if f.ignored is None]
    counts = [(n, name) for name in ("error", "warning") if (n := sum(f.severity == name for f in left))]
    ignored = sum(f.ignored is not None for f in report.findings)
    said = [f"{n} {name}{'s' if n > 1 else ''}" for n, name in counts] + ([f"{ignored} ignored"] if ignored else [])
    return text + (f": {', '.join(said)}" if said else "") + "."


def _no_verdict(report: Report) -> str:
    """Why nothing can be said."""
    answered = {p.name for p in report.probes if p.status == "ok"}
    silent = [name for name in needed_for(report.target) if name not in answered]
    if silent:
        return f"No verdict: no answer from {' and '.join(silent)}"
    return "No verdict: what could not be told decides it"


def command_title(report: Report) -> str:
    """What stands above the plan's command: a command that fails must not look like advice."""
    if report.verdict == "not-servable":
        return "What was asked, and fails"
    said = "no verdict" if report.verdict == "unknown" else VALIDATED[report.plan.validated]
    return f"Command ({said})"


def title(finding: Finding) -> str:
    """The finding's title with its subject."""
    return clean(f"{finding.title}: {finding.subject}" if finding.subject else finding.title)


def seen(evidence: Evidence) -> str:
    """One observation in a line: how it was seen, what, and where."""
    where = f" ({evidence.where})" if evidence.where else ""
    return clean(f"{evidence.mode}: {evidence.observed}{where}")


def remedy(fix: Fix, finding: Finding) -> str:
    """A fix in a line; whether it was tried on the real thing or on a stand-in is said."""
    live = any(evidence.mode == "live" for evidence in finding.evidence)
    tried = ("tried, it works: " if live else "the probes pass with it: ") if fix.verified else ""
    cost = f" [{'costs nothing' if fix.cost == 'none' else fix.cost}]" if fix.cost else ""
    by = " (xpufp8 serve makes it)" if fix.kind == "runtime" and not fix.verified else ""
    return clean(f"{tried}{HOW[fix.kind]}{fix.action}{by}{cost}")


def standing(finding: Finding) -> str:
    """Why a finding does not count, or what its policy says of it; empty when there is nothing to say."""
    ignored = finding.ignored
    if ignored is None:
        return clean(finding.note)
    until = f", until {ignored.until}" if ignored.until else ""
    return clean(f"ignored ({ignored.by}{until}): {ignored.reason}")


def head(report: Report) -> Iterator[tuple[str, str]]:
    """What was diagnosed, as labels and values."""
    yield "device", clean(report.target.device)
    if report.target.model:
        yield "model", clean(report.target.model)
    if report.target.vllm_args:
        yield "options", clean(" ".join(report.target.vllm_args))
    for name in ("vllm", "torch", "triton", "vllm-xpu-kernels", "intel-extension-for-pytorch"):
        if (version := package_version(report, name)) is not None:
            yield name, clean(version)
    yield "xpufp8", clean(report.tool.version)


def facts_of(report: Report, probe: str) -> dict[str, object]:
    """A probe's facts as they stand in the report; empty for one without an answer."""
    return next((p.facts for p in report.probes if p.name == probe and p.status == "ok"), {})


def package_version(report: Report, package: str) -> str | None:
    """Version of an installed package of the serving stack; None where it is not installed or was not looked at."""
    packages = facts_of(report, "environment").get("packages")
    wanted = package.replace("-", "_").lower()
    for one in packages if isinstance(packages, list) else []:
        if isinstance(one, dict) and str(one.get("name", "")).replace("-", "_").lower() == wanted and one.get("location"):
            return str(one.get("version") or "?")
    return None
