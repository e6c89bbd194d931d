"""What a rule is: a stable code, a title, the facts it needs, and a docstring that is its published page.

Rules are pure. They read a ``Case`` (no files, clock, environment or torch) and yield findings, so saved facts replay anywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from xpufp8.report import Evidence, Finding, Fix, Severity

if TYPE_CHECKING:
    from xpufp8.model import ModelSpec

F = TypeVar("F")

AREAS = {
    "ENV": "environment and packages", "DEV": "devices, drivers, permissions", "OPS": "fake-tensor traceability",
    "KRN": "kernel tables", "DTY": "dtype agreement", "NUM": "numerics", "CMP": "compile", "MDL": "model construction",
    "MEM": "memory", "P2P": "peer access and collectives", "PRF": "speed", "CFG": "contradictory or needless options",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Everything that rules may look at."""

    device: str
    """xpu, cpu, cuda or sim:<profile>."""
    vllm_args: tuple[str, ...] = ()
    model: ModelSpec | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Probe name to its facts (a dataclass of ``probes.facts``); a probe without an answer has no entry."""
    missing: dict[str, str] = field(default_factory=dict)
    """Probe name to the reason why it gave no answer (crash, time limit, skip, exception)."""

    @property
    def simulated(self) -> bool:
        """True when the device is a simulated XPU."""
        return self.device.startswith("sim")

    @property
    def platform(self) -> str:
        """Name of the device's platform in vLLM: XPU, CPU or CUDA."""
        return "XPU" if self.simulated else self.device.split(":")[0].upper()

    def get(self, probe: str, kind: type[F]) -> F | None:
        """Facts of a probe, or None where it gave no answer."""
        value = self.facts.get(probe)
        return value if isinstance(value, kind) else None


@dataclass(frozen=True)
class Rule:
    """One rule. ``check`` yields findings made with :meth:`finding`."""

    code: str
    title: str
    severity: Severity
    needs: tuple[str, ...]
    """Probes whose facts it reads. When one is missing the rule does not run and the doctor reports it as not checked."""
    check: Callable[[Rule, Case], Iterator[Finding]]
    since: str = "0.1.0"
    references: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """The rule's page: the docstring of its function."""
        return inspect.getdoc(self.check) or ""

    def finding(
        self, subject: str, cause: str, evidence: list[Evidence], *, fixes: list[Fix] | None = None,
        severity: Severity | None = None, unknown: bool = False, affects: list[str] | None = None, title: str | None = None,
    ) -> Finding:  # fmt: skip
        """A finding of this rule. ``unknown`` marks what could not be told; it is never shown as good or bad."""
        return Finding(
            code=self.code, severity=severity or self.severity, status="unknown" if unknown else "fail",
            title=title or self.title, cause=cause, subject=subject, affects=affects or [], evidence=evidence,
            fixes=fixes or [], references=list(self.references),
        )  # fmt: skip


def rule(
    code: str, title: str, severity: Severity, needs: tuple[str, ...] = (), **extra: Any
) -> Callable[[Callable[[Rule, Case], Iterator[Finding]]], Rule]:
    """Decorator that turns a function into a Rule; the function's docstring is the rule's page."""
    return lambda check: Rule(code, title, severity, needs, check, **extra)
