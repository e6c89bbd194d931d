"""``doctor --triton-xpu``: vLLM's choosers name the kernels on the simulated device, Intel's compiler in this interpreter compiles them.

The target is the interpreter that has vLLM: XPUFP8_TARGET_PYTHON (``make intel-triton`` sets it).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.intel_triton
ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "data" / "models" / "Qwen3.6-27B-FP8"
TARGET = os.environ.get("XPUFP8_TARGET_PYTHON", "")
try:
    importlib.metadata.version("triton-xpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("triton-xpu is not in this interpreter", allow_module_level=True)

NATIVE = "XPUFp8BlockScaledMMKernel"


def compiled(profile: str, disabled: str, python: str = sys.executable) -> dict[str, Any]:
    """Facts of the probe ``compile`` on a simulated device, with kernels taken out of the row as a person would."""
    context = {
        "device": f"sim:{profile}", "model": str(MODEL), "vllm_args": ["-tp", "2"],
        "options": {"schemes": ["fp8-block"], "dtype": "bfloat16", "moe": False, "shapes": [[5120, 17408]], "triton_xpu": python},
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM"))}
    environment |= {"PYTHONPATH": str(ROOT), "XPUFP8_SIMULATE": profile, "XPUFP8_APPLY": "kernel:fp8_block"}
    environment["VLLM_DISABLED_KERNELS"] = disabled
    done = subprocess.run(
        [TARGET, "-m", "probes", "compile"], input=json.dumps(context), env=environment, capture_output=True, text=True, timeout=550,
        check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"protocol"')]
    assert lines, done.stderr[-2000:]
    envelope: dict[str, Any] = json.loads(lines[-1])
    assert envelope["error"] is None, envelope["error"]
    facts: dict[str, Any] = envelope["facts"]
    return facts


needs_target = pytest.mark.skipif(not TARGET, reason="XPUFP8_TARGET_PYTHON names no interpreter with vLLM")


@needs_target
def test_the_kernel_that_vllm_selects_misses_the_engine_of_alchemist() -> None:
    facts = compiled("arc-a770", NATIVE)
    assert facts["lowering_error"] is None
    assert {(one["kernel"], one["selected"]) for one in facts["lowered"]} == {
        ("_w8a8_triton_block_scaled_mm", "TritonFp8BlockScaledMMKernel")
    }
    assert {(one["architecture"], one["lowers"], one["matrix_engine"]) for one in facts["lowered"]} == {
        ("acm_g10", "pass", "fail")
    }
    assert {one["compiler"] for one in facts["lowered"]} == {importlib.metadata.version("triton-xpu")}


@needs_target
def test_our_kernels_are_compiled_where_the_plan_has_them_and_a_kernel_without_triton_is_a_note() -> None:
    theirs = f"{NATIVE},TritonFp8BlockScaledMMKernel"
    other = compiled("arc-pro-b60", theirs)
    assert other["lowered"] == []
    assert any("BlockWiseTorch" in note for note in other["run"]["notes"])
    facts = compiled("arc-pro-b60", f"{theirs},BlockWiseTorchFP8ScaledMMLinearKernel")
    assert {one["kernel"] for one in facts["lowered"]} == {"w8a16_small", "w8a16_large"}
    assert {(one["source"], one["lowers"], one["matrix_engine"]) for one in facts["lowered"]} == {("xpufp8", "pass", "pass")}
    assert {one["selected"] for one in facts["lowered"]} == {"Xpufp8BlockLinearKernel"}


@needs_target
def test_an_interpreter_without_the_compiler_is_said_to_have_none() -> None:
    facts = compiled("arc-pro-b60", NATIVE, python=TARGET)
    assert facts["lowered"] == []
    assert TARGET in facts["lowering_error"]
    assert "has no Intel backend" in facts["lowering_error"]
