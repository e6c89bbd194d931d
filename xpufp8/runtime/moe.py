"""FP8 expert layers in plain torch, for platforms where vLLM's oracle names no backend.

Selection stays vLLM's: only where it comes back with nothing is the answer replaced. Weights stay FP8; those of the experts that
tokens chose are widened at each call, one expert at a time, so that no more than one expert is held wide.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xpufp8.runtime.catalogue import RepairError
from xpufp8.runtime.problem import Problem, widen

if TYPE_CHECKING:
    import torch

ORACLE = "vllm.model_executor.layers.fused_moe.oracle.fp8"
_MARK = "__xpufp8_experts__"


def layout_of(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> str:
    """Name the scale layout of one expert.

    Args:
        weight: ``[E, N, K]``.
        scale: ``[E]`` or ``[E, 1]`` for tensor, ``[E, N]`` or ``[E, N, 1]`` for channel, ``[E, ceil(N/bn), ceil(K/bk)]`` for block.
        block: edges of a block, where the quantization is by block.

    Raises:
        RepairError: the scale fits none of them.
    """
    experts, n, _ = weight.shape
    if block is not None:
        return "block"
    if scale.numel() == experts:
        return "tensor"
    if scale.numel() == experts * n:
        return "channel"
    raise RepairError(f"moe:fp8: a scale of shape {tuple(scale.shape)} fits no layout of a weight {tuple(weight.shape)}")


def activate(name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply a gated activation to ``[tokens, 2 * I]`` whose first half is the gate."""
    import torch

    gate, up = x.chunk(2, dim=-1)
    if name == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up


ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def experts_forward(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor],
    routing: tuple[torch.Tensor, torch.Tensor],
    *,
    block: tuple[int, int] | None = None,
    activation: str = "silu",
    expert_map: torch.Tensor | None = None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    weighted_input: bool = False,
) -> torch.Tensor:
    """Return the routed experts' weighted sum.

    Args:
        x: ``[T, H]``.
        weights: ``w13 [E, 2I, H]`` (gate above up) and ``w2 [E, H, I]``, FP8.
        scales: those of each weight, in one of the layouts of ``layout_of``.
        routing: weights and expert ids, both ``[T, top_k]``.
        block: edges of a block for block scales.
        activation: one of ``ACTIVATIONS``.
        expert_map: global expert id to local one, -1 for an expert of another rank.
        biases: of each weight, ``[E, 2I]`` and ``[E, H]``.
        weighted_input: the router's weight was applied to ``x`` already.

    Returns:
        ``[T, H]`` in the dtype of ``x``; sums are kept in float32.
    """
    import torch

    topk_weights, topk_ids = routing
    top_k = topk_ids.shape[1]
    ids = topk_ids.reshape(-1).to(torch.int64)
    if expert_map is not None:
        ids = expert_map.to(torch.int64)[ids]
    problems = [
        Problem(layout_of(w, s, block), "none", w.shape[1], w.shape[2], x.dtype, w.dtype, block)
        for w, s in zip(weights, scales, strict=True)
    ]
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(ids).tolist():
        if expert < 0:
            continue
        slots = (ids == expert).nonzero().reshape(-1)
        tokens = torch.div(slots, top_k, rounding_mode="floor")
        hidden = x[tokens]
        for step in (0, 1):
            wide = widen(problems[step], weights[step][expert], scales[step][expert])
            bias = biases[step]
            hidden = torch.nn.functional.linear(hidden, wide, None if bias is None else bias[expert].to(x.dtype))
            if step == 0:
                hidden = activate(activation, hidden)
        share = hidden.to(torch.float32)
        if not weighted_input:
            share = share * topk_weights.reshape(-1)[slots].to(torch.float32).unsqueeze(1)
        total.index_add_(0, tokens, share)
    return total.to(x.dtype)


def best_forward(weights: tuple[torch.Tensor, torch.Tensor], scales: tuple[torch.Tensor, torch.Tensor], block: tuple[int, int] | None,
                 dtype: torch.dtype) -> Callable[..., Any]:  # fmt: skip
    """Return the project's Triton experts where they take these weights, else ``experts_forward``."""
    from xpufp8.runtime import triton_kernels

    first, second = (
        Problem(layout_of(w, s, block), "none", w.shape[1], w.shape[2], dtype, w.dtype, block)
        for w, s in zip(weights, scales, strict=True)
    )
    if triton_kernels.experts_refuse((first, second), weights[0].device.type) is None:
        return triton_kernels.experts_forward
    return experts_forward


def _modular_kernel() -> Any:
    return importlib.import_module("vllm.model_executor.layers.fused_moe.modular_kernel")


