"""The model as its config.json describes it: architecture, dtype, and which quantization schemes its layers use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SchemeUse:
    """One quantization scheme (``probes.schemes``) and the layers that use it."""

    scheme: str
    layers: str
    """For people: ``every linear layer but lm_head``."""
    moe: bool = False
    """True when it is about the experts of a mixture-of-experts layer, whose kernels come from an oracle, not a table."""


@dataclass(frozen=True)
class ModelSpec:
    """What config.json and the typed options say of a model."""

    source: str
    """As typed."""
    folder: str
    config: dict[str, Any] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    dtype: str = "bfloat16"
    """bfloat16, float16 or float32: ``--dtype`` if given, else the checkpoint's."""
    quant_method: str | None = None
    """fp8, compressed-tensors, modelopt, quark, mxfp4, awq, gptq…; None for an unquantized checkpoint served as it is."""
    online: bool = False
    """True when ``--quantization`` quantizes a 16-bit checkpoint while loading."""
    uses: tuple[SchemeUse, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be understood in the quantization config."""
