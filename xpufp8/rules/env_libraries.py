"""ENV010 to ENV013, ENV015: shared objects of the serving stack that could not load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from probes.facts import EnvironmentFacts, LibraryFact
from xpufp8.report import Evidence, Finding, Fix, Severity
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.env_common import (
    PROBE,
    facts_of,
    find,
    label,
    seen,
    setting,
    weight,
    worst,
)

_BACKEND_LIBRARY = re.compile(r"^lib(?:torch|c10)_(?:cuda|xpu|hip)\.so$")
"""A backend of torch itself: ENV003 or ENV005 says what is wrong with the build."""

_DRIVER = frozenset({"libcuda.so.1", "libnvidia-ml.so.1"})
"""Come with a driver for another vendor's device."""

PROVIDERS = (
    (re.compile(r"^libze_loader\.so"), "the Level Zero loader (package libze1 or level-zero of the distribution)"),
    (re.compile(r"^(?:libsycl|libur_loader)\.so"), "the SYCL runtime (intel-sycl-rt, or oneAPI's compiler runtime)"),
    (re.compile(r"^lib(?:intlc|imf|svml|irng|irc)\.so"), "Intel's compiler runtime (intel-cmplr-lib-rt)"),
    (re.compile(r"^libmkl_"), "oneMKL"),
    (re.compile(r"^libccl\.so"), "oneCCL (package oneccl)"),
    (re.compile(r"^libmpi(?:cxx|fort)?\.so"), "Intel MPI (package impi-rt)"),
    (re.compile(r"^libOpenCL\.so"), "the OpenCL loader (package ocl-icd-libopencl1)"),
    (re.compile(r"^libnuma\.so"), "libnuma (package libnuma1)"),
    (re.compile(r"^lib(?:cudart|cublas|cudnn|nvrtc|cusparse|cufft|nccl)"), "the CUDA runtime"),
)
"""What brings a library, for people."""


@dataclass
class Want:
    """One library that objects of one package need and do not get."""

    package: str
    name: str
    weights: list[Severity] = field(default_factory=list)
    objects: list[LibraryFact] = field(default_factory=list)

    @property
    def severity(self) -> Severity:
        """That of the most important object."""
        return worst(self.weights)

    @property
    def elsewhere(self) -> str | None:
        """A file of that very name where the loader does not look."""
        return next((one.elsewhere[self.name] for one in self.objects if self.name in one.elsewhere), None)

    @property
    def others(self) -> list[str]:
        """Other generations of it that are there."""
        return sorted({other for one in self.objects for other in one.other_generation.get(self.name, [])})

    @property
    def modules(self) -> str:
        """What cannot be imported for want of it."""
        names = sorted({name for one in self.objects for name in one.loaded_by})
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def evidence(self) -> list[Evidence]:
        """The objects, at most three of them."""
        shown = [
            seen(f"{label(one)} needs {self.name}", where=one.path, expected=f"a {self.name} that the loader finds")
            for one in self.objects[:3]
        ]
        return shown + (
            [seen(f"{len(self.objects) - 3} more objects of {self.package} need it")] if len(self.objects) > 3 else []
        )

    def error(self) -> str:
        """The message of the dynamic loader."""
        return f"ImportError: {self.name}: cannot open shared object file: No such file or directory"


def _wants(case: Case, facts: EnvironmentFacts) -> list[Want]:
    """Libraries that are missing for something that this device loads, one entry a package and library."""
    found: dict[tuple[str, str], Want] = {}
    for one in facts.libraries:
        severity = weight(case, facts, one.package, one.loaded_by)
        if severity is None:
            continue
        for name in one.missing:
            if _BACKEND_LIBRARY.match(name) and one.package != "torch":
                continue
            if name in _DRIVER and case.device != "cuda":
                continue
            want = found.setdefault((one.package, name), Want(one.package, name))
            want.weights.append(severity)
            want.objects.append(one)
    companions = {one.package for one in facts.libraries if any(_BACKEND_LIBRARY.match(n) for n in one.missing)}
    # A build for another torch also misses the libraries of that torch; one finding says it all.
    return [want for want in found.values() if want.package == "torch" or want.package not in companions]


def _torch_generation(facts: EnvironmentFacts, name: str) -> str | None:
    """Another generation of the same library that torch itself needs, None when torch needs none or this one."""
    for needed in facts.generations.values():
        if name in needed:
            return next((other for other, packages in needed.items() if other != name and "torch" in packages), None)
    return None


def _provider(name: str) -> str:
    return next((text for pattern, text in PROVIDERS if pattern.match(name)), f"the package that brings {name}")


