"""Facts of device probes as tests of rules make them."""

from __future__ import annotations

from typing import Any

from probes.device_facts import DeviceRunFact
from xpufp8.model import ModelSpec, SchemeUse
from xpufp8.report import Finding
from xpufp8.rules import ALL
from xpufp8.rules.base import Case

RUN = DeviceRunFact("xpu", "live", "Arc Pro B60", "2.11.0+xpu", "0.32.0")


def findings(
    probe: str, facts: Any, *, scheme: str = "fp8-block", dtype: str = "bfloat16", device: str = "xpu",
    args: tuple[str, ...] = (), **more: Any,
) -> list[Finding]:  # fmt: skip
    """What every rule on a probe says of its facts."""
    spec = ModelSpec("m", "m", dtype=dtype, quant_method="fp8", uses=(SchemeUse(scheme, "every linear layer"),))
    case = Case(device=device, vllm_args=args, model=spec, facts={probe: facts, **more})
    return [found for rule in ALL if probe in rule.needs for found in rule.check(rule, case)]
