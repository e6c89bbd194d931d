"""Plans for a card that is not here: the fake where it may be registered, --enforce-eager where not, and both are needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpufp8.doctor import Request, conclude, judge, launch_for, observe, validate
from xpufp8.planner import stops
from xpufp8.report import Report
from xpufp8.target import Target, resolve

pytestmark = pytest.mark.sim

MODELS = Path(__file__).parent.parent / "data" / "models"
OP = "_xpu_C::fp8_gemm_w8a16"
ONLY = ("environment", "kernel_table", "model_trace")


def llama() -> Target:
    typed = [str(MODELS / "Llama-3.1-8B-Instruct"), "--quantization", "fp8", "--kv-cache-dtype", "fp8", "--max-model-len", "4096"]
    return resolve(typed, device="sim:arc-pro-b60")


def diagnosed(*, runtime_fixes: bool) -> tuple[Report, Request]:
    request = Request(only=ONLY, runtime_fixes=runtime_fixes, options={"without_fakes": [OP]})
    target = llama()
    reports = observe(target, ONLY, request, launch_for(target, request))
    return conclude(target, reports, request, live=True), request


def items(report: Report) -> list[tuple[str, str]]:
    return [(i.kind, i.action) for i in report.plan.items]


def test_an_op_without_a_fake_is_given_one_and_needs_no_eager() -> None:
    report, _ = diagnosed(runtime_fixes=True)
    assert items(report) == [("runtime", f"fake:{OP}")]
    assert report.verdict == "servable-with-fixes"
    assert report.plan.validated == "probe"
    assert report.plan.env["XPUFP8_APPLY"] == f"fake:{OP}"
    assert "--enforce-eager" not in report.plan.shell
    broken = [f for f in report.findings if stops(f)]
    assert {f.subject for f in broken} >= {OP}
    seen = [e.observed for f in broken if f.subject == OP for e in f.evidence]
    assert any(
        "Operator does not support running with fake tensors" in text and OP.replace("::", ".") in text for text in seen
    ), seen
    # One item, and the base run failed without it: 1-minimal.
    assert report.plan.because[0].codes


def test_with_fakes_switched_off_the_plan_is_eager_and_says_what_it_costs() -> None:
    report, request = diagnosed(runtime_fixes=False)
    assert items(report) == [("flag", "--enforce-eager")]
    assert report.plan.argv[-1] == "--enforce-eager"
    (reason,) = report.plan.because
    assert "10-20 %" in reason.cost
    assert reason.cost in reason.sentence, "the plan itself says what the flag costs"
    assert reason.codes == ["OPS001"]
    # 1-minimal: the one item left out, everything probed again, and the same op stops the start.
    reports = observe(llama(), ONLY, request, launch_for(llama(), request))
    _, facts, missing = validate(reports)
    assert {f.subject for f in judge(llama(), facts, missing) if stops(f)} == {OP}
