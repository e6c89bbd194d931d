"""Linear layers that really run: the kernel that vLLM's own chooser selects, around made operands, as vLLM's methods do it.

Where there is no vLLM, the project's own candidates (``xpufp8.runtime.candidates``) are run instead, one after another.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from probes.device_facts import DeviceRunFact, SelectedFact
from probes.device_operands import STEP, Operands
from probes.facts import ErrorFact, TableFact
from probes.protocol import Context, describe_error
from probes.schemes import SCHEMES, Scheme

if TYPE_CHECKING:
    import torch

TABLES = ("fp8", "fp8_block", "wfp8a16")
"""Tables whose layers can be made here: FP8 weights with one scale, one a channel or one a block."""
PARAMETERS = ("weight", "weight_scale", "input_scale", "input_scale_ub")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass
class Built:
    """A layer that can be called, or why not."""

    selected: SelectedFact
    operands: Operands
    call: Callable[..., Any] | None = None
    """``call(x [..., K], bias [N] or None) -> [..., N]`` on the device."""
    module: Any = None
    """A torch module with the same ``forward``."""

    @property
    def kernel(self) -> str:
        """Name of the kernel, empty where there is none."""
        return self.selected.kernel or ""


@dataclass
class Bench:
    """One process's access to the device and to vLLM's tables."""

    context: Context
    device: Any
    tables: list[TableFact] | None = None
    """None where there is no vLLM."""
    dtypes: tuple[str, ...] = DTYPES
    """Activation dtypes that the platform serves."""
    run: DeviceRunFact = field(default_factory=lambda: DeviceRunFact("", "live"))

    def build(self, operands: Operands, dtype: str, layer: str = "layer") -> list[Built]:
        """The layer by the selected kernel; by every candidate in turn where there is no vLLM."""
        if self.tables is None:
            return _by_candidates(self, operands, dtype, layer)
        return [_by_vllm(self, operands, dtype, layer)]


def unknown_run(context: Context, *what: str) -> DeviceRunFact:
    """The answer of a simulated device: nothing ran."""
    return DeviceRunFact(context.device, "simulated", repairs=os.environ.get("XPUFP8_APPLY", ""), unknown=list(what))


def schemes(context: Context) -> list[Scheme]:
    """The FP8 schemes of ``options["schemes"]``; all of them where none were given."""
    asked = context.options.get("schemes")
    return [s for s in SCHEMES if s.table in TABLES and (asked is None or s.name in asked)]


def left_out(context: Context) -> list[str]:
    """Notes on what of the model these probes do not run."""
    names = [n for n in context.options.get("schemes") or [] if n not in {s.name for s in schemes(context)}]
    notes = [f"layers of {', '.join(names)} were not run: these probes make FP8 linear layers only"] if names else []
    if context.options.get("moe"):
        notes.append("experts of MoE layers were not run")
    return notes


@contextmanager
def bench(context: Context) -> Iterator[Bench]:
    """The device, with vLLM's settings as the command's processes have them."""
    import torch

    kind = context.device.split(":")[0]
    device = torch.device(context.device if kind != "xpu" or ":" in context.device else "xpu")
    if kind != "cpu":
        torch.zeros(1, device=device)
    with ExitStack() as stack:
        made = Bench(context, device)
        version = None
        if importlib.util.find_spec("vllm") is not None and not context.options.get("candidates"):
            made.tables, version = _read_tables()
            from vllm.platforms import current_platform
            from vllm.plugins import load_general_plugins

            from probes.kernel_table_live import vllm_settings

            load_general_plugins()
            served = {str(d).removeprefix("torch.") for d in getattr(current_platform, "supported_dtypes", ())}
            made.dtypes = tuple(d for d in DTYPES if d in served or d == context.options.get("dtype")) or DTYPES
            for table in made.tables:
                importlib.import_module(_module(table))
            stack.enter_context(vllm_settings(context.vllm_args))
        made.run = DeviceRunFact(
            context.device, "live", _device_name(device), torch.__version__, version, os.environ.get("XPUFP8_APPLY", ""),
            "candidates" if made.tables is None else "vllm", left_out(context),
        )  # fmt: skip
        stack.enter_context(torch.inference_mode())
        yield made


def _read_tables() -> tuple[list[TableFact], str | None]:
    from probes.kernel_table_static import read_source
    from probes.vllm_source import SourceTree, find_package, package_version

    root = find_package(None)
    tables, _, _ = read_source(SourceTree(root))
    return [t for t in tables if t.kind in TABLES], package_version(root)


def _module(table: TableFact) -> str:
    from probes.kernel_table_live import dotted

    return dotted(table.file)


def _device_name(device: torch.device) -> str:
    import torch

    if device.type == "cpu":
        return f"CPU ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"
    return str(getattr(torch, device.type).get_device_name(device))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that errors and times are those of the call."""
    import torch

    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


