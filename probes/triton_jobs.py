"""The configurations in which this project's Triton kernels are compiled for an Intel GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from probes.triton_compiler import Job

SOURCE = "xpufp8"
SCALES = ("block", "channel", "tensor")
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
"""Triton's names of dtypes."""
DTYPES = tuple((activation, weight) for weight in ("float8_e4m3fn", "float8_e5m2") for activation in ("bfloat16", "float16"))
EVEN = (8192, 8192)
RAGGED = (8208, 8200)


@dataclass(frozen=True)
class Form:
    """What the compiled code of a linear kernel depends on, beside its tile."""

    activation: str
    weight: str
    how: str
    """How FP8 is widened (``space.ways``)."""
    columns: str
    """``block`` where weights lie as ``[K, N]``, empty where as ``[N, K]``."""
    scale: str
    n: int
    k: int
    block: tuple[int, int] = (128, 128)

    @property
    def even(self) -> bool:
        """True where a launch can say that sizes and strides are multiples of 16."""
        return self.n % 16 == 0 and self.k % 16 == 0

    @property
    def aligned(self) -> tuple[str, ...]:
        """Arguments that a launch says are multiples of 16."""
        return ("x_ptr", "w_ptr", "s_ptr", "b_ptr", "o_ptr", *(("N", "K", "stride_xm", "stride_w") if self.even else ()))

    @property
    def text(self) -> str:
        """In words, for tables."""
        order = "columns" if self.columns else "rows"
        ragged = "" if self.even else ", ragged"
        return f"{SHORT[self.activation]} x {SHORT[self.weight]}, {self.how}, {order}, {self.scale} scale{ragged}"

    def constants(self, tile: Any) -> dict[str, Any]:
        """The kernel's compile-time arguments."""
        group = self.block if self.scale == "block" else (1, 1)
        return {
            "BM": tile.m, "BN": tile.n, "BK": tile.k, "SCALE": self.scale, "GN": group[0], "GK": group[1], "HOW": self.how,
            "COLUMNS": self.columns, "BIAS": True, "EVEN_N": self.n % tile.n == 0, "EVEN_K": self.k % tile.k == 0, "PLAIN": False,
        }  # fmt: skip

    def signature(self) -> dict[str, str]:
        """Types of the arguments that are not constants."""
        short, fp8 = f"*{SHORT[self.activation]}", f"*{SHORT[self.weight]}"
        pointers = {"x_ptr": short, "w_ptr": fp8, "s_ptr": "*fp32", "b_ptr": short, "o_ptr": short, "part_ptr": "*fp32"}
        pointers |= {"count_ptr": "*i32", "share_ptr": "*fp32", "order_ptr": "*i32", "owner_ptr": "*i32"}
        numbers = (
            "M",
            "N",
            "K",
            "slots",
            "top_k",
            "split",
            "stride_xm",
            "stride_w",
            "stride_we",
            "stride_sn",
            "stride_s0",
            "stride_s1",
        )
        return {**pointers, **dict.fromkeys(numbers, "i32")}


def _said(tile: Any, form: Form) -> str:
    return f"{tile.m}x{tile.n}x{tile.k}, {tile.warps} warps{', stream' if tile.stream else ''}; {form.text}"


def decode(tile: Any, form: Form) -> Job:
    """The decode kernel with one tile, of any target's space."""
    from xpufp8.runtime.triton_kernels.small import w8a16_small

    fit = tile.how == "fp16" and form.activation == "bfloat16"
    constants = {
        **form.constants(tile),
        "FIT": fit,
        "SWAP": tile.swap,
        "AHEAD": tile.ahead,
        "EARLY": False,
        "ONCE": tile.at_once,
        "STREAM": tile.stream,
    }
    at = (*form.aligned, "part_ptr", "count_ptr")
    return Job(SOURCE, "w8a16_small", w8a16_small, form.signature(), constants, tile.warps, tile.stages, at, _said(tile, form))


def linear(form: Form, buckets: tuple[int, ...]) -> Iterator[Job]:
    """The decode kernel for each bucket of rows, and the kernel for many rows, with every tile of the XPU's space."""
    from xpufp8.runtime.triton_kernels import space
    from xpufp8.runtime.triton_kernels.large import w8a16_large

    for bucket in buckets:
        for tile in space.small("xpu", bucket, form.how):
            yield decode(tile, form)
    for tile in space.large("xpu", form.how):
        constants = {**form.constants(tile), "GROUP": tile.group, "f_ptr": None}
        yield Job(
            SOURCE,
            "w8a16_large",
            w8a16_large,
            form.signature(),
            constants,
            tile.warps,
            tile.stages,
            form.aligned,
            _said(tile, form),
        )


