"""``--validate launch``: start the plan; on failure read its log as ``explain`` does and try the next plan, three times at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xpufp8.command import Command, Items, build, known_environment
from xpufp8.doctor import judge, order
from xpufp8.launch import Trial, launch
from xpufp8.redaction import redact_report
from xpufp8.report import Finding, Fix, Plan, PlanItem, ProbeReport, Reason, Report
from xpufp8.rules.launched import LaunchFacts

if TYPE_CHECKING:
    from xpufp8.doctor import Request
    from xpufp8.target import Target

ATTEMPTS = 3
LAST_LINES = 5


def validate_by_launch(target: Target, request: Request, report: Report) -> Report:
    """Launch the report's plan and, where it fails for a known cause with a fix, the next one.

    Returns:
        The report with a plan that was launched and answered, or with the verdict not-servable and what the logs said.
    """
    items, because, found = Items.of(report.plan), list(report.plan.because), list(report.findings)
    facts = {"environment": known_environment(report)}
    for _ in range(ATTEMPTS):
        command = build(target, items, facts)
        trial = launch(command)
        if request.on_done is not None:
            request.on_done(
                ProbeReport(name="launch", status="ok" if trial.ok else "failed", seconds=trial.seconds, detail=trial.detail)
            )
        causes = [] if trial.ok else explain_log(trial)
        found += judge(target, {"launch": _facts(trial, explained=bool(causes))}, {}, partial=True) + causes
        if trial.ok:
            return _concluded(report, command, items, because, found)
        step = next_fix(items, causes)
        if step is None:
            break
        fix, cause = step
        items = with_fix(items, fix)
        because.append(Reason(item=fix.action, codes=[cause.code], without_it=f"the launch failed: {cause.title}"))
    failed = report.model_copy(update={"findings": sorted(found, key=order), "verdict": "not-servable"})
    return redact_report(failed, target.typed)


def explain_log(trial: Trial) -> list[Finding]:
    """Known causes in a failed launch's log."""
    from xpufp8.explain import explain_stream, to_report

    with trial.log.open("rb") as stream:
        return [f for f in to_report(explain_stream(stream, name=str(trial.log))).findings if f.status == "fail"]


def _facts(trial: Trial, *, explained: bool) -> LaunchFacts:
    text = trial.log.read_text(encoding="utf-8", errors="replace")
    tail = [line[:300] for line in text.splitlines() if line.strip()][-LAST_LINES:]
    return LaunchFacts(trial.ok, trial.detail, str(trial.log), tail, trial.differences, explained)


def next_fix(items: Items, causes: Sequence[Finding]) -> tuple[Fix, Finding] | None:
    """The first fix that a command can carry and that is not in the plan yet."""
    have = {*items.runtime, *items.env, *items.flags}
    return next(((x, c) for c in causes for x in c.fixes if x.kind != "host" and x.action not in have), None)


def with_fix(items: Items, fix: Fix) -> Items:
    """The items and one more."""

    def more(kind: str, have: tuple[str, ...]) -> tuple[str, ...]:
        return (*have, fix.action) if fix.kind == kind else have

    return Items(more("runtime", items.runtime), more("env", items.env), more("flag", items.flags))


def _concluded(report: Report, command: Command, items: Items, because: list[Reason], findings: list[Finding]) -> Report:
    kinds: tuple[tuple[Any, tuple[str, ...]], ...] = (("runtime", items.runtime), ("env", items.env), ("flag", items.flags))
    plan = Plan(
        argv=command.argv,
        env=command.env,
        shell=command.shell,
        items=[PlanItem(kind=kind, action=action) for kind, actions in kinds for action in actions],
        because=because,
        host_actions=report.plan.host_actions,
        validated="launch",
    )
    verdict = "servable-with-fixes" if plan.items else "servable"
    done = report.model_copy(update={"plan": plan, "findings": sorted(findings, key=order), "verdict": verdict})
    return redact_report(done, command.argv)
