"""config.json to schemes, and wrong input to one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpufp8.errors import UsageError
from xpufp8.model import from_config, load

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}


def write(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    return str(folder)


def compressed(weights: dict[str, Any], acts: dict[str, Any] | None) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights, "input_activations": acts}}}


FLOAT8 = {"num_bits": 8, "type": "float"}
QUANTIZATIONS = [
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, "fp8-block"),
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8-tensor-dynamic"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8-tensor-static"),
    (compressed(FLOAT8 | {"strategy": "channel"}, FLOAT8 | {"strategy": "token", "dynamic": True}), "fp8-channel-token"),
    (compressed(FLOAT8 | {"strategy": "tensor"}, FLOAT8 | {"strategy": "tensor", "dynamic": False}), "fp8-tensor-static"),
    (compressed(FLOAT8 | {"strategy": "tensor"}, FLOAT8 | {"strategy": "tensor", "dynamic": True}), "fp8-tensor-dynamic"),
    (compressed(FLOAT8 | {"strategy": "channel"}, None), "fp8-w8a16-channel"),
    (compressed(FLOAT8 | {"strategy": "tensor"}, None), "fp8-w8a16-tensor"),
    (compressed(FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}, FLOAT8 | {"strategy": "group"}), "fp8-block"),
    (compressed({"num_bits": 4, "type": "float", "group_size": 16}, None), "nvfp4"),
    (compressed({"num_bits": 4, "type": "float", "group_size": 32}, None), "mxfp4"),
    (compressed({"num_bits": 4, "type": "int", "strategy": "group"}, None), "wna16"),
    (compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8, "type": "int"}), "int8-channel-token"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8-tensor-static"),
    ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "nvfp4"),
    (
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}},
        "fp8-channel-token",
    ),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group"}}}, "mxfp4"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"quant_method": "awq", "bits": 4}, "wna16"),
    ({"quant_method": "gptq", "bits": 4}, "wna16"),
    ({"quant_method": "auto-round", "bits": 4}, "wna16"),
    ({"quant_method": "fbgemm_fp8"}, "fp8-channel-token"),
]


@pytest.mark.parametrize(("quantization", "scheme"), QUANTIZATIONS)
def test_each_method_is_read_as_vllm_reads_it(tmp_path: Path, quantization: dict[str, Any], scheme: str) -> None:
    spec = load(write(tmp_path, quantization_config=quantization))
    assert [use.scheme for use in spec.uses] == [scheme]
    assert not spec.notes
    assert not spec.online


def test_an_unknown_method_is_said_to_be_unknown(tmp_path: Path) -> None:
    spec = load(write(tmp_path, quantization_config={"quant_method": "sparkle"}))
    assert spec.uses == ()
    assert "sparkle" in spec.notes[0]


def test_online_quantization_applies_to_sixteen_bit_checkpoints_only(tmp_path: Path) -> None:
    spec = load(write(tmp_path), ["--quantization", "fp8"])
    assert (spec.online, [u.scheme for u in spec.uses]) == (True, ["fp8-tensor-dynamic"])
    spec = load(write(tmp_path, quantization_config={"quant_method": "awq"}), ["-q", "fp8"])
    assert (spec.online, [u.scheme for u in spec.uses]) == (False, ["wna16"])


def test_experts_ask_an_oracle_of_their_own(tmp_path: Path) -> None:
    spec = load(write(tmp_path, num_experts=8, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}))
    assert [(u.scheme, u.moe) for u in spec.uses] == [("fp8-block", False), ("fp8-block", True)]


@pytest.mark.parametrize(
    ("args", "stored", "dtype"),
    [
        ([], "bfloat16", "bfloat16"),
        (["--dtype", "half"], "bfloat16", "float16"),
        ([], "float32", "bfloat16"),
        (["--dtype=float32"], "bfloat16", "float32"),
    ],
)
def test_dtype_is_the_typed_one_or_the_stored_one(tmp_path: Path, args: list[str], stored: str, dtype: str) -> None:
    assert load(write(tmp_path, dtype=stored), args).dtype == dtype


def test_a_config_json_itself_names_its_folder(tmp_path: Path) -> None:
    write(tmp_path)
    assert load(str(tmp_path / "config.json")).folder == str(tmp_path)


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "models--org--name"
    (base / "snapshots" / "abc").mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("abc\n")
    write(base / "snapshots" / "abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert load("org/name").folder == str(base / "snapshots" / "abc")
    with pytest.raises(UsageError, match=r"hf download org/other"):
        load("org/other")


def _weights_only(folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def _broken(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama",\n "x": ')
    return folder


def _lfs(folder: Path) -> Path:
    (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return folder


def _list(folder: Path) -> Path:
    (folder / "config.json").write_text("[1]")
    return folder


def _no_model(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    return folder


def _gguf(folder: Path) -> Path:
    (folder / "m.gguf").write_bytes(b"GGUF")
    return folder / "m.gguf"


def _deep(folder: Path) -> Path:
    (folder / "config.json").write_text("[" * 100_000)
    return folder


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "nowhere", "no such folder or file"),
        (lambda folder: folder, "no config.json"),
        (_weights_only, "holds weights but no config.json"),
        (_broken, r"broken JSON at line 2, column 7"),
        (_lfs, "broken JSON at line 1"),
        (_list, "holds a JSON list"),
        (_no_model, "neither model_type nor architectures"),
        (_gguf, "GGUF"),
        (_deep, "broken JSON"),
    ],
)
def test_wrong_input_is_one_clear_line(tmp_path: Path, make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        load(str(make(tmp_path)))
    assert "\n" not in str(caught.value)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
NAMES = st.sampled_from(
    [
        "quant_method",
        "weight_block_size",
        "activation_scheme",
        "config_groups",
        "weights",
        "input_activations",
        "num_bits",
        "type",
        "strategy",
        "group_size",
        "quant_algo",
        "quantization",
        "global_quant_config",
        "dtype",
        "qscheme",
        "weight",
        "input_tensors",
        "ignore",
        "g",
    ]
)
METHODS = st.sampled_from(["fp8", "compressed-tensors", "modelopt", "quark", "mxfp4", "awq", "", "x"])
JSON = st.recursive(
    SCALARS | METHODS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=12
)


KNOWN_METHOD = st.fixed_dictionaries(
    {"quant_method": METHODS}, optional=dict.fromkeys(["config_groups", "global_quant_config"], JSON)
)


@given(quantization=JSON | KNOWN_METHOD, experts=JSON, dtype=JSON, text=JSON, architectures=JSON)
def test_no_config_breaks_the_reading(quantization: Any, experts: Any, dtype: Any, text: Any, architectures: Any) -> None:
    config = {
        "model_type": "llama",
        "quantization_config": quantization,
        "num_experts": experts,
        "dtype": dtype,
        "text_config": text,
    }
    spec = from_config("M", "/m", config | {"architectures": architectures})
    assert isinstance(spec.uses, tuple)
