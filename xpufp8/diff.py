"""``xpufp8 diff``: what a new image, driver or release changed between two diagnoses, and whether anything got worse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from xpufp8.diff_facts import Area, Change, Kind, changed_facts
from xpufp8.report import Finding, Report, Verdict
from xpufp8.verdict import fixed

AREAS: tuple[Area, ...] = ("verdict", "finding", "probe", "op", "kernel table", "kernel", "model", "speed", "version")
KINDS: tuple[Kind, ...] = ("regression", "improvement", "change")
RANK: dict[Verdict, int] = {"servable": 0, "servable-with-fixes": 1, "unknown": 2, "not-servable": 3}


@dataclass(frozen=True)
class Comparison:
    """Everything that changed, what got worse first; within a kind in the order of ``AREAS``, then by subject."""

    before: str
    after: str
    changes: tuple[Change, ...]

    @property
    def regressed(self) -> bool:
        """True when anything got worse."""
        return any(change.kind == "regression" for change in self.changes)

    def data(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "diff_version": "1",
            "before": self.before,
            "after": self.after,
            "regressed": self.regressed,
            "changes": [asdict(change) for change in self.changes],
        }


def compare(old: Report, new: Report, before: str = "A", after: str = "B") -> Comparison:
    """Compare two reports, of one host or of two.

    Paths and interpreters are not compared. Something that only one side looked at is a change, never better or worse.
    """
    changes = [*_verdict(old, new), *_findings(old, new), *_probes(old, new), *changed_facts(old, new)]
    changes.sort(key=lambda c: (KINDS.index(c.kind), AREAS.index(c.area), c.subject, c.before, c.after))
    return Comparison(before, after, tuple(changes))


def _verdict(old: Report, new: Report) -> Iterator[Change]:
    if old.verdict == new.verdict:
        return
    kind: Kind = "regression" if RANK[new.verdict] > RANK[old.verdict] else "improvement"
    if old.verdict == "unknown" or (new.verdict == "unknown" and old.verdict == "not-servable"):
        # What was not known before is no yardstick: findings that fail for sure count on their own.
        kind = "change"
    yield Change("verdict", "verdict", old.verdict, new.verdict, kind)


def _probes(old: Report, new: Report) -> Iterator[Change]:
    before = {p.name: p for p in old.probes}
    after = {p.name: p for p in new.probes}
    for name in sorted({*before, *after}):
        was = before[name].status if name in before else "not run"
        now = after[name].status if name in after else "not run"
        if was == now:
            continue
        kind: Kind = "change"
        if was == "ok" and now in ("failed", "crashed", "timeout"):
            kind = "regression"
        elif now == "ok" and was in ("failed", "crashed", "timeout"):
            kind = "improvement"
        detail = f": {after[name].detail}" if name in after and after[name].detail else ""
        yield Change("probe", name, was, f"{now}{detail}", kind)


def _findings(old: Report, new: Report) -> Iterator[Change]:
    before, after = _by_key(old), _by_key(new)
    for key in sorted({*before, *after}):
        was, now = before.get(key), after.get(key)
        one = now or was
        assert one is not None
        label = f"{one.code} {one.title}" + (f": {one.subject}" if one.subject else "")
        states = _state(was), _state(now)
        if states[0] == states[1] and (was is None or now is None or was.severity == now.severity):
            continue
        told = states if was and now else (states[0] or _absent(key[0], old), states[1] or _absent(key[0], new))
        yield Change("finding", label, *told, _kind(was, now, looked=_looked(key[0], old if was is None else new)))


def _by_key(report: Report) -> dict[tuple[str, str], Finding]:
    """Findings by code and subject; of several with one key, the first, which is the gravest."""
    found: dict[tuple[str, str], Finding] = {}
    for finding in report.findings:
        found.setdefault((finding.code, finding.subject), finding)
    return found


def _state(finding: Finding | None) -> str:
    if finding is None:
        return ""
    if finding.status == "unknown":
        return "could not be told"
    return f"{finding.severity}, repaired by the plan" if fixed(finding) else finding.severity


def _looked(code: str, report: Report) -> bool:
    """True when the probes that the code's rule rests on answered in this report, so that its silence means something."""
    from xpufp8.rules import BY_CODE

    answered = {p.name for p in report.probes if p.status == "ok"}
    rule = BY_CODE.get(code)
    return rule is None or all(name in answered for name in rule.needs)


def _absent(code: str, report: Report) -> str:
    return "" if _looked(code, report) else "not looked at"


def _kind(was: Finding | None, now: Finding | None, *, looked: bool) -> Kind:
    """Whether a finding's change is for the worse; ``looked``: the side without the finding looked for it."""
    if was is None or now is None:
        if not looked or _weight(was or now) < HARMFUL:
            return "change"
        return "regression" if now is not None else "improvement"
    if "unknown" in (was.status, now.status):
        # It fails now and was not known before: nothing says that it was better.
        return "change"
    if max(_weight(was), _weight(now)) < HARMFUL:
        return "change"
    return "regression" if _weight(now) > _weight(was) else "improvement"


HARMFUL = 2
"""From this weight on a finding that comes or goes is for the worse or the better."""


def _weight(finding: Finding | None) -> int:
    """0 nothing known, 1 information, 2 a failure that the plan repairs, 3 a warning, 4 an error."""
    if finding is None or finding.status == "unknown":
        return 0
    if finding.severity == "info":
        return 1
    return 2 if fixed(finding) else {"warning": 3, "error": 4}[finding.severity]
