"""What the ops of vllm-xpu-kernels return, read from their C++ sources (Apache-2.0), one row an op and generation.

Ops that return nothing need no fake. Those for which none can be stated are in ``UNSTATED``, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpufp8.runtime.fakes import Arguments, Fake

if TYPE_CHECKING:
    import torch

MATMUL = "csrc/xpu/onednn/onednn_matmul.cpp check_and_create_output_tensor"
INT4_ARGUMENTS = ("A", "B", "bias", "B_scale", "B_zp", "group_size", "g_idx")
INT8_INT4_ARGUMENTS = ("A_", "A_scale", "A_zp", "B", "B_scale", "B_zp", "group_size", "g_idx", "bias")
FP8_ARGUMENTS = ("A", "B", "out_dtype", "A_scale_", "B_scale_", "bias_")
FP4_ARGUMENTS = ("A", "B", "A_scale", "B_scale", "out_dtype", "bias_")


def product(a: torch.Tensor, n: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """The output of the oneDNN matrix products: leading dimensions of ``a``, ``n`` columns, strides in the order of ``a``'s.

    Args:
        a: ``[m, k]`` or ``[b, m, k]``, in any layout whose last stride is one.
        n: columns, maybe symbolic.
        dtype: of the output; float16 when none is given, whatever the inputs are.
    """
    import torch

    k = a.shape[-1]
    stride = [step // k * n for step in a.stride()[:-1]] + [a.stride(-1)]
    return torch.empty_strided([*a.shape[:-1], n], stride, dtype=dtype or torch.float16, device=a.device)


def _w8a16(args: Arguments) -> torch.Tensor:
    return product(args["A"], args["B"].shape[-1], args["A"].dtype)


def _w8a16_with_trans_b(args: Arguments) -> torch.Tensor:
    return product(args["A"], args["B"].shape[0 if args["trans_B"] else -1], args["A"].dtype)


def _explicit(args: Arguments) -> torch.Tensor:
    return product(args["A"], args["B"].shape[-1], args["out_dtype"])


def _into(args: Arguments) -> torch.Tensor:
    import torch

    return torch.empty_like(args["out"])


def _int4(args: Arguments) -> torch.Tensor:
    # Eight weights stand in one int32 along K, so N is B's last size as it is. Reordering by g_idx makes A dense.
    a = args["A"].contiguous() if args["g_idx"] is not None else args["A"]
    return product(a, args["B"].shape[-1], a.dtype)


def _int8_int4(args: Arguments) -> torch.Tensor:
    import torch

    a = args["A_"].contiguous() if args["g_idx"] is not None else args["A_"]
    return product(a, args["B"].shape[-1], torch.float16)


def _three_dimensions(names: tuple[str, ...], inputs: str, weight: str, **extra: Any) -> Any:
    """Return a maker of arguments with a 3-D input, with which vLLM's own fakes answer with two dimensions."""

    def make(device: Any) -> Arguments:
        import torch

        arguments: Arguments = dict.fromkeys(names)
        arguments |= {name: torch.ones(1, device=device) for name in names if "scale" in name or "zp" in name}
        arguments[inputs] = torch.empty(2, 3, 64, dtype=extra.get("dtype", torch.bfloat16), device=device)
        arguments[weight] = torch.empty(64, 32, dtype=extra.get("weight_dtype", torch.uint8), device=device)
        if "group_size" in names:
            arguments["group_size"] = 64
        if "out_dtype" in names:
            arguments["out_dtype"] = torch.bfloat16
        return arguments

    return make


