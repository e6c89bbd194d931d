"""The FP8 experts: every way against float64, and vLLM's own oracle before and after the repair."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.sim
torch = pytest.importorskip("torch")

from expert_layers import (  # noqa: E402
    ACTIVATIONS,
    BLOCK,
    EXPERTS,
    FP8,
    HIDDEN,
    PLAIN,
    TOP_K,
    afresh,
    error_of,
    forward,
    layer,
    native_kernel,
    reference,
    whole,
)  # fmt: skip

from xpufp8.runtime import choice, expert_choice, experts, moe  # noqa: E402
from xpufp8.runtime.catalogue import RepairError  # noqa: E402
from xpufp8.runtime.experts import ExpertCall  # noqa: E402


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with afresh(monkeypatch, tmp_path):
        yield


@pytest.fixture
def native() -> Iterator[Any]:
    with native_kernel() as candidate:
        yield candidate


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    count=st.integers(1, 6), hidden=st.integers(1, 100), inner=st.integers(1, 70), tokens=st.integers(1, 9), data=st.data(),
    layout=st.sampled_from(["tensor", "channel", "block"]), weight_dtype=st.sampled_from(FP8),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]), block=st.sampled_from([(128, 128), (32, 64), (16, 16)]),
    activation=st.sampled_from(list(ACTIVATIONS)), biased=st.booleans(), mapped=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_experts_against_float64(count: int, hidden: int, inner: int, tokens: int, data: Any, layout: str, weight_dtype: Any, dtype: Any,
                                 block: tuple[int, int], activation: str, biased: bool, mapped: bool, seed: int) -> None:  # fmt: skip
    weights, scales, w13, w2 = layer(layout, weight_dtype, count=count, hidden=hidden, inner=inner, block=block, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    top_k = data.draw(st.integers(1, count))
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)]).int()
    shares = torch.rand(tokens, top_k, generator=generator) + 0.1
    biases = tuple(torch.randn(w.shape[:2], generator=generator).to(dtype) if biased else None for w in weights)
    # Every second expert belongs to another rank.
    mapping = torch.where(torch.arange(count) % 2 == 0, torch.arange(count), -1).int() if mapped else None
    local = ids if mapping is None else mapping[ids.long()]
    call = ExpertCall(weights, scales, (shares, ids), block if layout == "block" else None, activation, mapping, biases)
    wanted = reference(x, w13, w2, shares, local, ACTIVATIONS[activation], biases)
    sizes = tuple(None if bias is None else bias.abs() for bias in biases)
    terms = float(reference(x.abs(), w13.abs(), w2.abs(), shares, local, torch.abs, sizes).norm())
    for candidate in PLAIN:
        got = forward(candidate, x, call)
        assert (got.dtype, got.shape) == (dtype, x.shape)
        # Roundings of weights, gate and up, hidden state and output, 2^-9 each in bfloat16. Small layers do not average them, and where
        # their terms cancel, what was rounded is as large as those. float16 has steps of 2^-24 near zero.
        allowed = 2.0**-6 * float(wanted.norm()) + 2.0**-20 + (2.0**-9 * terms if min(hidden, inner) < 16 else 0.0)
        assert float((got.double() - wanted).norm()) < allowed, candidate.name


@pytest.mark.parametrize("weight_dtype", FP8)
@pytest.mark.parametrize("candidate", PLAIN, ids=lambda c: c.name)
def test_nan_and_zero_blocks_stay_in_their_expert(candidate: Any, weight_dtype: Any) -> None:
    weights, scales, _, _ = layer("block", weight_dtype)
    weights[0].view(torch.uint8)[1, 3, 5] = 0x7F
    scales[0][2] = 0
    x = torch.randn(4, HIDDEN).bfloat16()
    ids = torch.tensor([[1], [2], [3], [2]])
    out = forward(candidate, x, ExpertCall(weights, scales, (torch.ones(4, 1), ids), BLOCK))
    assert torch.isnan(out[0]).all()
    assert torch.equal(out[[1, 3]], torch.zeros(2, HIDDEN).bfloat16())
    assert torch.isfinite(out[2]).all()
    assert out[2].abs().sum() > 0


@pytest.mark.parametrize("exponents", [(-40, -40), (40, 10), (-60, 60), (0, 30)])
@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
def test_scale_extremes_hold_in_bfloat16(layout: str, exponents: tuple[int, int]) -> None:
    problem, call = whole(layout)
    call = replace(call, scales=tuple(scale * 2.0**power for scale, power in zip(call.scales, exponents, strict=True)))
    for candidate in PLAIN:
        prepared = candidate.prepare(problem, call.weights, call.scales)
        assert expert_choice.check(problem, prepared, call) < choice.ROUNDING_LIMIT / 2


@pytest.mark.parametrize("candidate", PLAIN, ids=lambda c: c.name)
def test_infinity_reaches_the_tokens_of_its_expert_and_no_other(candidate: Any) -> None:
    weights, scales, _, _ = layer("channel", torch.float8_e5m2)
    weights[1][1, 7, 3] = math.inf
    x, ids = torch.randn(3, HIDDEN).bfloat16(), torch.tensor([[1, 0], [2, 0], [3, 1]])
    out = forward(candidate, x, ExpertCall(weights, scales, (torch.ones(3, 2), ids)))
    assert not torch.isfinite(out[[0, 2], 7]).any()
    assert torch.isfinite(out[1]).all()
    assert torch.isfinite(out[:, torch.arange(HIDDEN) != 7]).all()


def test_experts_of_other_ranks_are_passed_over() -> None:
    weights, scales, w13, w2 = layer("tensor", FP8[0])
    x = torch.randn(4, HIDDEN).bfloat16()
    ids = torch.tensor([[0, 7], [9, 8], [4, 5], [6, 1]])
    expert_map = torch.full((10,), -1, dtype=torch.int32)
    expert_map[torch.tensor([7, 4, 1])] = torch.tensor([0, 1, 2], dtype=torch.int32)
    shares = torch.rand(4, 2)
    got = experts.plain_forward(x, ExpertCall(weights, scales, (shares, ids), expert_map=expert_map))
    wanted = reference(x, w13, w2, shares, expert_map[ids], torch.nn.functional.silu)
    assert torch.equal(got[1], torch.zeros(HIDDEN, dtype=torch.bfloat16))
    assert error_of(got, wanted) < 3 * 2.0**-8


def test_router_weight_is_applied_once() -> None:
    weights, scales, _, _ = layer("tensor", FP8[0])
    x, ids = torch.randn(3, HIDDEN).bfloat16(), torch.tensor([[0], [1], [0]])
    call = ExpertCall(weights, scales, (torch.full((3, 1), 0.5), ids))
    weighted, already = experts.plain_forward(x, call), experts.plain_forward(x, replace(call, weighted_input=True))
    torch.testing.assert_close(weighted * 2, already)


@pytest.mark.parametrize(("scale", "block"), [((4, 3), None), ((4, 2, 2), (16, 16)), ((4, 1, 1), (8, 8))])
def test_scale_of_no_known_layout_is_refused(scale: tuple[int, ...], block: Any) -> None:
    with pytest.raises(RepairError, match="fits no layout"):
        experts.layout_of(torch.empty(4, 16, 8), torch.empty(scale), block)


# -- the device's own kernel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_native_grouped_product_against_float64(native: Any, biased: bool, mapped: bool) -> None:
    weights, scales, w13, w2 = layer("tensor", FP8[0])
    x, ids, shares = torch.randn(9, HIDDEN).bfloat16(), torch.randint(0, EXPERTS, (9, TOP_K)).int(), torch.rand(9, TOP_K)
    biases = tuple(torch.randn(w.shape[:2]).bfloat16() if biased else None for w in weights)
    mapping = torch.tensor([0, -1, 1, 2, -1], dtype=torch.int32) if mapped else None
    call = ExpertCall(weights, scales, (shares, ids), None, "silu", mapping, biases)
    wanted = reference(x, w13, w2, shares, ids if mapping is None else mapping[ids.long()], ACTIVATIONS["silu"], biases)
    assert error_of(forward(native, x, call), wanted) < 3 * 2.0**-8


def test_native_kernel_is_asked_only_what_it_takes(native: Any) -> None:
    for layout, said in (("tensor", None), ("channel", "one scale an expert"), ("block", "one scale an expert")):
        weights, scales, _, _ = layer(layout, FP8[0])
        call = ExpertCall(weights, scales, (None, None), BLOCK if layout == "block" else None)
        problem = experts.problem_of(call, torch.bfloat16, TOP_K)
        refused = native.refuses(problem, "cpu")
        assert refused is None if said is None else said in refused
        assert experts.NATIVE.refuses(problem, "cpu") is not None


# -- inside vLLM -------------------------------------------------------------------------------------------------------


class Oracle:
    """``select_fp8_moe_backend`` with a given outcome."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def __call__(self, *_: Any, **__: Any) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    __name__ = __qualname__ = "select_fp8_moe_backend"