@functools.cache
def experts_class() -> Any:
    """Return the expert layer on the running vLLM's base class.

    Raises:
        RepairError: this vLLM's experts have another interface.
    """
    mk = _modular_kernel()
    base: Any = getattr(mk, "FusedMoEExpertsModular", None)
    if base is None:
        raise RepairError("moe:fp8: this vLLM has no FusedMoEExpertsModular; its expert layers are built in another way")
    no_op = importlib.import_module("vllm.model_executor.layers.fused_moe.topk_weight_and_reduce").TopKWeightAndReduceNoOP

    class Xpufp8Experts(base):  # type: ignore[misc]  # the base is known at run time only
        """Experts one after another, in plain torch."""

        @property
        def expects_unquantized_inputs(self) -> bool:
            """Activations stay in 16 bits."""
            return True

        @staticmethod
        def activation_format() -> Any:
            """Tokens as they come, not grouped by expert."""
            return mk.FusedMoEActivationFormat.Standard

        @staticmethod
        def _supports_current_device() -> bool:
            return True

        @staticmethod
        def _supports_no_act_and_mul() -> bool:
            return False

        @staticmethod
        def _supports_activation(activation: Any) -> bool:
            return activation.value in ACTIVATIONS

        @staticmethod
        def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
            return weight_key is not None and "float8_e" in str(weight_key.dtype)

        @staticmethod
        def _supports_parallel_config(moe_parallel_config: Any) -> bool:
            return True

        @staticmethod
        def supports_chunking() -> bool:
            """Tokens may come in pieces (asked by releases to 0.2x)."""
            return True

        @staticmethod
        def supports_expert_map() -> bool:
            """Experts of other ranks are passed over (asked by releases to 0.2x)."""
            return True

        def workspace_shapes(self, M: int, N: int, K: int, *_: Any, **__: Any) -> tuple[tuple[int, ...], ...]:
            """No scratch space of vLLM's; the output is ``[M, K]``."""
            return (0,), (0,), (M, K)

        def finalize_weight_and_reduce_impl(self) -> Any:
            """Weighted and summed already."""
            return no_op()

        def apply(
            self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
            topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, global_num_experts: int,
            expert_map: torch.Tensor | None, *_: Any, apply_router_weight_on_input: bool = False, **__: Any,
        ) -> None:  # fmt: skip
            """Compute into ``output``; arguments as in vLLM's base class."""
            if getattr(getattr(self, "activation_config", None), "clamp_limit", None) is not None:
                raise RepairError("moe:fp8: this model clamps its activation, which is not covered")
            block = self.quant_config.block_shape
            edges = tuple(block) if block else None
            scales = (self.quant_config.w1_scale, self.quant_config.w2_scale)
            result = best_forward((w1, w2), scales, edges, hidden_states.dtype)(
                hidden_states,
                (w1, w2),
                scales,
                (topk_weights, topk_ids),
                block=edges,
                activation=activation.value,
                expert_map=expert_map,
                biases=(self.quant_config.w1_bias, self.quant_config.w2_bias),
                weighted_input=apply_router_weight_on_input,
            )
            output.copy_(result)

    return Xpufp8Experts


def wrap(select: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """Return a selection that falls back to the project's experts where vLLM's comes back with nothing.

    Args:
        select: ``select_fp8_moe_backend`` of vLLM.
        backend: the backend to answer with; one for which vLLM leaves weights and scales as they are.
    """

    @functools.wraps(select)
    def selection(config: Any, weight_key: Any = None, activation_key: Any = None, *args: Any, **kwargs: Any) -> Any:
        refusal: Exception | None = None
        try:
            chosen = select(config, weight_key, activation_key, *args, **kwargs)
            if chosen[1] is not None:
                return chosen
        except NotImplementedError as error:
            refusal = error
        mk, experts = _modular_kernel(), experts_class()
        batched = config.moe_parallel_config.use_batched_activation_format
        format_ = mk.FusedMoEActivationFormat.BatchedExperts if batched else mk.FusedMoEActivationFormat.Standard
        able, reason = experts.is_supported_config(experts, config, weight_key, activation_key, format_)
        if not able:
            raise RepairError(f"moe:fp8: neither vLLM nor this repair covers these experts: {reason}") from refusal
        return backend, experts

    setattr(selection, _MARK, True)
    return selection


def add_experts() -> str:
    """Put the fallback behind vLLM's selection, wherever it has been imported already, and say so.

    Raises:
        RepairError: this vLLM selects its FP8 expert layers in another way.
    """
    try:
        oracle = importlib.import_module(ORACLE)
        select, backend = oracle.select_fp8_moe_backend, oracle.Fp8MoeBackend.TRITON
    except (ImportError, AttributeError) as error:
        raise RepairError(f"moe:fp8: this vLLM has no {ORACLE}.select_fp8_moe_backend to extend ({error})") from error
    experts = experts_class()
    if not getattr(select, _MARK, False):
        replacement = wrap(select, backend)
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("vllm.") and vars(module).get("select_fp8_moe_backend") is select:
                setattr(module, "select_fp8_moe_backend", replacement)  # noqa: B010 - modules have no such static attribute
    return f"{experts.__name__} answers where select_fp8_moe_backend finds nothing"
