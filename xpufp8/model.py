"""The model as its config.json describes it: where it is, its architecture, its dtype, and its quantization schemes.

Only config.json is read. A hub id is looked up in the local cache; nothing is ever downloaded.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpufp8 import options
from xpufp8.errors import UsageError, user_path

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "half": "float16", "fp16": "float16"}
DTYPES |= {"float32": "float32", "float": "float32", "fp32": "float32"}


@dataclass(frozen=True)
class SchemeUse:
    """One quantization scheme (``probes.schemes``) and the layers that use it."""

    scheme: str
    layers: str
    """For people: ``every linear layer but lm_head``."""
    moe: bool = False
    """True when it is about the experts of a mixture-of-experts layer, whose kernels come from an oracle, not a table."""


@dataclass(frozen=True)
class ModelSpec:
    """What config.json and the typed options say of a model."""

    source: str
    """As typed."""
    folder: str
    config: dict[str, Any] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    dtype: str = "bfloat16"
    """bfloat16, float16 or float32: ``--dtype`` if given, else the checkpoint's."""
    quant_method: str | None = None
    """fp8, compressed-tensors, modelopt, quark, mxfp4, awq, gptq…; None for an unquantized checkpoint served as it is."""
    online: bool = False
    """True when ``--quantization`` quantizes a 16-bit checkpoint while loading."""
    uses: tuple[SchemeUse, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be understood in the quantization config."""

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config (the whole, for a text-only model)."""
        for key in ("text_config", "llm_config", "thinker_config"):
            inner = self.config.get(key)
            if isinstance(inner, dict):
                return inner
        return self.config

    @property
    def multimodal(self) -> bool:
        """True when the config has a vision or audio part."""
        return any(isinstance(self.config.get(key), dict) for key in ("vision_config", "audio_config"))


def hub_cache() -> Path:
    """The hub's cache folder, by the variables that huggingface_hub reads."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")  # noqa: PTH118
    return user_path(home, "HF_HOME or XDG_CACHE_HOME") / "hub"


def _cached_snapshot(hub_id: str, revision: str) -> Path | None:
    """Folder of a hub id in the local cache, or None."""
    base = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    ref = base / "refs" / revision
    try:
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
        folder = base / "snapshots" / commit
        return folder if (folder / "config.json").is_file() else None
    except OSError:
        return None


def locate(source: str, revision: str = "main") -> Path:
    """Folder with config.json for a MODEL as typed: a folder, a config.json, or a hub id in the local cache.

    Raises:
        UsageError: there is none; the message says what to do.
    """
    path = user_path(source, "MODEL")
    try:
        if path.is_file():
            return _from_file(path, source)
        if path.is_dir():
            return _from_folder(path, source)
    except OSError as error:
        raise UsageError(f"MODEL {source}: cannot be read ({error.strerror or error})") from error
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        folder = _cached_snapshot(source, revision)
        if folder is not None:
            return folder
        raise UsageError(
            f"MODEL {source}: not a local folder, and not in the hub cache ({hub_cache()}). xpufp8 downloads nothing; it needs only "
            f"config.json and the tokenizer:  hf download {source} --include '*.json' 'tokenizer*'"
        )
    raise UsageError(
        f"MODEL {source}: no such folder or file. Give a folder that holds config.json, or a hub id such as org/name."
    )


def _from_file(path: Path, source: str) -> Path:
    if path.suffix == ".gguf":
        raise UsageError(
            f"MODEL {source}: a GGUF file has no config.json; xpufp8 reads Hugging Face checkpoints (a folder with config.json)."
        )
    if path.name != "config.json":
        raise UsageError(
            f"MODEL {source}: is a file, but not a config.json. Give the folder that holds config.json, or that file itself."
        )
    return path.resolve().parent


def _from_folder(path: Path, source: str) -> Path:
    if (path / "config.json").is_file():
        return path.resolve()
    if (path / "params.json").is_file():
        raise UsageError(
            f"MODEL {source}: holds Mistral's params.json and no config.json; xpufp8 reads the Hugging Face form (config.json)."
        )
    if any(path.glob("*.safetensors")) or any(path.glob("*.bin")) or any(path.glob("*.gguf")):
        raise UsageError(
            f"MODEL {source}: holds weights but no config.json. Copy config.json from where the weights came from into it."
        )
    raise UsageError(f"MODEL {source}: this folder has no config.json. Give the folder of a checkpoint.")


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder.

    Raises:
        UsageError: unreadable, no JSON, or no JSON object.
    """
    path = folder / "config.json"
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        at = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "not UTF-8 text or nested too deeply"
        raise UsageError(
            f"{path}: broken JSON{at} ({reason}). Fetch the file again; it may be cut off or a Git LFS pointer."
        ) from error
    if not isinstance(data, dict):
        raise UsageError(f"{path}: holds a JSON {type(data).__name__}, not an object. It is not a model's config.json.")
    if not isinstance(data.get("model_type"), str) and not isinstance(data.get("architectures"), list):
        raise UsageError(
            f"{path}: has neither model_type nor architectures, so it does not describe a model (a tokenizer's or adapter's config?)."
        )
    return data


def load(source: str, vllm_args: Sequence[str] = ()) -> ModelSpec:
    """Everything that a model's config.json and the typed options say.

    Raises:
        UsageError: MODEL cannot be found or read.
    """
    folder = locate(source, options.value(vllm_args, "--revision", "main") or "main")
    return from_config(source, str(folder), read_config(folder), vllm_args)


def from_config(source: str, folder: str, config: dict[str, Any], vllm_args: Sequence[str] = ()) -> ModelSpec:
    """The spec of an already parsed config.json."""
    from xpufp8.quantization import understand

    listed = config.get("architectures")
    spec = ModelSpec(
        source=source,
        folder=folder,
        config=config,
        architectures=tuple(a for a in listed if isinstance(a, str)) if isinstance(listed, list) else (),
        model_type=str(config.get("model_type") or ""),
    )
    asked = (options.value(vllm_args, "--dtype", "auto") or "auto").lower()
    stored = (
        spec.text_config.get("dtype") or spec.text_config.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    )
    dtype = DTYPES.get(asked) or DTYPES.get(str(stored).removeprefix("torch.")) or "bfloat16"
    if asked == "auto" and dtype == "float32":
        dtype = "bfloat16"  # vLLM's own choice for a float32 checkpoint under --dtype auto
    return understand(replace(spec, dtype=dtype), options.value(vllm_args, "--quantization"))
