"""What selected kernels return, heard from real calls in a real child, with kernels whose faults are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device_children import ROOT, ask, judge, plugin

from probes.device_facts import DtypeAgreementFacts
from probes.dtype_agreement import observe
from probes.protocol import Context

EXPECTED = {
    ("none", "fp8-block"): [],
    ("none", "fp8-channel-token"): [],
    ("e5m2", "fp8-block"): [],
    ("fp16", "fp8-block"): [("DTY001", "faulty::gemm"), ("DTY002", "faulty::gemm")],
    ("fp16", "fp8-channel-token"): [("DTY001", "faulty::gemm"), ("DTY002", "faulty::gemm")],
    ("wrong-stride", "fp8-block"): [("DTY002", "faulty::gemm")],
    ("raises", "fp8-block"): [("DTY003", "fp8-block/FaultyBlockKernel")],
}


def test_simulated_device_is_unknown_without_torch() -> None:
    facts = observe(Context(device="sim:arc-pro-b60"))
    assert (facts.run.mode, facts.kernels, len(facts.run.unknown)) == ("simulated", [], 2)
    assert judge("dtype_agreement", facts, "fp8-block", device="sim:arc-pro-b60") == []


LLAMA = str(ROOT / "tests" / "data" / "models" / "Llama-3.1-8B-Instruct")


def cached(dtype: str) -> dict[str, Any]:
    return {
        "device": "cpu", "model": LLAMA, "vllm_args": ["--kv-cache-dtype", dtype, "--max-model-len", "512"],
        "options": {"dtype": "bfloat16", "schemes": []},
    }  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], DtypeAgreementFacts]:
    folder = tmp_path_factory.mktemp("faulty")
    asked = [
        ("dtype_agreement", fault, {"device": "cpu", "options": {"dtype": "bfloat16", "schemes": [scheme]}})
        for fault, scheme in EXPECTED
    ]
    asked += [("dtype_agreement", f"cache {dtype}", cached(dtype)) for dtype in ("fp8", "bfloat16")]
    found = ask(folder, asked, path=plugin(folder))
    return {(fault, next(iter(context["options"]["schemes"]), "")): facts for _, fault, context, facts in found}


@pytest.mark.sim
@pytest.mark.parametrize(("fault", "scheme"), EXPECTED)
def test_each_fault_is_named_and_the_right_op_is_not(answers: dict[Any, DtypeAgreementFacts], fault: str, scheme: str) -> None:
    facts = answers[fault, scheme]
    findings = judge("dtype_agreement", facts, scheme)
    assert [(f.code, f.subject) for f in findings] == EXPECTED[fault, scheme]
    assert all((f.severity, f.status) == ("error", "fail") for f in findings)


@pytest.mark.sim
def test_float16_whatever_goes_in_is_right_under_float16(answers: dict[Any, DtypeAgreementFacts]) -> None:
    facts = answers["fp16", "fp8-block"]
    assert {(k.dtype, k.output_dtype, k.observation) for k in facts.kernels} == {
        ("bfloat16", "float16", "fail"), ("float16", "float16", "pass"), ("float32", "float16", "fail"),
    }  # fmt: skip
    assert judge("dtype_agreement", facts, "fp8-block", dtype="float16") == []
    finding = judge("dtype_agreement", facts, "fp8-block")[0]
    # float16 cannot hold what bfloat16 can, so no cast is offered.
    assert [f.action for f in finding.fixes] == ["--dtype float16", "VLLM_DISABLED_KERNELS=FaultyBlockKernel"]
    assert "returned float16 from faulty::gemm" in finding.evidence[0].observed


@pytest.mark.sim
def test_both_formats_and_every_dtype_of_the_platform_are_asked(answers: dict[Any, DtypeAgreementFacts]) -> None:
    facts = answers["none", "fp8-channel-token"]
    asked = {(k.dtype, k.weight_dtype, k.scale_layout) for k in facts.kernels}
    assert asked == {(d, w, "channel") for d in ("bfloat16", "float16", "float32") for w in ("float8_e4m3fn", "float8_e5m2")}
    assert all([op.fake for op in k.ops] == ["pass"] for k in facts.kernels)
    assert {s.dtype: s.runs for s in facts.support} == dict.fromkeys(("bfloat16", "float16", "float32"), "pass")


@pytest.mark.sim
def test_kernels_of_another_scheme_than_the_models_are_no_finding(answers: dict[Any, DtypeAgreementFacts]) -> None:
    assert judge("dtype_agreement", answers["fp16", "fp8-block"], "fp8-channel-token") == []


@pytest.mark.sim
def test_a_cache_dtype_that_this_processor_refuses_is_named_and_one_that_it_takes_is_not(
    answers: dict[Any, DtypeAgreementFacts],
) -> None:
    """VLLM's own attention layer is made and run: where the processor has neither AVX-512 nor AMX it refuses an FP8 cache."""
    taken, asked = answers["cache bfloat16", ""], answers["cache fp8", ""]
    assert [(c.cache_dtype, c.backend, c.error) for c in taken.cache] == [("bfloat16", "CPU_ATTN", None)]
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    (fact,) = asked.cache
    if {"avx512f", "amx_tile"} & set(flags.split()):
        assert (fact.backend, fact.error) == ("CPU_ATTN", None)
        return
    assert fact.error is not None
    assert "FP8 KV cache on CPU requires" in fact.error.message
    (finding,) = judge("dtype_agreement", asked, "fp8-block")
    assert (finding.code, finding.subject, finding.severity) == ("DTY005", "fp8", "error")
    assert finding.evidence[0].observed.startswith("NotImplementedError: FP8 KV cache on CPU requires")
