"""A kernel that computes something else, selected by vLLM's chooser: the device shows it, and the plan takes another kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "probes"))
from device_children import plugin  # noqa: E402 - found through the path above

QUICK = [word for probe in ("fake_tensor", "devices", "dtype_agreement", "compile", "speed") for word in ("--skip", probe)]


@pytest.mark.timeout(900)
def test_the_plan_leaves_out_a_kernel_that_the_device_shows_to_be_wrong(tmp_path: Path) -> None:
    model, faulty = tmp_path / "model", tmp_path / "plugin"
    faulty.mkdir()
    script = str(ROOT / "scripts" / "tiny_models.py")
    subprocess.run([sys.executable, script, "llama-fp8-channel", str(model), "--no-weights"], check=True)
    environment = {**os.environ, "PYTHONPATH": str(plugin(faulty)), "FAULT": "doubled"}
    command = [sys.executable, "-m", "xpufp8", "doctor", str(model), "--device", "cpu", "--format", "json", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False, env=environment, cwd=tmp_path)
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]) == (0, "servable-with-fixes"), done.stderr[-3000:]
    # Every probe before the device was content with the kernel; numerics was asked twice, the second time with the plan.
    (wrong,) = [f for f in report["findings"] if f["code"].startswith("NUM")]
    assert (wrong["code"], wrong["subject"]) == ("NUM002", "fp8-channel-token/FaultyScaledKernel")
    assert "2 times what it should be" in wrong["cause"]
    assert [f["action"] for f in wrong["fixes"] if f["verified"]] == ["VLLM_DISABLED_KERNELS=FaultyScaledKernel"]
    assert report["plan"]["env"]["VLLM_DISABLED_KERNELS"] == "FaultyScaledKernel"
    because = {item["item"]: item["codes"] for item in report["plan"]["because"]}
    assert because["VLLM_DISABLED_KERNELS=FaultyScaledKernel"] == ["NUM002"]
    assert done.stderr.count("numerics: ok") == 2
