"""FP8 quantization in plain torch, for builds of vLLM that lack the op which online quantization calls.

The CPU builds define ``static_scaled_fp8_quant`` without arguments and without a kernel, so ``--quantization fp8`` on a bf16
checkpoint ends while weights are processed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

from xpufp8.runtime.catalogue import RepairError

if TYPE_CHECKING:
    import torch

OPS = ("static_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant")
ARGUMENTS = ("input", "scale", "num_token_padding", "scale_ub", "use_per_token_if_dynamic")
SMALLEST = 1.0 / 512
"""A dynamic scale is at least this part of 1 / the largest FP8 value, as in vLLM's kernels, so that a row of zeros has one."""


def spread(scale: torch.Tensor, shape: tuple[int, int], group: tuple[int, int] | None) -> torch.Tensor:
    """Shape a scale so that it divides an input ``[M, N]``.

    Args:
        scale: one element; ``[M]`` or ``[N]`` with ``group`` saying which; or ``[M/group_m, N/group_n]``.
        shape: of the input.
        group: edges of the group that shares a scale, -1 for the whole of a dimension.

    Raises:
        ValueError: a scale of one dimension without ``group``.
    """
    rows, columns = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        if group not in {(-1, 1), (1, -1)}:
            raise ValueError("a scale of one dimension needs group_shape to say whether it is one a row or one a column")
        return scale.reshape(1, -1) if group == (-1, 1) else scale.reshape(-1, 1)
    down, right = -(-rows // scale.shape[0]), -(-columns // scale.shape[1])
    return scale.repeat_interleave(down, 0)[:rows].repeat_interleave(right, 1)[:, :columns]


def scaled_fp8_quant(
    input: torch.Tensor,  # noqa: A002 - vLLM's name, which callers use as a keyword
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``[M, N]``; arguments and results as in ``vllm._custom_ops.scaled_fp8_quant``."""
    import torch
    from vllm.platforms import current_platform

    rows, columns = input.shape
    if output is None:
        padded = max(num_token_padding or 0, rows)
        output = torch.empty((padded, columns), device=input.device, dtype=current_platform.fp8_dtype())
    limit = torch.finfo(output.dtype).max
    wide = input.to(torch.float32)
    if scale is None:
        peak = wide.abs().amax(dim=1, keepdim=True) if use_per_token_if_dynamic else wide.abs().amax().reshape(1)
        if scale_ub is not None:
            peak = peak.clamp(max=scale_ub)
        scale = (peak / limit).clamp_min(SMALLEST / limit)
    divisor = spread(scale, (rows, columns), group_shape)
    output[:rows] = (wide * divisor.reciprocal()).clamp(-limit, limit).to(output.dtype)
    return output, scale


def broken_ops() -> list[str]:
    """The quantization ops of vLLM that this build lacks, or has in name only."""
    import torch

    found = []
    for name in OPS:
        op: Any = getattr(torch.ops._C, name, None)
        if op is None or not op.default._schema.arguments:
            found.append(name)
    return found


def apply() -> str:
    """Replace vLLM's ``scaled_fp8_quant`` where the ops under it are missing, and say so.

    Raises:
        RepairError: this vLLM's function has another signature than the replacement.
    """
    module = importlib.import_module("vllm._custom_ops")
    missing = broken_ops()
    if not missing:
        return "this build has the quantization ops, nothing to do"
    original = getattr(module, "scaled_fp8_quant", None)
    names = tuple(inspect.signature(original).parameters) if original is not None else ()
    if names[: len(ARGUMENTS)] != ARGUMENTS:
        raise RepairError(f"quant:fp8: vllm._custom_ops.scaled_fp8_quant{names} is not the function that is replaced")
    for place in list(sys.modules.values()):
        if getattr(place, "__name__", "").startswith("vllm.") and vars(place).get("scaled_fp8_quant") is original:
            setattr(place, "scaled_fp8_quant", scaled_fp8_quant)  # noqa: B010 - modules have no such static attribute
    return f"scaled_fp8_quant computes in plain torch; this build lacks {', '.join(missing)}"
