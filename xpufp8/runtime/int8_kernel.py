"""An INT8 linear layer in plain torch, for the one table of vLLM to 0.14 on platforms that have no row there.

There ``choose_scaled_mm_linear_kernel`` indexes its table with the platform, so a missing row is a KeyError and not a refusal.
Activations stay as they are: the product of the dequantized weight is what the INT8 arithmetic approximates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def make(base: Any) -> type:
    """Return the kernel class on a release's ``ScaledMMLinearKernel``."""

    class Xpufp8Int8LinearKernel(base):  # type: ignore[misc]  # the base is known at run time only
        """Dequantize at each call and multiply."""

        @classmethod
        def get_min_capability(cls) -> int:
            """Any device (asked by releases to 0.12)."""
            return 0

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            """Any device (asked by releases since 0.13)."""
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            """Every scheme of the table: activations are not quantized, so their scales and zero points are not needed."""
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Give each output channel its scale: a fused layer with one scale a shard has as many as it has shards."""
            import torch

            weight = getattr(layer, self.w_q_name).data
            scale = getattr(layer, self.w_s_name).data.reshape(-1).to(torch.float32)
            if scale.numel() not in (1, weight.shape[0]):
                widths = torch.tensor(layer.logical_widths, device=scale.device)
                scale = scale.repeat_interleave(widths)
            setattr(layer, self.w_s_name, torch.nn.Parameter(scale.reshape(-1, 1), requires_grad=False))

        def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            """Return ``x @ weight.T + bias``; leading dimensions of ``x`` are kept."""
            import torch

            scale = getattr(layer, self.w_s_name)
            weight = (getattr(layer, self.w_q_name).to(torch.float32) * scale).to(x.dtype)
            return torch.nn.functional.linear(x, weight, bias)

    return Xpufp8Int8LinearKernel
