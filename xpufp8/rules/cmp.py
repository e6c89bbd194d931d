"""CMP: does torch.compile get through on this device, and which of its stages does not? Judged on stages that really ran."""

from __future__ import annotations

from collections.abc import Iterator

from probes.device_facts import AvoidanceFact, CompileFacts, CompileStageFact, CompileSubjectFact
from xpufp8 import options
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.device_common import by_kernel, disable, lowered_evidence, place, said, where

PROBE = "compile"
NO_FAKE = "does not support running with fake tensors"
"""Dynamo's words for an op without a fake: OPS001 names that."""
COMPILERS = ("InvalidCxxCompiler", "No working C++ compiler", "CppCompileError")
UNWRITABLE = ("Permission denied", "Read-only file system", "No space left", "Not a directory", "No such file or directory")


def _eager(case: Case) -> bool:
    """True when the command does not compile, so that nothing here stops it."""
    return options.flag(case.vllm_args, "--enforce-eager")


def _fixes(avoided: list[AvoidanceFact]) -> list[Fix]:
    """The setting that was seen to avoid the stage; eager where nothing was."""
    found = [Fix(kind="flag", action=one.setting, cost=one.what) for one in avoided if one.observation == "pass"]
    return found or [Fix(kind="flag", action="--enforce-eager", cost="no torch.compile and no graph capture")]


def _failures(case: Case) -> Iterator[tuple[CompileFacts, CompileSubjectFact, CompileStageFact]]:
    facts = case.get(PROBE, CompileFacts)
    for subject in facts.subjects if facts else ():
        for stage in subject.stages:
            if facts is not None and stage.observation == "fail" and not _eager(case):
                yield facts, subject, stage


def _is_compiler(stage: CompileStageFact, facts: CompileFacts) -> bool:
    text = f"{stage.last_line} {stage.error.type if stage.error else ''}"
    return stage.stage == "codegen" and (facts.compiler is None or any(word in text for word in COMPILERS[:2]))


def _evidence(facts: CompileFacts, subject: CompileSubjectFact, stage: CompileStageFact) -> list[Evidence]:
    passed = ", ".join(s.stage for s in subject.stages if s.observation == "pass") or "no stage"
    kernel = f" ({subject.kernel})" if subject.kernel else ""
    lines = [
        (f"{subject.name}{kernel}: {stage.stage} fails: {stage.last_line or said(stage.error)}", place(stage.error)),
        (f"{subject.name}: {passed} passed [{where(facts.run)}]", ""),
    ]
    lines += [(f"tried {one.setting}: {'passes' if one.observation == 'pass' else one.detail}", "") for one in subject.avoided]
    return [Evidence(probe=PROBE, mode=facts.run.mode, observed=text, where=at) for text, at in lines]


def _stage(self: Rule, case: Case, name: str, what: str) -> Iterator[Finding]:
    for facts, subject, stage in _failures(case):
        if stage.stage != name or _is_compiler(stage, facts):
            continue
        if name == "trace" and "fake_tensor" in case.facts and stage.error is not None and NO_FAKE in stage.error.message:
            continue
        yield self.finding(
            subject.name, f"{what} on {subject.name}: {stage.last_line or said(stage.error)}", _evidence(facts, subject, stage),
            fixes=_fixes(subject.avoided),
        )  # fmt: skip


@rule("CMP001", "Dynamo cannot take the model's ops in one graph", "error", needs=(PROBE,))
def trace(self: Rule, case: Case) -> Iterator[Finding]:
    """Tracing with `fullgraph=True`, as vLLM does, ends with an exception.

    ## What it means
    Something in the layer breaks the graph (a call that Dynamo does not follow, a value read back with `.item()`), or an op has no
    fake.

    ## Why it matters
    vLLM demands one graph, so the start ends there.

    ## How it looks
    Dynamo's own reason, and the place in the code.

    ## How it is fixed
    Another kernel, or `--enforce-eager`. An op without a fake is OPS001, which a repair removes.
    """
    yield from _stage(self, case, "trace", "Dynamo stops")


