"""The linear candidates: one custom op that picks the kernel by the number of activation rows, and what prepares a layer for it.

The op's arguments carry all that the kernels need, so it has no state of its own and traces with symbolic rows. What was tuned for a
layer's shape is looked up by that shape.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xpufp8.runtime.candidates import Prepared
from xpufp8.runtime.problem import Problem, scale_to_float, spread_scale
from xpufp8.runtime.triton_kernels import backend, launch, space, tuning, vendor

if TYPE_CHECKING:
    import torch

WIDEN = {"kernel": "widen-then-matmul"}
"""Answer of the tuning that stands for dequantizing into scratch memory and calling the device's own matmul."""
VENDOR = {"kernel": "vendor-fp8"}
"""Answer that stands for rounding activations to FP8 and calling the vendor's FP8 product."""
_plans: dict[str, dict[int, dict[str, Any]]] = {}


@dataclass(frozen=True)
class Layer:
    """What the op is told of a layer beside its tensors."""

    layout: str
    group_n: int
    """Rows of a block; 1 where the scale is no block scale."""
    group_k: int
    quantize: bool
    """Round activations to FP8 where there are many rows."""
    careful: bool
    """The weight holds a NaN."""

    def key(self, x: torch.Tensor, weight: torch.Tensor) -> str:
        """Text that is equal for layers that share a plan."""
        n, k = weight.shape
        order = "columns" if is_columns(weight) else "rows"
        kind = f"{self.layout}{self.group_n}x{self.group_k}{'-w8a8' if self.quantize else ''}{'-careful' if self.careful else ''}"
        return f"{kind}|{n}x{k}|{order}|{weight.dtype}|{x.dtype}"


def is_columns(weight: torch.Tensor) -> bool:
    """True for a weight ``[N, K]`` that lies in memory as ``[K, N]``."""
    return bool(weight.stride(0) == 1 and weight.stride(1) != 1)


def flat_scale(problem: Problem, scale: torch.Tensor) -> torch.Tensor:
    """The scale as the kernels read it: float32, contiguous, ``[1]``, ``[N]`` or ``[ceil(N/bn), ceil(K/bk)]``.

    Raises:
        ValueError: it has another number of elements than its layout says.
    """
    spread_scale(problem, scale[:0].new_ones(scale.shape) if scale.device.type == "meta" else scale)
    scale = scale_to_float(scale)
    return scale.contiguous() if problem.layout == "block" else scale.reshape(-1).contiguous()


def has_nan(weight: torch.Tensor) -> bool:
    """True where an e4m3fn weight has a NaN code."""
    import torch

    if weight.dtype != torch.float8_e4m3fn:
        return False
    return bool(((weight.view(torch.uint8) & 0x7F) == 0x7F).any())


Way = tuple[dict[str, Any], Any]
"""``(name, run(x, weight, scale, bias))``."""


def candidates_for(layer: Layer, x: torch.Tensor, weight: torch.Tensor) -> tuple[Way, ...]:
    """Every way to compute ``x``, in order of preference."""
    n, k = weight.shape
    return _ways(layer, backend() or "", space.bucket(x.shape[0]), n, k, is_columns(weight), x.dtype, weight.dtype, x.device)


