"""Stand-ins: after a fault, put something in its place, note what the serving process would have died of, and go on.

Each function recognises one kind of fault by what was raised and where, changes the running process so that the same step gets
past it, and returns the fact. None means: not a fault that can be stood in for.
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from probes import trace_fakes
from probes.model_facts import StandInFact
from probes.protocol import describe_error
from probes.trace_ops import Recorder, op_name

KERNEL_PACKAGES = (
    "vllm_xpu_kernels",
    "intel_extension_for_pytorch",
    "auto_round_kernel",
    "auto_round_extension",
    "oneccl_bindings_for_pytorch",
)
"""Packages of kernels that vLLM imports on XPU; where one is absent a placeholder stands in and is a finding."""

_UNSUPPORTED = re.compile(r"unsupported operator: ([\w]+)\.([\w]+)(?:\.(\w+))?|^(\w+)\.(\w+)\.(\w+)$", re.MULTILINE)
_NO_ATTRIBUTE = re.compile(r"'(\w+)' object has no attribute '(\w+)'")


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and those that caused it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def frames(error: BaseException) -> Iterator[types.FrameType]:
    """Frames of an exception's own traceback, innermost first."""
    found = []
    step = error.__traceback__
    while step is not None:
        found.append(step.tb_frame)
        step = step.tb_next
    yield from reversed(found)


def stand_in(error: BaseException, stage: str, recorder: Recorder) -> StandInFact | None:
    """Stand in for the fault behind an exception."""
    for recognise in (missing_fake, missing_row, missing_module, missing_attribute):
        fact = recognise(error, stage, recorder)
        if fact is not None:
            return fact
    return None


_inspecting_here = False


def inspect_here() -> bool:
    """Have vLLM inspect architectures in this process from now on, where a fault can be seen and stood in for. False if it does."""
    global _inspecting_here
    from vllm.model_executor.models import registry

    if _inspecting_here or not hasattr(registry, "_run_in_subprocess"):
        return False
    _inspecting_here = True
    registry._run_in_subprocess = lambda fn: fn()
    for name in ("_try_inspect_model_cls", "_try_load_model_cls"):
        clear = getattr(getattr(registry, name, None), "cache_clear", None)
        if clear is not None:
            clear()
    return True


def missing_fake(error: BaseException, stage: str, recorder: Recorder) -> StandInFact | None:
    """An op that torch cannot run on fake tensors gets an inferred fake."""
    import torch

    for exc in chain(error):
        if "nsupported" not in type(exc).__name__ and "fake tensors" not in str(exc):
            continue
        match = _UNSUPPORTED.search(str(exc))
        if match is None:
            continue
        groups = [group or "" for group in match.groups()]
        space, name, overload = groups[:3] if groups[0] else groups[3:]
        packet = getattr(getattr(torch.ops, space), name, None)
        if packet is None:
            return None
        op = getattr(packet, overload if overload in packet.overloads() else packet.overloads()[0])
        if str(op._schema.name) in recorder.inferred:
            return None
        recorder.inferred.add(str(op._schema.name))
        trace_fakes.register(op, trace_fakes.infer(op))
        return StandInFact(
            kind="fake", subject=op_name(op), stage=stage, detail=f"an inferred fake for {op._schema}", error=describe_error(error),
            region="compiled", breaks_compile=True, mutates=bool(op._schema.is_mutable),
        )  # fmt: skip
    return None


def missing_row(error: BaseException, stage: str, recorder: Recorder) -> StandInFact | None:
    """A kernel table without a row for the platform, or whose every kernel refused, gets a placeholder kernel at its end."""
    for exc in chain(error):
        refused = isinstance(exc, ValueError) and "kernel" in str(exc).lower() and "find" in str(exc).lower()
        if not refused and not (isinstance(exc, KeyError) and "PlatformEnum" in repr(exc)):
            continue
        found = _table(exc)
        if found is None:
            continue
        name, table, platform = found
        row = list(table.get(platform, []))
        if any(kernel.__name__ == "StandInKernel" for kernel in row):
            return None
        others = [kernel for kernels in table.values() for kernel in kernels]
        table[platform] = [*row, placeholder_kernel(others)]
        what = "no row for the platform" if isinstance(exc, KeyError) else "every kernel of the row refused"
        return StandInFact(
            kind="row", subject=f"{name}[{platform.name}]", stage=stage, detail=f"{what}; a placeholder kernel stands in",
            error=describe_error(error), layers=_layer_being_built(exc),
        )  # fmt: skip
    return None


