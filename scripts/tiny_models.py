"""Write a tiny checkpoint that vLLM can serve: random weights, a byte-level tokenizer, nothing downloaded.

``python scripts/tiny_models.py llama-fp8-block FOLDER`` writes config.json, the tokenizer and model.safetensors.
``--no-weights`` leaves the weights out (standard library only), ``--dequantized`` writes the same weights widened to
bfloat16, so that a quantized model and its reference can be served side by side.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

BLOCK = 128
"""Edge of a block of the block-quantized kinds, in elements."""
HIDDEN = 256
HEADS = 4
HEAD_DIM = 64
LAYERS = 2
SPECIAL_TOKENS = ("<|begin|>", "<|end|>")
VOCABULARY = 256 + len(SPECIAL_TOKENS)


@dataclass(frozen=True)
class Kind:
    """One sort of tiny checkpoint."""

    architecture: str
    quantization: str
    """block, channel, channel-w8a16 (activations stay in 16 bits) or none: how the linear weights are stored."""
    moe: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    """Entries of config.json that other kinds do not have."""


def _compressed_tensors(quantized_activations: bool) -> dict[str, Any]:
    """Per-channel weights, as llm-compressor writes ``FP8_DYNAMIC`` (activations a token at a time) and ``W8A16_FP8`` (none)."""
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs if quantized_activations else None}
        },
        "ignore": ["lm_head"],
    }


def _block_fp8(moe: bool) -> dict[str, Any]:
    """DeepSeek's layout: 128x128 blocks, ``weight_scale_inv`` beside each weight."""
    skipped = ["lm_head"] + ([f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)] if moe else [])
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": skipped,
    }


_LLAMA = {"model_type": "llama", "intermediate_size": 512}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

KINDS: dict[str, Kind] = {
    "llama-bf16": Kind("LlamaForCausalLM", "none", config=_LLAMA),
    "llama-fp8-block": Kind("LlamaForCausalLM", "block", config=_LLAMA),
    "llama-fp8-channel": Kind("LlamaForCausalLM", "channel", config=_LLAMA),
    "llama-fp8-w8a16": Kind("LlamaForCausalLM", "channel-w8a16", config=_LLAMA),
    "qwen3-moe-bf16": Kind("Qwen3MoeForCausalLM", "none", moe=True, config=_QWEN3_MOE),
    "qwen3-moe-fp8-block": Kind("Qwen3MoeForCausalLM", "block", moe=True, config=_QWEN3_MOE),
}


def config_of(kind: Kind, *, dequantized: bool = False) -> dict[str, Any]:
    """Return config.json of a kind; ``dequantized`` leaves its quantization out."""
    config: dict[str, Any] = {
        "architectures": [kind.architecture],
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        # As many key heads as query heads, so that a rank of TP=2 still holds whole 128-row blocks of k_proj and v_proj.
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": VOCABULARY,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        **kind.config,
    }
    if kind.quantization != "none" and not dequantized:
        config["quantization_config"] = (
            _block_fp8(kind.moe) if kind.quantization == "block" else _compressed_tensors(kind.quantization == "channel")
        )
    return config


def _byte_alphabet() -> list[str]:
    """The 256 printable characters that byte-level tokenizers write bytes as, in the order of the bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def tokenizer_files() -> dict[str, dict[str, Any]]:
    """Return the tokenizer's files: one token a byte, without merges, plus begin and end."""
    vocabulary = {character: token for token, character in enumerate(_byte_alphabet())}
    added = []
    for offset, text in enumerate(SPECIAL_TOKENS):
        entry = {"id": 256 + offset, "content": text, "single_word": False, "lstrip": False, "rstrip": False}
        added.append({**entry, "normalized": False, "special": True})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": []}
    tokenizer: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    tokenizer |= {"pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


def linear_shapes(kind: Kind) -> Iterator[tuple[str, int, int]]:
    """Name, N and K of each linear weight that a quantized kind stores in FP8."""
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}.self_attn.{name}", HEADS * HEAD_DIM, HIDDEN
        if kind.moe:
            places = [
                (f"{prefix}.mlp.experts.{e}", kind.config["moe_intermediate_size"]) for e in range(kind.config["num_experts"])
            ]
        else:
            places = [(f"{prefix}.mlp", kind.config["intermediate_size"])]
        for place, width in places:
            yield f"{place}.gate_proj", width, HIDDEN
            yield f"{place}.up_proj", width, HIDDEN
            yield f"{place}.down_proj", HIDDEN, width


