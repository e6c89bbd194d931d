"""What the speed probe measures is of the right kind and adds up; no timing is compared with another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device_children import ask, judge

from probes.device_facts import LayerShapeFact, SpeedFacts, TimingFact
from probes.device_shapes import layer_shapes
from probes.protocol import Context
from probes.speed import observe, step_seconds

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}  # fmt: skip


def test_simulated_device_is_unknown_without_torch() -> None:
    facts = observe(Context(device="sim:arc-pro-b60"))
    assert (facts.run.mode, facts.timings, facts.run.unknown) == ("simulated", [], ["speed"])
    assert judge("speed", facts, "fp8-block", device="sim:arc-pro-b60") == []


def config(folder: Path, **more: Any) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA | more), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], {"qkv_proj": (512, 256, 3), "o_proj": (256, 256, 3), "gate_up_proj": (1024, 256, 3), "down_proj": (256, 512, 3)}),
        (
            ["-tp", "2"],
            {"qkv_proj": (256, 256, 3), "o_proj": (256, 128, 3), "gate_up_proj": (512, 256, 3), "down_proj": (256, 256, 3)},
        ),
        (["--pipeline-parallel-size=3"], {"qkv_proj": (512, 256, 1)}),
        # Four ranks of two key heads hold a copy of one each.
        (["--tensor-parallel-size", "4"], {"qkv_proj": (192, 256, 3)}),
    ],
)
def test_layers_of_one_rank_as_vllm_merges_them(tmp_path: Path, args: list[str], expected: dict[str, Any]) -> None:
    found = {s.name: (s.n, s.k, s.count) for s in layer_shapes(Context(model=config(tmp_path), vllm_args=args))}
    assert {name: found[name] for name in expected} == expected


def test_a_large_layer_is_run_smaller_in_whole_tiles_and_keeps_k(tmp_path: Path) -> None:
    model = config(tmp_path, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
    for shape in layer_shapes(Context(model=model)):
        assert shape.run_n * shape.run_k <= 2**24
        assert shape.run_k == shape.k
        assert shape.run_n % 128 == 0


def test_a_nested_text_config_and_one_without_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}), encoding="utf-8")
    assert len(layer_shapes(Context(model=str(tmp_path)))) == 4
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert [s.name for s in layer_shapes(Context(model=str(tmp_path)))] == ["layer"]


def test_a_step_is_the_sum_over_all_layers_and_smaller_runs_count_by_their_share() -> None:
    layers = [LayerShapeFact("a", 256, 128, 10, 256, 128), LayerShapeFact("b", 512, 128, 2, 256, 128)]
    timings = [TimingFact("s", "K", "a", [1, 256, 128], 0.5, 1.0, 1)]
    assert step_seconds(layers, timings, 1, "s") == pytest.approx(10 * 0.5 + 2 * 0.5 * 2)
    assert step_seconds(layers, timings, 8, "s") is None


@pytest.mark.sim
def test_times_on_this_cpu(tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "schemes": ["fp8-channel-token"]}
    context = {"device": "cpu", "model": config(tmp_path), "options": options}
    (answer,) = ask(tmp_path, [("speed", "none", context)])
    facts: SpeedFacts = answer[3]
    assert facts.copy_bytes_per_second is not None
    assert facts.copy_bytes_per_second > 0
    assert {(t.layer, t.shape[0]) for t in facts.timings} >= {
        (name, 1) for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    }
    assert all(t.seconds > 0 and t.plain_seconds > 0 and t.timed == "calls" for t in facts.timings)
    assert facts.tokens_per_second["measured"] == pytest.approx(1 / facts.step_seconds["1"])
    # Launches of tiny layers say nothing of a kernel.
    assert judge("speed", facts, "fp8-channel-token") == []
