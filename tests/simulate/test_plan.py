"""Plans for a card that is not here: the fake where it may be registered, --enforce-eager where not, and both are needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpufp8.doctor import Request, conclude, launch_for, observe
from xpufp8.planner import Bench, key, stops
from xpufp8.report import Fix, Report
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
    cost = [x.cost for f in report.findings for x in f.fixes if x.action == "--enforce-eager"]
    assert any("10-20 %" in text for text in cost)
    # Each item left out: the bench's own base trial is the plan without its one item, and it fails.
    bench = Bench(llama(), request, {}, {}, report.findings)
    assert {key(f) for f in bench.base if stops(f)}
    assert bench.trial(frozenset()).failures()
    assert Fix(kind="flag", action="--enforce-eager").kind == "flag"
