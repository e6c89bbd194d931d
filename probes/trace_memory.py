"""Bytes: what a rank holds after weight processing, and what its KV cache takes. Sums over fake tensors, so exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from probes.model_facts import MemoryFact


def held(model: Any) -> int:
    """Bytes of all parameters and buffers, each storage once."""
    return sum(_by_storage([*model.parameters(), *model.buffers()], set()).values())


def _by_storage(tensors: Iterable[Any], seen: set[int]) -> Counter[str]:
    """Bytes by dtype; a storage already in ``seen`` is not counted again."""
    sizes: dict[int, tuple[str, int]] = {}
    for tensor in tensors:
        key = tensor.untyped_storage()._cdata
        if key in seen:
            continue
        size = tensor.numel() * tensor.element_size()
        if size > sizes.get(key, ("", -1))[1]:
            sizes[key] = (str(tensor.dtype).removeprefix("torch."), size)
    seen.update(sizes)
    total: Counter[str] = Counter()
    for dtype, size in sizes.values():
        total[dtype] += size
    return total


def plain_tensors(model: Any) -> list[Any]:
    """Tensors that modules hold as ordinary attributes, outside every parameter list."""
    import torch

    found = []
    for module in model.modules():
        for name, value in vars(module).items():
            if name in {"_parameters", "_buffers", "_modules"}:
                continue
            values = value if isinstance(value, (list, tuple)) else [value]
            found += [v for v in values if isinstance(v, torch.Tensor)]
    return found


def measure(model: Any, loading: int | None) -> MemoryFact:
    """Bytes of the model on this rank. Call after weight processing and before any list of layers is shortened."""
    seen: set[int] = set()
    parameters = _by_storage(model.parameters(), seen)
    buffers = _by_storage(model.buffers(), seen)
    others = _by_storage(plain_tensors(model), seen)
    return MemoryFact(
        parameter_bytes=dict(parameters), buffer_bytes=dict(buffers), other_bytes=dict(others),
        weight_bytes=sum(parameters.values()) + sum(buffers.values()), loading_bytes=loading,
    )  # fmt: skip


def kv_specs(config: Any) -> dict[str, Any]:
    """vLLM's cache specification of each layer that has a cache of its own, by layer name.

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
