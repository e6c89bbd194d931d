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

LEAST_ROWS = 32
"""Rows below which memory alone sets the time, and rounding activations would only cost."""


def takes(layer: Any, n: int, k: int) -> bool:
    """True where ``torch._scaled_mm`` has a form for a layer's scales and sizes, on whatever device.

    cuBLAS wants rows of block scales filled up to a multiple of four and torch 2.11 does not ask: with three blocks along K the product
    was wrong without a word (H200). So K is a multiple of four blocks here.
    """
    if layer.layout == "block":
        blocks = (layer.group_n, layer.group_k) == (launch.GROUP, launch.GROUP)
        return blocks and n % launch.GROUP == k % (4 * launch.GROUP) == 0
    return n % 16 == k % 16 == 0


def product(layer: Any, x: Any, weight: Any, scale: Any, bias: Any) -> torch.Tensor:
    """``out [M, N] = rounded(x [M, K]) @ dequantized(weight [N, K]).T + bias``.

    Raises:
        RuntimeError: this device, or this torch, has no such product.
    """
    import torch

    m = x.shape[0]
    if layer.layout == "block":
        quotient, factor = launch.fit_groups(x)
        by_channel = scale.t()
    else:
        quotient, row = launch.fit(x, torch.float8_e4m3fn, launch.FP8_TOP, power=False)
        factor = row[:, None]
        by_channel = scale.expand(weight.shape[0])[None, :].contiguous()
    out = torch._scaled_mm(quotient, weight.t(), scale_a=factor, scale_b=by_channel, bias=bias, out_dtype=x.dtype)
    return out[:m]
