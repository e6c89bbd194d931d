"""``explain --follow-up``: the probes that would confirm on this machine what a log says."""

from __future__ import annotations

from collections.abc import Sequence

from xpufp8.doctor import Request, judge, launch_for, observe, order, validate
from xpufp8.progress import Progress
from xpufp8.report import Report
from xpufp8.target import resolve


def confirm(report: Report, probes: Sequence[str], *, device: str | None, python: str | None, timeout: float) -> Report:
    """The report with what those probes see here added to it; the log's findings and its verdict stay as they are.

    Raises:
        xpufp8.errors.UsageError: a device or interpreter that cannot be used.
    """
    if not probes:
        return report
    target = resolve([], device=device, python=python)
    runnable = [name for name in probes if name not in ("model_trace", "model_config", "vllm_options")]
    with Progress(target) as progress:
        request = Request(timeout=timeout, on_done=progress.done)
        checked, facts, missing = validate(observe(target, runnable, request, launch_for(target, request)))
    findings = sorted([*report.findings, *judge(target, facts, missing, partial=True)], key=order)
    return report.model_copy(update={"probes": [*report.probes, *checked], "findings": findings})