@contextmanager
def default_dtype(dtype: str) -> Iterator[None]:
    """Torch's default dtype as vLLM sets it while it builds a model."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _facts(operands: Operands, dtype: str, layer: str, kernel: str | None, **more: Any) -> SelectedFact:
    weight = str(operands.weight.dtype).removeprefix("torch.")
    return SelectedFact(operands.scheme.name, dtype, layer, kernel, weight, **more)


def _by_vllm(made: Bench, operands: Operands, dtype: str, layer: str) -> Built:
    import torch

    from probes.kernel_table_ask import refusal_lines
    from probes.kernel_table_live import table_for

    table = table_for(operands.scheme, made.tables or [])
    if table is None:
        reason = f"this vLLM has no {operands.scheme.table} table"
        return Built(_facts(operands, dtype, layer, None, stage="choose", reasons=[reason]), operands)
    stage, kernel = "choose", None
    try:
        with default_dtype(dtype):
            module = importlib.import_module(_module(table))
            cls, config = _choose(module, table, operands, dtype)
            kernel = cls.__name__
            stage = "construct"
            instance = _construct(module, cls, config)
            stage = "process"
            with made.device:
                holder = _layer(operands, made.device, getattr(torch, dtype), operands.scheme.table == "fp8_block")
                instance.process_weights_after_loading(holder)
            synchronize(made.device)
    except Exception as exc:  # noqa: BLE001 - whatever vLLM raises is its answer
        error: ErrorFact | None = describe_error(exc)
        reasons: list[str] = []
        if stage == "choose" and isinstance(exc, ValueError):
            reasons, error = refusal_lines(str(exc)), None
        return Built(_facts(operands, dtype, layer, kernel, stage=stage, reasons=reasons, error=error), operands)

    class Layer(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
        def __init__(self) -> None:
            super().__init__()
            self.holder, self.kernel = holder, instance

        def forward(self, x: Any, bias: Any = None) -> Any:
            return self.kernel.apply_weights(self.holder, x, bias)

    made_module = Layer()
    return Built(_facts(operands, dtype, layer, kernel), operands, made_module.forward, made_module)


def _choose(module: Any, table: TableFact, operands: Operands, dtype: str) -> tuple[type, Any]:
    """The class that the chooser of a table selects, and the layer's config."""
    from dataclasses import replace

    from probes.kernel_table_ask import UnknownSignatureError, fill
    from probes.kernel_table_live import CONFIGS, choose_kernel, layer_arguments, table_row

    pool = layer_arguments(operands.scheme, dtype, (operands.n, operands.k))
    pool["weight_quant_key"] = replace(pool["weight_quant_key"], dtype=operands.weight.dtype)
    if operands.layout == "block":
        for key, shape in (("weight_quant_key", operands.block), ("activation_quant_key", (1, operands.block[1]))):
            pool[key] = _grouped(pool[key], shape)
    name = next((n for n in CONFIGS.get(table.kind, ()) if hasattr(module, n)), None)
    if name is None:
        raise UnknownSignatureError(f"{module.__name__} of this vLLM has no config class for {table.kind}")
    config_class = getattr(module, name)
    config = config_class(**fill(config_class, pool))
    row = table_row(getattr(module, table.name))
    chosen = choose_kernel(module, operands.scheme, table, dtype, (operands.n, operands.k), row, config)
    return chosen if isinstance(chosen, type) else type(chosen), config