@rule("CMP002", "The traced graph cannot be lowered by AOT", "error", needs=(PROBE,))
def aot(self: Rule, case: Case) -> Iterator[Finding]:
    """Dynamo's trace is whole, and taking it through AOTAutograd (decomposition, functionalization) ends with an exception.

    ## What it means
    An op's fake works alone and not there, or an op writes into its arguments without saying so in its schema.

    ## Why it matters
    The start ends while the first graph is compiled.

    ## How it looks
    The exception, after a trace that passed.

    ## How it is fixed
    The setting that was seen to avoid it; at worst `--enforce-eager`.
    """
    yield from _stage(self, case, "aot", "AOT stops")


@rule("CMP003", "Inductor cannot generate or compile the code", "error", needs=(PROBE,))
def codegen(self: Rule, case: Case) -> Iterator[Finding]:
    """Trace and AOT pass; Inductor's code generation, or the compiler that it calls, fails.

    ## What it means
    A lowering is missing, or Triton, IGC or ocloc refuse the generated kernel (`PassManager::run failed`, an internal error).

    ## Why it matters
    The start ends after minutes, in a traceback of many screens whose last line is what counts.

    ## How it looks
    The compiler's own last line, and which settings were tried.

    ## How it is fixed
    The cheapest setting that avoids just that stage, found by trying: tuning off, Dynamo's graph run as it is, then eager.
    """
    yield from _stage(self, case, "codegen", "Inductor fails")


@rule("CMP004", "Inductor finds no C++ compiler that works", "error", needs=(PROBE,))
def compiler(self: Rule, case: Case) -> Iterator[Finding]:
    """A C++ compiler is what torch.compile needs for its wrappers and CPU code, on every device.

    ## What it means
    No `g++` or `clang++` is on PATH (slim container images have none), or the one that is cannot compile.

    ## Why it matters
    `InvalidCxxCompiler: No working C++ compiler found` at the first graph.

    ## How it looks
    What Inductor says when it looks for one.

    ## How it is fixed
    Install one (`apt-get install g++`), or name it with `CXX`. Until then the setting that was seen to avoid it.
    """
    found = [one for one in _failures(case) if _is_compiler(one[2], one[0])]
    for facts, subject, stage in found[:1]:
        host = Fix(kind="host", action="Install a C++ compiler (apt-get install g++), or set CXX to one that works.")
        text = facts.compiler_error or stage.last_line
        observed = Evidence(probe=PROBE, mode=facts.run.mode, observed=f"Inductor's compiler: {facts.compiler or 'none'}; {text}")
        yield self.finding(
            "c++", f"Inductor finds no C++ compiler that works: {text}", [observed, *_evidence(facts, subject, stage)],
            fixes=[*_fixes(subject.avoided), host],
        )  # fmt: skip


@rule("CMP005", "The folder for compiled code cannot be written", "error", needs=(PROBE,))
def cache_folder(self: Rule, case: Case) -> Iterator[Finding]:
    """Below VLLM_CACHE_ROOT (`~/.cache/vllm` otherwise) vLLM keeps what torch.compile makes, and writing there fails.

    ## What it means
    A read-only mount, another user's folder, or a full disk.

    ## Why it matters
    The start ends when the first graph is saved, after the weights were loaded.

    ## How it looks
    The error of a file that was tried there.

    ## How it is fixed
    `VLLM_CACHE_ROOT` with a folder that can be written, or make this one writable.
    """
    facts = case.get(PROBE, CompileFacts)
    if facts is None or facts.cache_error is None or _eager(case):
        return
    yield self.finding(
        str(facts.cache_folder), f"{facts.cache_folder} cannot be written: {facts.cache_error}",
        [Evidence(probe=PROBE, mode=facts.run.mode, observed=facts.cache_error, where=str(facts.cache_folder))],
        fixes=[
            Fix(kind="env", action="VLLM_CACHE_ROOT=/tmp/vllm-cache", cost="compiled code is lost with /tmp"),
            Fix(kind="host", action=f"Make {facts.cache_folder} writable for the user that serves."),
        ],
    )  # fmt: skip


