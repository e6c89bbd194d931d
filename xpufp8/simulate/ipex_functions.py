"""Python functions of the extension that vLLM up to 0.14 calls on XPU: each calls the op that the real one calls.

Without torch.compile vLLM runs its layers through them (``vllm/_ipex_ops.py``), so a trace with ``--enforce-eager`` meets them.
All write to a tensor that is handed in; what they return, vLLM does not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _ops() -> Any:
    import torch

    return torch.ops.torch_ipex


def silu_and_mul(x: Any, out: Any) -> Any:
    """``x`` [tokens, 2 d] → ``out`` [tokens, d]."""
    return _ops().silu_and_mul(x, out)


def gelu_and_mul(x: Any, out: Any, approximate: str = "none") -> Any:
    """``x`` [tokens, 2 d] → ``out`` [tokens, d]."""
    return _ops().gelu_and_mul(x, out, approximate)


def gelu_quick(x: Any, out: Any) -> Any:
    """``x`` → ``out`` of the same shape."""
    return _ops().gelu_quick_out(x, out)


def rotary_embedding_batched(
    positions: Any, query: Any, key: Any, head_size: int, cos_sin_cache: Any, is_neox: bool, rotary_dim: int, offsets: Any = None
) -> Any:
    """Rotate ``query`` and ``key`` [tokens, heads * head_size] in place."""
    ops = _ops()
    common = (positions, query, key, head_size, cos_sin_cache, is_neox, rotary_dim)
    if offsets is not None:
        ops.rotary_embedding_batched(*common, offsets)
    else:  # release 2.10 has the op under a second name
        (ops.rotary_embedding if hasattr(ops, "rotary_embedding") else ops.rotary_embedding_legacy)(*common)
    return query, key


FUNCTIONAL: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (silu_and_mul, gelu_and_mul, gelu_quick, rotary_embedding_batched)
}
"""What ``intel_extension_for_pytorch.llm.functional`` holds."""
