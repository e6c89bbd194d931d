"""Reads reports and facts files that this version, an earlier or a later one wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from xpufp8.errors import UsageError
from xpufp8.json_file import read_data
from xpufp8.report import SCHEMA_VERSION, Report
from xpufp8.saved import as_saved, diagnose_saved


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
    return diagnose_saved(as_saved(data, f"{said} {path}".strip()))
