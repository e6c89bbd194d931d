"""Probe ``speed``: seconds a call of the selected kernels at the model's layer shapes, against the device's own limits.

A decode step reads every weight once, so the limit of one token is the device's copy bandwidth; the limit of a prompt is its
rate of plain matrix products. Both are measured here, on the same device in the same process.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from probes.device_facts import LayerShapeFact, SelectedFact, SpeedFacts, TimingFact
from probes.device_layers import Bench, Built, bench, schemes, synchronize, unknown_run
from probes.device_operands import activations, make
from probes.device_shapes import ALONE, block_size, distinct, layer_shapes
from probes.protocol import Context
from probes.vllm_arguments import given

ROWS = (1, 8, 32, 2048)
SLOWEST = 1.5
"""Seconds. A number of rows that is expected to take longer is left out and noted: 2048 rows take minutes on some CPUs."""
REPEATS = 5
CAPTURED = 20
"""Calls in one graph, so that launching it weighs little."""
ENOUGH = 0.2
"""Seconds after which a call is not repeated any more."""


def observe(context: Context) -> SpeedFacts:
    """Timings of the selected kernels, and what they make of a decode step."""
    dtype = context.options.get("dtype") or "bfloat16"
    if context.simulated:
        return SpeedFacts(unknown_run(context, "speed"), dtype)
    layers = layer_shapes(context)
    selected: list[SelectedFact] = []
    timings: list[TimingFact] = []
    notes: list[str] = []
    with bench(context) as made:
        copy, flops = bandwidth(made), matmul_rate(made, dtype)
        for scheme in schemes(context):
            for layer in distinct(layers):
                for built in made.build(make(scheme, layer.run_n, layer.run_k, block=block_size(context)), dtype, layer.name):
                    selected.append(built.selected)
                    if built.call is not None:
                        timings += time_layer(made, built, dtype, notes)
        gain = _compile_gain(made, dtype) if given(context.vllm_args, "enforce_eager") else None
        run = replace(made.run, notes=[*made.run.notes, *dict.fromkeys(notes)])
    first = next((t.scheme for t in timings), None)
    steps = {str(m): s for m in ROWS if (s := step_seconds(layers, timings, m, first)) is not None}
    return SpeedFacts(run, dtype, copy, flops, layers, selected, timings, _rates(layers, timings, copy, first), steps, gain)


def best_of(call: Callable[[], Any], device: Any, repeats: int = REPEATS) -> float:
    """Seconds of the best call of a few, after one that warms up. The best, so that a busy machine matters less."""
    call()
    synchronize(device)
    best, spent = math.inf, 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
        spent += time.perf_counter() - start
        if spent > ENOUGH:
            break
    return best


def seconds_of(call: Callable[[], Any], device: Any) -> tuple[float, str]:
    """Seconds a call and how it was timed: by a captured graph of calls where the device has that, else call by call."""
    import torch

    from probes.compile_stages import graph_class

    maker = graph_class(device)
    if maker is None:
        return best_of(call, device), "calls"
    try:
        call()
        synchronize(device)
        graph = maker()
        with getattr(torch, device.type).graph(graph):
            for _ in range(CAPTURED):
                call()
        return best_of(graph.replay, device) / CAPTURED, "graph"
    except Exception:  # noqa: BLE001 - a kernel that cannot be captured is timed as it can be
        return best_of(call, device), "calls"


def bandwidth(made: Bench) -> float:
    """Bytes a second of a large copy, each counted as it is read and as it is written."""
    import torch

    size = 2**26 if made.device.type == "cpu" else 2**30
    source = torch.zeros(size, dtype=torch.uint8, device=made.device)
    goal = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: goal.copy_(source), made.device)[0]


def matmul_rate(made: Bench, dtype: str) -> float:
    """Floating-point operations a second of a square product."""
    import torch

    size = 256 if made.device.type == "cpu" else 8192
    a = torch.ones(size, size, dtype=getattr(torch, dtype), device=made.device)
    return 2 * size**3 / seconds_of(lambda: a @ a, made.device)[0]


def time_layer(made: Bench, built: Built, dtype: str, notes: list[str]) -> list[TimingFact]:
    """One layer with each number of rows, beside the same product of 16-bit weights."""
    import torch

    operands, found = built.operands, []
    kind = getattr(torch, dtype)
    plain = torch.randn(operands.n, operands.k).to(kind).to(made.device)
    expected = 0.0
    call = built.call
    assert call is not None
    for rows in ROWS:
        if expected > SLOWEST:
            notes.append(f"{built.selected.layer} with {rows} rows was left out: about {expected:.1f} s a call")
            continue
        x = activations(rows, operands.k, kind).to(made.device)
        try:
            seconds, timed = seconds_of(functools.partial(call, x, None), made.device)
            usual, _ = seconds_of(functools.partial(torch.nn.functional.linear, x, plain), made.device)
        except Exception as exc:  # noqa: BLE001 - the numerics probe names a kernel that raises
            notes.append(f"{built.kernel} raised with {rows} rows: {type(exc).__name__}")
            break
        width = x.element_size()
        moved = operands.n * operands.k + 4 * operands.scale.numel() + width * rows * (operands.n + operands.k)
        shape = [rows, operands.n, operands.k]
        found.append(TimingFact(operands.scheme.name, built.kernel, built.selected.layer, shape, seconds, usual, moved, timed))
        following = ROWS[ROWS.index(rows) + 1] if rows != ROWS[-1] else rows
        expected = max(seconds, usual) * following / rows if rows > 1 else 0.0
    return found


def _time_of(layer: LayerShapeFact, timings: list[TimingFact], rows: int, scheme: str | None) -> TimingFact | None:
    shape = [rows, layer.run_n, layer.run_k]
    return next((t for t in timings if (t.scheme, t.shape) == (scheme, shape)), None)


def step_seconds(layers: list[LayerShapeFact], timings: list[TimingFact], rows: int, scheme: str | None) -> float | None:
    """Seconds of all linear layers of one rank; a layer that was run smaller counts by its share."""
    total = 0.0
    for layer in layers:
        timing = _time_of(layer, timings, rows, scheme)
        if timing is None:
            return None
        total += layer.count * timing.seconds * (layer.n * layer.k) / (layer.run_n * layer.run_k)
    return total or None


def _rates(layers: list[LayerShapeFact], timings: list[TimingFact], copy: float, scheme: str | None) -> dict[str, float]:
    """Tokens a second of one sequence: measured, with 16-bit weights, and what the copy bandwidth allows."""
    measured = step_seconds(layers, timings, 1, scheme)
    if measured is None:
        return {}
    plain = 0.0
    for layer in layers:
        timing = _time_of(layer, timings, 1, scheme)
        plain += layer.count * (timing.plain_seconds if timing else 0.0) * (layer.n * layer.k) / (layer.run_n * layer.run_k)
    weights = sum(layer.count * layer.n * layer.k for layer in layers)
    # Weights are only read, so a read-and-write rate of copying is what moves them.
    return {"measured": 1 / measured, "plain": 1 / plain if plain else 0.0, "bound": copy / weights if weights else 0.0}


def _compile_gain(made: Bench, dtype: str) -> float | None:
    """Eager time over compiled time of the parts of one layer at one token; None where they do not compile."""
    import torch

    from probes.compile import layer_module

    module = layer_module(made, dtype)
    if module is None:
        return None
    x = activations(1, ALONE[1], getattr(torch, dtype)).to(made.device)
    try:
        compiled = torch.compile(module, fullgraph=True)
        fast = best_of(lambda: compiled(x), made.device, 20)
        slow = best_of(lambda: module(x), made.device, 20)
    except Exception:  # noqa: BLE001 - the compile probe names why
        return None
    return slow / fast
