"""Starting the kernels: grids, scratch memory, and which of a problem's facts are compiled in.

All functions take ``x [M, K]`` with unit stride along K, ``weight [N, K]`` by rows or by columns, the flat float32 scale, and a bias
``[N]`` or None, and return ``[M, N]`` in the dtype of ``x``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from xpufp8.runtime.triton_kernels import interpreted
from xpufp8.runtime.triton_kernels.space import Tile

if TYPE_CHECKING:
    import torch

_counters: dict[tuple[str, int], Any] = {}
FP16_TOP = 2.0**14
"""Size of the largest element of a row that is fitted into fp16: room for the sums of a matrix unit that rounds to fp16."""

FP8_TOP = 448.0
"""Largest e4m3fn number."""
GROUP = 128
"""Elements along K that share a scale where activations are rounded in groups."""
FILLED = 16
"""Rows that are rounded in groups are filled up to a multiple of this: scales are read sixteen bytes at a time."""


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def counters(count: int, device: torch.device) -> torch.Tensor:
    """Zeros, int32, for the arrivals at ``count`` tiles; every kernel leaves them zero. One set for a device and stream."""
    import torch

    stream = 0 if device.type == "cpu" else int(getattr(torch, device.type).current_stream(device).stream_id)
    key = (str(device), stream)
    held = _counters.get(key)
    if held is None or held.numel() < count:
        held = torch.zeros(max(count, 8192), dtype=torch.int32, device=device)
        _counters[key] = held
    return held


@functools.cache
def block_access() -> str:
    """How this Triton describes blocks of memory: block pointers are gone from 3.8 on, and before 3.4 there was nothing else."""
    import triton

    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    return "descriptor" if (major, minor) >= (3, 8) else "block"


@functools.cache
def starts_early(device: torch.device) -> bool:
    """True where a kernel can be started before the last one of its stream has ended, and waits for that itself."""
    import torch

    from xpufp8.runtime.triton_kernels import backend, widening

    if backend() != "cuda" or widening.wait_for_last is None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    from triton.backends.nvidia.compiler import CUDAOptions

    return hasattr(CUDAOptions, "launch_pdl")


@functools.cache
def options(tile: Tile, early: bool) -> dict[str, Any]:
    """What a kernel of a tile that reads ahead is compiled with on this target.

    Two programs fit a multiprocessor of 65,536 registers then, and the next kernel's come in evenly as they leave.
    """
    from xpufp8.runtime.triton_kernels import backend

    if backend() != "cuda":
        return {}
    most = 65536 // (2 * 32 * tile.warps)
    return {**({"launch_pdl": True} if early else {}), **({"maxnreg": most} if most < 255 else {})}


def _output(m: int, n: int, dtype: Any, device: Any) -> torch.Tensor:
    """Room for a result. The interpreter's own rounding to small formats cuts off, so it stores float32 and torch rounds."""
    import torch

    return torch.empty(m, n, dtype=torch.float32 if interpreted() else dtype, device=device)


def _columns(weight: torch.Tensor) -> str:
    """``COLUMNS`` of the kernels: empty for a weight that lies by rows."""
    return block_access() if weight.stride(0) == 1 and weight.stride(1) != 1 else ""


