"""KRN: vLLM's kernel tables. Which layers of the model get a kernel on this platform, which one, and which get none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from probes.facts import KernelTableFacts, SelectionFact
from xpufp8.report import Evidence, Finding, Fix, Severity
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.device_common import disable
from xpufp8.rules.kernel_answers import (
    FP8_TABLES,
    PROBE,
    Answer,
    answers,
    first_line,
    reader_evidence,
    row_evidence,
    same_platform,
    selection_evidence,
    table_of,
)
from xpufp8.runtime import catalogue

RELEASES_WITH_ROW = {
    ("XPU", "fp8_block"): ("0.32.0", "0.33.0"),
    ("XPU", "int8"): ("0.32.0", "0.33.0"),
    ("XPU", "mxfp4"): ("0.32.0", "0.33.0"),
    ("XPU", "fp8"): ("0.21.0", "0.32.0", "0.33.0"),
    ("XPU", "wfp8a16"): ("0.21.0", "0.32.0", "0.33.0"),
    ("XPU", "mxfp8"): ("0.21.0", "0.32.0", "0.33.0"),
}
"""Releases in whose source that row was read; others may have it too. ``make releases`` reads the wheels again."""

_DISABLED = re.compile(r"disabled by (?:environment variable|env var|VLLM_DISABLED_KERNELS)")


@dataclass(frozen=True)
class Fallback:
    """A kernel that computes the right thing slowly, and what is known of that."""

    pattern: str
    """Regular expression that the whole class name matches."""
    platform: str | None
    """Platform that the knowledge is about, None for all."""
    known: str
    source: str


FALLBACKS: tuple[Fallback, ...] = (
    Fallback(
        r"Emulation\w+LinearKernel|\w*Emulation\w*Experts",
        None,
        "It is vLLM's software emulation of the format: weights are widened to 16 bits (at load or at each call, depending on the "
        "release) and multiplied there. That brings the format's size at best, never its speed.",
        "the kernel's own description in vLLM",
    ),
    Fallback(
        r"TritonFp8BlockScaledMMKernel",
        "XPU",
        "A reporter with two Arc Pro B60 who put this kernel in the XPU row got about 1.2 tokens a second from Qwen3.6-27B-FP8 "
        "(vLLM 0.21.0), and torch.compile failed in PassManager::run. Compiled by triton-xpu 3.3.0b1 for that card, the kernel of "
        "vLLM 0.21.0 did not use the matrix engine. Newer compilers may differ; no speed was measured here.",
        "intel/llm-scaler#550",
    ),
)


@rule("KRN001", "The platform has no row in a kernel table", "error", needs=(PROBE,), references=("intel/llm-scaler#550",))
def no_row(self: Rule, case: Case) -> Iterator[Finding]:
    """The table that these layers ask has no kernel for the platform: no row at all, or an empty one.

    ## What it means
    vLLM keeps a table of kernels for each way of quantizing a linear layer (`_POSSIBLE_FP8_BLOCK_KERNELS` and others), with one
    row a platform. Nobody has put a kernel for this platform in the one that these layers need.

    ## Why it matters
    The first layer of that kind stops the start, after the configuration and before any weight is loaded. How depends on the
    release: where the chooser indexes the table, a bare `KeyError: <PlatformEnum.XPU: 4>` that names neither the layer nor the
    reason; where it uses `.get`, `ValueError: Failed to find a kernel that can implement the … linear layer. Reasons:` with
    nothing after it.

    ## How it looks
    `_POSSIBLE_FP8_BLOCK_KERNELS has rows for CPU, CUDA, ROCM; none for XPU`, and the line that reads the table. If vLLM could be
    asked, its own exception stands beside it. A kernel that a plugin or a repair has added counts: when vLLM's chooser selects
    one, a row that is missing in the source is no finding.

    ## How it is fixed
    Add a kernel at run time (`kernel:<table>`), take a vLLM whose table has the row, or serve the 16-bit checkpoint with
    `--quantization fp8`, which asks the per-tensor table instead.
    """
    facts = case.get(PROBE, KernelTableFacts)
    if facts is None:
        return
    for answer in answers(case, facts):
        if answer.outcome != "no row" or answer.need.moe:
            continue
        kind, table = answer.kind, answer.table
        evidence = selection_evidence(answer.selections)
        if table is not None:
            reader = reader_evidence(table)
            evidence = [row_evidence(table, case.platform), *([reader] if reader else []), *evidence]
        title = f"{case.platform} has no kernel in vLLM's {kind} table"
        yield self.finding(
            kind, _missing_row_cause(case, answer), evidence, severity=_severity(self, case, kind), title=title,
            affects=list(answer.need.layers), fixes=_fixes(case, facts, answer),
        )  # fmt: skip


def _missing_row_cause(case: Case, answer: Answer) -> str:
    table = answer.table
    name = table.name if table is not None else f"the {answer.need.table} table"
    row = table.rows.get(case.platform) if table is not None else None
    what = f"{name} has no row for {case.platform}" if row is None else f"The {case.platform} row of {name} is empty"
    if answer.selections and (error := answer.selections[0].error) is not None:
        how = f"building the first such layer ends in {error.type.rsplit('.', 1)[-1]}: {first_line(error.message)}"
    elif table is not None and table.lookup == "index" and row is None:
        how = f"the chooser indexes it, so building the first such layer ends in KeyError: <PlatformEnum.{case.platform}>"
    elif table is not None and table.lookup in {"index", "get"}:
        how = "building the first such layer ends in ValueError: Failed to find a kernel that can implement it, with no reason given"
    else:
        how = "no kernel can be chosen; how this release says so was not recognised"
    return f"{what}: {how}. Schemes: {answer.names}."


@rule("KRN002", "Every kernel of the row refuses the layers", "error", needs=(PROBE,))
def all_refuse(self: Rule, case: Case) -> Iterator[Finding]:
    """The table has kernels for the platform, and each of them declines: hardware, dtype, shape or setting.

    ## What it means
    vLLM asks the kernels of the platform's row in order whether they support this device and can implement this layer. All
    said no, each with its reason.

    ## Why it matters
    The start ends in `ValueError: Failed to find a kernel that can implement the ScaledMM linear layer` (or WNA16, MXFP8, …).

    ## How it looks
    The reasons in vLLM's own words, for example
    `CPUFp8BlockScaledMMKernel requires AMX tile support (Sapphire Rapids or newer).`

    ## How it is fixed
    It depends on the reasons. If only the dtype is refused, `--dtype` with one that is taken; if a kernel is disabled by
    `VLLM_DISABLED_KERNELS`, clear that; if the hardware lacks something, a repair (`kernel:<table>`) adds a kernel without
    that need, or the 16-bit checkpoint is served with `--quantization fp8`.
    """
    facts = case.get(PROBE, KernelTableFacts)
    if facts is None:
        return
    for answer in answers(case, facts):
        if answer.outcome != "refused" or answer.need.moe:
            continue
        kind = answer.kind
        listed = [row_evidence(answer.table, case.platform)] if answer.table is not None else []
        name = answer.table.name if answer.table is not None else f"the {kind} table"
        cause = (
            f"Every kernel that vLLM tries for {case.platform} in {name} declines {answer.names}, so building the first such layer "
            "ends in ValueError: Failed to find a kernel that can implement it."
        )
        yield self.finding(
            kind, cause, [*selection_evidence(answer.selections), *listed], severity=_severity(self, case, kind),
            title=f"No {case.platform} kernel takes the {kind} layers", affects=list(answer.need.layers),
            fixes=[*_setting_fixes(case, facts, answer), *_fixes(case, facts, answer)],
        )  # fmt: skip


@rule("KRN003", "No MoE backend takes the experts", "error", needs=(PROBE,))
def no_moe_backend(self: Rule, case: Case) -> Iterator[Finding]:
    """The oracle that chooses kernels for expert layers finds none on this platform.

    ## What it means
    Experts of a mixture-of-experts layer do not use the linear tables. For each format vLLM has an oracle
    (`fused_moe/oracle/*.py`) that asks the experts classes of its backends in order. All declined.

    ## Why it matters
    Some oracles raise at once (`No … MoE backend supports the deployment configuration`). Others return no backend, and the
    start fails later, at a place that does not name the reason.

    ## How it looks
    Each class with its reason in vLLM's words: `XPUExpertsFp8: kernel does not support quantization scheme …`.

    ## How it is fixed
    FP8 experts: the repair `moe:fp8`, which computes them one after another. `--moe-backend` if a backend was typed that does
    not take them. Otherwise a checkpoint in another format.
    """
    facts = case.get(PROBE, KernelTableFacts)
    if facts is None:
        return
    for answer in answers(case, facts):
        if not answer.need.moe or answer.outcome not in {"refused", "no row"}:
            continue
        oracle = answer.need.table.removeprefix("moe:")
        named = next((o for o in facts.moe if o.name == oracle), None)
        static = []
        if named is not None:
            own = ", ".join(named.by_platform.get(case.platform, [])) or "none"
            observed = f"the {oracle} oracle names for {case.platform}: {own}; in all: {', '.join(named.backends)}"
            static.append(Evidence(probe=PROBE, mode="static", observed=observed, where=f"{named.file}:{named.line}"))
        cause = f"Every backend of vLLM's {oracle} MoE oracle declines {answer.names} on {case.platform}."
        yield self.finding(
            f"moe_{oracle}", cause, [*selection_evidence(answer.selections), *static],
            severity="info" if case.model is None else self.severity, affects=list(answer.need.layers), fixes=_repair(answer),
            title=f"No MoE backend takes {oracle} experts on {case.platform}",
        )  # fmt: skip


@rule("KRN004", "The layers run on a slow fallback kernel", "warning", needs=(PROBE,))
def slow_fallback(self: Rule, case: Case) -> Iterator[Finding]:
    """A kernel is selected that is known to be a fallback: it is right, and slow.

    ## What it means
    The faster kernels of the row declined, or there are none. What is left emulates the format or was seen to be too slow to
    use on such a device.

    ## Why it matters
    The server starts and answers. Throughput may be a fraction of what the card can do, and nothing says so but a log line.

    ## How it looks
    `selected EmulationMxfp8LinearKernel, after` and the refusals of the faster ones. The text says what is known, and from
    where; no speed is measured by this rule.

    ## How it is fixed
    See the refusals: a missing package, an old kernel library or a setting is often behind them. The repair `kernel:<table>`
    measures its candidates on the device before it takes one. Its kernel stands last in the row, so the slow one has to be named
    in `VLLM_DISABLED_KERNELS` beside it; names that stand there already stay.
    """
    facts = case.get(PROBE, KernelTableFacts)
    if facts is None:
        return
    for answer in answers(case, facts):
        for fallback in FALLBACKS if answer.outcome == "chosen" else ():
            slow = [one for one in answer.selections if one.kernel and re.fullmatch(fallback.pattern, one.kernel)]
            if not slow or fallback.platform not in {None, case.platform} or (case.model is None and answer.need.moe):
                continue
            names = list(dict.fromkeys(one.kernel for one in slow if one.kernel))
            kernels, kind = ", ".join(names), answer.kind
            repair = _repair(answer)
            # The repair's kernel comes last, so vLLM asks it only where the slow one is out; experts have no such variable.
            out = [disable(name) for name in names] if repair and not answer.need.moe else []
            yield self.finding(
                kind.replace("moe:", "moe_"), f"vLLM selects {kernels}. {fallback.known} Source: {fallback.source}.",
                selection_evidence(slow), severity="info" if case.model is None else self.severity,
                fixes=[*out, *repair],
                affects=list(answer.need.layers), title=f"The {kind} layers run on {kernels}, a fallback",
            )  # fmt: skip


@rule("KRN005", "Which kernel the layers get could not be told", "error", needs=(PROBE,))
def not_told(self: Rule, case: Case) -> Iterator[Finding]:
    """The chooser could not be asked, or its answer was an exception that says nothing about the kernels.

    ## What it means
    The table may have a row for the platform. Whether a kernel of it takes the layers is known only to vLLM's chooser, and that
    gave no answer: it could not be imported, it detects another platform than the one asked about, its signature is not one
    that this version knows, or only the source was there to read.

    ## Why it matters
    The model may start or not. Nothing here says which, so the verdict cannot be good.

    ## How it looks
    The exception of the import or of the chooser, or the sentence why it was not asked. Severity is `info` where vLLM of that
    release does not choose by a table at all (FP8 layers until 0.14, experts before the oracles): tracing the model tells then.

    ## How it is fixed
    Fix what kept vLLM from being imported (see ENV findings), name the device that is there (`--device`), or run the doctor on
    the machine that will serve.
    """
    facts = case.get(PROBE, KernelTableFacts)
    if facts is None:
        return
    if case.model is None:
        if facts.live_error is not None or facts.problems:
            yield self.finding("vllm", "vLLM's choosers gave no answer.", _why(case, facts), severity="warning", unknown=True)
        return
    for answer in answers(case, facts):
        if answer.outcome not in {"not told", "no table"}:
            continue
        kind = answer.kind
        if answer.outcome == "no table":
            where = "an oracle" if answer.need.moe else "a table"
            cause = f"vLLM {facts.vllm or ''} chooses kernels for {answer.names} inside its quantization methods, not by {where}."
            severity: Severity = "info"
        else:
            cause = f"Whether {case.platform} has a kernel for {answer.names} could not be told: {answer.why}."
            severity = self.severity
        evidence = [*selection_evidence(answer.selections), *_why(case, facts)]
        if answer.table is not None:
            evidence.append(row_evidence(answer.table, case.platform))
        yield self.finding(
            kind.replace("moe:", "moe_"), re.sub(r" +", " ", cause), evidence, severity=severity, unknown=True,
            affects=list(answer.need.layers),
        )  # fmt: skip


def _why(case: Case, facts: KernelTableFacts) -> list[Evidence]:
    mode: Literal["simulated", "live"] = "simulated" if case.simulated else "live"
    said = []
    if facts.live_error is not None:
        observed = f"{facts.live_error.type.rsplit('.', 1)[-1]}: {facts.live_error.message}"
        said.append(Evidence(probe=PROBE, mode=mode, observed=observed))
    said += [Evidence(probe=PROBE, mode="static", observed=problem) for problem in facts.problems]
    if not said and facts.layout:
        read = f"layout {facts.layout}: {len(facts.tables)} tables, {len(facts.moe)} MoE oracles"
        said.append(Evidence(probe=PROBE, mode="static", observed=read, where=facts.root))
    return said


# -- severity and fixes ------------------------------------------------------------------------------------------------


def _severity(self: Rule, case: Case, kind: str) -> Severity:
    """An error when a model needs the table; else how common the checkpoints are that would."""
    if case.model is not None:
        return self.severity
    return "warning" if kind in FP8_TABLES[:2] else "info"


def _setting_fixes(case: Case, facts: KernelTableFacts, answer: Answer) -> list[Fix]:
    """What a setting alone removes: kernels disabled by the environment, or refused only in this dtype."""
    fixes = []
    if any(_DISABLED.search(reason) for one in answer.selections for reason in one.reasons):
        fixes.append(Fix(kind="env", action="VLLM_DISABLED_KERNELS="))
    dtype = _other_dtype(facts, answer.selections)
    if case.model is not None and dtype is not None:
        fixes.append(
            Fix(
                kind="flag",
                action=f"--dtype {dtype}",
                cost="activations and KV cache in another 16-bit format: other rounding, other range",
            )
        )
    return fixes


def _other_dtype(facts: KernelTableFacts, refused: list[SelectionFact]) -> str | None:
    """A 16-bit dtype in which every refused scheme and shape has a kernel."""
    wanted = {(one.scheme, tuple(one.shape)) for one in refused}
    table = {one.table for one in refused}
    for dtype in ("float16", "bfloat16"):
        taken = {
            (one.scheme, tuple(one.shape))
            for one in facts.selections
            if one.activation_dtype == dtype and one.kernel is not None and one.table in table
        }
        if wanted and wanted <= taken:
            return dtype
    return None


def _repair(answer: Answer) -> list[Fix]:
    """The repair inside vLLM that adds what is missing, where the runtime half has one."""
    item = answer.need.table if answer.need.moe else f"kernel:{answer.kind}"
    try:
        repair = catalogue.find(item)
    except catalogue.RepairError:
        return []
    return [Fix(kind="runtime", action=item, cost=repair.cost)]


def _fixes(case: Case, facts: KernelTableFacts, answer: Answer) -> list[Fix]:
    """Repairs for a table without a usable kernel, least effort first."""
    kind = answer.kind
    fixes = _repair(answer)
    online = case.model is not None and case.model.online
    if kind in FP8_TABLES and kind != "fp8" and _per_tensor_covered(case, facts):
        cost = "one scale a matrix instead of finer ones; the 16-bit weights are loaded first"
        action = "--quantization fp8"
        if online:
            fixes.append(Fix(kind="flag", action=action, cost="one scale a matrix instead of finer ones"))
        else:
            fixes.append(Fix(kind="host", action=f"Serve the 16-bit checkpoint of the model with {action} instead.", cost=cost))
    known = RELEASES_WITH_ROW.get((case.platform, kind), ())
    if answer.outcome == "no row" and known and facts.vllm not in known:
        fixes.append(
            Fix(kind="host", action=f"Use a vLLM whose {kind} table has a row for {case.platform}: {' or '.join(known)}.")
        )
    return fixes


def _per_tensor_covered(case: Case, facts: KernelTableFacts) -> bool:
    """Whether online FP8 (per-tensor weights, dynamic activations) has a kernel here: live if asked, else a row in the source."""
    asked = [one for one in facts.selections if one.scheme == "fp8-tensor-dynamic" and one.table == "fp8"]
    if asked and same_platform(case, facts):
        return any(one.kernel is not None for one in asked)
    table = table_of(facts, "fp8")
    return table is not None and bool(table.rows.get(case.platform))


RULES = (no_row, all_refuse, no_moe_backend, slow_fallback, not_told)
