"""Which wrong reading of the operands gives what a kernel gave: scales misrouted, another FP8 format, a bias left out.

Each reading is an own float64 product of a sample of columns; the kernel's output is compared with all of them. A reading that
gives the right product here (a single block, a scale of one) is left out, because it would explain nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from probes.device_facts import ConfusionFact
from probes.device_operands import BLOCK, STEP, Operands, spread

if TYPE_CHECKING:
    import torch

SAMPLE = 256
"""Columns that are compared, spread over all."""
MATCH = 2.0**-5
"""Relative error up to which a reading counts as the one that the kernel made."""
FORMATS = ("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8")


def explain(operands: Operands, x: torch.Tensor, bias: torch.Tensor | None, got: torch.Tensor) -> list[ConfusionFact]:
    """Readings that give the output, best first; none where nothing does.

    Args:
        operands: of the layer.
        x: ``[M, K]`` activations, on the CPU.
        bias: ``[N]`` or None.
        got: ``[M, N]`` float64, what the kernel gave.
    """
    import torch

    picked = torch.linspace(0, operands.n - 1, min(SAMPLE, operands.n), dtype=torch.float64).round().to(torch.int64)
    seen = got[:, picked]
    wide = x.to(torch.float64)
    right = wide @ (_values(operands, picked) * _scale(operands)[picked if operands.layout != "tensor" else slice(None)]).t()
    added = bias.to(torch.float64)[picked] if bias is not None else torch.zeros(len(picked), dtype=torch.float64)
    found = []
    for kind, name, product in _readings(operands, wide, picked, right):
        reading = product if kind == "bias" else product + added
        if _error(reading, right + added) < MATCH:
            continue  # it is the right product: nothing tells them apart here
        error = _error(seen, reading)
        if error <= MATCH:
            found.append(ConfusionFact(kind, name, error))
    return sorted(found, key=lambda one: one.error) or _factor(seen - added, right)


def _error(got: torch.Tensor, reading: torch.Tensor) -> float:
    """Relative distance over what is finite in both. A reading with values that the output dtype cannot hold is no match."""
    import torch

    both = torch.isfinite(got) & torch.isfinite(reading)
    if int(both.sum()) < max(1, both.numel() // 4) or not torch.equal(torch.isfinite(got), torch.isfinite(reading)):
        return float("inf")
    norm = float(reading[both].norm())
    return float((got[both] - reading[both]).norm()) / norm if norm else float("inf")


def _values(operands: Operands, rows: torch.Tensor, dtype: Any = None) -> torch.Tensor:
    """Rows of the weight in float64, its bytes read as ``dtype``."""
    import torch

    raw = operands.weight.view(torch.uint8)[rows]
    return raw.view(dtype or operands.weight.dtype).to(torch.float64)


def _scale(operands: Operands, scale: torch.Tensor | None = None) -> torch.Tensor:
    return spread(operands.layout, (operands.scale if scale is None else scale).double(), operands.n, operands.k, operands.block)


def _readings(
    operands: Operands, x: torch.Tensor, picked: torch.Tensor, right: torch.Tensor
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind, name, product ``[M, sample]``) of each wrong reading."""
    import torch

    own = str(operands.weight.dtype).removeprefix("torch.")
    rows: Any = picked if operands.layout != "tensor" else slice(None)
    scale = _scale(operands)[rows]
    values = _values(operands, picked)
    for name in FORMATS:
        kind = getattr(torch, name, None)
        if kind is not None and name != own:
            read = name.removeprefix("float8_")
            yield (
                "format",
                f"weights read as {read} instead of {own.removeprefix('float8_')}",
                x @ (_values(operands, picked, kind) * scale).t(),
            )
    for name, other in _scales(operands):
        yield "scale", name, x @ (values * other[picked if other.shape[0] > 1 else slice(None)]).t()
    yield "activation", "the activation scale left out", right / STEP
    yield "activation", "the activation scale applied twice", right * STEP
    if operands.n == operands.k:
        turned = operands.weight.to(torch.float64).t()[picked]
        yield "layout", "the weight transposed", x @ (turned * scale).t()
    group = operands.group
    if operands.k > group:
        end = operands.k - (operands.k % group or group)
        yield "layout", "the last group of K left out", x[:, :end] @ (values * scale.expand(len(picked), operands.k))[:, :end].t()
        yield (
            "layout",
            "only the first group of K multiplied",
            x[:, :group] @ (values * scale.expand(len(picked), operands.k))[:, :group].t(),
        )
    shifted = (picked + 1) % operands.n
    yield (
        "layout",
        "each column holds the next one's result",
        x @ (_values(operands, shifted) * _scale(operands)[shifted if operands.layout != "tensor" else slice(None)]).t(),
    )
    yield "bias", "the bias left out", right


