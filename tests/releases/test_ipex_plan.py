"""Plans for the last release that serves XPU through IPEX, from its own Python code on a simulated card: its FP8 op has no fake."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from xpufp8.doctor import Request, conclude, judge, launch_for, observe, validate
from xpufp8.planner import Bench, stops
from xpufp8.report import Fix, ProbeReport, Report
from xpufp8.target import Target, resolve

ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.path.abspath(os.environ["XPUFP8_RELEASES"]) if os.environ.get("XPUFP8_RELEASES") else ""  # noqa: PTH100 - links stay links

pytestmark = [
    pytest.mark.releases,
    pytest.mark.sim,
    pytest.mark.skipif(not FOLDER, reason="XPUFP8_RELEASES names no folder of unpacked releases (tests/releases/fetch.py)"),
]

MODEL = str(ROOT / "tests" / "data" / "models" / "Llama-3.1-8B-Instruct")
ONLY = ("environment", "kernel_table", "model_trace")
OP = "torch_ipex::fp8_gemm_w8a16.xpu"
CACHE_OUT = "without --kv-cache-dtype fp8"
FP8 = [MODEL, "--quantization", "fp8"]


PATH = os.pathsep.join(str(Path(FOLDER) / name) for name in ("0.14.1", "gguf"))
"""vLLM 0.14.1 before the installed one, for the probes that the tests start."""


@pytest.fixture(autouse=True)
def ipex_era(_clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PATH)


def target_of(typed: list[str]) -> Target:
    return resolve(typed, device="sim:arc-pro-b60")


def observed(typed: list[str]) -> list[ProbeReport]:
    request = Request(only=ONLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATH)
        return observe(target_of(typed), ONLY, request, launch_for(target_of(typed), request))


@pytest.fixture(scope="module")
def fp8() -> list[ProbeReport]:
    return observed(FP8)


def planned(typed: list[str], reports: list[ProbeReport], request: Request) -> Report:
    return conclude(target_of(typed), reports, request, live=True)


def items(report: Report) -> list[tuple[str, str]]:
    return [(item.kind, item.action) for item in report.plan.items]


def what_fails_without(typed: list[str], reports: list[ProbeReport], report: Report) -> dict[str, set[str]]:
    """Each item of the plan, and the codes that stop serving when it alone is taken away and everything is probed again."""
    _, facts, missing = validate(reports)
    target = target_of(typed)
    bench = Bench(target, Request(only=ONLY), facts, missing, judge(target, facts, missing))
    fixes = {Fix(kind=item.kind, action=item.action) for item in report.plan.items}
    assert not bench.trial(frozenset(fixes)).failures(), "and with all of them nothing fails"
    return {fix.action: {code for code, _ in bench.trial(frozenset(fixes - {fix})).failures()} for fix in fixes}


def test_the_op_is_given_a_fake_and_needs_no_eager(fp8: list[ProbeReport]) -> None:
    report = planned(FP8, fp8, Request(only=ONLY))
    facts = next(p.facts for p in report.probes if p.name == "model_trace")
    assert (facts["vllm"], facts["enforce_eager"]) == ("0.14.1", False)
    assert items(report) == [("runtime", f"fake:{OP}")]
    assert "--enforce-eager" not in report.plan.shell
    assert (report.verdict, report.plan.validated) == ("servable-with-fixes", "probe")
    assert report.plan.because[0].codes == ["OPS001"]
    assert what_fails_without(FP8, fp8, report) == {f"fake:{OP}": {"OPS001"}}


def test_with_repairs_switched_off_the_plan_is_eager_and_says_its_price(fp8: list[ProbeReport]) -> None:
    report = planned(FP8, fp8, Request(only=ONLY, runtime_fixes=False))
    assert items(report) == [("flag", "--enforce-eager")]
    assert report.plan.argv[-1] == "--enforce-eager"
    assert (report.verdict, report.plan.validated) == ("servable-with-fixes", "probe")
    assert "10-20 %" in report.plan.because[0].cost
    assert "10-20 %" in report.plan.because[0].sentence
    assert what_fails_without(FP8, fp8, report) == {"--enforce-eager": {"OPS001"}}


def test_an_fp8_cache_is_refused_by_this_release_in_its_own_words_and_left_out() -> None:
    typed = [*FP8, "--kv-cache-dtype", "fp8"]
    reports = observed(typed)
    report = planned(typed, reports, replace(Request(), only=ONLY))
    (refused,) = [f for f in report.findings if f.code == "MDL001"]
    assert "FlashAttention does not support fp8 kv-cache on this device" in refused.cause
    assert [(f.action, f.verified) for f in refused.fixes] == [(CACHE_OUT, True)]
    assert items(report) == [("runtime", f"fake:{OP}"), ("flag", CACHE_OUT)]
    assert report.plan.argv[-3:] == FP8
    said = next(r.sentence for r in report.plan.because if r.item.startswith("without"))
    assert said.startswith("--kv-cache-dtype fp8 left out; with it: ")
    assert "memory of a 16-bit one" in said
    assert {f.code for f in report.findings if stops(f)} == {"MDL001", "OPS001"}, (
        "the fault behind the fault is in the report too"
    )
    assert what_fails_without(typed, reports, report) == {f"fake:{OP}": {"OPS001"}, CACHE_OUT: {"MDL001"}}
