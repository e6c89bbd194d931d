"""The one path of a diagnosis: probe, judge, plan, report."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from probes.protocol import ON_REQUEST, PROBES
from xpufp8 import __version__
from xpufp8.children import Launch, run_probes
from xpufp8.command import APPLY_VARIABLE
from xpufp8.errors import UsageError
from xpufp8.model import ModelSpec
from xpufp8.redaction import redact_report
from xpufp8.report import Finding, ProbeReport, Report, Tool
from xpufp8.staging import stage
from xpufp8.target import Target
from xpufp8.verdict import RANK

SIMULATE_VARIABLE = "XPUFP8_SIMULATE"

ORDER = ("fake_tensor", "environment", "devices", "model_config", "model_trace", "kernel_table", "vllm_options")
"""Two run at a time. A long one starts at once; the other place shows progress with quick ones first, then the other long ones;
the rest follow in the order of PROBES."""

DEVICE = ("dtype_agreement", "numerics", "compile", "speed")
"""Probes that run real ops on the device: only for a model, and on a real device unless they are named."""
NEED_MODEL = frozenset({"model_config", "model_trace", *DEVICE})

OnDone = Callable[[ProbeReport], None]


@dataclass(frozen=True)
class Request:
    """What one diagnosis is asked to do."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    timeout: float = 180.0
    """Seconds for one probe."""
    total: float = 900.0
    """Seconds for all of them."""
    runtime_fixes: bool = True
    """False keeps repairs inside vLLM out of the plan."""
    replan: bool = True
    """False stops after the first look: nothing is repaired, nothing is probed again."""
    cache: bool = True
    on_done: OnDone | None = None
    on_try: Callable[[str], None] | None = None
    """Told which fixes are in place before probes run again with them."""
    options: dict[str, Any] = field(default_factory=dict)


def select(target: Target, request: Request) -> list[str]:
    """The probes that apply, in order.

    Raises:
        UsageError: a name that is no probe, or an Intel Triton compiler where nothing is to be compiled for.
    """
    known = [*(n for n in ORDER if n in PROBES), *(n for n in PROBES if n not in ORDER)]
    for name in (*request.only, *request.skip):
        if name not in known:
            raise UsageError(f"no probe is called {name!r}. Probes: {', '.join(known)}.")
    chosen = [n for n in known if n in request.only] if request.only else [n for n in known if n not in ON_REQUEST]
    applies = dict.fromkeys(NEED_MODEL, target.model is not None) | {"vllm_options": bool(target.vllm_args)}
    applies |= dict.fromkeys(DEVICE, bool(request.only) or (target.model is not None and not target.simulated))
    if request.options.get("triton_xpu"):
        if not target.simulated or target.model is None:
            raise UsageError(
                "--triton-xpu compiles a model's kernels for a device profile: give MODEL and --device sim:<profile>."
            )
        applies["compile"] = True
    return [n for n in chosen if n not in request.skip and applies.get(n, True)]


def launch_for(target: Target, request: Request, apply: Sequence[str] = (), extra_path: Sequence[Path] = ()) -> Launch:
    """How probes of this target are started; ``apply`` are runtime repairs to switch on."""
    environment = {APPLY_VARIABLE: ",".join(apply)}
    environment[SIMULATE_VARIABLE] = target.device.partition(":")[2] if target.simulated else ""
    return Launch(
        python=target.python,
        pythonpath=[stage(), *extra_path],
        environment=environment,
        timeout=request.timeout,
        deadline=time.monotonic() + request.total,
    )


def observe(target: Target, names: Sequence[str], request: Request, launch: Launch) -> list[ProbeReport]:
    """Run probes of a target."""
    context = replace(target.context(), options=target.context().options | request.options | scheme_options(target))
    return run_probes([(name, context) for name in names], launch, request.on_done)


def scheme_options(target: Target) -> dict[str, Any]:
    """What the kernel table is asked about: the model's own schemes, or all of them."""
    if target.model is None or not target.model.uses:
        return {}
    uses = target.model.uses
    return {
        "schemes": sorted({use.scheme for use in uses if use.scheme != "unquantized"}),
        "moe": moe_layer(target.model) if any(use.moe for use in uses) else False,
        "shapes": layer_shapes(target.model),
        "dtype": target.model.dtype,
    }


