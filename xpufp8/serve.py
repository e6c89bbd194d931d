"""``xpufp8 serve``: diagnose, plan, say the plan on stderr, and become vLLM.

``exec`` replaces this process, so signals, exit codes and logs are vLLM's own.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NoReturn

from xpufp8 import cache
from xpufp8.command import Command
from xpufp8.doctor import Request, diagnose_target
from xpufp8.errors import UsageError
from xpufp8.exits import NO_VERDICT, OK, REMAINS
from xpufp8.report import Plan, Report

if TYPE_CHECKING:
    from xpufp8.target import Target

Validate = Literal["none", "probe", "launch"]


@dataclass(frozen=True)
class Decision:
    """What serve has decided: the report it rests on, whether it came from the cache, and whether to start."""

    report: Report
    cached: bool
    start: bool


def decide(target: Target, request: Request, validate: Validate, *, anyway: bool = False) -> Decision:
    """Diagnose (or take what the cache holds) and validate the plan.

    Raises:
        UsageError: no MODEL, a simulated device, or unreadable input.
    """
    if target.model is None:
        raise UsageError("serve needs a MODEL: a folder with config.json or a hub id, as for vllm serve.")
    settings = (validate, request.runtime_fixes, request.only, request.skip, sorted(request.options.items()))
    key = cache.key_of(target, settings)
    kept = cache.load(key) if request.cache else None
    if kept is not None:
        return Decision(kept, cached=True, start=startable(kept) or anyway)
    report = diagnose_target(target, replace(request, replan=validate != "none"))
    launched = validate == "launch" and startable(report)
    if launched:
        from xpufp8.validate import validate_by_launch

        report = validate_by_launch(target, request, report)
    # What rests on a probe that happened to crash or run out of time, or on a launch that failed, is not kept: memory that another
    # process held, for one, is part of no key. The next start looks again.
    lasting = report.verdict != "unknown" and not any(p.status in ("crashed", "timeout") for p in report.probes)
    if lasting and not (launched and not startable(report)):
        cache.save(key, report)
    return Decision(report, cached=False, start=startable(report) or anyway)


def startable(report: Report) -> bool:
    """True when the verdict says that the plan serves."""
    return report.verdict in ("servable", "servable-with-fixes")


def refusal_code(report: Report) -> int:
    """Exit code of a serve that does not start."""
    return NO_VERDICT if report.verdict == "unknown" else REMAINS


def say(plan: Plan, *, cached: bool) -> None:
    """The plan on stderr, one line an item."""
    from xpufp8.output.text import clean

    known = " (nothing changed since it was last checked)" if cached else ""
    validated = {"none": "not validated", "probe": "probes pass", "launch": "launched and answered"}[plan.validated]
    print(f"xpufp8: {validated}{known}: {clean(plan.shell)}", file=sys.stderr)
    for reason in plan.because:
        print(f"xpufp8:   {clean(reason.sentence)} ({', '.join(reason.codes)})", file=sys.stderr)
    sys.stderr.flush()


def become_vllm(command: Command) -> NoReturn:
    """Replace this process by the command.

    Raises:
        UsageError: the program cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command.argv[0], command.argv, {**os.environ, **command.env})  # noqa: S606 - becoming vLLM is the point
    except OSError as error:
        raise UsageError(f"{command.argv[0]}: cannot be started ({error.strerror or error})") from error


def exit_for(decision: Decision) -> int:
    """Exit code of a dry run: what serve would have done."""
    return OK if decision.start else refusal_code(decision.report)
