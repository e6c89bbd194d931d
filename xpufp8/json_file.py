"""Reads a JSON file that somebody named: bounded, and every fault in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xpufp8.errors import UsageError

LARGEST = 64 * 1024 * 1024
"""Bytes; reports and facts files are some hundred kilobytes."""
GIVE = "Give a report (--format json) or a file that `xpufp8 collect` wrote."


def read_data(path: Path, said: str, give: str = GIVE) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        path: The file.
        said: How the file was given (``--baseline``), for the message.
        give: What to give instead, for the message.

    Raises:
        UsageError: unreadable, too large, or no JSON object.
    """
    name = f"{said} {path}".strip()
    try:
        with path.open("rb") as file:
            # The size that the file system states says nothing of a pipe or a device.
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise UsageError(f"{name}: larger than any report ({LARGEST >> 20} MiB). {give}")
        value = json.loads(data)
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: is not JSON. {give}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{name}: is not a JSON object. {give}")
    return value