def _other_tensors(kind: Kind, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Embeddings, norms, router and head: what every kind stores in bfloat16."""
    import torch

    def normal(n: int, k: int, deviation: float) -> torch.Tensor:
        return (torch.randn(n, k, generator=generator) * deviation).to(torch.bfloat16)

    # A wide head spreads the logits: greedy choices then differ by far more than rounding does.
    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, 1.0), "lm_head.weight": normal(VOCABULARY, HIDDEN, 0.4)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
        if kind.moe:
            tensors[f"{prefix}.mlp.gate.weight"] = normal(kind.config["num_experts"], HIDDEN, 0.5)
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}.self_attn.{name}.weight"] = torch.ones(HEAD_DIM, dtype=torch.bfloat16)
    tensors |= {f"{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms}
    return tensors


def quantize(weight: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a float32 weight ``[N, K]`` to e4m3fn, by block or by channel.

    Returns:
        The weight and its float32 scale: ``[ceil(N/128), ceil(K/128)]`` for ``block``, else ``[N, 1]``.
    """
    import torch

    limit = torch.finfo(torch.float8_e4m3fn).max
    if layout != "block":
        scale = weight.abs().amax(dim=1, keepdim=True) / limit
        return (weight / scale).to(torch.float8_e4m3fn), scale
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    scale = torch.empty(rows, columns)
    quantized = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            where = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scale[row, column] = weight[where].abs().amax() / limit
            quantized[where] = (weight[where] / scale[row, column]).to(torch.float8_e4m3fn)
    return quantized, scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor, layout: str) -> torch.Tensor:
    """Widen a quantized weight ``[N, K]`` to bfloat16; the product is taken in float32 and rounded once."""
    import torch

    if layout == "block":
        n, k = weight.shape
        scale = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return (weight.float() * scale).to(torch.bfloat16)


def tensors_of(kind: Kind, *, seed: int = 0, dequantized: bool = False) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors; the same seed gives the same weights whether dequantized or not."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = _other_tensors(kind, generator)
    for name, n, k in linear_shapes(kind):
        # Rows of very different size: a scale that is misread or misplaced cannot go unnoticed.
        spread = torch.exp(torch.randn(n, 1, generator=generator) * 0.5)
        weight = torch.randn(n, k, generator=generator) * spread / k**0.5
        if kind.quantization == "none":
            tensors[f"{name}.weight"] = weight.to(torch.bfloat16)
            continue
        quantized, scale = quantize(weight, kind.quantization)
        if dequantized:
            tensors[f"{name}.weight"] = dequantize(quantized, scale, kind.quantization)
            continue
        tensors[f"{name}.weight"] = quantized
        tensors[f"{name}.{'weight_scale_inv' if kind.quantization == 'block' else 'weight_scale'}"] = scale
    return tensors


def write(kind_name: str, folder: Path, *, weights: bool = True, dequantized: bool = False, seed: int = 0) -> Path:
    """Write the checkpoint into ``folder`` (made if missing) and return it.

    Raises:
        KeyError: there is no such kind.
    """
    kind = KINDS[kind_name]
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.json": config_of(kind, dequantized=dequantized), **tokenizer_files()}
    files["generation_config.json"] = {"bos_token_id": 256, "eos_token_id": 257}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if weights:
        from safetensors.torch import save_file

        save_file(tensors_of(kind, seed=seed, dequantized=dequantized), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def main(argv: list[str] | None = None) -> int:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--no-weights", action="store_true", help="config and tokenizer only; needs neither torch nor safetensors"
    )
    parser.add_argument("--dequantized", action="store_true", help="the same weights in bfloat16, for reference")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    write(options.kind, options.folder, weights=not options.no_weights, dequantized=options.dequantized, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