@functools.cache
def _ways(
    layer: Layer, name: str, bucket: int, n: int, k: int, columns: bool, activation: Any, weight: Any, device: Any
) -> tuple[Way, ...]:  # fmt: skip
    """What ``candidates_for`` says. Kept, because the op asks at every call."""
    import torch

    # A tile as deep as a block has one scale; the decode kernel alone can take a deeper one.
    # Scales that are multiplied into float16 activations cost them a bit of their eleven, so those keep to one block a tile.
    depth = layer.group_k if layer.layout == "block" and (layer.group_k < 128 or activation == torch.float16) else 0
    dtypes = str(activation).removeprefix("torch."), str(weight).removeprefix("torch.")
    found: list[Way] = []
    for how in space.ways(name, *dtypes, careful=layer.careful):
        if how == "pair" and columns:
            continue  # Weights are its left operand, which lies by rows.
        if bucket <= space.SMALL:
            for tile in space.small(name, bucket, how):
                # Scales that are multiplied into the activations must be the same for all rows of weights in a tile.
                limit = depth or (layer.group_k if layer.layout == "block" and layer.group_n % tile.n else 0)
                if limit and tile.k > limit:
                    tile = dataclasses.replace(tile, k=limit)
                for share in space.shares(tuning.units(device), -(-n // tile.n), -(-k // tile.k), stream=tile.stream):
                    call = functools.partial(launch.small, layer, tile, share)
                    found.append(({"kernel": "small", "share": share, **tile.as_dict()}, call))
        else:
            for tile in space.large(name, how):
                if depth and tile.k > depth:
                    tile = dataclasses.replace(tile, k=depth)
                if layer.layout == "block" and layer.group_n % tile.n:
                    continue
                found.append(({"kernel": "large", **tile.as_dict()}, functools.partial(launch.large, layer, tile)))
    if layer.quantize and bucket > space.SMALL:
        for tile in space.large_w8a8(name):
            if layer.layout == "block" and (layer.group_n % tile.n or layer.group_k % tile.k):
                continue
            found.append(({"kernel": "w8a8", **tile.as_dict()}, functools.partial(launch.large_w8a8, layer, tile)))
    if layer.quantize and bucket >= vendor.LEAST_ROWS and vendor.takes(layer, n, k):
        found.append((VENDOR, functools.partial(vendor.product, layer)))
    if bucket > space.SMALL or not found:
        found.append((WIDEN, functools.partial(launch.widen_then_matmul, layer)))
    unique = {str(entry[0]): entry for entry in found}
    return tuple(unique.values())


def _reference(layer: Layer, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
    """``error(out)``: relative error of some columns of an output, against float32 on the same device."""
    import torch

    n, k = weight.shape
    columns = torch.linspace(0, n - 1, min(n, 64), dtype=torch.float64).round().to(torch.int64).to(x.device)
    block = (layer.group_n, layer.group_k) if layer.layout == "block" else None
    flat = scale.cpu()
    picked = columns.cpu()
    spread = flat[picked // layer.group_n].repeat_interleave(layer.group_k, 1)[:, :k] if block else flat.reshape(-1, 1)
    if layer.layout == "channel":
        spread = spread[picked]
    plain = weight.view(torch.uint8)[columns].view(weight.dtype).to(torch.float32) * spread.to(x.device)
    usable = torch.isfinite(plain).all(dim=1)
    columns, plain = columns[usable], plain[usable]
    wanted = x.to(torch.float32) @ plain.t()

    def error(out: torch.Tensor) -> float:
        if not len(columns):
            return 0.0
        got = out[:, columns].to(torch.float32)
        return float((got - wanted).norm() / wanted.norm().clamp_min(1e-30))

    return error


def plan(layer: Layer, weight: torch.Tensor, scale: torch.Tensor, dtype: Any) -> None:
    """Choose a kernel for every number of rows, on the device."""
    import torch

    generator = torch.Generator().manual_seed(0)
    probe = torch.empty(1, weight.shape[1], dtype=dtype, device=weight.device)
    key = layer.key(probe, weight)
    if key in _plans:
        return
    answers: dict[int, dict[str, Any]] = {}
    for bucket in space.BUCKETS[:4] if backend() == "interpreter" else space.BUCKETS:
        rows = 1 if bucket == space.BUCKETS[0] else min(bucket, 2048)
        x = torch.randn(rows, weight.shape[1], generator=generator, device="cpu").to(dtype).to(weight.device)
        found = candidates_for(layer, x, weight)
        trials = [tuning.Trial(name, functools.partial(call, x, weight, scale, None)) for name, call in found]
        answers[bucket] = tuning.best(weight.device, f"{key}|{bucket}", trials, _reference(layer, x, weight, scale))
    tuning.release(weight.device)
    _plans[key] = answers


def chosen(layer: Layer, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Any]:
    """The name of what was chosen for a layer and a number of rows; empty before ``plan``."""
    return _plans.get(layer.key(x, weight), {}).get(space.bucket(x.shape[0]), {})


def forward(layer: Layer, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``x [M, K] @ dequantized(weight).T + bias`` by what was chosen for M rows."""
    if x.shape[0] == 0:
        return x.new_empty((0, weight.shape[0]))
    found = candidates_for(layer, x, weight)
    answer = chosen(layer, x, weight)
    call = next((call for name, call in found if name == answer), found[0][1])
    result: torch.Tensor = call(x, weight, scale, bias)
    return result


@functools.cache
def op() -> Any:
    """Define the custom op once: ``xpufp8::triton_linear(x [..., K], weight, scale, bias?, …) -> [..., N]``."""
    import torch

    library = torch.library.Library("xpufp8", "FRAGMENT")
    library.define(
        "triton_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias, str layout, int group_n, int group_k, "
        "bool quantize, bool careful) -> Tensor"
    )

    def run(
        x: Any, weight: Any, scale: Any, bias: Any, layout: str, group_n: int, group_k: int, quantize: bool, careful: bool
    ) -> Any:
        layer = Layer(layout, group_n, group_k, quantize, careful)
        flat = x.reshape(-1, x.shape[-1])
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        return forward(layer, flat, weight, scale, bias).view(*x.shape[:-1], weight.shape[0])

    def fake(x: Any, weight: Any, *_: Any) -> Any:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    library.impl("triton_linear", run, "CompositeExplicitAutograd")
    torch.library.register_fake("xpufp8::triton_linear", fake, lib=library)
    # The library object unregisters its ops when it dies.
    op.library = library  # type: ignore[attr-defined]  # kept alive on the function that makes it
    return torch.ops.xpufp8.triton_linear.default


def prepare(problem: Problem, weight: torch.Tensor, scale: torch.Tensor, *, quantize: bool, columns: bool) -> Prepared:
    """Bring a layer into a kernel's form and tune it.

    Args:
        problem: the layer.
        weight: ``[N, K]``, FP8.
        scale: in the layout's shape.
        quantize: round activations to FP8 where there are many rows.
        columns: keep the weight as ``[K, N]``.

    Raises:
        RuntimeError: no configuration of a kernel is right on this device.
        ValueError: the scale does not fit its layout.
    """
    import torch

    call = op()
    flat = flat_scale(problem, scale)
    if columns:
        # Copied as bytes: not every device copies FP8 by strides.
        weight = weight.view(torch.uint8).t().contiguous().view(weight.dtype).t()
    elif weight.stride(1) != 1:
        weight = weight.view(torch.uint8).contiguous().view(weight.dtype)
    group_n, group_k = (problem.block or (1, 1)) if problem.layout == "block" else (1, 1)
    layer = Layer(problem.layout, group_n, group_k, quantize, has_nan(weight))
    plan(layer, weight, flat, problem.dtype)
    shape = scale.shape

    def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        scale = scale if layer.layout == "block" else scale.reshape(-1)
        result: torch.Tensor = call(
            x, weight, scale, bias, layer.layout, layer.group_n, layer.group_k, layer.quantize, layer.careful
        )
        return result

    return Prepared(weight, flat.view(shape), run)
