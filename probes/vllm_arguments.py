"""Single values among typed options of ``vllm serve``, for probes. The host half has the whole grammar (``xpufp8.options``)."""

from __future__ import annotations

from probes.kernel_table_live import option_value


def text(vllm_args: list[str], option: str, short: str = "") -> str | None:
    """Value of ``--some-option`` (or of its short form: ``-tp 2``, ``-tp=2``) as typed last, None if it was not typed."""
    value = option_value(vllm_args, option)
    if value is not None or not short:
        return value
    for index, token in enumerate(vllm_args):
        if token == short and index + 1 < len(vllm_args):
            value = vllm_args[index + 1]
        elif token.startswith(short) and token[len(short) :].lstrip("=").isdecimal():
            value = token[len(short) :].lstrip("=")
    return value


def number(vllm_args: list[str], option: str, short: str = "") -> int:
    """Value of a size option, 1 where it was not typed or is no number."""
    value = text(vllm_args, option, short)
    return int(value) if value is not None and value.isdecimal() and int(value) > 0 else 1


def given(vllm_args: list[str], option: str) -> bool:
    """True when a flag was typed (``--enforce-eager``, ``--enforce_eager``)."""
    return any(token.startswith("--") and token[2:].replace("-", "_") == option for token in vllm_args)
