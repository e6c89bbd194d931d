"""`--validate launch` for real: a start that the probes could not see failing is read, cured and started again, or given up in time."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import metadata
from test_serve import QUICK, family

from xpufp8.doctor import Request
from xpufp8.report import Plan, ProbeReport, Report, TargetInfo, Tool
from xpufp8.target import resolve
from xpufp8.validate import validate_by_launch

pytestmark = pytest.mark.e2e

EAGER = ["--enforce-eager", "--max-num-seqs", "4"]
ROOM_FOR_256 = 3 * 2**18
"""Bytes of KV cache: three blocks of 128 tokens where a request of 512 needs four, and vLLM names 256 as the most that fits."""


def test_a_failed_launch_is_cured_by_what_its_log_says(model: Callable[..., str], tmp_path: Path) -> None:
    """vLLM counts the tokens that fit only when it starts; no probe does that for a CPU."""
    typed = [model("llama-bf16"), *EAGER, "--kv-cache-memory-bytes", str(ROOM_FOR_256)]
    command = [sys.executable, "-m", "xpufp8", "serve", *typed, "--device", "cpu", *QUICK, "--validate", "launch", "--dry-run"]
    token = f"launch-{os.getpid()}"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM")}
    environment = {**kept, "XPUFP8_TEST": token, "XPUFP8_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[-len(typed) - 3 :] == ["serve", *typed, "--max-model-len", "256"], (
        "what was typed is all there, and one option more"
    )
    launches = [line for line in done.stderr.splitlines() if "launch:" in line]
    assert len(launches) == 2, done.stderr
    assert "failed" in launches[0]
    assert "ended with exit code 1 before it answered" in launches[0]
    assert ": ok in " in launches[1]
    (saved,) = (tmp_path / "reports").glob("*.json")
    report = Report.model_validate_json(saved.read_bytes().split(b'"report": ', 1)[1][:-1])
    assert (report.verdict, report.plan.validated) == ("servable-with-fixes", "launch")
    (cause,) = [f for f in report.findings if f.code == "MEM001"]
    assert [f.action for f in cause.fixes if f.verified] == ["--max-model-len 256"]
    assert any("estimated maximum model length is 256" in e.observed for e in cause.evidence)
    assert not [f for f in report.findings if f.code == "CFG009"]
    (reason,) = [r for r in report.plan.because if r.item == "--max-model-len 256"]
    assert (
        reason.sentence
        == "--max-model-len 256; without it: the launch failed: Weights and KV cache do not fit; its price: shorter contexts"
    )
    time.sleep(1)
    assert family(token) == [], "neither attempt has left a process"


def test_what_no_plan_cures_ends_after_three_with_the_cause(
    model: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache smaller than one block: the log names two settings to try, and neither makes room."""
    token = f"launch-never-{os.getpid()}"
    monkeypatch.setenv("XPUFP8_TEST", token)
    monkeypatch.setenv("PYTHONPATH", metadata(tmp_path))
    for name in [n for n in os.environ if n.startswith("VLLM")]:
        monkeypatch.delenv(name)
    target = resolve([model("llama-bf16"), *EAGER, "--kv-cache-memory-bytes", "1000"], device="cpu")
    told: list[ProbeReport] = []
    probed = Report(
        tool=Tool(version="0"),
        verdict="servable",
        target=TargetInfo(python=target.python, device="cpu", simulated=False),
        plan=Plan(),
    )
    report = validate_by_launch(target, Request(on_done=told.append), probed)
    assert [(p.name, p.status) for p in told] == [("launch", "failed")] * 3
    assert report.verdict == "not-servable"
    found = {f.code: f for f in report.findings}
    assert set(found) == {"MEM001", "CFG009"}
    assert "No available memory for the cache blocks" in found["MEM001"].evidence[0].observed
    assert not any(f.verified for f in found["MEM001"].fixes)
    assert found["CFG009"].cause.startswith("3 different plans were launched and none served.")
    tried = [e.observed.partition(": ")[0] for e in found["CFG009"].evidence]
    assert tried == [
        "plan 1 (nothing added)", "plan 2 (--gpu-memory-utilization 0.95)", "plan 3 (--max-num-batched-tokens 2048)",
    ]  # fmt: skip
    logs = {Path(e.where) for e in found["CFG009"].evidence}
    assert len(logs) == 3
    assert all(log.is_file() for log in logs), "every log is kept"
    assert report.plan.host_actions == ["Use a quantized checkpoint or more cards."]
    time.sleep(1)
    assert family(token) == []
