"""From findings to the shortest command that passes the probes.

A fix is taken from each finding that stops serving, cheapest first; everything is probed again with all of them; what did not
help is replaced by the next fix; at the end each item is left out once, and stays only if something fails without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from xpufp8 import options
from xpufp8.command import METADATA, Items, build, missing_metadata, vllm_args
from xpufp8.model import from_config
from xpufp8.report import Finding, Fix, Plan, PlanItem, ProbeReport, Reason
from xpufp8.rules.cfg import COMPILED_TRACE, WITHOUT
from xpufp8.verdict import needed_for

if TYPE_CHECKING:
    from xpufp8.doctor import Request
    from xpufp8.target import Target

ROUNDS = 6
"""How often fixes are replaced before the planner gives up."""

KERNELS = frozenset({"kernel_table", "model_trace", "dtype_agreement", "numerics", "compile", "speed"})
TRACING = frozenset({"fake_tensor", "model_trace", "compile"})
HOST = frozenset({"environment", "devices", "peer_access", "host_ipc"})
OPTIONS = frozenset({"vllm_options", "model_trace", "kernel_table"})
RUNTIME = {"metadata": frozenset({"environment"}), "fake": TRACING, "kernel": KERNELS, "moe": KERNELS, "cast": KERNELS | TRACING}
"""Family of a runtime repair to the probes that can see its effect."""


def seen_by(fix: Fix, findings: Sequence[Finding]) -> frozenset[str] | None:
    """Probes that can see the effect of a fix; None for every probe. The probes of the findings that propose it are among them."""
    proposers = frozenset(e.probe for f in findings for x in f.fixes if x.action == fix.action for e in f.evidence)
    if fix.kind == "env":
        # Variables of oneCCL and libfabric reach only what talks to other ranks; any other may reach a library that is loaded.
        words = fix.action.split()
        return HOST | proposers if all(w.startswith(("CCL_", "FI_", "I_MPI")) for w in words) else None
    if fix.kind == "runtime":
        return RUNTIME.get(fix.action.partition(":")[0], KERNELS | TRACING) | proposers
    # An option that vLLM's parser does not know changes nothing that another probe sees.
    return proposers if fix.action.startswith(WITHOUT) and proposers == {"vllm_options"} else OPTIONS | proposers


Key = tuple[str, str]


def key(finding: Finding) -> Key:
    """What tells one finding from another."""
    return finding.code, finding.subject


def stops(finding: Finding) -> bool:
    """True when serving is known to fail because of it."""
    return finding.severity == "error" and finding.status == "fail"


NUMBERS = ("--dtype", "--kv-cache-dtype", "--quantization")
"""Options that change what is computed."""
LOSES = ("--language-model-only", "--tensor-parallel-size 1")
"""Options after which the server can do less than was asked for: a kind of input is refused, a card stands idle."""
CONSENT = ("--trust-remote-code",)
"""Options that only the person may add: this one runs code that came with the checkpoint."""


def loses(fix: Fix) -> bool:
    """True when serving with the fix is serving less."""
    return fix.kind == "flag" and fix.action.startswith(LOSES)


def rank(fix: Fix) -> int:
    """Preference among fixes: what is free first, then variables, costly repairs, flags that cost speed or memory, flags that
    change numbers, and last flags that lose a function.
    """
    if fix.kind == "runtime":
        return 2 if fix.cost else 0
    if fix.kind == "env" or (fix.action.startswith(WITHOUT) and not fix.cost):
        return 1
    if fix.kind == "flag":
        return 5 if loses(fix) else 4 if fix.action.startswith(NUMBERS) else 3
    return 9


def usable(finding: Finding, request: Request) -> list[Fix]:
    """A finding's fixes that a command can carry, best first."""
    return sorted((f for f in finding.fixes if carried(f, request)), key=rank)


def carried(fix: Fix, request: Request) -> bool:
    """True when a plan may hold the fix: no action of a person, no repair where they are switched off."""
    if fix.kind == "host" or (fix.kind == "flag" and fix.action.startswith(CONSENT)):
        return False
    return fix.kind != "runtime" or request.runtime_fixes


@dataclass(frozen=True)
class Trial:
    """What the probes said with some items in place."""

    findings: list[Finding]
    missing: frozenset[str]

    def failures(self) -> set[Key]:
        """Findings that stop serving."""
        return {key(f) for f in self.findings if stops(f)}


