"""One module through the stages of torch.compile, and the settings that avoid a stage which fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from probes.device_facts import AvoidanceFact, CompileStageFact
from probes.facts import ErrorFact
from probes.protocol import describe_error

STAGES = ("trace", "aot", "codegen", "autotune", "run", "capture")
TUNERS = ("triton_heuristics.py", "select_algorithm.py", "coordinate_descent_tuner.py", "autotune_process.py")
"""Files of Inductor that tune; an exception that came through one is the tuning's."""
TOLERANCE = 2.0**-5
"""Compiled against eager, relative: code is fused, so roundings to 16 bits fall away."""

INDUCTOR = {"max_autotune": False, "coordinate_descent_tuning": False, "combo_kernels": False, "benchmark_combo_kernel": False}
"""Inductor options that vLLM or people switch on and that cost tuning."""


@dataclass(frozen=True)
class Attempt:
    """What is compiled."""

    name: str
    module: Any
    x: Any


class _StageError(Exception):
    """Carries the stage that failed."""

    def __init__(self, stage: str, error: BaseException) -> None:
        super().__init__(stage)
        self.stage, self.error = stage, error


def root(error: BaseException) -> BaseException:
    """The exception at the bottom: Dynamo and Inductor wrap what a compiler said."""
    seen = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = getattr(error, "inner_exception", None) or error.__cause__
        if inner is None:
            break
        error = inner
    return error


def last_line(error: BaseException) -> str:
    """The compiler's own last word: the last line that is no advice of torch's."""
    lines = [line.strip() for line in str(root(error)).splitlines() if line.strip()]
    wanted = [line for line in lines if "error" in line.lower() or "PassManager" in line]
    lines = [
        line
        for line in lines
        if not line.startswith(("Set TORCHDYNAMO", "You can suppress", "import torch", "torch._dynamo.config"))
    ]
    return (wanted or lines or [type(root(error)).__name__])[-1 if not wanted else 0][:400]


def _came_through(error: BaseException, files: tuple[str, ...]) -> bool:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        trace = current.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename.endswith(files):
                return True
            trace = trace.tb_next
        current = getattr(current, "inner_exception", None) or current.__cause__ or current.__context__
    return False


def custom_ops(graph: Any) -> list[str]:
    """Custom ops of a graph module, by name."""
    import torch

    found = []
    for node in graph.graph.nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            name = target._schema.name
        elif isinstance(target, torch._ops.OpOverloadPacket):
            name = target._qualified_op_name
        else:
            continue
        if name.partition("::")[0] not in {"aten", "prims"}:
            found.append(name)
    return list(dict.fromkeys(found))


def take(attempt: Attempt, device: Any) -> tuple[list[str], list[CompileStageFact]]:
    """Every stage in order; after one fails the rest are unknown.

    Returns:
        Custom ops of the traced graph, and the stages.
    """
    ops: list[str] = []
    steps: dict[str, Callable[[], None]] = {
        "trace": lambda: ops.extend(trace(attempt)),
        "aot": lambda: _with_backend(attempt, "aot_eager"),
        "codegen": lambda: inductor(attempt, device),
        "capture": lambda: capture(attempt, device),
    }
    if graph_class(device) is None:
        del steps["capture"]
    done: list[CompileStageFact] = []
    for name, step in steps.items():
        start = time.monotonic()
        try:
            step()
        except Exception as exc:  # noqa: BLE001 - what a compiler raises is what is asked
            stage, error = (exc.stage, exc.error) if isinstance(exc, _StageError) else (name, exc)
            if stage == "run":
                done.append(CompileStageFact("codegen", "pass"))
            done.append(_failed(stage, error, time.monotonic() - start))
            break
        done.append(CompileStageFact(name, "pass", time.monotonic() - start))
        if name == "codegen":
            done.append(CompileStageFact("run", "pass"))
    seen = {stage.stage for stage in done}
    failed = next((stage.stage for stage in done if stage.observation == "fail"), None)
    for name in ("trace", "aot", "codegen", "run", "capture"):
        if name not in seen and name != failed:
            reason = f"{failed} failed before it" if failed else f"torch has no graph capture for {device.type}"
            done.append(CompileStageFact(name, "unknown", reason=reason))
    return ops, done


def _failed(stage: str, error: BaseException, seconds: float) -> CompileStageFact:
    fact: ErrorFact = describe_error(error)
    return CompileStageFact(stage, "fail", seconds, fact, last_line(error))


def _reset() -> None:
    import torch

    torch._dynamo.reset()


