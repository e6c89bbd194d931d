"""The Triton kernels, run by Triton's interpreter in a child process (its switch must be set before Triton is imported), or by a GPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
ALLOWED = 1.2
"""Times the error of widening the same operands and multiplying in torch."""


@functools.cache
def everything(device: str) -> list[dict[str, Any]]:
    """What one child says of all cases; importing torch takes longer than most groups."""
    script = Path(__file__).with_name("triton_cases.py")
    environment = {**os.environ, "XPUFP8_CASES_DEVICE": device, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    environment["XPUFP8_CACHE_DIR"] = os.devnull + "/nowhere"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def cases(group: str, device: str = "cpu") -> list[dict[str, Any]]:
    """The cases of a group."""
    found = [case for case in everything(device) if case["group"] == group]
    assert found
    return found


def check_errors(found: list[dict[str, Any]], least: int) -> None:
    """Every case is as exact as torch on the same operands, the same when repeated, and in the right dtype."""
    measured = [case for case in found if "plain" in case]
    assert len(measured) >= least
    wrong = [case for case in measured if not case["error"] <= ALLOWED * case["plain"] or not case["again"]]
    assert not wrong, wrong[:5]
    assert all(case["dtype"] in ("torch.bfloat16", "torch.float16") and case["shape"][0] >= case["rows"] for case in measured)


def test_linear_layers_agree_with_float64_for_every_scale_layout_dtype_and_order() -> None:
    found = cases("linear")
    check_errors(found, 35)
    assert {case["kernel"] for case in found} >= {"small", "large", "widen-then-matmul"}
    assert {case["rows"] for case in found} == {1, 3, 16, 17, 64, 70}


def test_every_form_of_the_decode_kernel_agrees_with_float64_and_leaves_its_counters_at_zero() -> None:
    found = cases("tiles")
    check_errors(found, 90)
    assert [case["left"] for case in found if case["case"] == "counters"] == [0]


def test_w8a8_agrees_with_float64_of_the_rounded_operands_and_rounds_as_e4m3_does() -> None:
    found = cases("w8a8")
    check_errors(found, 12)
    # Four bits of mantissa: 2^-4 between neighbours, a uniform error of a third of half of that at most.
    assert all(0.01 < case["rounding"] < 2**-5 for case in found)


def test_every_fp8_code_is_widened_exactly() -> None:
    found = cases("codes")
    assert len(found) == 7
    assert {case["case"]: case["wrong"] for case in found if case["wrong"]} == {}
    assert all(case["lost"] <= case["smallest"] for case in found)


def test_activations_outside_fp16_keep_their_precision() -> None:
    found = cases("range")
    check_errors(found, 9)
    assert [case["largest"] for case in found if case["case"] == "zero row"] == [0.0] * 6


def test_values_that_are_no_numbers_stay_where_they_belong() -> None:
    found = {case["case"]: case for case in cases("range")}
    assert found["inf in a row"]["finite"] == [True, True, False, True]
    assert not any(found["inf in a row"]["any"][2:3])
    # The interpreter widens a NaN code as a number; a GPU must not (below).
    assert found["nan in a weight"]["careful"]
    assert not any(nan for place, nan in enumerate(found["nan in a weight"]["nan"]) if place != 5)
    assert all(found["scale 0.0"]["finite"])
    assert not any(found["scale nan"]["finite"])


def check_ahead(device: str) -> None:
    """Rows of every size and rows of zeros are right; what is no number stays in its row."""
    found = cases("ahead", device)
    check_errors(found, 40)
    special = [case for case in found if case["case"] == "no numbers"]
    assert len(special) == 6
    assert all(case["finite"] == [True, True, True, False, False, False, True] and case["zero"] == 0.0 for case in special)


def test_rows_that_fp16_cannot_hold_are_found_and_done_again() -> None:
    check_ahead("cpu")


def check_pairs(device: str) -> None:
    """bfloat16 is a sum of two e4m3fn numbers without loss down to 2^-9 of a row's largest element, and nearly so below."""
    found = cases("pair", device)
    sizes = [case for case in found if "below" in case]
    assert len(sizes) == 25
    assert [case["case"] for case in sizes if case["wrong"] and case["below"] <= 9] == []
    assert all(case["lost"] <= 2**-16 for case in sizes)
    special = next(case for case in found if case["case"] == "no numbers")
    # A row with an infinity, one with its negative, and one with a NaN; the interpreter has no NaN in e4m3fn.
    assert [place for place, finite in enumerate(special["finite"]) if not finite] == ([1, 2] if device == "cpu" else [1, 2, 3])
    assert special["zero"] == 0.0


