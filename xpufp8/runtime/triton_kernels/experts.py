"""FP8 expert layers: one grouped product for the gated half, one for the way back, tokens sorted by expert on the device.

Nothing here waits for the device: how many tokens an expert gets is never read back, so the whole layer can be captured in a graph.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from xpufp8.runtime.triton_kernels import backend, interpreted, space

if TYPE_CHECKING:
    import torch

    from xpufp8.runtime.experts import ExpertCall
    from xpufp8.runtime.triton_kernels.space import Tile


def sort_by_expert(ids: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Group routed slots by expert, each group padded to whole tiles.

    Args:
        ids: expert of each slot, ``[S]``; below zero for none.
        experts: how many there are.
        rows: rows of a tile.

    Returns:
        ``slots [T * rows]``, int32, padded with ``S``; and ``expert [T]`` of each tile, int32, -1 for tiles that are not used. T is the
        most that S slots can need.
    """
    import torch

    count = ids.numel()
    ids = torch.where((ids < 0) | (ids >= experts), experts, ids.to(torch.int64))
    order = torch.argsort(ids, stable=True)
    sorted_ids = ids[order]
    sizes = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))
    starts = torch.cumsum(sizes, 0) - sizes
    tiles = (sizes + rows - 1) // rows
    tiles[experts] = 0
    ends = torch.cumsum(tiles, 0)
    # Every expert in use can waste less than one tile.
    total = max(min(count, experts) + count // rows, 1)
    place = (ends - tiles)[sorted_ids] * rows + torch.arange(count, device=ids.device) - starts[sorted_ids]
    # Slots without an expert land in a last place that is cut off.
    place = torch.where(sorted_ids < experts, place, total * rows)
    slots = torch.full((total * rows + 1,), count, dtype=torch.int32, device=ids.device)
    slots.scatter_(0, place, order.to(torch.int32))
    at = torch.arange(total, device=ids.device)
    owner = torch.searchsorted(ends[:experts].contiguous(), at, right=True)
    owner = torch.where(at < ends[experts - 1], owner, -1).to(torch.int32)
    return slots[: total * rows], owner


def _flat(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> tuple[str, torch.Tensor]:
    """Name the scale's layout and give it one row of values an expert: ``[E, 1]``, ``[E, N]`` or ``[E, bn, bk]``."""
    from xpufp8.runtime.experts import layout_of
    from xpufp8.runtime.problem import scale_to_float

    layout, wide = layout_of(weight, scale, block), scale_to_float(scale)
    return layout, (wide if layout == "block" else wide.reshape(weight.shape[0], -1)).contiguous()


def tile_for(x: torch.Tensor, weight: torch.Tensor, slots: int, block: tuple[int, int] | None) -> Tile:
    """The tile for an average number of slots an expert. Tiles of one size for both products keep one sorting."""
    dtypes = str(x.dtype).removeprefix("torch."), str(weight.dtype).removeprefix("torch.")
    name = backend() or ""
    # Experts are many and small: bit widening is taken only where nothing could hold a NaN, which is not looked for here.
    how = space.ways(name, *dtypes, careful=True)[0]
    tiles = space.experts(name, max(1, slots // weight.shape[0]), how)
    tile = next((t for t in tiles if t.n <= weight.shape[1]), tiles[0])
    if block is not None and block[1] < tile.k:
        tile = dataclasses.replace(tile, k=block[1])
    return tile


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, sorting: tuple[torch.Tensor, torch.Tensor], tile: Tile,
    *, slots: int, top_k: int, block: tuple[int, int] | None = None, bias: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``out [slots, N]``: row ``s`` is ``x[s // top_k] @ dequantized(weight[expert of s]).T + bias[expert of s]``, times ``shares[s]``.

    Args:
        x: ``[tokens, K]``, unit stride along K.
        weight: ``[E, N, K]``, FP8.
        scale: as in ``xpufp8.runtime.experts.layout_of``.
        sorting: what ``sort_by_expert`` returned for tiles of ``tile.m`` rows.
        tile: configuration.
        slots: routed slots, tokens times ``top_k``.
        top_k: slots of a row of ``x``; 1 when each slot has its own row.
        block: edges of a block for block scales.
        bias: ``[E, N]``.
        shares: float32 ``[slots]``, the router's weights.

    Rows of slots without an expert are zero.
    """
    import torch

    from xpufp8.runtime.triton_kernels.grouped import w8a16_grouped

    _, n, k = weight.shape
    layout, flat = _flat(weight, scale, block)
    order, owner = sorting
    # The interpreter's own rounding to bfloat16 cuts off, so it stores float32 and torch rounds.
    out = torch.zeros(slots, n, dtype=torch.float32 if interpreted() else x.dtype, device=x.device)
    group_n, group_k = block or (1, 1)
    w8a16_grouped[(owner.numel(), -(-n // tile.n))](
        x, weight, flat, bias if bias is not None else flat, shares if shares is not None else flat, out, order, owner,
        slots, n, k, x.stride(0), weight.stride(0), weight.stride(1), flat.stride(0), flat.stride(1), top_k,
        BM=tile.m, BN=tile.n, BK=tile.k, SCALE=layout, GN=group_n, GK=group_k, HOW=tile.how,
        FIT=tile.how == "fp16" and x.dtype == torch.bfloat16, BIAS=bias is not None, SHARES=shares is not None,
        EVEN_N=n % tile.n == 0, EVEN_K=k % tile.k == 0, PLAIN=interpreted(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out.to(x.dtype)


def forward(x: torch.Tensor, call: ExpertCall) -> torch.Tensor:
    """Return the routed experts' weighted sum, as ``xpufp8.runtime.experts.plain_forward`` does.

    The sum over a token's experts is taken in their order, in float32, so results repeat bit for bit.
    """
    import torch

    from xpufp8.runtime.experts import activate

    tokens, top_k = call.routing[1].shape
    if tokens == 0:
        return torch.zeros_like(x)
    weights, scales, block = call.weights, call.scales, call.block
    slots = tokens * top_k
    tile = tile_for(x, weights[0], slots, block)
    sorting = sort_by_expert(call.local_ids(), weights[0].shape[0], tile.m)
    rows = x if x.stride(-1) == 1 else x.contiguous()
    hidden = grouped_product(
        rows, weights[0], scales[0], sorting, tile, slots=slots, top_k=top_k, block=block, bias=call.biases[0]
    )
    hidden = activate(call.activation, hidden).contiguous()
    factor = None if call.weighted_input else call.routing[0].reshape(-1).to(torch.float32).contiguous()
    out = grouped_product(
        hidden, weights[1], scales[1], sorting, tile, slots=slots, top_k=1, block=block, bias=call.biases[1], shares=factor
    )
    return out.view(tokens, top_k, -1).sum(dim=1, dtype=torch.float32).to(x.dtype)
