"""The quantization schemes that both halves speak of, as rows of data.

A scheme is what one linear layer asks a kernel table for: how weights are scaled, how activations are scaled, and which table
of vLLM's answers. Names are stable; they appear in facts and reports.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """One way of quantizing a linear layer."""

    name: str
    table: str
    """``TableFact.kind`` that answers for it in current vLLM."""
    weight: str
    """Weight scale layout: tensor, channel, block, mx, or none."""
    activation: str
    """Activation scale: static-tensor, dynamic-tensor, dynamic-token, dynamic-group, mx, none (16-bit activations)."""
    title: str


SCHEMES: tuple[Scheme, ...] = (
    Scheme("fp8-tensor-static", "fp8", "tensor", "static-tensor", "FP8 per-tensor weights, static activation scale"),
    Scheme("fp8-tensor-dynamic", "fp8", "tensor", "dynamic-tensor", "FP8 per-tensor weights, dynamic per-tensor activations"),
    Scheme("fp8-tensor-token", "fp8", "tensor", "dynamic-token", "FP8 per-tensor weights, dynamic per-token activations"),
    Scheme("fp8-channel-static", "fp8", "channel", "static-tensor", "FP8 per-channel weights, static activation scale"),
    Scheme("fp8-channel-token", "fp8", "channel", "dynamic-token", "FP8 per-channel weights, dynamic per-token activations"),
    Scheme("fp8-block", "fp8_block", "block", "dynamic-group", "FP8 block weights (128x128), dynamic per-group activations"),
    Scheme("fp8-w8a16-tensor", "wfp8a16", "tensor", "none", "FP8 per-tensor weights, 16-bit activations"),
    Scheme("fp8-w8a16-channel", "wfp8a16", "channel", "none", "FP8 per-channel weights, 16-bit activations"),
    Scheme("mxfp8", "mxfp8", "mx", "mx", "MXFP8 (blocks of 32, E8M0 scales)"),
    Scheme("mxfp6", "mxfp6", "mx", "mx", "MXFP6"),
    Scheme("mxfp4", "mxfp4", "mx", "none", "MXFP4"),
    Scheme("nvfp4", "nvfp4", "mx", "dynamic-group", "NVFP4"),
    Scheme("int8-channel-token", "int8", "channel", "dynamic-token", "INT8 per-channel weights, dynamic per-token activations"),
    Scheme("wna16", "mixed_precision", "group", "none", "4/8-bit integer weights, 16-bit activations (AWQ, GPTQ, AutoRound)"),
    Scheme("unquantized", "none", "none", "none", "16-bit weights"),
)

BY_NAME: dict[str, Scheme] = {scheme.name: scheme for scheme in SCHEMES}
