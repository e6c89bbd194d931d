"""The CMP rules on facts: the stage that failed, and the cheapest setting that was seen to avoid it."""

from __future__ import annotations

import pytest
from device_cases import RUN, findings

from probes.device_facts import (
    AvoidanceFact,
    CompileFacts,
    CompileStageFact,
    CompileSubjectFact,
    DeviceRunFact,
    LoweredKernelFact,
)
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


def lowered(*ways: tuple[str, str], source: str = "0.32.0") -> list[tuple[str, str, str, list[str]]]:
    """What is said of one kernel whose configurations lowered, and met the matrix engine, like that."""
    made = [
        LoweredKernelFact(
            "scaled_mm_kernel", f"{i}", lowers, engine, "3.3.0b1", "told", source, "bmg_g21", "fp8-block", "TritonK"
        )  # type: ignore[arg-type]  # written as text
        for i, (lowers, engine) in enumerate(ways)
    ]
    simulated = CompileFacts(DeviceRunFact("sim:arc-pro-b60", "simulated"), "bfloat16", lowered=made)
    found = findings("compile", simulated, device="sim:arc-pro-b60", args=("--enforce-eager",))
    assert all("triton-xpu 3.3.0b1 for bmg_g21; compiled, not run" in e.observed for f in found for e in f.evidence)
    return [(f.code, f.severity, f.status, [x.action for x in f.fixes]) for f in found]


GOOD, OFF, BROKEN = ("pass", "pass"), ("pass", "fail"), ("fail", "unknown")
DISABLED = ["VLLM_DISABLED_KERNELS=TritonK"]


def test_a_kernel_that_does_not_lower_and_one_that_misses_the_engine_are_two_things() -> None:
    assert lowered(GOOD, GOOD) == []
    assert lowered(GOOD, BROKEN) == [("CMP009", "warning", "fail", DISABLED)]
    assert lowered(GOOD, OFF) == [("PRF004", "warning", "fail", DISABLED)]
    assert [code for code, *_ in lowered(OFF, BROKEN)] == ["CMP009", "PRF004"]
    # Products are not known of a kernel without any.
    assert lowered(("pass", "unknown")) == []


def test_of_our_own_kernels_one_configuration_that_is_left_is_enough() -> None:
    assert lowered(GOOD, BROKEN, OFF, source="xpufp8") == []
    assert [code for code, *_ in lowered(BROKEN, BROKEN, source="xpufp8")] == ["CMP009"]
    assert [code for code, *_ in lowered(OFF, BROKEN, source="xpufp8")] == ["PRF004"]


def test_an_interpreter_that_compiles_nothing_is_unknown() -> None:
    simulated = CompileFacts(DeviceRunFact("sim:arc-pro-b60", "simulated"), "bfloat16", lowering_error="python: No such file")
    (found,) = findings("compile", simulated, device="sim:arc-pro-b60")
    assert (found.code, found.status, found.subject) == ("CMP009", "unknown", "triton-xpu")
