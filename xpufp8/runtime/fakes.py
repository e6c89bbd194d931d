"""Registering fakes: what the compiler is told of a custom op's outputs, in place of running it.

What each op returns is a row of ``fakes_xpu.FAKES`` or ``fakes_ipex.FAKES``. Here is only how a row reaches torch: an op that can
be traced already is left alone, except where its fake contradicts the kernel and the row knows a call that shows it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xpufp8.runtime.catalogue import RepairError

if TYPE_CHECKING:
    pass

_logger = logging.getLogger("vllm.xpufp8")

Arguments = dict[str, Any]
"""A call's arguments by the names in the op's schema, defaults filled in."""


@dataclass(frozen=True)
class Fake:
    """What one generation of an op returns."""

    op: str
    """``namespace::name``; every overload of it is meant (IPEX names its XPU kernels ``name.xpu``)."""
    arguments: tuple[str, ...]
    """Argument names of the schema, in order; another generation of the op is another row. Names that the schema lacks
    (IPEX derives ``_0``, ``_1``, … from C++) are given here."""
    output: Callable[[Arguments], Any]
    """Makes outputs of the right shape, dtype, stride and device, keeping symbolic sizes symbolic."""
    source: str
    """Where the kernel shows it: file and function."""
    shows_wrong: Callable[[Any], Arguments] | None = None
    """Makes arguments (on a device) with which a known wrong fake of somebody else differs from this one."""
    writes: str | None = None
    """Argument that the kernel fills and returns although its schema does not say so. Without a rule for it, a compiled graph
    would drop the call as unused and read an empty buffer."""
    also: Callable[[], None] | None = None
    """What else keeps the compiler from tracing the library's own callers of the op."""
    types: str = ""
    """Types of the arguments as torch prints them, where the schema names none (``_0``, ``_1``, …). A row without matches no such
    schema: its number of arguments alone says too little, and IPEX has ops of one name with other outputs on another device."""


LIBRARIES: dict[str, tuple[str, ...]] = {
    "_xpu_C": ("vllm_xpu_kernels._xpu_C",),
    "_moe_C": ("vllm_xpu_kernels._moe_C",),
    "_C": ("vllm_xpu_kernels._C",),
    "_vllm_fa2_C": ("vllm_xpu_kernels._vllm_fa2_C",),
    "torch_ipex": ("intel_extension_for_pytorch",),
}
"""Namespace to the modules whose import registers its ops."""


def table() -> tuple[Fake, ...]:
    """Every fake that is known."""
    from xpufp8.runtime import fakes_ipex, fakes_xpu

    return (*fakes_xpu.FAKES, *fakes_ipex.FAKES)


def find_op(op: str) -> Any:
    """Return the ``OpOverload`` of ``namespace::name``, or None where no library has registered it.

    The name may carry an overload (``torch_ipex::fp8_gemm_w8a16.xpu``); without one, an op with a single overload is that one.
    """
    import torch

    namespace, _, name = op.partition("::")
    name, _, overload = name.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
    except (AttributeError, RuntimeError):
        return None
    overloads = packet.overloads()
    wanted = overload or ("default" if "default" in overloads else overloads[0])
    return getattr(packet, wanted) if wanted in overloads else None


def load_libraries(namespace: str) -> list[str]:
    """Import what registers a namespace's ops, and vLLM's own fakes for them, so that ours come last.

    Returns:
        Why each import that failed did so.
    """
    failed = []
    for module in (*LIBRARIES.get(namespace, ()), "vllm._xpu_ops" if namespace == "_xpu_C" else ""):
        if not module:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - a library that cannot be loaded is a reason, whatever it raises
            failed.append(f"{module}: {type(error).__name__}: {error}")
    return failed


def argument_names(overload: Any) -> tuple[str, ...]:
    """The argument names of an op's schema, in order."""
    return tuple(argument.name for argument in overload._schema.arguments)


def known_fake(overload: Any) -> Fake | None:
    """The row for the generation of an op that is registered, or None where its semantics are not known."""
    name, names = overload._schema.name, argument_names(overload)
    anonymous = all(argument == f"_{index}" for index, argument in enumerate(names))
    types = ", ".join(str(argument.type) for argument in overload._schema.arguments)
    for fake in table():
        if fake.op == name and (fake.arguments == names or (anonymous and fake.types == types)):
            return fake
    return None


def registered_fake(overload: Any) -> Any:
    """The Python fake that is registered for an op, or None."""
    from torch._library.simple_registry import singleton

    return singleton.find(overload._name).fake_impl.kernel


