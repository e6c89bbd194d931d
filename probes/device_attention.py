"""The model's attention as one part of a layer: vLLM's own attention layer for the platform, with a KV cache and metadata of its own.

vLLM hides attention behind an opaque op that torch.compile does not look into; what the op runs is the platform's kernel. Where that layer
cannot be made alone (no vLLM, no model, a release that builds it in another way), torch's own attention stands for it, and is said to.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from probes.device_shapes import Sizes, read_sizes
from probes.vllm_arguments import number

if TYPE_CHECKING:
    from probes.device_layers import Bench

NAME = "probe.layers.0.self_attn.attn"
BLOCKS = 4
STANDING_IN = Sizes(512, 0, 8, 2, 64, 1)
"""Heads where the model's are not known: grouped, so that a kernel has to tell query from key heads."""


def attention(made: Bench, dtype: str, rows: int, inputs: int, stack: ExitStack) -> tuple[Any, str | None, str]:
    """A module ``[rows, inputs] -> [rows, heads * head_dim]``: projections of fixed values, then causal attention.

    Args:
        made: the device and the command.
        dtype: of the activations.
        rows: tokens of the one sequence that is attended.
        inputs: width of the module's input.
        stack: keeps vLLM's forward context open for as long as the module is called.

    Returns:
        The module, the backend that vLLM selects (None: torch's own attention), and why it is torch's.
    """
    sizes = _per_rank(made, read_sizes(made.context.model) or STANDING_IN)
    reason = "no model was given" if made.tables is not None else "there is no vLLM"
    if made.tables is not None and made.context.model is not None:
        try:
            core, backend = _vllm_core(made, dtype, sizes, rows, stack)
        except Exception as exc:  # noqa: BLE001 - releases build the layer in many ways; the trace judges whether it can be built
            reason = f"{type(exc).__name__}: {exc}".splitlines()[0][:200]
        else:
            return _module(made, dtype, sizes, inputs, core), backend, ""
    return _module(made, dtype, sizes, inputs, _torch_core(sizes)), None, reason


def cache_answer(made: Bench, dtype: str, rows: int) -> tuple[str | None, Exception | None]:
    """What vLLM's attention layer does with the KV-cache dtype of the command: its backend, or the exception that this dtype causes.

    The layer is made and run. Where it fails with the model's own cache dtype too, its failure says nothing of the one that was typed, and
    the answer is ``(None, None)``.
    """
    sizes = read_sizes(made.context.model)
    if made.tables is None or sizes is None:
        return None, None
    sizes = _per_rank(made, sizes)
    with ExitStack() as stack:
        try:
            return _vllm_core(made, dtype, sizes, rows, stack)[1], None
        except Exception as exc:  # noqa: BLE001 - a refusal is the answer
            refusal = exc
    with ExitStack() as stack:
        try:
            _vllm_core(made, dtype, sizes, rows, stack, "--kv-cache-dtype", "auto")
        except Exception:  # noqa: BLE001 - then it was no refusal of a dtype
            return None, None
    return None, refusal


