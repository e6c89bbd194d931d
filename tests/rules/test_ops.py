"""The OPS rules on facts: what stops torch.compile, what may, what does not load, what is unknown, and what is nobody's business."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from probes.facts import ErrorFact, FakeTensorFacts, KernelTableFacts, Mode, OpFact, OpLibraryFact, SelectionFact
from probes.model_facts import ModelTraceFacts, ReachedOpFact, StageFact, StandInFact
from xpufp8.model import ModelSpec, SchemeUse
from xpufp8.report import Finding
from xpufp8.rules import ops
from xpufp8.rules.base import Case
from xpufp8.rules.op_paths import PATHS, paths_of
from xpufp8.runtime import catalogue

DYNAMO = """Operator does not support running with fake tensors
  Explanation: 
  Hint: see https://docs.google.com/document/d/1GgvOe7C8 for how to fix

  Developer debug context: unsupported operator: torch_ipex.fp8_gemm_w8a16.xpu

 For more details about this graph break, please visit: https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0090.html

from user code:
   File "/somewhere/op_tracing.py", line 230, in call
"""  # noqa: W291 - as torch prints it

GEMM = OpFact(
    "torch_ipex", "fp8_gemm_w8a16.xpu", "torch_ipex::fp8_gemm_w8a16.xpu(Tensor _0, Tensor _1, bool _2, Tensor? _3, Tensor? _4) -> Tensor",
    "live", "intel_extension_for_pytorch._C", "none", "fail", True, ["XPU"], DYNAMO,
)  # fmt: skip
IPEX = "torch_ipex::fp8_gemm_w8a16.xpu"


def op(namespace: str, name: str, tracing: Any = "none", mode: Mode = "live", **extra: Any) -> OpFact:
    traces = {"none": "fail", "undetermined": "unknown"}.get(tracing, "pass")
    words = f"Operator does not support running with fake tensors\n  Developer debug context: unsupported operator: {namespace}.{name}"
    fields: dict[str, Any] = {
        "traces": traces,
        "returns_tensor": True,
        "dispatch_keys": ["XPU"],
        "error": words if tracing == "none" else None,
    }
    return OpFact(namespace, name, f"{namespace}::{name}(Tensor a) -> Tensor", mode, "lib.so", tracing, **(fields | extra))


def model(*schemes: str) -> ModelSpec:
    uses = tuple(SchemeUse(scheme, "every linear layer but lm_head") for scheme in schemes)
    return ModelSpec("m", "m", dtype="bfloat16", quant_method="fp8", uses=uses)


def tables(layout: str = "kernels/linear", **selected: str | None) -> KernelTableFacts:
    selections = [SelectionFact(s.replace("_", "-"), "bfloat16", "fp8", "live", kernel) for s, kernel in selected.items()]
    return KernelTableFacts("0.32.0", "/site/vllm", layout, "XPU", selections=selections)


def trace(*reached: ReachedOpFact, status: Any = "done", **extra: Any) -> ModelTraceFacts:
    fields: dict[str, Any] = {"ops_compiled": list(reached), "stages": [StageFact("trace", status)]}
    return ModelTraceFacts("sim:x", "simulated", "x", "m", "0.32.0", "2.13", "0.1.16.2", **(fields | extra))


def judge(
    *found: OpFact, device: str = "xpu", spec: ModelSpec | None = None, args: tuple[str, ...] = (),
    libraries: tuple[OpLibraryFact, ...] = (), **facts: Any,
) -> list[Finding]:  # fmt: skip
    seen = {"fake_tensor": FakeTensorFacts(device, list(found), list(libraries), "2.13.0")} | facts
    case = Case(device=device, model=spec, vllm_args=args, facts=seen)
    return [finding for rule in ops.RULES for finding in rule.check(rule, case)]


def brief(findings: list[Finding]) -> list[tuple[str, str, str, str]]:
    return [(f.code, f.severity, f.status, f.subject) for f in findings]


# -- the report: IPEX's op, no fake --------------------------------------------------------------------------------------


def test_the_stack_of_the_reports() -> None:
    (finding,) = judge(GEMM, spec=model("fp8-tensor-dynamic"), kernel_table=tables("quantization/kernels"))
    assert (finding.code, finding.severity, finding.status, finding.subject) == ("OPS001", "error", "fail", IPEX)
    said = finding.evidence[0]
    assert said.observed == (
        "torch._dynamo.exc.Unsupported: Operator does not support running with fake tensors; "
        "Developer debug context: unsupported operator: torch_ipex.fp8_gemm_w8a16.xpu"
    )
    assert (said.probe, said.mode) == ("fake_tensor", "live")
    assert "no fake, no Meta kernel" in finding.evidence[1].observed
    assert "ipex_quant.py" in finding.evidence[2].where
    assert finding.affects == ["every linear layer but lm_head"]
    assert [(fix.kind, fix.action) for fix in finding.fixes] == [("runtime", f"fake:{IPEX}"), ("flag", "--enforce-eager")]
    assert finding.fixes[0].cost == ""
    assert "guess" in finding.fixes[1].cost
    assert "after loading" in finding.cause


def test_with_a_fake_there_is_nothing_to_say() -> None:
    repaired = replace(GEMM, tracing="fake", traces="pass", error=None)
    assert judge(repaired, spec=model("fp8-tensor-dynamic"), kernel_table=tables("quantization/kernels")) == []


def test_enforce_eager_makes_it_harmless_and_says_why_it_is_there() -> None:
    (finding,) = judge(
        GEMM, spec=model("fp8-tensor-dynamic"), kernel_table=tables("quantization/kernels"), args=("--enforce-eager",)
    )
    assert (finding.code, finding.severity) == ("OPS001", "info")
    assert "--enforce-eager" in finding.cause


@pytest.mark.parametrize("scheme", ["unquantized", "wna16", "fp8-block"])
def test_a_model_whose_layers_do_not_call_it(scheme: str) -> None:
    assert judge(GEMM, spec=model(scheme), kernel_table=tables("quantization/kernels")) == []


def test_a_later_vllm_with_ipex_beside_it_does_not_call_it() -> None:
    chosen = tables(fp8_tensor_dynamic="XPUW8A16FP8LinearKernel")
    assert judge(GEMM, spec=model("fp8-tensor-dynamic"), kernel_table=chosen) == []


# -- what shows that an op is reached ------------------------------------------------------------------------------------

KERNELS = [(path, kernel) for path in PATHS for kernel in path.kernels]


@pytest.mark.parametrize(("path", "kernel"), KERNELS, ids=[kernel for _, kernel in KERNELS])
def test_the_kernel_that_vllm_selects_decides(path: Any, kernel: str) -> None:
    namespace, _, name = path.op.partition("::")
    scheme = path.schemes[-1]
    missing = op(namespace, name)
    selected = {scheme.replace("-", "_"): kernel}
    (finding,) = judge(missing, spec=model(scheme), kernel_table=tables(**selected))
    assert (finding.code, finding.severity, finding.subject) == ("OPS001", "error", path.op)
    assert f"selects {kernel} for {scheme}" in finding.evidence[-1].observed
    assert judge(missing, spec=model(scheme), kernel_table=tables(**dict.fromkeys(selected, "SomeOtherKernel"))) == []


def test_without_an_answer_of_the_table_it_is_only_a_warning() -> None:
    for table in (None, tables(fp8_tensor_dynamic=None)):
        (finding,) = judge(op("_xpu_C", "fp8_gemm"), spec=model("fp8-tensor-dynamic"), kernel_table=table)
        assert (finding.code, finding.severity, finding.status) == ("OPS002", "warning", "fail")


def test_the_traced_model_decides_where_there_is_one() -> None:
    missing = op("_xpu_C", "fp8_gemm"), op("_xpu_C", "mhc_pre"), op("_vllm_fa2_C", "varlen_fwd")
    reached = ReachedOpFact("_xpu_C::mhc_pre", 64, ["model.layers.*.hc"], "none")
    spec, chosen = model("fp8-tensor-dynamic"), tables(fp8_tensor_dynamic="XPUW8A8FP8LinearKernel")
    (finding,) = judge(*missing, device="sim:x", spec=spec, kernel_table=chosen, model_trace=trace(reached))
    assert (finding.code, finding.subject, finding.affects) == ("OPS001", "_xpu_C::mhc_pre", ["model.layers.*.hc"])
    assert finding.evidence[-1].observed == "the compiled region calls _xpu_C::mhc_pre 64 times"
    assert finding.evidence[-1].mode == "simulated"


@pytest.mark.parametrize("extra", [{"status": "failed"}, {"status": "unknown"}, {"stages": []}])
def test_a_trace_that_did_not_end_decides_nothing(extra: dict[str, Any]) -> None:
    spec, chosen = model("fp8-tensor-dynamic"), tables(fp8_tensor_dynamic="XPUW8A8FP8LinearKernel")
    (finding,) = judge(op("_xpu_C", "fp8_gemm"), spec=spec, kernel_table=chosen, model_trace=trace(**extra))
    assert (finding.code, finding.severity) == ("OPS001", "error"), "then the selected kernel does"


def test_an_op_of_unknown_output_has_only_the_costly_way_out() -> None:
    (finding,) = judge(
        op("_vllm_fa2_C", "varlen_fwd"), spec=model(), model_trace=trace(ReachedOpFact("_vllm_fa2_C::varlen_fwd", 1))
    )
    assert [(fix.kind, fix.action) for fix in finding.fixes] == [("flag", "--enforce-eager")]


def test_a_composite_op_that_cannot_run_on_fake_tensors() -> None:
    composite = op(
        "torch_ipex", "rms_norm_vllm", "composite", traces="fail", error="Cannot access data pointer of Tensor (e.g. FakeTensor)"
    )
    (finding,) = judge(
        composite, spec=model(), model_trace=trace(ReachedOpFact("torch_ipex::rms_norm_vllm", 65, tracing="composite"))
    )
    assert (finding.code, finding.severity) == ("OPS001", "error")
    assert finding.evidence[0].observed.startswith("Cannot access data pointer")
    assert [fix.kind for fix in finding.fixes] == ["flag"], "a composite op takes no fake"
    assert judge(composite) == [], "and unreached it is no finding"


def test_an_op_that_returns_nothing_and_does_not_say_that_it_writes() -> None:
    silent = op("torch_ipex", "dynamic_scaled_fp8_quant.xpu", returns_tensor=False)
    reached = ReachedOpFact("torch_ipex::dynamic_scaled_fp8_quant.xpu", 3)
    (finding,) = judge(silent, spec=model(), model_trace=trace(reached))
    assert "does not say that it writes into an argument" in finding.cause


def test_an_op_that_only_the_traced_model_brings_in() -> None:
    error = ErrorFact("torch._subclasses.fake_tensor.UnsupportedOperatorException", "vllm.of_one_model.default")
    met = StandInFact(
        "fake", "vllm::of_one_model", "trace", "an inferred fake", error, ["model.layers.*.mlp"], "compiled", breaks_compile=True
    )
    outside = replace(met, subject="vllm::eager_only", region="outside")
    (finding,) = judge(spec=model(), model_trace=trace(stand_ins=[met, outside]))
    assert (finding.code, finding.severity, finding.subject) == ("OPS001", "error", "vllm::of_one_model")
    assert finding.affects == ["model.layers.*.mlp"]
    assert finding.evidence[0].observed == "vllm.of_one_model.default"
    assert judge(spec=model(), model_trace=trace(stand_ins=[met]), args=("--enforce-eager",)) == []


def test_an_op_is_named_once_though_both_probes_met_it() -> None:
    met = StandInFact("fake", "_xpu_C::mhc_pre", "trace", region="compiled", breaks_compile=True)
    findings = judge(
        op("_xpu_C", "mhc_pre"), spec=model(), model_trace=trace(ReachedOpFact("_xpu_C::mhc_pre", 1), stand_ins=[met])
    )
    assert brief(findings) == [("OPS001", "error", "fail", "_xpu_C::mhc_pre")]


# -- without a model -----------------------------------------------------------------------------------------------------


def test_without_a_model_an_op_of_linear_layers_warns_and_all_others_are_one_line() -> None:
    others = [op("_xpu_C", f"op{i}") for i in range(30)] + [op("_moe_C", "reorder_mxfp_scales"), op("_C", "weak_ref_tensor")]
    findings = judge(GEMM, *others)
    assert brief(findings) == [("OPS002", "warning", "fail", IPEX), ("OPS002", "info", "unknown", "others")]
    assert "_xpu_C: op0, op1" in findings[1].cause
    assert "_moe_C: reorder_mxfp_scales" in findings[1].cause
    assert [fix.action for fix in findings[1].fixes] == ["fake:all"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ops_that_no_one_reaches_raise_no_alarm_elsewhere(device: str) -> None:
    assert judge(op("_C", "greedy_argmax"), op("_C", "fused_gumbel_argmax"), op("vllm", "some_op"), device=device) == []


@pytest.mark.parametrize("tracing", ["fake", "meta", "composite", "trivial"])
def test_ops_that_trace_are_no_finding(tracing: str) -> None:
    traced = op("_xpu_C", "fp8_gemm", tracing)
    assert judge(traced, spec=model("fp8-block"), kernel_table=tables(fp8_block="XPUFp8BlockScaledMMKernel")) == []


# -- libraries and unknowns ----------------------------------------------------------------------------------------------


def library(
    name: str, message: str = "libsycl.so.8: cannot open shared object file", kind: str = "builtins.ImportError"
) -> OpLibraryFact:
    cause = ErrorFact(kind, message)
    return OpLibraryFact(name, f"/site/{name}.so", loaded=False, error=ErrorFact("builtins.RuntimeError", "wrapped", cause=cause))


def test_libraries_that_fail_for_one_reason_are_one_finding() -> None:
    names = ("vllm_xpu_kernels._C", "vllm_xpu_kernels._xpu_C", "vllm._xpu_ops")
    (finding,) = judge(libraries=tuple(map(library, names)))
    assert (finding.code, finding.severity, finding.subject) == ("OPS003", "error", "vllm_xpu_kernels._C")
    assert [e.observed for e in finding.evidence] == [
        f"{n}: ImportError: libsycl.so.8: cannot open shared object file" for n in names
    ]
    assert "2 more failed" in finding.cause


def test_two_reasons_are_two_findings() -> None:
    other = library("vllm._custom_ops", "undefined symbol: _ZN3c10", "builtins.OSError")
    assert [f.subject for f in judge(libraries=(library("vllm._C"), other), device="cpu")] == ["vllm._C", "vllm._custom_ops"]


@pytest.mark.parametrize(
    ("device", "name"),
    [("xpu", "vllm.compilation.passes.fusion.rms_quant_fusion"), ("cpu", "vllm_xpu_kernels._C"), ("xpu", "torchvision"),
     ("cpu", "vllm.compilation.passes.fusion.allreduce_rms_fusion"), ("cuda", "vllm._xpu_ops")],
)  # fmt: skip
def test_a_module_that_the_platform_does_not_need_may_fail(device: str, name: str) -> None:
    assert judge(libraries=(library(name),), device=device) == []


def test_ipex_is_needed_by_the_vllm_that_uses_it() -> None:
    ipex = library("intel_extension_for_pytorch")
    assert judge(libraries=(ipex, OpLibraryFact("vllm._xpu_ops", None, loaded=True))) == []
    assert brief(judge(libraries=(ipex, OpLibraryFact("vllm._ipex_ops", None, loaded=True)))) == [
        ("OPS003", "error", "fail", "intel_extension_for_pytorch")
    ]


def test_ops_of_which_only_the_schema_is_known_are_unknown() -> None:
    found = [op("_xpu_C", "fp8_gemm", "undetermined", "static"), op("_xpu_C", "mhc_pre", "undetermined", "static")]
    silent = op("_xpu_C", "is_bmg", "undetermined", "static", returns_tensor=False)
    findings = judge(*found, silent, spec=model("fp8-block"))
    assert brief(findings) == [("OPS004", "warning", "unknown", "linear layers"), ("OPS004", "info", "unknown", "others")]
    assert findings[0].evidence[0].mode == "static"
    assert all("is_bmg" not in f.cause for f in findings)
    assert judge(*found, args=("--enforce-eager",)) == []


# -- the data ------------------------------------------------------------------------------------------------------------


def test_every_repair_that_is_offered_exists() -> None:
    findings = judge(
        GEMM, *[op(path.op.split("::")[0], path.op.split("::")[1]) for path in PATHS if path.op != "torch_ipex::fp8_gemm_w8a16"]
    )
    offered = [fix.action for f in findings for fix in f.fixes if fix.kind == "runtime"]
    assert len(offered) == len(PATHS)
    for action in offered:
        repair = catalogue.find(action)
        assert {f.code for f in findings} & set(repair.codes)


def test_paths_name_schemes_that_exist() -> None:
    from probes.schemes import BY_NAME

    assert {scheme for path in PATHS for scheme in path.schemes} <= set(BY_NAME)
    assert [path.op for path in paths_of("torch_ipex::fp8_gemm_w8a16.xpu")] == ["torch_ipex::fp8_gemm_w8a16"]
    assert paths_of("torch_ipex::fp8_gemm") == []


@pytest.mark.parametrize("rule", ops.RULES, ids=lambda rule: rule.code)
def test_every_rule_has_its_page(rule: Any) -> None:
    headings = [line.removeprefix("## ") for line in rule.page.splitlines() if line.startswith("## ")]
    assert headings == ["What it means", "Why it matters", "How it looks", "How it is fixed"]
    assert rule.code.startswith("OPS")
    assert rule.needs == (() if rule.code == "OPS001" else ("fake_tensor",))  # OPS001 speaks from the traced model alone too
