"""Every way of computing a quantized linear layer against float64: shapes, scale layouts, dtypes, extremes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.sim
torch = pytest.importorskip("torch")

from reference_gemms import w8a16, w8a16_trans_b  # noqa: E402

from xpufp8.runtime import candidates, choice, memory  # noqa: E402
from xpufp8.runtime.catalogue import RepairError  # noqa: E402
from xpufp8.runtime.problem import Problem, exact, spread_scale, widen  # noqa: E402

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
TORCH_CANDIDATES = [candidates.PER_CALL, candidates.AT_LOAD, candidates.SCALED_MM]


def make(n: int, k: int, layout: str, scale_shape: str, weight_dtype: Any, dtype: Any, *, seed: int = 0, exponent: float = -4,
         activation: str = "dynamic-token", block: tuple[int, int] = (128, 128)) -> tuple[Problem, Any, Any]:  # fmt: skip
    """A layer with random weights and scales around 2**exponent, each different from its neighbours."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(n, k, generator=generator) * 8).to(weight_dtype)
    shapes = {
        "[1]": (1,),
        "[]": (),
        "[N]": (n,),
        "[N,1]": (n, 1),
        "[1,N]": (1, n),
        "blocks": (-(-n // block[0]), -(-k // block[1])),
    }
    scale = torch.exp2(torch.rand(shapes[scale_shape], generator=generator) * 4 - 2 + exponent)
    problem = Problem(layout, activation, n, k, dtype, weight_dtype, block if layout == "block" else None)
    return problem, weight, scale


def reference(problem: Problem, weight: Any, scale: Any) -> Any:
    """The dequantized weight in float64, written out element by element so that no code is shared with what is tested."""
    wide = weight.to(torch.float64)
    flat = scale.to(torch.float64)
    out = torch.empty_like(wide)
    for row in range(problem.n):
        if problem.layout == "block":
            assert problem.block is not None
            columns = torch.arange(problem.k) // problem.block[1]
            out[row] = wide[row] * flat[row // problem.block[0]][columns]
        else:
            out[row] = wide[row] * (flat.reshape(-1)[0] if problem.layout == "tensor" else flat.reshape(-1)[row])
    return out


LAYOUTS = [
    ("tensor", "[1]"),
    ("tensor", "[]"),
    ("channel", "[N]"),
    ("channel", "[N,1]"),
    ("channel", "[1,N]"),
    ("block", "blocks"),
]


@pytest.mark.parametrize(("layout", "scale_shape"), LAYOUTS)
@pytest.mark.parametrize("weight_dtype", FP8)
@pytest.mark.parametrize(("n", "k"), [(256, 384), (200, 136), (1, 128), (129, 1), (130, 257)])
def test_dequantized_weight_is_exact_up_to_one_rounding(n: int, k: int, layout: str, scale_shape: str, weight_dtype: Any) -> None:
    problem, weight, scale = make(n, k, layout, scale_shape, weight_dtype, torch.bfloat16)
    wanted = reference(problem, weight, scale)
    assert torch.equal(exact(problem, weight, scale, torch.arange(n)), wanted)
    torch.testing.assert_close(widen(problem, weight, scale).double(), wanted, rtol=2.0**-8, atol=0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    tokens=st.sampled_from([1, 2, 17]),
    layout=st.sampled_from(LAYOUTS),
    weight_dtype=st.sampled_from(FP8),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    biased=st.booleans(),
    leading=st.sampled_from([(), (1,), (2, 3)]),
    block=st.sampled_from([(128, 128), (64, 128), (32, 16)]),
    seed=st.integers(0, 1000),
)
def test_candidates_against_float64(n: int, k: int, tokens: int, layout: tuple[str, str], weight_dtype: Any, dtype: Any, biased: bool,
                                    leading: tuple[int, ...], block: tuple[int, int], seed: int) -> None:  # fmt: skip
    problem, weight, scale = make(n, k, *layout, weight_dtype, dtype, seed=seed, block=block)
    wide = reference(problem, weight, scale)
    x = torch.randn(*leading, tokens, k, generator=torch.Generator().manual_seed(seed)).to(dtype)
    bias = (
        torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype) * wide.norm(dim=1).to(dtype) if biased else None
    )
    wanted = x.double() @ wide.t() + (0 if bias is None else bias.double())
    size = torch.hypot(x.double().norm(dim=-1, keepdim=True) * wide.norm(dim=1) / math.sqrt(k), wanted) + 1e-30
    for candidate in TORCH_CANDIDATES:
        if candidate.refuses(problem, "cpu"):
            continue
        prepared = candidate.prepare(problem, weight, scale)
        got = prepared.run(x, prepared.weight, prepared.scale, bias)
        assert got.shape == (*leading, tokens, n)
        assert got.dtype == dtype
        error = float(((got.double() - wanted) / size).square().mean().sqrt())
        # Rounding weights, products and bias each cost up to half a unit in the last place, FP8 activations four times as much.
        unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}[dtype]
        limit = 2.0**-3 if candidate.quantizes else 4 * unit
        assert error <= limit, (candidate.name, problem, error)


@pytest.mark.parametrize("candidate", [candidates.PER_CALL, candidates.AT_LOAD], ids=lambda c: c.name)
def test_zero_blocks_give_zeros(candidate: Any) -> None:
    problem, weight, scale = make(256, 256, "block", "blocks", FP8[0], torch.bfloat16)
    scale[0, :] = 0
    prepared = candidate.prepare(problem, weight, scale)
    out = prepared.run(torch.randn(3, 256).bfloat16(), prepared.weight, prepared.scale, None)
    assert (out[:, :128] == 0).all()
    assert (out[:, 128:] != 0).any()


@pytest.mark.parametrize("candidate", [candidates.PER_CALL, candidates.AT_LOAD], ids=lambda c: c.name)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_reach_their_row_and_no_other(candidate: Any, value: float) -> None:
    problem, weight, scale = make(64, 64, "channel", "[N]", torch.float8_e5m2, torch.bfloat16)
    weight[5, 7] = value
    prepared = candidate.prepare(problem, weight, scale)
    out = prepared.run(torch.ones(2, 64).bfloat16(), prepared.weight, prepared.scale, None)
    assert not torch.isfinite(out[:, 5]).any()
    assert torch.isfinite(out[:, torch.arange(64) != 5]).all()


@pytest.mark.parametrize("exponent", [-100, -30, 0, 30, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scale_extremes_hold_in_bfloat16(exponent: int, layout: tuple[str, str]) -> None:
    problem, weight, scale = make(64, 48, *layout, FP8[0], torch.bfloat16, exponent=exponent)
    for candidate in (candidates.PER_CALL, candidates.AT_LOAD):
        prepared = candidate.prepare(problem, weight, scale)
        assert choice.check(problem, candidate, prepared, weight, scale) < choice.ROUNDING_LIMIT


def test_overflow_of_float16_is_refused_and_not_served() -> None:
    problem, weight, scale = make(64, 64, "tensor", "[1]", FP8[0], torch.float16, exponent=20)
    with pytest.raises(RepairError, match="agrees with float64"):
        choice.choose(problem, weight, scale)


@pytest.mark.parametrize(("layout", "scale"), [("block", (2, 3)), ("channel", (5,)), ("tensor", (2,))])
def test_scale_of_the_wrong_size_is_an_error(layout: str, scale: tuple[int, ...]) -> None:
    problem = Problem(layout, "none", 256, 256, torch.bfloat16, FP8[0], (128, 128) if layout == "block" else None)
    with pytest.raises(ValueError, match="needs"):
        spread_scale(problem, torch.ones(scale))


def test_power_of_two_scales_in_a_byte() -> None:
    problem, weight, _ = make(128, 256, "block", "blocks", FP8[0], torch.bfloat16)
    byte = torch.tensor([[127, 130]], dtype=torch.uint8)
    wide = widen(problem, weight, byte)
    assert torch.equal(wide[:, :128], weight[:, :128].bfloat16())
    assert torch.equal(wide[:, 128:], weight[:, 128:].bfloat16() * 8)


# -- the choice ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(choice.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(choice, "_memo", {})
    monkeypatch.delenv(choice.FORCE_VARIABLE, raising=False)
    memory.reset()


def sabotaged(name: str, change: Any) -> candidates.Candidate:
    """A candidate that is per-call dequantization with its scale changed: what a misread scale looks like."""

    def prepare(problem: Problem, weight: Any, scale: Any) -> candidates.Prepared:
        return candidates.PER_CALL.prepare(problem, weight, change(scale))

    return candidates.Candidate(name, lambda problem, device: None, prepare)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s * 2,
        lambda s: 1 / s,
        torch.ones_like,
        lambda s: s.flip(0),
        lambda s: s.roll(1, 0),
        lambda s: -s,
        lambda s: s * 1.05,
    ],
    ids=["doubled", "inverted", "ignored", "flipped", "shifted", "negated", "5 % off"],
)
def test_misread_scale_is_refused(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    problem, weight, scale = make(512, 256, "channel", "[N]", FP8[0], torch.bfloat16)
    monkeypatch.setattr(choice, "candidates", lambda: [sabotaged("liar", change), candidates.PER_CALL])
    made = choice.choose(problem, weight, scale)
    assert made.candidate == "dequantize-per-call"
    assert "wrong" in (made.trials[0].refused or "")


def test_one_wrong_channel_of_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_wrong(scale: Any) -> Any:
        scale = scale.clone()
        scale[37] *= 4
        return scale

    problem, weight, scale = make(200, 256, "channel", "[N]", FP8[0], torch.bfloat16)
    monkeypatch.setattr(choice, "candidates", lambda: [sabotaged("liar", one_wrong), candidates.PER_CALL])
    assert choice.choose(problem, weight, scale).candidate == "dequantize-per-call"


def test_candidate_that_raises_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: Any) -> Any:
        raise RuntimeError("PassManager::run failed")

    broken = candidates.Candidate("broken", lambda problem, device: None, explode)
    monkeypatch.setattr(choice, "candidates", lambda: [broken, candidates.PER_CALL])
    made = choice.choose(*make(64, 64, "tensor", "[1]", FP8[0], torch.bfloat16))
    assert made.candidate == "dequantize-per-call"
    assert made.trials[0].refused == "RuntimeError: PassManager::run failed"


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    original = choice._try

    def counted(problem: Problem, candidate: Any, weight: Any, scale: Any) -> Any:
        calls.append(candidate.name)
        return original(problem, candidate, weight, scale)

    monkeypatch.setattr(choice, "_try", counted)
    return calls


def test_choice_is_measured_once_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, weight, scale = make(128, 128, "block", "blocks", FP8[0], torch.bfloat16)
    calls = counting(monkeypatch)
    first = choice.choose(problem, weight, scale)
    measured = len(calls)
    assert measured > 0
    assert choice.choose(problem, weight, scale) == first
    monkeypatch.setattr(choice, "_memo", {})
    again = choice.choose(problem, weight, scale)
    assert again == first
    assert len(calls) == measured
    monkeypatch.setattr(choice, "environment_key", lambda device: "another driver")
    monkeypatch.setattr(choice, "_memo", {})
    choice.choose(problem, weight, scale)
    assert len(calls) == 2 * measured


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"%s": 3}', '{"%s": {"candidate": "gone", "problem": "p", "trials": []}}', "\x00"]
)
def test_cache_that_cannot_be_read_is_measured_again(content: str) -> None:
    problem, weight, scale = make(64, 64, "tensor", "[1]", FP8[0], torch.bfloat16)
    path = choice.cache_file(weight.device)
    path.parent.mkdir(parents=True)
    path.write_text(content.replace("%s", problem.key()))
    assert choice.choose(problem, weight, scale).trials
    assert json.loads(path.read_text())[problem.key()]["candidate"]


