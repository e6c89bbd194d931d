"""Python functions of the kernel package, for a machine without the wheel: each calls the ops that the real one calls.

Only what vLLM imports is given a body. Every other public name of the release exists and refuses to run, so that an import fails
exactly where it would fail with the wheel: for a name that the release does not have.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probes.op_schemas import Export


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, max_seqlen_q: Any, cu_seqlens_q: Any, max_seqlen_k: Any, cu_seqlens_k: Any = None, seqused_k: Any = None,
    *rest: Any, softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] | None = None,
    softcap: float | None = 0.0, alibi_slopes: Any = None, block_table: Any = None, return_softmax_lse: bool = False, out: Any = None,
    s_aux: Any = None, **others: Any,
) -> Any:  # fmt: skip
    """Attention over packed sequences: ``q`` [tokens, heads, head_size] → the same shape with v's head size."""
    import torch

    if out is None:
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    left, right = window_size if window_size is not None else (-1, -1)
    keys = cu_seqlens_k if cu_seqlens_k is not None else torch.empty_like(cu_seqlens_q)
    arguments = {
        "q": q, "k": k, "v": v, "out": out, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": keys, "seqused_k": seqused_k,
        "block_table": block_table, "alibi_slopes": alibi_slopes, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
        "p_dropout": 0.0, "softmax_scale": q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, "softmax_sink": s_aux,
        "is_causal": causal, "window_size_left": left, "window_size_right": right, "softcap": softcap or 0.0,
        "return_softmax": return_softmax_lse,
    }  # fmt: skip
    op = torch.ops._vllm_fa2_C.varlen_fwd.default
    result = op(**_fitting(op, arguments))
    return (result[0], result[1]) if return_softmax_lse else result[0]


def apply_rotary_emb(x: Any, cos: Any, sin: Any, is_neox: bool = False) -> Any:
    """Rotary embedding of ``x`` [..., heads, head_size]; same shape."""
    import torch

    flat = x.reshape(-1, x.shape[-2], x.shape[-1]).contiguous()
    tables = [t.reshape(-1, t.shape[-1]).contiguous() for t in (cos, sin)]
    if tables[0].shape[0] < flat.shape[0]:
        tables = [t.repeat(flat.shape[0] // t.shape[0], 1) for t in tables]
    out = torch.empty_like(flat)
    torch.ops._xpu_C.apply_rotary_emb(out, flat, tables[0], tables[1], is_neox)
    return out.reshape(x.shape)


_ACTIVATIONS = {
    "silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul", "swigluoai": "swigluoai_and_mul",
    "relu2_no_mul": "relu2_no_mul", "swiglustep": "swiglustep_and_mul", "situ": "situ_and_mul",
}  # fmt: skip


class XpuFusedMoe:
    """Experts of one layer: sort tokens by expert, two grouped products with an activation between, gather."""

    def __init__(self, w13: Any, w13_scales: Any, w13_bias: Any, w2: Any, w2_scales: Any, w2_bias: Any, n_experts_per_token: int,
                 activation: str, num_experts: int, ep_rank: int = 0, ep_size: int = 1, expert_map: Any = None,
                 **others: Any) -> None:  # fmt: skip
        self.weights = (w13, w13_scales, w13_bias), (w2, w2_scales, w2_bias)
        self.top_k, self.experts, self.ep_size = n_experts_per_token, num_experts, ep_size
        name = "swigluoai" if "SWIGLUOAI" in str(activation) else activation
        if name not in _ACTIVATIONS:
            raise ValueError(f"Unsupported FusedMoe activation: {activation}.")
        self.activation = _ACTIVATIONS[name]
        self.keeps_width = name == "relu2_no_mul"
        packed = (w13.dtype.itemsize == 1 and not w13.dtype.is_floating_point) or "float4" in str(w13.dtype)
        self.inner = (w13.shape[-2] if packed else w13.shape[-1]) // 2
        self.expert_map = expert_map

    def apply(
        self, output: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, expert_map: Any = None, a1q_scale: Any = None
    ) -> None:
        """Fill ``output`` [tokens, hidden] from ``hidden_states`` [tokens, hidden]."""
        import torch

        rows, hidden = hidden_states.shape
        inputs = self.top_k * rows

        def empty(*shape: int, dtype: Any = output.dtype) -> Any:
            return torch.empty(shape, dtype=dtype, device=output.device)

        sorted_rows = empty(inputs, hidden, dtype=hidden_states.dtype)
        counts = empty(self.experts, dtype=torch.int32)
        order = empty(rows, self.top_k, dtype=torch.int32)
        total = self.expert_map.shape[0] if self.expert_map is not None else self.experts * self.ep_size
        torch.ops._moe_C.remap_hidden_states(
            hidden_states, None, sorted_rows, None, self.expert_map, counts, order, topk_ids, total, self.experts)  # fmt: skip
        first = self._product(sorted_rows, 0, empty(inputs, 2 * self.inner), counts)
        middle = empty(inputs, self.inner * (2 if self.keeps_width else 1))
        getattr(torch.ops._C, self.activation)(middle, first)
        second = self._product(middle, 1, empty(inputs, hidden), counts)
        torch.ops._moe_C.moe_gather(output, second, topk_weights, order, self.experts)

    def _product(self, rows: Any, which: int, out: Any, counts: Any) -> Any:
        import torch

        weight, scales, bias = self.weights[which]
        op = torch.ops._xpu_C.cutlass_grouped_gemm_interface.default
        op(**_fitting(op, {
            "ptr_A": rows, "ptr_A_scale": None, "ptr_B": weight, "ptr_B_scale": scales, "ptr_bias": bias, "ptr_D": out,
            "rows_per_expert": counts, "N": out.shape[-1], "K": rows.shape[-1], "num_experts": self.experts,
        }))  # fmt: skip
        return out


BODIES: dict[str, Any] = {
    "flash_attn_varlen_func": flash_attn_varlen_func,
    "apply_rotary_emb": apply_rotary_emb,
    "XpuFusedMoe": XpuFusedMoe,
}


def fill(module: types.ModuleType, exports: Sequence[Export]) -> None:
    """Give a stand-in module the public names that its release has."""
    for export in exports:
        body = BODIES.get(export.name)
        if body is not None:
            setattr(module, export.name, body)
        elif export.kind in {"function", "class"}:
            setattr(module, export.name, _refusing(f"{module.__name__}.{export.name}"))
        else:
            setattr(module, export.name, ("AVAILABLE" in export.name and "REASON" not in export.name) or None)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        from xpufp8.simulate.kernels import SimulationError

        raise SimulationError(f"{name} was asked to run, but this XPU is simulated and its kernel package is not installed")

    return refuse


def _fitting(op: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that this release's schema names, and None or False for the rest it requires."""
    chosen: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if argument.name in arguments:
            chosen[argument.name] = arguments[argument.name]
        elif not argument.has_default_value():
            chosen[argument.name] = False if str(argument.type) == "bool" else None
    return chosen
