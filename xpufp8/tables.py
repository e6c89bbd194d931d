"""``xpufp8 ops`` and ``xpufp8 kernels``: one probe, shown as a table."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from xpufp8.doctor import Request, judge, launch_for, observe, validate
from xpufp8.errors import UsageError
from xpufp8.exits import NO_VERDICT, OK, REMAINS
from xpufp8.output import Format
from xpufp8.progress import Progress
from xpufp8.report import ProbeReport
from xpufp8.target import Target, resolve
from xpufp8.verdict import remaining


def run_table(
    probe: str,
    *,
    device: str | None,
    python: str | None,
    chosen: Format,
    output: Path | None,
    timeout: float,
    vllm_path: str | None = None,
    every: bool = False,
) -> int:
    """Run one probe and show its table.

    Returns:
        0; 1 when a finding of the probe's rules is an error; 3 when the probe gave no answer.

    Raises:
        xpufp8.errors.UsageError: a device, interpreter or path that cannot be used.
    """
    from xpufp8.cli_options import write
    from xpufp8.output.text import clean
    from xpufp8.redaction import redact_text

    if chosen not in (Format.RICH, Format.JSON):
        raise UsageError(f"--format {chosen.value}: a table is rich or json; doctor writes the other formats.")
    target = resolve([], device=device, python=python, vllm_path=vllm_path)
    if vllm_path is not None:
        target = replace(target, options={"live": False})
    request = Request(timeout=timeout)
    with Progress(target) as progress:
        request = replace(request, on_done=progress.done)
        reports, facts, missing = validate(observe(target, [probe], request, launch_for(target, request)))
    report = reports[0]
    if report.status != "ok":
        write(clean(redact_text(f"{probe} {missing[probe]}\n", target.typed)), output)
        return NO_VERDICT
    if chosen is Format.JSON:
        write(json.dumps(report.model_dump(mode="json"), indent=2) + "\n", output)
    else:
        _show(probe, facts[probe], report, target, output, every=every)
    found = judge(target, facts, {})
    return REMAINS if any(f.severity == "error" for f in remaining(found)) else OK


def _show(probe: str, facts: Any, report: ProbeReport, target: Target, output: Path | None, *, every: bool) -> None:
    from rich.console import Console

    from xpufp8.cli_options import to_stdout, write
    from xpufp8.output import tables
    from xpufp8.output.terminal import console_for

    del report
    view = tables.kernel_view(facts, target.device) if probe == "kernel_table" else tables.op_view(facts, every=every)
    if output is None:
        to_stdout(lambda: console_for().print(view))
        return
    text = io.StringIO()
    Console(file=text, width=120, color_system=None).print(view)
    write(text.getvalue(), output)
