"""The one place that turns findings into a verdict and a verdict into an exit code."""

from __future__ import annotations

from collections.abc import Sequence

from xpufp8.exits import NO_VERDICT, OK, REMAINS, FailOn
from xpufp8.report import Finding, Plan, ProbeReport, Report, Verdict

RANK = {"error": 0, "warning": 1, "info": 2}


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


def exit_code(report: Report, fail_on: FailOn = "error") -> int:
    """0 it can be served as planned; 1 it cannot, or a finding at or above ``fail_on`` remains; 3 no verdict.

    ``never`` is for a job that only collects reports: findings do not fail it, a missing verdict still does.
    """
    if report.verdict == "unknown":
        return NO_VERDICT
    if fail_on == "never":
        return OK
    if report.verdict == "not-servable":
        return REMAINS
    if fail_on == "warning" and any(f.severity in ("error", "warning") for f in remaining(report.findings)):
        return REMAINS
    return OK
