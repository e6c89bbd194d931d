"""Traces of the simulated XPU, made once a session."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import TypeAdapter

from probes.model_facts import ModelTraceFacts

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests" / "data" / "models"

SMALL = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 13, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
    "max_position_embeddings": 4096, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_value_head_dim": 64, "full_attention_interval": 4, "decoder_sparse_step": 1,
    "mlp_only_layers": [2, 5], "torch_dtype": "bfloat16",
}  # fmt: skip
"""Thirteen small layers of three kinds: linear attention with experts or dense, full attention with experts."""

HYBRID = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "mamba_d_ssm": 512,
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Attention and Mamba 2 side by side in each layer."""


def jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """What the session traces."""
    small, hybrid = folder / "small", folder / "hybrid"
    for path, config in ((small, SMALL), (hybrid, HYBRID)):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
    fp8 = ["--quantization", "fp8"]
    real: dict[str, tuple[str, list[str]]] = {
        "openhermes": ("OpenHermes-2.5-Mistral-7B", []),
        "openhermes-fp8": ("OpenHermes-2.5-Mistral-7B", fp8),
        "qwen3.6-fp8-tp2": ("Qwen3.6-27B-FP8", ["-tp", "2"]),
        "qwen3-vl-moe": ("Qwen3-VL-30B-A3B-Instruct", [*fp8, "-tp", "2"]),
        "mla": ("DeepSeek-V2-Lite-Chat", [*fp8, "-tp", "2"]),
        "pipeline": ("Qwen2.5-14B-Instruct", ["-pp", "2"]),
        "eager": ("OpenHermes-2.5-Mistral-7B", [*fp8, "--enforce-eager"]),
        "embedding": ("Qwen3-Embedding-0.6B", ["--runner", "pooling"]),
        "remote": ("InternVL3-8B", []),
        "remote-trusted": ("MiniCPM-V-2_6", ["--trust-remote-code"]),
        "removed": ("JAIS-13b", []),
        "refused-option": ("OpenHermes-2.5-Mistral-7B", ["--max-model-len", "many"]),
    }
    made = {name: {"model": str(MODELS / model), "args": args} for name, (model, args) in real.items()}
    made["pipeline-last"] = {**made["pipeline"], "options": {"rank": 1}}
    made["hybrid"] = {"model": str(hybrid), "args": fp8}
    for name, args in (("small", []), ("small-fp8", fp8)):
        made[name] = {"model": str(small), "args": args}
        made[f"{name}-whole"] = {"model": str(small), "args": args, "options": {"whole": True}}
    made["half-bias"] = {"model": str(small), "args": fp8, "fault": "half_bias"}
    made["half-work-buffer"] = {"model": str(small), "args": fp8, "fault": "half_work_buffer"}
    made["half-work-buffer-float16"] = {"model": str(small), "args": [*fp8, "--dtype", "float16"], "fault": "half_work_buffer"}
    return made


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelTraceFacts]:
    """Facts of one of the session's jobs, by name."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "jobs.json").write_text(json.dumps(jobs(folder)))
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("traced_models.py")), str(folder / "jobs.json"), str(folder / "results.json")],
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    answers = json.loads((folder / "results.json").read_text())
    adapter = TypeAdapter(ModelTraceFacts)

    def facts(name: str) -> ModelTraceFacts:
        envelope = answers[name]
        assert envelope["error"] is None, envelope["error"]
        return adapter.validate_python(envelope["facts"])

    return facts
