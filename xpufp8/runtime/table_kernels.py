"""Kernel classes for vLLM's tables: thin adapters between a layer's parameters and ``xpufp8.runtime.choice``.

The base classes are vLLM's and differ from release to release, so the classes are made when they are asked for. Every method
that a base declares abstract is defined here; nothing of a base's own arithmetic is used.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

from xpufp8.runtime import choice
from xpufp8.runtime.catalogue import RepairError
from xpufp8.runtime.problem import Problem

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger("vllm.xpufp8")

SCALES = ("weight_scale_inv", "weight_scale")
"""Names under which a layer keeps its weight scale: Fp8LinearMethod's block layers the first, everything else the second."""


def _base(name: str) -> Any:
    """Return a base class of vLLM's by name, from wherever this release keeps it.

    Raises:
        RepairError: no module has it.
    """
    places = (
        "vllm.model_executor.kernels.linear",
        "vllm.model_executor.kernels.linear.scaled_mm",
        "vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel",
        "vllm.model_executor.layers.quantization.kernels.scaled_mm.ScaledMMLinearKernel",
    )
    for place in places:
        try:
            found = getattr(importlib.import_module(place), name, None)
        except ImportError:
            continue
        if found is not None:
            return found
    raise RepairError(f"this vLLM has no class {name}; looked in {', '.join(places)}")