@rule("CMP006", "Compiled code fails or computes something else", "error", needs=(PROBE,))
def run(self: Rule, case: Case) -> Iterator[Finding]:
    """Everything compiles; the first run raises, or its result is not that of the same module in eager mode.

    ## What it means
    Code was generated for what a fake promised and met something else, or the generated kernel is wrong.

    ## Why it matters
    A crash at the first request, or wrong answers without an error.

    ## How it looks
    The exception, or the relative difference from eager.

    ## How it is fixed
    The setting that was seen to avoid it; at worst `--enforce-eager`.
    """
    yield from _stage(self, case, "run", "The compiled code fails")


@rule("CMP007", "Tuning of generated kernels fails", "error", needs=(PROBE,))
def autotune(self: Rule, case: Case) -> Iterator[Finding]:
    """Inductor tries several forms of a kernel and one of them ends the process's compilation.

    ## What it means
    The code is there; a configuration of it does not compile or does not run on this device.

    ## Why it matters
    The start ends after minutes although a plain configuration would do.

    ## How it looks
    The exception, which came through Inductor's tuner.

    ## How it is fixed
    Tuning off (`inductor_compile_config`), which costs little; then what else was seen to work.
    """
    yield from _stage(self, case, "autotune", "Tuning fails")


@rule("CMP008", "The forward pass cannot be captured into a graph", "error", needs=(PROBE,))
def capture(self: Rule, case: Case) -> Iterator[Finding]:
    """Compiled code runs, and recording it into a device graph fails.

    ## What it means
    An op waits for the device or allocates in a way that cannot be recorded.

    ## Why it matters
    The start ends at its last step, graph capture.

    ## How it looks
    The runtime's error; in a log `sched algorithms do not support sycl_graph recording`.

    ## How it is fixed
    `cudagraph_mode` NONE keeps torch.compile and gives up only the captured graphs; so does `VLLM_XPU_ENABLE_XPU_GRAPH=0`.
    """
    yield from _stage(self, case, "capture", "Graph capture fails")


@rule("CMP009", "A Triton kernel of the plan does not lower for the card", "warning", needs=(PROBE,))
def lowering(self: Rule, case: Case) -> Iterator[Finding]:
    """The Triton kernels of the plan were compiled ahead of time for the card's architecture (`doctor --triton-xpu PYTHON`), and one does
    not get through. Compiled, not run.

    ## What it means
    vLLM launches its kernel in any of the configurations that were compiled, so one that fails is enough. xpufp8's kernels are tried
    before they are used and what does not compile is left out, so they are named only if nothing is left.

    ## Why it matters
    The same compiler in the serving process raises at the first call: `PassManager::run failed`, or an attribute of `tl` that it does not
    have.

    ## How it looks
    The kernel, its configuration, the compiler's last line and the compiler's version. Another version may do better or worse: look
    which one the serving interpreter has.

    ## How it is fixed
    Take the kernel out with `VLLM_DISABLED_KERNELS`, so that the next one of the row, or a repair's, is asked; or a newer triton-xpu.
    """
    facts = case.get(PROBE, CompileFacts)
    if facts is None:
        return
    if facts.lowering_error is not None:
        evidence = Evidence(probe=PROBE, mode=facts.run.mode, observed=facts.lowering_error)
        yield self.finding("triton-xpu", "The named interpreter compiled nothing, so nothing is known of the Triton kernels.", [evidence],
                           unknown=True)  # fmt: skip
    for kernel, group in by_kernel(facts.lowered).items():
        bad = [one for one in group if one.lowers == "fail"]
        if not bad or (bad[0].source == "xpufp8" and len(bad) < len(group)):
            continue
        first = bad[0]
        count = f"{len(bad)} of {len(group)} configurations"
        yield self.finding(
            kernel, f"triton-xpu {first.compiler} does not compile {count} of {kernel} for {first.architecture}: {first.detail}",
            [lowered_evidence(facts, one) for one in bad[:3]],
            fixes=[disable(first.selected)] if first.selected else [], affects=[first.scheme],
        )  # fmt: skip


RULES = (trace, aot, codegen, compiler, cache_folder, run, autotune, capture, lowering)
