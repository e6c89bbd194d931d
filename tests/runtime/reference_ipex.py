"""Reference kernels of IPEX's ops that FP8 serving reached; schemas of its CPU build are written out, those of its XPU build are kept."""

from __future__ import annotations

from typing import Any

import torch
from reference_cases import E4M3, Case, integers, normal
from reference_model_ops import route

_EXPERTS = (
    "(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, bool inplace, bool is_vnni, bool is_distributed, "
    "bool is_woq, int woq_weight_dtype, int woq_group_size, int woq_lowp_mode, Tensor? w1_scale, Tensor? w1_zp, Tensor? w1_compensation, "
    "Tensor? w2_scale, Tensor? w2_zp, Tensor? w2_compensation) -> Tensor"
)
FORMATS = {23: torch.float8_e5m2, 24: E4M3}


def cast_to_fp8(x: Any, scale: Any, history: Any, inverse: Any, index: int, kind: int) -> Any:
    limit = torch.finfo(FORMATS[kind]).max
    return (x.float() * scale[index]).clamp(-limit, limit).to(FORMATS[kind])


def cast_from_fp8(x: Any, inverse: Any, index: int, kind: int, dtype: Any) -> Any:
    return (x.float() * inverse[index]).to(dtype)


def fp8_linear(x: Any, x_scale: Any, i: int, _: int, weight: Any, w_scale: Any, j: int, __: int, bias: Any, out: Any) -> Any:
    """Fills ``out`` and returns it."""
    return out.copy_((x.float() * x_scale[i]) @ (weight.float() * w_scale[j]).t() + bias.float())


def convert(source: Any, goal: Any, count: int, *_: bool) -> Any:
    """Fills ``goal`` and returns it."""
    goal[:count] = source[:count].to(goal.dtype)
    return goal


def fused_experts(x: Any, w1: Any, w2: Any, shares: Any, ids: Any, *_: Any) -> Any:
    out = torch.zeros(x.shape)
    for token in range(x.shape[0]):
        for slot, expert in enumerate(ids[token].tolist()):
            gate, up = (w1[expert].float() @ x[token].float()).chunk(2)
            out[token] += shares[token, slot] * (w2[expert].float() @ (torch.nn.functional.silu(gate) * up))
    return out.to(x.dtype)


def grouped_topk(x: Any, gating: Any, topk: int, renormalize: bool, groups: int, kept: int, bias: Any, factor: Any) -> Any:
    """Ids come first, unlike elsewhere."""
    scores = gating.float().sigmoid()
    weights, ids = route(scores, scores + bias, groups, kept, topk, renormalize, float(factor))
    return ids, weights


