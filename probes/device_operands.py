"""Made operands of one quantized linear layer: weights, scales and activations that show a misreading instead of hiding it.

Scales are distinct for each channel or block, so that none can stand in for another. Activations lie on the e4m3 grid and hold
its largest value in every group of every row: whatever group a kernel quantizes, it gets the same numbers back, and one float64
product is the reference of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probes.schemes import Scheme

if TYPE_CHECKING:
    import torch

STEP = 2.0**-9
"""Scale of the activations, a power of two: x / STEP is an e4m3 number, and so is the scale that a kernel computes."""
LARGEST = 448.0
GROUP = 128
BLOCK = (128, 128)
ORDINARY_LIMIT = 240.0
"""Ordinary weights stay below the codes that e5m2 reads as infinite, so that such a reading gives numbers to compare."""


@dataclass(frozen=True)
class Operands:
    """One layer's operands, on the CPU."""

    scheme: Scheme
    n: int
    k: int
    weight: Any
    """``[N, K]``, FP8."""
    scale: Any
    """float32: ``[]`` for tensor, ``[N]`` for channel, ``[ceil(N/rows), ceil(K/columns)]`` for block."""
    edges: bool = False
    block: tuple[int, int] = BLOCK
    """Rows and columns of a block; means nothing without block scales."""

    @property
    def layout(self) -> str:
        """tensor, channel or block."""
        return self.scheme.weight

    @property
    def group(self) -> int:
        """Inputs that a kernel may quantize together."""
        return self.block[1] if self.layout == "block" else GROUP


def spread(layout: str, scale: torch.Tensor, n: int, k: int, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """A scale in the shape that multiplies a weight ``[N, K]``: ``[1, 1]``, ``[N, 1]`` or ``[N, K]``."""
    if layout == "block":
        return scale.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    return scale.reshape(-1, 1)


def make(
    scheme: Scheme, n: int, k: int, *, edges: bool = False, e5m2: bool = False, block: tuple[int, int] = BLOCK, seed: int = 1
) -> Operands:
    """Operands of a layer.

    Args:
        scheme: says how weights are scaled.
        n: outputs.
        k: inputs.
        edges: every FP8 code, ±448 and denormals among them, and a block and a channel of zeros, instead of ordinary weights.
        e5m2: weights in that format.
        block: rows and columns of a block, for block scales.
        seed: of the generator.
    """
    import torch

    dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    g = torch.Generator().manual_seed(seed)
    if edges:
        codes = torch.randint(0, 256, (n, k), generator=g, dtype=torch.int16).to(torch.uint8)
        weight = codes.view(dtype)
        weight = torch.where(torch.isfinite(weight.to(torch.float32)), weight.to(torch.float32), torch.tensor(LARGEST)).to(dtype)
        wide = weight.to(torch.float32)
        wide[: block[0], : block[1]] = 0
        wide[-1] = 0
        weight = wide.to(dtype)
    else:
        weight = (torch.randn(n, k, generator=g) * 60).clamp(-ORDINARY_LIMIT, ORDINARY_LIMIT).to(dtype)
    base = 1.0 / ((40 if edges else 15) * k**0.5)
    shape = {"tensor": (), "channel": (n,)}.get(scheme.weight, (-(-n // block[0]), -(-k // block[1])))
    scale = base * torch.exp2(torch.rand(shape, generator=g) * 3 - 1.5)
    return Operands(scheme, n, k, weight, scale.to(torch.float32), edges, block)


def activations(m: int, k: int, dtype: Any, *, edges: bool = False, group: int = GROUP, seed: int = 7) -> torch.Tensor:
    """Activations ``[M, K]`` on the CPU, exact in every dtype; with ``edges`` one row and one group are zero.

    Every ``group`` of inputs holds the largest value; larger groups, the whole row and the whole tensor then do too.
    """
    import torch

    g = torch.Generator().manual_seed(seed + m)
    x = (torch.randn(m, k, generator=g) * 112).clamp(-400, 400).to(torch.float8_e4m3fn).to(torch.float32)
    for start in range(0, k, group):
        width = min(group, k - start)
        at = start + torch.randint(0, width, (m, 1), generator=g)
        sign = torch.randint(0, 2, (m, 1), generator=g).to(torch.float32) * 2 - 1
        x.scatter_(1, at, sign * LARGEST)
    if edges and m > 5:
        x[3] = 0
        x[5, :group] = 0
    return (x * STEP).to(dtype)


def bias(n: int, dtype: Any) -> torch.Tensor:
    """A bias ``[N]`` of the size of the outputs, distinct for each of them."""
    import torch

    return torch.linspace(-4, 4, n).to(dtype)


def reference(operands: Operands, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and the size that each output is expected to have (for relative errors), both ``[M, N]``."""
    import torch

    weight = operands.weight.to(torch.float64) * spread(
        operands.layout, operands.scale.double(), operands.n, operands.k, operands.block
    )
    wide = x.to(torch.float64)
    wanted = wide @ weight.t()
    expected = wide.norm(dim=1, keepdim=True) * weight.norm(dim=1) / operands.k**0.5
    # An output that cancels is as exact as its operands' size allows; one that is zero by construction must be zero.
    floor = float(expected.square().mean().sqrt()) * 2.0**-10
    return wanted, torch.hypot(expected, wanted).clamp_min(max(floor, torch.finfo(torch.float64).tiny))
