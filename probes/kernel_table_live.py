"""The live half of the ``kernel_table`` probe: vLLM's own choosers are asked which kernel they would take on this platform.

For every scheme of ``probes.schemes`` and every activation dtype the real chooser gets the real table and a config of the
layer; it answers with a class, with every kernel's refusal, or with an exception. No kernel is constructed and no weight exists.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from probes.facts import ErrorFact, Mode, MoeOracleFact, SelectionFact, TableFact
from probes.kernel_table_ask import Refusals, UnknownSignatureError, disabled_kernels, fill, raised_in, refusal_lines, unbuilt
from probes.protocol import Context, describe_error
from probes.schemes import BY_NAME, SCHEMES, Scheme

DEFAULT_SHAPE = (4096, 4096)
_PLATFORMS = {"xpu": {"XPU"}, "sim": {"XPU"}, "cpu": {"CPU"}, "cuda": {"CUDA", "ROCM"}}
KINDS = {"int8": ("int8", "scaled_mm")}
"""Until 0.14 one table, without a name of its own, answered for INT8; FP8 layers did not ask a table then."""
CONFIGS = {
    "fp8": ("FP8ScaledMMLinearLayerConfig",),
    "fp8_block": ("FP8ScaledMMLinearLayerConfig",),
    "wfp8a16": ("FP8ScaledMMLinearLayerConfig",),
    "int8": ("Int8ScaledMMLinearLayerConfig", "ScaledMMLinearLayerConfig"),
    "scaled_mm": ("ScaledMMLinearLayerConfig",),
    "mixed_precision": ("MPLinearLayerConfig",),
}
_CHOOSERS = {"mixed_precision": "choose_mp_linear_kernel"}
_BACKEND_KEYS = {"fp8": "fp8_w8a8", "fp8_block": "fp8_block_w8a8", "wfp8a16": "w8a16_fp8", "int8": "int8_w8a8"}
"""What vLLM's own callers pass as ``quantization`` since it can choose a backend per quantization."""


@dataclass
class Live:
    """What the live half saw."""

    platform: str | None = None
    selections: list[SelectionFact] = field(default_factory=list)
    error: ErrorFact | None = None


def ask_vllm(context: Context, tables: list[TableFact], oracles: list[MoeOracleFact]) -> Live:
    """Import vLLM and ask; whatever goes wrong is in ``error``, and what was answered before it is kept."""
    live = Live()
    try:
        from vllm.platforms import current_platform
        from vllm.plugins import load_general_plugins

        live.platform = str(current_platform._enum.name)
        wanted = _PLATFORMS.get(context.device.split(":")[0].split("-")[0], {live.platform})
        if live.platform not in wanted:
            message = f"vLLM detects the platform {live.platform} in this process, not {' or '.join(sorted(wanted))}"
            live.error = ErrorFact("probes.kernel_table_live.OtherPlatform", message)
            return live
        # As each of vLLM's processes does: a repair of the runtime half, or a plugin of others, may add kernels.
        load_general_plugins()
        for file in dict.fromkeys(table.file for table in tables):
            # If the tables cannot be imported, that is one fact, not one for every question.
            importlib.import_module(dotted(file))
        with vllm_settings(context.vllm_args):
            for selection in _linear(context, tables):
                live.selections.append(selection)
            if context.options.get("moe", True):
                from probes.kernel_table_live_moe import ask_oracles

                live.selections.extend(ask_oracles(context, oracles, chosen_schemes(context)))
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - an import fails, or a plugin ends the process: that is what is asked
        live.error = describe_error(exc)
    return live


def chosen_schemes(context: Context) -> list[Scheme]:
    """The schemes asked about: ``options["schemes"]``, else all."""
    names = context.options.get("schemes")
    return [BY_NAME[name] for name in names if name in BY_NAME] if names else list(SCHEMES)


def mode_of(context: Context) -> Mode:
    """``simulated`` on a stand-in platform, else ``live``."""
    return "simulated" if context.simulated else "live"