def _scales(operands: Operands) -> Iterator[tuple[str, torch.Tensor]]:
    """Wrong weight scales, in the shape that multiplies ``[N, K]``."""
    import torch

    scale = operands.scale.double()
    one = torch.ones(1, 1, dtype=torch.float64)
    yield "weight scales left out", one
    yield "weights divided by their scales", _scale(operands, scale.reciprocal())
    if operands.layout == "channel":
        n = operands.n
        for shift, name in ((1, "each channel takes its neighbour's scale"), (-1, "each channel takes its neighbour's scale")):
            yield name, scale.roll(shift).reshape(-1, 1)
        yield "channel scales in reverse order", scale.flip(0).reshape(-1, 1)
        yield "the first channel's scale for all", scale[:1].reshape(1, 1)
        yield "the mean of the channel scales for all", scale.mean().reshape(1, 1)
        yield "the largest channel scale for all", scale.max().reshape(1, 1)
        yield "halves of the channel scales exchanged (merged projections)", scale.roll(n // 2).reshape(-1, 1)
        if n >= operands.k:
            yield "channel scales applied along K", scale[: operands.k].reshape(1, -1)
    elif operands.layout == "block":
        if operands.block != BLOCK and scale.shape[0] * BLOCK[0] >= operands.n and scale.shape[1] * BLOCK[1] >= operands.k:
            name = f"blocks of {operands.block[0]}x{operands.block[1]} taken for blocks of {BLOCK[0]}x{BLOCK[1]}"
            yield name, spread("block", scale, operands.n, operands.k)
        yield from ((name, spread("block", other, operands.n, operands.k, operands.block)) for name, other in _blocks(scale))


def _blocks(scale: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Wrong tables of block scales, in the right shape."""
    down, right = scale.shape
    yield "block scales transposed", scale.t().contiguous().reshape(down, right)
    yield "block scales read in column order", scale.reshape(right, down).t()
    yield "each block takes the scale of the block below", scale.roll(-1, 0)
    yield "each block takes the scale of the block above", scale.roll(1, 0)
    yield "each block takes the scale of the block to its right", scale.roll(-1, 1)
    yield "each block takes the scale of the block to its left", scale.roll(1, 1)
    yield "one scale for a whole row of blocks (block scales taken for channel scales)", scale[:, :1].expand(down, right)
    yield "one scale for a whole column of blocks (a [1, N] scale taken for blocks)", scale[:1].expand(down, right)
    yield "the first block's scale for all", scale[:1, :1].expand(down, right)
    yield "halves of the block scales exchanged (merged projections)", scale.roll(down // 2, 0)
    yield "rows of block scales in reverse order", scale.flip(0)


def _factor(got: torch.Tensor, right: torch.Tensor) -> list[ConfusionFact]:
    """A constant factor that makes the output right."""
    import torch

    finite = torch.isfinite(got)
    if not finite.all():
        return []
    factor = float((got * right).sum() / right.square().sum())
    if abs(factor) < 1e-9 or abs(factor - 1) < MATCH:
        return []
    error = _error(got / factor, right)
    return [ConfusionFact("factor", f"every output is {factor:.4g} times what it should be", error)] if error <= MATCH else []