def trace(attempt: Attempt) -> list[str]:
    """Dynamo alone, the whole in one graph; the graph is run as it is."""
    import torch

    _reset()
    ops: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        ops.extend(custom_ops(graph))
        return graph.forward

    torch.compile(attempt.module, backend=backend, fullgraph=True)(attempt.x)
    return ops


def _with_backend(attempt: Attempt, backend: str) -> None:
    import torch

    _reset()
    torch.compile(attempt.module, backend=backend, fullgraph=True)(attempt.x)


def inductor(attempt: Attempt, device: Any, options: dict[str, Any] | None = None) -> None:
    """Inductor's code and its first run, compared with eager.

    Raises:
        _StageError: with ``codegen``, ``autotune`` or ``run`` as the stage.
    """
    import torch
    from torch._inductor.compile_fx import compile_fx

    from probes.device_layers import synchronize

    _reset()
    eager = attempt.module(attempt.x)
    finished = False

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal finished
        compiled = compile_fx(graph, inputs, config_patches={"force_disable_caches": True, **(options or {})})
        finished = True
        return compiled

    try:
        out = torch.compile(attempt.module, backend=backend, fullgraph=True)(attempt.x)
        synchronize(device)
    except Exception as exc:
        stage = "autotune" if _came_through(exc, TUNERS) else "run" if finished else "codegen"
        raise _StageError(stage, exc) from exc
    off = float((out.float() - eager.float()).norm() / eager.float().norm().clamp_min(1e-9))
    if not off <= TOLERANCE:
        message = f"the compiled module's output differs from eager by {off:.2e} (relative), allowed {TOLERANCE:.2e}"
        raise _StageError("run", ValueError(message))


def graph_class(device: Any) -> Any:
    """The device's class for captured graphs, or None."""
    import torch

    if device.type == "cpu":
        return None
    module = getattr(torch, device.type)
    return getattr(module, "CUDAGraph", None) or getattr(module, "XPUGraph", None)


def capture(attempt: Attempt, device: Any) -> None:
    """Record one call of the compiled module into a graph and replay it."""
    import torch

    from probes.device_layers import synchronize

    module = getattr(torch, device.type)
    _reset()
    compiled = torch.compile(attempt.module, fullgraph=True)
    wanted = compiled(attempt.x)
    synchronize(device)
    graph = graph_class(device)()
    with module.graph(graph):
        out = compiled(attempt.x)
    graph.replay()
    synchronize(device)
    if not torch.allclose(out.float(), wanted.float(), rtol=0.05, atol=0.05):
        raise ValueError("the replayed graph's output differs from the call that was captured")


def avoid(attempt: Attempt, device: Any, stages: list[CompileStageFact]) -> list[AvoidanceFact]:
    """Settings that leave out what failed, cheapest first, each tried; the list ends with the first that works."""
    failed = next(stage.stage for stage in stages if stage.observation == "fail")
    tried: list[AvoidanceFact] = []
    for stages_of, setting, what, try_it in _settings(attempt, device):
        if failed not in stages_of:
            continue
        try:
            with try_it[0]:
                try_it[1]()
        except Exception as exc:  # noqa: BLE001 - it did not help, and the next is tried
            inner = exc.error if isinstance(exc, _StageError) else exc
            tried.append(AvoidanceFact(setting, what, "flag", "fail", last_line(inner)))
            continue
        tried.append(AvoidanceFact(setting, what, "flag", "pass"))
        break
    return tried


def _settings(
    attempt: Attempt, device: Any
) -> list[tuple[tuple[str, ...], str, str, tuple[AbstractContextManager[Any], Callable[[], Any]]]]:
    """(stages it may avoid, the option, what it gives up, how it is tried)."""
    import json

    def option(**config: Any) -> str:
        return f"--compilation-config {json.dumps(config, separators=(',', ':'))}"

    plain: AbstractContextManager[Any] = nullcontext()
    return [
        (("capture",), option(cudagraph_mode="NONE"), "no graph capture; torch.compile stays", (plain, lambda: inductor(attempt, device))),
        (
            ("codegen", "autotune", "run"), option(inductor_compile_config=INDUCTOR), "no tuning of generated kernels",
            (plain, lambda: inductor(attempt, device, INDUCTOR)),
        ),
        (
            ("aot", "codegen", "autotune", "run"), option(backend="eager"), "Dynamo's graph is run as it is, without generated code",
            (plain, lambda: trace(attempt)),
        ),
        (STAGES, "--enforce-eager", "no torch.compile and no graph capture", (plain, lambda: attempt.module(attempt.x))),
    ]  # fmt: skip
