"""What the tests of the Triton kernels run in a child process, where Triton's interpreter is on from the first import.

    TRITON_INTERPRET=1 python tests/runtime/triton_cases.py [GROUP…]     (or, on a GPU: XPUFP8_CASES_DEVICE=cuda)

Prints one JSON object a line: ``{"group": …, "case": …, …}``. Errors are relative by norm; ``plain`` is that of widening the same
operands to the activation dtype and multiplying in torch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import sys
from typing import Any

import torch

from xpufp8.runtime import choice, expert_choice
from xpufp8.runtime.experts import TRITON, ExpertCall, plain_forward, problem_of
from xpufp8.runtime.problem import Problem, exact
from xpufp8.runtime.triton_kernels import experts, experts_forward, launch, linear, linear_candidates, space, vendor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = os.environ.get("XPUFP8_CASES_DEVICE", "cpu")
ROWS = (1, 3, 16, 17, 64)
WAYS = (("fp16", torch.bfloat16), ("fp16", torch.float16), ("bf16", torch.bfloat16), ("bf16-bits", torch.bfloat16),
        ("fp16-bits", torch.float16))  # fmt: skip


_group = ""


def say(**facts: Any) -> None:
    print(json.dumps({"group": _group, **facts}), flush=True)


def norm_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double().cpu() - wanted.cpu()).norm() / wanted.cpu().norm())


def make(layout: str, n: int, k: int, dtype: Any, weight_dtype: Any, block: tuple[int, int] | None) -> tuple[Problem, Any, Any]:
    problem = Problem(layout, "dynamic-token", n, k, dtype, weight_dtype, block)
    limit = torch.finfo(weight_dtype).max
    weight = (torch.randn(n, k) * limit / 6).clamp(-limit, limit).to(weight_dtype)
    shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // (block or (1, 1))[0]), -(-k // (block or (1, 1))[1]))}[layout]
    # Scales far apart, so that one taken for another cannot pass.
    return problem, weight, torch.exp2(torch.randint(-12, -2, shape).float()) * (1 + torch.rand(shape))


def layer_of(problem: Problem, weight: Any, *, quantize: bool = False) -> linear.Layer:
    block = problem.block if problem.layout == "block" else None
    return linear.Layer(problem.layout, *(block or (1, 1)), quantize, linear.has_nan(weight))


def compare(case: str, problem: Problem, weight: Any, scale: Any, run: Any, x: Any, bias: Any, **more: Any) -> None:
    wide = exact(problem, weight, scale, torch.arange(problem.n))
    here, added = x.cpu(), 0 if bias is None else bias.cpu().double()
    wanted = here.double() @ wide.t() + added
    plain = (here.float() @ wide.to(problem.dtype).float().t() + added).to(problem.dtype)
    out = run(x, bias)
    say(case=case, rows=len(x), error=norm_error(out, wanted), plain=norm_error(plain, wanted),
        again=bool(torch.equal(out, run(x, bias))), dtype=str(out.dtype), shape=list(out.shape), **more)  # fmt: skip


def _call(call: Any, weight: Any, flat: Any, x: Any, bias: Any) -> Any:
    return call(x, weight, flat, bias)


def compare_rounded(case: str, problem: Problem, weight: Any, scale: Any, x: Any, groups: int, out: Any, bias: Any) -> None:
    """Compare with float64 of rounded activations, which have one scale a row, or one in ``groups`` along K."""
    if groups:
        quotient, factor = launch.fit_groups(x)
        rounded = (quotient.double() * factor.double().repeat_interleave(groups, 1)).cpu()[: len(x)]
    else:
        quotient, factor = launch.fit(x, E4M3, 448.0, power=False)
        rounded = (quotient.double() * factor.double()[:, None]).cpu()
    wide = exact(problem, weight, scale, torch.arange(problem.n))
    wanted = rounded @ wide.t() + bias.cpu().double()
    plain = (rounded.bfloat16().float() @ wide.bfloat16().float().t() + bias.cpu().float()).bfloat16()
    say(case=case, rows=len(x), error=norm_error(out, wanted), plain=norm_error(plain, wanted), again=True,
        rounding=norm_error(rounded, x.cpu().double()), dtype=str(out.dtype), shape=list(out.shape))  # fmt: skip


def linear_cases() -> None:
    """Both orders, all scale layouts, both FP8 types, both activation types, ragged sizes, bias, few and many rows."""
    kinds = [("block", (32, 32)), ("block", (48, 128)), ("channel", None), ("tensor", None)]
    dtypes = ((torch.bfloat16, E4M3), (torch.float16, E4M3), (torch.bfloat16, E5M2), (torch.float16, E5M2))
    for (layout, block), (dtype, weight_dtype), columns in itertools.product(kinds, dtypes, (False, True)):
        if columns and DEVICE == "cuda":
            continue
        n, k = (48, 136) if columns else (45, 131)
        problem, weight, scale = make(layout, n, k, dtype, weight_dtype, block)
        flat = linear.flat_scale(problem, scale)
        kept = weight.view(torch.uint8).t().contiguous().view(weight_dtype).t() if columns else weight
        layer = layer_of(problem, weight)
        usual = (dtype, weight_dtype) == dtypes[0]
        if columns and not usual:
            continue
        for rows in (*ROWS, 70) if usual and block == (32, 32) else (17, 70) if usual else (3,):
            bias = torch.randn(n).to(dtype) if rows % 2 else None
            x = torch.randn(rows, k).to(dtype)
            found = linear.candidates_for(layer, x, kept)
            for name, call in found[-2:] if usual else found[:1]:
                order = "columns" if columns else "rows"
                title = f"{layout}{block or ''} {dtype} {weight_dtype} {order} {name['kernel']} {name.get('share', '')}"
                run = functools.partial(_call, call, kept, flat)
                compare(title, problem, weight, scale, run, x, bias, kernel=name["kernel"])


def tile_cases() -> None:
    """Forms that other targets choose: swapped, deep, streamed, every way of widening."""
    for layout, (how, dtype), swap, stream in itertools.product(
        ("block", "channel"), WAYS, (False, True), (False, True)
    ):  # fmt: skip
        if swap and how.endswith("bits"):
            continue
        problem, weight, scale = make(layout, 40, 320, dtype, E4M3, (64, 64) if layout == "block" else None)
        flat, layer = linear.flat_scale(problem, scale), layer_of(problem, weight)
        for depth in (64, 128) if (layout, how, dtype) == ("block", "fp16", torch.bfloat16) else (64,):
            tile = space.Tile(16, 32, depth, 1, 1, how, swap=swap, stream=stream)
            x, bias = torch.randn(5, 320).to(dtype), torch.randn(40).to(dtype)
            for share in (1, 3) if layout == "block" else (3,):
                title = f"{layout} {how} depth {depth} swap {swap} stream {stream} share {share}"
                call = functools.partial(launch.small, layer, tile, share)
                compare(title, problem, weight, scale, functools.partial(_call, call, weight, flat), x, bias)
    for layout, how, stream, depth, swap in itertools.product(
        ("block", "channel", "tensor"), ("pair", "fp16", "bf16"), (False, True), (64, 128, 256), (False, True)
    ):
        # Scales in the activations cost those of eight bits some of them; no target is given that form.
        if (
            (depth > 64 and (how, layout, stream) != ("fp16", "block", False))
            or (how == "pair" and not swap)
            or (stream and swap)
        ):
            continue
        # 40 rows of weights in tiles of 32, tiles as deep as several blocks, a last K tile that is not full, parts that are not equal.
        problem, weight, scale = make(layout, 40, 584, torch.bfloat16, E4M3, (32, 64) if layout == "block" else None)
        flat, layer = linear.flat_scale(problem, scale), layer_of(problem, weight)
        tile = space.Tile(16, 32, depth, 1, 1, how, swap=swap, ahead=True, stream=stream)
        bias = torch.randn(40).to(torch.bfloat16)
        for rows, share in ((9, 1), (16, 3))[how != "fp16" :]:
            x = torch.randn(rows, 584).to(torch.bfloat16)
            call = functools.partial(launch.small, layer, tile, share)
            title = f"{layout} {how} depth {depth} ahead swap {swap} stream {stream} share {share}"
            compare(title, problem, weight, scale, functools.partial(_call, call, weight, flat), x, bias)
    say(case="counters", left=sum(int(held.abs().sum()) for held in launch._counters.values()))


def w8a8_cases() -> None:
    """The product against float64 of the same rounded operands, and the rounding itself."""
    for (layout, block), weight_dtype in itertools.product(
        (("block", (32, 64)), ("channel", None), ("tensor", None)), (E4M3, E5M2)
    ):
        problem, weight, scale = make(layout, 77, 203, torch.bfloat16, weight_dtype, block)
        flat, layer = linear.flat_scale(problem, scale), layer_of(problem, weight, quantize=True)
        for rows in (3, 70):
            x = torch.randn(rows, 203).to(torch.bfloat16)
            bias = torch.randn(77).to(torch.bfloat16)
            out = launch.large_w8a8(layer, space.large_w8a8("interpreter")[0], x, weight, flat, bias)
            compare_rounded(f"{layout} {weight_dtype}", problem, weight, scale, x, 0, out, bias)


def code_cases() -> None:
    """Every FP8 code through every way of widening: the identity as activations gives the weight back."""
    for weight_dtype, how in (
        (E4M3, "fp16"),
        (E4M3, "bf16"),
        (E4M3, "bf16-bits"),
        (E4M3, "fp16-bits"),
        (E4M3, "pair"),
        (E5M2, "fp16"),
        (E5M2, "bf16"),
    ):
        codes = torch.arange(256, dtype=torch.uint8).view(weight_dtype)
        finite = codes[torch.isfinite(codes.float())]
        weight = torch.zeros(256, 64).to(weight_dtype)
        weight[: len(finite), 0] = finite
        dtype = torch.float16 if how == "fp16-bits" else torch.bfloat16
        x = torch.zeros(16, 64, dtype=dtype)
        x[0, 0] = 1
        layer = linear.Layer("tensor", 1, 1, quantize=False, careful=False)
        tile = space.Tile(16, 32, 64, 1, 1, how, swap=how == "pair")
        out = launch.small(layer, tile, 1, x, weight, torch.ones(1), None)
        got, wanted = out[0, : len(finite)].float(), finite.to(torch.float32)
        # The smallest codes have no leading one; targets may read them as zero on the way, and the interpreter does.
        smallest = float(torch.finfo(weight_dtype).tiny)
        wrong = got != wanted
        say(case=f"{weight_dtype} {how}", wrong=[float(v) for v in wanted[wrong & (wanted.abs() >= smallest)]],
            lost=float((got - wanted)[wanted.abs() < smallest].abs().max()), smallest=smallest)  # fmt: skip


def range_cases() -> None:
    """Activations that fp16 cannot hold, and values that are no numbers."""
    problem, weight, scale = make("block", 64, 256, torch.bfloat16, E4M3, (64, 64))
    flat, layer = linear.flat_scale(problem, scale), layer_of(problem, weight)
    for title, factor in (("huge", 1e25), ("tiny", 1e-25), ("usual", 1.0)):
        for rows in (1, 17, 70):
            x = (torch.randn(rows, 256) * factor).to(torch.bfloat16)
            x[0, ::31] = 3e7 * factor
            if rows > 1:
                x[1] = 0
            compare(title, problem, weight, scale, lambda x, b: linear.forward(layer, x, weight, flat, b), x, None)
            if rows > 1:
                say(case="zero row", rows=rows, largest=float(linear.forward(layer, x, weight, flat, None)[1].abs().max()))
    x = torch.randn(4, 256).to(torch.bfloat16)
    x[2, 7] = float("inf")
    out = linear.forward(layer, x, weight, flat, None)
    say(
        case="inf in a row",
        finite=[bool(torch.isfinite(row).all()) for row in out],
        any=[bool(torch.isfinite(row).any()) for row in out],
    )
    broken = weight.clone()
    broken.view(torch.uint8)[5, 9] = 0x7F
    out = linear.forward(layer_of(problem, broken), x[:2], broken, flat, None)
    say(case="nan in a weight", careful=layer_of(problem, broken).careful, nan=[bool(c) for c in torch.isnan(out).all(dim=0)])
    for value in (0.0, float("nan")):
        other = flat.clone()
        other[0, 1] = value
        out = linear.forward(layer, x[:2], weight, other, None)
        say(case=f"scale {value}", finite=[bool(c) for c in torch.isfinite(out).all(dim=0)])


def ahead_cases() -> None:
    """Activations that are rounded to fp16 as they are: rows that do not fit are found by every program and done again."""
    if DEVICE == "cpu":
        tiles = [space.Tile(16, 32, 128, 1, 1, "fp16", swap=swap, ahead=True) for swap in (False, True)]
        n, k, block = 64, 456, (32, 64)
    else:
        tiles = [tile for rows in (8, 16) for tile in space.small("cuda", rows, "fp16") if tile.ahead]
        n, k, block = 384, 2376, (128, 128)
    kinds = (("block", E4M3), ("channel", E4M3), ("tensor", E5M2))
    for (layout, weight_dtype), tile, share in itertools.product(kinds, tiles, (1, 3)):
        if layout != "block" and (share == 1 or tile.swap == (layout == "channel")):
            continue
        problem, weight, scale = make(layout, n, k, torch.bfloat16, weight_dtype, block if layout == "block" else None)
        flat, layer = linear.flat_scale(problem, scale), layer_of(problem, weight)
        run = functools.partial(_call, functools.partial(launch.small, layer, tile, share), weight, flat)
        usual = torch.randn(7, k)
        rows = {"huge": usual * 1e25, "tiny": usual * 1e-25}
        rows["far apart"] = usual * torch.exp2(torch.arange(7.0) * 16 - 48)[:, None]
        # The first tile is where a program begins; outliers of both signs cancel to no number.
        rows["nothing at first"] = torch.cat([torch.zeros(7, 256), usual[:, 256:] * 1e-9], dim=1)
        rows["outliers"] = usual.clone()
        rows["outliers"][2, ::7] *= 1e6
        rows["alone"] = torch.zeros(7, k)
        rows["alone"][range(7), range(0, 7 * 64, 64)] = torch.logspace(-12, 12, 7)
        for title, x in rows.items():
            compare(f"{layout} {tile.m} share {share} {title}", problem, weight, scale, run, x.to(torch.bfloat16), None)
        x = usual.to(torch.bfloat16)
        x[1], x[3, 5], x[4, 5], x[5, 5] = 0, float("inf"), -float("inf"), float("nan")
        out = run(x, None)
        say(case="no numbers", finite=[bool(torch.isfinite(row).all()) for row in out], zero=float(out[1].abs().max()))
        if layout == "block":
            nothing = scale.clone()
            nothing[0] = 0
            nothing[1:, :2] = 0
            other = functools.partial(
                _call, functools.partial(launch.small, layer, tile, share), weight, linear.flat_scale(problem, nothing)
            )
            compare(f"{tile.m} share {share} scales of zero", problem, weight, nothing, other, x[[0, 2, 6]], None)


def pair_cases() -> None:
    """Activations as sums of two FP8 numbers: every bfloat16 mantissa, rows of every size, values that are no numbers."""
    mantissas = torch.arange(128, dtype=torch.int32)
    layer = linear.Layer("tensor", 1, 1, quantize=False, careful=False)
    tile = space.Tile(16, 32, 128, 1, 1, "pair", swap=True)
    # Rows of the identity pick one activation each.
    weight = torch.eye(128).to(E4M3)
    for exponent in (-90, -20, 0, 20, 120):
        for lower in (0, 6, 9, 12, 15):
            x = ((1 + mantissas / 128) * 2.0 ** (exponent - lower)).to(torch.bfloat16)[None, :].repeat(2, 1)
            x[1] *= -1
            # A neighbour in the same tile sets the factor.
            x[:, 0] = 2.0**exponent
            out = launch.small(layer, tile, 1, x, weight, torch.ones(1), None)
            lost = float((out.double() - x.double()).abs().max()) / 2.0**exponent
            say(case=f"2^{exponent}, {lower} below", below=lower, wrong=int((out != x).sum()), lost=lost)
    x = torch.ones(8, 128, dtype=torch.bfloat16)
    for row, value in ((1, float("inf")), (2, -float("inf")), (3, float("nan")), (4, 3e38), (5, 0.0)):
        x[row, 7] = value
    x[6] = 0
    filled = torch.ones(32, 128).to(E4M3)
    out = launch.small(layer, tile, 1, x, filled, torch.ones(1), None)
    say(case="no numbers", finite=[bool(torch.isfinite(row).all()) for row in out], zero=float(out[6].abs().max()))


def vendor_cases() -> None:
    """Rounding in groups, and the vendor's product where this torch has one for the device."""
    x = torch.randn(19, 384).to(torch.bfloat16)
    x[:, ::61] *= 1000
    quotient, factor = launch.fit_groups(x)
    rounded = (quotient.double() * factor.double().repeat_interleave(128, 1)).cpu()[:19]
    here = x.cpu().double()
    groups = (rounded - here).view(19, 3, 128).norm(dim=2) / here.view(19, 3, 128).norm(dim=2)
    say(case="rounding", worst=float(groups.max()), largest=float(quotient[:19].float().abs().max()), rows=len(quotient))
    x[3, 200] = float("nan")
    for title, groups, (quotient, _) in (("row", 1, launch.fit(x, E4M3, 448.0, power=False)), ("group", 3, launch.fit_groups(x))):
        lost = torch.isnan(quotient[:19].float()).view(19, groups, -1).any(dim=2).cpu()
        say(case="nan", title=title, places=lost.nonzero().tolist())
    for layout, block in (("block", (128, 128)), ("channel", None), ("tensor", None)):
        if layout == "block" and DEVICE == "cpu":
            continue
        problem, weight, scale = make(layout, 256, 512, torch.bfloat16, E4M3, block)
        flat, layer = linear.flat_scale(problem, scale), layer_of(problem, weight, quantize=True)
        for rows in (70, 200):
            x, bias = torch.randn(rows, 512).to(torch.bfloat16), torch.randn(256).to(torch.bfloat16)
            assert any(name == linear.VENDOR for name, _ in linear.candidates_for(layer, x, weight))
            out = vendor.product(layer, x, weight, flat, bias)
            compare_rounded(f"vendor {layout}", problem, weight, scale, x, 128 if layout == "block" else 0, out, bias)