@rule("ENV010", "A shared library is missing", "error", needs=(PROBE,))
def library_missing(self: Rule, case: Case) -> Iterator[Finding]:
    """A compiled module needs a library that is not on this machine, as far as the loader's folders show.

    ## What it means
    Every compiled module names the libraries that it needs (NEEDED entries of its ELF header). The search of the dynamic loader was
    followed for each: RPATH and RUNPATH, LD_LIBRARY_PATH, the loader's cache, the standard folders, and what torch loads before.
    One was found nowhere, in no other generation either.

    ## Why it matters
    Importing the module ends in `ImportError: libX.so.N: cannot open shared object file`. On XPU vLLM catches that while it looks
    for its platform and then says only `Failed to infer device type`.

    ## How it looks
    `vllm_xpu_kernels/_C.abi3.so needs libze_loader.so.1`

    ## How it is fixed
    Install what brings the library; its usual package is named. Severity follows from whether this device loads the module at all.
    """
    facts = facts_of(case)
    for want in _wants(case, facts) if facts else ():
        if want.elsewhere or want.others or (facts and want.package != "torch" and _torch_generation(facts, want.name)):
            continue
        yield self.finding(
            f"{want.package}: {want.name}",
            f"{want.modules} cannot be imported: {want.name} is not there ({want.error()}).",
            want.evidence(),
            severity=want.severity,
            fixes=[Fix(kind="host", action=f"Install {_provider(want.name)}.")],
            title=f"{want.package} needs {want.name}, which is missing",
        )


@rule("ENV011", "A shared library is there in another generation", "error", needs=(PROBE,), references=("intel/llm-scaler#665",))
def library_of_other_generation(self: Rule, case: Case) -> Iterator[Finding]:
    """A compiled module needs `libsycl.so.9` where only `libsycl.so.8` is, or the like: it was built for another oneAPI.

    ## What it means
    The number after `.so` is the generation of the library's binary interface. torch 2.12 for XPU comes with oneAPI 2025 and
    `libsycl.so.8`, torch 2.13 with oneAPI 2026 and `libsycl.so.9`; a kernel package built for one does not load beside the other.

    ## Why it matters
    The import ends in `ImportError: libsycl.so.9: cannot open shared object file`. A link under the wanted name, or the other
    runtime on LD_LIBRARY_PATH, only moves the failure: torch and the module would then hold two SYCL runtimes in one process,
    whose queues they cannot share.

    ## How it looks
    `vllm_xpu_kernels/_C.abi3.so needs libsycl.so.9; there is libsycl.so.8`

    ## How it is fixed
    Take the release of the package that was built for this torch (its release notes name the torch), or move torch to the
    release that the package was built for.
    """
    facts = facts_of(case)
    for want in _wants(case, facts) if facts else ():
        held = _torch_generation(facts, want.name) if facts and want.package != "torch" else None
        if not (want.others or held) or (want.elsewhere and not held):
            continue
        there = held or ", ".join(want.others)
        torch = find(facts, "torch") if facts else None
        holder = f"torch {torch.version} itself is built for {held}" if held and torch else f"there is {there}"
        evidence = [*want.evidence(), seen(f"{holder}; {want.name} is not where the loader looks")]
        if want.elsewhere:
            evidence.append(seen(f"{want.name} lies outside the loader's search path", where=want.elsewhere))
        yield self.finding(
            f"{want.package}: {want.name}",
            f"{want.package} was built for {want.name} and {holder}: another generation, so {want.modules} cannot be imported.",
            evidence,
            severity=want.severity,
            fixes=[
                Fix(
                    kind="host",
                    action=f"Install the {want.package} that was built for this torch, or the torch it was built for.",
                )
            ],
            title=f"{want.package} needs {want.name}; {'torch uses' if held else 'there is'} {there}",
        )


@rule(
    "ENV012",
    "A needed library is installed where the loader does not look",
    "error",
    needs=(PROBE,),
    references=("vllm-project/vllm#47578",),
)
def library_off_the_path(self: Rule, case: Case) -> Iterator[Finding]:
    """The library is on the machine, outside the loader's search path: usually a oneAPI environment that was not sourced.

    ## What it means
    oneAPI installs its libraries under `/opt/intel/oneapi` and relies on `setvars.sh` to put them on LD_LIBRARY_PATH. A shell
    profile does that for people, not for systemd units, `docker exec` or a container's entry point.

    ## Why it matters
    The same command works in one terminal and fails in a service: with `cannot open shared object file`, or with `XPU device
    count is zero`, after which Triton is disabled too.

    ## How it looks
    `torch/lib/libtorch_xpu.so needs libsycl.so.8; it lies in /opt/intel/oneapi/compiler/2025.3/lib`

    ## How it is fixed
    `source /opt/intel/oneapi/setvars.sh --force` before vLLM, or set LD_LIBRARY_PATH as given.
    """
    facts = facts_of(case)
    if facts is None:
        return
    for want in _wants(case, facts):
        place = want.elsewhere
        if place is None or (want.package != "torch" and _torch_generation(facts, want.name)):
            continue
        folder = place.rpartition("/")[0]
        root = facts.oneapi.get("folder")
        before = setting(facts, "LD_LIBRARY_PATH")
        evidence = [*want.evidence(), seen(f"{want.name} lies outside the loader's search path", where=place)]
        fixes = [Fix(kind="env", action=f"LD_LIBRARY_PATH={folder}" + (f":{before}" if before else ""), cost="none")]
        cause = f"{want.modules} cannot be imported: {want.name} is in {folder}, where the loader does not look"
        if root and place.startswith(f"{root}/"):
            state = "not sourced" if facts.oneapi.get("sourced") != "yes" else "sourced, but not this part of it"
            evidence.append(seen(f"the oneAPI environment is {state}", where=root, mode="live"))
            cause += f"; the oneAPI environment is {state}"
            fixes.insert(0, Fix(kind="host", action=f"source {root}/setvars.sh --force", cost="none"))
        yield self.finding(
            f"{want.package}: {want.name}", f"{cause}.", evidence, severity=want.severity, fixes=fixes,
            title=f"{want.name} is installed, and {want.package} does not find it",
        )  # fmt: skip


