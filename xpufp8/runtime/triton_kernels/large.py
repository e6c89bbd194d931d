# mypy: ignore-errors
# ruff: noqa: SIM108
# Triton compiles the source of these functions; they are not Python that runs. It has no types that mypy knows, and a branch on a
# compile-time value is clearest as a statement.
"""Many activation rows (prefill): W8A8 on FP8 matrix units, W8A16, and what surrounds them."""

from __future__ import annotations

import triton
import triton.language as tl

from xpufp8.runtime.triton_kernels.widening import advance, block_at, describe, dot, grouped, widen


@triton.jit
def _within(x, LIMIT: tl.constexpr):
    """``x`` between ``-LIMIT`` and ``LIMIT``; a NaN stays one, as it does not in a GPU's plain minimum."""
    x = tl.maximum(x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fit_activations(x_ptr, q_ptr, f_ptr, K, stride_xm, LIMIT: tl.constexpr, POWER: tl.constexpr, B: tl.constexpr):
    """Divide each row by a factor so that its largest element is ``LIMIT``, or by a power of two so that it is below it.

    One program a row. Writes the quotient in the dtype of ``q [M, K]`` and the factor to ``f [M]``.
    """
    m = tl.program_id(0)
    r = tl.arange(0, B)
    peak = tl.zeros((B,), tl.float32)
    for k in range(0, K, B):
        x = tl.load(x_ptr + m * stride_xm + k + r, mask=k + r < K, other=0.0)
        peak = tl.maximum(peak, tl.abs(x.to(tl.float32)))
    factor = tl.maximum(tl.max(peak, 0), 1e-30) / LIMIT
    if POWER:
        factor = ((factor.to(tl.int32, bitcast=True) & 0x7F800000) + 0x00800000).to(tl.float32, bitcast=True)
    tl.store(f_ptr + m, factor)
    inverse = 1.0 / factor
    for k in range(0, K, B):
        x = tl.load(x_ptr + m * stride_xm + k + r, mask=k + r < K, other=0.0).to(tl.float32) * inverse
        tl.store(q_ptr + m * K + k + r, _within(x, LIMIT).to(q_ptr.dtype.element_ty), mask=k + r < K)


@triton.jit
def fit_groups(x_ptr, q_ptr, f_ptr, M, K, stride_xm, stride_f,
               LIMIT: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Divide each ``G`` elements along K by a factor so that the largest of them is ``LIMIT``.

    Writes the quotient to ``q [M, K]`` and the factor of row m and group g to ``f[g * stride_f + m]``; K is a multiple of ``G``.
    """
    i = tl.arange(0, ROWS * GROUPS)
    m = tl.program_id(0) * ROWS + i % ROWS
    g = tl.program_id(1) * GROUPS + i // ROWS
    there = (m < M) & (g * G < K)
    rk = g[:, None] * G + tl.arange(0, G)[None, :]
    x = tl.load(x_ptr + m[:, None].to(tl.int64) * stride_xm + rk, mask=there[:, None], other=0.0).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30) / LIMIT
    x = _within(x / factor[:, None], LIMIT)
    tl.store(q_ptr + m[:, None].to(tl.int64) * K + rk, x.to(q_ptr.dtype.element_ty), mask=there[:, None])
    tl.store(f_ptr + g * stride_f + m, factor, mask=there)


@triton.jit
def widen_weight(w_ptr, s_ptr, o_ptr, N, K, stride_w, stride_sn,
                 BN: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, GN: tl.constexpr, GK: tl.constexpr):  # fmt: skip
    """Write the dequantized weight ``[N, K]`` in the dtype of ``o``; the product with the scale is rounded once."""
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rk = tl.program_id(1) * BK + tl.arange(0, BK)
    mask = (rn < N)[:, None] & (rk < K)[None, :]
    w = tl.load(w_ptr + rn[:, None].to(tl.int64) * stride_w + rk[None, :], mask=mask, other=0.0).to(tl.float32)
    if SCALE == "tensor":
        w = w * tl.load(s_ptr)
    elif SCALE == "channel":
        w = w * tl.load(s_ptr + rn, mask=rn < N, other=0.0)[:, None]
    else:
        w = w * tl.load(s_ptr + (rn // GN)[:, None] * stride_sn + (rk // GK)[None, :], mask=mask, other=0.0)
    tl.store(o_ptr + rn[:, None].to(tl.int64) * K + rk[None, :], w.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _operand(ptr, r, R, rk, K, stride, EVEN_R: tl.constexpr, EVEN_K: tl.constexpr):
    """Load a tile of rows; rows past the end repeat the last one, columns past the end are zero."""
    if not EVEN_R:
        r = tl.minimum(r, R - 1)
    at = ptr + r[:, None].to(tl.int64) * stride + rk[None, :]
    if EVEN_K:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=rk[None, :] < K, other=0.0)
    return tile


@triton.jit(do_not_specialize=["stride_sn"])
def w8a8_large(x_ptr, f_ptr, w_ptr, s_ptr, b_ptr, o_ptr, M, N, K, stride_w, stride_sn,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
               GN: tl.constexpr, GK: tl.constexpr, HOW: tl.constexpr, BIAS: tl.constexpr,
               EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """``out [M, N] = (x [M, K] * f [M]) @ dequantized(w [N, K]).T + bias``, two tiles of M a program.

    x and w are FP8, and multiplied as they are (``HOW`` "fp8") or widened first. With block scales each product of one block's
    depth is scaled in float32. Two tiles keep the accumulators of a tall tile without holding the products of all of it at once,
    and while one is scaled the matrix unit has the other program of the same multiprocessor to work on.
    """
    pid_m, pid_n = grouped(tl.program_id(0), M, N, 2 * BM, BN, GROUP)
    r0 = pid_m * (2 * BM) + tl.arange(0, BM)
    r1 = r0 + BM
    rn = pid_n * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    s_at = s_ptr + (pid_n * BN) // GN * stride_sn
    acc0 = tl.zeros((BM, BN), tl.float32)
    acc1 = tl.zeros((BM, BN), tl.float32)
    # Rows past the end repeat the last one; they are not stored.
    x0_at = x_ptr + tl.minimum(r0, M - 1)[:, None].to(tl.int64) * K + rk[None, :]
    x1_at = x_ptr + tl.minimum(r1, M - 1)[:, None].to(tl.int64) * K + rk[None, :]
    w_at = w_ptr + tl.minimum(rn, N - 1)[:, None].to(tl.int64) * stride_w + rk[None, :]
    for tk in range(tl.cdiv(K, BK)):
        if EVEN_K:
            x0 = tl.load(x0_at)
            x1 = tl.load(x1_at)
            w = tl.load(w_at)
        else:
            inside = (tk * BK + rk)[None, :] < K
            x0 = tl.load(x0_at, mask=inside, other=0.0)
            x1 = tl.load(x1_at, mask=inside, other=0.0)
            w = tl.load(w_at, mask=inside, other=0.0)
        if HOW != "fp8":
            x0 = widen(x0, HOW, PLAIN)
            x1 = widen(x1, HOW, PLAIN)
            w = widen(w, HOW, PLAIN)
        if SCALE == "block":
            s = tl.load(s_at + tk * BK // GK)
            acc0 += dot(x0, tl.trans(w), PLAIN) * s
            acc1 += dot(x1, tl.trans(w), PLAIN) * s
        else:
            acc0 += dot(x0, tl.trans(w), PLAIN)
            acc1 += dot(x1, tl.trans(w), PLAIN)
        x0_at += BK
        x1_at += BK
        w_at += BK
    f0 = tl.load(f_ptr + r0, mask=r0 < M, other=0.0)
    f1 = tl.load(f_ptr + r1, mask=r1 < M, other=0.0)
    _write(acc0 * f0[:, None], s_ptr, b_ptr, o_ptr, r0, rn, M, N, SCALE, BIAS)
    _write(acc1 * f1[:, None], s_ptr, b_ptr, o_ptr, r1, rn, M, N, SCALE, BIAS)


@triton.jit
def _write(acc, s_ptr, b_ptr, o_ptr, rm, rn, M, N, SCALE: tl.constexpr, BIAS: tl.constexpr):
    """Scale by channel or tensor, add the bias, round and store."""
    if SCALE == "tensor":
        acc = acc * tl.load(s_ptr)
    elif SCALE == "channel":
        acc = acc * tl.load(s_ptr + rn, mask=rn < N, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(b_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    mask = (rm < M)[:, None] & (rn < N)[None, :]
    tl.store(o_ptr + rm[:, None].to(tl.int64) * N + rn[None, :], acc.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stride_sn"])
def w8a16_large(x_ptr, f_ptr, w_ptr, s_ptr, b_ptr, o_ptr, M, N, K, stride_xm, stride_w, stride_sn,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
                GN: tl.constexpr, GK: tl.constexpr, HOW: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr,
                EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """``out [M, N] = (x [M, K] * f [M]) @ dequantized(w [N, K]).T + bias`` with 16-bit activations.

    ``COLUMNS``: as in ``small.w8a16_small``. Block scales multiply each product of one block's depth in float32.
    """
    pid_m, pid_n = grouped(tl.program_id(0), M, N, BM, BN, GROUP)
    rm = pid_m * BM + tl.arange(0, BM)
    rn = pid_n * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    s_at = s_ptr + pid_n * BN // GN * stride_sn
    acc = tl.zeros((BM, BN), tl.float32)
    if COLUMNS == "block":
        x_block = block_at(x_ptr, M, K, stride_xm, pid_m * BM, 0, BM, BK)
        w_block = block_at(w_ptr, K, N, stride_w, 0, pid_n * BN, BK, BN)
    elif COLUMNS == "descriptor":
        x_view = describe(x_ptr, M, K, stride_xm, BM, BK)
        w_view = describe(w_ptr, K, N, stride_w, BK, BN)
    for tk in range(tl.cdiv(K, BK)):
        if COLUMNS == "descriptor":
            x = x_view.load([pid_m * BM, tk * BK])
            wide = widen(w_view.load([tk * BK, pid_n * BN]), HOW, PLAIN)
        elif COLUMNS == "block":
            x = tl.load(x_block, boundary_check=(0, 1), padding_option="zero")
            w = tl.load(w_block, boundary_check=(0, 1), padding_option="zero")
            x_block = advance(x_block, 0, BK)
            w_block = advance(w_block, BK, 0)
            wide = widen(w, HOW, PLAIN)
        else:
            x = _operand(x_ptr, rm, M, tk * BK + rk, K, stride_xm, False, EVEN_K)
            wide = tl.trans(widen(_operand(w_ptr, rn, N, tk * BK + rk, K, stride_w, EVEN_N, EVEN_K), HOW, PLAIN))
        if SCALE == "block":
            acc += dot(x.to(wide.dtype), wide, PLAIN) * tl.load(s_at + tk * BK // GK)
        else:
            acc += dot(x.to(wide.dtype), wide, PLAIN)
    if f_ptr is not None:
        acc = acc * tl.load(f_ptr + rm, mask=rm < M, other=0.0)[:, None]
    _write(acc, s_ptr, b_ptr, o_ptr, rm, rn, M, N, SCALE, BIAS)
