"""Two bare ranks: gloo for real on this machine, and every way a run can end, from what the ranks wrote."""

from __future__ import annotations

import json
import os

import pytest

from probes.bounded import Ended
from probes.two_ranks import SIZES, judge, run


@pytest.mark.sim
@pytest.mark.host
def test_gloo_reduces_and_sends_between_two_processes():
    fact = run("cpu", 120, dict(os.environ), send=True)
    assert (fact.status, fact.backend, fact.stage, fact.error) == ("pass", "gloo", "done", "")
    assert [(step.name, step.bytes, step.status) for step in fact.steps] == [
        ("all_reduce", 4, "pass"), ("all_reduce", 1 << 20, "pass"), ("send_recv", 1 << 20, "pass"),
    ]  # fmt: skip


@pytest.mark.sim
@pytest.mark.host
def test_a_backend_without_devices_is_unknown_not_failed():
    fact = run("xpu", 120, dict(os.environ))
    assert fact.status == "unknown"
    assert "0 xpu devices" in fact.error


@pytest.mark.host
def test_a_limit_below_the_import_of_torch_is_unknown():
    fact = run("cpu", 0.05, dict(os.environ))
    assert (fact.status, fact.stage, fact.timed_out) == ("unknown", "start", True)


def said(*events: dict, code: int | None = 0, err: str = "") -> Ended:
    return Ended(code, "".join(json.dumps(event) + "\n" for event in events), err, 5.0)


IMPORT, INIT, DONE = {"stage": "import"}, {"stage": "init"}, {"stage": "done"}


def reduced(size: int, right: bool = True) -> dict:
    return {"step": "all_reduce", "bytes": size, "right": right, "seconds": 0.01}


ALL = [reduced(size) for size in SIZES["xpu"]]
NO_TORCH = "ModuleNotFoundError: No module named 'torch'"
ONE_CARD = "torch shows 1 xpu devices, two ranks need two"
IPC = "RuntimeError: oneCCL: ze_call.cpp:28 do_call: EXCEPTION: ze error at zeMemOpenIpcHandle, code: ZE_RESULT_ERROR_INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("ranks", "status", "stage", "error"),
    [
        ([said(IMPORT, INIT, *ALL, DONE)] * 2, "pass", "done", ""),
        ([said(IMPORT, code=None)] * 2, "fail", "import", ""),
        ([said(IMPORT, INIT, code=1, err=f"noise\n{IPC}\n"), said(IMPORT, INIT, code=None)], "fail", "init", IPC),
        ([said(IMPORT, INIT, ALL[0], ALL[1], code=None)] * 2, "fail", "run", ""),
        ([said(IMPORT, INIT, *ALL, DONE), said(IMPORT, INIT, ALL[0], code=-6)], "fail", "run", "died of SIGABRT"),
        ([said(code=1, err=NO_TORCH)] * 2, "unknown", "start", NO_TORCH),
        ([said(IMPORT, {"skip": ONE_CARD})] * 2, "unknown", "import", ONE_CARD),
        ([said(IMPORT, INIT, reduced(4, right=False), *ALL[1:], DONE)] * 2, "fail", "done", ""),
    ],
)  # fmt: skip
def test_what_two_ranks_wrote_is_judged(ranks, status, stage, error):
    fact = judge("xpu", ranks)
    assert (fact.status, fact.stage, fact.error) == (status, stage, error)


def test_the_step_that_was_under_way_is_the_failed_one():
    fact = judge("xpu", [said(IMPORT, INIT, ALL[0], ALL[1], code=None)] * 2)
    assert [(step.bytes, step.status) for step in fact.steps] == [(4, "pass"), (1 << 20, "pass"), (32 << 20, "fail")]


def test_a_send_that_hangs_is_named():
    fact = judge("xpu", [said(IMPORT, INIT, *ALL, code=None)] * 2, send=True)
    assert (fact.status, fact.steps[-1].name, fact.steps[-1].status) == ("fail", "send_recv", "fail")


def test_a_wrong_sum_on_one_rank_fails_the_step():
    fact = judge(
        "xpu", [said(IMPORT, INIT, *ALL, DONE), said(IMPORT, INIT, reduced(4), reduced(1 << 20, right=False), ALL[2], DONE)]
    )
    assert [step.status for step in fact.steps] == ["pass", "fail", "pass"]
    assert fact.status == "fail"
