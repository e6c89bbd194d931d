"""ENV020 to ENV023: environment variables that hurt, contradict one another, or do nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from probes.facts import EnvironmentFacts
from xpufp8 import options
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.env_common import PROBE, facts_of, seen
from xpufp8.settings import Conflict, Setting, catalogue

BETWEEN_DEVICES = re.compile(r"^(?:CCL_|FI_(?!LOG_)|I_MPI_)")
"""Variables of what carries data between devices."""

FROM_SETVARS = frozenset({
    "CCL_ROOT", "CCL_CONFIGURATION", "CCL_CONFIGURATION_PATH", "CCL_BUNDLED_MPI", "FI_PROVIDER_PATH", "I_MPI_ROOT", "CCL_LOG_LEVEL",
})  # fmt: skip
"""Set by sourcing oneAPI, or harmless: nobody typed them for this command."""

STATUS = {
    "code": "read in the program's source", "doc": "documented", "confirmed": "confirmed by people who met it", "reported": "reported",
    "inferred": "inferred, not confirmed", "no": "reported not to help",
}  # fmt: skip


def values(facts: EnvironmentFacts) -> dict[str, str]:
    """The settings by name."""
    return {one.name: one.value for one in facts.settings}


def world(case: Case) -> int:
    """Devices that the options ask for."""
    return options.parallel_sizes(case.vllm_args).world


def _holds_for_packages(requirement: str, facts: EnvironmentFacts) -> bool:
    """Whether an installed distribution (by its own or its package's name) meets a requirement; true for none."""
    if not requirement:
        return True
    wanted = Requirement(requirement)
    for package in facts.packages:
        names = {(package.distribution or "").lower(), package.name.lower()}
        try:
            if wanted.name in names and wanted.specifier.contains(Version(package.version or ""), prereleases=True):
                return True
        except InvalidVersion:
            continue
    return False


def fix_of(text: str, name: str, value: str) -> Fix:
    """The fix of a row: NAME=VALUE in the environment of the command, or a variable to unset before it."""
    if "=" in text:
        return Fix(kind="env", action=text.replace("{value}", value))
    return Fix(kind="host", action=text if text.startswith("unset ") else f"unset {name}")


def _shown(name: str, value: str | None) -> Evidence:
    return seen(f"{name} is not set" if value is None else f"{name}={value}", where="environment", mode="live")


@rule("ENV020", "An environment variable is known to hurt", "warning", needs=(PROBE,))
def setting_hurts(self: Rule, case: Case) -> Iterator[Finding]:
    """A variable has a value that is known to break or to slow down serving on this device.

    ## What it means
    What is known of environment variables stands in a table (`xpufp8/data/settings.toml`), each row with its effect, its source
    and how sure it is. One row is about a variable that is set here, for this device and this number of devices.

    ## Why it matters
    Variables outlive their reason: they are copied between machines and stay in profiles and unit files. The finding says what
    this one does. Only one that stops serving is an error.

    ## How it looks
    `VLLM_WORKER_MULTIPROC_METHOD=fork`

    ## How it is fixed
    Unset it, or set it as given. What is only reported or inferred is said to be; keep the value if you know better.
    """
    facts = facts_of(case)
    if facts is None:
        return
    for name, value in values(facts).items():
        for row in catalogue().named(name):
            if row.kind == "hurts" and row.matches(value) and _applies(row, case, facts):
                yield _hurting(self, row, value)


def _applies(row: Setting, case: Case, facts: EnvironmentFacts) -> bool:
    return _here(row, case) and _holds_for_packages(row.package, facts)


def _here(row: Setting | Conflict, case: Case) -> bool:
    """Whether a row is about this device and number of devices, and no other rule says it better."""
    told = world(case) > 1 and row.seen_by in case.facts
    return row.where.holds(case.device, world(case)) and not told


def _hurting(self: Rule, row: Setting, value: str) -> Finding:
    found = self.finding(
        row.name, f"{row.name}={value}: {row.effect} ({STATUS[row.status]}).", [_shown(row.name, value)], severity=row.severity,
        fixes=[fix_of(row.fix, row.name, value)], title=f"{row.name}={value} is known to hurt",
    )  # fmt: skip
    return found.model_copy(update={"references": [row.source]})


@rule("ENV021", "Environment variables contradict one another", "warning", needs=(PROBE,))
def settings_conflict(self: Rule, case: Case) -> Iterator[Finding]:
    """Two variables, or a variable and an option, ask for things that exclude one another.

    ## What it means
    One of them switches off what the other asks for, or needs a companion that is not set. Sets of variables from public threads
    hold several such pairs, because each was added in another attempt.

    ## Why it matters
    The setting that loses has no effect, so it neither helps nor explains anything. A device mask that shows fewer devices than
    the options ask for stops the start.

    ## How it looks
    `CCL_ENABLE_SYCL_KERNELS=1` with `CCL_ALLREDUCE=ring`; `ZE_AFFINITY_MASK=0` with `-tp 2`

    ## How it is fixed
    Keep the one that is meant. The fix given keeps the first.
    """
    facts = facts_of(case)
    if facts is None:
        return
    there = values(facts)
    for row in catalogue().conflicts:
        if _here(row, case) and all(term.holds(there.get(term.name)) for term in row.terms):
            yield _conflicting(self, row, there)
    if case.device == "xpu":
        yield from _mask_too_small(self, case, there)


def _conflicting(self: Rule, row: Conflict, there: dict[str, str]) -> Finding:
    names = [term.name for term in row.terms]
    found = self.finding(
        " and ".join(names), f"{' and '.join(_state(n, there) for n in names)}: {row.effect} ({STATUS[row.status]}).",
        [_shown(name, there.get(name)) for name in names], severity=row.severity, fixes=[fix_of(row.fix, names[-1], "")],
        title=f"{names[0]} and {names[1]} contradict one another",
    )  # fmt: skip
    return found.model_copy(update={"references": [row.source]})


def _state(name: str, there: dict[str, str]) -> str:
    return f"{name}={there[name]}" if name in there else f"{name} not set"


def _mask_too_small(self: Rule, case: Case, there: dict[str, str]) -> Iterator[Finding]:
    """ZE_AFFINITY_MASK shows fewer devices than one replica needs."""
    mask = there.get("ZE_AFFINITY_MASK", "").strip()
    shown = [entry for entry in mask.split(",") if entry.strip()]
    sizes = options.parallel_sizes(case.vllm_args)
    needed = sizes.tensor * sizes.pipeline
    several_hosts = (options.value(case.vllm_args, "--distributed-executor-backend") or "") == "ray" or any(
        options.value(case.vllm_args, name) for name in ("--nnodes", "--node-rank")
    )
    # A bare root device may stand for several tiles, so only entries that name tiles can be counted under that hierarchy.
    tiles = there.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() in ("COMPOSITE", "COMBINED")
    if not shown or len(shown) >= needed or several_hosts or (tiles and any("." not in entry for entry in shown)):
        return
    asked = f"tensor parallel {sizes.tensor}, pipeline parallel {sizes.pipeline}"
    devices = f"{len(shown)} device{'s' if len(shown) > 1 else ''}"
    yield self.finding(
        "ZE_AFFINITY_MASK and parallel size",
        f"ZE_AFFINITY_MASK={mask} shows {devices}, and the options ask for {needed} ({asked}).",
        [
            _shown("ZE_AFFINITY_MASK", mask),
            seen(asked, where="options", mode="live"),
        ],
        severity="error",
        fixes=[Fix(kind="env", action=f"ZE_AFFINITY_MASK={','.join(map(str, range(needed)))}")],
        title="ZE_AFFINITY_MASK shows fewer devices than the options ask for",
    )


@rule("ENV022", "Multi-device variables are set for one device", "info", needs=(PROBE,))
def needless_for_one_device(self: Rule, case: Case) -> Iterator[Finding]:
    """Variables that only bear on traffic between devices are set, and the command uses one.

    ## What it means
    `CCL_*` and `FI_*` configure oneCCL and libfabric, which carry data between devices. With tensor, pipeline and data parallel
    sizes of 1 there is none to carry.

    ## Why it matters
    They do nothing here, and hide in a long command what does something.

    ## How it looks
    `CCL_TOPO_P2P_ACCESS=0`, `FI_PROVIDER=tcp` without `-tp`

    ## How it is fixed
    Leave them out.
    """
    facts = facts_of(case)
    if facts is None or case.device != "xpu" or world(case) > 1:
        return
    needless = {n: v for n, v in values(facts).items() if BETWEEN_DEVICES.match(n) and n not in FROM_SETVARS}
    if needless:
        yield self.finding(
            "multi-device variables",
            f"{', '.join(needless)} bear only on traffic between devices, and this command uses one device.",
            [_shown(name, value) for name, value in needless.items()],
            fixes=[Fix(kind="host", action=f"unset {' '.join(needless)}")],
        )


@rule("ENV023", "vLLM of this release does not read a variable", "info", needs=(PROBE,))
def variable_not_read(self: Rule, case: Case) -> Iterator[Finding]:
    """A `VLLM_*` variable is set that the installed vLLM does not know.

    ## What it means
    vLLM lists the variables that it reads in `vllm/envs.py`. This one is not there: it belongs to another release, to a fork
    (llm-scaler's images have several of their own), or is misspelt.

    ## Why it matters
    It has no effect. vLLM itself only warns (`Unknown vLLM environment variable detected`) among many other lines.

    ## How it looks
    `VLLM_OFFLOAD_WEIGHTS_BEFORE_QUANT=1` with vLLM 0.32.0

    ## How it is fixed
    Leave it out, correct the name, or use the vLLM that reads it.
    """
    facts = facts_of(case)
    there = values(facts) if facts else {}
    for name in facts.unknown_settings if facts else ():
        rows = catalogue().named(name)
        known = f" It is known from elsewhere: {rows[0].effect}." if rows else ""
        version = next((p.version for p in facts.packages if p.name == "vllm"), None) if facts else None
        yield self.finding(
            name, f"vLLM {version or ''} does not read {name}, so it has no effect.{known}".replace("  ", " "),
            [_shown(name, there.get(name)), seen(f"vllm/envs.py does not name {name}")],
            fixes=[Fix(kind="host", action=f"unset {name}")], title=f"vLLM does not read {name}",
        )  # fmt: skip


RULES = (setting_hurts, settings_conflict, needless_for_one_device, variable_not_read)
