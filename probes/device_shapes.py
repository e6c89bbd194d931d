"""Which linear layers a model holds, from config.json alone: names, sizes of one rank, counts. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.device_facts import LayerShapeFact
from probes.protocol import Context
from probes.vllm_arguments import number

LIMIT = 2**24
"""Largest N*K that is run by default: a float64 copy of it takes 128 MiB."""
ALONE = (512, 384)
"""[N, K] of the layer that is run where no model is given: not square, so that a swapped dimension shows."""
TILE = 128


@dataclass(frozen=True)
class Sizes:
    """What config.json says of a decoder."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


def _text_config(folder: str) -> dict[str, Any]:
    data = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = data.get(name)
        if isinstance(inner, dict):
            data = inner.get("text_config", inner) if name == "thinker_config" else inner
            break
    return data if isinstance(data, dict) else {}


def read_sizes(folder: str | None) -> Sizes | None:
    """Sizes of the decoder, or None where config.json does not give them under the usual names."""
    if folder is None:
        return None
    try:
        config = _text_config(folder)
    except (OSError, ValueError):
        return None

    def size(*names: str) -> int:
        return next((v for name in names if isinstance(v := config.get(name), int) and v > 0), 0)

    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head")
    inner, layers = size("intermediate_size", "n_inner", "ffn_dim"), size("num_hidden_layers", "n_layer")
    if not (hidden and heads and layers):
        return None
    return Sizes(hidden, inner, heads, size("num_key_value_heads") or heads, size("head_dim") or hidden // heads, layers)


def block_size(context: Context) -> tuple[int, int]:
    """Rows and columns of a weight block: ``options["block"]``, else what the checkpoint's config.json says, else 128 x 128."""
    found = context.options.get("block") or (_config_block(context.model) if context.model is not None else None)
    rows, columns = found or (TILE, TILE)
    return int(rows), int(columns)


def _config_block(folder: str) -> list[int] | None:
    try:
        data = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        text = _text_config(folder)
    except (OSError, ValueError):
        return None
    quantization = data.get("quantization_config") or text.get("quantization_config") or {}
    groups = quantization.get("config_groups") if isinstance(quantization, dict) else None
    weights = [g.get("weights") or {} for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    sizes = [
        quantization.get("weight_block_size") if isinstance(quantization, dict) else None,
        *(w.get("block_structure") for w in weights),
    ]
    return next((s for s in sizes if isinstance(s, list) and len(s) == 2 and all(isinstance(v, int) and v > 0 for v in s)), None)


def layer_shapes(context: Context, largest: int = LIMIT) -> list[LayerShapeFact]:
    """The linear layers of one rank as vLLM merges them; one stand-in layer where the model is not known.

    Layers of mixtures of experts are not among them: their experts are other kernels.

    Args:
        context: of the probe; ``options["limit"]`` replaces ``largest``.
        largest: N*K above which a layer is run smaller.
    """
    sizes = read_sizes(context.model)
    limit = int(context.options.get("limit") or largest)
    if sizes is None:
        asked = context.options.get("shapes") or [ALONE]
        return [_capped("layer", int(n), int(k), 0, limit) for n, k in asked]
    ranks = max(1, number(context.vllm_args, "tensor_parallel_size", "-tp"))
    kv = max(1, sizes.kv_heads // ranks)
    heads = max(1, sizes.heads // ranks)
    found = [("qkv_proj", (heads + 2 * kv) * sizes.head_dim, sizes.hidden), ("o_proj", sizes.hidden, heads * sizes.head_dim)]
    if sizes.inner:
        inner = max(1, sizes.inner // ranks)
        found += [("gate_up_proj", 2 * inner, sizes.hidden), ("down_proj", sizes.hidden, inner)]
    layers = max(1, sizes.layers // max(1, number(context.vllm_args, "pipeline_parallel_size", "-pp")))
    return [_capped(name, n, k, layers, limit) for name, n, k in found]


def _capped(name: str, n: int, k: int, count: int, limit: int) -> LayerShapeFact:
    """Keep K where possible (errors grow with it) and cut N to whole tiles."""
    run_n, run_k = n, k
    if n * k > limit:
        run_k = min(k, limit // TILE)
        run_n = max(TILE, min(n, limit // run_k // TILE * TILE))
    return LayerShapeFact(name, n, k, count, run_n, run_k)


def distinct(layers: list[LayerShapeFact]) -> list[LayerShapeFact]:
    """One layer for each size that is run."""
    seen: dict[tuple[int, int], LayerShapeFact] = {}
    for layer in layers:
        seen.setdefault((layer.run_n, layer.run_k), layer)
    return list(seen.values())
