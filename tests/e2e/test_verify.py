"""A real server with one wrong scale, asked by ``xpufp8 verify``: nothing crashes, nothing looks broken, and the reference tells.

The healthy server is the one of ``test_served_http``, and the reference is what the dequantized twin scored in ``stock``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import environment, verify
from test_served_http import VERIFIED, Server, serve  # noqa: F401 - serve is a fixture

pytestmark = pytest.mark.e2e


def corrupted(model: str, goal: Path) -> str:
    """The same checkpoint with the scale of one block, of one layer, eight times what it should be."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, goal)
    tensors = load_file(goal / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    tensors[name][0, 0] *= 8
    save_file(tensors, goal / "model.safetensors", metadata={"format": "pt"})
    return str(goal)


def test_one_wrong_scale_is_caught_against_a_reference(
    serve: Callable[..., Server],  # noqa: F811 - the fixture
    cache: Path, model: Callable[..., str], reference: Path, tmp_path: Path,
) -> None:  # fmt: skip
    wrong = corrupted(model("llama-fp8-block"), tmp_path / "model")
    server = serve(wrong, "--enforce-eager", env=environment(cache, "kernel:fp8_block"))
    assert server.wait(server.healthy, 400), server.log.read_text()[-4000:]
    code, found = verify(f"http://127.0.0.1:{server.port}", "--reference", str(reference))
    checks: dict[str, Any] = {check["name"]: check for check in found["checks"]}
    assert code == 1
    assert {name: check["observation"] for name, check in checks.items()} == {
        **dict.fromkeys(VERIFIED, "pass"), "agrees with the reference": "fail"
    }  # fmt: skip
    # A healthy server is at most at a tenth of the limit (test_served_http).
    assert checks["agrees with the reference"]["numbers"]["mean_kl"] > 0.05
