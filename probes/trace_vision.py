"""Vision and audio towers: inputs of a plausible size, made by hand, since the image processor's files are no part of a config.

Metadata (patch grids) is computed for real while weights and pixels stay fake: window indices and sequence lengths depend on
values.
"""

from __future__ import annotations

from typing import Any

CANNOT_TELL = "no hand-made input for this kind of tower"


def tower_inputs(model: Any, config: Any) -> dict[str, Any] | None:
    """Keyword arguments for ``embed_multimodal``, or None when this tower's input is not known here. Inside a fake mode."""
    import torch

    hf = config.model_config.hf_config
    vision = getattr(hf, "vision_config", None)
    if vision is None:
        return _audio_inputs(hf, config)
    patch = getattr(vision, "patch_size", None)
    if patch and getattr(vision, "spatial_merge_size", None):
        temporal = getattr(vision, "temporal_patch_size", 2)
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or 3
        merge = vision.spatial_merge_size
        rows, columns = 8 * merge, 12 * merge
        pixels = torch.empty(rows * columns, channels * temporal * patch * patch, dtype=config.model_config.dtype)
        return {"pixel_values": pixels, "image_grid_thw": real_tensor([[1, rows, columns]])}
    if str(getattr(hf, "model_type", "")) == "gemma3":
        size = vision.image_size
        return {"pixel_values": torch.empty(1, 3, size, size, dtype=config.model_config.dtype), "num_patches": real_tensor([1])}
    return None


def _audio_inputs(hf: Any, config: Any) -> dict[str, Any] | None:
    import torch

    if str(getattr(hf, "model_type", "")) == "whisper":
        frames = 2 * hf.max_source_positions
        return {"input_features": [torch.empty(hf.num_mel_bins, frames, dtype=config.model_config.dtype)]}
    return None


def real_tensor(values: Any) -> Any:
    """A CPU tensor that holds its values even inside a fake mode."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return torch.tensor(values)
