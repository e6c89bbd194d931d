"""The ``vllm.general_plugins`` entry point: makes the repairs that ``XPUFP8_APPLY`` lists, in every process vLLM starts.

vLLM calls ``activate`` in the API server, the engine core, each worker and the child that inspects model classes. Without the
variable it returns at once. A repair that is unknown or cannot be made raises, which ends the process: serving something
other than what was asked for would be worse.
"""

from __future__ import annotations

import logging
import os
import sys

from xpufp8.runtime.catalogue import APPLY_VARIABLE, RepairError, parse

_applied: dict[str, str] = {}
"""Repairs made in this process, item to what was done. A forked child inherits them together with what they patched."""


def _say(level: int, message: str) -> None:
    """Log a line where vLLM's logging is set up, else write it to stderr.

    The API server loads its plugins before it sets up logging, and a repair that nobody reads about is a hidden one.
    """
    logger = logging.getLogger("vllm.xpufp8")
    if logger.hasHandlers():
        logger.log(level, "%s", message)
    else:
        sys.stderr.write(f"{logging.getLevelName(level)} {message}\n")


def _make(item: str) -> str:
    """Make one repair and say in a phrase what was done."""
    kind, _, subject = item.partition(":")
    if kind == "kernel":
        from xpufp8.runtime import tables

        return tables.add_kernel(subject)
    if kind == "moe":
        from xpufp8.runtime import moe

        return moe.add_experts()
    if item == "quant:fp8":
        from xpufp8.runtime import quantize

        return quantize.apply()
    if kind == "fake":
        from xpufp8.runtime import fakes

        return fakes.apply_all() if subject == "all" else fakes.apply(subject)
    if kind == "cast":
        from xpufp8.runtime import casts

        return casts.apply(subject)
    if item == "metadata:vllm":
        return _check_metadata()
    raise RepairError(f"{APPLY_VARIABLE} names {item!r}, which is no repair")


def _check_metadata() -> str:
    """The repair itself is a folder on PYTHONPATH, made before Python started; here it can only be looked for."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"distribution metadata says vllm {version('vllm')}"
    except PackageNotFoundError:
        raise RepairError("metadata:vllm: no distribution named vllm is on sys.path; it must be staged before start") from None


def applied() -> dict[str, str]:
    """Return the repairs made in this process so far, each with what was done."""
    return dict(_applied)


def activate() -> None:
    """Make the repairs of ``XPUFP8_APPLY`` that this process has not made yet.

    Raises:
        RepairError: a repair is unknown, or what it patches is not as expected.
    """
    value = os.environ.get(APPLY_VARIABLE)
    if not value:
        return
    try:
        for item in parse(value):
            if item not in _applied:
                _applied[item] = _make(item)
                _say(logging.INFO, f"xpufp8 repair {item} (pid {os.getpid()}): {_applied[item]}")
    except RepairError as error:
        _say(logging.ERROR, f"xpufp8: {error}")
        raise
