"""Whether torch can trace an op under fake tensors: what its registrations say, and what Dynamo says when it meets the op.

The order of the questions is the order in which ``FakeTensorMode`` asks them (torch/_subclasses/fake_tensor.py): a composite
implementation is traced through, then a registered fake, a Meta kernel, and last the trivial fake of an op that only mutates. An op
that neither mutates nor returns anything has no trivial fake: torch refuses it as it refuses one that returns tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from probes.facts import Observation, Tracing
from probes.op_schemas import Argument, Schema

KEYS = (
    "CPU", "CUDA", "XPU", "HIP", "PrivateUse1", "Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional", "Autograd", "AutogradCPU", "AutogradCUDA", "AutogradXPU", "ADInplaceOrView", "Functionalize",
)  # fmt: skip
"""Dispatch keys that are asked about, in the order in which they are listed."""

NO_FAKE = ("does not support running with fake tensors", "There was no fake impl registered for")
"""What Dynamo says of an op without a fake, and what one made with ``torch.library.custom_op`` says itself."""

NO_DATA = ("data pointer", "data is not allocated", "doesn't have storage")
"""What a kernel provokes that reads the memory of a tensor that has none."""

NO_GRAPH = "returned non-Tensor"
"""What Dynamo says of an op that answers with a number: it cannot stand in a graph, whatever fake it has."""


def op_names() -> set[str]:
    """Every op overload that torch's dispatcher knows: ``namespace::name.overload``."""
    import torch

    return set(torch._C._dispatch_get_all_op_names())


def overload(name: str) -> Any:
    """The ``OpOverload`` of a dispatcher name.

    Raises:
        AttributeError, RuntimeError: it has no schema (kernels were registered for an op that nobody defined).
    """
    import torch

    namespace, _, rest = name.partition("::")
    base, _, variant = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), variant or "default")


def defined_at(name: str) -> str:
    """Source file and line that defined an op, as the dispatcher remembers it; empty when it does not.

    For an op made with ``torch.library.custom_op`` the dispatcher remembers a line of torch; then it is where its function stands.
    """
    import torch
    from torch._library import custom_ops

    function = getattr(custom_ops._maybe_get_opdef(name), "_init_fn", None)
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    for line in torch._C._dispatch_dump(name).splitlines():
        if line.startswith("debug: registered at "):
            return str(line.removeprefix("debug: registered at "))
    return ""


def dispatch_keys(name: str) -> list[str]:
    """Those of ``KEYS`` that the op has a kernel of its own for."""
    import torch

    found = []
    for key in KEYS:
        with contextlib.suppress(RuntimeError):  # a key that this torch does not know
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
                found.append(key)
    return found


def registered_tracing(op: Any) -> Tracing:
    """What the registrations of an ``OpOverload`` say."""
    import torch
    from torch._library import custom_ops

    name = op.name()

    def has(key: str) -> bool:
        # Not the *computed* kernel: torch's own fallback for Meta stands behind every op and answers for none.
        return (
            bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key)) or getattr(torch._C.DispatchKey, key) in op.py_kernels
        )

    if has("CompositeImplicitAutograd"):
        return "composite"
    made = custom_ops._maybe_get_opdef(name)
    if made is not None:
        # torch.library.custom_op registers a fake in any case; it complains until it is given the real one.
        return "fake" if made._abstract_fn is not None else _trivial(op)
    if _registered_fake(name):
        return "fake"
    if has("Meta"):
        return "meta"
    if has("CompositeExplicitAutograd") or has("CompositeExplicitAutogradNonFunctional"):
        return "composite"
    return _trivial(op)


def _trivial(op: Any) -> Tracing:
    from torch._library import utils

    return "trivial" if utils.can_generate_trivial_fake_impl(op) else "none"


def _registered_fake(name: str) -> bool:
    from torch._library import simple_registry

    # `find` would create an entry for each name that is asked about; `_data` is what both old and new releases keep them in.
    entry = simple_registry.singleton._data.get(name)
    holder = getattr(entry, "fake_impl", None) or getattr(entry, "abstract_impl", None)
    return getattr(holder, "kernel", None) is not None


@dataclass(frozen=True)
class Trial:
    """How one attempt at tracing an op ended."""

    op: str
    traced: Observation
    """unknown: the arguments made from its schema were refused, or no argument could be made."""
    error: str | None = None
    """Message of the exception, whole."""


def may_be_tried(op: Any, tracing: Tracing) -> bool:
    """True when tracing the op with made-up arguments is safe.

    An op without a fake is refused before anything of it runs. A composite one runs, under fake tensors: a kernel that reads their
    memory gets an exception, but one that is given a made-up address or handle as a number would use it.
    """
    if tracing != "composite":
        return True
    arguments = op._schema.arguments
    return any(str(a.type) in {"Tensor", "List[Tensor]"} for a in arguments) and not any(
        _ADDRESS.search(a.name) for a in arguments
    )


def try_tracing(names: list[str], seconds: float = 60.0) -> dict[str, Trial]:
    """Trace ops with Dynamo (fullgraph, fake tensors), one after another, and say how each ended.

    It happens in a forked child, because a composite op may be a kernel that does not expect to be run so: an op that ends the
    child is noted with its signal and the rest goes on. Nothing is ever executed on real data.
    """
    _warm_up()
    found: dict[str, Trial] = {}
    left = list(names)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        fate = ""
        for message in _forked(left, deadline):
            if isinstance(message, str):
                fate = message
            else:
                found[message.op] = message
        left = [name for name in left if name not in found]
        if left:  # the child ended early, so the next one in line ended it
            found[left[0]] = Trial(left[0], "unknown", fate or "the process ended while it was traced")
            left = left[1:]
    return found


