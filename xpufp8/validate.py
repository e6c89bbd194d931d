"""``--validate launch``: start the plan; on failure read its log as ``explain`` does and try the next plan, three times at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xpufp8.command import Command, Items, build, known_environment
from xpufp8.doctor import judge, order
from xpufp8.launch import Trial, launch
from xpufp8.planner import Key, carried, host_actions, key, loses
from xpufp8.redaction import redact_report
from xpufp8.report import Finding, Fix, Plan, PlanItem, ProbeReport, Reason, Report
from xpufp8.rules.launched import Attempt, LaunchFacts

if TYPE_CHECKING:
    from xpufp8.doctor import Request
    from xpufp8.target import Target

ATTEMPTS = 3
LAST_LINES = 5
NO_CURE = ("ONEDNN_VERBOSE=", "CCL_LOG_LEVEL=", "--port ")
"""Advice for a person that cures no launch: more words in the log, another port than the trial's own free one."""


def validate_by_launch(target: Target, request: Request, report: Report) -> Report:
    """Launch the report's plan and, where it fails for a known cause with a fix, the next one.

    Returns:
        The report with a plan that was launched and answered, or with the verdict not-servable and what the logs said.
    """
    search, facts = Search(target, request, Items.of(report.plan)), {"environment": known_environment(report)}
    failed: list[Attempt] = []
    while True:
        command = build(target, search.items, facts)
        trial = launch(command)
        causes = [] if trial.ok else explain_log(trial)
        if request.on_done is not None:
            request.on_done(
                ProbeReport(name="launch", status="ok" if trial.ok else "failed", seconds=trial.seconds, detail=trial.detail)
            )
        if trial.ok:
            return _served(target, report, command, search, _facts(trial, failed))
        failed.append(_attempt(trial, search.items, causes))
        if not search.step(causes) or len(failed) == ATTEMPTS:
            return _failed(target, report, search, _facts(trial, failed))


def explain_log(trial: Trial) -> list[Finding]:
    """Known causes in a failed launch's log, each with the log's path."""
    from xpufp8.explain import explain_stream, to_report

    with trial.log.open("rb") as stream:
        found = [f for f in to_report(explain_stream(stream, name=str(trial.log))).findings if f.status == "fail"]
    return [
        f.model_copy(update={"evidence": [e.model_copy(update={"where": f"{trial.log}, {e.where}"}) for e in f.evidence]})
        for f in found
    ]


def _attempt(trial: Trial, items: Items, causes: Sequence[Finding]) -> Attempt:
    text = trial.log.read_text(encoding="utf-8", errors="replace")
    tail = [line[:300] for line in text.splitlines() if line.strip()][-LAST_LINES:]
    added = [*items.runtime, *items.env, *items.flags]
    return Attempt(added, trial.detail, str(trial.log), [f"{c.code} {c.title}" for c in causes], tail)


def _facts(trial: Trial, failed: list[Attempt]) -> LaunchFacts:
    return LaunchFacts(trial.ok, failed, str(trial.log), trial.differences)


@dataclass
class Search:
    """The plan that is launched next: which fix stands for which cause, and which fixes did not help."""

    target: Target
    request: Request
    kept: Items
    """What the probes have proven; it stays."""
    known: dict[Key, Finding] = field(default_factory=dict)
    """Every cause that a log has named."""
    picked: dict[Key, Fix] = field(default_factory=dict)
    useless: set[tuple[Key, str]] = field(default_factory=set)

    @property
    def items(self) -> Items:
        """The plan's items."""
        items = self.kept
        for fix in self.picked.values():
            items = with_fix(items, fix)
        return items

    def step(self, causes: Sequence[Finding]) -> bool:
        """Change the plan after a launch that failed for these causes. False when nothing is left to try.

        A cause that is there again takes its next fix. A new one gets its first, beside what is picked already; where it has none,
        the fix before has brought it, and gives way to the next one of its own cause.
        """
        named = {key(cause): cause for cause in causes}
        self.known |= named
        for name in named.keys() & self.picked.keys():
            self._give_up(name)
        if any(self._pick(name) for name in named):
            return True
        while self.picked:
            name = next(reversed(self.picked))
            self._give_up(name)
            if self._pick(name):
                return True
        return False

    def _give_up(self, name: Key) -> None:
        self.useless.add((name, self.picked.pop(name).action))

    def _pick(self, name: Key) -> bool:
        have = {*self.items.runtime, *self.items.env, *self.items.flags}
        offered = sorted((f for f in self.known[name].fixes if self._applies(f)), key=loses)
        fix = next((f for f in offered if f.action not in have and (name, f.action) not in self.useless), None)
        if fix is not None:
            self.picked[name] = fix
        return fix is not None

    def _applies(self, fix: Fix) -> bool:
        model = self.target.model
        if fix.action.startswith("--quantization") and model is not None and model.quant_method and not model.online:
            return False  # meant for the 16-bit checkpoint of the model, and this one is quantized
        return carried(fix, self.request) and not fix.action.startswith(NO_CURE)

    def reasons(self) -> list[Reason]:
        """Why each picked fix stands in the plan."""
        return [
            Reason(item=fix.action, codes=[name[0]], without_it=f"the launch failed: {self.known[name].title}", cost=fix.cost)
            for name, fix in self.picked.items()
        ]

    def causes(self) -> list[Finding]:
        """The causes that the picked fixes removed, those fixes marked."""
        removed = []
        for name, picked in self.picked.items():
            cause = self.known[name]
            fixes = [f.model_copy(update={"verified": f.action == picked.action}) for f in cause.fixes]
            removed.append(cause.model_copy(update={"fixes": fixes}))
        return removed


def with_fix(items: Items, fix: Fix) -> Items:
    """The items and one more."""

    def more(kind: str, have: tuple[str, ...]) -> tuple[str, ...]:
        return (*have, fix.action) if fix.kind == kind else have

    return Items(more("runtime", items.runtime), more("env", items.env), more("flag", items.flags))


def _failed(target: Target, report: Report, search: Search, facts: LaunchFacts) -> Report:
    findings = [*report.findings, *judge(target, {"launch": facts}, {}, partial=True), *search.known.values()]
    plan = report.plan.model_copy(update={"host_actions": host_actions(findings)})
    update = {"findings": sorted(findings, key=order), "verdict": "not-servable", "plan": plan}
    return redact_report(report.model_copy(update=update), target.typed)


def _served(target: Target, report: Report, command: Command, search: Search, facts: LaunchFacts) -> Report:
    items = search.items
    kinds: tuple[tuple[Any, tuple[str, ...]], ...] = (("runtime", items.runtime), ("env", items.env), ("flag", items.flags))
    plan = Plan(
        argv=command.argv,
        env=command.env,
        shell=command.shell,
        items=[PlanItem(kind=kind, action=action) for kind, actions in kinds for action in actions],
        because=[*report.plan.because, *search.reasons()],
        host_actions=report.plan.host_actions,
        validated="launch",
    )
    findings = [*report.findings, *judge(target, {"launch": facts}, {}, partial=True), *search.causes()]
    verdict = "servable-with-fixes" if plan.items else "servable"
    done = report.model_copy(update={"plan": plan, "findings": sorted(findings, key=order), "verdict": verdict})
    return redact_report(done, command.argv)