def add_layernorm(a: Any, b: Any, alpha: int, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    return torch.nn.functional.layer_norm(a + alpha * b, shape, weight, bias, eps)


def rms_norm(x: Any, shape: Any, weight: Any, eps: float) -> Any:
    """The second output holds a factor a row, in float32 only where the weight is."""
    factor = torch.rsqrt(x.float().square().mean(-1) + eps)
    out = (x.float() * factor.unsqueeze(-1) * weight.float()).to(x.dtype)
    return out, factor.reshape(-1).to(torch.float32 if weight.dtype == torch.float32 else x.dtype)


def _casting(tokens: int) -> dict[str, Any]:
    return {"input": normal(2, tokens, 32), "scale": torch.tensor([1.0, 3.0]), "amax_history": torch.zeros(2),
            "scale_inv": torch.tensor([1.0, 1 / 3]), "index": 1, "otype": 24}  # fmt: skip


def _casting_back(tokens: int) -> dict[str, Any]:
    return {"input": normal(2, tokens, 32).to(torch.float8_e5m2), "scale_inv": torch.tensor([1.0, 3.0]), "index": 1, "itype": 23,
            "otype": torch.bfloat16}  # fmt: skip


def _linear(tokens: int) -> dict[str, Any]:
    return {"input": normal(tokens, 32).to(E4M3), "scale_inv_input": torch.tensor([2.0]), "input_index": 0, "input_type": 24,
            "weight": normal(48, 32, seed=1).to(E4M3), "scale_inv_weight": torch.tensor([1.0, 3.0]), "weight_index": 1,
            "weight_type": 24, "bias": normal(48, dtype=torch.bfloat16), "out": torch.zeros(tokens, 48)}  # fmt: skip


def _conversion(source: Any, goal: Any, names: tuple[str, ...]) -> Any:
    def make(tokens: int) -> dict[str, Any]:
        return {"src": normal(tokens * 32).to(source), "dst": torch.zeros(tokens * 32, dtype=goal), "len": 32,
                **dict.fromkeys(names, True)}  # fmt: skip

    return make


def _conversions() -> list[Case]:
    goals = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    found = []
    for source, short in ((E4M3, "e4m3"), (torch.float8_e5m2, "e5m2")):
        names = ("with_denorm", "with_lut") if short == "e4m3" else ()
        schema = f"(Tensor src, Tensor dst, int len{''.join(f', bool {name}' for name in names)}) -> Tensor"
        found += [Case(f"torch_ipex::convert_{short}_to_{kind}", convert, _conversion(source, goal, names), ("src", "dst"), schema,
                       aliases=True) for kind, goal in goals.items() if short == "e4m3" or kind == "fp16"]  # fmt: skip
    return found


def _experts(tokens: int) -> dict[str, Any]:
    return {"hidden_states": normal(tokens, 32, dtype=torch.bfloat16), "w1": normal(4, 2 * 16, 32, dtype=torch.bfloat16, seed=1),
            "w2": normal(4, 32, 16, dtype=torch.bfloat16, seed=2), "topk_weights": normal(tokens, 2, seed=3).abs(),
            "topk_ids": integers(0, 4, tokens, 2, dtype=torch.int32), "inplace": False, "is_vnni": False, "is_distributed": False,
            "is_woq": False, "woq_weight_dtype": 0, "woq_group_size": -1, "woq_lowp_mode": 0, "w1_scale": None, "w1_zp": None,
            "w1_compensation": None, "w2_scale": None, "w2_zp": None, "w2_compensation": None}  # fmt: skip


def _routing(tokens: int) -> dict[str, Any]:
    return {"hidden_states": normal(tokens, 32), "gating_output": normal(tokens, 16), "topk": 3, "renormalize": True,
            "num_expert_group": 4, "topk_group": 2, "e_score_correction_bias": normal(16, seed=1),
            "routed_scaling_factor": torch.tensor(2.5)}  # fmt: skip


def _added(tokens: int) -> dict[str, Any]:
    return {"a": normal(2, tokens, 32), "b": normal(2, tokens, 32, seed=1), "alpha": 1, "normalized_shape": [32],
            "weight_opt": normal(32, seed=2), "bias_opt": None, "eps": 1e-5}  # fmt: skip


def _normed(tokens: int) -> dict[str, Any]:
    return {"X": normal(2, tokens, 32, dtype=torch.bfloat16), "normalized_shape": [32], "W": normal(32, dtype=torch.bfloat16, seed=2),
            "epsilon": 1e-6}  # fmt: skip


CASES = [
    Case("torch_ipex::cast_to_fp8", cast_to_fp8, _casting, ("input",),
         "(Tensor _0, Tensor _1, Tensor _2, Tensor _3, int _4, int _5) -> Tensor"),
    Case("torch_ipex::cast_from_fp8", cast_from_fp8, _casting_back, ("input",),
         "(Tensor _0, Tensor _1, int _2, int _3, ScalarType _4) -> Tensor"),
    Case("torch_ipex::fp8_linear", fp8_linear, _linear, ("input", "out"),
         "(Tensor _0, Tensor _1, int _2, int _3, Tensor _4, Tensor _5, int _6, int _7, Tensor _8, Tensor _9) -> Tensor", aliases=True),
    *_conversions(),
    Case("torch_ipex::fused_experts", fused_experts, _experts, ("hidden_states", "topk_weights", "topk_ids"), _EXPERTS),
    Case("torch_ipex::fused_experts_with_shared", fused_experts, _experts, ("hidden_states", "topk_weights", "topk_ids"), _EXPERTS),
    Case("torch_ipex::grouped_topk", grouped_topk, _routing, ("hidden_states", "gating_output"),
         "(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, int num_expert_group, int topk_group, "
         "Tensor e_score_correction_bias, Tensor routed_scaling_factor) -> (Tensor, Tensor)"),
    Case("torch_ipex::add_layernorm", add_layernorm, _added, ("a", "b"),
         "(Tensor a, Tensor b, int alpha, int[] normalized_shape, Tensor? weight_opt, Tensor? bias_opt, float eps) -> Tensor"),
    Case("torch_ipex::rms_norm", rms_norm, _normed, ("X",)),
]  # fmt: skip
