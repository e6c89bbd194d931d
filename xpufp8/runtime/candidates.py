"""The ways to compute a quantized linear layer, in the order in which they are preferred.

A candidate says whether it can take a problem, brings weight and scale into its own form once, and gives a function that is
traced with the model. ``candidates()`` is the whole list; the Triton kernels of ``xpufp8.runtime.triton_kernels`` join it through
``linear_candidates()``, which returns objects of this module's ``Candidate``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xpufp8.runtime.problem import Problem, scale_to_float, widen

if TYPE_CHECKING:
    import torch

Run = Callable[..., Any]
"""``run(x [..., K], weight, scale, bias [N] or None) -> [..., N]``, plain torch that Dynamo can trace."""


@dataclass(frozen=True)
class Prepared:
    """A layer's weight in a candidate's form."""

    weight: torch.Tensor
    """``[N, K]``, in FP8 or already widened."""
    scale: torch.Tensor
    """In the shape it came in. All ones where the weight is widened, so that whoever dequantizes again (MLA) does no harm."""
    run: Run


@dataclass(frozen=True)
class Candidate:
    """One way to compute ``x @ dequantized(weight).T + bias``."""

    name: str
    refuses: Callable[[Problem, str], str | None]
    """Why it cannot take a problem on a device type (``xpu``, ``cpu``, ``cuda``), or None."""
    prepare: Callable[[Problem, Any, Any], Prepared]
    """``(problem, weight [N, K], scale) -> Prepared``; called once, after the weights are loaded."""
    quantizes: bool = False
    """True when it rounds activations to FP8 too, which its check then allows for."""
    bytes_per_weight: int = 1
    """Bytes that it keeps for each weight element."""


def _per_call(problem: Problem, weight: torch.Tensor, scale: torch.Tensor) -> Prepared:
    """Keep FP8, widen at each call."""

    def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        import torch

        return torch.nn.functional.linear(x, widen(problem, weight, scale), bias)

    return Prepared(weight, scale, run)


def _at_load(problem: Problem, weight: torch.Tensor, scale: torch.Tensor) -> Prepared:
    """Widen once."""
    import torch

    def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    return Prepared(widen(problem, weight, scale), torch.ones_like(scale, dtype=torch.float32), run)


def _scaled_mm(problem: Problem, weight: torch.Tensor, scale: torch.Tensor) -> Prepared:
    """Round activations to FP8, one scale a row or one in all as the scheme says, and multiply with ``torch._scaled_mm``."""
    import torch

    limit = torch.finfo(weight.dtype).max
    by_row = problem.activation == "dynamic-token"

    def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide = x.reshape(-1, x.shape[-1]).to(torch.float32)
        peak = wide.abs().amax(dim=1, keepdim=True) if by_row else wide.abs().amax().reshape(1, 1)
        x_scale = (peak / limit).clamp_min(torch.finfo(torch.float32).tiny)
        quantized = (wide / x_scale).clamp(-limit, limit).to(weight.dtype)
        one = torch.ones(1, dtype=torch.float32, device=x.device)
        # Scales are applied outside: the op takes vectors on few devices, and float32 output loses nothing before them.
        out = torch._scaled_mm(quantized, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        out = (out * x_scale * scale.reshape(1, -1)).to(problem.dtype)
        return (out if bias is None else out + bias).reshape(*x.shape[:-1], problem.n)

    return Prepared(weight, scale_to_float(scale), run)


def _scaled_mm_refuses(problem: Problem, device: str) -> str | None:
    if problem.layout == "block":
        return "torch._scaled_mm is given no block scales here"
    if problem.activation == "none":
        return "the scheme keeps activations in 16 bits"
    if problem.activation == "static-tensor":
        return "the scheme has a static activation scale"
    if problem.n % 16 or problem.k % 16:
        return "torch._scaled_mm needs N and K to be multiples of 16"
    return None


def native_w8a16() -> tuple[Any, bool] | None:
    """The device's own W8A16 GEMM and whether its schema has ``trans_B`` in third place; None where no library has one."""
    import torch

    for namespace in ("_xpu_C", "torch_ipex"):
        try:
            op = getattr(torch.ops, namespace).fp8_gemm_w8a16.default
        except (AttributeError, RuntimeError):
            continue
        names = [argument.name for argument in op._schema.arguments]
        return op, len(names) > 2 and names[2] == "trans_B"
    return None


def _native_refuses(problem: Problem, device: str) -> str | None:
    if native_w8a16() is None:
        return "no library registers fp8_gemm_w8a16"
    if problem.layout == "block":
        return "fp8_gemm_w8a16 takes one scale, or one a channel"
    if device != "xpu":
        return "fp8_gemm_w8a16 is an XPU kernel"
    return None


def _native(problem: Problem, weight: torch.Tensor, scale: torch.Tensor) -> Prepared:
    """Call the W8A16 GEMM of vllm-xpu-kernels or IPEX with a weight that is transposed by strides only."""
    found = native_w8a16()
    if found is None:
        raise RuntimeError("fp8_gemm_w8a16 vanished between the choice and its use")
    op, has_trans_b = found

    def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = op(x, weight, True, scale.reshape(-1), bias) if has_trans_b else op(x, weight.t(), scale.reshape(-1), bias)
        return out.to(problem.dtype).reshape(*x.shape[:-1], problem.n)

    return Prepared(weight, scale_to_float(scale).contiguous(), run)


def _always(problem: Problem, device: str) -> str | None:
    return None


PER_CALL = Candidate("dequantize-per-call", _always, _per_call)
AT_LOAD = Candidate("dequantize-at-load", _always, _at_load, bytes_per_weight=2)
SCALED_MM = Candidate("torch-scaled-mm", _scaled_mm_refuses, _scaled_mm, quantizes=True)
NATIVE = Candidate("native-w8a16", _native_refuses, _native)


def _triton() -> list[Candidate]:
    """The project's Triton kernels; none where they or Triton itself are missing."""
    try:
        found = importlib.import_module("xpufp8.runtime.triton_kernels").linear_candidates()
    except ImportError:
        return []
    return list(found)


def candidates() -> list[Candidate]:
    """Every candidate, most preferred first; the last one always works."""
    return [NATIVE, SCALED_MM, *_triton(), AT_LOAD, PER_CALL]