def _topk(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    scores = args["scores"] if "scores" in args else args["gating_output"]
    shape = (scores.shape[0], args["topk"] if "topk" in args else args["n_topk"])
    return (
        torch.empty(shape, dtype=torch.float32, device=scores.device),
        torch.empty(shape, dtype=torch.int32, device=scores.device),
    )


def _mqa(args: Arguments) -> torch.Tensor:
    import torch

    return torch.empty((args["q"].shape[0], args["kv"].shape[0]), dtype=torch.float32, device=args["q"].device)


def _paged_mqa(args: Arguments) -> torch.Tensor:
    import torch

    q = args["q_fp8"]
    return torch.empty((q.shape[0] * q.shape[1], args["max_model_len"]), dtype=torch.float32, device=q.device)


def _inverse_rope(args: Arguments) -> torch.Tensor:
    import torch

    o = args["attn_output"]
    shape = (o.shape[0], args["n_groups"], args["heads_per_group"] * o.shape[2])
    return torch.empty(shape, dtype=torch.bfloat16, device=o.device)


def _inverse_rope_quant(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    o, groups, heads = args["attn_output"], args["n_groups"], args["heads_per_group"]
    head = o.shape[2]
    return (
        torch.empty((groups, o.shape[0], heads * head), dtype=torch.float8_e4m3fn, device=o.device),
        torch.empty((groups, o.shape[0], heads * (head // 128)), dtype=torch.float32, device=o.device),
    )


def _scaling_rope(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    def like(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        return out.reshape(1, *x.shape) if args["is_neox_style"] else out

    return like(args["query"]), like(args["key"])


def _hyper_connection_pre(args: Arguments) -> tuple[torch.Tensor, ...]:
    import torch

    residual = args["residual"]
    *outer, streams, hidden = residual.shape
    return (
        torch.empty((*outer, streams, 1), dtype=torch.float32, device=residual.device),
        torch.empty((*outer, streams, streams), dtype=torch.float32, device=residual.device),
        torch.empty((*outer, hidden), dtype=torch.bfloat16, device=residual.device),
    )


def _hyper_connection_post(args: Arguments) -> torch.Tensor:
    import torch

    return torch.empty_like(args["residual"].contiguous())


def _hyper_connection_both(args: Arguments) -> tuple[torch.Tensor, ...]:
    return (_hyper_connection_post(args), *_hyper_connection_pre(args))


def _padded_scales(args: Arguments) -> torch.Tensor:
    import torch

    scales = args["A_scales"]
    return torch.empty((args["total_padded_rows"], scales.shape[1]), dtype=scales.dtype, device=scales.device)


def _grouped(args: Arguments) -> torch.Tensor:
    import torch

    return torch.empty_like(args["ptr_D"])


def _conv_spec(args: Arguments) -> list[torch.Tensor]:
    import torch

    mixed, tokens = args["projected_states_qkvz"], args["spec_token_indx"].shape[0]
    k_heads, v_heads = args["num_k_heads"] // args["tp_size"], args["num_v_heads"] // args["tp_size"]
    shapes = [(tokens, k_heads, args["head_k_dim"])] * 2 + [(tokens, v_heads, args["head_v_dim"])] + [(tokens, v_heads)] * 2
    return [torch.empty(shape, dtype=mixed.dtype, device=mixed.device) for shape in shapes]


PADDING = 64 - 1
"""Rows that a sequence may add where each begins at a multiple of the Xe2 kernels' chunk of 64 (csrc/xpu/gdn_attn/gdn_attn_utils.h)."""


def built_for_xe2() -> bool:
    """True unless the installed kernels were built without those for Xe2, which no published wheel was."""
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("vllm_xpu_kernels")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return folder is None or not list(folder.glob("*.so")) or (folder / "libgdn_attn_kernels_xe_2.so").exists()


def _conv_plain(args: Arguments) -> list[torch.Tensor]:
    import torch

    mixed, places = args["projected_states_qkvz"], args["non_spec_token_indx"]
    tokens = args["num_actual_tokens"] if places is None else places.shape[0]
    k_heads, v_heads = args["num_k_heads"] // args["tp_size"], args["num_v_heads"] // args["tp_size"]
    chunked = args["num_prefills"] > 0 and built_for_xe2()
    if chunked:
        tokens = tokens + (args["non_spec_query_start_loc"].shape[0] - 1) * PADDING
    shapes = [(tokens, k_heads, args["head_k_dim"])] * 2 + [(tokens, v_heads, args["head_v_dim"])]
    gates = ((v_heads, tokens), torch.float32) if chunked else ((tokens, v_heads), mixed.dtype)
    return [torch.empty(shape, dtype=mixed.dtype, device=mixed.device) for shape in shapes] + [
        torch.empty(gates[0], dtype=gates[1], device=mixed.device) for _ in range(2)
    ]


_HYPER = ("fn", "hc_scale", "hc_base", "rms_eps")
_HYPER_TAIL = ("hc_sinkhorn_eps", "hc_post_mult_value", "sinkhorn_repeat")
_TOPK_TAIL = ("n_group", "topk_group", "topk", "renormalize", "routed_scaling_factor")
_ROPE = ("attn_output", "positions", "cos_sin_cache", "n_groups", "heads_per_group", "nope_dim", "rope_dim")
_CONV = (
    "z", "projected_states_qkvz", "projected_states_ba", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_state",
    "conv_weights", "conv_bias", "activation", "num_prefills", "num_decodes", "num_spec_decodes",
)  # fmt: skip
_CONV_TAIL = ("num_actual_tokens", "tp_size", "reorder_input")
_CONV_SPEC = ("spec_query_start_loc", "spec_token_indx", "spec_state_indices_tensor", "num_accepted_tokens")
_CONV_PLAIN = ("has_initial_state", "non_spec_query_start_loc", "non_spec_token_indx", "non_spec_state_indices_tensor")
_W8A16 = ("A", "B", "B_scale_", "bias_")

FAKES: tuple[Fake, ...] = (
    Fake("_xpu_C::fp8_gemm_w8a16", _W8A16, _w8a16, MATMUL, _three_dimensions(_W8A16, "A", "B")),
    Fake("_xpu_C::fp8_gemm_w8a16", ("A", "B", "trans_B", "B_scale_", "bias_"), _w8a16_with_trans_b, MATMUL),
    Fake("_xpu_C::fp8_gemm", FP8_ARGUMENTS, _explicit, MATMUL, _three_dimensions(FP8_ARGUMENTS, "A", "B")),
    Fake("_xpu_C::fp8_gemm_out", ("out", *FP8_ARGUMENTS), _into, "csrc/xpu/onednn/onednn_matmul.cpp fp8_gemm_out"),
    Fake("_xpu_C::fp8_bmm", FP8_ARGUMENTS, _explicit, MATMUL),
    Fake("_xpu_C::fp4_gemm", FP4_ARGUMENTS, _explicit, MATMUL, _three_dimensions(FP4_ARGUMENTS, "A", "B")),
    Fake("_xpu_C::int4_gemm_w4a16", INT4_ARGUMENTS, _int4, MATMUL, _three_dimensions(INT4_ARGUMENTS, "A", "B")),
    Fake(
        "_xpu_C::int4_gemm_w4a8",
        INT8_INT4_ARGUMENTS,
        _int8_int4,
        MATMUL,
        _three_dimensions(INT8_INT4_ARGUMENTS, "A_", "B"),
    ),
    Fake(
        "_xpu_C::cutlass_grouped_gemm_interface",
        ("ptr_A", "ptr_A_scale", "ptr_B", "ptr_B_scale", "ptr_bias", "ptr_D", "rows_per_expert", "N", "K", "num_experts"),
        _grouped,
        "csrc/xpu/grouped_gemm/grouped_gemm_interface.cpp",
        writes="ptr_D",
    ),
    Fake("_xpu_C::fp8_mqa_logits", ("q", "kv", "kv_scales", "weights", "cu_seqlen_ks", "cu_seqlen_ke"), _mqa,
         "csrc/xpu/mqa_logits/xe_2/mqa_logits_xe2.cpp fp8_mqa_logits_xe2"),
    Fake("_xpu_C::fp8_paged_mqa_logits",
         ("q_fp8", "kv_cache_fp8", "weights", "context_lens", "block_tables", "schedule_metadata", "max_model_len"), _paged_mqa,
         "csrc/xpu/mqa_logits/xe_2/mqa_logits_xe2.cpp fp8_paged_mqa_logits_xe2"),
    Fake("_xpu_C::deepseek_inv_rope_bf16", _ROPE, _inverse_rope, "csrc/xpu/sycl/deepseek_inv_rope_bf16.cpp"),
    Fake("_xpu_C::deepseek_inv_rope_fp8_quant", _ROPE, _inverse_rope_quant, "csrc/xpu/sycl/deepseek_inv_rope_fp8_quant.cpp"),
    Fake("_xpu_C::deepseek_scaling_rope",
         ("positions", "query", "key", "offsets_opt", "cos_sin_cache", "rotary_dim", "is_neox_style"), _scaling_rope,
         "csrc/xpu/sycl/deepseek_scaling_rope.cpp"),
    Fake("_xpu_C::mhc_pre", ("residual", *_HYPER, "hc_pre_eps", *_HYPER_TAIL), _hyper_connection_pre,
         "csrc/xpu/mhc/xe_2/mhc_pre.cpp"),
    Fake("_xpu_C::mhc_post", ("x", "residual", "post_layer_mix", "comb_res_mix"), _hyper_connection_post,
         "csrc/xpu/mhc/xe_2/mhc_post.cpp"),
    Fake("_xpu_C::mhc_fused_post_pre",
         ("x", "residual", "post_layer_mix", "comb_res_mix", *_HYPER, "hc_pre_eps", *_HYPER_TAIL), _hyper_connection_both,
         "csrc/xpu/mhc/xe_2/mhc_fused_post_pre.cpp"),
    Fake("_xpu_C::causal_conv1d_spec", (*_CONV, *_CONV_SPEC, *_CONV_TAIL), _conv_spec,
         "csrc/xpu/gdn_attn/gdn_attn_interface.cpp causal_conv1d_spec"),
    Fake("_xpu_C::causal_conv1d_non_spec", (*_CONV, *_CONV_PLAIN, *_CONV_TAIL), _conv_plain,
         "csrc/xpu/gdn_attn/gdn_attn_interface.cpp causal_conv1d_non_spec"),
    Fake("_moe_C::grouped_topk", ("scores", *_TOPK_TAIL, "bias", "scoring_func"), _topk, "csrc/moe/grouped_topk.cpp"),
    Fake("_moe_C::grouped_topk", ("scores", "scores_with_bias", *_TOPK_TAIL), _topk, "csrc/moe/grouped_topk.cpp (to 0.1.13)"),
    Fake("_moe_C::fused_grouped_topk",
         ("hidden_states", "gating_output", "n_topk", "renormalize", "n_expert_group", "n_topk_group", "scoring_func",
          "routed_scaling_factor", "bias"), _topk, "csrc/moe/fused_grouped_topk.cpp (to 0.1.3)"),
    Fake("_moe_C::reorder_mxfp_scales", ("A_scales", "rows_per_expert", "total_padded_rows"), _padded_scales,
         "csrc/moe/reorder_mxfp_scales.cpp"),
)  # fmt: skip

_SHARES = (
    "What it returns shares memory with its input. A compiled graph takes a fake's output for a tensor of its own, and would move or drop "
    "writes to it."
)
_IPEX_MOE = (
    "Its schema names no argument, and IPEX 2.9 changed what the routers return and take; no public source of the generation in 2.8 was "
    "found. vLLM to 0.14 calls it only inside the opaque op `vllm::moe_forward`, where no fake is needed."
)
UNSTATED: dict[str, str] = {
    "_C::get_xpu_view_from_cpu_tensor": _SHARES,
    "_C::weak_ref_tensor": _SHARES,
    "_vllm_fa2_C::varlen_fwd": (
        "Without `return_softmax` the second tensor of its list is undefined, and a Python fake cannot put an undefined tensor in a "
        "`Tensor[]` (torch refuses `None` there); with `out` it returns its argument. vLLM calls it only inside opaque attention ops."
    ),
    "_xpu_C::compact_sampling_mask": (
        "Its source is not published: the newest public state of the repository does not have it. vLLM 0.32 and 0.33 do not call it."
    ),
    **dict.fromkeys(
        (f"torch_ipex::{name}" for name in ("grouped_topk.moe", "moe_gather.moe", "moe_scatter.moe", "topk_softmax.moe")),
        _IPEX_MOE,
    ),
}
"""Ops that get no fake, and why: a guess would compile to wrong code."""
