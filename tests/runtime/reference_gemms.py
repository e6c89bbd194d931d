"""Reference kernels of the matrix products: FP8, FP4, INT4, grouped."""

from __future__ import annotations

from typing import Any

import torch
from reference_cases import E4M3, Case, integers, normal, onednn_output

N, K = 48, 64


# -- FP8 ---------------------------------------------------------------------------------------------------------------


def w8a16(a: Any, b: Any, scale: Any, bias: Any) -> Any:
    """``fp8_gemm_w8a16`` without ``trans_B``: B is [K, N]."""
    wide = a.float() @ (b.float() * (1.0 if scale is None else scale.float().reshape(1, -1)))
    return onednn_output(a, b.shape[1], a.dtype).copy_(wide if bias is None else wide + bias.float())


def w8a16_trans_b(a: Any, b: Any, trans: bool, scale: Any, bias: Any) -> Any:
    """The generation whose B is [N, K] where ``trans_B`` says so."""
    return w8a16(a, b.t() if trans else b, scale, bias)


def _fp8_product(a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any) -> Any:
    """Float32 ``[..., m, n]``: A's scale is one, or one a row; B's is one, or one a column."""
    wide = torch.matmul(a.float(), b.float())
    if a_scale is not None:
        wide = wide * (a_scale.reshape(()) if a_scale.numel() == 1 else a_scale.reshape(*a.shape[:-1], 1))
    if b_scale is not None:
        wide = wide * b_scale.reshape(-1)
    return wide if bias is None else wide + bias.float()


def fp8_gemm(a: Any, b: Any, out_dtype: Any, a_scale: Any, b_scale: Any, bias: Any) -> Any:
    """Also ``fp8_bmm``: both batched, both ``[b, m, k] @ [b, k, n]``."""
    return onednn_output(a, b.shape[-1], out_dtype or torch.float16).copy_(_fp8_product(a, b, a_scale, b_scale, bias))


def fp8_gemm_out(out: Any, a: Any, b: Any, out_dtype: Any, a_scale: Any, b_scale: Any, bias: Any) -> Any:
    """Fills ``out`` and returns it."""
    assert out_dtype in (None, out.dtype)
    return out.copy_(_fp8_product(a, b, a_scale, b_scale, bias))


def _fp8_arguments(tokens: int) -> dict[str, Any]:
    return {"A": normal(2, tokens, K).to(E4M3), "B": normal(N, K, seed=1).to(E4M3).t(), "out_dtype": torch.bfloat16,
            "A_scale_": normal(1, seed=2).abs(), "B_scale_": normal(N, seed=3).abs(), "bias_": normal(N, dtype=torch.bfloat16)}  # fmt: skip


def _w8a16_arguments(tokens: int) -> dict[str, Any]:
    return {"A": normal(2, tokens, K, dtype=torch.bfloat16), "B": normal(K, N, seed=1).to(E4M3), "B_scale_": normal(N, seed=2).abs(),
            "bias_": normal(N, dtype=torch.bfloat16)}  # fmt: skip


def _trans_b_arguments(tokens: int) -> dict[str, Any]:
    plain = _w8a16_arguments(tokens)
    return {"A": plain["A"], "B": normal(N, K, seed=1).to(E4M3), "trans_B": True, "B_scale_": plain["B_scale_"],
            "bias_": plain["bias_"]}  # fmt: skip


# -- four bits ---------------------------------------------------------------------------------------------------------

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32


def unpack_fp4(packed: Any) -> Any:
    """``[..., k/2]`` bytes to float32 ``[..., k]``: a sign, two bits of exponent, one of mantissa; the low half comes first."""
    values = torch.tensor([*FP4, *(-v for v in FP4)])
    codes = packed.contiguous().view(torch.uint8).to(torch.int64)
    return values[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)]


def fp4_gemm(a: Any, b: Any, a_scale: Any, b_scale: Any, out_dtype: Any, bias: Any) -> Any:
    """A ``[m, k/2]``, B ``[k/2, n]`` by strides of ``[n, k/2]``; one power of two for 32 values of each row."""
    left = unpack_fp4(a) * a_scale.float().reshape(*a.shape[:-1], -1).repeat_interleave(GROUP, -1)
    right = unpack_fp4(b.t()) * b_scale.float().repeat_interleave(GROUP, -1)
    wide = left @ right.t()
    return onednn_output(a, b.shape[-1], out_dtype or torch.float16).copy_(wide if bias is None else wide + bias.float())


