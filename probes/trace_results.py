"""What a model trace came to, as facts."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from probes.model_facts import MixedDtypeFact, ModelTraceFacts, ReachedOpFact, StandInFact
from probes.trace_run import Run

if TYPE_CHECKING:
    from probes.facts import Mode


def kinds(run: Run) -> dict[str, Any]:
    """The model's layers by kind, and the dtypes that do not belong together in one."""
    from probes import trace_build, trace_dtypes, trace_layers

    found: dict[str, Any] = {}
    for name, ask in (
        ("linear", lambda: trace_layers.linear_kinds(run.model, run.repeated)),
        ("attention", lambda: trace_layers.attention_kinds(run.model, run.config, run.repeated)),
        ("moe", lambda: trace_layers.moe_kinds(run.model, run.repeated)),
        ("mixed", lambda: trace_dtypes.mixed_layers(run.model, run.repeated, run.config.model_config.dtype)),
    ):
        result, error, _ = trace_build.timed(ask)
        found[name] = result or []
        if error is not None:
            run.messages.append(f"xpufp8: {name} layers could not be described: {type(error).__name__}: {error}")
    return found


def sizes(run: Run, profile: str | None) -> None:
    """Add the KV cache to the run's memory."""
    from vllm.platforms import current_platform

    from probes import trace_memory

    if run.memory is None:
        return
    fact = run.memory
    device = int(current_platform.get_device_total_memory()) if profile or run.context.device != "cpu" else 0
    result = run.stage("memory", lambda: trace_memory.with_cache(fact, run.config, device), quiet=True)
    run.memory = result or fact


def facts(run: Run, profile: str | None, start: float) -> ModelTraceFacts:
    """Everything that the run came to know."""
    import torch
    import vllm

    from xpufp8.simulate import kernels

    mode: Mode = "simulated" if profile else "live"
    model_config = getattr(run.config, "model_config", None)
    compiled, outside = _reached(run, mode)
    catalogue = kernels.State.catalogue
    return ModelTraceFacts(
        device=run.context.device,
        mode=mode,
        profile=profile,
        model=str(run.context.model),
        vllm=getattr(vllm, "__version__", None),
        torch=torch.__version__,
        kernels=catalogue.version if catalogue else None,
        kernels_origin=kernels.State.origin,
        repairs=os.environ.get("XPUFP8_APPLY", ""),
        architecture=getattr(model_config, "architecture", None),
        runner=getattr(model_config, "runner_type", None),
        dtype=str(getattr(model_config, "dtype", "")).removeprefix("torch.") or None,
        quantization=getattr(model_config, "quantization", None),
        enforce_eager=bool(getattr(model_config, "enforce_eager", False)),
        parallel=run.parallel,
        stages=run.stages,
        stand_ins=_with_layers(run),
        linear=run.facts.get("linear", []),
        attention=run.facts.get("attention", []),
        moe=run.facts.get("moe", []),
        repeating=run.facts.get("repeating", []),
        ops_compiled=compiled,
        ops_outside=outside,
        mixed=[*run.facts.get("mixed", []), *_mixed_calls(run)],
        memory=run.memory,
        messages=run.messages,
        seconds=round(time.monotonic() - start, 3),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _reached(run: Run, mode: Mode) -> tuple[list[ReachedOpFact], list[ReachedOpFact]]:
    from probes.trace_ops import pattern

    compiled: list[ReachedOpFact] = []
    outside: list[ReachedOpFact] = []
    inside_names = {name for name, region, _ in run.recorder.calls if region == "compiled"}
    for (name, region, via), call in run.recorder.calls.items():
        layers = sorted({pattern(layer) for layer in call.calls if layer})
        fact = ReachedOpFact(name, sum(call.calls.values()), layers, call.tracing, via, mode)
        if region == "compiled":
            compiled.append(fact)
        elif name not in inside_names:
            outside.append(fact)
    return compiled, outside


def _mixed_calls(run: Run) -> list[MixedDtypeFact]:
    """Calls of custom ops in which both 16-bit dtypes met, one fact for each op and kind of layer."""
    from probes.trace_ops import pattern

    found: dict[tuple[str, str, tuple[str, ...]], int] = {}
    for (name, _, _), call in run.recorder.calls.items():
        for layer, tensors in call.mixed.items():
            kind = pattern(layer)
            key = (name, kind, tuple(f"{tensor} {dtype}" for tensor, dtype in tensors.items()))
            found[key] = sum(count for at, count in call.calls.items() if pattern(at) == kind)
    return [MixedDtypeFact("op", name, layer, count, list(tensors)) for (name, layer, tensors), count in found.items()]


def _with_layers(run: Run) -> list[StandInFact]:
    """Stand-ins with the layers that reach them, and the wrong fakes that the model met."""
    from probes.trace_ops import op_name, pattern

    reached: dict[str, list[str]] = {}
    for (name, _, _), call in run.recorder.calls.items():
        reached.setdefault(name, []).extend(sorted({pattern(layer) for layer in call.calls if layer}))
    facts = [replace(fact, layers=reached.get(fact.subject, [])) if fact.kind == "fake" else fact for fact in run.stand_ins]
    for op, source, given, right in run.facts.get("wrong", []):
        name = op_name(op)
        if any(n == name and call.dimensions > 2 for (n, _, _), call in run.recorder.calls.items()):
            facts.append(
                StandInFact(
                    "wrong-fake",
                    name,
                    "trace",
                    f"the fake at {source} gives {given} for an input of three dimensions; the kernel gives {right}",
                    layers=reached[name],
                    region="compiled" if any(n == name and r == "compiled" for n, r, _ in run.recorder.calls) else "outside",
                )
            )
    return facts
