"""What the rules on device probes share: which dtype counts, how a kernel is taken out, how facts are quoted."""

from __future__ import annotations

from collections.abc import Sequence

from probes.device_facts import CompileFacts, DeviceRunFact, LoweredKernelFact
from probes.facts import ErrorFact, KernelTableFacts
from xpufp8.report import Evidence, Fix
from xpufp8.rules.base import Case

DEFAULT_DTYPE = "bfloat16"


def dtype_of(case: Case, observed: str | None) -> str:
    """The activation dtype that the command serves in."""
    return case.model.dtype if case.model is not None else observed or DEFAULT_DTYPE


def concerns(case: Case, scheme: str) -> bool:
    """Whether the model has layers of a scheme; without a model every scheme is looked at."""
    return case.model is None or not case.model.uses or any(use.scheme == scheme for use in case.model.uses)


def layers_of(case: Case, scheme: str) -> list[str]:
    """The model's layers of a scheme, as the report names them."""
    if case.model is None:
        return []
    return list(dict.fromkeys(use.layers for use in case.model.uses if use.scheme == scheme))


def where(run: DeviceRunFact) -> str:
    """Device, torch and vLLM that an observation is true of."""
    parts = [run.name or run.device, f"torch {run.torch}", *([f"vLLM {run.vllm}"] if run.vllm else [])]
    return ", ".join(parts) + (f", repairs {run.repairs}" if run.repairs else "")


def selection(case: Case, scheme: str, kernel: str) -> list[Evidence]:
    """That vLLM's chooser selects the kernel, where the kernel table was asked; so that the table is asked again with a fix."""
    facts = case.get("kernel_table", KernelTableFacts)
    found = next((s for s in facts.selections if (s.scheme, s.kernel) == (scheme, kernel)), None) if facts else None
    if found is None:
        return []
    return [Evidence(probe="kernel_table", mode=found.mode, observed=f"vLLM selects {kernel} for {scheme} ({found.table})")]


def disable(kernel: str) -> Fix:
    """Take a kernel out of every table, so that the next of its row is asked."""
    return Fix(
        kind="env",
        action=f"VLLM_DISABLED_KERNELS={kernel}",
        cost="the next kernel of the row, or a repair's, may be slower",
    )


def said(error: ErrorFact | None) -> str:
    """Type and first line of an exception."""
    if error is None:
        return "nothing"
    first = error.message.strip().splitlines()[0] if error.message.strip() else ""
    return f"{error.type.rsplit('.', 1)[-1]}: {first}"[:400]


def place(error: ErrorFact | None) -> str:
    """File and line that raised."""
    frames = error.frames if error else []
    return f"{frames[-1].file}:{frames[-1].line}" if frames else ""


def shape_text(shape: Sequence[int]) -> str:
    """``M=17 N=512 K=384``."""
    return " ".join(f"{name}={size}" for name, size in zip("MNK", shape, strict=False))


def by_kernel(lowered: list[LoweredKernelFact]) -> dict[str, list[LoweredKernelFact]]:
    """Configurations of each kernel: ``scaled_mm_kernel of vLLM 0.32.0``."""
    found: dict[str, list[LoweredKernelFact]] = {}
    for one in lowered:
        found.setdefault(f"{one.kernel} of {'xpufp8' if one.source == 'xpufp8' else f'vLLM {one.source}'}", []).append(one)
    return found


def lowered_evidence(facts: CompileFacts, one: LoweredKernelFact) -> Evidence:
    """One compilation, with what made it."""
    text = f"{one.kernel} ({one.config}): {one.detail} [triton-xpu {one.compiler} for {one.architecture}; compiled, not run]"
    return Evidence(probe="compile", mode=facts.run.mode, observed=text)
