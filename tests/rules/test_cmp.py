"""The CMP rules on facts: the stage that failed, and the cheapest setting that was seen to avoid it."""

from __future__ import annotations

import pytest
from device_cases import RUN, findings

from probes.device_facts import AvoidanceFact, CompileFacts, CompileStageFact, CompileSubjectFact
from probes.facts import ErrorFact, FakeTensorFacts

CODES = {"trace": "CMP001", "aot": "CMP002", "codegen": "CMP003", "run": "CMP006", "autotune": "CMP007", "capture": "CMP008"}


def facts(
    stage: str, *avoided: AvoidanceFact, message: str = "IGC: internal compiler error", compiler: str | None = "g++"
) -> CompileFacts:
    failed = CompileStageFact(stage, "fail", 1.0, ErrorFact("builtins.RuntimeError", message), message)
    return CompileFacts(
        RUN, "bfloat16", compiler=compiler, subjects=[CompileSubjectFact("linear fp8-block", "K", [], [failed], list(avoided))]
    )


@pytest.mark.parametrize(("stage", "code"), CODES.items())
def test_each_stage_has_its_code_and_quotes_the_last_line(stage: str, code: str) -> None:
    (found,) = findings("compile", facts(stage))
    assert (found.code, found.severity, found.fixes[0].action) == (code, "error", "--enforce-eager")
    assert "IGC: internal compiler error" in found.cause


@pytest.mark.parametrize("stage", CODES)
def test_nothing_is_said_of_compiling_where_the_command_does_not(stage: str) -> None:
    assert findings("compile", facts(stage), args=("--enforce-eager",)) == []


def test_the_setting_that_was_seen_to_help_comes_before_eager() -> None:
    tried = [AvoidanceFact("--a", "x", "flag", "fail", "no"), AvoidanceFact("--b", "y", "flag", "pass")]
    (found,) = findings("compile", facts("codegen", *tried))
    assert [f.action for f in found.fixes] == ["--b"]
    assert [e.observed for e in found.evidence][-2:] == ["tried --a: no", "tried --b: passes"]


def test_an_op_without_a_fake_is_left_to_ops001_where_that_was_looked_for() -> None:
    missing = facts("trace", message="Operator does not support running with fake tensors: _xpu_C.fp8_gemm")
    assert findings("compile", missing, fake_tensor=FakeTensorFacts("xpu")) == []
    assert [f.code for f in findings("compile", missing)] == ["CMP001"]


def test_a_missing_compiler_is_one_finding_for_all_parts() -> None:
    one = facts("codegen", compiler=None, message="No working C++ compiler found").subjects[0]
    (found,) = findings(
        "compile", CompileFacts(RUN, "bfloat16", compiler_error="No working C++ compiler found", subjects=[one, one])
    )
    assert (found.code, found.fixes[-1].kind) == ("CMP004", "host")
