"""MDL: can the model be built, its weights processed, and its forward pass traced? What the model trace saw, in vLLM's own
words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from probes.facts import ErrorFact, Frame, Mode
from probes.model_facts import ModelTraceFacts, StageFact, StandInFact
from xpufp8 import options
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.cfg import WITHOUT
from xpufp8.runtime.catalogue import known_repairs

PROBE = "model_trace"

DONE_AS = {
    "configure": "configured", "distribute": "given its ranks", "construct": "constructed", "process": "given its processed weights",
    "trace": "traced", "logits": "traced to its logits", "vision": "traced through its vision or audio tower",
    "bodies": "traced through its opaque ops", "memory": "sized",
}  # fmt: skip
"""What a stage does to the model, as a past participle."""

TABLES = {"_POSSIBLE_FP8_BLOCK_KERNELS": "fp8_block", "_POSSIBLE_FP8_KERNELS": "fp8", "_POSSIBLE_WFP8A16_KERNELS": "wfp8a16"}
"""Kernel tables that a repair can fill, to the repair's name."""

CACHE_REFUSED = re.compile(r"not support (?:fp8|quantized) kv.?cache|kv_cache_dtype not supported", re.IGNORECASE)
"""How attention backends refuse the dtype of a KV cache."""


def steps(error: ErrorFact | None) -> Iterator[ErrorFact]:
    """An exception and those that caused it, outermost first."""
    while error is not None:
        yield error
        error = error.cause


def first_line(text: str) -> str:
    """First line of a message that says anything."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def vllm_frame(error: ErrorFact) -> Frame | None:
    """Innermost frame of vLLM's code on the way to the root of an exception."""
    frames = [
        frame
        for step in steps(error)
        for frame in reversed(step.frames)
        if "/vllm/" in frame.file or "/vllm_xpu_kernels/" in frame.file
    ]
    roots = [frame for step in reversed(list(steps(error))) for frame in reversed(step.frames) if frame in frames]
    return roots[0] if roots else None


def place(frame: Frame) -> str:
    """``vllm/…/fp8.py:243 in __init__``: a frame without the part of its path that differs between machines."""
    parts = frame.file.replace("\\", "/").split("/")
    start = max((i for i, part in enumerate(parts) if part in {"vllm", "vllm_xpu_kernels"}), default=max(len(parts) - 2, 0))
    return f"{'/'.join(parts[start:])}:{frame.line} in {frame.function}"


def error_evidence(error: ErrorFact, mode: Mode) -> Evidence:
    """VLLM's own exception and the line it came from."""
    told = [step for step in steps(error) if first_line(step.message)]
    root = told[-1] if told else error
    frame = vllm_frame(error)
    said = f"{root.type.rpartition('.')[2]}: {first_line(root.message)}"
    if frame is not None and frame.code:
        said += f" (at `{frame.code.strip()}`)"
    return Evidence(probe=PROBE, mode=mode, observed=said, where=place(frame) if frame is not None else "")


def chain_evidence(error: ErrorFact, mode: Mode) -> list[Evidence]:
    """The root of an exception, and the outermost one where that says something else."""
    root = error_evidence(error, mode)
    outer = f"{error.type.rpartition('.')[2]}: {first_line(error.message)}"
    return (
        [root]
        if error.cause is None or outer in root.observed
        else [root, Evidence(probe=PROBE, mode=mode, observed=f"raised in the end: {outer}")]
    )


def _failed(facts: ModelTraceFacts, *names: str) -> Iterator[StageFact]:
    for stage in facts.stages:
        if stage.name in names and stage.status == "failed":
            yield stage


def _stage_finding(self: Rule, facts: ModelTraceFacts, stage: StageFact) -> Finding:
    where = f" for rank {facts.parallel.rank} of {facts.parallel.world_size}" if facts.parallel.world_size > 1 else ""
    cause = f"{facts.architecture or 'The model'} could not be {DONE_AS.get(stage.name, stage.name)}{where}: {stage.reason}"
    evidence = (
        chain_evidence(stage.error, facts.mode)
        if stage.error
        else [Evidence(probe=PROBE, mode=facts.mode, observed=stage.reason)]
    )
    return self.finding(stage.name, cause, evidence)