@dataclass
class Bench:
    """Probes again with fixes in place, and remembers what came of it."""

    target: Target
    request: Request
    facts: dict[str, Any]
    missing: dict[str, str]
    base: list[Finding]
    memo: dict[frozenset[Fix], Trial] = field(default_factory=dict)
    seen: dict[tuple[str, frozenset[Fix]], ProbeReport] = field(default_factory=dict)
    """What a probe answered, by the fixes that it can see; the others that were in place then cannot have mattered to it."""
    runs: int = 0

    def items(self, fixes: Sequence[Fix]) -> Items:
        """Fixes as a command carries them, in a stable order."""
        of = {kind: tuple(sorted({f.action for f in fixes if f.kind == kind})) for kind in ("runtime", "env", "flag")}
        return Items(of["runtime"], of["env"], of["flag"])

    def variant(self, items: Items) -> Target:
        """The target with a plan's flags among its options."""
        args, model = tuple(vllm_args(self.target.vllm_args, items.flags)), self.target.model
        return replace(
            self.target,
            vllm_args=args,
            typed=tuple(vllm_args(self.target.typed, items.flags)),
            model=from_config(model.source, model.folder, model.config, args) if model else None,
        )

    def trial(self, fixes: frozenset[Fix]) -> Trial:
        """Probe with these fixes in place; a set that was tried before costs nothing."""
        if not fixes:
            return Trial(self.base, frozenset(self.missing))
        plain = frozenset(f.model_copy(update={"verified": False, "cost": ""}) for f in fixes)
        if plain not in self.memo:
            self.memo[plain] = self._probe(plain)
        return self.memo[plain]

    def _probe(self, fixes: frozenset[Fix]) -> Trial:
        from xpufp8.doctor import judge, validate

        target = self.variant(self.items(sorted(fixes, key=lambda f: f.action)))
        relevant = {name: self._relevant(name, fixes) for name in (*self.facts, *self.missing)}
        again = [name for name, some in relevant.items() if some]
        self._run(target, fixes, [name for name in again if (name, relevant[name]) not in self.seen], relevant)
        _, facts, missing = validate([self.seen[name, relevant[name]] for name in again])
        facts = {k: v for k, v in self.facts.items() if k not in again} | facts
        missing = {k: v for k, v in self.missing.items() if k not in again} | missing
        return Trial(judge(target, facts, missing), frozenset(missing))

    def _run(self, target: Target, fixes: frozenset[Fix], names: Sequence[str], relevant: dict[str, frozenset[Fix]]) -> None:
        """Ask these probes with all the fixes in place, and remember each answer by the fixes that the probe can see."""
        from xpufp8.doctor import launch_for, observe

        if not names:
            return
        items = self.items(sorted(fixes, key=lambda f: f.action))
        folder = missing_metadata(self.facts.get("environment")) if METADATA in items.runtime else None
        launch = launch_for(target, self.request, items.apply, [folder] if folder else [])
        launch = replace(launch, environment=launch.environment | items.variables)
        self.runs += 1
        if self.request.on_try is not None:
            self.request.on_try(", ".join(sorted(f.action for f in fixes)))
        for report in observe(target, names, self.request, launch):
            self.seen[report.name, relevant[report.name]] = report

    def _relevant(self, name: str, fixes: frozenset[Fix]) -> frozenset[Fix]:
        """Those of the fixes whose effect the probe can see."""
        sees = {fix: seen_by(fix, self.base) for fix in fixes}
        return frozenset(fix for fix, probes in sees.items() if probes is None or name in probes)


def make_plan(
    target: Target, request: Request, findings: list[Finding], facts: dict[str, Any], missing: dict[str, str], *, live: bool
) -> tuple[list[Finding], Plan]:
    """Plan, and mark the fixes that were verified.

    Returns:
        The findings (with those that only planning can see), and the plan; an empty one without a model.
    """
    bench = Bench(target, request, dict(facts), dict(missing), findings)
    fixes: frozenset[Fix] = frozenset()
    if live:
        fixes = shorten(bench, choose(bench))
        findings = [*mark(bench, fixes), *_needless_eager(bench, fixes)]
    if target.model is None:
        return sort(findings), Plan()
    command = build(target, bench.items(sorted(fixes, key=lambda f: f.action)), facts)
    last = bench.trial(fixes)
    answered = set(facts) - last.missing
    passes = live and not last.failures() and answered.issuperset(needed_for(target.info))
    return sort(findings), Plan(
        argv=command.argv,
        env=command.env,
        shell=command.shell,
        items=[
            PlanItem(kind=f.kind, action=f.action) for f in sorted(fixes, key=lambda f: (rank(f), f.action)) if f.kind != "host"
        ],
        because=because(bench, fixes),
        host_actions=host_actions(findings),
        validated="probe" if passes else "none",
    )


def sort(findings: list[Finding]) -> list[Finding]:
    """The report's order."""
    from xpufp8.doctor import order

    return sorted(findings, key=order)


