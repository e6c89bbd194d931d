"""One quantized linear layer as a problem to solve: its shapes and scales, and the plain-torch arithmetic on them.

Weights are ``[N, K]`` here, whatever a caller stores; ``y = x @ weight.T + bias``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

E8M0_BIAS = 127
"""Exponent bias of the power-of-two scales that are stored as one byte."""


@dataclass(frozen=True)
class Problem:
    """What one linear layer asks for."""

    layout: str
    """Weight scale: tensor, channel or block."""
    activation: str
    """What the scheme does to activations: none, static-tensor, dynamic-tensor, dynamic-token or dynamic-group."""
    n: int
    k: int
    dtype: Any
    """torch dtype of activations and output."""
    weight_dtype: Any
    block: tuple[int, int] | None = None
    """[rows, columns] of a block, for the block layout."""

    def key(self) -> str:
        """Text that is equal for equal problems, for caches and logs."""
        block = f"-{self.block[0]}x{self.block[1]}" if self.block else ""
        dtypes = f"{self.weight_dtype}-{self.dtype}".replace("torch.", "")
        return f"{self.layout}{block}-{self.activation}-{self.n}x{self.k}-{dtypes}"


def scale_to_float(scale: torch.Tensor) -> torch.Tensor:
    """Return a scale as float32; powers of two stored in a byte (E8M0) are expanded."""
    import torch

    if scale.dtype == torch.uint8:
        return torch.exp2(scale.to(torch.float32) - E8M0_BIAS)
    return scale.to(torch.float32)


def spread_scale(problem: Problem, scale: torch.Tensor) -> torch.Tensor:
    """Shape a scale so that it multiplies a weight ``[N, K]``.

    Args:
        problem: the layer.
        scale: ``[]`` or ``[1]`` for tensor; ``[N]``, ``[N, 1]`` or ``[1, N]`` for channel; ``[ceil(N/bn), ceil(K/bk)]`` for block.

    Returns:
        float32 ``[1, 1]``, ``[N, 1]`` or ``[N, K]``.

    Raises:
        ValueError: the scale has another number of elements than its layout says.
    """
    n, k = problem.n, problem.k
    scale = scale_to_float(scale)
    if problem.layout == "block":
        rows, columns = problem.block or (n, k)
        expected = (-(-n // rows), -(-k // columns))
        if tuple(scale.shape) != expected:
            raise ValueError(
                f"block scale has shape {tuple(scale.shape)}, a weight [{n}, {k}] in {rows}x{columns} blocks needs {expected}"
            )
        return scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    wanted = 1 if problem.layout == "tensor" else n
    if scale.numel() != wanted:
        raise ValueError(f"{problem.layout} scale has {scale.numel()} elements, a weight [{n}, {k}] needs {wanted}")
    return scale.reshape(-1, 1)


def widen(problem: Problem, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the weight ``[N, K]`` in the activation dtype; the product is taken in float32 and rounded once."""
    import torch

    return (weight.to(torch.float32) * spread_scale(problem, scale)).to(problem.dtype)


def exact(problem: Problem, weight: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return some rows of the dequantized weight in float64, on the CPU (some XPUs have no float64).

    Args:
        problem: the layer.
        weight: ``[N, K]`` in FP8.
        scale: in the layout's shape.
        rows: indices of the rows wanted, int64 ``[R]``.

    Returns:
        float64 ``[R, K]``.
    """
    import torch

    rows = rows.cpu()
    picked = weight.cpu().view(torch.uint8)[rows].view(weight.dtype).to(torch.float64)
    scale = scale_to_float(scale.cpu()).to(torch.float64)
    if problem.layout == "tensor":
        return picked * scale.reshape(1, 1)
    if problem.layout == "channel":
        return picked * scale.reshape(-1, 1)[rows]
    block_rows, block_columns = problem.block or (problem.n, problem.k)
    return picked * scale[rows // block_rows].repeat_interleave(block_columns, 1)[:, : problem.k]