@rule("MDL001", "The model cannot be configured or constructed", "error", needs=(PROBE,))
def cannot_construct(self: Rule, case: Case) -> Iterator[Finding]:
    """VLLM stops while it reads the configuration, starts its ranks or builds the model's layers.

    ## What it means
    The serving process would end here, before a weight is read. The architecture may have been removed from this release, an
    option may contradict the model, a kernel table may have no row, or the model's code and its quantization method disagree.

    ## Why it matters
    Nothing that comes later can be known. vLLM prints the same exception once for each worker, often far from its cause.

    ## How it looks
    vLLM's own exception and the line of vLLM that raised it. Where a stand-in (a placeholder kernel) let the trace go on, the
    finding says so and later faults are in the same report.

    ## How it is fixed
    By what the line says: another release of vLLM for a removed architecture, a repair for a missing row (see KRN001), other
    options for a contradiction.
    """
    facts = case.get(PROBE, ModelTraceFacts)
    if facts is None:
        return
    for stand_in in facts.stand_ins:
        if stand_in.kind == "row":
            yield _row_finding(self, facts, stand_in)
    for stage in _failed(facts, "configure", "distribute", "construct"):
        found = _stage_finding(self, facts, stage)
        yield found.model_copy(update={"fixes": [*_cache_fixes(case, stage), *_named_fixes(stage)]})


SMALLER_DTYPE = re.compile(r"--dtype[ =](?:half|float16)\b")
"""vLLM's own advice where a card does not take bfloat16."""
HEADS = re.compile(r"attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)")
MOST_RANKS = 16


def _named_fixes(stage: StageFact) -> list[Fix]:
    """What vLLM's own message names as the way out, or leaves to arithmetic."""
    said = f"{stage.reason} {stage.error.message if stage.error else ''}"
    if SMALLER_DTYPE.search(said):
        return [Fix(kind="flag", action="--dtype float16", cost="activations in float16, which ends at 65504")]
    if match := HEADS.search(said):
        heads = int(match[1])
        sizes = ", ".join(str(n) for n in range(1, MOST_RANKS + 1) if heads % n == 0)
        return [Fix(kind="host", action=f"use a tensor-parallel size that divides {heads} heads: {sizes}")]
    return []


def _cache_fixes(case: Case, stage: StageFact) -> list[Fix]:
    """The way out where the attention backend refuses the dtype of the KV cache that was typed."""
    said = f"{stage.reason} {stage.error.message if stage.error else ''}"
    typed = options.find(case.vllm_args, "--kv-cache-dtype")
    if typed is None or not CACHE_REFUSED.search(said):
        return []
    return [Fix(kind="flag", action=WITHOUT + typed.text, cost="the cache takes the memory of a 16-bit one")]


def _row_finding(self: Rule, facts: ModelTraceFacts, fact: StandInFact) -> Finding:
    table = fact.subject.split("[", 1)[0]
    layers = f" for {fact.layers[0]}" if fact.layers else ""
    fixes = [Fix(kind="runtime", action=f"kernel:{TABLES[table]}")] if table in TABLES else []
    said = error_evidence(fact.error, facts.mode) if fact.error else Evidence(probe=PROBE, mode=facts.mode, observed=fact.detail)
    return self.finding(
        fact.subject, f"Construction stops{layers} because {fact.subject} gives no kernel. The trace went on with a placeholder kernel.",
        [said], affects=fact.layers, fixes=fixes, title=f"Construction stops at {table}",
    )  # fmt: skip


