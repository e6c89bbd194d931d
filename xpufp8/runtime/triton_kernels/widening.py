# mypy: ignore-errors
# ruff: noqa: SIM108
# Triton compiles the source of these functions; they are not Python that runs. It has no types that mypy knows, and a branch on a
# compile-time value is clearest as a statement.
"""Pieces that every kernel here is made of: widening FP8, bringing activation rows into fp16's range, loading tiles.

All of it is plain Triton: no inline assembly, no descriptors, no layout that only one vendor has.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as cuda_only

# Releases have one way to describe blocks of memory or the other or both. A compiler looks up every name in a function, also in
# branches that are not taken, so what this release lacks is None here rather than a missing attribute there.
describe = None
if hasattr(tl, "make_tensor_descriptor"):

    @triton.jit
    def describe(ptr, R, C, stride, BR: tl.constexpr, BC: tl.constexpr):
        """Rows of memory ``[R, C]`` that are loaded ``[BR, BC]`` at a time; what lies outside reads as zero."""
        return tl.make_tensor_descriptor(ptr, [R, C], [stride, 1], [BR, BC])


block_at = advance = None
if hasattr(tl, "make_block_ptr") and hasattr(tl, "advance"):

    @triton.jit
    def block_at(ptr, R, C, stride, r, c, BR: tl.constexpr, BC: tl.constexpr):
        """The block ``[BR, BC]`` at row ``r`` and column ``c`` of memory ``[R, C]``."""
        return tl.make_block_ptr(ptr, (R, C), (stride, 1), (r, c), (BR, BC), (1, 0))

    @triton.jit
    def advance(block, r, c):
        """The block ``r`` rows and ``c`` columns on."""
        return tl.advance(block, (r, c))


# One vendor's way to start a kernel while the last one ends. Elsewhere nothing calls these.
start_next = getattr(cuda_only, "gdc_launch_dependents", None)
wait_for_last = getattr(cuda_only, "gdc_wait", None)


@triton.jit
def widen(w, HOW: tl.constexpr, PLAIN: tl.constexpr):
    """FP8 to 16 bits.

    ``fp16`` and ``bf16`` leave it to the compiler. ``bf16-bits`` and ``fp16-bits`` (e4m3fn only) move sign, exponent and mantissa
    to their places and correct the exponent's bias by an exact multiplication: on targets that convert FP8 in software this is
    a third of the code. Their NaN codes read as 480, so weights that hold a NaN are never given to them. ``pair`` leaves FP8 as it is.
    """
    if HOW == "bf16":
        wide = w.to(tl.bfloat16)
    elif HOW == "bf16-bits":
        b = w.to(tl.int8, bitcast=True).to(tl.int16)
        wide = ((b & -32768) | ((b << 4) & 0x07F0)).to(tl.bfloat16, bitcast=True)
        if PLAIN:
            # The interpreter multiplies bfloat16 as the integers that it keeps it in.
            wide = wide.to(tl.float32)
        wide = wide * 1.329227995784916e36  # 2^120
    elif HOW == "fp16-bits":
        b = w.to(tl.int8, bitcast=True).to(tl.int16)
        wide = ((b & -32768) | ((b << 7) & 0x3F80)).to(tl.float16, bitcast=True) * 256.0  # 2^8
    elif HOW == "pair":
        wide = w
    else:
        wide = w.to(tl.float16)
    return wide


@triton.jit
def _scale_rows(x, TOP: tl.constexpr):
    """Rows of a tile in float32, divided by a power of two each so that their largest elements land in ``[2^TOP, 2^(TOP + 1))``.

    Returns the quotients, the powers, and which rows hold an infinity.
    """
    wide = x.to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)
    exponent = peak.to(tl.int32, bitcast=True) & 0x7F800000
    lowered = exponent - (TOP << 23)
    inverse = (0x7F000000 - lowered).to(tl.float32, bitcast=True)
    return wide * inverse[:, None], lowered.to(tl.float32, bitcast=True), exponent == 0x7F800000


@triton.jit
def fit_rows(x):
    """Rows of a tile as fp16 with a power-of-two factor each: ``x ~ rows * factor``.

    The largest element of a row lands in [2^14, 2^15), so nothing overflows whatever the row's size, and what is lost is smaller
    than 2^-38 of it. Powers of two keep the eight bits of bfloat16 exact. A row with an infinity or a NaN stays not finite.
    """
    rows, factor, _ = _scale_rows(x, 14)
    return rows.to(tl.float16), factor


@triton.jit
def pair_rows(x):
    """Rows of a tile as sums of two e4m3fn numbers, with a power-of-two factor each: ``x ~ (high + low) * factor``.

    The largest element of a row lands in [2^7, 2^8). bfloat16 has eight bits and e4m3fn four: ``high`` is the upper four, cut off, and
    ``low`` holds exactly what that leaves. Where elements are smaller than 2^-9 of the row's largest, up to 2^-16 of the largest is
    lost. Weights then go to an FP8 matrix unit as they are, twice, and nothing of them is converted. The factor of a row with an
    infinity is infinite, since e4m3fn has none.
    """
    rows, factor, infinite = _scale_rows(x, 7)
    upper = (rows.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)
    return upper.to(tl.float8e4nv), (rows - upper).to(tl.float8e4nv), tl.where(infinite, float("inf"), factor)


@triton.jit
def dot(a, b, PLAIN: tl.constexpr):
    """Matrix product in float32. ``PLAIN`` is for Triton's interpreter, which has no bfloat16 product."""
    if PLAIN:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b)
    return product


@triton.jit
def dot_of_pair(a, high, low, PLAIN: tl.constexpr):
    """``a @ high + a @ low`` in float32."""
    if PLAIN:
        product = tl.dot(a.to(tl.float32), high.to(tl.float32) + low.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, low, tl.dot(a, high))
    return product


@triton.jit
def grouped(pid, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Tile of a program, ``GROUP`` rows of tiles at a time, so that neighbours share what they read."""
    columns = tl.cdiv(N, BN)
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(tl.cdiv(M, BM) - first, GROUP)
    inside = pid % (GROUP * columns)
    return first + inside % height, inside // height