def experts(form: Form) -> Iterator[Job]:
    """The grouped kernel, whose weights always lie as ``[N, K]``."""
    from xpufp8.runtime.triton_kernels import space
    from xpufp8.runtime.triton_kernels.grouped import w8a16_grouped

    at = (*(a for a in form.aligned if a != "b_ptr"), "order_ptr", "owner_ptr", *(("stride_we",) if form.even else ()))
    for rows in (1, 64):
        for tile in space.experts("xpu", rows, form.how):
            constants = {**form.constants(tile), "FIT": False, "SHARES": True}
            del constants["COLUMNS"]
            yield Job(
                SOURCE,
                "w8a16_grouped",
                w8a16_grouped,
                form.signature(),
                constants,
                tile.warps,
                tile.stages,
                at,
                _said(tile, form),
            )


def _helpers(signature: dict[str, str]) -> Iterator[Job]:
    """Kernels without products."""
    from xpufp8.runtime.triton_kernels.large import fit_activations, widen_weight

    constants: dict[str, Any] = {"BN": 64, "BK": 128, "SCALE": "block", "GN": 128, "GK": 128}
    at: tuple[str, ...] = ("w_ptr", "s_ptr", "o_ptr", "N", "K", "stride_w")
    text = "64x128, 4 warps; bf16 from fp8e4nv, block scale"
    yield Job(SOURCE, "widen_weight", widen_weight, signature, constants, 4, 2, at, text)
    constants = {"LIMIT": 16384.0, "POWER": True, "B": 4096}
    typed, at = {**signature, "q_ptr": "*fp16", "f_ptr": "*fp32"}, ("x_ptr", "q_ptr", "K", "stride_xm")
    yield Job(SOURCE, "fit_activations", fit_activations, typed, constants, 8, 2, at, "rows of 4096, 8 warps; bf16 to fp16")


def our_jobs(*, thorough: bool) -> Iterator[Job]:
    """Every kernel in every configuration that can be chosen on an XPU.

    Args:
        thorough: ragged sizes, careful widening and every scale layout for every tile; otherwise those of even sizes and blocks, and each
            of the rest once.
    """
    from xpufp8.runtime.triton_kernels import space

    for activation, weight in DTYPES:
        hows = {how for careful in (False, True) for how in space.ways("xpu", activation, weight, careful=careful)}
        usual = space.ways("xpu", activation, weight, careful=False)[0]
        first = (activation, weight) == DTYPES[0]
        forms = [
            Form(activation, weight, how, columns, scale, *size)
            for how in sorted(hows)
            for columns in ("block", "")
            for scale in SCALES
            for size in (EVEN, RAGGED)
            if thorough
            or (how == usual and (scale, size) == ("block", EVEN))
            or (how == usual and first and "block" in (scale, columns))
        ]
        for form in forms:
            whole = thorough or (first and (form.scale, form.n) == ("block", EVEN[0]))
            yield from linear(form, space.BUCKETS[:4] if whole else (16,))
            if not form.columns:
                yield from experts(form)
        if first:
            yield from _helpers(forms[0].signature())


def layer_jobs(activation: str, scale: str, block: tuple[int, int], shapes: list[tuple[int, int]], *, moe: bool) -> Iterator[Job]:
    """The kernels that layers of a model may be given, at their shapes; what compiles to the same code is compiled once.

    Args:
        activation: the model's dtype.
        scale: block, channel or tensor.
        block: rows and columns of a block.
        shapes: ``[N, K]`` of each layer on one rank.
        moe: experts instead of linear layers.
    """
    from xpufp8.runtime.triton_kernels import space

    seen: set[str] = set()
    how = space.ways("xpu", activation, "float8_e4m3fn", careful=False)[0]
    for n, k in shapes:
        for columns in ("",) if moe else ("block", ""):
            form = Form(activation, "float8_e4m3fn", how, columns, scale, n, k, block)
            for job in experts(form) if moe else linear(form, space.BUCKETS[:4]):
                same = repr((job.name, job.constants, job.aligned, job.warps, job.stages))
                if same not in seen:
                    seen.add(same)
                    job.text += f"; [{n}, {k}]"
                    yield job
