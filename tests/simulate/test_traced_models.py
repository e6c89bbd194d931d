"""Whole models on the simulated XPU: what their facts must be, checked against published figures and against themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from probes.model_facts import ModelTraceFacts

    Traced = Callable[[str], ModelTraceFacts]

pytestmark = pytest.mark.sim

GIB = 1 << 30
REACH_THE_END = (
    "openhermes",
    "openhermes-fp8",
    "qwen3.6-fp8-tp2",
    "qwen3-vl-moe",
    "mla",
    "pipeline",
    "pipeline-last",
    "eager",
    "embedding",
    "small",
    "small-fp8",
    "hybrid",
)


@pytest.mark.parametrize("name", REACH_THE_END)
def test_reaches_the_end(traced: Traced, name: str) -> None:
    facts = traced(name)
    assert [(s.name, s.status, s.reason) for s in facts.stages if s.status not in {"done", "skipped"}] == []
    assert {"configure", "distribute", "construct", "process", "trace", "memory"} <= {
        s.name for s in facts.stages if s.status == "done"
    }
    assert facts.mode == "simulated"
    assert facts.profile == "arc-pro-b60"
    assert {op.mode for op in [*facts.ops_compiled, *facts.ops_outside]} <= {"simulated"}


@pytest.mark.parametrize(("name", "gib"), [("openhermes", "13.4976"), ("openhermes-fp8", "6.9976")])
def test_weight_memory_is_what_vllm_logged(traced: Traced, name: str, gib: str) -> None:
    memory = traced(name).memory
    assert memory is not None
    assert f"{memory.weight_bytes / GIB:.4f}" == gib


def test_block_fp8_27b_takes_fourteen_and_a_half_gib_a_rank(traced: Traced) -> None:
    facts = traced("qwen3.6-fp8-tp2")
    assert facts.memory is not None
    assert abs(facts.memory.weight_bytes / GIB - 14.5) <= 0.4
    assert {k.kernel for k in facts.linear if k.method == "Fp8LinearMethod"} == {"XPUFp8BlockScaledMMKernel"}
    assert {(k.backend, k.count) for k in facts.attention} == {("GDN_ATTN", 48), ("FLASH_ATTN", 16), ("FLASH_ATTN", 27)}
    # Four block-FP8 products in each of 64 layers: two projections of the attention, two of the MLP.
    assert next(op.calls for op in facts.ops_compiled if op.op == "_xpu_C::fp8_gemm") == 4 * 64


@pytest.mark.parametrize("name", ["small", "small-fp8"])
def test_counting_a_few_of_each_kind_is_counting_all(traced: Traced, name: str) -> None:
    short, whole = traced(name), traced(f"{name}-whole")
    assert short.memory == whole.memory
    assert [(k.pattern, k.count, k.kernel, k.weight_shape) for k in short.linear] == [
        (k.pattern, k.count, k.kernel, k.weight_shape) for k in whole.linear
    ]
    assert {(op.op, op.calls) for op in short.ops_compiled} == {(op.op, op.calls) for op in whole.ops_compiled}
    assert sum(kind.count for kind in short.repeating) == 13
    assert sum(kind.traced for kind in short.repeating) < 13
    assert len(short.repeating) == 3


def test_experts_are_reached_only_outside_the_compiled_region(traced: Traced) -> None:
    facts = traced("qwen3-vl-moe")
    outside = {op.op: op for op in facts.ops_outside}
    assert outside["_xpu_C::cutlass_grouped_gemm_interface"].via == "vllm::moe_forward"
    assert outside["_xpu_C::cutlass_grouped_gemm_interface"].tracing == "none"
    inside = {op.op for op in facts.ops_compiled}
    assert "vllm::moe_forward" in inside
    assert not inside & set(outside)
    assert {kind.experts_class for kind in facts.moe} == {"XPUExpertsFp8"}
    assert {kind.experts for kind in facts.moe} == {128}


def test_a_wrong_fake_of_vllm_is_noted_and_stops_nothing(traced: Traced) -> None:
    facts = traced("qwen3-vl-moe")
    wrong = [fact for fact in facts.stand_ins if fact.kind == "wrong-fake"]
    assert [fact.subject for fact in wrong] == ["_xpu_C::fp8_gemm_w8a16"]
    assert any(layer.startswith("visual.") for layer in wrong[0].layers)


def test_enforce_eager_compiles_nothing(traced: Traced) -> None:
    facts = traced("eager")
    assert facts.enforce_eager
    assert facts.ops_compiled == []
    assert "_xpu_C::fp8_gemm_w8a16" in {op.op for op in facts.ops_outside}


def test_stages_of_a_pipeline_split_the_layers(traced: Traced) -> None:
    first, last = traced("pipeline"), traced("pipeline-last")
    assert sum(kind.count for facts in (first, last) for kind in facts.repeating) == 48
    assert "skipped" in {s.status for s in first.stages if s.name == "logits"}
    assert "done" in {s.status for s in last.stages if s.name == "logits"}


def test_remote_code_is_unknown_and_a_removed_architecture_fails(traced: Traced) -> None:
    for name in ("remote", "remote-trusted"):
        assert [s.status for s in traced(name).stages] == ["unknown"]
    stages = traced("removed").stages
    assert [s.status for s in stages] == ["failed"]
    assert "was supported in vLLM until v0.22.0" in stages[0].reason


def test_an_option_that_vllm_refuses_is_a_failure_in_its_own_words(traced: Traced) -> None:
    stages = traced("refused-option").stages
    assert [(s.name, s.status) for s in stages] == [("configure", "failed")]
    assert "--max-model-len" in stages[0].reason


def test_the_cache_is_sized_by_vllm(traced: Traced) -> None:
    memory = traced("openhermes").memory
    assert memory is not None
    # 32 layers, keys and values, 8 heads of 128, two bytes each.
    assert memory.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert memory.kv_needed_bytes == memory.kv_bytes_per_token * 32768
    assert memory.device_bytes == 24385683456


def test_healthy_models_mix_no_dtypes(traced: Traced) -> None:
    names = (*REACH_THE_END, "half-work-buffer-float16")
    assert {name: traced(name).mixed for name in names if traced(name).mixed} == {}


@pytest.mark.parametrize(("name", "odd"), [("half-bias", "dt_bias of the layer"), ("half-work-buffer", "core_attn_out")])
def test_a_float16_tensor_in_a_bfloat16_layer_is_seen_where_an_op_reads_both(traced: Traced, name: str, odd: str) -> None:
    facts = traced(name)
    (call,) = [one for one in facts.mixed if one.where == "op"]
    assert (call.subject, call.pattern) == ("vllm::gdn_attention_core_xpu", "model.layers.*.linear_attn")
    assert call.count == 10
    assert f"{odd} float16" in call.tensors
    assert "projected_states_qkvz bfloat16" in call.tensors
    layers = [(one.subject, one.count, one.tensors[0]) for one in facts.mixed if one.where == "layer"]
    assert layers == ([("QwenGatedDeltaNetAttention", 10, "dt_bias float16")] if name == "half-bias" else [])
    # The op is opaque to the trace, so nothing else fails: this is what strikes at the first request.
    assert {stage.status for stage in facts.stages} == {"done"}
