# mypy: ignore-errors
# ruff: noqa: SIM108
# Triton compiles the source of these functions; they are not Python that runs. It has no types that mypy knows, and a branch on a
# compile-time value is clearest as a statement.
"""The grouped product of expert layers: each tile of rows belongs to one expert."""

from __future__ import annotations

import triton
import triton.language as tl

from xpufp8.runtime.triton_kernels.widening import dot, fit_rows, widen


@triton.jit(do_not_specialize=["slots", "top_k", "stride_s0", "stride_s1"])
def w8a16_grouped(x_ptr, w_ptr, s_ptr, b_ptr, share_ptr, o_ptr, order_ptr, owner_ptr, slots, N, K,
                  stride_xm, stride_we, stride_w, stride_s0, stride_s1, top_k,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, GN: tl.constexpr, GK: tl.constexpr,
                  HOW: tl.constexpr, FIT: tl.constexpr, BIAS: tl.constexpr, SHARES: tl.constexpr,
                  EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    """Rows ``order[tile]`` of the output: ``x[slot // top_k] @ dequantized(w[owner]).T``, bias and router's share applied."""
    tile = tl.program_id(0)
    expert = tl.load(owner_ptr + tile).to(tl.int64)
    if expert >= 0:
        rn = tl.program_id(1) * BN + tl.arange(0, BN)
        rk = tl.arange(0, BK)
        slot = tl.load(order_ptr + tile * BM + tl.arange(0, BM))
        real = slot < slots
        row = (slot // top_k).to(tl.int64)
        x_at = x_ptr + row[:, None] * stride_xm + rk[None, :]
        if EVEN_N:
            safe = rn
        else:
            safe = tl.minimum(rn, N - 1)
        w_at = w_ptr + expert * stride_we + safe[:, None] * stride_w + rk[None, :]
        s_at = s_ptr + expert * stride_s0
        if SCALE == "block":
            s_at += (safe // GN) * stride_s1
        acc = tl.zeros((BM, BN), tl.float32)
        for tk in range(tl.cdiv(K, BK)):
            if EVEN_K:
                x = tl.load(x_at + tk * BK, mask=real[:, None], other=0.0)
                w = tl.load(w_at + tk * BK)
            else:
                inside = (tk * BK + rk)[None, :] < K
                x = tl.load(x_at + tk * BK, mask=real[:, None] & inside, other=0.0)
                w = tl.load(w_at + tk * BK, mask=inside, other=0.0)
            wide = widen(w, HOW, PLAIN)
            if FIT:
                rows, factor = fit_rows(x)
                part = dot(rows, tl.trans(wide), PLAIN) * factor[:, None]
            else:
                part = dot(x.to(wide.dtype), tl.trans(wide), PLAIN)
            if SCALE == "block":
                part = part * tl.load(s_at + tk * BK // GK)[None, :]
            acc += part
        if SCALE == "tensor":
            acc = acc * tl.load(s_at)
        elif SCALE == "channel":
            acc = acc * tl.load(s_at + safe * stride_s1)[None, :]
        if BIAS:
            acc += tl.load(b_ptr + expert * N + safe).to(tl.float32)[None, :]
        if SHARES:
            acc = acc * tl.load(share_ptr + slot, mask=real, other=0.0)[:, None]
        at = o_ptr + slot[:, None].to(tl.int64) * N + rn[None, :]
        tl.store(at, acc.to(o_ptr.dtype.element_ty), mask=real[:, None] & (rn < N)[None, :])
