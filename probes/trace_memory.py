"""Bytes: what a rank holds after weight processing, and what its KV cache takes. Sums over fake tensors, so exact."""

from __future__ import annotations

from collections import Counter
from typing import Any

from probes.model_facts import MemoryFact


def held(model: Any) -> int:
    """Bytes of all parameters and buffers as they are, each storage once."""
    total = _Sum(set(), set())
    for tensor in [*model.parameters(), *model.buffers()]:
        total.add(tensor, 1)
    return sum(total.total().values())


class _Sum:
    """Bytes by dtype over tensors, each storage once, a tensor of a repeated layer as often as the layer repeats."""

    def __init__(self, shared: set[int], seen: set[int]) -> None:
        self.shared, self.seen = shared, seen
        self.sizes: dict[int, tuple[str, int, int]] = {}

    def add(self, tensor: Any, count: int) -> None:
        if getattr(tensor, "dropped_by_model", False):
            return
        key = tensor.untyped_storage()._cdata
        if key in self.seen:
            return
        size = tensor.numel() * tensor.element_size()
        if size > self.sizes.get(key, ("", -1, 0))[1]:
            self.sizes[key] = (str(tensor.dtype).removeprefix("torch."), size, 1 if key in self.shared else count)

    def total(self) -> dict[str, int]:
        self.seen.update(self.sizes)
        total: Counter[str] = Counter()
        for dtype, size, count in self.sizes.values():
            total[dtype] += size * count
        return dict(total)


def measure(model: Any, repeated: list[Any], loading: int | None) -> MemoryFact:
    """Bytes of the model on this rank after weight processing. ``repeated``: its lists of repeating layers."""
    import torch

    from probes.trace_layers import census

    shared = set().union(*(r.shared for r in repeated)) if repeated else set()
    seen: set[int] = set()
    parameters, buffers, others = (_Sum(shared, seen) for _ in range(3))
    modules = list(census(model, repeated))
    for _, module, count in modules:
        for tensor in module._parameters.values():
            if tensor is not None:
                parameters.add(tensor, count)
    by_dtype = parameters.total()
    for _, module, count in modules:
        for tensor in module._buffers.values():
            if tensor is not None:
                buffers.add(tensor, count)
    buffers_by_dtype = buffers.total()
    for _, module, count in modules:
        for name, value in vars(module).items():
            if name not in {"_parameters", "_buffers", "_modules"}:
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        others.add(tensor, count)
    return MemoryFact(
        parameter_bytes=by_dtype, buffer_bytes=buffers_by_dtype, other_bytes={k: v for k, v in others.total().items() if v},
        weight_bytes=sum(by_dtype.values()) + sum(buffers_by_dtype.values()), loading_bytes=loading,
    )  # fmt: skip


def kv_specs(config: Any) -> dict[str, Any]:
    """VLLM's cache specification of each layer that has a cache of its own, by layer name.

    Raises:
        Exception: whatever vLLM raises while it settles the block size.
    """
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.platforms import current_platform

    with set_current_vllm_config(config):
        settle = getattr(current_platform, "update_block_size_for_backend", None)
        if settle is not None:
            settle(config)
        specs = {}
        for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
            if getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            spec = layer.get_kv_cache_spec(config)
            if spec is not None:
                specs[name] = spec
        return specs


def with_cache(fact: MemoryFact, config: Any, device_bytes: int) -> MemoryFact:
    """The fact with everything about the KV cache added.

    Raises:
        Exception: whatever vLLM raises.
    """
    import dataclasses

    from vllm.v1.core import kv_cache_utils

    specs = kv_specs(config)
    per_token = fixed = 0
    for spec in specs.values():
        if _grows(spec):
            per_token += getattr(spec, "real_page_size_bytes", spec.page_size_bytes) // spec.block_size
        else:
            fixed += spec.max_memory_usage_bytes(config)
    utilization = float(config.cache_config.gpu_memory_utilization)
    left = int(device_bytes * utilization) - fact.weight_bytes - sum(fact.other_bytes.values())
    needed = fits = None
    if specs:
        needed = int(sum(spec.max_memory_usage_bytes(config) for spec in specs.values()))
        fits = int(kv_cache_utils.estimate_max_model_len(config, specs, max(left, 0)))
    return dataclasses.replace(
        fact, device_bytes=device_bytes, utilization=utilization, kv_bytes_per_token=per_token, kv_fixed_bytes=fixed,
        max_model_len=int(config.model_config.max_model_len), kv_needed_bytes=needed, fits_max_model_len=fits,
        kv_cache_dtype=str(config.cache_config.cache_dtype), block_size=config.cache_config.block_size,
        note="" if specs else "the model keeps no KV cache",
    )  # fmt: skip


def _grows(spec: Any) -> bool:
    name = type(spec).__name__
    return hasattr(spec, "num_kv_heads") and "Sliding" not in name and "Chunked" not in name and "Cross" not in name