def test_cache_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(choice.CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    assert choice.choose(*make(64, 64, "tensor", "[1]", FP8[0], torch.bfloat16)).candidate


def test_widening_stays_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, weight, scale = make(128, 128, "block", "blocks", FP8[0], torch.bfloat16)
    monkeypatch.setattr(choice, "candidates", lambda: [candidates.AT_LOAD, candidates.PER_CALL])
    monkeypatch.setattr(choice, "_score", lambda trial: 0 if trial.candidate == "dequantize-at-load" else 1)
    monkeypatch.setenv(memory.BUDGET_VARIABLE, str(2 * weight.numel() + 1))
    taken = [choice.prepare(problem, weight, scale)[0].candidate for _ in range(3)]
    assert taken == ["dequantize-at-load", "dequantize-at-load", "dequantize-per-call"]


def test_forced_candidate_and_a_name_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, weight, scale = make(64, 64, "tensor", "[1]", FP8[0], torch.bfloat16)
    monkeypatch.setenv(choice.FORCE_VARIABLE, "dequantize-per-call")
    assert choice.choose(problem, weight, scale).candidate == "dequantize-per-call"
    monkeypatch.setenv(choice.FORCE_VARIABLE, "nonsense")
    with pytest.raises(RepairError, match="nonsense"):
        choice.choose(problem, weight, scale)


def test_fake_weights_choose_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    problem, weight, scale = make(64, 64, "block", "blocks", FP8[0], torch.bfloat16)
    calls = counting(monkeypatch)
    with FakeTensorMode() as mode:
        made, prepared = choice.prepare(problem, mode.from_tensor(weight), mode.from_tensor(scale))
        out = prepared.run(mode.from_tensor(torch.empty(3, 64, dtype=torch.bfloat16)), prepared.weight, prepared.scale, None)
    assert (made.candidate, tuple(out.shape), calls) == ("dequantize-per-call", (3, 64), [])


@pytest.mark.parametrize("candidate", TORCH_CANDIDATES, ids=lambda c: c.name)
def test_candidates_compile_without_a_graph_break(candidate: Any) -> None:
    problem, weight, scale = make(64, 64, "channel", "[N]", FP8[0], torch.bfloat16)
    prepared = candidate.prepare(problem, weight, scale)
    torch._dynamo.reset()
    compiled = torch.compile(prepared.run, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 5):
        x = torch.randn(tokens, 64).bfloat16()
        assert torch.equal(
            compiled(x, prepared.weight, prepared.scale, None), prepared.run(x, prepared.weight, prepared.scale, None)
        )


@pytest.mark.parametrize(("layout", "scale_shape"), [("block", "blocks"), ("channel", "[N]"), ("tensor", "[1]")])
def test_default_device_of_vllm_does_not_matter(layout: str, scale_shape: str) -> None:
    """vLLM loads models with its device as torch's default; ``meta`` stands for one on which numbers cannot be drawn here."""
    problem, weight, scale = make(64, 64, layout, scale_shape, FP8[0], torch.bfloat16)
    with torch.device("meta"):
        made, prepared = choice.prepare(problem, weight, scale)
        assert choice.probe_input(problem, 3, weight.device).device.type == "cpu"
    assert prepared.weight.device.type == "cpu"
    tried = {trial.candidate: trial for trial in made.trials}
    names = {c.name for c in TORCH_CANDIDATES if c.refuses(problem, "cpu") is None}
    assert names
    assert all(tried[name].refused is None for name in names), made.describe()
    assert set(tried["dequantize-per-call"].seconds) == {str(tokens) for tokens in choice.TOKENS}


# -- the device's own kernel -------------------------------------------------------------------------------------------

NATIVE_OPS = {
    "_xpu_C": ("_xpu_C", "(Tensor A, Tensor B, Tensor? B_scale_, Tensor? bias_) -> Tensor", w8a16),
    "_xpu_C with trans_B": (
        "_xpu_C",
        "(Tensor A, Tensor B, bool trans_B, Tensor? B_scale_, Tensor? bias_) -> Tensor",
        w8a16_trans_b,
    ),
    "torch_ipex": ("torch_ipex", "(Tensor _0, Tensor _1, bool trans_B, Tensor? _3, Tensor? _4) -> Tensor", w8a16_trans_b),
}


@pytest.fixture
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    """``fp8_gemm_w8a16`` under a library's name with a reference kernel, maybe a wrong one; the candidate as on an XPU."""
    which, kernel = request.param
    namespace, schema, right = NATIVE_OPS[which]
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"fp8_gemm_w8a16{schema}")
    library.impl("fp8_gemm_w8a16", kernel or right, "CPU")
    yield replace(candidates.NATIVE, refuses=lambda problem, device: candidates.NATIVE.refuses(problem, "xpu"))
    library._destroy()


