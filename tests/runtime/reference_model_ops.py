"""Reference kernels of what models call beside matrix products: routing, the indexer, rotary embeddings, hyper-connections, GDN."""

from __future__ import annotations

from typing import Any

import torch
from reference_cases import E4M3, Case, integers, normal

# -- routing -----------------------------------------------------------------------------------------------------------


def route(scores: Any, choice: Any, groups: int, kept: int, topk: int, renormalize: bool, factor: float) -> tuple[Any, Any]:
    """Take the best groups by the sum of their two best choices, then the best experts in them; weights come from ``scores``."""
    tokens, experts = scores.shape
    grouped = choice.reshape(tokens, groups, -1)
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
    allowed = torch.zeros(tokens, groups, dtype=torch.bool).scatter_(1, best, torch.ones_like(best, dtype=torch.bool))
    masked = choice.masked_fill(~allowed.repeat_interleave(experts // groups, 1), float("-inf"))
    ids = masked.topk(topk, dim=-1).indices
    weights = scores.gather(1, ids).float()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * factor, ids.to(torch.int32)


def grouped_topk(
    scores: Any, groups: int, kept: int, topk: int, renormalize: bool, factor: float, bias: Any, scoring: int
) -> Any:
    scores = scores.float().sigmoid() if scoring else scores.float()
    return route(scores, scores + bias.float(), groups, kept, topk, renormalize, factor)


def grouped_topk_biased(scores: Any, biased: Any, groups: int, kept: int, topk: int, renormalize: bool, factor: float) -> Any:
    return route(scores.float(), biased.float(), groups, kept, topk, renormalize, factor)


def fused_grouped_topk(
    hidden: Any, gating: Any, topk: int, renormalize: bool, groups: int, kept: int, scoring: str, factor: float, bias: Any = None
) -> Any:
    scores = gating.float().sigmoid() if scoring == "sigmoid" else gating.float().softmax(-1)
    return route(scores, scores if bias is None else scores + bias.float(), groups, kept, topk, renormalize, factor)


def _routing(tokens: int) -> dict[str, Any]:
    return {"scores": normal(tokens, 16), "n_group": 4, "topk_group": 2, "topk": 3, "renormalize": True,
            "routed_scaling_factor": 2.5, "bias": normal(16, seed=1), "scoring_func": 1}  # fmt: skip


def _biased_routing(tokens: int) -> dict[str, Any]:
    plain = _routing(tokens)
    return {"scores": plain["scores"].sigmoid(), "scores_with_bias": plain["scores"].sigmoid() + plain["bias"],
            **{name: plain[name] for name in ("n_group", "topk_group", "topk", "renormalize", "routed_scaling_factor")}}  # fmt: skip


def _fused_routing(tokens: int) -> dict[str, Any]:
    return {"hidden_states": normal(tokens, 32, dtype=torch.bfloat16), "gating_output": normal(tokens, 16), "n_topk": 3,
            "renormalize": False, "n_expert_group": 4, "n_topk_group": 2, "scoring_func": "softmax",
            "routed_scaling_factor": 1.0, "bias": None}  # fmt: skip


def reorder_mxfp_scales(scales: Any, rows: Any, padded: int) -> Any:
    """Each expert's scales with the rows along the fast dimension, padded to a multiple of four."""
    out = torch.zeros(padded * scales.shape[1], dtype=torch.uint8)
    source, goal = 0, 0
    for count in rows.tolist():
        height = -(-count // 4) * 4
        block = torch.zeros(scales.shape[1], height, dtype=torch.uint8)
        block[:, :count] = scales.view(torch.uint8)[source : source + count].t()
        out[goal : goal + block.numel()] = block.flatten()
        source, goal = source + count, goal + block.numel()
    return out.view(scales.dtype).view(padded, scales.shape[1])


def _mxfp_scales(tokens: int) -> dict[str, Any]:
    return {"A_scales": integers(100, 150, tokens, 3, dtype=torch.uint8).view(torch.float8_e8m0fnu),
            "rows_per_expert": torch.tensor([2, tokens - 2], dtype=torch.int32), "total_padded_rows": 16}  # fmt: skip


# -- indexer -----------------------------------------------------------------------------------------------------------


def mqa_logits(q: Any, kv: Any, kv_scales: Any, weights: Any, first: Any, end: Any) -> Any:
    """Weighted sum over heads of rectified products; what lies outside ``[first, end)`` of a row is minus infinity."""
    products = torch.einsum("mhd,nd->mhn", q.float(), kv.float()) * kv_scales
    logits = (products.relu() * weights.unsqueeze(-1)).sum(1)
    place = torch.arange(kv.shape[0])
    outside = (place < first.unsqueeze(1)) | (place >= end.unsqueeze(1))
    return logits.masked_fill(outside, float("-inf"))


def _mqa(tokens: int) -> dict[str, Any]:
    ends = torch.arange(1, tokens + 1, dtype=torch.int32)
    return {"q": normal(tokens, 4, 32).to(E4M3), "kv": normal(11, 32, seed=1).to(E4M3), "kv_scales": normal(11, seed=2).abs(),
            "weights": normal(tokens, 4, seed=3), "cu_seqlen_ks": torch.zeros(tokens, dtype=torch.int32), "cu_seqlen_ke": ends}  # fmt: skip


def paged_mqa_logits(q: Any, cache: Any, weights: Any, lengths: Any, tables: Any, schedule: Any, longest: int) -> Any:
    """The same over a paged cache: in each block all keys stand first, then a float32 scale for each."""
    batch, steps, _, dim = q.shape
    blocks, size = cache.shape[:2]
    flat = cache.reshape(blocks, -1)
    keys = flat[:, : size * dim].contiguous().view(E4M3).view(blocks, size, dim)
    scales = flat[:, size * dim :].contiguous().view(torch.float32).view(blocks, size)
    out = torch.full((batch * steps, longest), float("-inf"))
    for row in range(batch):
        length = int(lengths[row])
        pages = tables[row, : -(-length // size)].to(torch.int64)
        logits = mqa_logits(
            q[row], keys[pages].flatten(0, 1)[:length], scales[pages].flatten()[:length], weights[row * steps : (row + 1) * steps],
            torch.zeros(steps, dtype=torch.int32), torch.arange(length - steps, length) + 1,
        )  # fmt: skip
        out[row * steps : (row + 1) * steps, :length] = logits
    return out


def _paged_mqa(tokens: int) -> dict[str, Any]:
    size, dim, blocks = 4, 32, 6
    cache = torch.empty(blocks, size * (dim + 4), dtype=torch.uint8)
    cache[:, : size * dim] = normal(blocks, size * dim, seed=1).to(E4M3).view(torch.uint8)
    cache[:, size * dim :] = normal(blocks, size, seed=2).abs().view(torch.uint8)
    return {"q_fp8": normal(tokens, 2, 4, dim).to(E4M3), "kv_cache_fp8": cache.view(blocks, size, 1, dim + 4),
            "weights": normal(tokens * 2, 4, seed=3), "context_lens": torch.full((tokens,), 7, dtype=torch.int32),
            "block_tables": integers(0, blocks, tokens, 3, dtype=torch.int32), "schedule_metadata": None, "max_model_len": 16}  # fmt: skip


# -- rotary embeddings of MLA ------------------------------------------------------------------------------------------


def _unrotated(o: Any, positions: Any, cache: Any, groups: int, nope: int, rope: int) -> Any:
    """Float32 ``[tokens, groups, heads, dim]`` with the rotation of neighbouring pairs undone in the last ``rope`` values."""
    tokens, _, dim = o.shape
    wide = o.float().view(tokens, groups, -1, dim)
    cos, sin = (part[:, None, None] for part in cache[positions].chunk(2, dim=-1))
    even, odd = wide[..., nope::2], wide[..., nope + 1 :: 2]
    back = torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1).flatten(-2)
    assert back.shape[-1] == rope
    return torch.cat((wide[..., :nope], back), dim=-1)


def inv_rope_bf16(o: Any, positions: Any, cache: Any, groups: int, heads: int, nope: int, rope: int) -> Any:
    wide = _unrotated(o, positions, cache, groups, nope, rope)
    return wide.reshape(o.shape[0], groups, heads * o.shape[2]).to(torch.bfloat16)


def inv_rope_fp8(o: Any, positions: Any, cache: Any, groups: int, heads: int, nope: int, rope: int) -> Any:
    """Group first, and each 128 values divided by a power of two."""
    tokens, _, dim = o.shape
    parts = _unrotated(o, positions, cache, groups, nope, rope).reshape(tokens, groups, heads * dim // 128, 128)
    parts = parts.transpose(0, 1).contiguous()
    scale = torch.exp2(torch.ceil(torch.log2(parts.abs().amax(-1).clamp_min(1e-10) / 448)))
    values = (parts / scale.unsqueeze(-1)).to(E4M3).reshape(groups, tokens, heads * dim)
    return values, scale


def _inverse_rope(tokens: int) -> dict[str, Any]:
    return {"attn_output": normal(tokens, 4, 256, dtype=torch.bfloat16), "positions": integers(0, 32, tokens),
            "cos_sin_cache": normal(32, 64, seed=1), "n_groups": 2, "heads_per_group": 2, "nope_dim": 192, "rope_dim": 64}  # fmt: skip


def scaling_rope(positions: Any, query: Any, key: Any, offsets: Any, cache: Any, rotary: int, neox: bool) -> Any:
    """Rotate query and key; with halves instead of pairs a first dimension of one is added."""
    cos, sin = (
        part.float().unsqueeze(1) for part in cache[positions if offsets is None else positions + offsets].chunk(2, dim=-1)
    )

    def turn(x: Any) -> Any:
        one, two = x.float().chunk(2, dim=-1) if neox else (x.float()[..., ::2], x.float()[..., 1::2])
        parts = (one * cos - two * sin, two * cos + one * sin)
        out = torch.cat(parts, dim=-1) if neox else torch.stack(parts, dim=-1).flatten(-2)
        return out.to(x.dtype).reshape(1, *x.shape) if neox else out.to(x.dtype)

    return turn(query), turn(key)


def _scaling_rope(tokens: int) -> dict[str, Any]:
    return {"positions": integers(0, 32, tokens), "query": normal(tokens, 4, 64, dtype=torch.bfloat16),
            "key": normal(tokens, 1, 64, dtype=torch.bfloat16, seed=1), "offsets_opt": None,
            "cos_sin_cache": normal(32, 64, dtype=torch.bfloat16, seed=2), "rotary_dim": 64, "is_neox_style": True}  # fmt: skip


# -- hyper-connections -------------------------------------------------------------------------------------------------

STREAMS, HIDDEN = 4, 32


def mhc_pre(
    residual: Any, fn: Any, scale: Any, base: Any, eps: float, pre_eps: float, sinkhorn_eps: float, post: float, rounds: int
) -> Any:
    """Gates for mixing four residual streams, and the layer's input; rows and columns of the mixing gates are normalized in turn."""
    outer = residual.shape[:-2]
    x = residual.float().reshape(-1, STREAMS, HIDDEN)
    flat = x.flatten(1)
    mixes = (flat @ fn.t()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    before = (mixes[:, :4] * scale[0] + base[:4]).sigmoid() + pre_eps
    after = (mixes[:, 4:8] * scale[1] + base[4:8]).sigmoid() * post
    mixing = (mixes[:, 8:] * scale[2] + base[8:]).reshape(-1, STREAMS, STREAMS).softmax(-1) + sinkhorn_eps
    mixing = mixing / (mixing.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(rounds - 1):
        mixing = mixing / (mixing.sum(-1, keepdim=True) + sinkhorn_eps)
        mixing = mixing / (mixing.sum(-2, keepdim=True) + sinkhorn_eps)
    layer = (before.unsqueeze(-1) * x).sum(1).to(torch.bfloat16)
    return after.reshape(*outer, STREAMS, 1), mixing.reshape(*outer, STREAMS, STREAMS), layer.reshape(*outer, HIDDEN)


def mhc_post(x: Any, residual: Any, post: Any, mixing: Any) -> Any:
    wide = torch.einsum("tio,tih->toh", mixing, residual.float()) + post.reshape(-1, STREAMS, 1) * x.float().unsqueeze(1)
    return wide.to(torch.bfloat16)


def mhc_both(x: Any, residual: Any, post: Any, mixing: Any, *rest: Any) -> Any:
    mixed = mhc_post(x, residual, post, mixing)
    return mixed, *mhc_pre(mixed, *rest)


def _mhc_gates() -> dict[str, Any]:
    return {"fn": normal(24, STREAMS * HIDDEN, seed=1) / 10, "hc_scale": normal(3, seed=2), "hc_base": normal(24, seed=3),
            "rms_eps": 1e-6, "hc_pre_eps": 1e-4, "hc_sinkhorn_eps": 1e-4, "hc_post_mult_value": 2.0, "sinkhorn_repeat": 2}  # fmt: skip


def _mhc_post_arguments(tokens: int) -> dict[str, Any]:
    return {"x": normal(tokens, HIDDEN, dtype=torch.bfloat16), "residual": normal(tokens, STREAMS, HIDDEN, dtype=torch.bfloat16, seed=4),
            "post_layer_mix": normal(tokens, STREAMS, 1, seed=5), "comb_res_mix": normal(tokens, STREAMS, STREAMS, seed=6)}  # fmt: skip


# -- gated delta net ---------------------------------------------------------------------------------------------------

HEADS_K, HEADS_V, DIM, WIDTH, STEPS = 2, 4, 8, 3, 2


def _projected(qkvz: Any, ba: Any) -> tuple[Any, Any, Any, Any]:
    """Split what is projected: for each key head q, k, its value heads and their gates. Returns q-k-v flat, b, a, z."""
    tokens, each = qkvz.shape[0], HEADS_V // HEADS_K
    q, k, v, z = qkvz.view(tokens, HEADS_K, -1).split([DIM, DIM, each * DIM, each * DIM], dim=-1)
    b, a = ba.view(tokens, HEADS_K, 2 * each).split(each, dim=-1)
    flat = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], dim=-1)
    return flat, b.reshape(tokens, HEADS_V), a.reshape(tokens, HEADS_V), z.reshape(tokens, HEADS_V, DIM)


def _conv(history: Any, rows: Any, weights: Any, bias: Any) -> tuple[Any, Any]:
    """Causal convolution of rows after their history, with SiLU; and the history that it leaves."""
    window = torch.cat([history, rows]).float()
    bias = None if bias is None else bias.float()
    out = torch.nn.functional.conv1d(window.t().unsqueeze(0), weights.float().unsqueeze(1), bias, groups=weights.shape[0])
    return torch.nn.functional.silu(out)[0].t().to(rows.dtype), window[-(WIDTH - 1) :].to(rows.dtype)


def _parts(out: Any, b: Any, a: Any) -> list[Any]:
    q, k, v = out.split([HEADS_K * DIM, HEADS_K * DIM, HEADS_V * DIM], dim=-1)
    tokens = out.shape[0]
    return [q.reshape(tokens, HEADS_K, DIM).contiguous(), k.reshape(tokens, HEADS_K, DIM).contiguous(),
            v.reshape(tokens, HEADS_V, DIM).contiguous(), b.contiguous(), a.contiguous()]  # fmt: skip


def conv_spec(z: Any, qkvz: Any, ba: Any, *rest: Any) -> list[Any]:
    """Each sequence has a few drafted tokens; its history is that of the last accepted one, and the new one goes to the last slot."""
    _, _, _, _, state, weights, bias, _, _, _, drafts, starts, places, slots, accepted, *_ = rest
    flat, b, a, gate = _projected(qkvz, ba)
    places = places.to(torch.int64)
    z[places] = gate[places]
    out = torch.empty(len(places), flat.shape[1], dtype=flat.dtype)
    for row in range(drafts):
        span = slice(int(starts[row]), int(starts[row + 1]))
        history = state[int(slots[row, max(int(accepted[row]) - 1, 0)])].clone()
        out[span], state[int(slots[row, -1])] = _conv(history, flat[places[span]], weights, bias)
    return _parts(out, b[places], a[places])


def conv_plain(z: Any, qkvz: Any, ba: Any, *rest: Any) -> list[Any]:
    """The same without drafts, tokens in their order; with prefills the rows of each sequence begin at a multiple of 64."""
    _, _, _, _, state, weights, bias, _, prefills, decodes, _, known, starts, _, slots, *_ = rest
    flat, b, a, gate = _projected(qkvz, ba)
    z.copy_(gate)
    out, rows, place = torch.zeros_like(flat), [], 0
    for row in range(prefills + decodes):
        span = slice(int(starts[row]), int(starts[row + 1]))
        old = state[int(slots[row])].clone() if known is None or bool(known[row]) else torch.zeros_like(state[0])
        out[span], state[int(slots[row])] = _conv(old, flat[span], weights, bias)
        rows += range(place, place + span.stop - span.start)
        place += -(-(span.stop - span.start) // 64) * 64
    if not prefills:
        return _parts(out, b, a)
    padded = []
    for part in _parts(out, b, a):
        wide = part.float().t() if part.dim() == 2 else part
        shape = [*wide.shape]
        axis = 1 if part.dim() == 2 else 0
        shape[axis] += 63 * (prefills + decodes)
        padded.append(torch.zeros(shape, dtype=wide.dtype).index_copy_(axis, torch.tensor(rows), wide))
    return padded


def _conv_arguments(tokens: int) -> dict[str, Any]:
    each = HEADS_V // HEADS_K
    width = HEADS_K * (2 * DIM + 2 * each * DIM)
    return {"z": torch.zeros(tokens, HEADS_V, DIM, dtype=torch.bfloat16),
            "projected_states_qkvz": normal(tokens, width, dtype=torch.bfloat16),
            "projected_states_ba": normal(tokens, 2 * HEADS_V, dtype=torch.bfloat16, seed=1), "num_k_heads": HEADS_K,
            "num_v_heads": HEADS_V, "head_k_dim": DIM, "head_v_dim": DIM,
            "conv_state": normal(40, WIDTH - 1, (2 * HEADS_K + HEADS_V) * DIM, dtype=torch.bfloat16, seed=2),
            "conv_weights": normal((2 * HEADS_K + HEADS_V) * DIM, WIDTH, dtype=torch.bfloat16, seed=3), "conv_bias": None,
            "activation": "silu", "num_prefills": 0, "num_decodes": 0, "num_spec_decodes": 0}  # fmt: skip


def _spec_arguments(sequences: int) -> dict[str, Any]:
    tokens = sequences * STEPS
    return {**_conv_arguments(tokens), "num_spec_decodes": sequences,
            "spec_query_start_loc": torch.arange(0, tokens + 1, STEPS, dtype=torch.int32),
            "spec_token_indx": torch.arange(tokens, dtype=torch.int32),
            "spec_state_indices_tensor": torch.arange(tokens, dtype=torch.int32).view(sequences, STEPS),
            "num_accepted_tokens": torch.ones(sequences, dtype=torch.int32), "num_actual_tokens": tokens, "tp_size": 1,
            "reorder_input": False}  # fmt: skip


def _plain_arguments(sequences: int) -> dict[str, Any]:
    tokens = 3 * sequences
    return {**_conv_arguments(tokens), "num_prefills": sequences, "has_initial_state": None,
            "non_spec_query_start_loc": torch.arange(0, tokens + 1, 3, dtype=torch.int32), "non_spec_token_indx": None,
            "non_spec_state_indices_tensor": torch.arange(sequences, dtype=torch.int32), "num_actual_tokens": tokens, "tp_size": 1,
            "reorder_input": False}  # fmt: skip


_CONV_MOVING = ("z", "projected_states_qkvz", "projected_states_ba", "conv_state")

CASES = [
    Case("_xpu_C::fp8_mqa_logits", mqa_logits, _mqa, ("q", "weights", "cu_seqlen_ks", "cu_seqlen_ke")),
    Case("_xpu_C::fp8_paged_mqa_logits", paged_mqa_logits, _paged_mqa, ("q_fp8", "weights", "context_lens", "block_tables")),
    Case("_xpu_C::deepseek_inv_rope_bf16", inv_rope_bf16, _inverse_rope, ("attn_output", "positions")),
    Case("_xpu_C::deepseek_inv_rope_fp8_quant", inv_rope_fp8, _inverse_rope, ("attn_output", "positions")),
    Case("_xpu_C::deepseek_scaling_rope", scaling_rope, _scaling_rope, ("positions", "query", "key")),
    Case("_xpu_C::mhc_pre", mhc_pre,
         lambda tokens: {"residual": normal(2, tokens, STREAMS, HIDDEN, dtype=torch.bfloat16), **_mhc_gates()}, ("residual",)),
    Case("_xpu_C::mhc_post", mhc_post, _mhc_post_arguments, ("x", "residual", "post_layer_mix", "comb_res_mix")),
    Case("_xpu_C::mhc_fused_post_pre", mhc_both, lambda tokens: {**_mhc_post_arguments(tokens), **_mhc_gates()},
         ("x", "residual", "post_layer_mix", "comb_res_mix")),
    Case("_xpu_C::causal_conv1d_spec", conv_spec, _spec_arguments,
         (*_CONV_MOVING, "spec_query_start_loc", "spec_token_indx", "spec_state_indices_tensor", "num_accepted_tokens"), symbolic=False),
    Case("_xpu_C::causal_conv1d_non_spec", conv_plain, _plain_arguments,
         (*_CONV_MOVING, "non_spec_query_start_loc", "non_spec_state_indices_tensor"), symbolic=False),
    Case("_moe_C::grouped_topk", grouped_topk, _routing, ("scores",)),
    Case("_moe_C::grouped_topk", grouped_topk_biased, _biased_routing, ("scores", "scores_with_bias")),
    Case("_moe_C::fused_grouped_topk", fused_grouped_topk, _fused_routing, ("hidden_states", "gating_output")),
    Case("_moe_C::reorder_mxfp_scales", reorder_mxfp_scales, _mxfp_scales, ("A_scales", "rows_per_expert"), packed=True),
]  # fmt: skip