def _forked(names: list[str], deadline: float) -> Iterator[Trial | str]:
    """Trials from a forked child as they end, and last the child's fate where it did not end of its own accord."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a crash handler's pages say less than the signal does
        with contextlib.suppress(BaseException), os.fdopen(write_end, "w") as out:
            for name in names:
                print(json.dumps(vars(trace(name))), file=out, flush=True)
        os._exit(0)
    os.close(write_end)
    buffer = b""
    late = False
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                late = True
                os.kill(child, signal.SIGKILL)
                break
            block = pipe.read(65536)
            if not block:
                break
            *lines, buffer = (buffer + block).split(b"\n")
            yield from (Trial(**json.loads(line)) for line in lines)
    _, status = os.waitpid(child, 0)
    if late:
        yield "no answer within the time limit while it was traced"
    elif os.WIFSIGNALED(status):
        yield f"the process died of {signal.Signals(os.WTERMSIG(status)).name} while it was traced"


def _warm_up() -> None:
    """Trace something plain before the fork, so that no child pays for what the first trace of a process imports."""
    import torch
    import torch._dynamo
    import torch._functorch.aot_autograd

    with contextlib.suppress(_NotRun):
        torch.compile(lambda x: x + 1, fullgraph=True, backend=_stop, dynamic=False)(torch.zeros(2))


class _NotRun(Exception):  # noqa: N818 - not an error: the graph was made and is not to be run
    """Raised in place of running a traced graph."""


def _stop(graph: Any, inputs: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        raise _NotRun

    return run


def trace(name: str) -> Trial:
    """Trace one op with arguments made from its schema, in this process."""
    import torch
    from torch._dynamo import exc

    try:
        op = overload(name)
        args, kwargs = arguments_for(op)
    except (LookupError, AttributeError, RuntimeError) as error:  # the library of a half-imported module is gone with the module
        return Trial(name, "unknown", str(error))

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    torch._dynamo.reset()
    try:
        torch.compile(call, fullgraph=True, backend=_stop, dynamic=False)(*args, **kwargs)
    except _NotRun:
        return Trial(name, "pass")
    except exc.TorchDynamoException as error:
        return Trial(name, _judge(error), str(error))
    except Exception as error:  # noqa: BLE001 - a kernel's own check of made-up arguments proves nothing
        return Trial(name, _judge(error), f"{type(error).__name__}: {error}")
    # A graph without a tensor operation is never given to a backend: the op's own result was taken as a constant.
    return Trial(name, "pass")


def _judge(error: BaseException) -> Observation:
    text = str(error)
    return "fail" if any(words in text for words in (*NO_FAKE, NO_GRAPH, *NO_DATA)) else "unknown"


_ADDRESS = re.compile(r"ptr|pointer|handle|addr|stream|(?:^|_)fd$", re.IGNORECASE)
"""Names of numbers that stand for memory or for an object: a made-up one must never reach a kernel."""

_ALIAS = re.compile(r"\(\$\d+! -> \)")
"""How torch prints ``Tensor!``, an argument that is written to without a name for its alias set."""

_VALUES: dict[str, Any] = {"int": 1, "SymInt": 1, "float": 1.0, "SymFloat": 1.0, "bool": False, "SymBool": False, "str": "", "complex": 1j,
                           "Scalar": 1.0, "Any": None}  # fmt: skip


def arguments_for(op: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments for an op from its schema: tensors of shape [2, 2] (float32, cpu), numbers 1, and no optional that may be left out.

    Raises:
        LookupError: it takes something that cannot be made up (a TorchBind object).
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if argument.has_default_value():
            continue
        value = _value(str(argument.type))
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _value(kind: str) -> Any:
    """A value of a type as torch prints it: ``Optional[Tensor]``, ``List[int]``, ``Tuple[int, int]``."""
    import torch

    outer, _, inner = kind.removesuffix("]").partition("[")
    # A tensor where one is allowed: an op that is given none at all may never be dispatched as it is in a model.
    if outer == "Optional":
        return _value(inner) if inner == "Tensor" else None
    if outer == "List":
        return [_value(inner), _value(inner)]
    if outer == "Tuple":
        return tuple(_value(part.strip()) for part in inner.split(","))
    if kind == "Tensor":
        return torch.zeros(2, 2)
    others = {"Device": "cpu", "ScalarType": torch.float32, "Layout": torch.strided, "MemoryFormat": torch.contiguous_format}
    for name, value in {**_VALUES, **others}.items():
        if kind.lower() == name.lower():
            return value
    if kind == "number":
        return 1.0
    raise LookupError(f"no value of type {kind} can be made up")


def schema_of(op: Any) -> Schema:
    """The schema of an ``OpOverload`` in our own terms (from torch's objects, not by parsing what torch prints)."""

    def argument(arg: Any) -> Argument:
        default = repr(arg.default_value) if arg.has_default_value() else None
        mutated = bool(arg.alias_info and arg.alias_info.is_write)
        return Argument(str(arg.type), arg.name, default, mutated, bool(arg.kwarg_only))

    schema = op._schema
    return Schema(
        schema.name.partition("::")[2], schema.overload_name, tuple(argument(a) for a in schema.arguments),
        tuple(argument(r) for r in schema.returns), _ALIAS.sub("!", str(schema).partition("::")[2]),
    )  # fmt: skip
