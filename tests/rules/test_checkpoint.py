"""MDL008: what vLLM will load is in the folder, or the finding says what is not. The probe reads real folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from probes.model_config import observe
from probes.protocol import Context
from xpufp8.report import Finding
from xpufp8.rules import checkpoint
from xpufp8.rules.base import Case

INDEX = "model.safetensors.index.json"


def judge(folder: Path, *args: str, device: str = "cpu") -> list[Finding]:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    facts = observe(Context(device, model=str(folder)))
    case = Case(device, args, facts={"model_config": facts})
    return list(checkpoint.no_weights.check(checkpoint.no_weights, case))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "model-00001-of-00001.pt"]
)
def test_a_folder_with_weights_has_no_finding(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert judge(tmp_path) == []


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    [finding] = judge(tmp_path)
    assert (finding.code, finding.severity, finding.status) == ("MDL008", "warning", "fail")
    assert "no file of weights" in finding.cause
    assert judge(tmp_path, "--load-format", "auto") != []


def test_a_link_to_nowhere_is_no_weight(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    assert len(judge(tmp_path)) == 1


def test_missing_shards_are_named(tmp_path: Path) -> None:
    names = [f"model-{n:05}-of-00006.safetensors" for n in range(1, 7)]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {f"w{n}": name for n, name in enumerate(names)}}))
    (tmp_path / names[0]).write_bytes(b"x")
    [finding] = judge(tmp_path)
    assert f"{names[1]}, {names[2]}, {names[3]} and 2 more" in finding.cause
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    assert judge(tmp_path) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}'])
def test_a_broken_index_is_not_taken_for_missing_weights(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert judge(tmp_path) == []


@pytest.mark.parametrize("args", [("--load-format", "dummy"), ("--load-format=runai_streamer",), ("--load-format", "tensorizer")])
def test_formats_that_read_no_files_here_say_nothing(tmp_path: Path, args: tuple[str, ...]) -> None:
    assert judge(tmp_path, *args) == []


def test_a_simulated_device_starts_nothing(tmp_path: Path) -> None:
    assert judge(tmp_path, device="sim:arc-pro-b60") == []
