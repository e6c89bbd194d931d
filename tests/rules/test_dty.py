"""The DTY rules on facts: which fix is offered, and which dtypes count."""

from __future__ import annotations

from typing import Any

import pytest
from device_cases import RUN, findings

from probes.device_facts import CacheDtypeFact, DtypeAgreementFacts, DtypeSupportFact, KernelDtypeFact, OpOutputFact
from probes.facts import ErrorFact, Frame, KernelTableFacts, SelectionFact
from probes.model_facts import MixedDtypeFact, ModelTraceFacts


def call(returned: str | None, dtype: str = "bfloat16", weight: str = "float8_e4m3fn", **more: Any) -> KernelDtypeFact:
    right = returned == dtype
    op = OpOutputFact("_xpu_C::fp8_gemm", dtypes=[returned] if returned else [])
    return KernelDtypeFact(
        "fp8-block", "XPUFp8BlockScaledMMKernel", dtype, weight, "block", [17, 512, 384], returned, observation="pass" if right else "fail",
        ops=more.pop("ops", [op]), **more,
    )  # fmt: skip


def judge(*calls: KernelDtypeFact, **more: Any) -> Any:
    return findings("dtype_agreement", DtypeAgreementFacts(RUN, "bfloat16", kernels=list(calls)), **more)


def test_a_float32_output_can_be_cast_and_a_float16_one_cannot() -> None:
    (wide,) = judge(call("float32"))
    assert (wide.code, wide.subject, wide.fixes[0].action) == ("DTY001", "_xpu_C::fp8_gemm", "cast:_xpu_C::fp8_gemm")
    (narrow,) = judge(call("float16"), call("float16", "float16"))
    assert [f.action for f in narrow.fixes] == ["--dtype float16", "VLLM_DISABLED_KERNELS=XPUFp8BlockScaledMMKernel"]


@pytest.mark.parametrize(
    ("wrong", "asked"),
    [
        (call("float16", "bfloat16", "float8_e5m2"), "bfloat16"),
        (call("bfloat16", "float16"), "bfloat16"),
        (call("float16"), "float16"),
    ],
)
def test_formats_and_dtypes_that_are_not_served_raise_no_alarm(wrong: KernelDtypeFact, asked: str) -> None:
    assert judge(wrong, dtype=asked) == []


def test_other_schemes_than_the_models_are_left_alone() -> None:
    assert judge(call("float16"), scheme="fp8-channel-token") == []


def test_a_call_that_raises_quotes_the_place_and_the_selection() -> None:
    error = ErrorFact("builtins.RuntimeError", "expected m1 and m2\nmore", [Frame("a.py", 1, "f"), Frame("gemm.py", 7, "g")])
    table = KernelTableFacts("0.32.0", "/v", "kernels/linear", "XPU", selections=[
        SelectionFact("fp8-block", "bfloat16", "fp8_block", "live", "XPUFp8BlockScaledMMKernel")
    ])  # fmt: skip
    (found,) = judge(call(None, error=error), kernel_table=table)
    assert (found.code, found.evidence[0].where) == ("DTY003", "gemm.py:7")
    assert found.cause.endswith("raised RuntimeError: expected m1 and m2.")
    assert [e.probe for e in found.evidence] == ["dtype_agreement", "kernel_table"]


def test_a_fake_that_differs_is_named_once_however_often_it_is_called() -> None:
    bad = OpOutputFact("a::b", fake="fail", differences=["output 0: stride (1, 2), the kernel returns (2, 1)"])
    found = judge(call("bfloat16", ops=[bad]), call("bfloat16", ops=[bad]))
    assert [(f.code, f.subject) for f in found] == [("DTY002", "a::b")]
    assert judge(call("bfloat16", ops=[OpOutputFact("a::b", fake="unknown", differences=["no fake"])])) == []


@pytest.mark.parametrize(
    ("bf16", "fp16", "severity"),
    [
        (DtypeSupportFact("bfloat16", "pass", 0.010, 4096), DtypeSupportFact("float16", "pass", 0.001, 4096), "warning"),
        (DtypeSupportFact("bfloat16", "fail", size=4096), DtypeSupportFact("float16", "pass", 0.001, 4096), "error"),
        (DtypeSupportFact("bfloat16", "pass", 0.0012, 4096), DtypeSupportFact("float16", "pass", 0.001, 4096), None),
    ],
)
def test_a_dtype_that_the_device_does_badly(bf16: DtypeSupportFact, fp16: DtypeSupportFact, severity: str | None) -> None:
    facts = DtypeAgreementFacts(RUN, "bfloat16", support=[bf16, fp16])
    found = findings("dtype_agreement", facts)
    assert [(f.code, f.severity, f.fixes[0].action) for f in found] == (
        [("DTY004", severity, "--dtype float16")] if severity else []
    )
    assert findings("dtype_agreement", facts, device="cpu") == []


def test_a_cache_dtype_that_no_backend_takes() -> None:
    refused = CacheDtypeFact("fp8_e5m2", "bfloat16", 128, None, ErrorFact("builtins.ValueError", "No valid attention backend"))
    (found,) = findings("dtype_agreement", DtypeAgreementFacts(RUN, "bfloat16", cache=[refused]))
    assert (found.code, found.fixes[0].action) == ("DTY005", "without --kv-cache-dtype")
    taken = DtypeAgreementFacts(RUN, "bfloat16", cache=[CacheDtypeFact("fp8", "bfloat16", 128, "FlashAttention")])
    assert findings("dtype_agreement", taken) == []


def traced(*mixed: MixedDtypeFact, dtype: str = "bfloat16") -> Any:
    facts = ModelTraceFacts(
        "sim:arc-pro-b60", "simulated", "arc-pro-b60", "m", "0.32.0", "2.11.0", None, dtype=dtype, mixed=list(mixed)
    )
    return [f for f in findings("model_trace", facts, device="sim:arc-pro-b60", dtype=dtype) if f.code == "DTY006"]


GDN = "model.layers.*.linear_attn"
LAYER = MixedDtypeFact("layer", "QwenGatedDeltaNetAttention", GDN, 48, ["dt_bias float16", "norm.weight bfloat16"])
CALL = MixedDtypeFact("op", "vllm::gdn", GDN, 48, ["out bfloat16", "dt_bias of the layer float16"])


def test_dtypes_that_meet_in_an_op_stop_and_those_that_only_lie_together_warn() -> None:
    assert traced() == []
    (met,) = traced(LAYER, CALL)
    assert (met.severity, met.subject, [f.action for f in met.fixes]) == ("error", f"vllm::gdn {GDN}", ["--dtype float16"])
    assert [e.observed.partition(" ")[0] for e in met.evidence] == ["vllm::gdn", "QwenGatedDeltaNetAttention"]
    (held,) = traced(LAYER)
    assert (held.severity, held.affects) == ("warning", [GDN])
    buffer = MixedDtypeFact("op", "vllm::gdn", GDN, 48, ["out float16", "x bfloat16"])
    assert [f.severity for f in traced(LAYER, buffer)] == ["error", "warning"]
    assert [f.action for f in traced(CALL, dtype="float16")[0].fixes] == ["--dtype bfloat16"]
