"""FP8 expert layers inside vLLM, for platforms where its oracle names no backend.

Selection stays vLLM's: only where it comes back with nothing is the answer replaced. How the layer is computed is chosen when its
weights are loaded (``xpufp8.runtime.expert_choice``), or at its first call where a release has no place for that.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xpufp8.runtime import expert_choice
from xpufp8.runtime.catalogue import RepairError
from xpufp8.runtime.experts import ACTIVATIONS, ExpertCall, Forward, plain_forward, problem_of

if TYPE_CHECKING:
    import torch

ORACLE = "vllm.model_executor.layers.fused_moe.oracle.fp8"
_MARK = "__xpufp8_experts__"
_FORWARD = "xpufp8_forward"
"""Attribute of a weight that says how its layer is computed; vLLM carries such attributes over to the parameter."""

_logger = logging.getLogger("vllm.xpufp8")


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
        """Experts by the best candidate that agrees with float64."""

        _forward: Forward | None = None

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
            call = ExpertCall(
                (w1, w2),
                (self.quant_config.w1_scale, self.quant_config.w2_scale),
                (topk_weights, topk_ids),
                tuple(block) if block else None,
                activation.value,
                expert_map,
                (self.quant_config.w1_bias, self.quant_config.w2_bias),
                apply_router_weight_on_input,
            )
            if self._forward is None:
                self._forward = forward_for(call, hidden_states.dtype)
            output.copy_(self._forward(hidden_states, call))

    return Xpufp8Experts


def forward_for(call: ExpertCall, dtype: torch.dtype) -> Forward:
    """What computes a layer: as chosen when its weights were loaded, else chosen now, when they cannot be changed any more."""
    if call.weights[0].dtype == dtype:
        return plain_forward
    if (kept := getattr(call.weights[0], _FORWARD, None)) is not None:
        return kept  # type: ignore[no-any-return]  # what prepare_weights left there
    problem = problem_of(call, dtype, call.routing[1].shape[1])
    made, prepared = expert_choice.prepare(problem, call, may_widen=False)
    _logger.debug("xpufp8 computes %s", made.describe())
    # A form of its own would come on top of the weights that vLLM keeps.
    return prepared.forward if prepared.weights[0].data_ptr() == call.weights[0].data_ptr() else plain_forward


def prepare_weights(layer: torch.nn.Module, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Choose how to compute a layer and return its weights and scales in that form.

    Args:
        layer: vLLM's, whose experts this repair computes.
        tensors: ``w13``, ``w2`` and their scales, as loaded.
    """
    w13, w2, s13, s2 = (tensor.data for tensor in tensors)
    config: Any = getattr(layer, "moe_config", None)
    block = getattr(layer, "weight_block_size", None)
    biases = (getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None))
    activation = getattr(getattr(layer, "activation", None), "value", "silu")
    call = ExpertCall((w13, w2), (s13, s2), (None, None), tuple(block) if block else None, activation, None, biases)
    problem = problem_of(call, config.in_dtype, config.experts_per_token)
    made, prepared = expert_choice.prepare(problem, call)
    _logger.debug("xpufp8 computes %s", made.describe())
    for weight in prepared.weights:
        setattr(weight, _FORWARD, prepared.forward)
    return (*prepared.weights, *prepared.scales)


def wrap_conversion(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's conversion of loaded expert weights, followed by this repair's own for the layers that it computes."""

    @functools.wraps(convert)
    def conversion(*args: Any, **kwargs: Any) -> Any:
        converted = convert(*args, **kwargs)
        layer = kwargs.get("layer", args[1] if len(args) > 1 else None)
        if getattr(getattr(layer, "quant_method", None), "experts_cls", None) is not experts_class():
            return converted
        return prepare_weights(layer, converted)

    setattr(conversion, _MARK, True)
    return conversion


def _replace_everywhere(name: str, old: Any, new: Any) -> None:
    """Put a function in another's place in every module of vLLM that has imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.") and vars(module).get(name) is old:
            setattr(module, name, new)


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
        _replace_everywhere("select_fp8_moe_backend", select, wrap(select, backend))
    convert = getattr(oracle, "convert_to_fp8_moe_kernel_format", None)
    if convert is not None and not getattr(convert, _MARK, False):
        _replace_everywhere("convert_to_fp8_moe_kernel_format", convert, wrap_conversion(convert))
    return f"{experts.__name__} answers where select_fp8_moe_backend finds nothing"
