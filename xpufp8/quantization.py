"""From a checkpoint's quantization config to the schemes that its layers ask vLLM's kernel tables for.

Every method's reading follows vLLM's own class for it (``model_executor/layers/quantization``), named beside each function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpufp8.model import ModelSpec, SchemeUse

Config = Mapping[str, Any]

ONLINE = {
    "fp8": "fp8-tensor-dynamic",
    "fp8_per_tensor": "fp8-tensor-dynamic",
    "fp8_per_block": "fp8-block",
    "fp8_per_channel": "fp8-channel-token",
    "mxfp8": "mxfp8",
    "int8_per_channel_weight_only": "int8-channel-token",
    "nvfp4_per_token": "nvfp4",
    "sym_int4": "wna16",
    "ptpc_fp8": "fp8-channel-token",
}
"""``--quantization`` values that quantize a 16-bit checkpoint while loading (vLLM's ``_ONLINE_SHORTHANDS``, its ``fp8`` and
``ptpc_fp8``, and ``sym_int4`` of Intel's images) to the scheme they make."""

EXPERTS_ONLY = frozenset({"mxfp4"})
"""Schemes that in a mixture-of-experts model are the experts' alone (gpt-oss): vLLM's ``Mxfp4Config`` leaves linear layers at 16 bit."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def understand(spec: ModelSpec, asked: str | None) -> ModelSpec:
    """The spec with its quantization method and schemes filled in; ``asked`` is the value of ``--quantization``."""
    found = (
        spec.config.get("quantization_config")
        or spec.text_config.get("quantization_config")
        or spec.config.get("compression_config")
    )
    if isinstance(found, Mapping):
        method = str(found.get("quant_method") or "").lower() or "unknown"
        reader = READERS.get(method)
        schemes, notes = reader(found) if reader else ([], [f"quantization method {method!r} is not one that xpufp8 reads"])
        uses = _uses(spec, schemes, _ignored(found))
        return replace(spec, quant_method=method, uses=uses, notes=tuple(notes))
    if asked is not None and asked.lower() in ONLINE:
        return replace(spec, quant_method=asked.lower(), online=True, uses=_uses(spec, [ONLINE[asked.lower()]], []))
    return replace(spec, uses=_uses(spec, ["unquantized"], []))


def _uses(spec: ModelSpec, schemes: Sequence[str], ignored: Sequence[str]) -> tuple[SchemeUse, ...]:
    from xpufp8.model import SchemeUse

    experts = any(int(spec.text_config.get(key) or 0) > 1 for key in EXPERT_KEYS if isinstance(spec.text_config.get(key), int))
    layers = "every linear layer" + _but(ignored)
    uses = [SchemeUse(scheme, layers) for scheme in dict.fromkeys(schemes) if not (experts and scheme in EXPERTS_ONLY)]
    if experts:
        uses += [SchemeUse(scheme, "the experts of every MoE layer", moe=True) for scheme in dict.fromkeys(schemes)]
    return tuple(uses)


def _but(ignored: Sequence[str]) -> str:
    if not ignored:
        return " but lm_head"
    kinds = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in ignored))
    shown = ", ".join(kinds[:4]) + (f" and {len(kinds) - 4} more kinds" if len(kinds) > 4 else "")
    return f" but {len(ignored)} excluded modules ({shown})" if len(ignored) > 4 else f" but {', '.join(ignored)}"


def _ignored(config: Config) -> list[str]:
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"):
        value = config.get(key)
        if isinstance(value, list):
            return [str(v) for v in value]
    return []


Reading = tuple[list[str], list[str]]


def _fp8(config: Config) -> Reading:
    """``fp8.py: Fp8Config``."""
    static = config.get("activation_scheme") == "static"
    if config.get("weight_block_size"):
        size = config["weight_block_size"]
        return ["fp8-block"], [] if size == [128, 128] else [f"weight_block_size is {size}, not [128, 128]"]
    return ["fp8-tensor-static" if static else "fp8-tensor-dynamic"], []


def _number(group: Config, key: str) -> Any:
    value = group.get(key)
    return value.lower() if isinstance(value, str) else value


def _compressed(config: Config) -> Reading:
    """``compressed_tensors/compressed_tensors.py``: each group's weights and activations choose a scheme."""
    schemes: list[str] = []
    notes: list[str] = []
    groups = config.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            notes.append(f"group {name} describes no weights")
            continue
        acts = group.get("input_activations")
        scheme = _compressed_scheme(weights, acts if isinstance(acts, Mapping) else None)
        if scheme is None:
            notes.append(
                f"group {name}: {weights.get('num_bits')}-bit {weights.get('type')} {weights.get('strategy')} is not one that xpufp8 reads"
            )
        else:
            schemes.append(scheme)
    return schemes, notes


def _compressed_scheme(weights: Config, acts: Config | None) -> str | None:
    bits, kind, strategy = weights.get("num_bits"), _number(weights, "type"), _number(weights, "strategy")
    if kind == "float" and bits == 8:
        if acts is None:
            return {"tensor": "fp8-w8a16-tensor", "channel": "fp8-w8a16-channel", "block": "fp8-block"}.get(str(strategy))
        if strategy == "block":
            return "fp8-block"
        if strategy == "group" and weights.get("group_size") == 32:
            return "mxfp8"
        how = "token" if _number(acts, "strategy") == "token" else "dynamic" if acts.get("dynamic") else "static"
        known = {
            ("tensor", "static"): "fp8-tensor-static",
            ("tensor", "dynamic"): "fp8-tensor-dynamic",
            ("tensor", "token"): "fp8-tensor-token",
            ("channel", "static"): "fp8-channel-static",
            ("channel", "token"): "fp8-channel-token",
        }
        return known.get((str(strategy), how))
    if kind == "float" and bits == 4:
        return "mxfp4" if weights.get("group_size") == 32 else "nvfp4"
    if kind == "int" and acts is None and bits in (4, 8):
        return "wna16"
    if kind == "int" and bits == 8:
        return "int8-channel-token"
    return None


def _modelopt(config: Config) -> Reading:
    """``modelopt.py: LINEAR_ALGOS``."""
    inner = config.get("quantization")
    algo = str((inner if isinstance(inner, Mapping) else config).get("quant_algo") or "").upper()
    known = {
        "FP8": "fp8-tensor-static",
        "FP8_PER_CHANNEL_PER_TOKEN": "fp8-channel-token",
        "FP8_PB_WO": "fp8-block",
        "NVFP4": "nvfp4",
        "W4A16_NVFP4": "nvfp4",
        "MXFP8": "mxfp8",
    }
    return (
        ([known[algo]], []) if algo in known else ([], [f"modelopt algorithm {algo or 'missing'} is not one that xpufp8 reads"])
    )


def _quark(config: Config) -> Reading:
    """``quark/quark.py``: the global config's weight and input specs."""
    top = config.get("global_quant_config")
    weight = top.get("weight") if isinstance(top, Mapping) else None
    weight = weight[0] if isinstance(weight, list) and weight else weight
    if not isinstance(weight, Mapping):
        return [], ["quark's global_quant_config describes no weights"]
    acts = top.get("input_tensors") if isinstance(top, Mapping) else None
    dtype, scale = str(weight.get("dtype")), str(weight.get("qscheme"))
    if dtype.startswith("fp8"):
        if scale == "per_channel":
            return ["fp8-channel-token"], []
        return ["fp8-tensor-dynamic" if isinstance(acts, Mapping) and acts.get("is_dynamic") else "fp8-tensor-static"], []
    known = {"fp4": "mxfp4", "fp6_e3m2": "mxfp6", "fp6_e2m3": "mxfp6", "int8": "int8-channel-token", "int4": "wna16"}
    return ([known[dtype]], []) if dtype in known else ([], [f"quark dtype {dtype} is not one that xpufp8 reads"])


def _always(scheme: str) -> Callable[[Config], Reading]:
    return lambda _config: ([scheme], [])


READERS: dict[str, Callable[[Config], Reading]] = {
    "fp8": _fp8,
    "deepseek_v4_fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mxfp8": _modelopt,
    "quark": _quark,
    "fbgemm_fp8": _always("fp8-channel-token"),
    "mxfp4": _always("mxfp4"),
    "gpt_oss_mxfp4": _always("mxfp4"),
    "mxfp8": _always("mxfp8"),
    "awq": _always("wna16"),
    "auto_awq": _always("wna16"),
    "gptq": _always("wna16"),
    "auto_gptq": _always("wna16"),
    "auto-round": _always("wna16"),
    "inc": _always("wna16"),
    "moe_wna16": _always("wna16"),
}
