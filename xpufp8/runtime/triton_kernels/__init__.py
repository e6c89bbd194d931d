"""FP8 linear layers and experts in Triton: the candidates of ``xpufp8.runtime.candidates`` that reach memory speed.

How they are called:

* ``linear_candidates()`` returns ``xpufp8.runtime.candidates.Candidate`` objects. ``refuses(problem, device)`` says why one cannot
  take a layer; ``prepare(problem, weight [N, K], scale)`` tunes it on the device (cached) and returns a ``Prepared`` whose ``run(x,
  weight, scale, bias)`` is one custom op with a fake, so that Dynamo traces it and a CUDA graph captures it.
* ``experts_forward`` has the signature of ``xpufp8.runtime.experts.plain_forward`` and takes its place where ``experts_refuse``
  returns None.

This module imports nothing but the standard library; the kernels' modules import Triton at their top and are imported when the
first candidate is asked to work. Scratch memory for partial sums and the counters of arrivals belong to a device and stream: two
captured graphs of one stream must not be replayed at the same time on two others.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from xpufp8.runtime.candidates import Candidate, Prepared
    from xpufp8.runtime.experts import ExpertCall
    from xpufp8.runtime.problem import Problem

WEIGHT_DTYPES = ("torch.float8_e4m3fn", "torch.float8_e5m2")
ACTIVATION_DTYPES = ("torch.bfloat16", "torch.float16")


def interpreted() -> bool:
    """True when Triton's interpreter runs the kernels, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _target() -> str | None:
    """The backend of the device that Triton finds, or None."""
    from triton.runtime import driver

    try:
        return str(driver.active.get_current_target().backend)
    except Exception:  # noqa: BLE001 - a driver that cannot start raises whatever it likes; there is no target then
        return None


def backend() -> str | None:
    """Triton's own name of the target it compiles for (``cuda``, ``xpu``, ``hip``), ``interpreter``, or None without one."""
    if importlib.util.find_spec("triton") is None:
        return None
    return "interpreter" if interpreted() else _target()


def _device_refuses(device: str) -> str | None:
    name = backend()
    if name is None:
        return "Triton has no target here"
    if name == "interpreter":
        return None if device == "cpu" else "Triton's interpreter runs on the CPU"
    wanted = {"cuda": "cuda", "hip": "cuda", "xpu": "xpu"}.get(name)
    if device != wanted:
        return f"Triton compiles for {name}, the layer is on {device}"
    return None


def layer_refuses(problem: Problem, device: str) -> str | None:
    """Why these kernels cannot take a layer, or None.

    Args:
        problem: the layer.
        device: torch's device type.
    """
    if str(problem.weight_dtype) not in WEIGHT_DTYPES:
        return f"takes e4m3fn and e5m2 weights, not {problem.weight_dtype}"
    if str(problem.dtype) not in ACTIVATION_DTYPES:
        return f"takes bfloat16 and float16 activations, not {problem.dtype}"
    if problem.layout == "block":
        rows, columns = problem.block or (0, 0)
        if rows < 1 or columns < 1 or (columns % 128 and columns not in (32, 64)):
            return f"takes blocks of 32, 64 or a multiple of 128 along K, not {rows}x{columns}"
    return _device_refuses(device)


def _w8a8_refuses(problem: Problem, device: str) -> str | None:
    reason = layer_refuses(problem, device)
    if reason:
        return reason
    if problem.activation == "none":
        return "the scheme keeps activations in 16 bits"
    if problem.layout == "block" and (problem.block or (0, 0))[0] % 64:
        return "needs blocks of a multiple of 64 along N"
    if backend() not in ("cuda", "interpreter"):
        return "this target's Triton multiplies FP8 operands outside its matrix unit"
    return None


def _columns_refuses(problem: Problem, device: str) -> str | None:
    reason = layer_refuses(problem, device)
    if reason:
        return reason
    if backend() not in ("xpu", "interpreter"):
        return "this target has no two-dimensional block loads that the portable kernels reach"
    if problem.n % 16 or problem.k % 8:
        return "block loads need rows of a multiple of 16 bytes"
    return None


def _prepare(problem: Problem, weight: torch.Tensor, scale: torch.Tensor, *, quantize: bool, columns: bool) -> Prepared:
    from xpufp8.runtime.triton_kernels import linear

    return linear.prepare(problem, weight, scale, quantize=quantize, columns=columns)


def linear_candidates() -> list[Candidate]:
    """Every linear kernel here, most preferred first; none where Triton is not installed.

    ``triton-w8a8`` rounds activations to FP8 for prompts, and from 32 rows on where the device's vendor has a faster product for that; for
    fewer rows it keeps them in 16 bits, where they cost nothing.
    ``triton-columns`` keeps the weight as ``[K, N]``, which targets with two-dimensional block loads read best; its ``Prepared.weight``
    still has shape ``[N, K]``, by strides. ``triton-rows`` takes it as it is.
    """
    if importlib.util.find_spec("triton") is None:
        return []
    from xpufp8.runtime.candidates import Candidate

    def entry(name: str, refuses: Any, *, quantize: bool, columns: bool) -> Candidate:
        prepare = functools.partial(_prepare, quantize=quantize, columns=columns)
        return Candidate(name, refuses, prepare, quantizes=quantize)

    return [
        entry("triton-w8a8", _w8a8_refuses, quantize=True, columns=False),
        entry("triton-rows", layer_refuses, quantize=False, columns=False),
        entry("triton-columns", _columns_refuses, quantize=False, columns=True),
    ]


def experts_refuse(problems: tuple[Problem, Problem], device: str) -> str | None:
    """Why the expert kernels cannot take a pair of weights, or None. Problems are those of one expert's two layers."""
    for problem in problems:
        reason = layer_refuses(problem, device)
        if reason:
            return reason
    return None


def experts_forward(x: torch.Tensor, call: ExpertCall) -> torch.Tensor:
    """Return the routed experts' weighted sum: see ``xpufp8.runtime.triton_kernels.experts.forward``."""
    from xpufp8.runtime.triton_kernels import experts

    return experts.forward(x, call)
