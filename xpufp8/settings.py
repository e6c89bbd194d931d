"""The catalogue of environment variables that bear on serving (``data/settings.toml``), as typed rows."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from xpufp8.report import Severity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DATA = Path(__file__).parent / "data" / "settings.toml"

Kind = Literal["hurts", "helps"]
Parallel = Literal["any", "one", "many"]
Status = Literal["code", "doc", "confirmed", "reported", "inferred", "no"]


@dataclass(frozen=True)
class Condition:
    """Where a row holds."""

    devices: tuple[str, ...]
    """Empty for all."""
    parallel: Parallel

    def holds(self, device: str, world: int) -> bool:
        """Whether the row is about this device and number of devices."""
        sizes = {"any": True, "one": world == 1, "many": world > 1}
        return (not self.devices or device in self.devices) and sizes[self.parallel]


@dataclass(frozen=True)
class Setting:
    """What is known of one value of one variable."""

    name: str
    value: re.Pattern[str]
    kind: Kind
    where: Condition
    severity: Severity
    effect: str
    fix: str
    status: Status
    source: str
    package: str = ""
    seen_by: str = ""
    """Probe whose rules say the same, and more, for several devices; where it answered this row is silent."""

    def matches(self, value: str) -> bool:
        """Whether the whole value is one that the row is about."""
        return self.value.fullmatch(value.strip()) is not None


@dataclass(frozen=True)
class Term:
    """One variable of a conflict: set to something that matches, or not set to what would agree."""

    name: str
    pattern: re.Pattern[str]
    negated: bool

    def holds(self, value: str | None) -> bool:
        """Whether the variable is in the state that makes the conflict; an unset one can only fail to agree."""
        matched = value is not None and self.pattern.fullmatch(value.strip()) is not None
        return not matched if self.negated else matched


@dataclass(frozen=True)
class Conflict:
    """Variables that contradict one another."""

    terms: tuple[Term, ...]
    where: Condition
    severity: Severity
    effect: str
    fix: str
    status: Status
    source: str
    seen_by: str = ""
    """As in :class:`Setting`."""


@dataclass(frozen=True)
class Catalogue:
    """All rows."""

    settings: tuple[Setting, ...]
    conflicts: tuple[Conflict, ...]

    def named(self, name: str) -> tuple[Setting, ...]:
        """Rows about a variable."""
        return tuple(row for row in self.settings if row.name == name)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error


def _condition(row: dict[str, Any]) -> Condition:
    return Condition(tuple(row["devices"]), row["parallel"])


def _setting(row: dict[str, Any]) -> Setting:
    return Setting(
        row["name"], _pattern(row["value"]), row["kind"], _condition(row), row.get("severity", "info"), row["effect"],
        row.get("fix", ""), row["status"], row["source"], row.get("package", ""), row.get("seen_by", ""),
    )  # fmt: skip


def _conflict(row: dict[str, Any]) -> Conflict:
    terms = tuple(Term(t["name"], _pattern(t.get("is") or t["is_not"]), "is_not" in t) for t in row["variables"])
    return Conflict(
        terms, _condition(row), row["severity"], row["effect"], row["fix"], row["status"], row["source"], row.get("seen_by", "")
    )


def parse(text: str) -> Catalogue:
    """Read a catalogue.

    Raises:
        ValueError: no TOML, or a pattern that is no regular expression.
        KeyError: a row lacks a field.
    """
    data = tomllib.loads(text)
    return Catalogue(tuple(map(_setting, data.get("setting", ()))), tuple(map(_conflict, data.get("conflict", ()))))


@cache
def catalogue() -> Catalogue:
    """The bundled catalogue."""
    return parse(DATA.read_text(encoding="utf-8"))
