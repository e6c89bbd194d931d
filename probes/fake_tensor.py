"""Which custom ops torch can trace: every op that vLLM may call on the device, and Dynamo's own words about those it cannot.

Options: ``modules`` names further modules to import that register ops; ``vllm`` false imports only those; ``catalogue`` names an op
catalogue whose ops are judged from their schemas where the package is absent; ``seconds`` limits the attempts at tracing (60).
"""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

from probes.facts import FakeTensorFacts, Mode, Observation, OpFact, OpLibraryFact, Tracing
from probes.op_schemas import OpSchema
from probes.op_static import COMPOSITE, find, static_facts, static_ops, with_keys
from probes.protocol import Context, describe_error


def observe(context: Context) -> FakeTensorFacts:
    """Import what registers ops, ask torch about each, and try to trace those that it says it cannot."""
    try:
        import torch
    except Exception as exc:  # noqa: BLE001 - a torch that does not load is a fact, and the files can still be read
        libraries = [OpLibraryFact("torch", None, loaded=False, error=describe_error(exc))]
        return FakeTensorFacts(context.device, _static(context, set()), libraries, None)
    from probes.op_registration import OP_PACKAGES, Registrations, register_everything, watched
    from probes.op_tracing import op_names

    registrations = Registrations()
    before = op_names()
    packages = {*OP_PACKAGES, *(str(name).split(".")[0] for name in context.options.get("modules", []))}
    with watched(registrations, packages):
        register_everything(context, registrations)
    names = sorted(op_names() - before)
    ops = _live(names, registrations.origins, "simulated" if context.simulated else "live", context.options.get("seconds", 60.0))
    ops += _static(context, {f"{op.namespace}::{op.name}" for op in ops})
    return FakeTensorFacts(context.device, ops, list(registrations.libraries.values()), str(torch.__version__))


def _static(context: Context, known: set[str]) -> list[OpFact]:
    device = "xpu" if context.simulated else context.device.split(":")[0]
    catalogue = context.options.get("catalogue")
    if catalogue is None and (device != "xpu" or not context.options.get("vllm", True)):
        return []
    vllm = find("vllm")
    return static_facts(static_ops(catalogue), known, vllm.parent if vllm else None)


def _live(names: list[str], origins: dict[str, str], mode: Mode, seconds: float) -> list[OpFact]:
    """Facts of the ops that the dispatcher knows, without torch's own."""
    from probes import op_tracing

    simulated = _simulated_ops() if mode == "simulated" else {}
    found: dict[str, tuple[Any, Tracing, str]] = {}
    for name in names:
        where = op_tracing.defined_at(name)
        if _is_torch(where):
            continue
        with contextlib.suppress(AttributeError, RuntimeError):  # kernels for an op that nobody defined: it cannot be called
            op = op_tracing.overload(name)
            stands_for = simulated.get(name)
            origin = origins.get(name) or (stands_for.library if stands_for else _module_of(where))
            # The simulation gives a composite kernel of the library no body: what it would do under fake tensors cannot be asked.
            composite = stands_for is not None and COMPOSITE in stands_for.dispatch
            found[name] = (op, "composite" if composite else op_tracing.registered_tracing(op), origin)
    doubtful = [
        n for n, (op, tracing, _) in found.items() if tracing in {"none", "composite"} and op_tracing.may_be_tried(op, tracing)
    ]
    trials = op_tracing.try_tracing(doubtful, seconds) if doubtful else {}
    return [_fact(name, op, tracing, origin, mode, trials.get(name)) for name, (op, tracing, origin) in found.items()]


def _fact(name: str, op: Any, tracing: Tracing, origin: str, mode: Mode, trial: Any) -> OpFact:
    from probes.op_tracing import dispatch_keys, schema_of

    schema = schema_of(op)
    tracing, traces, error = settle(tracing, trial)
    return OpFact(
        namespace=op.namespace,
        name=schema.full_name,
        schema=f"{op.namespace}::{schema.text}",
        mode=mode,
        origin=origin,
        tracing=tracing,
        traces=traces,
        returns_tensor=schema.returns_tensor,
        dispatch_keys=dispatch_keys(name),
        error=error,
        functional=not schema.mutates,
    )


def settle(tracing: Tracing, trial: Any) -> tuple[Tracing, Observation, str | None]:
    """Registrations and trial (a :class:`probes.op_tracing.Trial`, or None where none was made) into one answer.

    An op without a fake fails even where the trial was cut short by something else: its registrations leave no way. A composite
    one is known only by its trial. Where Dynamo traced an op that has no fake, torch knows a way that this file does not.
    """
    traced: Observation = trial.traced if trial is not None else "unknown"
    if tracing == "none":
        if traced == "pass":
            return "undetermined", "pass", None
        return "none", "fail", trial.error if traced == "fail" else None
    if tracing == "composite":
        return "composite", traced, trial.error if traced == "fail" else None
    return tracing, "pass", None


def _is_torch(where: str) -> bool:
    """True for an op that torch's own Python code defines (its C++ ones stand before anything is imported)."""
    import torch

    return where.startswith(str(Path(torch.__file__).parent))


def _simulated_ops() -> dict[str, OpSchema]:
    """The ops that a simulated XPU defines, with the dispatch keys that the real library has kernels for."""
    kernels = sys.modules.get("xpufp8.simulate.kernels")
    catalogue = getattr(getattr(kernels, "State", None), "catalogue", None)
    if catalogue is None:
        return {}
    return {op.qualified: op for op in with_keys(catalogue.ops, catalogue.package, catalogue.version)}


def _module_of(where: str) -> str:
    """A place ``/…/site-packages/vllm/utils/torch_utils.py:1065`` as people know it: ``vllm/utils/torch_utils.py:1065``."""
    match = re.match(r"(.*?):(\d+)$", where)
    path = Path(match.group(1)) if match else Path(where)
    for folder in sorted(map(Path, filter(None, sys.path)), key=lambda p: -len(p.parts)):
        with contextlib.suppress(ValueError):
            return f"{path.relative_to(folder)}:{match.group(2) if match else ''}".rstrip(":")
    return where