def test_a_pair_of_fp8_numbers_holds_every_bfloat16_exactly() -> None:
    check_pairs("cpu")


def check_vendor(device: str) -> None:
    """Rounding has e4m3fn's four bits in every group, whatever is in the next one; the product is exact on what was rounded."""
    found = cases("vendor", device)
    rounding = next(case for case in found if case["case"] == "rounding")
    assert rounding["worst"] < 2**-4.5
    assert rounding["largest"] == 448.0
    assert rounding["rows"] == 32
    assert {case["title"]: case["places"] for case in found if case["case"] == "nan"} == {"row": [[3, 0]], "group": [[3, 1]]}
    check_errors(found, 4)


def test_the_vendors_product_agrees_with_float64_of_the_rounded_operands() -> None:
    check_vendor("cpu")


def test_experts_agree_with_float64_and_with_the_plain_ones() -> None:
    found = cases("experts")
    check_errors(found, 3)
    assert all(case["unused"] == 0.0 for case in found if "unused" in case)
    layers = [case for case in found if "difference" in case]
    assert len(layers) == 4
    # Two roundings of weights to fp16 and of what lies between, in another order.
    assert all(case["difference"] < 2e-3 and case["again"] for case in layers), layers
    checked = next(case for case in found if case["case"] == "checked")
    assert checked["refused"] is None
    assert checked["error"] < checked["limit"] / 4 < checked["limit"] < checked["wrong"]


def test_candidates_prepare_run_and_trace_without_a_cache_folder() -> None:
    found = {case["case"]: case for case in cases("candidates")}
    for name in ("triton-w8a8", "triton-rows", "triton-columns"):
        case = found[name]
        assert case["refused"] is None
        assert case["error"] < 4e-3
        assert case["same"]
        assert case["whole"]
        assert case["shape"] == [2, 3, 64]
        assert case["empty"] == [0, 3, 64]
        assert case["order"] == ("columns" if name == "triton-columns" else "rows")
    for layout in ("block", "channel", "tensor"):
        assert "scale" in found[f"bad scale, {layout}"]["raised"]


@pytest.mark.gpu
@pytest.mark.parametrize("group", ["linear", "tiles", "w8a8", "range", "experts"])
def test_a_gpu_agrees_with_float64(group: str) -> None:
    check_errors(cases(group, "cuda"), 3)


@pytest.mark.gpu
def test_a_gpu_finds_rows_that_fp16_cannot_hold() -> None:
    check_ahead("cuda")


@pytest.mark.gpu
def test_a_gpu_makes_pairs_and_groups_as_the_interpreter_does() -> None:
    check_pairs("cuda")
    check_vendor("cuda")


@pytest.mark.gpu
def test_a_gpu_widens_every_fp8_code_exactly_and_traces() -> None:
    assert all(not case["wrong"] and case["lost"] == 0 for case in cases("codes", "cuda"))
    broken = next(case for case in cases("range", "cuda") if case["case"] == "nan in a weight")
    assert [place for place, nan in enumerate(broken["nan"]) if nan] == [5]
    found = {case["case"]: case for case in cases("candidates", "cuda")}
    assert all(found[name]["same"] and found[name]["whole"] for name in ("triton-rows", "triton-w8a8"))
    assert found["triton-columns"]["refused"]