def vllm_settings(vllm_args: list[str]) -> AbstractContextManager[Any]:
    """The current config of vLLM's, with the options that steer kernel selection, or nothing where it cannot be made."""
    try:
        from vllm.config import VllmConfig, set_current_vllm_config

        config = VllmConfig()
        for option in ("linear_backend", "moe_backend"):
            value = option_value(vllm_args, option)
            kernel_config = getattr(config, "kernel_config", None)
            if value is not None and hasattr(kernel_config, option):
                setattr(kernel_config, option, value)
        settings: AbstractContextManager[Any] = set_current_vllm_config(config)
        return settings
    except Exception:  # noqa: BLE001 - the choosers of most releases answer without a config; theirs is the error that counts
        return nullcontext()


def option_value(vllm_args: list[str], option: str) -> str | None:
    """Value of ``--some-option`` as typed last (``--some-option V``, ``--some_option=V``); None if it was not typed."""
    value = None
    for index, text in enumerate(vllm_args):
        name, equals, rest = text.partition("=")
        if name.startswith("--") and name[2:].replace("-", "_") == option:
            value = rest if equals else (vllm_args[index + 1] if index + 1 < len(vllm_args) else None)
    return value


# -- linear layers -----------------------------------------------------------------------------------------------------


def _linear(context: Context, tables: list[TableFact]) -> Iterator[SelectionFact]:
    for scheme in chosen_schemes(context):
        table = table_for(scheme, tables)
        if table is None:
            continue
        for dtype in _dtypes(scheme):
            for shape in _shapes(context):
                yield _select(context, scheme, table, dtype, shape)


def table_for(scheme: Scheme, tables: list[TableFact]) -> TableFact | None:
    """The table that answers for a scheme in this vLLM, if it has one."""
    by_kind = {table.kind: table for table in reversed(tables)}
    return next((by_kind[kind] for kind in KINDS.get(scheme.table, (scheme.table,)) if kind in by_kind), None)


def _shapes(context: Context) -> list[tuple[int, int]]:
    asked = context.options.get("shapes") or [DEFAULT_SHAPE]
    return [(int(shape[0]), int(shape[1])) for shape in asked]


def _dtypes(scheme: Scheme) -> list[str]:
    """bf16 and fp16; fp32 too for FP8 tables where the platform serves it (kernels differ in the outputs they can write)."""
    from vllm.platforms import current_platform

    names = ["bfloat16", "float16"]
    served = {str(dtype).removeprefix("torch.") for dtype in getattr(current_platform, "supported_dtypes", ())}
    return [*names, "float32"] if scheme.table in {"fp8", "fp8_block", "wfp8a16"} and "float32" in served else names


def _select(context: Context, scheme: Scheme, table: TableFact, dtype: str, shape: tuple[int, int]) -> SelectionFact:
    """One question to one chooser."""
    kernel: str | None = None
    error: ErrorFact | None = None
    reasons: list[str] = []
    with Refusals(("is_supported", "can_implement")) as refusals:
        module: Any = None
        try:
            module = importlib.import_module(dotted(table.file))
            row = table_row(getattr(module, table.name))
            refusals.listen(row)
            chosen = choose_kernel(module, scheme, table, dtype, shape, row)
            kernel = chosen.__name__ if isinstance(chosen, type) else type(chosen).__name__
            reasons = refusals.told() + _disabled(row, kernel, refusals.asked)
        except Exception as exc:  # noqa: BLE001 - every exception of a chooser is its answer
            if isinstance(exc, ValueError) and raised_in(exc, module):
                reasons = refusal_lines(str(exc))
            else:
                reasons, error = refusals.told(), describe_error(exc)
    return SelectionFact(
        scheme.name, dtype, table.kind, mode_of(context), kernel, reasons=reasons, error=error, shape=list(shape)
    )