def _per_rank(made: Bench, sizes: Sizes) -> Sizes:
    ranks = max(1, number(made.context.vllm_args, "tensor_parallel_size", "-tp"))
    return replace(sizes, heads=max(1, sizes.heads // ranks), kv_heads=max(1, sizes.kv_heads // ranks))


def _module(made: Bench, dtype: str, sizes: Sizes, inputs: int, core: Any) -> Any:
    import torch

    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(inputs, q + 2 * kv, generator=generator) / inputs**0.5

    class Layer(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
        def __init__(self) -> None:
            super().__init__()
            self.projection = torch.nn.Parameter(weight.to(getattr(torch, dtype)).to(made.device), requires_grad=False)
            self.core = core

        def forward(self, x: Any) -> Any:
            query, key, value = (x @ self.projection).split([q, kv, kv], dim=-1)
            return self.core(query.contiguous(), key.contiguous(), value.contiguous())

    return Layer()


def _torch_core(sizes: Sizes) -> Any:
    import torch

    class Core(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
        def forward(self, query: Any, key: Any, value: Any) -> Any:
            rows = query.shape[0]
            q = query.view(1, rows, sizes.heads, sizes.head_dim).transpose(1, 2)
            k, v = (t.view(1, rows, sizes.kv_heads, sizes.head_dim).transpose(1, 2) for t in (key, value))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(rows, -1)

    return Core()


def _vllm_core(made: Bench, dtype: str, sizes: Sizes, rows: int, stack: ExitStack, *more: str) -> tuple[Any, str]:
    """VLLM's attention layer, its cache and one prefill's metadata; run once, and compared with torch's attention.

    Raises:
        Exception: whatever vLLM raises while it is made or called.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from probes import trace_build, trace_stand_ins
    from probes.device_layers import default_dtype

    trace_stand_ins.inspect_here()
    typed = [*made.context.vllm_args, "--dtype", dtype, *more]
    config = trace_build.engine_config(str(made.context.model), typed)
    with set_current_vllm_config(config), default_dtype(dtype), made.device:
        layer = Attention(
            sizes.heads, sizes.head_dim, sizes.head_dim**-0.5, num_kv_heads=sizes.kv_heads, cache_config=config.cache_config,
            prefix=NAME,
        )  # fmt: skip
        backend = layer.get_attn_backend()
        spec = layer.get_kv_cache_spec(config)
        layer.kv_cache = _cache(backend, spec, made.device)
        slots = torch.arange(spec.block_size, spec.block_size + rows, device=made.device)
        bounds = torch.tensor([0, rows], dtype=torch.int32)
        table = torch.tensor([[1, 2]], dtype=torch.int32, device=made.device)
        lengths = torch.tensor([rows], dtype=torch.int32)
        pool = {
            "query_start_loc": bounds.to(made.device), "query_start_loc_cpu": bounds, "seq_lens": lengths.to(made.device),
            "seq_lens_cpu": lengths, "_seq_lens_cpu": lengths, "num_computed_tokens_cpu": torch.zeros(1, dtype=torch.int32),
            "seq_lens_cpu_upper_bound": lengths, "num_reqs": 1, "num_actual_tokens": rows, "max_query_len": rows,
            "max_seq_len": rows, "block_table_tensor": table, "slot_mapping": slots, "causal": True,
        }  # fmt: skip
        known = inspect.signature(CommonAttentionMetadata).parameters
        common = CommonAttentionMetadata(**{name: value for name, value in pool.items() if name in known})
        metadata = backend.get_builder_cls()(spec, [NAME], config, made.device).build(0, common)
    stack.enter_context(set_forward_context({NAME: metadata}, config, num_tokens=rows, slot_mapping={NAME: slots}))
    # A layer that runs wrong here was made wrong here: the real one is judged by the server's answers.
    _compare(made, dtype, sizes, rows, layer)
    return layer, str(backend.get_name())


def _cache(backend: Any, spec: Any, device: Any) -> Any:
    """An empty KV cache of a few blocks in the shape and strides that the backend reads."""
    import torch

    old = getattr(backend, "get_kv_cache_shape", None)
    if old is not None:
        return torch.zeros(old(BLOCKS, spec.block_size, spec.num_kv_heads, spec.head_size), dtype=spec.dtype, device=device)
    from vllm.v1 import kv_cache_interface as interface

    layout = backend.supported_kv_cache_layouts()[0]
    shape = interface.compute_layer_kv_cache_shape_bytes(spec, BLOCKS)
    strides = interface.compute_layout_strides(spec, BLOCKS, 1, layout)[1:]
    raw = torch.zeros(BLOCKS * spec.page_size_bytes, dtype=torch.int8, device=device)
    return raw.as_strided(shape, strides).view(spec.dtype)


def _compare(made: Bench, dtype: str, sizes: Sizes, rows: int, layer: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(4)
    widths = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    query, key, value = (
        torch.randn(rows, width * sizes.head_dim, generator=generator).to(getattr(torch, dtype)).to(made.device)
        for width in widths
    )
    wanted = _torch_core(sizes)(query, key, value).float()
    got = layer(query, key, value).float()
    off = float((got - wanted).norm() / wanted.norm())
    if not off <= 0.1:  # an FP8 cache costs a few per cent
        raise ValueError(f"attention alone differs from torch's by {off:.2f}")