def experts_cases() -> None:
    """Grouped products against one expert at a time, in float64."""
    for (layout, block), dtype, weight_dtype in (
        (("block", (32, 64)), torch.bfloat16, E4M3), (("channel", None), torch.float16, E4M3), (("tensor", None), torch.bfloat16, E5M2),
    ):  # fmt: skip
        count, n, k, tokens, top_k = 5, 77, 203, 9, 2
        pairs = [make(layout, n, k, dtype, weight_dtype, block) for _ in range(count)]
        problem = pairs[0][0]
        weight = torch.stack([w.view(torch.uint8) for _, w, _ in pairs]).view(weight_dtype)
        scale = torch.stack([s for *_, s in pairs])
        x, bias = torch.randn(tokens, k).to(dtype), torch.randn(count, n).to(dtype)
        ids = torch.randint(-1, count, (tokens * top_k,))
        shares = torch.rand(tokens * top_k)
        tile = experts.tile_for(x, weight, tokens * top_k, block)
        sorting = experts.sort_by_expert(ids, count, tile.m)
        out = experts.grouped_product(
            x, weight, scale, sorting, tile, slots=tokens * top_k, top_k=top_k, block=block, bias=bias, shares=shares
        )
        wanted, plain = torch.zeros(2, tokens * top_k, n, dtype=torch.float64, device="cpu")
        for slot, expert in enumerate(ids.tolist()):
            if expert >= 0:
                wide = exact(problem, weight[expert], scale[expert], torch.arange(n))
                row, added, share = x[slot // top_k].cpu(), bias[expert].cpu(), shares[slot].cpu()
                wanted[slot] = (row.double() @ wide.t() + added.double()) * share.double()
                plain[slot] = ((row.float() @ wide.to(dtype).float().t() + added.float()) * share).to(dtype).double()
        say(case=f"{layout} {dtype}", rows=tokens, error=norm_error(out, wanted), plain=norm_error(plain, wanted), again=True,
            dtype=str(out.dtype), shape=list(out.shape), unused=float(out[ids < 0].abs().max()) if (ids < 0).any() else 0.0)  # fmt: skip
    block = (32, 32)
    count, hidden, inner, tokens = 4, 96, 64, 7
    weights = tuple((torch.randn(count, n, k) * 60).to(E4M3) for n, k in ((2 * inner, hidden), (hidden, inner)))
    scales = tuple(torch.rand(count, n // 32, k // 32) * 1e-3 + 1e-4 for n, k in ((2 * inner, hidden), (hidden, inner)))
    x = torch.randn(tokens, hidden).to(torch.float16)
    routing = torch.rand(tokens, 2), torch.randint(0, 8, (tokens, 2))
    for title, more in (("here", {}), ("weighted input", {"weighted_input": True}), ("gelu", {"activation": "gelu"})):
        chosen = (routing[0], routing[1] % count)
        call = ExpertCall(weights, scales, chosen, block, **more)
        out, other, again = experts_forward(x, call), plain_forward(x, call), experts_forward(x, call)
        say(case=f"layer, {title}", difference=norm_error(out, other.double()), again=bool(torch.equal(out, again)))
    call = ExpertCall(weights, scales, routing, block)
    problem = problem_of(call, x.dtype, 2)
    prepared = TRITON.prepare(problem, weights, scales)
    wrong = dataclasses.replace(prepared, scales=(scales[0] * 1.1, scales[1]))
    say(case="checked", refused=TRITON.refuses(problem, DEVICE), error=expert_choice.check(problem, prepared, call),
        wrong=expert_choice.check(problem, wrong, call), limit=choice.ROUNDING_LIMIT)  # fmt: skip
    mapping = torch.tensor([0, -1, 1, 2, -1, 3, -1, -1])
    call = ExpertCall(weights, scales, routing, block, expert_map=mapping)
    out, other = experts_forward(x, call), plain_forward(x, call)
    say(case="layer, other ranks", difference=norm_error(out, other.double()), again=True)


def candidate_cases() -> None:
    """The whole way: refuse or prepare, tune, keep, run, trace."""
    for candidate in linear_candidates():
        problem, weight, scale = make("block", 64, 128, torch.bfloat16, E4M3, (64, 64))
        refused = candidate.refuses(problem, DEVICE)
        if refused:
            say(case=candidate.name, refused=refused)
            continue
        prepared = candidate.prepare(problem, weight, scale)
        x, bias = torch.randn(2, 3, 128).to(torch.bfloat16), torch.randn(64).to(torch.bfloat16)
        wide = exact(problem, weight, scale, torch.arange(64))
        eager = prepared.run(x, prepared.weight, prepared.scale, bias)
        traced = torch.compile(prepared.run, backend="aot_eager", fullgraph=True, dynamic=True)
        same = bool(torch.equal(traced(x, prepared.weight, prepared.scale, bias), eager))
        whole = bool(torch.equal(prepared.weight.float(), weight.float()))
        torch.library.opcheck(
            linear.op(), (x, prepared.weight, prepared.scale, bias, "block", 64, 64, candidate.quantizes, False),
            test_utils=("test_faketensor",),
        )  # fmt: skip
        wanted = x.cpu().double() @ wide.t() + bias.cpu().double()
        empty = prepared.run(x[:0], prepared.weight, prepared.scale, None)
        say(case=candidate.name, refused=None, error=norm_error(eager, wanted), same=same, whole=whole,
            shape=list(eager.shape), empty=list(empty.shape), order="columns" if linear.is_columns(prepared.weight) else "rows",
            plans=sorted({a["kernel"] for plan in linear._plans.values() for a in plan.values()}))  # fmt: skip
    for layout, bad in (("block", torch.ones(3, 3)), ("channel", torch.ones(63)), ("tensor", torch.ones(2))):
        problem, weight, _ = make(layout, 64, 128, torch.bfloat16, E4M3, (64, 64) if layout == "block" else None)
        try:
            linear_candidates()[1].prepare(problem, weight, bad)
            say(case=f"bad scale, {layout}", raised=None)
        except ValueError as error:
            say(case=f"bad scale, {layout}", raised=str(error))


GROUPS = {"linear": linear_cases, "tiles": tile_cases, "w8a8": w8a8_cases, "codes": code_cases, "range": range_cases,
          "ahead": ahead_cases, "pair": pair_cases, "vendor": vendor_cases,
          "experts": experts_cases, "candidates": candidate_cases}  # fmt: skip

if __name__ == "__main__":
    torch.set_default_device(DEVICE)
    for _group in sys.argv[1:] or GROUPS:
        torch.manual_seed(0)
        GROUPS[_group]()
