"""Facts in a file: observe on one machine (``xpufp8 collect``), judge on another (``xpufp8 doctor --facts``).

The file holds what probes saw and what was asked, never a judgement, so a later xpufp8 with better rules reads it again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xpufp8 import __version__
from xpufp8.doctor import Request, conclude, launch_for, observe, select
from xpufp8.errors import UsageError
from xpufp8.json_file import read_data
from xpufp8.model import from_config
from xpufp8.redaction import redact_facts
from xpufp8.report import ProbeReport, Report
from xpufp8.target import Target


class SavedModel(BaseModel):
    """The model that was asked about."""

    model_config = ConfigDict(extra="ignore")

    source: str
    config: dict[str, Any]


class Saved(BaseModel):
    """A facts file."""

    model_config = ConfigDict(extra="ignore")

    facts_version: Literal["1"] = "1"
    tool_version: str = __version__
    python: str
    device: str
    vllm_args: list[str] = Field(default_factory=list)
    typed: list[str] = Field(default_factory=list)
    model: SavedModel | None = None
    probes: list[ProbeReport]


def collect(target: Target, request: Request) -> Saved:
    """Run the probes of a target and keep what they saw. Secrets among the options are redacted."""
    reports = observe(target, select(target, request), request, launch_for(target, request))
    model = SavedModel(source=target.model.source, config=target.model.config) if target.model else None
    saved = Saved(
        python=target.python,
        device=target.device,
        vllm_args=list(target.vllm_args),
        typed=list(target.typed),
        model=model,
        probes=reports,
    )
    return Saved.model_validate(redact_facts(saved.model_dump(mode="json"), [*target.typed, *target.vllm_args]))


def dump(saved: Saved) -> str:
    """The file's text."""
    return json.dumps(saved.model_dump(mode="json"), indent=1) + "\n"


def as_saved(data: dict[str, Any], name: str) -> Saved:
    """A facts file from its data. One of a later version is read as far as this version understands it.

    Raises:
        UsageError: what this version needs is missing or has another form.
    """
    if "facts_version" not in data:
        told = " It is a recorded machine: use --sysfs." if {"files", "folders", "links"} <= set(data) else ""
        raise UsageError(f"{name}: neither a report nor a facts file.{told} Give a file that `xpufp8 collect` wrote.")
    try:
        return Saved.model_validate(data | {"facts_version": "1"})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{name}: not a facts file ({place}: {first['msg']}). Give a file that `xpufp8 collect` wrote."
        ) from error


def read(path: Path) -> Saved:
    """A facts file, or the probes of a JSON report.

    Raises:
        UsageError: unreadable, neither of the two, or a report about a model (it does not hold the model's config.json).
    """
    data = read_data(path, "--facts")
    if "schema_version" in data and isinstance(data.get("target"), dict):
        if model := data["target"].get("model"):
            raise UsageError(
                f"--facts {path}: a report about {model}, without the config.json that a new judgement needs. "
                f"`xpufp8 render {path}` shows it; `xpufp8 collect MODEL` writes a file that can be judged again."
            )
        data = {**data["target"], "facts_version": "1", "probes": data.get("probes", []), "model": None, "typed": []}
    return as_saved(data, f"--facts {path}")


def diagnose_saved(saved: Saved) -> Report:
    """The report of saved facts. Nothing is probed again, so no fix can be verified."""
    model = from_config(saved.model.source, saved.model.source, saved.model.config, saved.vllm_args) if saved.model else None
    target = Target(
        python=saved.python,
        device=saved.device,
        model=model,
        vllm_args=tuple(saved.vllm_args),
        typed=tuple(saved.typed or saved.vllm_args),
    )
    return conclude(target, saved.probes, Request(), live=False)