def dotted(file: str) -> str:
    """Module name of a file of the package."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def table_row(table: Any) -> list[type]:
    """The classes that a live table lists for this platform."""
    from vllm.platforms import current_platform

    row = table.get(current_platform._enum, []) if hasattr(table, "get") else table
    return [cls for cls in row if isinstance(cls, type)]


def _disabled(row: list[type], kernel: str, asked: set[str]) -> list[str]:
    """Kernels before the chosen one that were never asked because the environment disables them."""
    names = [cls.__name__ for cls in row]
    before = names[: names.index(kernel)] if kernel in names else []
    return [f"{name}: disabled by VLLM_DISABLED_KERNELS" for name in before if name in disabled_kernels() and name not in asked]


def choose_kernel(
    module: Any, scheme: Scheme, table: TableFact, dtype: str, shape: tuple[int, int], row: list[type], config: Any = None
) -> Any:
    """Call the chooser of a table with what it asks for; ``config`` is the layer's where the caller has made one."""
    scaled = "choose_scaled_mm_linear_kernel" if table.kind in CONFIGS else f"init_{table.kind}_linear_kernel"
    name = _CHOOSERS.get(table.kind, scaled)
    chooser = getattr(module, name, None)
    if chooser is None:
        raise UnknownSignatureError(f"{module.__name__} of this vLLM has no {name}")
    layer = layer_arguments(scheme, dtype, shape)
    pool = {**layer, "possible_kernels": getattr(module, table.name), "quantization": _BACKEND_KEYS.get(table.kind, table.kind)}
    configs = CONFIGS.get(table.kind, ())
    if configs:
        config_class = next((found for config in configs if (found := getattr(module, config, None)) is not None), None)
        if config_class is None:
            raise UnknownSignatureError(f"{module.__name__} of this vLLM has no {' or '.join(configs)}")
        config = config if config is not None else config_class(**fill(config_class, layer))
        return chooser(**fill(chooser, {**pool, "config": config}))
    with unbuilt(row):
        return chooser(**fill(chooser, pool))


def layer_arguments(scheme: Scheme, dtype: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Everything that a config class or chooser of any release may ask about a layer, by its parameter names."""
    import torch

    torch_dtype = getattr(torch, dtype)
    pool: dict[str, Any] = {"weight_shape": shape, "input_dtype": torch_dtype, "out_dtype": torch_dtype}
    if scheme.table == "int8":
        pool |= {"is_channelwise": scheme.weight == "channel", "is_static_input_scheme": False, "input_symmetric": True}
    elif scheme.table == "mixed_precision":
        from vllm.scalar_type import scalar_types

        inward = (shape[1], shape[0])
        pool |= {"full_weight_shape": inward, "partition_weight_shape": inward, "weight_type": scalar_types.uint4b8}
        pool |= {"act_type": torch_dtype, "group_size": 128, "zero_points": False, "has_g_idx": False}
    elif scheme.table in {"fp8", "fp8_block", "wfp8a16"}:
        weight, activation = quant_keys(scheme)
        pool |= {"weight_quant_key": weight, "activation_quant_key": activation}
    elif scheme.table == "mxfp4":
        # What compressed-tensors, INC and online MXFP4 pass; a kernel that widens the weights takes it too.
        pool["activation_quant_key"] = quant_key("kMxfp4Dynamic")
    elif scheme.table == "mxfp6":
        pool["weight_quant_key"] = quant_key("kMxfp6E3M2Static")
    return pool


def quant_keys(scheme: Scheme) -> tuple[Any, Any]:
    """The quantization keys in vLLM of an FP8 scheme's weights and activations.

    A 16-bit-activation layer passes the dynamic per-tensor key all the same, as compressed-tensors' W8A16 scheme does.
    """
    weights = {"tensor": "kFp8StaticTensorSym", "channel": "kFp8StaticChannelSym", "block": "kFp8Static128BlockSym"}
    activations = {
        "static-tensor": "kFp8StaticTensorSym",
        "dynamic-tensor": "kFp8DynamicTensorSym",
        "dynamic-token": "kFp8DynamicTokenSym",
        "dynamic-group": "kFp8Dynamic128Sym",
        "none": "kFp8DynamicTensorSym",
    }
    # Before it had a name of its own, a scale per output channel was written as one per token.
    older = ["kFp8StaticTokenSym"] if scheme.weight == "channel" else []
    return quant_key(weights[scheme.weight], *older), quant_key(activations[scheme.activation])


def quant_key(*names: str) -> Any:
    """The first of these constants that vLLM's ``quant_utils`` has.

    Raises:
        UnknownSignatureError: it has none of them.
    """
    from vllm.model_executor.layers.quantization.utils import quant_utils

    for name in names:
        if hasattr(quant_utils, name):
            return getattr(quant_utils, name)
    raise UnknownSignatureError(f"quant_utils of this vLLM has no {' or '.join(names)}")
