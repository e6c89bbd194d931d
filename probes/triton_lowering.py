"""The Triton kernels that the planned server would run, compiled ahead of time for the simulated device's architecture.

vLLM's choosers say which kernels those are, with the plan's repairs in place; a child in the interpreter that has Intel's compiler
(``--triton-xpu PYTHON``) compiles them at the model's shapes. Nothing runs: what is seen is what one version of the compiler made.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from probes.device_facts import LoweredKernelFact
from probes.device_shapes import block_size, layer_shapes
from probes.facts import KernelTableFacts, SelectionFact
from probes.protocol import Context
from probes.schemes import BY_NAME
from probes.vllm_arguments import number

OWN = "Xpufp8"
"""How the classes of xpufp8's own kernels begin."""
TRITON = {
    "TritonFp8BlockScaledMMKernel": "_w8a8_triton_block_scaled_mm",
    "TritonFP8ScaledMMLinearKernel": "scaled_mm_kernel",
    "TritonExperts": "fused_moe_kernel",
}
"""Kernel class of vLLM to the Triton function that it launches."""
SECONDS = 150.0


def lower(context: Context, dtype: str, python: str) -> tuple[list[LoweredKernelFact], list[str], str | None]:
    """Facts, notes on what is no Triton kernel, and why nothing could be compiled (None where it could)."""
    from probes import kernel_table
    from xpufp8.simulate import profiles

    table = kernel_table.observe(context)
    if table.live_error is not None:
        return [], [], f"vLLM's choosers gave no answer: {table.live_error.type}: {table.live_error.message}"[:300]
    layers, notes = _layers(context, dtype, table)
    if not layers:
        return [], notes, None
    architecture = profiles.find(context.device).architecture
    request = {"architecture": architecture, "layers": layers, "vllm": table.root, "release": table.vllm or "vllm"}
    answer, why = _ask(python, request)
    if answer is None:
        return [], notes, why
    kernels = {(layer["scheme"], bool(layer["moe"])): layer["kernel"] for layer in layers}
    return [_fact(one, kernels, answer["compiler"]) for one in answer["results"]], notes, None


def _layers(context: Context, dtype: str, table: KernelTableFacts) -> tuple[list[dict[str, Any]], list[str]]:
    """What is to be compiled: one entry for each scheme whose selected kernel is a Triton kernel, and notes on the others."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    notes: list[str] = []
    for one in table.selections:
        scheme = BY_NAME.get(one.scheme)
        if one.activation_dtype != dtype or one.kernel is None or scheme is None:
            continue
        moe = one.table.startswith("moe")
        triton = _triton(one)
        if triton is None:
            note = f"{one.kernel}, selected for {one.scheme}{' experts' if moe else ''}, is no Triton kernel that can be compiled here"
            notes += [note] if note not in notes else []
            continue
        shapes = _expert_shapes(context) if moe else [[s.n, s.k] for s in layer_shapes(context)]
        found[one.scheme, one.table] = {
            "scheme": one.scheme, "kernel": one.kernel, "triton": triton, "dtype": dtype, "scale": scheme.weight, "moe": moe,
            "shapes": shapes, "block": list(block_size(context)),
        }  # fmt: skip
    return list(found.values()), notes


def _triton(one: SelectionFact) -> str | None:
    assert one.kernel is not None
    return "xpufp8" if one.kernel.startswith(OWN) and "Int8" not in one.kernel else TRITON.get(one.kernel)


def _expert_shapes(context: Context) -> list[list[int]]:
    sizes = context.options.get("moe") or {}
    hidden, inner = int(sizes.get("hidden_dim") or 2048), int(sizes.get("intermediate_size") or 1024)
    inner = max(1, inner // max(1, number(context.vllm_args, "tensor_parallel_size", "-tp")))
    return [[2 * inner, hidden], [hidden, inner]]


def _ask(python: str, request: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """The worker's answer, or why there is none."""
    # The target's own variables would put another Triton, and another vLLM, before this interpreter's.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "XPUFP8", "VLLM", "TORCHINDUCTOR"))}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    try:
        done = subprocess.run(
            [python, "-m", "probes.triton_worker"], input=json.dumps(request), env=environment, capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{python}: {error}"[:300]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        told = [line for line in done.stderr.splitlines() if line.strip()]
        return None, f"{python} ended with {done.returncode}: {told[-1] if told else 'nothing was said'}"[:300]
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer, None


def _fact(one: dict[str, Any], kernels: dict[tuple[str, bool], str], compiler: str) -> LoweredKernelFact:
    lowers, products, dpas = bool(one["lowers"]), int(one["products"]), int(one["dpas"])
    moe = one["kernel"] in ("fused_moe_kernel", "w8a16_grouped")
    return LoweredKernelFact(
        kernel=one["kernel"],
        config=one["configuration"],
        lowers="pass" if lowers else "fail",
        matrix_engine="unknown" if not lowers or not products else "pass" if dpas == products else "fail",
        compiler=compiler,
        detail=one["error"] or f"{dpas} of {products} products on the matrix engine, {one['scalar_fma']} scalar multiply-adds",
        source=one["source"],
        architecture=one["architecture"],
        scheme=one["scheme"],
        selected=kernels.get((one["scheme"], moe), ""),
    )
