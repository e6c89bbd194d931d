"""Call the model as vLLM's runners call it, part by part: vision towers, text, logits, pooler. All under fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

TOKENS = 32
"""Tokens of the traced batch. Shapes in the compiled region are symbolic in it."""


@contextlib.contextmanager
def calling(config: Any, fake_mode: Any, tokens: int = TOKENS, *, compiling: bool = False) -> Iterator[None]:
    """Everything that a forward pass needs around it: configuration, forward context, fake mode, no gradients.

    Unless ``compiling``, functions of vLLM that are compiled on their own run as eager code, as their own compiler is not the question.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    stance = contextlib.nullcontext() if compiling else torch.compiler.set_stance("force_eager")
    with (
        set_current_vllm_config(config),
        set_forward_context(None, config, num_tokens=tokens),
        fake_mode,
        torch.no_grad(),
        stance,
    ):
        yield


def text_inputs(model: Any, config: Any) -> dict[str, Any]:
    """Arguments of the model's forward for a batch of text, as the runner makes them. Inside a fake mode."""
    import torch

    ids = torch.zeros(TOKENS, dtype=torch.long)
    positions = torch.arange(TOKENS)
    model_config = config.model_config
    if getattr(model_config, "uses_mrope", False):
        positions = positions.unsqueeze(0).repeat(3, 1)
    elif getattr(model_config, "uses_xdrope_dim", 0):
        positions = positions.unsqueeze(0).repeat(int(model_config.uses_xdrope_dim), 1)
    inputs: dict[str, Any] = {"input_ids": ids, "positions": positions, "intermediate_tensors": None, "inputs_embeds": None}
    if config.parallel_config.pipeline_parallel_size > 1 and not _first_stage():
        inputs["intermediate_tensors"] = model.make_empty_intermediate_tensors(
            batch_size=TOKENS, dtype=model_config.dtype, device=torch.device("cpu")
        )
        inputs["input_ids"] = None
    elif _takes_embeddings(model, model_config):
        inputs["inputs_embeds"] = torch.empty(TOKENS, model_config.get_inputs_embeds_size(), dtype=model_config.dtype)
        if not getattr(model, "requires_raw_input_tokens", False):
            inputs["input_ids"] = None
    if getattr(model_config, "is_encoder_decoder", False):
        inputs["encoder_outputs"] = []
        inputs["inputs_embeds"] = None
        inputs["input_ids"] = ids
    return inputs


def _takes_embeddings(model: Any, model_config: Any) -> bool:
    if getattr(model_config, "is_encoder_decoder", False):
        return False
    return bool(getattr(model, "supports_multimodal", False)) and bool(getattr(model_config, "is_multimodal_model", False))


def _first_stage() -> bool:
    from vllm.distributed import get_pp_group

    return bool(get_pp_group().is_first_rank)


def run_text(model: Any, config: Any, fake_mode: Any) -> Any:
    """One forward pass over text. Returns hidden states (or whatever the stage hands on)."""
    import inspect

    with calling(config, fake_mode, compiling=True):
        inputs = text_inputs(model, config)
        accepted = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        return model(**{k: v for k, v in inputs.items() if k in accepted or (takes_any and v is not None)})


def run_logits(model: Any, config: Any, fake_mode: Any, hidden: Any) -> Any:
    """Logits of the last token of each of two sequences."""
    with calling(config, fake_mode):
        return model.compute_logits(hidden[:2])
