"""Facts of the probe ``model_config``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfigFacts:
    """Whether this interpreter's transformers and vLLM know the model. None where their tables could not be read."""

    model_type: str
    transformers: str | None
    """Version."""
    vllm: str | None
    transformers_knows: bool | None
    """The model type stands in transformers' config table."""
    vllm_knows: bool | None
    """The model type stands in vLLM's own config registry."""
    architectures: dict[str, bool] = field(default_factory=dict)
    """Architecture of config.json to whether vLLM's model registry has it."""
    remote_code: list[str] = field(default_factory=list)
    """Python files that ``auto_map`` names."""
    remote_files_missing: list[str] = field(default_factory=list)
    """Those of them that are not in the model's folder."""
    weight_files: int | None = None
    """Files of weights in the model's folder; None where nobody looked."""
    weights_missing: list[str] = field(default_factory=list)
    """Files that a weight index of the folder names and that are not there."""
