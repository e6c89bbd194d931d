"""The model trace as the host starts it: one child, context in, envelope out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests" / "data" / "models"
RELEASES = os.environ.get("XPUFP8_RELEASES", "")


def trace(
    model: str, args: list[str], device: str = "sim:arc-pro-b60", first: list[str] | None = None, **settings: Any
) -> dict[str, Any]:
    """Envelope of ``python -m probes model_trace``. ``first``: folders at the head of PYTHONPATH."""
    options = settings.pop("options", {})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*(first or []), str(ROOT)]), **settings}
    context = json.dumps({"device": device, "model": str(MODELS / model), "vllm_args": args, "options": options})
    child = subprocess.run(
        [sys.executable, "-m", "probes", "model_trace"], input=context, capture_output=True, text=True, timeout=580,
        env=environment, check=False,
    )  # fmt: skip
    lines = [line for line in child.stdout.splitlines() if line.startswith('{"protocol"')]
    assert lines, child.stderr[-2000:]
    envelope: dict[str, Any] = json.loads(lines[-1])
    assert envelope["error"] is None, envelope["error"]
    facts: dict[str, Any] = envelope["facts"]
    return facts


def dynamo_message(facts: dict[str, Any]) -> str:
    (stand_in,) = [s for s in facts["stand_ins"] if s["kind"] == "fake"]
    return str(stand_in["error"]["message"])


@pytest.mark.sim
def test_without_its_fake_an_op_breaks_the_compiled_region_and_the_trace_goes_on() -> None:
    options = {"without_fakes": ["_xpu_C::fp8_gemm_w8a16"]}
    facts = trace("Llama-3.1-8B-Instruct", ["--quantization", "fp8", "--kv-cache-dtype", "fp8"], options=options)
    message = dynamo_message(facts)
    assert message.startswith("Operator does not support running with fake tensors")
    assert "unsupported operator: _xpu_C.fp8_gemm_w8a16.default" in message
    (stand_in,) = [s for s in facts["stand_ins"] if s["kind"] == "fake"]
    assert stand_in["breaks_compile"]
    parts = ("mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj")
    assert stand_in["layers"] == [f"model.layers.*.{part}" for part in parts]
    reached = {op["op"]: op for op in facts["ops_compiled"]}
    assert reached["_xpu_C::fp8_gemm_w8a16"]["tracing"] == "none"
    assert reached["_xpu_C::fp8_gemm_w8a16"]["calls"] == 4 * 32
    stages = {stage["name"]: stage for stage in facts["stages"]}
    assert stages["trace"]["status"] == "done"
    assert stages["trace"]["passed_after_stand_in"]
    assert {kind["kv_cache_dtype"] for kind in facts["attention"]} == {"fp8"}


needs_releases = pytest.mark.skipif(not RELEASES, reason="XPUFP8_RELEASES names no folder of unpacked releases (make releases)")


def earlier(release: str) -> list[str]:
    """Folders that put an unpacked release first on the path."""
    return [str(Path(RELEASES) / release), str(Path(RELEASES) / "gguf")]


@pytest.mark.releases
@needs_releases
def test_the_block_fp8_report_ends_in_its_key_error_and_the_trace_goes_on() -> None:
    facts = trace("Qwen3.6-27B-FP8", ["-tp", "2"], first=earlier("0.21.0"), XPUFP8_SIMULATE_KERNELS="0.1.3.1")
    (row,) = [s for s in facts["stand_ins"] if s["kind"] == "row"]
    assert row["subject"] == "_POSSIBLE_FP8_BLOCK_KERNELS[XPU]"
    assert row["layers"] == ["language_model.model.layers.0.linear_attn.in_proj_qkvz"]
    assert (row["error"]["type"], row["error"]["message"]) == ("builtins.KeyError", "<PlatformEnum.XPU: 4>")
    last = row["error"]["frames"][-1]
    assert last["file"].endswith("kernels/linear/__init__.py")
    assert last["line"] == 355
    assert {stage["name"]: stage["status"] for stage in facts["stages"]}["trace"] == "done"


@pytest.mark.releases
@needs_releases
def test_the_ipex_report_gets_its_very_message() -> None:
    facts = trace("Llama-3.1-8B-Instruct", ["--quantization", "fp8", "--max-model-len", "4096"], first=earlier("0.14.1"))
    message = dynamo_message(facts)
    assert message.startswith("Operator does not support running with fake tensors")
    assert "unsupported operator: torch_ipex.fp8_gemm_w8a16.xpu" in message