@rule("MDL002", "The model's weights cannot be processed", "error", needs=(PROBE,))
def cannot_process(self: Rule, case: Case) -> Iterator[Finding]:
    """VLLM loads the weights and then stops while it brings them into the form that its kernels want.

    ## What it means
    After loading, each quantization method transposes, requantizes or repacks its weights. One of them refuses these shapes or
    dtypes.

    ## Why it matters
    This comes after tens of gigabytes were read. Kernel selection did not see it: a kernel that says it can run a layer may
    still assert on its shape here (block FP8 whose width is no multiple of 16, for one).

    ## How it looks
    vLLM's exception and its line, with the layer's shape where the message has it.

    ## How it is fixed
    Another quantization of the checkpoint, another tensor-parallel size where the shape of a rank is what is refused, or a
    repair that takes the kernel's place.
    """
    facts = case.get(PROBE, ModelTraceFacts)
    if facts is not None:
        for stage in _failed(facts, "process"):
            found = _stage_finding(self, facts, stage)
            yield found.model_copy(update={"fixes": [*_repairs(self.code, stage), *found.fixes]})


def _repairs(code: str, stage: StageFact) -> list[Fix]:
    """Repairs of the runtime half that remove a finding of this code, by what the exception names."""
    said = f"{stage.reason} {stage.error.message if stage.error else ''}"
    known = [r for r in known_repairs() if code in r.codes and "<" not in r.name]
    return [Fix(kind="runtime", action=r.name, cost=r.cost) for r in known if re.fullmatch(r.subject, said, re.DOTALL)]


@rule("MDL003", "The model's forward pass breaks", "error", needs=(PROBE,))
def trace_breaks(self: Rule, case: Case) -> Iterator[Finding]:
    """The forward pass ends in an exception, or torch.compile cannot trace it.

    ## What it means
    The same Python code runs in vLLM's memory profiling, right after the weights were loaded. Ops without a fake are not meant
    here: OPS names those. This is about everything else: shapes that do not fit, a graph break inside a region that vLLM
    compiles as one graph.

    ## Why it matters
    The server ends before its first request, after minutes of loading.

    ## How it looks
    The exception, and whether the same pass went through without torch.compile.

    ## How it is fixed
    If it goes through without torch.compile, `--enforce-eager` serves the model at a cost in speed. Else it is a fault of the
    model's code in this release.
    """
    facts = case.get(PROBE, ModelTraceFacts)
    if facts is None:
        return
    eager = [fact for fact in facts.stand_ins if fact.kind == "eager"]
    for fact in eager:
        evidence = chain_evidence(fact.error, facts.mode) if fact.error else []
        passed = Evidence(probe=PROBE, mode=facts.mode, observed="the same forward pass reached its end without torch.compile")
        yield self.finding(
            "torch.compile", f"torch.compile cannot trace {fact.subject} as one graph.", [*evidence, passed],
            fixes=[Fix(kind="flag", action="--enforce-eager", cost="slower decoding")], title="The compiled region cannot be traced",
        )  # fmt: skip
    for stage in _failed(facts, "trace", "logits"):
        if not (eager and stage.name == "trace"):
            yield _stage_finding(self, facts, stage)


@rule("MDL004", "Part of the model could not be judged", "warning", needs=(PROBE,))
def could_not_tell(self: Rule, case: Case) -> Iterator[Finding]:
    """A stage gave no answer, for a reason that is not the model's.

    ## What it means
    The checkpoint brings its own code and that code is not here or may not run; or a part needs values that only real weights
    and real images have. Nothing is claimed of it, good or bad.

    ## Why it matters
    A server may still stop there.

    ## How it looks
    The stage and the reason. For remote code: the files that config.json names.

    ## How it is fixed
    Put the `*.py` files of the checkpoint beside its config.json and add `--trust-remote-code` if you trust them. For the rest
    there is nothing to do but to launch.
    """
    facts = case.get(PROBE, ModelTraceFacts)
    if facts is None:
        return
    for stage in facts.stages:
        if stage.status == "unknown" and stage.name not in {"bodies", "memory"}:
            said = (
                error_evidence(stage.error, facts.mode)
                if stage.error
                else Evidence(probe=PROBE, mode=facts.mode, observed=stage.reason)
            )
            blocking = stage.name in {"configure", "construct", "process", "trace"}
            yield self.finding(
                stage.name, f"Whether the model can be {DONE_AS.get(stage.name, stage.name)} is not known: {stage.reason}", [said],
                unknown=True, severity="warning" if blocking else "info",
            )  # fmt: skip


