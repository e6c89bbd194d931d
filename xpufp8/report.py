"""The report: what a diagnosis says, as pydantic models (DESIGN section 6). Its JSON is schema version "1"."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from xpufp8.exits import Code

SCHEMA_VERSION: Literal["1"] = "1"

Severity = Literal["error", "warning", "info"]
Verdict = Literal["servable", "servable-with-fixes", "not-servable", "unknown"]
ProbeStatus = Literal["ok", "failed", "crashed", "timeout", "skipped"]


class Model(BaseModel):
    """Base of the report's models: frozen, and tolerant of fields that a later version added.

    They are built on first use, which keeps a third of the time of ``from xpufp8 import Report``.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class Tool(Model):
    """Who wrote the report."""

    name: str = "xpufp8"
    version: str


class TargetInfo(Model):
    """What was diagnosed."""

    python: str
    device: str
    simulated: bool
    model: str | None = None
    vllm_args: list[str] = Field(default_factory=list)


class ProbeReport(Model):
    """One probe's run. ``facts`` is empty unless the status is ``ok``; ``detail`` says why."""

    name: str
    status: ProbeStatus
    seconds: float = 0.0
    facts: dict[str, Any] = Field(default_factory=dict)
    detail: str = ""
    """For a probe without an answer: the signal, the limit or the exception."""
    last_lines: list[str] = Field(default_factory=list)
    """End of what the child printed, for a probe without an answer."""


class Evidence(Model):
    """One observation that a finding rests on."""

    probe: str
    mode: Literal["live", "static", "simulated"]
    observed: str
    expected: str = ""
    where: str = ""
    """File and line, op, table row or log line it was seen at."""


class Fix(Model):
    """One way to remove a finding."""

    kind: Literal["runtime", "flag", "env", "host"]
    action: str
    """``runtime``: the repair's name for XPUFP8_APPLY; ``flag``: options as typed; ``env``: K=V; ``host``: a sentence."""
    verified: bool = False
    """True only when the probe ran again with the fix and the finding was gone."""
    cost: str = ""


class Ignored(Model):
    """Why a finding does not count for the exit code."""

    by: Literal["policy", "baseline"]
    reason: str
    until: str = ""
    """Last day on which it does not count (ISO date); empty for a baseline."""


class Finding(Model):
    """One thing that is wrong, or that could not be told (``status`` unknown)."""

    code: str
    severity: Severity
    status: Literal["fail", "unknown"]
    title: str
    cause: str
    subject: str = ""
    """What exactly it is about (op, scheme, package, variable): tells two findings of one code apart."""
    affects: list[str] = Field(default_factory=list)
    """Layers or model parts that it hits, where known."""
    evidence: list[Evidence] = Field(default_factory=list)
    fixes: list[Fix] = Field(default_factory=list)
    references: list[str] = Field(default_factory=list)
    ignored: Ignored | None = None
    """Set by a policy or a baseline; the finding is shown and does not count."""
    note: str = ""
    """What the policy says of a finding that counts all the same: an ignore that has expired."""


class Reason(Model):
    """Why one item stands in the plan."""

    item: str
    codes: list[str]
    without_it: str
    cost: str = ""
    """What the item costs or loses; empty when nothing is known to be lost."""

    @property
    def sentence(self) -> str:
        """For people: what stands in the plan (or was left out), what happens otherwise, and the price."""
        price = f"; its price: {self.cost}" if self.cost not in ("", "none") else ""
        if self.item.startswith("without "):
            return f"{self.item.removeprefix('without ')} left out; with it: {self.without_it}{price}"
        return f"{self.item}; without it: {self.without_it}{price}"


class PlanItem(Model):
    """One thing that a plan adds to the typed command, or takes away from it."""

    kind: Literal["runtime", "flag", "env"]
    action: str
    """As in :class:`Fix`."""


class Plan(Model):
    """The command that serves, or the best that is known. Secrets in it are redacted; ``items`` and what was typed rebuild it."""

    argv: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    shell: str = ""
    items: list[PlanItem] = Field(default_factory=list)
    because: list[Reason] = Field(default_factory=list)
    host_actions: list[str] = Field(default_factory=list)
    validated: Literal["none", "probe", "launch"] = "none"


class Outcome(Model):
    """How the exit code came about. Absent from a report that nobody has judged by a threshold yet."""

    exit_code: Code
    fail_on: Literal["error", "warning", "never"] = "error"
    policy: str = ""
    """File of the policy, empty if there was none."""
    baseline: str = ""
    """File of the earlier report that findings were held against, empty if there was none."""
    notes: list[str] = Field(default_factory=list)
    """Ignores that have expired and ignores that met nothing."""


class Report(Model):
    """A whole diagnosis."""

    schema_version: Literal["1"] = SCHEMA_VERSION
    tool: Tool
    verdict: Verdict
    target: TargetInfo
    probes: list[ProbeReport] = Field(default_factory=list)
    findings: list[Finding] = Field(default_factory=list)
    plan: Plan = Field(default_factory=Plan)
    outcome: Outcome | None = None