def moe_layer(model: ModelSpec) -> dict[str, int]:
    """Sizes of the model's MoE layers, those that config.json gives."""
    names = {
        "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "experts_per_token": ("num_experts_per_tok", "moe_k", "experts_per_token"),
        "hidden_dim": ("hidden_size",),
        "intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    }
    found = {
        name: next((v for k in keys if isinstance(v := model.text_config.get(k), int)), None) for name, keys in names.items()
    }
    return {name: value for name, value in found.items() if value}


def layer_shapes(model: ModelSpec) -> list[list[int]]:
    """[N, K] of the MLP's projections (down and gate-up of a dense model), empty where config.json does not say."""
    hidden, inner = model.text_config.get("hidden_size"), model.text_config.get("intermediate_size")
    return (
        [[hidden, inner], [2 * inner, hidden]] if isinstance(hidden, int) and isinstance(inner, int) and hidden and inner else []
    )


@cache
def facts_class(name: str) -> Any:
    """The facts class of a probe."""
    module, _, cls = PROBES[name].partition(":")
    return getattr(importlib.import_module(module), cls)


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(facts_class(name))


def validate(reports: Sequence[ProbeReport]) -> tuple[list[ProbeReport], dict[str, Any], dict[str, str]]:
    """Read facts back into their dataclasses.

    Returns:
        The reports (one whose facts are not in the agreed form has become ``failed``), facts by probe, and for every probe
        without facts the reason.
    """
    checked: list[ProbeReport] = []
    facts: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for report in reports:
        if report.status == "ok" and report.name in PROBES:
            try:
                facts[report.name] = _adapter(report.name).validate_python(report.facts)
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"]))
                detail = f"its answer is not in the agreed form ({place}: {first['msg']})"
                report = report.model_copy(update={"status": "failed", "detail": detail, "facts": {}})
        if report.status != "ok":
            missing[report.name] = f"{report.status}: {report.detail}" + "".join(f"\n  {line}" for line in report.last_lines[-3:])
        checked.append(report)
    return checked, facts, missing


def judge(target: Target, facts: dict[str, Any], missing: dict[str, str], *, partial: bool = False) -> list[Finding]:
    """Run every rule whose facts are there; the order of the findings is stable.

    Args:
        target: What is diagnosed.
        facts: By probe.
        missing: For probes without facts, why.
        partial: True for facts that come later than the others: rules that need none of them have spoken already.
    """
    from xpufp8.rules import ALL, Case

    case = Case(target.device, target.vllm_args, target.model, facts, missing)
    findings: list[Finding] = []
    for one in ALL:
        if any(name not in facts for name in one.needs) or (partial and not one.needs):
            continue
        try:
            findings += one.check(one, case)
        except Exception as error:  # noqa: BLE001 - a rule that fails is said to have failed; silence would read as good news
            cause = f"The rule itself failed ({type(error).__name__}: {error}); what it checks is unknown. Please report this."
            findings.append(one.finding("rule", cause, [], unknown=True))
    return sorted(findings, key=order)


def order(finding: Finding) -> tuple[int, int, str, str]:
    """Worst first, then what is sure, then by code and subject."""
    return RANK[finding.severity], finding.status != "fail", finding.code, finding.subject


def check_input(target: Target, facts: dict[str, Any]) -> None:
    """Refuse a model type that nothing here knows: wrong input, not a failure of the stack.

    Raises:
        UsageError: neither transformers nor vLLM know the type, and no remote code stands for it.
    """
    config = facts.get("model_config")
    if target.model is None or config is None or config.transformers_knows is not False or config.remote_code:
        return
    if config.vllm_knows or any(config.architectures.values()):
        return
    versions = f"transformers {config.transformers or '(none)'} and vLLM {config.vllm or '(none)'} of {target.python}"
    raise UsageError(
        f"MODEL {target.model.source}: model_type {config.model_type!r} is not known to {versions}. "
        "Check the spelling in config.json, or take a release that has the model."
    )


def diagnose_target(target: Target, request: Request) -> Report:
    """Diagnose a resolved target.

    Raises:
        UsageError: a probe name that is none, or a model type that nothing knows.
    """
    names = select(target, request)
    # A probe that is named runs as it is; else the device is asked once, about what the plan would run.
    late = [] if request.only else [n for n in names if n in DEVICE]
    reports = observe(target, [n for n in names if n not in late], request, launch_for(target, request))
    report = conclude(target, reports, request, live=True)
    if not late or not request.replan:
        return report
    from xpufp8.device_checks import check_on_device

    return redact_report(check_on_device(target, request, late, reports, report), target.typed)


def launch_plan(target: Target, request: Request, report: Report) -> Report:
    """The report after its plan was started once with dummy weights and asked (``doctor --launch``).

    Raises:
        UsageError: there is no model, or the device is simulated: nothing can be started.
    """
    from xpufp8.validate import validate_by_launch

    if target.model is None or target.simulated:
        raise UsageError("--launch starts the plan, which needs a MODEL and a real device.")
    startable = report.verdict in ("servable", "servable-with-fixes")
    return validate_by_launch(target, request, report) if startable else report


def conclude(target: Target, reports: Sequence[ProbeReport], request: Request, *, live: bool) -> Report:
    """From probe reports to the report. ``live`` allows probing again with repairs; facts from elsewhere cannot be."""
    from xpufp8.planner import make_plan
    from xpufp8.verdict import judge as verdict_of
    from xpufp8.verdict import needed_for

    checked, facts, missing = validate(reports)
    check_input(target, facts)
    findings, plan = make_plan(target, request, judge(target, facts, missing), facts, missing, live=live and request.replan)
    report = Report(
        tool=Tool(version=__version__),
        verdict=verdict_of(findings, checked, needed_for(target.info), plan),
        target=target.info,
        probes=checked,
        findings=findings,
        plan=plan,
    )
    return redact_report(report, target.typed)
