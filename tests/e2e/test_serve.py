"""`xpufp8 serve` for real: it comes up where `vllm serve` does not, answers, ends on SIGTERM, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
QUICK = [word for probe in ("fake_tensor", "dtype_agreement", "numerics", "compile", "speed") for word in ("--skip", probe)]
"""Probes that have tests of their own and take most of a first start's time."""
ARGS = ["--max-model-len", "256", "--gpu-memory-utilization", "0.3"]


@pytest.fixture(scope="module")
def block_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-block-fp8"
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "tiny_models.py", "llama-fp8-block", folder], check=True, capture_output=True
    )
    return folder


def has_amx() -> bool:
    return "amx_tile" in Path("/proc/cpuinfo").read_text()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_healthy(server: subprocess.Popen[bytes], port: int, log: Path, limit: float = 1200) -> None:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise AssertionError(log.read_text(errors="replace")[-4000:])


def family(token: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("XPUFP8_TEST") == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.mark.skipif(has_amx(), reason="this CPU has AMX: stock vLLM serves block FP8 here")
def test_stock_vllm_refuses_the_checkpoint(block_fp8: Path) -> None:
    from xpufp8.staging import stage_metadata

    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(block_fp8), *ARGS, "--port", str(free_port())]
    environment = {**os.environ, **CPU, "PYTHONPATH": str(stage_metadata("vllm", "0.32.0+cpu"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode != 0
    assert "Failed to find a kernel that can implement the ScaledMM linear layer" in done.stdout + done.stderr


@pytest.mark.timeout(1500)
def test_serve_comes_up_answers_and_stops(block_fp8: Path, tmp_path: Path) -> None:
    import openai

    port, log = free_port(), tmp_path / "serve.log"
    # Three spellings that must reach vLLM as they are: an alias, an equals sign, JSON.
    extra = ["-tp=1", "--served-model-name", "tiny", "other", "--compilation-config", '{"cudagraph_mode": "NONE"}']
    command = [
        sys.executable,
        "-m",
        "xpufp8",
        "serve",
        str(block_fp8),
        "--device",
        "cpu",
        *QUICK,
        *ARGS,
        *extra,
        "--port",
        str(port),
    ]
    environment = {**os.environ, **CPU, "XPUFP8_TEST": str(port)}
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_healthy(server, port, log)
        text = log.read_text(errors="replace")
        process = psutil.Process(server.pid)
        assert "xpufp8" not in " ".join(process.cmdline()[:3]), "the wrapper has become vLLM: the same pid, no process between"
        if not has_amx():
            assert "kernel:fp8_block" in text, "the plan and the repair's own line are in the log"
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        answer = client.completions.create(model="other", prompt="Hello", max_tokens=8, temperature=0)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    assert code in (0, -signal.SIGTERM), log.read_text(errors="replace")[-2000:]
    time.sleep(1)
    assert family(str(port)) == []


@pytest.mark.timeout(1500)
def test_a_second_start_takes_the_plan_from_the_cache(block_fp8: Path) -> None:
    """Rests on the test before: same options but the port, so it is asked twice here."""
    command = [
        sys.executable,
        "-m",
        "xpufp8",
        "serve",
        str(block_fp8),
        "--device",
        "cpu",
        *QUICK,
        *ARGS,
        "--dry-run",
    ]
    first = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    second = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout == second.stdout
    assert "kernel_table: ok" in first.stderr
    assert "kernel_table" not in second.stderr, "nothing was probed again"
    other = subprocess.run([*command, "--dtype", "float16"], capture_output=True, text=True, timeout=900, check=False)
    assert "kernel_table: ok" in other.stderr, "another option is another key"


@pytest.mark.timeout(1500)
def test_doctor_launches_the_plan_once_and_says_so(block_fp8: Path, tmp_path: Path) -> None:
    """``doctor --launch``: the plan comes up with dummy weights, answers, and nothing of it is left."""
    environment = {**os.environ, **CPU, "XPUFP8_TEST": "launch", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "xpufp8", "doctor", str(block_fp8), "--device", "cpu", "--launch", "--format", "json"]
    done = subprocess.run(
        [*command, *QUICK, *ARGS, "--enforce-eager"], capture_output=True, text=True, timeout=900, check=False, env=environment
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["plan"]["validated"]) == (0, "launch"), done.stderr[-3000:]
    assert "launch: ok" in done.stderr
    assert {f["code"] for f in report["findings"]} & {"CFG008", "CFG009"} == set()
    if not has_amx():
        assert "kernel:fp8_block" in report["plan"]["env"]["XPUFP8_APPLY"]
    assert family("launch") == []
