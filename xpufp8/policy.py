"""Policies: expected findings that do not count, each with a reason and an expiry, and the baseline of an earlier report.

A policy is ``xpufp8.toml``, or the table ``[tool.xpufp8]`` of a pyproject.toml. It never changes a verdict; it changes what
counts for the exit code, and every format shows what was ignored and why.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from probes.redact import redact
from xpufp8.errors import UsageError
from xpufp8.exits import FailOn
from xpufp8.report import Finding, Ignored, Outcome, Report
from xpufp8.verdict import RANK, exit_code, fixed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "xpufp8.toml"
LARGEST = 1024 * 1024
"""Bytes of a policy file."""


def _no_number(value: object) -> object:
    """A number would be taken for seconds since 1970, and 0 for a date that has passed.

    Raises:
        ValueError: it is one.
    """
    if isinstance(value, (int, float)):
        raise ValueError("give a date, such as 2030-12-31")  # noqa: TRY004 - pydantic takes ValueError for a refusal
    return value


class Ignore(BaseModel):
    """One expected finding. What is given of ``code``, ``op`` and ``model`` must all fit; ``*`` and ``?`` are wildcards."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    code: str | None = None
    op: str | None = None
    """Fits the finding's subject or a word of it, and the place of an observation."""
    model: str | None = None
    """Fits MODEL as typed, or its last part."""
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    until: Annotated[date, BeforeValidator(_no_number)]
    """Last day on which it holds."""

    def fits(self, finding: Finding, model: str | None) -> bool:
        """True when it is about this finding of this model."""
        names = [finding.subject, *re.split(r"[\s,;]+", finding.subject), *(evidence.where for evidence in finding.evidence)]
        models = [model, model.rstrip("/").rsplit("/", 1)[-1]] if model else []
        return _fits(self.code, [finding.code]) and _fits(self.op, [name for name in names if name]) and _fits(self.model, models)

    def describe(self) -> str:
        """The entry in a few words."""
        return " ".join(f"{name} {value}" for name in ("code", "op", "model") if (value := getattr(self, name)) is not None)


