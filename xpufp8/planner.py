"""From findings to the shortest command that passes the probes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xpufp8.report import Finding, Plan

if TYPE_CHECKING:
    from xpufp8.doctor import Request
    from xpufp8.target import Target


def shell_line(argv: Sequence[str], env: dict[str, str]) -> str:
    """One line that a shell reads back as exactly this command and environment."""
    return " ".join([*(f"{name}={shlex.quote(text)}" for name, text in env.items()), shlex.join(argv)])


def make_plan(target: Target, findings: list[Finding], request: Request, *, live: bool) -> tuple[list[Finding], Plan]:
    """The findings (with the fixes that were verified marked) and the plan."""
    del request, live
    if target.model is None:
        return findings, Plan()
    argv = ["vllm", "serve", *target.typed]
    return findings, Plan(argv=argv, shell=shell_line(argv, {}))