def _facts(layer: Any, tile: Tile, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, Any]:
    """Compile-time arguments that every linear kernel takes."""
    n, k = weight.shape
    return {
        "BM": tile.m,
        "BN": tile.n,
        "BK": tile.k,
        "SCALE": layer.layout,
        "GN": layer.group_n,
        "GK": layer.group_k,
        "HOW": tile.how,
        "BIAS": bias is not None,
        "EVEN_N": n % tile.n == 0,
        "EVEN_K": k % tile.k == 0,
        "PLAIN": interpreted(),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def small(layer: Any, tile: Tile, share: int, x: Any, weight: Any, scale: Any, bias: Any) -> torch.Tensor:
    """Few rows: ``M <= tile.m``. ``share`` is the number of parts of K, or for ``stream`` the programs a compute unit."""
    import torch

    from xpufp8.runtime.triton_kernels import tuning
    from xpufp8.runtime.triton_kernels.small import w8a16_small

    m, (n, k) = x.shape[0], weight.shape
    tiles, depth = _cdiv(n, tile.n), _cdiv(k, tile.k)
    columns = _columns(weight)
    ahead = tile.ahead and not columns
    out = _output(m, n, x.dtype, x.device)
    if tile.stream:
        # A program has at least one K tile; a tile is shared by as many as its K tiles are spread over.
        programs = min(max(share, 1) * tuning.units(x.device), tiles * depth)
        grid: tuple[int, ...] = (programs,)
        parts = _cdiv(depth, tiles * depth // programs) + 1
    else:
        # No part is empty. Neighbouring K tiles go to different parts with ``ahead``, otherwise to the same.
        parts = min(share, depth) if ahead else _cdiv(depth, _cdiv(depth, share))
        grid = (tiles, parts)
    together = parts > 1
    scratch = torch.empty(parts * m * n if together else 1, dtype=torch.float32, device=x.device)
    count = counters(tiles, x.device)
    # Scales that are multiplied into fp16 activations may take them out of its range.
    deep = layer.layout == "block" and tile.k > layer.group_k
    # A kernel in one part fills the device unevenly; the next one's programs would come into the gaps and leave others behind.
    early = ahead and together and starts_early(x.device)
    w8a16_small[grid](
        x, weight, scale, bias if bias is not None else scale, out, scratch, count, m, n, k,
        x.stride(0), weight.stride(1) if columns else weight.stride(0), scale.stride(0) if layer.layout == "block" else 0, parts,
        FIT=tile.how == "fp16" and (x.dtype == torch.bfloat16 or deep), SWAP=tile.swap, AHEAD=ahead,
        EARLY=early, COLUMNS=columns, STREAM=tile.stream, ONCE=tile.at_once, **(options(tile, early) if ahead else {}),
        **_facts(layer, tile, weight, bias),
    )  # fmt: skip
    return out.to(x.dtype)


def fit(x: torch.Tensor, dtype: Any, limit: float, *, power: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows divided by a factor each, in ``dtype``, and the factors ``[M]``; see ``large.fit_activations``."""
    import torch

    from xpufp8.runtime.triton_kernels.large import fit_activations

    m, k = x.shape
    quotient = _output(m, k, dtype, x.device)
    factor = torch.empty(m, dtype=torch.float32, device=x.device)
    block = min(4096, 1 << (k - 1).bit_length())
    fit_activations[(m,)](x, quotient, factor, k, x.stride(0), LIMIT=limit, POWER=power, B=block, num_warps=8)
    return quotient.to(dtype), factor


def fit_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round activations to e4m3fn with one scale for each ``GROUP`` along K.

    Args:
        x: ``[M, K]``, K a multiple of ``GROUP``.

    Returns:
        e4m3fn ``[M', K]`` and float32 ``[M', K / GROUP]`` that lies by columns, M' being M filled up to ``FILLED``; rows past M hold
        anything.
    """
    import torch

    from xpufp8.runtime.triton_kernels.large import fit_groups as kernel

    m, k = x.shape
    filled = _cdiv(m, FILLED) * FILLED
    quotient = _output(filled, k, torch.float8_e4m3fn, x.device)
    factor = torch.empty(k // GROUP, filled, dtype=torch.float32, device=x.device)
    rows, groups = 8, 8
    kernel[(_cdiv(m, rows), _cdiv(k, groups * GROUP))](
        x, quotient, factor, m, k, x.stride(0), filled, LIMIT=FP8_TOP, ROWS=rows, GROUPS=groups, G=GROUP, num_warps=4
    )
    return quotient.to(torch.float8_e4m3fn), factor.t()


def large(layer: Any, tile: Tile, x: Any, weight: Any, scale: Any, bias: Any) -> torch.Tensor:
    """Many rows, 16-bit activations."""
    import torch

    from xpufp8.runtime.triton_kernels.large import w8a16_large

    m, (n, k) = x.shape[0], weight.shape
    factor, dtype = None, x.dtype
    if tile.how == "fp16" and x.dtype == torch.bfloat16:
        x, factor = fit(x, torch.float16, FP16_TOP, power=True)
    out = _output(m, n, dtype, x.device)
    columns = _columns(weight)
    w8a16_large[(_cdiv(m, tile.m) * _cdiv(n, tile.n),)](
        x, factor, weight, scale, bias if bias is not None else scale, out, m, n, k,
        x.stride(0), weight.stride(1) if columns else weight.stride(0), scale.stride(0) if layer.layout == "block" else 0,
        GROUP=tile.group, COLUMNS=columns, **_facts(layer, tile, weight, bias),
    )  # fmt: skip
    return out.to(dtype)


def large_w8a8(layer: Any, tile: Tile, x: Any, weight: Any, scale: Any, bias: Any) -> torch.Tensor:
    """Many rows, activations rounded to e4m3fn with one scale a row."""
    import torch

    from xpufp8.runtime.triton_kernels.large import w8a8_large

    quotient, factor = fit(x, torch.float8_e4m3fn, FP8_TOP, power=False)
    return w8a8(layer, tile, quotient, factor, weight, scale, bias, x.dtype, w8a8_large)


def w8a8(
    layer: Any, tile: Tile, quotient: Any, factor: Any, weight: Any, scale: Any, bias: Any, dtype: Any, kernel: Any = None
) -> torch.Tensor:
    """The product alone, for activations that are FP8 already: ``quotient [M, K] * factor [M]``."""
    if kernel is None:
        from xpufp8.runtime.triton_kernels.large import w8a8_large as kernel
    m, (n, k) = quotient.shape[0], weight.shape
    out = _output(m, n, dtype, quotient.device)
    facts = _facts(layer, tile, weight, bias)
    kernel[(_cdiv(m, 2 * tile.m) * _cdiv(n, tile.n),)](
        quotient, factor, weight, scale, bias if bias is not None else scale, out, m, n, k,
        weight.stride(0), scale.stride(0) if layer.layout == "block" else 0, GROUP=tile.group, **facts,
    )  # fmt: skip
    return out.to(dtype)


def widen_weight(layer: Any, weight: Any, scale: Any, dtype: Any) -> torch.Tensor:
    """The dequantized weight, in memory order of the weight: ``[N, K]`` by rows or by columns."""
    import torch

    from xpufp8.runtime.triton_kernels.large import widen_weight as kernel

    n, k = weight.shape
    if _columns(weight):
        spread = scale
        if layer.layout == "block":
            spread = scale.repeat_interleave(layer.group_n, 0)[:n].repeat_interleave(layer.group_k, 1)[:, :k]
        elif layer.layout == "channel":
            spread = scale.reshape(-1, 1)
        return (weight.to(torch.float32) * spread).to(dtype)
    out = _output(n, k, dtype, weight.device)
    rows, depth = 64, 128
    kernel[(_cdiv(n, rows), _cdiv(k, depth))](
        weight, scale, out, n, k, weight.stride(0), scale.stride(0) if layer.layout == "block" else 0,
        BN=rows, BK=depth, SCALE=layer.layout, GN=layer.group_n, GK=layer.group_k, num_warps=4,
    )  # fmt: skip
    return out.to(dtype)


def widen_then_matmul(layer: Any, x: Any, weight: Any, scale: Any, bias: Any) -> torch.Tensor:
    """Dequantize into scratch memory, then the device's own matmul: much scratch, and the best that the vendor has."""
    import torch

    return torch.nn.functional.linear(x, widen_weight(layer, weight, scale, x.dtype), bias)
