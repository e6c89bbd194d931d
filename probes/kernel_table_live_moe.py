"""MoE backends, asked live: which expert kernels vLLM's oracles select on this platform, or why each declined."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from probes.facts import ErrorFact, MoeOracleFact, SelectionFact
from probes.kernel_table_ask import Refusals, UnknownSignatureError, fill, replaced
from probes.kernel_table_live import mode_of, option_value, quant_key, quant_keys
from probes.protocol import Context, describe_error
from probes.schemes import Scheme

ORACLE_OF_TABLE = {
    "fp8": "fp8", "fp8_block": "fp8", "wfp8a16": "fp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "int8": "int8",
    "mixed_precision": "int_wna16", "none": "unquantized",
}  # fmt: skip
"""Scheme's table to the oracle that answers for experts of that scheme."""
_DEFAULT_LAYER = {"num_experts": 8, "experts_per_token": 2, "hidden_dim": 4096, "intermediate_size": 2048}


def ask_oracles(context: Context, oracles: list[MoeOracleFact], schemes: list[Scheme]) -> Iterator[SelectionFact]:
    """One selection for each scheme whose oracle this vLLM has, in bf16 and fp16.

    ``options["moe"]`` may describe the layer: num_experts, experts_per_token, hidden_dim, intermediate_size.
    """
    by_name = {oracle.name: oracle for oracle in oracles}
    broken: ErrorFact | None = None
    for scheme in schemes:
        oracle = by_name.get(ORACLE_OF_TABLE.get(scheme.table, ""))
        for dtype in ("bfloat16", "float16") if oracle is not None else ():
            assert oracle is not None
            module: Any = None
            try:
                # After one failed import Python finds half-made packages, and every later error would be a consequence.
                module = None if broken else importlib.import_module(oracle.file.removesuffix(".py").replace("/", "."))
            except Exception as exc:  # noqa: BLE001 - whatever vLLM's import raises is the answer
                broken = describe_error(exc)
            yield _select(context, scheme, oracle, dtype, module, broken)
            broken = broken and ErrorFact(broken.type, broken.message)


def _select(
    context: Context, scheme: Scheme, oracle: MoeOracleFact, dtype: str, module: Any, error: ErrorFact | None
) -> SelectionFact:
    given = context.options.get("moe")
    layer = {**_DEFAULT_LAYER, **(given if isinstance(given, dict) else {})}
    kernel: str | None = None
    with Refusals(("is_supported_config",)) as refusals, ExitStack() as stack:
        try:
            if module is not None:
                _listen(module, refusals, stack)
                kernel = _name(_ask_twice(module, scheme, dtype, layer, option_value(context.vllm_args, "moe_backend")))
        except UnknownSignatureError as exc:
            error = describe_error(exc)
        except (NotImplementedError, ValueError) as exc:
            # An oracle's way to say that no backend takes the layer.
            refusals.said.append(str(exc))
        except Exception as exc:  # noqa: BLE001 - any other exception is a fact about this vLLM too
            error = describe_error(exc)
    shape = [int(layer["intermediate_size"]), int(layer["hidden_dim"])]
    return SelectionFact(
        scheme.name, dtype, f"moe:{oracle.name}", mode_of(context), kernel, reasons=refusals.told(), error=error, shape=shape
    )


def _listen(module: Any, refusals: Refusals, stack: ExitStack) -> None:
    """Listen to the expert classes that the oracle looks at; it imports them one backend at a time."""
    for name, function in list(vars(module).items()):
        if name.endswith("backend_to_kernel_cls") and callable(function):

            def heard(*args: Any, _function: Any = function, **kwargs: Any) -> Any:
                classes = _function(*args, **kwargs)
                refusals.listen(classes if isinstance(classes, list | tuple) else [classes])
                return classes

            stack.enter_context(replaced(module, name, heard))


def _ask_twice(module: Any, scheme: Scheme, dtype: str, layer: dict[str, Any], moe_backend: str | None) -> Any:
    """Ask, and ask again with an empty model config where the oracle looks into the model's for overrides.

    No model is configured here, and most oracles are content with that; to others a config without overrides says the same.
    """
    try:
        return _ask(module, scheme, dtype, layer, moe_backend)
    except AttributeError as exc:
        current = _current_config()
        if "'NoneType' object" not in str(exc) or current is None or getattr(current, "model_config", None) is not None:
            raise
        with replaced(current, "model_config", SimpleNamespace(quantization_config=None)):
            return _ask(module, scheme, dtype, layer, moe_backend)


def _current_config() -> Any:
    from vllm import config

    ask = getattr(config, "get_current_vllm_config_or_none", None)
    return ask() if ask is not None else None


def _ask(module: Any, scheme: Scheme, dtype: str, layer: dict[str, Any], moe_backend: str | None) -> Any:
    names = [
        name for name in vars(module) if name.startswith("select_") and name.endswith("_moe_backend") and "deepseek" not in name
    ]
    own = [name for name in names if getattr(module, name).__module__ == module.__name__]
    if not own:
        raise UnknownSignatureError(f"{module.__name__} of this vLLM has no select_…_moe_backend")
    select = getattr(module, own[0])
    config = _config(dtype, layer, moe_backend)
    pool: dict[str, Any] = {"config": config, "moe_config": config, "may_have_zp": False, "may_have_bias": False}
    pool |= _keys(scheme)
    return select(**fill(select, pool))


def _keys(scheme: Scheme) -> dict[str, Any]:
    if scheme.table in {"fp8", "fp8_block", "wfp8a16"}:
        weight, activation = quant_keys(scheme)
        return {"weight_key": weight, "activation_key": None if scheme.activation == "none" else activation}
    if scheme.table == "nvfp4":
        return {"weight_key": quant_key("kNvfp4Static"), "activation_key": quant_key("kNvfp4Dynamic")}
    if scheme.table == "mixed_precision":
        return {"weight_key": quant_key("kInt4Static")}
    return {}


def _config(dtype: str, layer: dict[str, Any], moe_backend: str | None) -> Any:
    import torch
    from vllm.model_executor.layers.fused_moe import config as moe_config
    from vllm.platforms import current_platform

    activation = getattr(moe_config, "MoEActivation", None)
    routing = moe_config.RoutingMethodType
    alone = getattr(moe_config.FusedMoEParallelConfig, "make_no_parallel", None)
    if alone is None:
        raise UnknownSignatureError("FusedMoEParallelConfig of this vLLM has no make_no_parallel")
    pool = {
        **layer,
        "num_local_experts": layer["num_experts"],
        "num_logical_experts": layer["num_experts"],
        "activation": "silu" if activation is None else activation.SILU,
        "device": current_platform.device_type,
        "routing_method": getattr(routing, "Renormalize", None) or next(iter(routing)),
        "moe_parallel_config": alone(),
        "in_dtype": getattr(torch, dtype),
    }
    if moe_backend is not None:
        pool["moe_backend"] = moe_backend
    config_class = moe_config.FusedMoEConfig
    try:
        return config_class(**fill(config_class, pool))
    except UnknownSignatureError:
        # Until a rank's share was derived from the whole, it was a required field.
        return config_class(**fill(config_class, {**pool, "intermediate_size_per_partition": layer["intermediate_size"]}))


def _name(answer: Any) -> str | None:
    """Experts class of an oracle's answer ``(backend, class)``; the backend's name where it has no class; None for NONE."""
    backend, experts = answer if isinstance(answer, tuple) else (answer, None)
    if experts is not None:
        return str(experts.__name__)
    name = str(getattr(backend, "name", backend))
    return None if name == "NONE" else name
