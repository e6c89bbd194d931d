"""Probe: whether the ``vllm serve`` of this interpreter knows the typed options and takes their values.

vLLM's own argument parser is built and asked, so the answer is right for whatever release is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from typing import TYPE_CHECKING, Any, NoReturn

from probes.protocol import describe_error
from probes.vllm_options_facts import VllmOptionsFacts

if TYPE_CHECKING:
    import argparse

    from probes.protocol import Context

PARSER_MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Where ``make_arg_parser`` stands: since 0.32, and before."""
PARSER_CLASSES = ("vllm.utils.argparse_utils", "vllm.utils")
"""Where ``FlexibleArgumentParser`` stands: since 0.11, and before."""


class _RefusedError(Exception):
    """The parser's message, in place of its exit."""


def _attribute(modules: tuple[str, ...], name: str) -> Any:
    problem: Exception | None = None
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError) as error:
            problem = problem or error
    raise problem or ModuleNotFoundError(name)


def build_parser() -> Any:
    """The parser of ``vllm serve``, made to raise where it would exit and to collect what it does not know in ``unknown``.

    vLLM rewrites tokens in ``parse_args`` (``-O.mode=3``), so that is what must be called; argparse's own step below it is
    where unknown tokens show.
    """

    class Parser(_attribute(PARSER_CLASSES, "FlexibleArgumentParser")):  # type: ignore[misc]  # vLLM has no types here
        unknown: list[str]

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
            values, extra = super().parse_known_args(args, namespace)
            self.unknown = [*getattr(self, "unknown", []), *extra]
            return values, []

        def error(self, message: str) -> NoReturn:
            raise _RefusedError(message)

    return _attribute(PARSER_MODULES, "make_arg_parser")(Parser())


def _deprecated(parser: argparse.ArgumentParser, tokens: list[str]) -> dict[str, str]:
    typed = {t.split("=", 1)[0].replace("_", "-") for t in tokens if t.startswith("-")}
    found = {}
    for action in parser._actions:
        names = typed & set(action.option_strings)
        text = str(action.help or "")
        if names and ("deprecated" in text.lower() or getattr(action, "deprecated", False)):
            found[min(names)] = " ".join(text.split())[:300]
    return found


def _value(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)[:300]


def observe(context: Context) -> VllmOptionsFacts:
    """Build the parser and let it read the typed options."""
    from probes.model_config import version_of

    try:
        parser = build_parser()
    except Exception as error:  # noqa: BLE001 - a vLLM that cannot be imported is an answer here
        return VllmOptionsFacts(version_of("vllm"), error=describe_error(error))
    tokens = [*([context.model] if context.model else []), *context.vllm_args]
    unknown: list[str] = []
    rejected: str | None = None
    changed: dict[str, str] = {}
    # argparse prints --help and deprecations on stdout and stderr; nothing of that is an answer.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            values = parser.parse_args(tokens)
            unknown, parser.unknown = parser.unknown, []
            defaults = parser.parse_args([])
            changed = {k: _value(v) for k, v in vars(values).items() if v != getattr(defaults, k, None)}
        except _RefusedError as error:
            rejected = str(error)
        except SystemExit:
            rejected = "the parser stopped (an option such as --help prints and exits)"
        except Exception as error:  # noqa: BLE001 - type converters of vLLM raise whatever they like
            rejected = f"{type(error).__name__}: {error}"
    known = sorted({o for action in parser._actions for o in action.option_strings})
    return VllmOptionsFacts(version_of("vllm"), known, unknown, rejected, _deprecated(parser, list(context.vllm_args)), changed)
