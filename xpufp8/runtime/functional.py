"""What an op writes, told to functionalization: the pass that turns a graph with writes into one without, and drops what seems unused.

torch does this by itself for an op whose schema declares its writes and that returns plain tensors. Two kinds are left: an op that fills
an argument and does not say so, whose call would be dropped; and one that writes and returns a list, which torch refuses.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpufp8.runtime.fakes import Fake

NAMESPACE = "xpufp8_functional"
_ALIAS = re.compile(r"\([^()]*! -> [^()]*\)")
"""How torch prints that an argument is written to: ``Tensor($0! -> ) z``."""

_declared: set[Any] = set()
_libraries: list[Any] = []
"""Kept, because an op goes with the library that defined it."""


def declare(overload: Any, fake: Fake) -> None:
    """Register what an op needs beyond its fake; nothing for most."""
    from torch._C import DispatchKey

    if overload in _declared or DispatchKey.Functionalize in overload.py_kernels:
        return
    if fake.writes is not None:
        _declared.add(overload)
        overload.py_functionalize_impl(_undeclared_write(overload, fake))
    elif overload._schema.is_mutable and any("List" in str(value.type) for value in overload._schema.returns):
        _declared.add(overload)
        overload.py_functionalize_impl(_through_twin(overload, fake))


def _replace(ctx: Any, target: Any, value: Any) -> None:
    ctx.replace(target, value)
    ctx.commit_update(target)
    ctx.sync(target)


def _undeclared_write(overload: Any, fake: Fake) -> Any:
    """Call the op with a copy, and put what it returns in the argument's place."""
    from xpufp8.runtime.fakes import bind

    position = fake.arguments.index(fake.writes or "")

    def rule(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        bound = bind(overload, fake.arguments, args, kwargs)
        call = [bound[name] for name in fake.arguments]
        plain = list(ctx.unwrap_tensors(tuple(call)))
        target = call[position]
        with ctx.redispatch_to_next():
            if target is not None:
                plain[position] = plain[position].clone()
            result = overload(*plain)
        if target is not None:
            _replace(ctx, target, result)
        return ctx.wrap_tensors(result)

    return rule


def _written(overload: Any) -> list[int]:
    """Positions of the arguments that the schema says are written to."""
    return [i for i, a in enumerate(overload._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]


def _twin(overload: Any, fake: Fake) -> Any:
    """Define the op without writes: it copies what the op would write to, and returns the copies after the op's own outputs."""
    import torch

    from xpufp8.runtime.fakes import bind

    written = _written(overload)
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    name = re.sub(r"\W+", "_", overload._name)
    text = _ALIAS.sub("", str(overload._schema))
    library.define(f"{name}{text[text.index('(') : text.rindex('->')]}-> Tensor[]")

    def kernel(*args: Any) -> list[Any]:
        bound = bind(overload, fake.arguments, args, {})
        call = [bound[argument] for argument in fake.arguments]
        for position in written:
            call[position] = call[position].clone()
        return [*overload(*call), *(call[position] for position in written)]

    def pretend(*args: Any) -> list[Any]:
        bound = bind(overload, fake.arguments, args, {})
        return [*fake.output(bound), *(torch.empty_like(bound[fake.arguments[position]]) for position in written)]

    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", pretend, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _through_twin(overload: Any, fake: Fake) -> Any:
    """Call the op's twin, and put the copies that it wrote to in the arguments' places."""
    from xpufp8.runtime.fakes import bind

    twin, written = _twin(overload, fake), _written(overload)

    def rule(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        bound = bind(overload, fake.arguments, args, kwargs)
        call = [bound[name] for name in fake.arguments]
        with ctx.redispatch_to_next():
            results = twin(*ctx.unwrap_tensors(tuple(call)))
        for position, value in zip(written, results[-len(written) :], strict=True):
            _replace(ctx, call[position], value)
        return ctx.wrap_tensors(list(results[: -len(written)]))

    return rule