def moe_config(activation: str = "silu", **changes: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    fields = {"is_act_and_mul": True, "activation": MoEActivation(activation), "has_hash_routing": False, "routing_method": None,
              "router_logits_dtype": None, "hidden_dim": 64, "is_lora_enabled": False,
              "moe_parallel_config": SimpleNamespace(use_batched_activation_format=False)}  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def quant_key() -> Any:
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Static128BlockSym

    return kFp8Static128BlockSym


def test_what_vllm_selects_is_kept() -> None:
    chosen = ("BACKEND", object)
    assert moe.wrap(Oracle(chosen), "TRITON")(moe_config(), quant_key()) is chosen


@pytest.mark.parametrize(
    "outcome", [("NONE", None), NotImplementedError("No FP8 MoE backend supports the deployment configuration.")]
)
def test_fallback_answers_where_vllm_finds_nothing(outcome: Any) -> None:
    backend, experts = moe.wrap(Oracle(outcome), "TRITON")(moe_config(), quant_key())
    assert (backend, experts.__name__) == ("TRITON", "Xpufp8Experts")


def test_a_backend_that_was_typed_and_cannot_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="does not support"):
        moe.wrap(Oracle(ValueError("backend MARLIN does not support this")), "TRITON")(moe_config(), quant_key())


