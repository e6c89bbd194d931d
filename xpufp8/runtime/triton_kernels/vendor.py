"""Many rows through the FP8 product that the device's vendor wrote, where torch has one for the layer's scales.

Activations are rounded to e4m3fn by a kernel here, then ``torch._scaled_mm`` multiplies: one scale in 128 along K beside weights in
128×128 blocks, otherwise one scale a row. Which devices and which sizes it takes is found by calling it: a device that lacks it raises,
and the tuning goes on without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpufp8.runtime.triton_kernels import launch

if TYPE_CHECKING:
    import torch

LIMIT = 448.0
"""Largest e4m3fn number."""
GROUP = 128
ROWS = 16
"""Rows are filled up to a multiple of this, because scales are read sixteen bytes at a time."""


def takes(layer: Any, weight: torch.Tensor) -> bool:
    """True where ``torch._scaled_mm`` has a form for a layer's scales and sizes, on whatever device."""
    n, k = weight.shape
    if layer.layout == "block":
        blocks = (layer.group_n, layer.group_k) == (GROUP, GROUP)
        return blocks and n % GROUP == k % GROUP == 0
    return bool(n % 16 == k % 16 == 0)


def fit_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round activations to e4m3fn with one scale for each 128 along K.

    Args:
        x: ``[M, K]``, K a multiple of 128.

    Returns:
        e4m3fn ``[M', K]`` and float32 ``[M', K / 128]`` that lies by columns, M' being M filled up to ``ROWS``; rows past M hold
        anything.
    """
    import torch

    from xpufp8.runtime.triton_kernels import interpreted
    from xpufp8.runtime.triton_kernels.large import fit_groups as kernel

    m, k = x.shape
    filled = -(-m // ROWS) * ROWS
    quotient = torch.empty(filled, k, dtype=torch.float32 if interpreted() else torch.float8_e4m3fn, device=x.device)
    factor = torch.empty(k // GROUP, filled, dtype=torch.float32, device=x.device)
    rows, groups = 8, 8
    grid = (-(-m // rows), -(-k // (groups * GROUP)))
    kernel[grid](x, quotient, factor, m, k, x.stride(0), filled, LIMIT=LIMIT, ROWS=rows, GROUPS=groups, G=GROUP, num_warps=4)
    return quotient.to(torch.float8_e4m3fn), factor.t()


def product(layer: Any, x: Any, weight: Any, scale: Any, bias: Any) -> torch.Tensor:
    """``out [M, N] = rounded(x [M, K]) @ dequantized(weight [N, K]).T + bias``.

    Raises:
        RuntimeError: this device, or this torch, has no such product.
    """
    import torch

    m = x.shape[0]
    if layer.layout == "block":
        quotient, factor = fit_groups(x)
        by_channel = scale.t()
    else:
        quotient, row = launch.fit(x, torch.float8_e4m3fn, LIMIT, power=False)
        factor = row[:, None]
        by_channel = scale.expand(weight.shape[0])[None, :].contiguous()
    out = torch._scaled_mm(quotient, weight.t(), scale_a=factor, scale_b=by_channel, bias=bias, out_dtype=x.dtype)
    return out[:m]
