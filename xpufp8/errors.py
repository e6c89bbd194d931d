"""Errors that a person sees: one line that names the thing, the place and the next step."""

from __future__ import annotations

from pathlib import Path


class UsageError(Exception):
    """Wrong usage or unreadable input: exit code 2, the message alone on stderr, no traceback."""


def user_path(text: str, said: str) -> Path:
    """A typed path with its ``~`` or ``~user`` filled in.

    Args:
        text: As typed.
        said: How it was given (``--vllm``, ``MODEL``), for the message.

    Raises:
        UsageError: there is no such user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{said} {text}: there is no such home folder. Give the whole path.") from error