@rule("ENV013", "One process would hold two generations of a runtime", "error", needs=(PROBE,))
def two_generations(self: Rule, case: Case) -> Iterator[Finding]:
    """Torch and a package beside it each find their own generation of a library with process-wide state.

    ## What it means
    Nothing is missing, so everything imports: torch loads `libsycl.so.8`, the kernel package `libsycl.so.9` from another oneAPI.
    Each runtime has its own devices, contexts and memory.

    ## Why it matters
    A queue or pointer of the one is meaningless to the other. What follows is a crash in the first kernel, or no device at all.

    ## How it looks
    `libsycl.so.8 is needed by torch, libsycl.so.9 by vllm_xpu_kernels`

    ## How it is fixed
    Install the package that was built for this torch, and keep only that torch's oneAPI generation on LD_LIBRARY_PATH.
    """
    facts = facts_of(case)
    if facts is None:
        return
    missing = {name for one in facts.libraries for name in one.missing}
    for stem, needed in facts.generations.items():
        used = {
            name: packages for name, packages in needed.items()
            if name not in missing and any(p == "torch" or _counts(case, facts, p) for p in packages)
        }  # fmt: skip
        if len(used) < 2 or not any("torch" in packages for packages in used.values()):
            continue
        text = ", ".join(f"{name} by {' and '.join(packages)}" for name, packages in sorted(used.items()))
        yield self.finding(
            stem,
            f"{text} (needed): both are found, and one process cannot use two generations of {stem} together.",
            [seen(f"{name} is needed by {', '.join(packages)}") for name, packages in sorted(used.items())],
            severity="error" if stem == "libsycl.so" else "warning",
            fixes=[Fix(kind="host", action="Install the packages that were built for the generation that torch uses.")],
        )


def _counts(case: Case, facts: EnvironmentFacts, package: str) -> bool:
    """True when this device loads extension modules of a package that matter."""
    modules = next((p.extensions for p in facts.packages if p.name == package and p.location), [])
    return weight(case, facts, package, modules or [f"{package}._C"]) == "error"


@rule("ENV015", "A compiled module was built for another torch", "error", needs=(PROBE,))
def undefined_symbols(self: Rule, case: Case) -> Iterator[Finding]:
    """A compiled module takes C++ symbols from torch that the installed torch does not export.

    ## What it means
    torch's C++ interface changes between releases. The symbols that the module leaves undefined were looked up, through the hash
    tables that the loader uses, in all libraries of the installed torch; some are in none of them.

    ## Why it matters
    Importing it ends in `ImportError: …: undefined symbol: _ZN3c10…`. Versions need not show it: a rebuilt torch of the same
    version, or a package without pinned requirements, looks right to pip.

    ## How it looks
    `vllm/_C.abi3.so needs _ZN3c104impl3cow11cow_deleterEPv, which torch 2.13.0+cpu does not export`

    ## How it is fixed
    Install the package that was built for this torch, or the torch it was built for; a source build has to be built again.
    """
    facts = facts_of(case)
    torch = find(facts, "torch") if facts else None
    for one in facts.libraries if facts else ():
        severity = weight(case, facts, one.package, one.loaded_by) if facts and one.undefined else None
        if severity is None or torch is None:
            continue
        yield self.finding(
            label(one),
            f"{label(one)} was built for another torch: it needs {one.undefined[0]}, which torch {torch.version} does not export, "
            f"so importing {', '.join(one.loaded_by)} ends in ImportError: undefined symbol.",
            [
                seen(f"needs {name}, which no library of torch {torch.version} exports", where=one.path)
                for name in one.undefined[:3]
            ],
            severity=severity,
            fixes=[
                Fix(kind="host", action=f"Install the {one.package} that was built for torch {torch.version}, or build it again.")
            ],
        )


RULES = (library_missing, library_of_other_generation, library_off_the_path, two_generations, undefined_symbols)
