# mypy: ignore-errors
# ruff: noqa: SIM102, SIM108
# Triton compiles the source of these functions; they are not Python that runs. It has no types that mypy knows, and a branch on a
# compile-time value is clearest as a statement.
"""Few activation rows (decode): weights are read once, as fast as memory gives them, and widened on the way to the matrix unit.

The K dimension is cut so that every compute unit has an equal share. Partial sums go to scratch memory; the program that arrives
last at a tile adds them in the order of their place, so the result is the same bit for bit whoever that is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xpufp8.runtime.triton_kernels.widening import (
    advance,
    block_at,
    describe,
    dot,
    dot_of_pair,
    fit_rows,
    pair_rows,
    start_next,
    wait_for_last,
    widen,
)

# How activations are rounded to fp16 without a look at them first. They are multiplied by ROOM, so that elements up to 2^16 / ROOM do
# not overflow, and rounding loses an ulp, or at most 2^-25 where fp16 is at its end.
ROOM = tl.constexpr(8.0)
# A row is small when that loss could be more than 2^-11 of the row's norm, a quarter of what bfloat16 rounds away. With e4m3fn weights up
# to 448 a sum over k of them is at most 448 sqrt(k) times the norm, and the loss at most 2^-25 sqrt(k): sums of 2^-14 * 448 * k tell that
# a row is not small. LEAST is the first factor, and the same bound for a row of one element that is not zero, at sqrt(k) = 64.
LEAST = tl.constexpr(2.0**-14)
ALONE = tl.constexpr(2.0**-8)
MOST = tl.constexpr(2.0**15)


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
def _activations(x_at, rm, M, rk, K, tk, BK: tl.constexpr, EVEN_K: tl.constexpr):
    """One K tile of the activation rows; rows past M and columns past K are zero."""
    if EVEN_K:
        x = tl.load(x_at + tk * BK, mask=(rm < M)[:, None], other=0.0)
    else:
        x = tl.load(x_at + tk * BK, mask=(rm < M)[:, None] & ((tk * BK + rk)[None, :] < K), other=0.0)
    return x


@triton.jit
def _unit(s_at, start, BK: tl.constexpr, GK: tl.constexpr, DEEP: tl.constexpr):
    """What activations are multiplied by before they are rounded: a power of two that brings the scales with them, if any, near one."""
    unit = ROOM
    if DEEP:
        exponent = tl.load(s_at + (start * BK) // GK).to(tl.int32, bitcast=True) & 0x7F800000
        # A scale of zero or next to it has no inverse.
        exponent = tl.maximum(exponent, 0x08000000)
        unit = ROOM * (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    return unit


@triton.jit
def _rounded(x, s_at, tk, rk, K, unit, BK: tl.constexpr, GK: tl.constexpr, DEEP: tl.constexpr):
    """A tile of activations in float32 as it is about to be rounded: times the unit, and times the scales where there are several."""
    if DEEP and BK > GK:
        # Scalars picked by column: a vector of them would go through shared memory to where its columns are.
        scale = tl.zeros_like(rk).to(tl.float32)
        for b in tl.static_range(BK // GK):
            here = tl.load(s_at + tl.minimum(tk * (BK // GK) + b, (K - 1) // GK)) * unit
            scale = tl.where(rk // GK == b, here, scale)
        x = x.to(tl.float32) * scale[None, :]
    elif DEEP:
        x = x.to(tl.float32) * (tl.load(s_at + tk * BK // GK) * unit)
    else:
        x = x.to(tl.float32) * unit
    return x


@triton.jit
def _sum(x_ptr, w_ptr, s_ptr, tn, start, step, count, M, N, K, stride_xm, stride_w, stride_sn,
         BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, GN: tl.constexpr, GK: tl.constexpr,
         HOW: tl.constexpr, FIT: tl.constexpr, CHECK: tl.constexpr, SWAP: tl.constexpr, AHEAD: tl.constexpr, FOLD: tl.constexpr,
         COLUMNS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """One tile of the output over ``count`` times ``FOLD`` K tiles, each ``FOLD`` of them ``step`` apart. Block scales are in it.

    Returns:
        The sum, float32 ``[BM, BN]``, or ``[BN, BM]`` when swapped, and the unit that it is to be divided by.
    """
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rk = tl.arange(0, BK)
    n0 = tn * BN
    BLOCK: tl.constexpr = SCALE == "block"
    # A tile deeper than a block has several scales along K; they are multiplied into the activations, before those are rounded. So are
    # they where sums tell how large the rows are.
    DEEP: tl.constexpr = BLOCK and (BK > GK or CHECK)
    WIDE: tl.constexpr = BLOCK and (BN > GN or GN % BN != 0)
    if COLUMNS == "block":
        x_block = block_at(x_ptr, M, K, stride_xm, 0, start * BK, BM, BK)
        w_block = block_at(w_ptr, K, N, stride_w, start * BK, n0, BK, BN)
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
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    unit = 1.0
    if CHECK:
        unit = _unit(s_at, start, BK, GK, DEEP)
    if AHEAD:
        # By its own pointer arithmetic a tile of activations is in registers before its turn, and passes the level-one cache, where
        # the programs of one multiprocessor share it; staged copies would pass that by.
        x_next = _activations(x_at, rm, M, rk, K, start, BK, EVEN_K)
    for i in range(count * FOLD):
        tk = (start + i // FOLD * step) * FOLD + i % FOLD
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
        else:
            # Which is read first changes the compiled loop, and its speed by a few percent.
            if not AHEAD:
                x = _activations(x_at, rm, M, rk, K, tk, BK, EVEN_K)
            if EVEN_K:
                w = tl.load(w_at + tk * BK, eviction_policy="evict_first")
            else:
                w = tl.load(w_at + tk * BK, mask=(tk * BK + rk)[None, :] < K, other=0.0, eviction_policy="evict_first")
            if AHEAD:
                x = x_next
                x_next = _activations(x_at, rm, M, rk, K, start + tl.where(i + 1 < count, i + 1, 0) * step, BK, EVEN_K)
        wide = widen(w, HOW, PLAIN)
        if DEEP or CHECK:
            x = _rounded(x, s_at, tk, rk, K, unit, BK, GK, DEEP)
        part = _product(x, wide, HOW, FIT, SWAP, COLUMNS, PLAIN)
        if BLOCK and not DEEP:
            s = tl.load(s_at + (tk * BK) // GK)
            if WIDE:
                if SWAP:
                    s = s[:, None]
                else:
                    s = s[None, :]
            part = part * s
        acc += part
    return acc, unit


@triton.jit
def _fit(x_ptr, s_ptr, tn, start, step, count, M, K, stride_xm, stride_sn,
          BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, GN: tl.constexpr, GK: tl.constexpr,
          EVEN_K: tl.constexpr):  # fmt: skip
    """Whether all rows of activations, over the K tiles of ``_sum``, are of a size that fp16 holds; a row of zeros is."""
    rm = tl.arange(0, BM)
    rk = tl.arange(0, BK)
    DEEP: tl.constexpr = SCALE == "block"
    s_at = s_ptr + (tn * BN // GN) * stride_sn
    unit = _unit(s_at, start, BK, GK, DEEP)
    peak = tl.zeros((BM,), tl.float32)
    for i in tl.range(0, count, loop_unroll_factor=4):
        tk = start + i * step
        x = _activations(x_ptr + rm[:, None] * stride_xm + rk[None, :], rm, M, rk, K, tk, BK, EVEN_K)
        peak = tl.maximum(peak, tl.max(tl.abs(_rounded(x, s_at, tk, rk, K, unit, BK, GK, DEEP)), axis=1))
    return tl.max(((peak > MOST) | ((peak < ALONE) & (peak > 0.0))).to(tl.int32), axis=0) == 0


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
                HOW: tl.constexpr, FIT: tl.constexpr, SWAP: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
                COLUMNS: tl.constexpr, STREAM: tl.constexpr, ONCE: tl.constexpr, BIAS: tl.constexpr,
                EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """``out [M, N] = x [M, K] @ dequantized(w [N, K]).T + bias`` for M <= BM.

    ``COLUMNS``: empty, or how a w that lies as ``[K, N]`` is read: by ``block`` pointers or by ``descriptor``.
    ``STREAM``: programs share all K tiles of all tiles evenly, whatever their number; otherwise program ``(n, i)`` has part ``i``
    of ``split`` of tile ``n``.
    ``FIT``: activations are brought into fp16's range. With ``AHEAD`` they are first rounded as they are, and only a program that sees
    rows too large or too small for that goes over its K tiles again and fits each.
    ``EARLY``: this kernel may have been started before the last one ended.
    ``ONCE``: how many parts are read at the same time to be added.
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
    if EARLY:
        if (COLUMNS == "" and EVEN_N) and EVEN_K:
            # The first weights are fetched into the cache meanwhile. What is read here is dropped, so it may be old.
            if STREAM:
                tk = u0 % tiles_k
            else:
                tk = tl.program_id(1)
            at = (first * BN + tl.arange(0, BN))[:, None].to(tl.int64) * stride_w + tk * BK + tl.arange(0, BK)[None, :]
            tl.load(w_ptr + at, volatile=True)
        wait_for_last()
        start_next()
    for tn in range(first, last + 1):
        step = 1
        if STREAM:
            start = tl.maximum(u0 - tn * tiles_k, 0)
            count = tl.minimum(u1 - tn * tiles_k, tiles_k) - start
            c0 = (((tn * tiles_k + 1).to(tl.int64) * programs - 1) // total).to(tl.int32)
            parts = ((((tn + 1) * tiles_k).to(tl.int64) * programs - 1) // total).to(tl.int32) - c0 + 1
            place = pid - c0
        else:
            place = tl.program_id(1)
            parts = split
            if AHEAD:
                # Parts of one tile read neighbouring lines at the same time.
                start = place
                step = parts
                count = tl.cdiv(tiles_k - place, parts)
            else:
                share = tl.cdiv(tiles_k, split)
                start = place * share
                count = tl.minimum(share, tiles_k - start)
        # Rows of weights in blocks of their own have no scale in common that the activations could take.
        CHECK: tl.constexpr = (AHEAD and FIT) and (SCALE != "block" or GN % BN == 0)
        # Going over it again takes shallower tiles, so that it needs no more registers.
        FOLD: tl.constexpr = BK // 128 if BK > 128 else 1
        acc, unit = _sum(x_ptr, w_ptr, s_ptr, tn, start, step, count, M, N, K, stride_xm, stride_w, stride_sn,
                         BM, BN, BK, SCALE, GN, GK, HOW, FIT and not CHECK, CHECK, SWAP, AHEAD, 1, COLUMNS, EVEN_N, EVEN_K,
                         PLAIN)  # fmt: skip
        if CHECK:
            # Overflow shows as an infinity or a NaN, and rows that are small as small sums. So do rows of zeros, which are no reason to do
            # it again: the activations are looked at before.
            size = tl.abs(acc)
            size = tl.max(tl.where(size < float("inf"), size, float("inf")), axis=0 if SWAP else 1)
            largest = 448.0 if w_ptr.dtype.element_ty == tl.float8e4nv else 57344.0
            fair = (size < float("inf")) & (size >= LEAST * largest * BK * count)
            acc = acc * (1.0 / unit)
            if tl.min((fair | (tl.arange(0, BM) >= M)).to(tl.int32), axis=0) == 0:
                if not _fit(x_ptr, s_ptr, tn, start, step, count, M, K, stride_xm, stride_sn, BM, BN, BK, SCALE, GN, GK, EVEN_K):
                    fitted, unit = _sum(x_ptr, w_ptr, s_ptr, tn, start, step, count, M, N, K, stride_xm, stride_w, stride_sn,
                                        BM, BN, BK // FOLD, SCALE, GN, GK, HOW, True, False, SWAP, False, FOLD, COLUMNS, EVEN_N, EVEN_K,
                                        PLAIN)  # fmt: skip
                    acc = fitted
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
                acc = tl.zeros_like(acc)
                # Several are on their way at once; one by one, each would take as long as all.
                for i in range(0, parts, ONCE):
                    for j in tl.static_range(ONCE):
                        there = mask & (tl.zeros_like(off) + j < parts - i)
                        acc += tl.load(part_ptr + (i + j) * M * N + off, mask=there, other=0.0, cache_modifier=".cg")
                _store(acc, s_ptr, b_ptr, o_ptr, off, mask, rn, N, SCALE, BIAS, SWAP)
                # Ready for the next call.
                tl.store(count_ptr + tn, 0)