def choose(bench: Bench) -> frozenset[Fix]:
    """A set of fixes under which as few findings as possible stop serving."""
    useless: set[tuple[Key, Fix]] = set()
    problems = {key(f): f for f in bench.base if stops(f)}
    best: frozenset[Fix] = frozenset()
    fewest = len(problems)
    for _ in range(ROUNDS):
        picked: dict[Key, Fix] = {}
        for name, finding in problems.items():
            fix = next((f for f in usable(finding, bench.request) if (name, f) not in useless), None)
            if fix is not None:
                picked[name] = fix
        fixes = frozenset(picked.values())
        if not fixes:
            return best
        failures = {key(f): f for f in bench.trial(fixes).findings if stops(f)}
        if len(failures) < fewest:
            best, fewest = fixes, len(failures)
        if not failures:
            return fixes
        before = len(useless), len(problems)
        useless |= {(name, picked[name]) for name in failures if name in picked}
        problems |= {name: f for name, f in failures.items() if name not in problems}
        if (len(useless), len(problems)) == before:
            return best
    return best


def shorten(bench: Bench, fixes: frozenset[Fix]) -> frozenset[Fix]:
    """Leave each item out once, dearest first; it stays only if something fails without it."""
    allowed = bench.trial(fixes).failures()
    for fix in sorted(fixes, key=lambda f: (-rank(f), f.action)):
        smaller = fixes - {fix}
        if not bench.trial(smaller).failures() - allowed:
            fixes = smaller
    return fixes


def mark(bench: Bench, fixes: frozenset[Fix]) -> list[Finding]:
    """The base findings and those that stood behind them, a fix of the plan marked verified where a finding is gone with it and
    nothing new has come.
    """
    if not fixes:
        return bench.base
    after = bench.trial(fixes)
    left = {key(f) for f in after.findings}
    new = after.failures() - {key(f) for f in bench.base}
    actions = {(f.kind, f.action) for f in fixes}
    marked = []
    for finding in [*bench.base, *_behind(bench, fixes)]:
        if key(finding) not in left and not new:
            if finding.status == "unknown":
                continue  # what the plan's own probes told is unknown no more
            done = [f.model_copy(update={"verified": (f.kind, f.action) in actions}) for f in finding.fixes]
            finding = finding.model_copy(update={"fixes": done})
        marked.append(finding)
    # What stops serving only once the first fault is out of the way belongs in the report too.
    return marked + [f for f in after.findings if stops(f) and key(f) in new]


def _behind(bench: Bench, fixes: frozenset[Fix]) -> list[Finding]:
    """Faults that show only once others are out of the way and that the plan removes: seen with one item left out."""
    without = (f for fix in sorted(fixes, key=lambda f: f.action) for f in bench.trial(fixes - {fix}).findings if stops(f))
    seen = {key(f) for f in bench.base} | bench.trial(fixes).failures()
    actions = {(f.kind, f.action) for f in fixes}
    answered = (f for f in without if key(f) not in seen and any((x.kind, x.action) in actions for x in f.fixes))
    return list({key(f): f for f in answered}.values())


def _needless_eager(bench: Bench, fixes: frozenset[Fix]) -> list[Finding]:
    """CFG005, which needs a trace that the typed command would not make: one with torch.compile on."""
    from xpufp8.doctor import judge, launch_for, observe, validate

    typed = bench.target.vllm_args
    if "model_trace" not in bench.facts or not options.flag(typed, "--enforce-eager") or bench.trial(fixes).failures():
        return []
    items = bench.items(sorted(fixes, key=lambda f: f.action))
    target = bench.variant(replace(items, flags=(*items.flags, WITHOUT + "--enforce-eager")))
    _, facts, _ = validate(observe(target, ["model_trace"], bench.request, launch_for(target, bench.request, items.apply)))
    compiled = facts.get("model_trace")
    if compiled is None:
        return []
    return judge(bench.target, {COMPILED_TRACE: compiled}, {}, partial=True)


def because(bench: Bench, fixes: frozenset[Fix]) -> list[Reason]:
    """For each item: the codes it answers, what was seen to fail without it, and what it costs."""
    reasons = []
    for fix in sorted(fixes, key=lambda f: (rank(f), f.action)):
        without = [f for f in bench.trial(fixes - {fix}).findings if stops(f)]
        mine = [f for f in without if any((x.kind, x.action) == (fix.kind, fix.action) for x in f.fixes)] or without
        said = mine[0].title + (f" ({mine[0].subject})" if mine[0].subject else "") if mine else "a probe fails"
        reasons.append(Reason(item=fix.action, codes=sorted({f.code for f in mine}), without_it=said, cost=fix.cost))
    return reasons


def host_actions(findings: Sequence[Finding]) -> list[str]:
    """What only a person can do, for what stops serving and no verified fix removes."""
    from xpufp8.verdict import fixed

    open_ = [f for f in findings if stops(f) and not fixed(f)]
    return list(dict.fromkeys(x.action for f in open_ for x in f.fixes if x.kind == "host"))
