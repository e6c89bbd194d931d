"""Reads reports and facts files that this version, an earlier or a later one wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from xpufp8.errors import UsageError
from xpufp8.report import SCHEMA_VERSION, Report
from xpufp8.saved import LARGEST, Saved, diagnose_saved


def read_data(path: Path, said: str) -> dict[str, Any]:
    """A JSON object from a file.

    Args:
        path: The file.
        said: How the file was given (``--baseline``), for the message.

    Raises:
        UsageError: unreadable, too large, or no JSON object.
    """
    name = f"{said} {path}".strip()
    try:
        if path.stat().st_size > LARGEST:
            raise UsageError(f"{name}: larger than any report ({LARGEST >> 20} MiB)")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name}: is not JSON. Give a report (--format json) or a file that `xpufp8 collect` wrote.") from error
    if not isinstance(data, dict):
        raise UsageError(f"{name}: neither a report nor a facts file.")
    return data


def as_report(data: dict[str, Any], name: str) -> Report:
    """A report from its data. One of a later schema is read as far as this version understands it: unknown fields are left out.

    Raises:
        UsageError: what this version needs is missing or has another form.
    """
    written = data.get("schema_version")
    try:
        return Report.model_validate(data | {"schema_version": SCHEMA_VERSION})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        later = f" It was written with schema version {written}." if written != SCHEMA_VERSION else ""
        raise UsageError(f"{name}: not a report that this version reads ({place}: {first['msg']}).{later}") from error


def read_report(path: Path, said: str) -> Report:
    """A JSON report.

    Raises:
        UsageError: unreadable, or not a report.
    """
    data = read_data(path, said)
    if "schema_version" not in data:
        raise UsageError(f"{said} {path}: not a report. Give what `xpufp8 doctor --format json` wrote.")
    return as_report(data, f"{said} {path}")


def read_any(path: Path, said: str) -> Report:
    """A JSON report, or the judgement of a facts file by this version's rules.

    Raises:
        UsageError: unreadable, or neither of the two.
    """
    data = read_data(path, said)
    if "schema_version" in data:
        return as_report(data, f"{said} {path}".strip())
    if "facts_version" not in data:
        raise UsageError(f"{said} {path}: neither a report nor a facts file.".strip())
    try:
        saved = Saved.model_validate(data | {"facts_version": "1"})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{said} {path}: not a facts file ({place}: {first['msg']})".strip()) from error
    return diagnose_saved(saved)
