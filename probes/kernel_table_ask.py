"""Asking a chooser of vLLM's without knowing its release: arguments by name, refusals by listening, nothing constructed.

vLLM's choosers have changed their signatures many times. Arguments are therefore filled in by parameter name from a pool of
values; a parameter that is not in the pool and has no default is an :class:`UnknownSignatureError`, which is an answer too.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self


class UnknownSignatureError(TypeError):
    """A chooser of this vLLM's (or its config class) asks for something that this probe does not know."""


def fill(function: Callable[..., Any], pool: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for a function or dataclass, by parameter name.

    Raises:
        UnknownSignatureError: a required parameter is not in the pool.
    """
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            continue
        if name in pool:
            arguments[name] = pool[name]
        elif parameter.default is parameter.empty:
            label = getattr(function, "__qualname__", str(function))
            raise UnknownSignatureError(f"{label} of this vLLM asks for {name!r}, which this probe does not know")
    return arguments


class Refusals:
    """Listens to what kernel classes answer while a chooser asks them."""

    def __init__(self, questions: Iterable[str]) -> None:
        self.questions = tuple(questions)
        """Class-level methods that return ``(bool, reason)``: is_supported, can_implement, is_supported_config."""
        self.said: list[str] = []
        self.asked: set[str] = set()
        self._depth = 0
        self._stack = ExitStack()
        self._done: set[tuple[type, str]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self._done.clear()

    def listen(self, classes: Iterable[Any]) -> None:
        """Listen to these classes too, at the base that defines each question, so that inheritance stays as it is."""
        for cls in classes:
            for base in cls.__mro__ if isinstance(cls, type) else ():
                for question in self.questions:
                    if question in vars(base) and (base, question) not in self._done:
                        self._done.add((base, question))
                        self._stack.enter_context(replaced(base, question, self._heard(vars(base)[question])))

    def _heard(self, original: Any) -> Any:
        function = original.__func__ if isinstance(original, classmethod | staticmethod) else original

        def answer(about: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(about, "__name__", str(about))
            self._depth += 1
            try:
                result = function(about, *args, **kwargs)
            finally:
                self._depth -= 1
            # A kernel may put the question to others before it answers; only the answer to the chooser counts.
            if self._depth == 0:
                self.asked.add(name)
                if isinstance(result, tuple) and len(result) > 1 and not result[0]:
                    self.said.append(f"{name}: {result[1]}")
            return result

        # vLLM passes the class itself to its static questions, so the first argument is the class either way.
        if isinstance(original, classmethod):
            return classmethod(answer)
        return staticmethod(answer) if isinstance(original, staticmethod) else answer

    def told(self) -> list[str]:
        """Every refusal once, in order."""
        return list(dict.fromkeys(self.said))


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute set in ``owner`` itself, and put back as it was (or taken away again where it was inherited)."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def unbuilt(classes: Iterable[type]) -> Iterator[None]:
    """Within it these classes can be instantiated without their ``__init__``: some choosers return an instance, and all we
    want to know is of which class. Their constructors may allocate workspaces on the device.
    """
    with ExitStack() as stack:
        for cls in classes:
            stack.enter_context(replaced(cls, "__init__", lambda self, *args, **kwargs: None))
        yield


def refusal_lines(message: str) -> list[str]:
    """The reasons in the message of a chooser's ValueError, in vLLM's words; none when its list of kernels was empty."""
    _, found, rest = message.partition("Reasons:")
    lines = [line.strip() for line in rest.splitlines()] if found else [message.strip()]
    return [line for line in lines if line]


def disabled_kernels() -> set[str]:
    """Kernel classes that VLLM_DISABLED_KERNELS takes out of every table."""
    return {name.strip() for name in os.environ.get("VLLM_DISABLED_KERNELS", "").split(",") if name.strip()}


def raised_in(error: BaseException, module: Any) -> bool:
    """True when an exception was raised by a function of that very module (the chooser) and not deeper down."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == getattr(module, "__name__", None)