class Policy(BaseModel):
    """A policy file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    fail_on: Literal["error", "warning", "never"] | None = Field(default=None, alias="fail-on")
    baseline: str | None = None
    """An earlier JSON report, relative to the policy file."""
    ignore: tuple[Ignore, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """A policy and the file it came from (empty: there is none)."""

    policy: Policy
    path: str = ""

    @property
    def baseline(self) -> Path | None:
        """The baseline that the policy names."""
        return Path(self.path).parent / self.policy.baseline if self.policy.baseline else None


def _fits(pattern: str | None, values: Iterable[str]) -> bool:
    return pattern is None or any(fnmatchcase(value, pattern) for value in values)


def find(folder: Path) -> Path | None:
    """The policy file of a folder: xpufp8.toml, or a pyproject.toml that has the table; None where there is neither."""
    own = folder / NAME
    if own.exists() or own.is_symlink():  # a folder or a dangling link of this name is said to be none, not passed over
        return own
    project = folder / "pyproject.toml"
    try:
        # A broken pyproject.toml that nobody pointed at is not this tool's to complain about.
        tool = tomllib.loads(project.read_text(encoding="utf-8")).get("tool")
    except (OSError, ValueError, RecursionError):
        return None
    return project if isinstance(tool, dict) and "xpufp8" in tool else None


def load(path: Path) -> Loaded:
    """A policy file.

    Raises:
        UsageError: unreadable, not TOML, an unknown key or code, a value of another kind; the message names the place.
    """
    try:
        if path.is_file() and path.stat().st_size > LARGEST:
            raise UsageError(f"--policy {path}: larger than any policy ({LARGEST >> 20} MiB)")
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--policy {path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--policy {path}: not TOML ({error})") from error
    if path.name == "pyproject.toml":
        tool = data.get("tool")
        data = tool.get("xpufp8", {}) if isinstance(tool, dict) else {}
    if not isinstance(data, dict):
        raise UsageError(f"--policy {path}: tool.xpufp8 is no table. Write [tool.xpufp8] above its keys.")
    if isinstance(data.get("ignore"), dict):
        raise UsageError(f"--policy {path}: ignore is one table. Write [[ignore]], with two brackets, above each entry.")
    try:
        policy = Policy.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"--policy {path}: {_explain(error)}") from error
    for at, entry in enumerate(policy.ignore, 1):
        _check(entry, f"--policy {path}: ignore {at}")
    return Loaded(policy, str(path))


def _explain(error: ValidationError) -> str:
    """The first fault in words: which key of which entry, and what was meant."""
    first = error.errors()[0]
    loc = [str(part + 1) if isinstance(part, int) else part for part in first["loc"]]
    if first["type"] != "extra_forbidden":
        return f"{' '.join(loc) or 'policy'}: {first['msg']}"
    known = list(Ignore.model_fields) if loc[0] == "ignore" else [f.alias or n for n, f in Policy.model_fields.items()]
    near = difflib.get_close_matches(loc[-1], known, n=1)
    return f"{' '.join(loc)}: unknown key." + (f" Did you mean {near[0]}?" if near else f" Known: {', '.join(known)}.")


def _check(entry: Ignore, place: str) -> None:
    from xpufp8.rules import BY_CODE

    if entry.code is None and entry.op is None and entry.model is None:
        raise UsageError(f"{place}: say what it is about: code, op or model.")
    if entry.code is not None and not any(fnmatchcase(code, entry.code) for code in BY_CODE):
        near = difflib.get_close_matches(entry.code, BY_CODE, n=1)
        raise UsageError(f"{place}: no rule is called {entry.code!r}." + (f" Did you mean {near[0]}?" if near else ""))


def judge(
    report: Report, loaded: Loaded | None, *, fail_on: FailOn | None, baseline: tuple[str, Report] | None, today: date
) -> Report:
    """The report with what a policy and a baseline make of it, and with its exit code.

    Args:
        report: A report; what an earlier policy said in it is forgotten.
        loaded: The policy, or None.
        fail_on: ``--fail-on`` where it was typed; it wins over the policy's, and that over what the report was judged by.
        baseline: Name and content of the earlier report, or None.
        today: The day on which ignores are held against their expiry.
    """
    policy = loaded.policy if loaded else Policy()
    notes: list[str] = []
    used: set[Ignore] = set()
    expired: set[Ignore] = set()
    findings = []
    for finding in report.findings:
        plain = finding.model_copy(update={"ignored": None, "note": ""})
        fitting = [entry for entry in policy.ignore if entry.fits(finding, report.target.model)]
        used.update(fitting)
        findings.append(_judged(plain, fitting, baseline[1] if baseline else None, today, expired))
    for entry in policy.ignore:
        reason = redact(entry.reason)
        if entry in expired:
            notes.append(
                f"The ignore of {entry.describe()} expired on {entry.until.isoformat()} ({reason}): its findings count again."
            )
        elif entry not in used:
            notes.append(
                f"The ignore of {entry.describe()} met nothing ({reason}); it can be removed if it was meant for this target."
            )
    threshold = fail_on or policy.fail_on or (report.outcome.fail_on if report.outcome else "error")
    bare = report.model_copy(update={"findings": findings, "outcome": None})
    outcome = Outcome(
        exit_code=exit_code(bare, threshold),
        fail_on=threshold,
        policy=redact(loaded.path) if loaded else "",
        baseline=redact(baseline[0]) if baseline else "",
        notes=notes,
    )
    return bare.model_copy(update={"outcome": outcome})


def _judged(finding: Finding, fitting: list[Ignore], earlier: Report | None, today: date, expired: set[Ignore]) -> Finding:
    """The finding with what is said of it; entries that have expired and would have fitted are added to ``expired``."""
    if finding.status == "fail" and fixed(finding):
        return finding
    standing = [entry for entry in fitting if entry.until >= today]
    if standing:
        entry = max(standing, key=lambda one: one.until)
        ignored = Ignored(by="policy", reason=redact(entry.reason), until=entry.until.isoformat())
        return finding.model_copy(update={"ignored": ignored})
    if earlier is not None and _known(finding, earlier):
        return finding.model_copy(update={"ignored": Ignored(by="baseline", reason="it stands in the earlier report")})
    if fitting:
        expired.update(fitting)
        entry = max(fitting, key=lambda one: one.until)
        note = f"The policy's ignore expired on {entry.until.isoformat()}: {redact(entry.reason)}"
        return finding.model_copy(update={"note": note})
    return finding


def _known(finding: Finding, earlier: Report) -> bool:
    """True when the earlier report has the same finding, no less grave and no better off."""
    return any(
        old.code == finding.code
        and old.subject == finding.subject
        and RANK[old.severity] <= RANK[finding.severity]
        and (old.status == finding.status or (old.status == "fail" and finding.status == "unknown"))
        and (fixed(finding) or not fixed(old))
        for old in earlier.findings
    )
