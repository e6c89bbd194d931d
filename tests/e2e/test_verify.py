"""Real servers of tiny checkpoints asked by ``xpufp8 verify``: healthy, healthy against a reference, and with one wrong scale.

One server at a time: the reference's answers are kept in a file.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import environment
from test_served_http import Server

from xpufp8.launch import ask

pytestmark = pytest.mark.e2e
NAMES = ["answers", "log-probabilities", "not flat", "no collapse", "same answer again", "same answer in a batch", "rates"]
EAGER = ["--enforce-eager"]


def serve_and_verify(model: str, env: dict[str, str], folder: Path, *options: str) -> dict[str, Any]:
    """Serve a checkpoint, verify it from the command line, and end it."""
    folder.mkdir()
    server = Server([model, "--served-model-name", "tiny", *EAGER], env, folder)
    try:
        assert server.wait(server.healthy, 400), server.log.read_text()[-4000:]
        url = f"http://127.0.0.1:{server.port}"
        done = subprocess.run(
            [sys.executable, "-m", "xpufp8", "verify", url, "--json", *options],
            capture_output=True, text=True, timeout=400, check=False, cwd=folder,
        )  # fmt: skip
        assert ask(f"{url}/health") is None
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
    found: dict[str, Any] = json.loads(done.stdout)
    found["exit"] = done.returncode
    return found


def corrupted(model: str, goal: Path) -> str:
    """The same checkpoint with the scale of one block, of one layer, eight times what it should be."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, goal)
    tensors = load_file(goal / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    tensors[name][0, 0] *= 8
    save_file(tensors, goal / "model.safetensors", metadata={"format": "pt"})
    return str(goal)


def observed(found: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["observation"] for check in found["checks"]}


def test_one_wrong_scale_is_caught_against_a_reference_and_the_right_one_is_not(
    cache: Path, model: Callable[..., str], tmp_path: Path
) -> None:
    kept = tmp_path / "reference.json"
    repaired = environment(cache, "kernel:fp8_block")
    twin = serve_and_verify(
        model("llama-fp8-block", dequantized=True), environment(cache), tmp_path / "twin", "--save", str(kept)
    )
    assert (twin["exit"], observed(twin)) == (0, dict.fromkeys(NAMES, "pass"))

    block = model("llama-fp8-block")
    healthy = serve_and_verify(block, repaired, tmp_path / "healthy", "--reference", str(kept))
    assert (healthy["exit"], observed(healthy)["agrees with the reference"]) == (0, "pass"), healthy

    wrong = serve_and_verify(corrupted(block, tmp_path / "model"), repaired, tmp_path / "wrong", "--reference", str(kept))
    assert wrong["exit"] == 1
    # Nothing crashes and nothing looks broken: only the reference tells.
    assert observed(wrong) == {**dict.fromkeys(NAMES, "pass"), "agrees with the reference": "fail"}
    numbers = [next(c["numbers"] for c in f["checks"] if c["name"].startswith("agrees")) for f in (healthy, wrong)]
    assert numbers[1]["mean_kl"] > 10 * numbers[0]["mean_kl"]
