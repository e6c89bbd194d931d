"""How a probe is asked and how it answers, with the standard library alone.

The host writes one JSON ``Context`` to the child's stdin and reads one JSON envelope from the file named by
``XPUFP8_RESULT``; stdout and stderr belong to whatever vLLM prints. Without that variable the envelope goes to stdout, so a
person can run ``python -m probes kernel_table < context.json``.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probes.facts import ErrorFact, Frame

PROTOCOL = 1
RESULT_VARIABLE = "XPUFP8_RESULT"

PROBES: dict[str, str] = {
    "compile": "probes.device_facts:CompileFacts",
    "devices": "probes.host_facts:DevicesFacts",
    "dtype_agreement": "probes.device_facts:DtypeAgreementFacts",
    "environment": "probes.facts:EnvironmentFacts",
    "fake_tensor": "probes.facts:FakeTensorFacts",
    "host_ipc": "probes.host_facts:HostIpcFacts",
    "host_tree": "probes.host_facts:HostTreeFacts",
    "kernel_table": "probes.facts:KernelTableFacts",
    "model_config": "probes.model_config_facts:ModelConfigFacts",
    "model_trace": "probes.model_facts:ModelTraceFacts",
    "numerics": "probes.device_facts:NumericsFacts",
    "peer_access": "probes.host_facts:PeerAccessFacts",
    "speed": "probes.device_facts:SpeedFacts",
    "vllm_options": "probes.vllm_options_facts:VllmOptionsFacts",
}
"""Probe (module of this package with an ``observe(context) -> facts`` function) to its facts class, ``module:Class``."""

ON_REQUEST = frozenset({"host_tree"})
"""Probes that run only when they are named: recording a machine is no part of a diagnosis."""


@dataclass(frozen=True)
class Context:
    """What a probe is asked about."""

    device: str = "cpu"
    """xpu, cpu, cuda, or sim:<profile>."""
    model: str | None = None
    """Folder with config.json, already resolved by the host."""
    vllm_args: list[str] = field(default_factory=list)
    """Options for ``vllm serve``, as typed, MODEL not among them."""
    vllm_path: str | None = None
    """An unpacked vLLM to read instead of the installed one (static probes only)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the single probe."""

    @classmethod
    def from_json(cls, text: str) -> Context:
        """Read a context; unknown keys are ignored so that an older target half serves a newer host.

        Raises:
            ValueError: the text is not a JSON object.
        """
        data = json.loads(text or "{}")
        if not isinstance(data, dict):
            raise ValueError("a probe context is a JSON object")  # noqa: TRY004 - callers treat it as unreadable text
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in names})

    @property
    def simulated(self) -> bool:
        """True when the device is a simulated one."""
        return self.device.startswith("sim")


def describe_error(error: BaseException, limit: int = 40) -> ErrorFact:
    """Turn an exception into data, following ``__cause__`` and then ``__context__`` to the root."""
    seen: set[int] = set()

    def walk(exc: BaseException) -> ErrorFact:
        seen.add(id(exc))
        summary = traceback.extract_tb(exc.__traceback__)
        frames = [Frame(f.filename, f.lineno or 0, f.name, f.line or "") for f in summary[-limit:]]
        nxt = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
        cause = walk(nxt) if nxt is not None and id(nxt) not in seen else None
        return ErrorFact(f"{type(exc).__module__}.{type(exc).__qualname__}", str(exc), frames, cause)

    return walk(error)


def run(name: str, context: Context) -> dict[str, Any]:
    """Run one probe and return its envelope; an exception of the probe becomes the envelope's ``error``."""
    start = time.monotonic()
    facts: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    try:
        module = importlib.import_module(f"probes.{name}")
        facts = dataclasses.asdict(module.observe(context))
    except Exception as exc:  # noqa: BLE001 - whatever a probe meets is a result, never the end of the doctor
        error = dataclasses.asdict(describe_error(exc))
    return {"protocol": PROTOCOL, "probe": name, "seconds": time.monotonic() - start, "facts": facts, "error": error}


def main(argv: list[str]) -> int:
    """Entry of ``python -m probes NAME``: context on stdin, envelope to the result file or stdout."""
    if len(argv) != 1 or argv[0] not in PROBES:
        print(f"usage: python -m probes {{{','.join(PROBES)}}} < context.json", file=sys.stderr)
        return 2
    try:
        context = Context.from_json("" if sys.stdin.isatty() else sys.stdin.read())
    except ValueError as exc:
        print(f"unreadable context: {exc}", file=sys.stderr)
        return 2
    envelope = json.dumps(run(argv[0], context), default=str)
    target = os.environ.get(RESULT_VARIABLE)
    if target is None:
        print(envelope)
    else:
        # Written beside and renamed, so that a child killed half-way never leaves a torn result.
        with open(target + ".part", "w", encoding="utf-8") as out:
            out.write(envelope)
        Path(target + ".part").replace(target)
    return 0