def test_what_the_fallback_does_not_cover_stops() -> None:
    with pytest.raises(RepairError, match="neither vLLM nor this repair"):
        moe.wrap(Oracle(("NONE", None)), "TRITON")(moe_config("swigluoai"), quant_key())


def real_config(**layer_sizes: Any) -> Any:
    from probes.kernel_table_live_moe import _config

    return _config("bfloat16", {"num_experts": EXPERTS, "experts_per_token": TOP_K, **layer_sizes}, None)


def keys(block: bool) -> tuple[Any, Any]:
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    if block:
        return keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym
    return keys.kFp8StaticTensorSym, keys.kFp8DynamicTensorSym


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's own, on a CPU that has no matrix unit."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.oracle import fp8

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with set_current_vllm_config(VllmConfig()):
        yield fp8


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("block", [True, False])
def test_real_oracle_finds_nothing_and_the_repair_computes(
    oracle: Any, monkeypatch: pytest.MonkeyPatch, block: bool, widened: bool
) -> None:
    """Stock vLLM selects no backend; with the repair its own modular kernel runs our experts, weights converted on the way."""
    config = real_config(hidden_dim=256, intermediate_size=128)
    nothing = oracle.select_fp8_moe_backend(config, *keys(block))
    assert nothing == (oracle.Fp8MoeBackend.NONE, None)
    backend, made = moe.wrap(oracle.select_fp8_moe_backend, oracle.Fp8MoeBackend.TRITON)(config, *keys(block))
    assert made is moe.experts_class()
    monkeypatch.setenv(choice.FORCE_VARIABLE, "dequantize-at-load" if widened else "dequantize-per-call")
    weights, scales, w13, w2 = layer("block" if block else "tensor", FP8[0], hidden=256, inner=128, block=(128, 128))
    loaded = torch.nn.Module()
    loaded.quant_method, loaded.moe_config, loaded.activation = SimpleNamespace(experts_cls=made), config, config.activation
    if block:
        loaded.weight_block_size = [128, 128]
    tensors = {"w13": weights[0], "w2": weights[1], "w13_scale": scales[0], "w2_scale": scales[1], "w13_input_scale": None,
               "w2_input_scale": None}  # fmt: skip
    with pytest.raises(ValueError, match="Unsupported FP8 MoE backend: NONE"):  # where serving stock ends
        oracle.convert_to_fp8_moe_kernel_format(fp8_backend=nothing[0], layer=loaded, **tensors)
    convert = moe.wrap_conversion(oracle.convert_to_fp8_moe_kernel_format)
    converted = convert(fp8_backend=backend, layer=loaded, **tensors)
    assert converted[0].dtype == (torch.bfloat16 if widened else FP8[0])
    quantization = oracle.make_fp8_moe_quant_config(
        fp8_backend=backend, w1_scale=converted[2], w2_scale=converted[3], a1_scale=None, a2_scale=None,
        block_shape=[128, 128] if block else None, layer=loaded,
    )  # fmt: skip
    kernel = oracle.make_fp8_moe_kernel(moe_quant_config=quantization, moe_config=config, fp8_backend=backend, experts_cls=made)
    x, ids, shares = torch.randn(7, 256).bfloat16(), torch.randint(0, EXPERTS, (7, TOP_K)).int(), torch.rand(7, TOP_K)
    out = kernel.apply(
        x, converted[0], converted[1], shares, ids, activation=config.activation, global_num_experts=EXPERTS, expert_map=None,
        apply_router_weight_on_input=False,
    )  # fmt: skip
    assert error_of(out, reference(x, w13, w2, shares, ids, ACTIVATIONS["silu"])) < 3 * 2.0**-8


def test_layers_of_other_backends_are_converted_as_ever(oracle: Any) -> None:
    tensors = tuple(torch.empty(1) for _ in range(4))
    layer_of_vllm = SimpleNamespace(quant_method=SimpleNamespace(experts_cls=object))
    assert moe.wrap_conversion(lambda *_, **__: tensors)(None, layer_of_vllm) is tensors


def test_weights_without_a_choice_get_one_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release without the conversion: what widens is left out, because vLLM keeps the FP8 weights."""
    monkeypatch.setattr(choice, "_score", lambda trial: 0 if trial.candidate == "dequantize-at-load" else 1)
    problem, call = whole()
    routed = replace(call, routing=(torch.ones(2, TOP_K), torch.zeros(2, TOP_K).int()))
    assert moe.forward_for(routed, torch.bfloat16) is experts.plain_forward
    assert choice._memo[f"{problem.key()}|False"].candidate == "dequantize-per-call"
