"""Device probes in a diagnosis: once, with the plan in place, because only what the planned server runs is worth judging.

Before a plan is there, a layer may have no kernel at all, and a kernel that the plan replaces is nobody's concern. Where the device
shows a fault that stops serving, planning starts again with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from xpufp8.command import METADATA, Items, missing_metadata
from xpufp8.report import ProbeReport, Report

if TYPE_CHECKING:
    from xpufp8.doctor import Request
    from xpufp8.target import Target

STARTABLE = ("servable", "servable-with-fixes")


def check_on_device(
    target: Target, request: Request, names: Sequence[str], reports: Sequence[ProbeReport], report: Report
) -> Report:
    """The report with what the device says of its plan.

    Args:
        target: What is diagnosed.
        request: Limits and selections.
        names: Device probes to run.
        reports: Of the probes that ran before, as they came.
        report: Concluded from those; its plan is what runs here.
    """
    from xpufp8.doctor import conclude, judge, launch_for, observe, order, validate
    from xpufp8.planner import Bench, stops
    from xpufp8.rules import BY_CODE

    if not names:
        return report
    if report.verdict not in STARTABLE:
        skipped = [ProbeReport(name=n, status="skipped", detail="there is no plan that could run on the device") for n in names]
        return report.model_copy(update={"probes": [*report.probes, *skipped]})
    _, facts, missing = validate(reports)
    items = Items.of(report.plan)
    variant = Bench(target, request, facts, missing, []).variant(items)
    folder = missing_metadata(facts.get("environment")) if METADATA in items.runtime else None
    launch = launch_for(variant, request, items.apply, [folder] if folder else [])
    launch = replace(launch, environment=launch.environment | items.variables)
    found = observe(variant, names, request, launch)
    checked, on_device, _ = validate(found)
    judged = judge(variant, facts | on_device, missing)
    added = [f for f in judged if f.code in BY_CODE and set(BY_CODE[f.code].needs) & set(names)]
    if any(stops(f) for f in added):
        return conclude(target, [*reports, *found], request, live=True)
    findings = sorted([*report.findings, *added], key=order)
    return report.model_copy(update={"probes": [*report.probes, *checked], "findings": findings})
