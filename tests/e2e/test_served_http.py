"""A block-FP8 model behind the real HTTP server, with torch.compile on: every process has the repair, and the answers are right."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    LOGPROB_TOLERANCE,
    disagreements,
    environment,
    job,
    run_offline,
    verify,
)
from offline import PROMPTS, TOKENS

pytestmark = pytest.mark.e2e
COMPILED_TOLERANCE = 0.5
"""Four steps of bfloat16 at the size of the largest logits: the reference runs eager, and compiled code keeps float32 between fused
operations where eager rounds. Compiled against compiled, both give the same bits."""
VERIFIED = ["answers", "log-probabilities", "not flat", "no collapse", "same answer again", "same answer in a batch", "rates"]
"""What ``xpufp8 verify`` asks of a server alone."""
SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
SMALL = ["--gpu-memory-utilization", "0.3", "--max-model-len", "128", "--max-num-seqs", "4", "--seed", "0"]


def processes(session: int) -> list[int]:
    """Every living process of a session: what a server started, whoever its parent is by now, and whatever it calls itself."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                # After the name in brackets: state, parent, group, session.
                state, _, _, owner = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(owner) == session and state != "Z":
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


class Server:
    """A ``vllm serve`` and everything that it starts."""

    def __init__(self, arguments: list[str], env: dict[str, str], folder: Path) -> None:
        self.log = folder / "log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [*SERVE, *arguments, *SMALL, "--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, ready: Callable[[], Any], seconds: float) -> Any:
        """Wait until something is true; the server's end is an answer too."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = ready()
            if found:
                return found
            if self.process.poll() is not None:
                return None
            time.sleep(0.2)
        raise TimeoutError(self.log.read_text()[-4000:])

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - a loopback address
            return json.load(answer)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pid in processes(self.process.pid):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*arguments: str, env: dict[str, str]) -> Server:
        started.append(Server(list(arguments), env, tmp_path))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def repairing(log: str) -> dict[str, str]:
    """Process id to the name that vLLM's log gives it, for each process that logged the repair; the API server has no prefix yet."""
    lines = re.findall(r"^(?:\((\S+) pid=\d+\) )?.*xpufp8 repair kernel:fp8_block \(pid (\d+)\)", log, re.MULTILINE)
    return {pid: name or "APIServer" for name, pid in lines}


def test_block_fp8_is_served_compiled(serve: Any, cache: Path, model: Any, stock: dict[str, Any], reference: Path) -> None:
    folder = model("llama-fp8-block")
    server = serve(folder, env=environment(cache, "kernel:fp8_block"))
    assert server.wait(server.healthy, 900), server.log.read_text()[-4000:]
    got = []
    for prompt in PROMPTS:
        body = {"model": folder, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 5, "ignore_eos": True}
        choice = server.ask({**body, "return_tokens_as_token_ids": True})["choices"][0]
        tokens = [int(text.removeprefix("token_id:")) for text in choice["logprobs"]["tokens"]]
        steps = [{k.removeprefix("token_id:"): v for k, v in step.items()} for step in choice["logprobs"]["top_logprobs"]]
        got.append({"tokens": tokens, "logprobs": steps})
    code, verified = verify(f"http://127.0.0.1:{server.port}", "--reference", str(reference))
    log = server.log.read_text()
    server.stop()
    found, steps_compared = disagreements(stock["block-reference"]["outputs"], got, COMPILED_TOLERANCE)
    assert not found
    assert steps_compared >= 24
    assert len(set(repairing(log).values())) >= 3, repairing(log)
    assert "enforce_eager=False" in log
    assert re.search(r"saved AOT compiled function|torch\.compile took|Compiling a graph", log)
    assert list((cache / "vllm" / "torch_compile_cache").rglob("*")), "nothing was compiled"
    assert processes(server.process.pid) == []
    # The same server as a stranger sees it: a healthy FP8 model is far from the limit at which verify speaks.
    checks = {check["name"]: check for check in verified["checks"]}
    agrees = checks["agrees with the reference"]
    assert (code, {name: check["observation"] for name, check in checks.items()}) == (0, dict.fromkeys(checks, "pass")), verified
    assert set(checks) == {*VERIFIED, "agrees with the reference"}
    assert agrees["numbers"]["mean_kl"] < 0.005


def test_same_command_without_the_repair_ends_in_the_known_error(serve: Any, cache: Path, model: Any) -> None:
    server = serve(model("llama-fp8-block"), env=environment(cache))
    assert server.wait(server.healthy, 600) is None
    assert "Failed to find a kernel that can implement the ScaledMM linear layer" in server.log.read_text()
    assert server.process.wait(60) != 0


TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def test_two_ranks_have_the_repair_and_agree(cache: Path, model: Any, stock: dict[str, Any], tmp_path: Path) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks are bound to a core each")
    jobs = [job("block", model("llama-fp8-block"), tensor_parallel_size=2)]
    results, log = run_offline(jobs, environment(cache, "kernel:fp8_block", **TWO_RANKS), tmp_path, "--workers")
    assert "error" not in results["block"], results["block"]
    workers = {name for name in repairing(log).values() if "Worker" in name}
    assert len(workers) == 2, log[-4000:]
    found, steps = disagreements(stock["block-reference"]["outputs"], results["block"]["outputs"], LOGPROB_TOLERANCE)
    assert not found
    assert steps >= 24


def test_killing_a_worker_during_start_leaves_no_orphan(serve: Any, cache: Path, model: Any) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks are bound to a core each")
    server = serve(model("llama-fp8-block"), "-tp", "2", env=environment(cache, "kernel:fp8_block", **TWO_RANKS))

    def workers() -> list[int]:
        found = [int(pid) for pid, name in repairing(server.log.read_text()).items() if "Worker" in name]
        return found if len(found) == 2 else []

    victims = server.wait(workers, 600)
    assert victims, server.log.read_text()[-4000:]
    assert len(processes(server.process.pid)) >= 4
    os.kill(victims[1], signal.SIGKILL)
    assert server.process.wait(300) != 0
    deadline = time.monotonic() + 60
    while processes(server.process.pid) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert processes(server.process.pid) == []


def test_inspection_child_has_the_repair(cache: Path, tmp_path: Path) -> None:
    """The process in which vLLM looks at a model's class: what it returns is asked for, because its log goes nowhere."""
    code = (
        "from vllm.model_executor.models.registry import _run_in_subprocess\n"
        "def applied():\n"
        "    from xpufp8.runtime import plugin\n"
        "    return sorted(plugin.applied())\n"
        "print('applied', _run_in_subprocess(applied))\n"
    )
    env = environment(cache, "kernel:fp8_block")
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert "applied ['kernel:fp8_block']" in done.stdout, done.stderr[-2000:]
