"""Errors that a person sees: one line that names the thing, the place and the next step."""

from __future__ import annotations


class UsageError(Exception):
    """Wrong usage or unreadable input: exit code 2, the message alone on stderr, no traceback."""