def _fp4_arguments(tokens: int) -> dict[str, Any]:
    codes = torch.float4_e2m1fn_x2
    scales = torch.float8_e8m0fnu
    return {"A": integers(0, 256, tokens, K // 2, dtype=torch.uint8).view(codes),
            "B": integers(0, 256, N, K // 2, dtype=torch.uint8, seed=1).view(codes).t(),
            "A_scale": integers(120, 130, tokens, K // GROUP, dtype=torch.uint8).view(scales),
            "B_scale": integers(120, 130, N, K // GROUP, dtype=torch.uint8, seed=2).view(scales),
            "out_dtype": torch.bfloat16, "bias_": None}  # fmt: skip


def unpack_int4(packed: Any, dim: int) -> Any:
    """Eight values of four bits stand in an int32, the lowest bits first, along ``dim``."""
    shifts = torch.arange(0, 32, 4)
    wide = (packed.to(torch.int64).unsqueeze(dim + 1) >> shifts.reshape(-1, *[1] * (packed.dim() - dim - 1))) & 15
    return wide.flatten(dim, dim + 1)


def int4_weight(b: Any, scale: Any, zero: Any) -> Any:
    """Float32 ``[k, n]``. Zero points are packed along n, or one for all."""
    points = zero.float() if zero.dtype == torch.int8 else unpack_int4(zero, 1).float().repeat_interleave(GROUP, 0)
    return (unpack_int4(b, 0).float() - points) * scale.float().repeat_interleave(GROUP, 0)


def int4_gemm_w4a16(a: Any, b: Any, bias: Any, scale: Any, zero: Any, group: int, order: Any) -> Any:
    assert group == GROUP
    a = a if order is None else a.index_select(-1, order)
    wide = a.float() @ int4_weight(b, scale, zero)
    return onednn_output(a, b.shape[-1], a.dtype).copy_(wide if bias is None else wide + bias.float())


def int4_gemm_w4a8(a: Any, a_scale: Any, a_zero: Any, b: Any, scale: Any, zero: Any, group: int, order: Any, bias: Any) -> Any:
    assert group == GROUP
    a = a if order is None else a.index_select(-1, order)
    wide = ((a.float() - a_zero.float()) * a_scale.float()) @ int4_weight(b, scale, zero)
    return onednn_output(a, b.shape[-1], torch.float16).copy_(wide if bias is None else wide + bias.float())


def _int4_weights() -> dict[str, Any]:
    top = 2**31
    return {"B": integers(-top, top, N, K // 8, dtype=torch.int32, seed=1).t(), "B_scale": normal(K // GROUP, N, seed=2).abs(),
            "B_zp": integers(-top, top, K // GROUP, N // 8, dtype=torch.int32, seed=3), "group_size": GROUP}  # fmt: skip


def _w4a16_arguments(tokens: int) -> dict[str, Any]:
    weights = _int4_weights()
    order = torch.arange(K - 1, -1, -1, dtype=torch.int32)
    return {"A": normal(2, tokens, K, dtype=torch.bfloat16), "B": weights["B"], "bias": None, "B_scale": weights["B_scale"],
            "B_zp": torch.tensor([8], dtype=torch.int8), "group_size": GROUP, "g_idx": order}  # fmt: skip


def _w4a8_arguments(tokens: int) -> dict[str, Any]:
    weights = _int4_weights()
    return {"A_": integers(-128, 128, tokens, K, dtype=torch.int8), "A_scale": normal(tokens, 1, dtype=torch.float16).abs(),
            "A_zp": integers(-3, 4, tokens, 1, dtype=torch.int32), "B": weights["B"], "B_scale": weights["B_scale"],
            "B_zp": weights["B_zp"], "group_size": GROUP, "g_idx": None, "bias": normal(N, dtype=torch.float16)}  # fmt: skip


# -- grouped -----------------------------------------------------------------------------------------------------------

EXPERTS = 3


def grouped_gemm(a: Any, a_scale: Any, b: Any, b_scale: Any, bias: Any, d: Any, rows: Any, n: int, k: int, experts: int) -> Any:
    """Rows of A stand expert by expert; fills D and returns it."""
    start = 0
    for expert, count in enumerate(rows.tolist()):
        wide = a[start : start + count].float() @ (b[expert].float() * (1.0 if b_scale is None else b_scale[expert]))
        d[start : start + count] = (wide if bias is None else wide + bias[expert].float()).to(d.dtype)
        start += count
    return d


def _grouped_arguments(tokens: int) -> dict[str, Any]:
    return {"ptr_A": normal(tokens, K, dtype=torch.bfloat16), "ptr_A_scale": None, "ptr_B": normal(EXPERTS, K, N, seed=1).to(E4M3),
            "ptr_B_scale": normal(EXPERTS, seed=2).abs(), "ptr_bias": None, "ptr_D": torch.zeros(tokens, N, dtype=torch.bfloat16),
            "rows_per_expert": torch.tensor([2, 0, tokens - 2], dtype=torch.int32), "N": N, "K": K, "num_experts": EXPERTS}  # fmt: skip


CASES = [
    Case("_xpu_C::fp8_gemm_w8a16", w8a16, _w8a16_arguments, ("A",)),
    Case("_xpu_C::fp8_gemm_w8a16", w8a16_trans_b, _trans_b_arguments, ("A",)),
    Case("_xpu_C::fp8_gemm", fp8_gemm, _fp8_arguments, ("A",)),
    Case("_xpu_C::fp8_gemm_out", fp8_gemm_out,
         lambda tokens: {"out": torch.zeros(2, tokens, N, dtype=torch.bfloat16), **_fp8_arguments(tokens)}, ("out", "A"), aliases=True),
    Case("_xpu_C::fp8_bmm", fp8_gemm,
         lambda tokens: {**_fp8_arguments(tokens), "B": normal(2, K, N, seed=1).to(E4M3), "out_dtype": None}, ("A",)),
    Case("_xpu_C::fp4_gemm", fp4_gemm, _fp4_arguments, ("A", "A_scale"), packed=True),
    Case("_xpu_C::int4_gemm_w4a16", int4_gemm_w4a16, _w4a16_arguments, ("A",)),
    Case("_xpu_C::int4_gemm_w4a8", int4_gemm_w4a8, _w4a8_arguments, ("A_", "A_scale", "A_zp")),
    Case("_xpu_C::cutlass_grouped_gemm_interface", grouped_gemm, _grouped_arguments, ("ptr_A", "ptr_D", "rows_per_expert"),
         aliases=True),
    Case("torch_ipex::fp8_gemm_w8a16", w8a16_trans_b, _trans_b_arguments, ("A",)),
]  # fmt: skip
