"""The one place that turns findings into a verdict and a verdict into an exit code."""

from __future__ import annotations

from collections.abc import Sequence

from xpufp8.exits import NO_VERDICT, OK, REMAINS, Code, FailOn
from xpufp8.report import Finding, Plan, ProbeReport, Report, TargetInfo, Verdict

RANK = {"error": 0, "warning": 1, "info": 2}

NEEDED = ("environment", "kernel_table")
"""Probes without which nothing can be said; with a model, ``model_trace`` too."""


def needed_for(target: TargetInfo) -> tuple[str, ...]:
    """Probes without whose answer there is no verdict for this target."""
    return (*NEEDED, "model_trace") if target.model else NEEDED


def fixed(finding: Finding) -> bool:
    """True when a fix that was tried (the probe ran again with it) removed the finding."""
    return any(fix.verified for fix in finding.fixes)


def remaining(findings: Sequence[Finding]) -> list[Finding]:
    """Failures that no verified fix removes."""
    return [f for f in findings if f.status == "fail" and not fixed(f)]


def judge(findings: Sequence[Finding], probes: Sequence[ProbeReport], needed: Sequence[str], plan: Plan) -> Verdict:
    """The verdict.

    Args:
        findings: all findings.
        probes: what each probe gave.
        needed: probes without whose answer nothing can be said.
        plan: the plan; one that holds a repair makes the difference between servable and servable-with-fixes.
    """
    if any(f.severity == "error" for f in remaining(findings)):
        return "not-servable"
    answered = {p.name for p in probes if p.status == "ok"}
    if any(name not in answered for name in needed):
        return "unknown"
    if any(f.severity == "error" and f.status == "unknown" for f in findings):
        return "unknown"
    return "servable-with-fixes" if plan.because or any(fixed(f) for f in findings) else "servable"


def counted(report: Report, fail_on: FailOn = "error") -> list[Finding]:
    """Findings that make the exit code 1: they fail, no verified fix removes them, no policy ignores them, and they are grave enough."""
    limit = {"error": 0, "warning": 1, "never": -1}[fail_on]
    return [f for f in remaining(report.findings) if f.ignored is None and RANK[f.severity] <= limit]


def effective_verdict(report: Report) -> Verdict:
    """The verdict that the exit code goes by: the report's own, or, where a policy ignores findings, the one without them."""
    if all(f.ignored is None for f in report.findings):
        return report.verdict
    kept = [f for f in report.findings if f.ignored is None]
    of_a_log = {probe.name for probe in report.probes} <= {"log"}
    return judge(kept, report.probes, () if of_a_log else needed_for(report.target), report.plan)


def exit_code(report: Report, fail_on: FailOn = "error") -> Code:
    """0 it can be served as planned; 1 it cannot, or a finding at or above ``fail_on`` remains; 3 no verdict.

    ``never`` is for a job that only collects reports: findings do not fail it, a missing verdict still does. What a policy
    ignores is left out of the count; a probe that gave no answer cannot be ignored away.
    """
    verdict = effective_verdict(report)
    if verdict == "unknown":
        return NO_VERDICT
    if fail_on == "never":
        return OK
    return REMAINS if verdict == "not-servable" or counted(report, fail_on) else OK
