"""Casting the output of a GEMM that returns another dtype than vLLM asked for.

The cast goes around vLLM's own methods that call the op, so that Dynamo traces it with the model. It is made only where the
op's dtype holds at least the range of the wanted one: a float16 result that stands for a bfloat16 one may already have
overflowed, and no cast brings it back.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from xpufp8.runtime.catalogue import RepairError

if TYPE_CHECKING:
    import torch

CALLERS = (
    "vllm.model_executor.kernels.linear.scaled_mm.xpu",
    "vllm.model_executor.kernels.linear.mixed_precision.xpu",
    "vllm.model_executor.kernels.linear.mxfp4.xpu",
    "vllm.model_executor.kernels.linear.mxfp8.xpu",
    "vllm.model_executor.layers.quantization.ipex_quant",
    "vllm.model_executor.layers.quantization.fp8",
)
"""Modules whose methods call GEMM ops, over all releases covered; those that a release lacks are passed over."""
METHODS = ("apply", "apply_weights", "apply_scaled_mm", "apply_block_scaled_mm")
_MARK = "__xpufp8_cast__"


def cast_is_safe(returned: torch.dtype, wanted: torch.dtype) -> bool:
    """True when every value that ``wanted`` can hold fits the range of ``returned``, so that nothing was lost before the cast."""
    import torch

    return bool(torch.finfo(returned).max >= torch.finfo(wanted).max)


def _names(code: CodeType) -> set[str]:
    """Every attribute name that a function or a function inside it uses."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


def _loaded(modules: tuple[str, ...]) -> Iterator[ModuleType]:
    for name in modules:
        try:
            yield importlib.import_module(name)
        except ImportError:
            continue


def find_callers(op: str, modules: tuple[str, ...] = CALLERS) -> list[tuple[type, str]]:
    """Return classes and method names that call ``torch.ops.<ns>.<op>``.

    Args:
        op: ``ns::name``.
        modules: where to look.
    """
    namespace, _, name = op.partition("::")
    found: list[tuple[type, str]] = []
    for module in _loaded(modules):
        for _, owner in inspect.getmembers(module, inspect.isclass):
            if owner.__module__ != module.__name__:
                continue
            for method in METHODS:
                function = inspect.unwrap(vars(owner).get(method) or _missing)
                # IPEX registers its ops under torch_ipex and vLLM reaches them as torch.ops.torch_ipex.name.
                if isinstance(getattr(function, "__code__", None), CodeType) and {namespace, name} <= _names(function.__code__):
                    found.append((owner, method))
    return found


def _missing() -> None:
    """Stand in for a method that a class does not define itself."""


def _wanted(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that the caller expects: an explicit ``out_dtype``, else the kernel's configuration, else the activation's."""
    import torch

    explicit = kwargs.get("out_dtype") or getattr(getattr(owner, "config", None), "out_dtype", None)
    if explicit is not None:
        return explicit
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return tensors[0].dtype if tensors and tensors[0].dtype in (torch.float16, torch.bfloat16, torch.float32) else None


def wrap(function: Callable[..., Any], op: str) -> Callable[..., Any]:
    """Return a method that casts the result of another where its dtype is not the wanted one.

    Raises (when called):
        RepairError: the cast would hide an overflow.
    """

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        wanted = _wanted(self, args, kwargs)
        if wanted is None or result.dtype == wanted:
            return result
        if not cast_is_safe(result.dtype, wanted):
            raise RepairError(
                f"cast:{op}: the op returns {result.dtype} where {wanted} is wanted; what overflows {result.dtype} "
                f"is lost before any cast. Serve with --dtype {str(result.dtype).removeprefix('torch.')} instead"
            )
        return result.to(wanted)

    setattr(method, _MARK, op)
    return method


def apply(op: str, modules: tuple[str, ...] = CALLERS) -> str:
    """Wrap every caller of an op and say which.

    Raises:
        RepairError: nothing in this vLLM calls the op.
    """
    callers = find_callers(op, modules)
    if not callers:
        raise RepairError(
            f"cast:{op}: no method of this vLLM calls torch.ops.{op.replace('::', '.')}; looked in {', '.join(modules)}"
        )
    for owner, method in callers:
        current = vars(owner)[method]
        if getattr(current, _MARK, None) != op:
            setattr(owner, method, wrap(current, op))
    return "output of " + ", ".join(f"{owner.__name__}.{method}" for owner, method in callers) + " is cast to the wanted dtype"
