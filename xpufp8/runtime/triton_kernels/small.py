# mypy: ignore-errors
# ruff: noqa: SIM108
# Triton compiles the source of these functions; they are not Python that runs. It has no types that mypy knows, and a branch on a
# compile-time value is clearest as a statement.
"""Few activation rows (decode): weights are read once, as fast as memory gives them, and widened on the way to the matrix unit.

The K dimension is cut so that every compute unit has an equal share. Partial sums go to scratch memory; the program that arrives
last at a tile adds them in the order of their place, so the result is the same bit for bit whoever that is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xpufp8.runtime.triton_kernels.widening import advance, block_at, describe, dot, dot_of_pair, fit_rows, pair_rows, widen


@triton.jit
def _product(x, wide, HOW: tl.constexpr, FIT: tl.constexpr, SWAP: tl.constexpr, COLUMNS: tl.constexpr, PLAIN: tl.constexpr):
    """One tile of activation rows with one tile of weights: float32 ``[rows, BN]``, or ``[BN, rows]`` when swapped."""
    if HOW == "pair":
        high, low, factor = pair_rows(x)
        part = dot_of_pair(wide, tl.trans(high), tl.trans(low), PLAIN) * factor[None, :]
    else:
        if FIT:
            rows, factor = fit_rows(x)
        else:
            rows = x.to(wide.dtype)
        if SWAP:
            part = dot(wide, tl.trans(rows), PLAIN)
            if FIT:
                part = part * factor[None, :]
        else:
            if COLUMNS == "":
                wide = tl.trans(wide)
            part = dot(rows, wide, PLAIN)
            if FIT:
                part = part * factor[:, None]
    return part


@triton.jit
def _sum(x_ptr, w_ptr, s_ptr, tn, k0, k1, M, N, K, stride_xm, stride_w, stride_sn,
         BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, GN: tl.constexpr, GK: tl.constexpr,
         HOW: tl.constexpr, FIT: tl.constexpr, SWAP: tl.constexpr, TWIN: tl.constexpr, COLUMNS: tl.constexpr,
         EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """One tile over K tiles ``k0`` to ``k1``: float32 ``[BM, BN]``, or ``[BN, BM]`` when swapped. Block scales are in it."""
    # Twins share the widened weights: two products of half the rows each.
    ROWS: tl.constexpr = BM // 2 if TWIN else BM
    rm = tl.arange(0, ROWS)
    rn = tl.arange(0, BN)
    rk = tl.arange(0, BK)
    n0 = tn * BN
    BLOCK: tl.constexpr = SCALE == "block"
    # A tile deeper than a block has several scales along K; they are multiplied into the activations, before those are fitted.
    DEEP: tl.constexpr = BLOCK and BK > GK
    WIDE: tl.constexpr = BLOCK and (BN > GN or GN % BN != 0)
    if COLUMNS == "block":
        x_block = block_at(x_ptr, M, K, stride_xm, 0, k0 * BK, BM, BK)
        w_block = block_at(w_ptr, K, N, stride_w, k0 * BK, n0, BK, BN)
    elif COLUMNS == "descriptor":
        x_view = describe(x_ptr, M, K, stride_xm, BM, BK)
        w_view = describe(w_ptr, K, N, stride_w, BK, BN)
    else:
        x_at = x_ptr + rm[:, None] * stride_xm + rk[None, :]
        if EVEN_N:
            w_at = w_ptr + n0.to(tl.int64) * stride_w + rn[:, None] * stride_w + rk[None, :]
        else:
            w_at = w_ptr + tl.minimum(n0 + rn, N - 1)[:, None].to(tl.int64) * stride_w + rk[None, :]
    if WIDE:
        s_at = s_ptr + (tl.minimum(n0 + rn, N - 1) // GN) * stride_sn
    else:
        s_at = s_ptr + (n0 // GN) * stride_sn
    if SWAP:
        acc = tl.zeros((BN, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, BN), tl.float32)
    if TWIN:
        twin = tl.zeros((BN, ROWS), tl.float32)
    for tk in range(k0, k1):
        if COLUMNS == "descriptor":
            x = x_view.load([0, tk * BK])
            w = w_view.load([tk * BK, n0])
        elif COLUMNS == "block":
            if EVEN_K:
                x = tl.load(x_block, boundary_check=(0,), padding_option="zero")
            else:
                x = tl.load(x_block, boundary_check=(0, 1), padding_option="zero")
            if EVEN_N and EVEN_K:
                w = tl.load(w_block)
            else:
                w = tl.load(w_block, boundary_check=(0, 1), padding_option="zero")
            x_block = advance(x_block, 0, BK)
            w_block = advance(w_block, BK, 0)
        elif EVEN_K:
            x = tl.load(x_at + tk * BK, mask=(rm < M)[:, None], other=0.0)
            w = tl.load(w_at + tk * BK, eviction_policy="evict_first")
            if TWIN:
                y = tl.load(x_at + ROWS * stride_xm + tk * BK, mask=(rm + ROWS < M)[:, None], other=0.0)
        else:
            inside = (tk * BK + rk)[None, :] < K
            x = tl.load(x_at + tk * BK, mask=(rm < M)[:, None] & inside, other=0.0)
            w = tl.load(w_at + tk * BK, mask=inside, other=0.0, eviction_policy="evict_first")
            if TWIN:
                y = tl.load(x_at + ROWS * stride_xm + tk * BK, mask=(rm + ROWS < M)[:, None] & inside, other=0.0)
        wide = widen(w, HOW, PLAIN)
        if DEEP:
            deep = tl.load(s_at + tl.minimum(tk * BK + rk, K - 1) // GK)[None, :]
            x = x.to(tl.float32) * deep
            if TWIN:
                y = y.to(tl.float32) * deep
        part = _product(x, wide, HOW, FIT, SWAP, COLUMNS, PLAIN)
        if TWIN:
            other = _product(y, wide, HOW, FIT, SWAP, COLUMNS, PLAIN)
        if BLOCK and not DEEP:
            s = tl.load(s_at + (tk * BK) // GK)
            if WIDE:
                if SWAP:
                    s = s[:, None]
                else:
                    s = s[None, :]
            part = part * s
            if TWIN:
                other = other * s
        acc += part
        if TWIN:
            twin += other
    if TWIN:
        acc = tl.reshape(tl.permute(tl.join(acc, twin), (0, 2, 1)), (BN, BM))
    return acc


@triton.jit
def _store(acc, s_ptr, b_ptr, o_ptr, off, mask, rn, N, SCALE: tl.constexpr, BIAS: tl.constexpr, SWAP: tl.constexpr):
    """Scale by channel or tensor, add the bias, round and store."""
    if SCALE == "tensor":
        acc = acc * tl.load(s_ptr)
    elif SCALE == "channel":
        s = tl.load(s_ptr + rn, mask=rn < N, other=0.0)
        if SWAP:
            acc = acc * s[:, None]
        else:
            acc = acc * s[None, :]
    if BIAS:
        b = tl.load(b_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)
        if SWAP:
            acc += b[:, None]
        else:
            acc += b[None, :]
    tl.store(o_ptr + off, acc.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "stride_sn", "split"])
def w8a16_small(x_ptr, w_ptr, s_ptr, b_ptr, o_ptr, part_ptr, count_ptr, M, N, K, stride_xm, stride_w, stride_sn, split,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, GN: tl.constexpr, GK: tl.constexpr,
                HOW: tl.constexpr, FIT: tl.constexpr, SWAP: tl.constexpr, TWIN: tl.constexpr, COLUMNS: tl.constexpr,
                STREAM: tl.constexpr, BIAS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """``out [M, N] = x [M, K] @ dequantized(w [N, K]).T + bias`` for M <= BM.

    ``COLUMNS``: empty, or how a w that lies as ``[K, N]`` is read: by ``block`` pointers or by ``descriptor``.
    ``STREAM``: programs share all K tiles of all tiles evenly, whatever their number; otherwise program ``(n, i)`` has part ``i``
    of ``split`` of tile ``n``.
    """
    tiles_k = tl.cdiv(K, BK)
    if STREAM:
        pid = tl.program_id(0)
        programs = tl.num_programs(0)
        total = tl.cdiv(N, BN) * tiles_k
        u0 = (pid.to(tl.int64) * total // programs).to(tl.int32)
        u1 = ((pid + 1).to(tl.int64) * total // programs).to(tl.int32)
        first = u0 // tiles_k
        last = (u1 - 1) // tiles_k
    else:
        first = tl.program_id(0)
        last = first
    for tn in range(first, last + 1):
        if STREAM:
            k0 = tl.maximum(u0 - tn * tiles_k, 0)
            k1 = tl.minimum(u1 - tn * tiles_k, tiles_k)
            c0 = (((tn * tiles_k + 1).to(tl.int64) * programs - 1) // total).to(tl.int32)
            parts = ((((tn + 1) * tiles_k).to(tl.int64) * programs - 1) // total).to(tl.int32) - c0 + 1
            place = pid - c0
        else:
            place = tl.program_id(1)
            parts = split
            share = tl.cdiv(tiles_k, split)
            k0 = place * share
            k1 = tl.minimum(k0 + share, tiles_k)
        acc = _sum(x_ptr, w_ptr, s_ptr, tn, k0, k1, M, N, K, stride_xm, stride_w, stride_sn,
                   BM, BN, BK, SCALE, GN, GK, HOW, FIT, SWAP, TWIN, COLUMNS, EVEN_N, EVEN_K, PLAIN)  # fmt: skip
        rm = tl.arange(0, BM)
        rn = tn * BN + tl.arange(0, BN)
        if SWAP:
            off = rm[None, :] * N + rn[:, None]
            mask = (rm < M)[None, :] & (rn < N)[:, None]
        else:
            off = rm[:, None] * N + rn[None, :]
            mask = (rm < M)[:, None] & (rn < N)[None, :]
        if parts == 1:
            _store(acc, s_ptr, b_ptr, o_ptr, off, mask, rn, N, SCALE, BIAS, SWAP)
        else:
            tl.store(part_ptr + place * M * N + off, acc, mask=mask)
            # Every thread's part must be out before the count says so.
            tl.debug_barrier()
            if tl.atomic_add(count_ptr + tn, 1, sem="acq_rel") == parts - 1:
                acc = tl.load(part_ptr + off, mask=mask, other=0.0, cache_modifier=".cg")
                for i in range(1, parts):
                    acc += tl.load(part_ptr + i * M * N + off, mask=mask, other=0.0, cache_modifier=".cg")
                _store(acc, s_ptr, b_ptr, o_ptr, off, mask, rn, N, SCALE, BIAS, SWAP)
                # Ready for the next call.
                tl.store(count_ptr + tn, 0)