def _replace(layer: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in a parameter's place; releases differ in where their helper for this stands, and it is three lines."""
    import torch

    old = getattr(layer, name, None)
    if old is not None and old.data_ptr() == tensor.data_ptr() and old.dtype == tensor.dtype and old.shape == tensor.shape:
        return
    layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def _activation(key: Any) -> str:
    """Name what a QuantKey says of activations, in the words of ``probes.schemes``."""
    scale = getattr(key, "scale", None)
    if scale is None:
        return "none"
    shape = scale.group_shape
    if scale.static:
        return "static-tensor"
    if shape.is_per_tensor():
        return "dynamic-tensor"
    return "dynamic-token" if shape.is_per_token() else "dynamic-group"


def _tell_compiler(found: choice.Choice) -> None:
    """Make the choice part of vLLM's compile hash: another choice is another graph, which its cache must not mix up."""
    try:
        from vllm.config import get_current_vllm_config_or_none
    except ImportError:
        return
    config = get_current_vllm_config_or_none()
    extra = getattr(config, "additional_config", None)
    if isinstance(extra, dict):
        extra.setdefault("xpufp8", {})[found.problem] = found.candidate


def is_transposed(layer: torch.nn.Module, n: int, k: int) -> bool:
    """True when a layer keeps its weight as ``[K, N]``.

    vLLM transposes by strides, so of a square weight the one that is not contiguous is the transposed one.

    Raises:
        RepairError: the weight has neither shape.
    """
    shape = tuple(layer.weight.shape)
    if shape not in {(n, k), (k, n)}:
        raise RepairError(f"a weight of shape {shape} is neither [{n}, {k}] nor [{k}, {n}]")
    return shape == (k, n) if n != k else not bool(layer.weight.is_contiguous())


class LayerKernel:
    """What the classes for the FP8 tables have in common; vLLM's base class stands beside it in each."""

    config: Any
    weights_only = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Every device can multiply; which candidate does is chosen when the weights are there."""
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Take FP8 weights with one scale, one a channel or one a block."""
        import torch

        key = config.weight_quant_key
        if key.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            return False, f"takes e4m3fn and e5m2 weights, not {key.dtype}"
        shape = key.scale.group_shape
        per_channel = shape.is_per_token() or (shape.row, shape.col) == (-1, 1)
        if not (shape.is_per_tensor() or per_channel or (shape.row > 1 and shape.col > 1)):
            return False, f"takes one weight scale, one a channel or one a block, not {shape}"
        return True, None

    def input_quant_key(self) -> None:
        """Activations are taken as they are."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Choose how to compute the layer and bring its weight into that form."""
        if getattr(layer, "is_bmm", False):
            raise RepairError("kernel:fp8_block: a batched (grouped output) layer is not covered; no result would be right")
        scale_name = next((name for name in SCALES if getattr(layer, name, None) is not None), None)
        if scale_name is None:
            raise RepairError(f"the layer has no weight scale under {' or '.join(SCALES)}")
        n, k = (int(size) for size in self.config.weight_shape)
        scale = getattr(layer, scale_name).data
        transposed = is_transposed(layer, n, k)
        weight = layer.weight.data.t() if transposed else layer.weight.data
        group = self.config.weight_quant_key.scale.group_shape
        block = (group.row, group.col) if group.row > 1 and group.col > 1 else None
        problem = Problem(
            layout="block" if block else "tensor" if scale.numel() == 1 else "channel",
            activation="none" if self.weights_only else _activation(self.config.activation_quant_key),
            n=n,
            k=k,
            dtype=getattr(self.config, "input_dtype", None) or self.config.out_dtype,
            weight_dtype=weight.dtype,
            block=block,
        )
        found, prepared = choice.prepare(problem, weight, scale)
        _replace(layer, "weight", prepared.weight.t() if transposed else prepared.weight)
        _replace(layer, scale_name, prepared.scale)
        self._transposed, self._scale_name, self._run = transposed, scale_name, prepared.run
        _tell_compiler(found)
        _logger.debug("xpufp8 computes %s", found.describe())

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
        """Return ``x @ weight.T + bias`` in the configured output dtype; leading dimensions of ``x`` are kept."""
        weight = layer.weight.t() if self._transposed else layer.weight
        out = self._run(x, weight, getattr(layer, self._scale_name), bias)
        wanted = self.config.out_dtype or x.dtype
        return out.to(wanted)

    def _get_layer_params(self, layer: torch.nn.Module, **_: Any) -> Any:
        raise RuntimeError("xpufp8 kernels read their parameters in apply_weights")

    def apply_scaled_mm(self, **_: Any) -> Any:
        """Unused: ``apply_weights`` is the whole kernel. vLLM's base class declares it."""
        raise RuntimeError("xpufp8 kernels compute in apply_weights")

    def apply_block_scaled_mm(self, *_: Any, **__: Any) -> Any:
        """Unused: ``apply_weights`` is the whole kernel. vLLM's base class declares it."""
        raise RuntimeError("xpufp8 kernels compute in apply_weights")


@functools.cache
def block_kernel() -> type:
    """Return the class for the block-FP8 table."""

    class Xpufp8BlockLinearKernel(LayerKernel, _base("Fp8BlockScaledMMLinearKernel")):  # type: ignore[misc]  # base known at run time
        """Block-FP8 linear layers by the best candidate that agrees with float64."""

        apply_input_quant = False

        def __init__(self, config: Any) -> None:
            self.config = config
            self.weight_group_shape = config.weight_quant_key.scale.group_shape
            self.use_triton = False

    return Xpufp8BlockLinearKernel


def _scaled(name: str, weights_only: bool) -> type:
    base = _base("FP8ScaledMMLinearKernel")

    def init(self: Any, config: Any, layer_param_names: Any = ()) -> None:
        self.config = config
        self.layer_param_names = layer_param_names

    body = {
        "__init__": init,
        "__doc__": "FP8 linear layers by the best candidate that agrees with float64.",
        "__module__": __name__,
        "weights_only": weights_only,
    }
    return type(name, (LayerKernel, base), body)


@functools.cache
def scaled_kernel() -> type:
    """Return the class for the table of per-tensor and per-channel FP8."""
    return _scaled("Xpufp8LinearKernel", weights_only=False)


@functools.cache
def w8a16_kernel() -> type:
    """Return the class for the table of FP8 weights with 16-bit activations."""
    return _scaled("Xpufp8W8A16LinearKernel", weights_only=True)


@functools.cache
def int8_kernel() -> type:
    """Return the class for the single INT8 table of vLLM to 0.14."""
    from xpufp8.runtime.int8_kernel import make

    return make(_base("ScaledMMLinearKernel"))