@rule(
    "MDL005",
    "The model's code reads something that the layer does not have",
    "error",
    needs=(PROBE,),
    references=("intel/llm-scaler#550",),
)
def missing_attribute(self: Rule, case: Case) -> Iterator[Finding]:
    """Model code and quantization method disagree about what a layer holds.

    ## What it means
    The model's constructor reads an attribute (often `weight`) of a linear layer whose quantization method has not created it,
    or creates it under another name or only after loading.

    ## Why it matters
    `AttributeError: 'MergedColumnParallelLinear' object has no attribute 'weight'` ends the start of every checkpoint of that
    kind.

    ## How it looks
    vLLM's AttributeError with the model file and line. The trace went on with an empty tensor of the layer's size.

    ## How it is fixed
    Another release of vLLM, or the 16-bit checkpoint with `--quantization fp8`.
    """
    facts = case.get(PROBE, ModelTraceFacts)
    if facts is None:
        return
    for fact in facts.stand_ins:
        if fact.kind == "attribute":
            evidence = [error_evidence(fact.error, facts.mode)] if fact.error else []
            yield self.finding(
                fact.subject,
                f"The model's code reads {fact.subject}, which the quantization method did not create.",
                evidence,
                affects=fact.layers,
            )


@rule("MDL006", "A module that vLLM imports is missing or lacks a name", "error", needs=(PROBE,))
def missing_module(self: Rule, case: Case) -> Iterator[Finding]:
    """VLLM imports a kernel package that is not there, cannot be loaded, or is another release than it was written for.

    ## What it means
    The pairing of vLLM and its kernel package does not hold: the package is absent, or a name that vLLM imports has gone.

    ## Why it matters
    The import ends the process, sometimes only when the first model that needs it is built.

    ## How it looks
    The ImportError with vLLM's line. The trace went on with a placeholder, so that later faults show in the same report.

    ## How it is fixed
    Install the release of the kernel package that this vLLM names in its requirements.
    """
    facts = case.get(PROBE, ModelTraceFacts)
    if facts is None:
        return
    for fact in facts.stand_ins:
        if fact.kind == "module":
            evidence = [error_evidence(fact.error, facts.mode)] if fact.error else []
            used = f" The kernel package's release here is {facts.kernels}." if facts.kernels else ""
            yield self.finding(
                fact.subject, f"vLLM {facts.vllm or ''} imports {fact.subject}, which is missing.{used}", evidence,
                fixes=[Fix(kind="host", action="install the kernel package that this vLLM requires")],
            )  # fmt: skip


@rule("MDL007", "A fake of vLLM's own gives another shape than the kernel", "warning", needs=(PROBE,))
def wrong_fake(self: Rule, case: Case) -> Iterator[Finding]:
    """An op's registered fake flattens leading dimensions that the kernel keeps.

    ## What it means
    vLLM's fakes for the FP8, FP4 and INT4 products of XPU return two dimensions; the kernels return the input's leading
    dimensions and the product's width. For a two-dimensional input both agree.

    ## Why it matters
    A layer that calls the op with three dimensions (vision towers do) runs rightly in eager code, and would be traced wrongly
    if it were compiled: the next view or unpack fails, or a shape is baked in that the kernel does not give.

    ## How it looks
    The op, what its fake gives and what the kernel gives, and the layers that call it so.

    ## How it is fixed
    Nothing to do unless vision towers are compiled (`--compilation-config`, `compile_mm_encoder`): then the repair `fake:<op>`
    states the right shape.
    """
    facts = case.get(PROBE, ModelTraceFacts)
    if facts is None:
        return
    for fact in facts.stand_ins:
        if fact.kind == "wrong-fake":
            yield self.finding(
                fact.subject, f"{fact.subject}: {fact.detail}.", [Evidence(probe=PROBE, mode=facts.mode, observed=fact.detail)],
                affects=fact.layers, severity="warning" if fact.region == "compiled" else "info",
                fixes=[Fix(kind="runtime", action=f"fake:{fact.subject}")],
            )  # fmt: skip


RULES = (cannot_construct, cannot_process, trace_breaks, could_not_tell, missing_attribute, missing_module, wrong_fake)
