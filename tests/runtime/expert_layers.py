"""Small expert layers for the tests of FP8 experts, what they compute in float64, and a stand-in for the device's own kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_cases import schema_of
from reference_gemms import CASES as GEMMS
from reference_gemms import grouped_gemm

from xpufp8.runtime import choice, experts, memory
from xpufp8.runtime.experts import ExpertCall

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
EXPERTS, HIDDEN, INTER, TOP_K = 5, 96, 64, 2
BLOCK = (64, 32)
PLAIN = [experts.AT_LOAD, experts.PER_CALL]


@contextmanager
def afresh(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """No answers from before, nothing booked, and one thread: layers this small only wait for the others."""
    monkeypatch.setenv(choice.CACHE_VARIABLE, str(folder / "cache"))
    monkeypatch.setattr(choice, "_memo", {})
    monkeypatch.delenv(choice.FORCE_VARIABLE, raising=False)
    memory.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layer(layout: str, weight_dtype: Any, *, count: int = EXPERTS, hidden: int = HIDDEN, inner: int = INTER,
          block: tuple[int, int] = BLOCK, seed: int = 3) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Weights and scales of an expert layer, each scale different; and both dequantized in float64."""
    generator = torch.Generator().manual_seed(seed)
    weights, scales, wide = [], [], []
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        weight = torch.randn(count, n, k, generator=generator).to(weight_dtype)
        shape = {"tensor": (count,), "channel": (count, n, 1), "block": (count, -(-n // block[0]), -(-k // block[1]))}[layout]
        scale = torch.exp2(torch.rand(shape, generator=generator) * 2 - 4)
        if layout == "block":
            full = scale.repeat_interleave(block[0], 1)[:, :n].repeat_interleave(block[1], 2)[:, :, :k]
        else:
            full = scale.reshape(count, -1, 1)
        weights.append(weight)
        scales.append(scale)
        wide.append(weight.double() * full.double())
    return tuple(weights), tuple(scales), wide[0], wide[1]


def reference(x: Any, w13: Any, w2: Any, topk_weights: Any, ids: Any, act: Any, biases: Any = (None, None)) -> Any:
    """Token by token, slot by slot."""
    b13, b2 = (torch.zeros(w.shape[:2]) if bias is None else bias for w, bias in zip((w13, w2), biases, strict=True))
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if expert < 0:
                continue
            gate, up = (w13[expert] @ x[token].double() + b13[expert].double()).chunk(2)
            out[token] += topk_weights[token, slot].double() * (w2[expert] @ (act(gate) * up) + b2[expert].double())
    return out


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def forward(candidate: Any, x: Any, call: ExpertCall) -> Any:
    """Bring a layer into a candidate's form and compute."""
    prepared = candidate.prepare(experts.problem_of(call, x.dtype, call.routing[1].shape[1]), call.weights, call.scales)
    assert [w.shape for w in prepared.weights] == [w.shape for w in call.weights]
    assert [s.shape for s in prepared.scales] == [s.shape for s in call.scales]
    return prepared.forward(x, replace(call, weights=prepared.weights, scales=prepared.scales))


def error_of(got: Any, wanted: Any) -> float:
    return float((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


@contextmanager
def native_kernel() -> Iterator[Any]:
    """The grouped GEMM of vllm-xpu-kernels under its own name, with a reference kernel; yields the candidate as on an XPU."""
    case = next(c for c in GEMMS if c.op == "_xpu_C::cutlass_grouped_gemm_interface")
    library = torch.library.Library("_xpu_C", "FRAGMENT")
    library.define(f"cutlass_grouped_gemm_interface{schema_of(case)}")
    library.impl("cutlass_grouped_gemm_interface", grouped_gemm, "CPU")
    yield replace(experts.NATIVE, refuses=lambda problem, device: experts.NATIVE.refuses(problem, "xpu"))
    library._destroy()


def whole(layout: str = "block", weight_dtype: Any = FP8[0], dtype: Any = torch.bfloat16, **sizes: Any) -> tuple[Any, ExpertCall]:
    """A layer as it is when its weights are loaded, and the problem that it is."""
    weights, scales, _, _ = layer(layout, weight_dtype, **sizes)
    call = ExpertCall(weights, scales, (None, None), BLOCK if layout == "block" else None)
    return experts.problem_of(call, dtype, TOP_K), call