@pytest.mark.parametrize("native", [(which, None) for which in NATIVE_OPS], indirect=True, ids=lambda p: p[0])
@pytest.mark.parametrize(("layout", "scale_shape"), LAYOUTS)
@pytest.mark.parametrize("weight_dtype", FP8)
def test_native_kernel_is_checked_and_chosen(
    native: Any, monkeypatch: pytest.MonkeyPatch, layout: str, scale_shape: str, weight_dtype: Any
) -> None:
    monkeypatch.setattr(choice, "candidates", lambda: [native, candidates.PER_CALL])
    monkeypatch.setattr(choice, "_score", lambda trial: 0 if trial.candidate == native.name else 1)
    problem, weight, scale = make(48, 64, layout, scale_shape, weight_dtype, torch.bfloat16)
    made, prepared = choice.prepare(problem, weight, scale)
    if layout == "block":
        assert made.candidate == "dequantize-per-call"
        assert "one scale, or one a channel" in (made.trials[0].refused or "")
        return
    assert made.candidate == "native-w8a16"
    assert (made.trials[0].error or 1) < choice.ROUNDING_LIMIT / 4
    x, bias = torch.randn(2, 3, 64).bfloat16(), torch.randn(48).bfloat16()
    wanted = x.double() @ reference(problem, weight, scale).t() + bias.double()
    got = prepared.run(x, prepared.weight, prepared.scale, bias)
    assert (got.shape, got.dtype) == ((2, 3, 48), torch.bfloat16)
    assert float((got.double() - wanted).norm() / wanted.norm()) < 2.0**-8