def _table(error: BaseException) -> tuple[str, dict[Any, list[Any]], Any] | None:
    """The platform-keyed table that the raising code read: its name, itself, and the platform asked for."""
    from vllm.platforms import current_platform

    enum = type(current_platform._enum)
    for frame in frames(error):
        for value in frame.f_locals.values():
            if isinstance(value, dict) and value and all(isinstance(key, enum) for key in value):
                names = [n for n, v in frame.f_globals.items() if v is value]
                names = names or [n for module in list(sys.modules.values()) if "vllm" in getattr(module, "__name__", "")
                                  for n, v in list(vars(module).items()) if v is value]  # fmt: skip
                return (names[0] if names else "kernel table", value, current_platform._enum)
    return None


def _layer_being_built(error: BaseException) -> list[str]:
    for step in chain(error):
        for frame in frames(step):
            prefix = frame.f_locals.get("prefix")
            if isinstance(prefix, str) and prefix:
                return [prefix]
    return []


def placeholder_kernel(others: list[Any]) -> Any:
    """A kernel class of the table's own base that accepts every layer, leaves weights as loaded and returns an empty output."""
    shared = [base for base in others[0].__mro__ if all(issubclass(kernel, base) for kernel in others)] if others else [object]

    def accept(cls: Any, *args: Any, **kwargs: Any) -> tuple[bool, None]:
        return True, None

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        self.config = args[0] if args else kwargs.get("c") or kwargs.get("config")
        self.names = kwargs.get("layer_param_names")

    def leave(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        return None

    def apply(self: Any, layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        width = getattr(layer, "output_size_per_partition", None) or layer.weight.shape[0]
        return x.new_empty((*x.shape[:-1], width))

    body = {
        "is_supported": classmethod(accept), "can_implement": classmethod(accept), "get_min_capability": classmethod(lambda cls: -1),
        "__init__": construct, "process_weights_after_loading": leave, "apply_weights": apply, "apply": apply,
    }  # fmt: skip
    kernel = type(shared[0])("StandInKernel", (shared[0],), body)
    kernel.__abstractmethods__ = frozenset()
    return kernel


class _Missing(types.ModuleType):
    """A module that is not there: any public name is a function that refuses to run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{self.__name__}.{name} was called, but {self.__name__} is missing or cannot be loaded here")

        return refuse


def missing_module(error: BaseException, stage: str, recorder: Recorder) -> StandInFact | None:
    """A kernel package that is absent, cannot be loaded, or lacks a name gets a placeholder."""
    for exc in chain(error):
        if not isinstance(exc, ImportError) or not exc.name or exc.name.split(".")[0] not in KERNEL_PACKAGES:
            continue
        lacking = re.search(r"cannot import name '(\w+)'", str(exc))
        subject = f"{exc.name}.{lacking.group(1)}" if lacking else exc.name
        if lacking and exc.name in sys.modules:
            setattr(sys.modules[exc.name], lacking.group(1), getattr(_Missing(exc.name), lacking.group(1)))
        elif exc.name in sys.modules:
            return None
        else:
            _place_module(exc.name)
        for name in [
            n
            for n in sys.modules
            if n.startswith("vllm.")
            and getattr(sys.modules[n], "__spec__", None)
            and getattr(sys.modules[n].__spec__, "_initializing", False)
        ]:
            del sys.modules[name]
        return StandInFact("module", subject, stage, "a placeholder module stands in", describe_error(error))
    return None


def _place_module(name: str) -> None:
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        if full not in sys.modules:
            module = _Missing(full)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
            sys.modules[full] = module


_attributes: set[tuple[type, str]] = set()


def missing_attribute(error: BaseException, stage: str, recorder: Recorder) -> StandInFact | None:
    """A layer that lacks a tensor which the model's code reads (``weight`` before weights are loaded) gets an empty one."""
    import torch

    for exc in chain(error):
        match = _NO_ATTRIBUTE.search(str(exc)) if isinstance(exc, AttributeError) else None
        owner = getattr(exc, "obj", None)
        if match is None or match.group(2) != "weight":
            continue
        kind = type(owner) if isinstance(owner, torch.nn.Module) else _class_named(match.group(1))
        if kind is None or (kind, "weight") in _attributes:
            return None
        _attributes.add((kind, "weight"))
        _give_weight(kind)
        return StandInFact(
            "attribute", f"{match.group(1)}.weight", stage, "an empty weight of the layer's size stands in", describe_error(error),
            layers=_layer_being_built(exc),
        )  # fmt: skip
    return None


def _class_named(name: str) -> type | None:
    from vllm.model_executor.layers import linear

    return getattr(linear, name, None)


def _give_weight(kind: type) -> None:
    plain: Callable[[Any, str], Any] = kind.__getattr__  # type: ignore[attr-defined]  # torch.nn.Module defines it

    def with_weight(self: Any, name: str) -> Any:
        try:
            return plain(self, name)
        except AttributeError:
            if name != "weight":
                raise
            import torch

            return torch.empty(self.output_size_per_partition, self.input_size_per_partition, dtype=self.params_dtype)

    kind.__getattr__ = with_weight  # type: ignore[attr-defined]  # see above
