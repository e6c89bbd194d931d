"""Records this machine for elsewhere (``xpufp8 collect --host``): what the host probes read and tried, redacted, as one JSON file.

The file replays with ``--sysfs FILE``: topology, permissions, limits, Level Zero's answers, exchanges and the two-rank run, but no
names, addresses, serial numbers, secrets or other files.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from probes.protocol import Context
from xpufp8.children import Launch, run_probe
from xpufp8.errors import UsageError
from xpufp8.redaction import redact_text

SECONDS = 60.0
"""The three probes end themselves within twenty; the rest is for a slow start of the interpreter."""


def record_host(context: Context, launch: Launch) -> dict[str, Any]:
    """Run the probe ``host_tree`` in the target's interpreter and return the machine as JSON data.

    Args:
        context: device and options for ``vllm serve``; with parallel sizes the exchanges between cards are those of that command.
        launch: how children are started.

    Raises:
        UsageError: the probe gave no answer, which its message explains.
    """
    report = run_probe("host_tree", replace(context, model=None), replace(launch, timeout=min(launch.timeout, SECONDS)))
    if report.status != "ok":
        last = "".join(f"\n  {line}" for line in report.last_lines[-5:])
        said = redact_text(f"{report.status}: {report.detail}{last}", context.vllm_args)
        raise UsageError(f"This machine could not be recorded: {said}")
    return report.facts


def host_json(tree: dict[str, Any]) -> str:
    """The file's text: sorted, so that two recordings can be compared line by line."""
    return json.dumps(tree, indent=1, sort_keys=True) + "\n"


def write_host(tree: dict[str, Any], path: Path) -> None:
    """Write a recorded machine.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.write_text(host_json(tree), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error
