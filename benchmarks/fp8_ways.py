"""The ways to compute one FP8 linear layer that ``fp8_linear.py`` measures: torch's, vLLM's, and this project's.

Each is ``(name, run(copy of the weight), operands)``; operands say against what the error is taken: ``16`` for activations as they are,
``row`` or ``group`` for activations rounded to FP8 with one scale a row or one in 128, ``none`` for no comparison.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.fp8_linear import Case

Way = tuple[str, Callable[[int], Any], str]


def torch_ways(case: Case, x: Any, args: argparse.Namespace) -> list[Way]:
    """``(name, run(copy), operands)`` of what torch offers; operands are ``16`` or the kind of rounding of activations."""
    import torch

    wide = [w.to(torch.bfloat16) for w in case.weights[: max(2, case.copies // 2)]]

    def dequantize(weight: Any) -> Any:
        spread = case.scale.repeat_interleave(128, 0)[: case.n].repeat_interleave(128, 1)[:, : case.k]
        return x @ (weight.float() * spread).to(x.dtype).t()

    ways: list[Way] = [
        ("bf16 matmul (widened at load)", lambda i: x @ wide[i % len(wide)].t(), "none"),
        ("dequantize, then matmul", lambda i: dequantize(case.weights[i]), "16"),
    ]
    if args.compile:
        torch._dynamo.reset()
        compiled = torch.compile(dequantize, dynamic=False)
        ways.append(("dequantize, then matmul (compiled)", lambda i: compiled(case.weights[i]), "16"))
    if x.device.type == "cuda":
        limit = 448.0
        row = (x.float().abs().amax(1) / limit).clamp_min(1e-12)
        q = (x.float() / row[:, None]).clamp(-limit, limit).to(torch.float8_e4m3fn)
        groups = x.float().view(x.shape[0], -1, 128)
        by_group = (groups.abs().amax(2) / limit).clamp_min(1e-12)
        qg = (groups / by_group[:, :, None]).clamp(-limit, limit).to(torch.float8_e4m3fn).view_as(x)
        by_group = by_group.t().contiguous().t()
        channel = torch.rand(1, case.n, device=x.device)
        ways += [
            (
                "_scaled_mm, one scale a row and channel (product alone)",
                lambda i: torch._scaled_mm(q, case.weights[i].t(), scale_a=row[:, None], scale_b=channel, out_dtype=x.dtype),
                "none",
            ),
            (
                "_scaled_mm, block scales (product alone)",
                lambda i: torch._scaled_mm(qg, case.weights[i].t(), scale_a=by_group, scale_b=case.scale.t(), out_dtype=x.dtype),
                "group",
            ),
        ]
        case.rounded = {"row": q.double() * row.double()[:, None],
                        "group": qg.double() * by_group.double().repeat_interleave(128, 1)}  # fmt: skip
        case.quantized = (qg, by_group, q, row)
    return ways


def vllm_way(case: Case, x: Any, folder: Path | None) -> tuple[list[Way], str]:
    """vLLM's Triton block kernel with its default configuration, or why it is not there."""
    import torch

    from probes import triton_vllm

    if x.device.type == "cpu":
        return [], "vLLM's Triton block kernel: no Triton target on a CPU"
    folder = folder or triton_vllm.installed()
    if folder is None:
        return [], "vLLM's Triton block kernel: vLLM is not installed (--vllm FOLDER)"
    found = triton_vllm.sources(folder)
    name = next((n for n in ("_w8a8_triton_block_scaled_mm", "_w8a8_block_fp8_matmul") if n in found), None)
    if name is None:
        return [], f"vLLM's Triton block kernel: none in {folder.name}"
    kernel = getattr(triton_vllm.load(name, found[name]), name)
    qg, by_group, *_ = case.quantized
    m, n, k = x.shape[0], case.n, case.k

    def run(i: int) -> Any:
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
        w = case.weights[i]
        kernel[(-(-m // 64) * -(-n // 128),)](
            qg, w, out, by_group, case.scale, m, n, k, 128, 128, k, 1, w.stride(1), w.stride(0), n, 1,
            by_group.stride(0), by_group.stride(1), case.scale.stride(1), case.scale.stride(0),
            BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, BLOCK_SIZE_K=128, GROUP_SIZE_M=32, num_warps=4, num_stages=2,
        )  # fmt: skip
        return out

    return [("vLLM's Triton block kernel (product alone)", run, "group")], ""


def our_ways(case: Case, x: Any, *, sweep: bool) -> list[Way]:
    """What the tuning chose, and with ``sweep`` everything it chose from."""
    from xpufp8.runtime.problem import Problem
    from xpufp8.runtime.triton_kernels import launch, layer_refuses, linear, space, vendor

    problem = Problem("block", "dynamic-group", case.n, case.k, x.dtype, case.weights[0].dtype, (128, 128))
    if layer_refuses(problem, x.device.type):
        return []
    ways: list[Way] = []
    for title, quantize in (("triton-rows", False), ("triton-w8a8", True)):
        if quantize and x.shape[0] < vendor.LEAST_ROWS:
            continue
        layer = linear.Layer("block", 128, 128, quantize, False)
        linear.plan(layer, case.weights[0], case.scale, x.dtype)
        chosen = linear.chosen(layer, x, case.weights[0])

        def forward(i: int, layer: Any = layer) -> Any:
            return linear.forward(layer, x, case.weights[i], case.scale, None)

        ways.append((f"{title}: {short(chosen)}", forward, operands(chosen)))
        if chosen["kernel"] == "w8a8":
            *_, q, row = case.quantized
            tile = space.Tile(**{key: value for key, value in chosen.items() if key != "kernel"})

            def product(i: int, layer: Any = layer, tile: Any = tile, q: Any = q, row: Any = row) -> Any:
                return launch.w8a8(layer, tile, q, row, case.weights[i], case.scale, None, x.dtype)

            ways.append((f"{title} (product alone)", product, "row"))
        if sweep:
            for name, call in linear.candidates_for(layer, x, case.weights[0]):
                run = functools.partial(lambda call, i: call(x, case.weights[i], case.scale, None), call)
                ways.append((f"  {short(name)}", run, operands(name)))
    return ways


def operands(name: dict[str, Any]) -> str:
    """How a kernel rounds activations: not at all, with a scale a row, or with one a group."""
    return {"w8a8": "row", "vendor-fp8": "group"}.get(name["kernel"], "16")


def short(name: dict[str, Any]) -> str:
    """A configuration in a few words."""
    if len(name) == 1:
        return str(name["kernel"])
    flags = "".join(f" {key}" for key in ("swap", "ahead", "stream") if name.get(key))
    share = f" parts {name['share']}" if "share" in name else f" group {name['group']}"
    return f"{name['kernel']} {name['m']}x{name['n']}x{name['k']} warps {name['warps']} stages {name['stages']} {name['how']}{share}{flags}"
