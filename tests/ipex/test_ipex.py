"""The real IPEX, in an environment of its own: its ops without fakes, and its FP8 modules under torch.compile."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from xpufp8 import staging

pytestmark = pytest.mark.ipex
PYTHON = os.environ.get("XPUFP8_IPEX_PYTHON", ".venv-ipex/bin/python")
"""Interpreter made by scripts/ipex_environment.sh."""


def run(arguments: list[str], stdin: str = "") -> str:
    if not Path(PYTHON).exists():
        pytest.skip(f"{PYTHON} is missing: scripts/ipex_environment.sh makes it, XPUFP8_IPEX_PYTHON names another")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XPUFP8", "PYTHON"))} | {"PYTHONPATH": str(staging.stage())}
    done = subprocess.run([PYTHON, *arguments], env=env, input=stdin, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def answer() -> Any:
    return json.loads(run([str(Path(__file__).with_name("ipex_child.py"))]))


def test_live_probe_lists_the_ops_that_cannot_be_traced() -> None:
    facts = json.loads(run(["-m", "probes", "fake_tensor"], '{"device": "xpu"}'))["facts"]
    ops = [op for op in facts["ops"] if op["namespace"] == "torch_ipex"]
    without = {op["name"] for op in ops if op["returns_tensor"] and op["traces"] == "fail"}
    assert len(ops) == 126
    assert {"fp8_linear", "cast_to_fp8", "cast_from_fp8", "convert_e4m3_to_bf16", "fused_experts", "grouped_topk", "deepseek_moe",
            "mixtral_moe", "flash_attention", "ipex_woq_linear"} <= without  # fmt: skip
    assert 60 <= len(without) <= 66
    assert all(op["mode"] == "live" for op in ops)


def test_fp8_modules_fail_before(answer: Any) -> None:
    assert set(answer["before"]) == {"eager", "aot_eager"}
    for result in answer["before"].values():
        assert "Unsupported" in result["error"]


def test_fp8_modules_compile_after_and_equal_eager(answer: Any) -> None:
    """With ``aot_eager`` too, which would drop the GEMM that fills its output without saying so."""
    assert len(answer["after"]) == 4
    for how, result in answer["after"].items():
        assert result.get("equal") is True, (how, result)
        assert result["shape"] == [5, 16]
        assert result["dtype"] == how.split()[1]


def test_fakes_agree_with_the_library(answer: Any) -> None:
    assert len(answer["compared"]) == 6
    for op, (outcome, calls, differences) in answer["compared"].items():
        assert (outcome, differences) == ("agrees", []), (op, differences)
        assert calls > 0
    assert set(answer["opcheck"].values()) == {"SUCCESS"}


def test_where_the_gemm_cannot_run_that_is_why(answer: Any) -> None:
    assert answer["gemm"] in ("", "Running FP8 on not supported platform.")


def test_output_of_a_real_op_is_cast_to_the_activations_dtype(answer: Any) -> None:
    cast = answer["cast"]
    assert "Layer.apply_weights" in cast["said"]
    assert (cast["before"], cast["after"], cast["value"], cast["equal"]) == ("torch.float32", "torch.bfloat16", True, True)