def traces_already(overload: Any) -> bool:
    """True when an op has a fake, a Meta kernel or a composite implementation.

    ``torch.library.custom_op`` registers a fake for each op that it makes, which complains until it is given the real one.
    """
    import torch
    from torch._library import custom_ops

    made = custom_ops._maybe_get_opdef(overload._name)
    if made is not None and made._abstract_fn is None and registered_fake(overload) is not None:
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return registered_fake(overload) is not None or any(has(overload._name, key) for key in keys)


def bind(overload: Any, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Name a call's arguments and fill in the schema's defaults."""
    schema = overload._schema.arguments
    given = {argument.name: name for argument, name in zip(schema, names, strict=True)}
    bound = {given[argument.name]: argument.default_value for argument in schema if argument.has_default_value()}
    bound |= dict(zip(names, args, strict=False))
    return bound | {given[key]: value for key, value in kwargs.items()}


def implementation(overload: Any, fake: Fake) -> Callable[..., Any]:
    """Return the function that torch calls in place of the op."""

    def made(*args: Any, **kwargs: Any) -> Any:
        return fake.output(bind(overload, fake.arguments, args, kwargs))

    made.__name__ = f"xpufp8_{fake.op.replace('::', '_')}"
    return made


def register(overload: Any, fake: Fake) -> None:
    """Register a fake, in place of another Python one if there is one."""
    import torch
    from torch._library.simple_registry import singleton

    from xpufp8.runtime import functional

    made = implementation(overload, fake)
    if "allow_override" in inspect.signature(torch.library.register_fake).parameters:
        torch.library.register_fake(overload._name, made, allow_override=True)
    else:  # torch to 2.5 refuses a second fake; its registry is where it keeps the first
        singleton.find(overload._name).fake_impl.kernel = None
        torch.library.register_fake(overload._name, made)
    functional.declare(overload, fake)
    if fake.also is not None:
        fake.also()


def describe(result: Any) -> list[tuple[tuple[int, ...], Any, tuple[int, ...]]]:
    """Shape, dtype and stride of each output."""
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    return [(tuple(out.shape), out.dtype, tuple(out.stride())) for out in outputs]


def contradiction(overload: Any, fake: Fake) -> str | None:
    """Say how the registered fake differs from what the kernel returns, where a row knows a call that shows it."""
    if fake.shows_wrong is None or registered_fake(overload) is None:
        return None
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        arguments = fake.shows_wrong("cpu")
        right = describe(fake.output(arguments))
        try:
            wrong = describe(overload(*[arguments[name] for name in fake.arguments]))
        except Exception as error:  # noqa: BLE001 - a fake that raises on a legal call is as wrong as a wrong shape
            return f"the fake there was raises {type(error).__name__}: {error}"
    return None if right == wrong else f"the fake there was said {wrong} where the kernel returns {right}"


def _repair(overload: Any) -> str | None:
    """Register what is known of one op; None when there is nothing to do."""
    fake = known_fake(overload)
    if fake is None:
        return None
    if not traces_already(overload):
        register(overload, fake)
        return f"fake registered ({fake.source})"
    wrong = contradiction(overload, fake)
    if wrong is None:
        return None
    register(overload, fake)
    _logger.warning("xpufp8 replaced the fake of %s: %s (%s)", fake.op, wrong, fake.source)
    return f"fake replaced: {wrong} ({fake.source})"


def apply(op: str) -> str:
    """Give one op its fake and say what was done.

    Raises:
        RepairError: the op is not registered, or what it returns is not known.
    """
    failed = load_libraries(op.partition("::")[0])
    overload = find_op(op)
    if overload is None:
        reasons = "; ".join(failed) or "its libraries are loaded, and none registers it"
        raise RepairError(f"fake:{op}: no such op is registered in this process ({reasons})")
    if known_fake(overload) is None and not traces_already(overload):
        from xpufp8.runtime.fakes_xpu import UNSTATED

        why = UNSTATED.get(overload._name, "and a guess would compile to wrong code")
        raise RepairError(f"fake:{op}: what {overload._schema} returns is not known ({why}); serve with --enforce-eager")
    return _repair(overload) or "it can be traced already, nothing to do"


def apply_all() -> str:
    """Give every known op that needs one its fake and say which.

    Raises:
        RepairError: no library of the catalogue is loaded at all.
    """
    reasons = [reason for namespace in LIBRARIES for reason in load_libraries(namespace)]
    present = {fake.op: find_op(fake.op) for fake in table()}
    if not any(present.values()):
        raise RepairError(f"fake:all: none of the ops is registered in this process ({'; '.join(reasons) or 'no library'})")
    done = [op for op, overload in present.items() if overload is not None and _repair(overload) is not None]
    return f"fakes for {', '.join(done)}" if done else "every op that is known can be traced already"
