"""MDL rules: each kind of fact to the finding it means, and nothing from a model that reached its end."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from probes.facts import ErrorFact, Frame
from probes.model_facts import ModelTraceFacts, StageFact, StandInFact
from xpufp8.rules import mdl
from xpufp8.rules.base import Case, Rule

STAGES = [StageFact(name, "done") for name in ("configure", "distribute", "construct", "process", "trace", "logits")]
CLEAN = ModelTraceFacts(
    "sim:arc-pro-b60",
    "simulated",
    "arc-pro-b60",
    "/m",
    "0.32.0",
    "2.13.0",
    "0.1.16.2",
    architecture="LlamaForCausalLM",
    stages=STAGES,
)

ROW = ErrorFact(
    "builtins.KeyError",
    "<PlatformEnum.XPU: 4>",
    [
        Frame("/x/probes/trace_build.py", 9, "construct"),
        Frame(
            "/x/site-packages/vllm/model_executor/kernels/linear/__init__.py",
            355,
            "choose_scaled_mm_linear_kernel",
            "for kernel in possible_kernels[current_platform._enum]:",
        ),
    ],
)


def judged(facts: ModelTraceFacts) -> dict[str, list[str]]:
    """Codes to the subjects of their findings."""
    case = Case("sim:arc-pro-b60", facts={"model_trace": facts})
    found: dict[str, list[str]] = {}
    for rule in mdl.RULES:
        for finding in rule.check(rule, case):
            found.setdefault(finding.code, []).append(finding.subject)
    return found


def findings(rule: Rule, facts: ModelTraceFacts) -> list:
    return list(rule.check(rule, Case("sim:arc-pro-b60", facts={"model_trace": facts})))


def with_stage(name: str, status: str, reason: str = "", error: ErrorFact | None = None) -> ModelTraceFacts:
    done = [s for s in STAGES if s.name != name]
    return replace(CLEAN, stages=[*done, StageFact(name, status, error=error, reason=reason)])  # type: ignore[arg-type]  # parametrised words


def test_a_model_that_reaches_its_end_has_no_finding() -> None:
    assert judged(CLEAN) == {}


def test_no_facts_no_finding() -> None:
    for rule in mdl.RULES:
        assert list(rule.check(rule, Case("sim:arc-pro-b60"))) == []


@pytest.mark.parametrize(
    ("stage", "code"),
    [
        ("configure", "MDL001"),
        ("distribute", "MDL001"),
        ("construct", "MDL001"),
        ("process", "MDL002"),
        ("trace", "MDL003"),
        ("logits", "MDL003"),
    ],
)
def test_each_failed_stage_has_its_rule(stage: str, code: str) -> None:
    error = ErrorFact("builtins.ValueError", "wrong\nmore", [Frame("/a/vllm/model.py", 7, "f", "raise ValueError")])
    facts = with_stage(stage, "failed", "ValueError: wrong", error)
    assert judged(facts) == {code: [stage]}
    finding = next(f for rule in mdl.RULES for f in findings(rule, facts))
    assert finding.status == "fail"
    assert finding.evidence[0].mode == "simulated"
    assert finding.evidence[0].observed == "ValueError: wrong (at `raise ValueError`)"
    assert finding.evidence[0].where == "vllm/model.py:7 in f"


@pytest.mark.parametrize("stage", [s.name for s in STAGES] + ["vision"])
def test_unknown_is_never_a_failure(stage: str) -> None:
    facts = with_stage(stage, "unknown", "no hand-made input")
    assert judged(facts) == {"MDL004": [stage]}
    finding = findings(mdl.could_not_tell, facts)[0]
    assert finding.status == "unknown"
    assert finding.severity in {"warning", "info"}


def test_a_missing_row_is_told_with_vllms_line_and_its_repair() -> None:
    fact = StandInFact(
        "row", "_POSSIBLE_FP8_BLOCK_KERNELS[XPU]", "construct", "no row", ROW, ["model.layers.0.linear_attn.in_proj_qkvz"]
    )
    finding = findings(mdl.cannot_construct, replace(CLEAN, stand_ins=[fact]))[0]
    assert "KeyError: <PlatformEnum.XPU: 4>" in finding.evidence[0].observed
    assert finding.evidence[0].where.endswith("kernels/linear/__init__.py:355 in choose_scaled_mm_linear_kernel")
    assert [fix.action for fix in finding.fixes] == ["kernel:fp8_block"]
    assert finding.affects == ["model.layers.0.linear_attn.in_proj_qkvz"]


def test_a_failing_kind_of_stand_in_each_has_one_finding() -> None:
    error = ErrorFact("builtins.AttributeError", "'MergedColumnParallelLinear' object has no attribute 'weight'", [])
    for kind, code in (
        ("attribute", "MDL005"),
        ("module", "MDL006"),
        ("wrong-fake", "MDL007"),
        ("eager", "MDL003"),
        ("row", "MDL001"),
    ):
        facts = replace(CLEAN, stand_ins=[StandInFact(kind, "subject", "construct", "detail", error)])  # type: ignore[arg-type]  # words of the loop
        assert list(judged(facts)) == [code], kind


def test_an_op_without_a_fake_is_left_to_ops() -> None:
    assert judged(replace(CLEAN, stand_ins=[StandInFact("fake", "_xpu_C::fp8_gemm_w8a16", "trace", breaks_compile=True)])) == {}


def test_a_graph_break_that_eager_code_survives_offers_eager() -> None:
    error = ErrorFact("torch._dynamo.exc.Unsupported", "graph break", [])
    facts = replace(
        with_stage("trace", "failed", "Unsupported: graph break", error),
        stand_ins=[StandInFact("eager", "LlamaModel", "trace", error=error, breaks_compile=True)],
    )
    found = findings(mdl.trace_breaks, facts)
    assert len(found) == 1
    assert [fix.action for fix in found[0].fixes] == ["--enforce-eager"]


@pytest.mark.parametrize("rule", mdl.RULES, ids=lambda rule: rule.code)
def test_pages_have_their_headings(rule: Rule) -> None:
    assert re.findall(r"^## (.+)$", rule.page, re.MULTILINE) == [
        "What it means",
        "Why it matters",
        "How it looks",
        "How it is fixed",
    ]


def test_a_build_without_the_quantization_op_is_offered_the_repair() -> None:
    from xpufp8.rules.mdl import _repairs

    said = "_C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4 argument(s)"
    stage = StageFact("process", "failed", error=ErrorFact("builtins.RuntimeError", said))
    assert [fix.action for fix in _repairs("MDL002", stage)] == ["quant:fp8"]
    other = StageFact("process", "failed", error=ErrorFact("builtins.AssertionError", "N must be a multiple of 16"))
    assert _repairs("MDL002", other) == []
    experts = StageFact("process", "failed", error=ErrorFact("builtins.ValueError", "Unsupported FP8 MoE backend: NONE"))
    assert [fix.action for fix in _repairs("MDL002", experts)] == ["moe:fp8"]


@pytest.mark.parametrize(
    ("message", "typed", "fix"),
    [
        ("FlashAttention does not support fp8 kv-cache on this device.", ["--kv-cache-dtype", "fp8"], "without --kv-cache-dtype fp8"),
        ("FlexAttention does not support quantized kv-cache. Yet", ["--kv_cache_dtype=fp8"], "without --kv_cache_dtype=fp8"),
        ("X is not valid. Reason: ['kv_cache_dtype not supported']", ["--kv-cache-dtype=fp8"], "without --kv-cache-dtype=fp8"),
        ("FlashAttention does not support fp8 kv-cache on this device.", [], None),
        ("No valid backend for AttentionSelectorConfig(kv_cache_dtype=fp8): head_size not supported", ["--kv-cache-dtype", "fp8"], None),
    ],
)  # fmt: skip
def test_a_refused_cache_dtype_can_be_left_out(message: str, typed: list[str], fix: str | None) -> None:
    stage = StageFact("construct", "failed", error=ErrorFact("builtins.NotImplementedError", message))
    case = Case("sim:arc-pro-b60", tuple(typed), facts={"model_trace": replace(CLEAN, stages=[stage])})
    (found,) = mdl.cannot_construct.check(mdl.cannot_construct, case)
    assert [f.action for f in found.fixes] == ([fix] if fix else [])


@pytest.mark.parametrize(
    ("said", "kind", "action"),
    [
        (
            "Bfloat16 is not supported. You can use float16 instead by explicitly setting the `dtype` flag in CLI, "
            "for example: --dtype=half.",
            "flag",
            "--dtype float16",
        ),
        (
            "Total number of attention heads (32) must be divisible by tensor parallel size (3).",
            "host",
            "use a tensor-parallel size that divides 32 heads: 1, 2, 4, 8, 16",
        ),
    ],
)
def test_the_way_out_that_vllm_names_is_a_fix(said: str, kind: str, action: str) -> None:
    facts = with_stage("configure", "failed", "vLLM refuses", ErrorFact("builtins.ValueError", said))
    [finding] = findings(mdl.cannot_construct, facts)
    assert [(fix.kind, fix.action) for fix in finding.fixes] == [(kind, action)]
    other = with_stage("configure", "failed", "vLLM refuses", ErrorFact("builtins.ValueError", "something else about --dtype"))
    assert findings(mdl.cannot_construct, other)[0].fixes == []
