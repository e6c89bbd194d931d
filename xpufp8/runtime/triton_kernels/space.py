"""The configurations that a kernel is tried in on each kind of target, and why these.

A target is known by the name of Triton's backend, never by the name of a card: a configuration that a card cannot take falls
out when it is compiled, and among the rest a measurement decides. Only what changes the compiled code is listed; how many parts K
is cut into is a run-time argument and costs no compilation.

Measured on an H200 (docs/performance.md): tiles of 128 rows of weights by two blocks' depth, activations a tile ahead, two programs a
multiprocessor. For M <= 8, rows stand on the right-hand side of the product (``swap``), because widened weights then go straight to the
left operand; of sixteen there Triton 3.6 would make Hopper's warp-group product, which spills. Smaller tiles are for layers that
would leave the device half empty. From 32 rows on a ``pair`` beats widening. For prompts two 64-row tiles a program at
four warps keep the FP8 matrix unit busiest (72 % of cycles), because two programs fit a multiprocessor and take turns.
For the Intel target the compiler's own output decides (docs/intel-triton.md): block loads, eight rows at least, and bit widening.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Tile:
    """One compiled form of a kernel."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    how: str = "fp16"
    """How FP8 is widened, in the words of ``widening.widen``; ``fp8`` where it is not."""
    swap: bool = False
    """Weights are the left operand."""
    ahead: bool = False
    """Activations are read a tile ahead and rounded to 16 bits as they are; rows that do not fit are found afterwards and done again.
    K tiles are shared out and begun with such that programs do not ask for the same memory at once."""
    stream: bool = False
    """All programs share all K tiles; otherwise each tile is cut into equal parts."""
    group: int = 8
    """Rows of tiles that are computed side by side (many rows only)."""

    @property
    def at_once(self) -> int:
        """Parts of a sum that a program may read at the same time: half of the registers hold them, where two programs share 65,536."""
        return max(1, min(8, 65536 // 4 // (self.m * self.n)))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the cache and for tables."""
        return asdict(self)


BUCKETS = (8, 16, 32, 64, 512, 4096)
"""Activation rows up to which one choice holds; the last one holds beyond."""
SMALL = 64
"""Rows that the decode kernel takes at most."""


def bucket(rows: int) -> int:
    """The bucket of a number of activation rows."""
    return next((b for b in BUCKETS if rows <= b), BUCKETS[-1])


def ways(backend: str, activation: str, weight: str, *, careful: bool) -> tuple[str, ...]:
    """How FP8 may be widened for a product.

    Args:
        backend: Triton's name of the target.
        activation: ``bfloat16`` or ``float16``.
        weight: ``float8_e4m3fn`` or ``float8_e5m2``.
        careful: weights hold a NaN, which bit widening would lose.
    """
    bits = weight == "float8_e4m3fn" and not careful
    if activation == "float16":
        return ("fp16-bits",) if bits and backend == "xpu" else ("fp16",)
    if backend == "xpu":
        return ("bf16-bits",) if bits else ("bf16",)
    if backend == "hip":
        return ("bf16",)
    # bfloat16 activations are fitted into fp16's range, because this target widens FP8 to fp16 in one instruction; or each is
    # given to the FP8 matrix unit as a sum of two FP8 numbers, and weights are not widened at all.
    return ("fp16", "pair") if weight == "float8_e4m3fn" else ("fp16",)


def small(backend: str, bucket_rows: int, how: str) -> list[Tile]:
    """Tiles of the decode kernel."""
    if backend == "interpreter":
        return [
            Tile(max(16, bucket_rows), 32, 64, 1, 1, how, swap=how == "pair", ahead=bucket_rows == 8, stream=bucket_rows == 16)
        ]
    if backend == "xpu":
        rows = max(8, bucket_rows)
        return [Tile(rows, 64, 128, 4, 3, how), Tile(rows, 128, 64, 8, 2, how), Tile(rows, 128, 64, 8, 2, how, stream=True)]
    if how == "pair":
        if bucket_rows < 32:
            return []
        return [
            Tile(bucket_rows, 256, 128, 8, 3, how, swap=True, ahead=bucket_rows == 32),
            Tile(bucket_rows, 128, 128, 8, 3, how, swap=True, ahead=True),
        ]
    if bucket_rows == 8:
        return [Tile(8, 128, 256, 8, 3, how, swap=True, ahead=True), Tile(8, 64, 128, 4, 3, how, swap=True)]
    if bucket_rows == 16:
        return [Tile(16, 128, 256, 4, 3, how, ahead=True), Tile(16, 128, 128, 4, 3, how), Tile(16, 64, 128, 2, 4, how)]
    return [Tile(bucket_rows, 128, 128, 4, 3, how), Tile(bucket_rows, 64, 128, 4, 3, how)]


def large(backend: str, how: str) -> list[Tile]:
    """Tiles of the W8A16 kernel for many rows. Twice the products of a pair would cost more there than widening does."""
    if how == "pair":
        return []
    if backend == "interpreter":
        return [Tile(32, 32, 64, 1, 1, how)]
    if backend == "xpu":
        return [Tile(64, 128, 32, 8, 2, how), Tile(128, 128, 32, 16, 2, how), Tile(256, 128, 32, 32, 2, how)]
    return [Tile(64, 128, 64, 4, 4, how), Tile(128, 128, 64, 8, 3, how)]


def large_w8a8(backend: str) -> list[Tile]:
    """Tiles of the W8A8 kernel; ``m`` is half of what a program computes."""
    if backend == "interpreter":
        return [Tile(16, 32, 64, 1, 1, "fp16")]
    return [
        Tile(64, 128, 128, 4, 3, "fp8"),
        Tile(64, 128, 128, 4, 3, "fp8", group=32),
        Tile(128, 128, 128, 8, 3, "fp8"),
    ]


def experts(backend: str, rows: int, how: str) -> list[Tile]:
    """Tiles of the grouped kernel, for an average of ``rows`` tokens an expert."""
    if backend == "interpreter":
        return [Tile(16, 32, 64, 1, 1, how)]
    m = 16 if rows <= 16 else 64
    if backend == "xpu":
        return [Tile(m, 64, 64, 4, 2, how), Tile(m, 128, 64, 8, 2, how)]
    return [Tile(m, 64, 128, 4, 3, how), Tile(m, 128, 128, 4, 3, how)]


def shares(units: int, tiles: int, depth: int, *, stream: bool) -> list[int]:
    """Parts to cut K into (or programs a compute unit, for ``stream``) that are worth a measurement.

    Args:
        units: compute units of the device.
        tiles: tiles of the output.
        depth: K tiles in each.
        stream: programs share everything evenly.
    """
    if stream:
        # Every program needs a K tile of its own.
        return [c for c in (2, 3, 4) if c * units <= tiles * depth] or [0]
    found = {min(max(c * units // tiles, 1), depth, 16) for c in (1, 2, 3, 4, 5, 6, 7)}
    return sorted(found)
