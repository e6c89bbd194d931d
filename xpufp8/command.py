"""The command that serves: which program, with which words and variables."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from probes.facts import EnvironmentFacts
from xpufp8 import options
from xpufp8.report import Plan, Report
from xpufp8.rules.cfg import INSTEAD, WITHOUT
from xpufp8.staging import stage, stage_metadata
from xpufp8.target import Target

APPLY_VARIABLE = "XPUFP8_APPLY"
METADATA = "metadata:vllm"
PLUGIN = "xpufp8"
"""Name of our entry point in ``vllm.general_plugins``."""
CLI_MODULE = "vllm.entrypoints.cli.main"


@dataclass(frozen=True)
class Items:
    """What a plan adds to the typed command."""

    runtime: tuple[str, ...] = ()
    """Repairs for XPUFP8_APPLY."""
    env: tuple[str, ...] = ()
    """``NAME=VALUE``, or several that belong together, as a shell reads them."""
    flags: tuple[str, ...] = ()
    """Options as typed, or ``without OPTION``."""

    @classmethod
    def of(cls, plan: Plan) -> Items:
        """The items of a plan."""
        by = {kind: tuple(i.action for i in plan.items if i.kind == kind) for kind in ("runtime", "env", "flag")}
        return cls(by["runtime"], by["env"], by["flag"])

    @property
    def variables(self) -> dict[str, str]:
        """The variables by name. One that is a list takes the entries of every item, after those of the person's own environment."""
        return assignments(self.env, os.environ)

    @property
    def apply(self) -> tuple[str, ...]:
        """The repairs that vLLM's processes make themselves."""
        return tuple(name for name in self.runtime if name != METADATA)


def vllm_args(typed: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The typed tokens with a plan's flags added, and those that it takes away left out, all else in its order."""
    tokens = list(typed)
    for flag in flags:
        words = shlex.split(flag.removeprefix(WITHOUT))
        if flag.startswith(WITHOUT):
            tokens = _less(tokens, words)
        elif INSTEAD in flag:
            new, old = (shlex.split(part) for part in flag.split(INSTEAD))
            tokens = _less(tokens, old) + new
        else:
            tokens += words
    return tokens


def _less(tokens: list[str], words: list[str]) -> list[str]:
    """The tokens without every run of these words. An option that stands there in another spelling goes with its value."""
    kept, at = [], 0
    while at < len(tokens):
        if tokens[at : at + len(words)] == words:
            at += len(words)
        else:
            kept.append(tokens[at])
            at += 1
    return options.without(kept, words) if kept == tokens and len(words) == 1 else kept


LISTS = frozenset({"VLLM_DISABLED_KERNELS"})
"""Variables that hold names separated by commas: an item that adds one must not take out those that stand there."""


def assignments(actions: Sequence[str], typed: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of env fixes, each ``NAME=VALUE`` or several of them as a shell would read them.

    Args:
        actions: the fixes.
        typed: the environment that a list's entries are added to; an item without a value empties it first.
    """
    words = [word.split("=", 1) for action in actions for word in shlex.split(action) if "=" in word]
    found = dict(words)
    for name in LISTS & found.keys():
        values = [value for variable, value in words if variable == name]
        before = "" if "" in values else (typed or {}).get(name, "")
        entries = [entry.strip() for value in (before, *values) for entry in value.split(",") if entry.strip()]
        found[name] = ",".join(dict.fromkeys(entries))
    return found


def missing_metadata(environment: EnvironmentFacts | None) -> Path | None:
    """Folder with the metadata that the ``vllm`` command asks for, when the target's vLLM came without it."""
    package = next((p for p in environment.packages if p.name == "vllm"), None) if environment else None
    if package is None or package.location is None or package.distribution == "vllm":
        return None
    version = package.version or "0+unknown"
    # vLLM tells its own flavour by a substring of this version, and a CPU build that does not say so finds no platform.
    if package.distribution and "+" not in version and "-" in package.distribution:
        version = f"{version}+{package.distribution.partition('-')[2]}"
    return stage_metadata("vllm", version)


def plugin_installed(target: Target) -> bool:
    """True when vLLM in the target finds our plugin by itself, because xpufp8 is installed there."""
    import sys

    if target.python != sys.executable:
        return False
    return any(point.name == "xpufp8" for point in metadata.entry_points(group="vllm.general_plugins"))


def environment_for(target: Target, items: Items, environment: EnvironmentFacts | None) -> dict[str, str]:
    """Variables that the command needs, in a stable order."""
    env = items.variables
    path: list[str] = []
    if items.apply:
        # vLLM loads only the plugins that this variable names, where it is set.
        named = os.environ.get("VLLM_PLUGINS")
        if named is not None and PLUGIN not in named.split(","):
            env["VLLM_PLUGINS"] = ",".join([*filter(None, named.split(",")), PLUGIN])
        env[APPLY_VARIABLE] = ",".join(items.apply)
        if not plugin_installed(target):
            path.append(str(stage()))
    if METADATA in items.runtime and (folder := missing_metadata(environment)) is not None:
        path.append(str(folder))
    if path:
        inherited = os.environ.get("PYTHONPATH")
        env["PYTHONPATH"] = os.pathsep.join([*path, *([inherited] if inherited else [])])
    return env


def program(target: Target) -> list[str]:
    """The first words of the command: ``vllm`` when that is the target's own, else its full path, else a module run.

    A simulated device stands for a machine elsewhere, whose paths nobody here knows.
    """
    if target.simulated:
        return ["vllm"]
    beside = Path(target.python).parent / "vllm"
    if beside.is_file():
        found = shutil.which("vllm")
        return ["vllm"] if found is not None and Path(found).absolute() == beside.absolute() else [str(beside)]
    return [target.python, "-m", CLI_MODULE]


def shell_line(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """One line that a shell reads back as exactly this command and environment."""
    return " ".join([*(f"{name}={shlex.quote(text)}" for name, text in env.items()), shlex.join(argv)])


@dataclass(frozen=True)
class Command:
    """A command and its variables."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)

    @property
    def shell(self) -> str:
        """As one copyable line."""
        return shell_line(self.argv, self.env)


def known_environment(report: Report) -> EnvironmentFacts | None:
    """The environment probe's facts of a report."""
    facts = next((p.facts for p in report.probes if p.name == "environment" and p.status == "ok"), None)
    return TypeAdapter(EnvironmentFacts).validate_python(facts) if facts else None


def rebuild(target: Target, report: Report) -> Command:
    """The command of a report's plan with the real values of what was typed, which the report redacts."""
    return build(target, Items.of(report.plan), {"environment": known_environment(report)})


def build(target: Target, items: Items, facts: Mapping[str, Any]) -> Command:
    """The command for a target with a plan's items."""
    known = facts.get("environment")
    environment = known if isinstance(known, EnvironmentFacts) else None
    argv = [*program(target), "serve", *vllm_args(target.typed, items.flags)]
    return Command(argv, environment_for(target, items, environment))