def _scale_read_as_one(a: Any, b: Any, scale: Any, bias: Any) -> Any:
    return w8a16(a, b, None if scale is None else scale[:1], bias)


WRONG_KERNELS = {
    "first scale for all": _scale_read_as_one,
    "scale of the row before": lambda a, b, scale, bias: w8a16(a, b, scale.roll(1), bias),
    "bias twice": lambda a, b, scale, bias: w8a16(a, b, scale, None if bias is None else bias * 2),
    "no bias": lambda a, b, scale, bias: w8a16(a, b, scale, None),
    "float16 on the way": lambda a, b, scale, bias: w8a16((a * 2.0**14).half(), b, scale, None).to(a.dtype) / 2.0**14,
    "raises": lambda a, b, scale, bias: w8a16(a, b.t(), scale, bias),
}


@pytest.mark.parametrize("native", [("_xpu_C", kernel) for kernel in WRONG_KERNELS.values()], indirect=True, ids=WRONG_KERNELS)
def test_wrong_native_kernel_is_refused(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "candidates", lambda: [native, candidates.PER_CALL])
    problem, weight, scale = make(48, 64, "channel", "[N]", FP8[0], torch.bfloat16)
    made = choice.choose(problem, weight, scale)
    assert made.candidate == "dequantize-per-call"
    assert made.trials[0].refused