def _grouped(key: Any, shape: tuple[int, int]) -> Any:
    """The quantization key with another group, as vLLM's FP8 method makes it of a checkpoint's ``weight_block_size``."""
    from dataclasses import replace

    return replace(key, scale=replace(key.scale, group_shape=type(key.scale.group_shape)(*shape)))


def _construct(module: Any, cls: type, config: Any) -> Any:
    """An instance, as vLLM's ``init_…_linear_kernel`` functions make it: with parameter names where its base asks for them."""
    import inspect

    names = list(inspect.signature(cls).parameters)
    if "layer_param_names" in names:
        return cls(config, layer_param_names=list(PARAMETERS))
    return cls(config)


def _layer(operands: Operands, device: Any, dtype: Any, block: bool) -> Any:
    """A module with the parameters of a loaded layer, in the shapes in which vLLM's methods hand them to a kernel."""
    import torch

    def parameter(tensor: Any) -> Any:
        return torch.nn.Parameter(tensor.to(device), requires_grad=False)

    layer = torch.nn.Module()
    layer.logical_widths = [operands.n]
    layer.input_size_per_partition, layer.output_size_per_partition = operands.k, operands.n
    layer.input_size, layer.output_size = operands.k, operands.n
    layer.orig_dtype = layer.params_dtype = dtype
    layer.weight_block_size = list(operands.block) if block else None
    layer.bias = None
    if block:
        layer.weight = parameter(operands.weight)
        layer.weight_scale_inv = parameter(operands.scale)
    else:
        # Transposed by strides only, as both of vLLM's FP8 methods leave it.
        layer.weight = parameter(operands.weight)
        layer.weight = torch.nn.Parameter(layer.weight.data.t(), requires_grad=False)
        layer.weight.input_dim, layer.weight.output_dim = 0, 1
        layer.weight_scale = parameter(operands.scale.reshape(-1, 1) if operands.layout == "channel" else operands.scale)
    static = operands.scheme.activation == "static-tensor"
    layer.input_scale = parameter(torch.tensor(STEP, dtype=torch.float32)) if static else None
    return layer


def _by_candidates(made: Bench, operands: Operands, dtype: str, layer: str) -> list[Built]:
    """Every candidate of the runtime half that takes the layer."""
    import torch

    from xpufp8.runtime.candidates import candidates
    from xpufp8.runtime.problem import Problem

    scheme, block = operands.scheme, operands.block if operands.layout == "block" else None
    kind = getattr(torch, dtype)
    problem = Problem(scheme.weight, scheme.activation, operands.n, operands.k, kind, operands.weight.dtype, block)
    found = []
    for candidate in candidates():
        refused = candidate.refuses(problem, made.device.type)
        if refused:
            continue
        weight, scale = operands.weight.to(made.device), operands.scale.to(made.device)
        try:
            ready = candidate.prepare(problem, weight, scale if scale.dim() else scale.reshape(1))
        except Exception as exc:  # noqa: BLE001 - a kernel that cannot be prepared is an answer
            error = describe_error(exc)
            found.append(Built(_facts(operands, dtype, layer, candidate.name, stage="process", error=error), operands))
            continue

        def call(x: Any, bias: Any = None, ready: Any = ready) -> Any:
            return ready.run(x, ready.weight, ready.scale, bias)

        found.append(Built(_facts(operands, dtype, layer, candidate.name), operands, call, _Wrapped.of(call)))
    return found


class _Wrapped:
    """Makes a module of a function."""

    @staticmethod
    def of(call: Callable[..., Any]) -> Any:
        import torch

        class Layer(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
            def forward(self, x: Any, bias: Any = None) -> Any:
                return call(x, bias)

        return Layer()
