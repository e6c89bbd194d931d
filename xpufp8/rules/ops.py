"""OPS: can torch.compile trace the custom ops? Which of them it must trace for this model, and what Dynamo says when it cannot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Literal

from probes.facts import ErrorFact, FakeTensorFacts, KernelTableFacts, Mode, OpFact, OpLibraryFact
from probes.model_facts import ModelTraceFacts, ReachedOpFact, StandInFact
from xpufp8 import options
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.op_paths import OpPath, paths_of

PROBE = "fake_tensor"

EAGER = Fix(
    kind="flag",
    action="--enforce-eager",
    cost="no torch.compile and no graph capture; public reports guess 10-20 % of the decoding speed, nobody has shown a measurement",
)

Reach = Literal["compiled", "no", "unknown"]
"""Whether the model's compiled region calls an op: it does, it does not, or nothing that was seen decides it."""

NEEDED_LIBRARIES: dict[str, re.Pattern[str]] = {
    "XPU": re.compile(r"torch|vllm_xpu_kernels\..*|vllm\._(?:xpu|ipex)_ops|vllm\.platforms"),
    "CPU": re.compile(r"torch|vllm\._C\w*|vllm\._custom_ops|vllm\.platforms"),
    "CUDA": re.compile(r"torch|vllm\._C\w*|vllm\._moe_C|vllm\._custom_ops|vllm\.platforms"),
}
"""Libraries and modules without which vLLM cannot run on a platform. A module of vLLM that does not import for another reason (a
fusion pass whose CUDA op is missing) is not among them."""

UNSUPPORTED = "Operator does not support running with fake tensors"
"""How Dynamo's message begins; its class is ``torch._dynamo.exc.Unsupported``."""

IPEX = "intel_extension_for_pytorch"
"""Needed by the releases of vLLM that have ``vllm._ipex_ops`` (to 0.14); beside a later one it only lies there."""


@cache
def repairable() -> frozenset[str]:
    """Ops whose output is known to the runtime half, which can register a fake for them."""
    from xpufp8.runtime.fakes import table

    return frozenset(fake.op for fake in table())


def name_of(op: OpFact) -> str:
    """``namespace::name.overload``."""
    return f"{op.namespace}::{op.name}"


def untraceable(facts: FakeTensorFacts) -> list[OpFact]:
    """Ops that Dynamo must stop at."""
    return [op for op in facts.ops if op.traces == "fail"]


def reach(case: Case, op: str) -> tuple[Reach, ReachedOpFact | OpPath | None]:
    """Whether the model's compiled region calls an op, and what shows it.

    The traced model decides where there is one. Without it, the kernel that vLLM's chooser selects for the model's layers does.
    """
    trace = case.get("model_trace", ModelTraceFacts)
    if trace is not None and any(stage.name == "trace" and stage.status == "done" for stage in trace.stages):
        found = next((reached for reached in trace.ops_compiled if reached.op == op), None)
        if found is not None:
            return "compiled", found
        # A trace without torch.compile sees no compiled region, so it does not say that there is none.
        return ("unknown", None) if trace.enforce_eager else ("no", None)
    paths = paths_of(op)
    if case.model is None or not paths:
        return "unknown", None
    return _by_kernel(case, paths)


def _by_kernel(case: Case, paths: list[OpPath]) -> tuple[Reach, OpPath | None]:
    """What the kernels that vLLM selects for the model's schemes say of the ops of these rows."""
    schemes = {use.scheme for use in case.model.uses if not use.moe} if case.model is not None else set()
    tables = case.get("kernel_table", KernelTableFacts)
    asked = schemes & {scheme for path in paths for scheme in path.schemes}
    if not asked:
        return "no", None
    if tables is None:
        return "unknown", None
    chosen = {s.kernel for s in tables.selections if s.scheme in asked and s.kernel}
    for path in paths:
        by_layout = path.layout is not None and path.layout == tables.layout and schemes & set(path.schemes)
        if by_layout or chosen & set(path.kernels):
            return "compiled", path
    return ("no" if chosen else "unknown"), None


def eager(case: Case) -> bool:
    """True when the person typed --enforce-eager: then nothing is traced."""
    return options.flag(case.vllm_args, "--enforce-eager")


def said(op: OpFact) -> str:
    """Dynamo's message about an op on one line."""
    return first_words(op.error or "")


def first_words(message: str) -> str:
    """Dynamo's message on one line: what it is, and its own context, without hints and links."""
    lines = [line.strip() for line in message.partition("from user code")[0].splitlines()]
    kept = [
        line for line in lines if line and not line.startswith(("Hint:", "For more details")) and line not in {"Explanation:"}
    ]
    return "; ".join(dict.fromkeys(line for line in kept if not line.endswith("context:")))


def op_evidence(op: OpFact) -> list[Evidence]:
    """What was seen of one op that cannot be traced."""
    kernels = f"kernels for {', '.join(op.dispatch_keys)}" if op.dispatch_keys else "no kernel of its own"
    fake = (
        "it is composite, and its parts cannot be traced"
        if op.tracing == "composite"
        else "no fake, no Meta kernel, not composite"
    )
    seen = [Evidence(probe=PROBE, mode=op.mode, observed=f"{kernels}; {fake}", where=f"{op.origin}: {op.schema}")]
    if op.error:
        kind = "torch._dynamo.exc.Unsupported: " if op.error.startswith(UNSUPPORTED) else ""
        seen.insert(0, Evidence(probe=PROBE, mode=op.mode, observed=kind + said(op), where=name_of(op)))
    return seen


def fixes_for(op: OpFact) -> list[Fix]:
    """A fake where the op's output is known, and the flag that leaves tracing out."""
    return [*([Fix(kind="runtime", action=f"fake:{name_of(op)}")] if _repairable(op) else []), EAGER]


def _repairable(op: OpFact) -> bool:
    return op.tracing == "none" and _plain(name_of(op)) in repairable()


def _plain(op: str) -> str:
    """``namespace::name`` without overload."""
    namespace, _, name = op.partition("::")
    return f"{namespace}::{name.partition('.')[0]}"


def _reached_evidence(shown: ReachedOpFact | OpPath | None, case: Case) -> tuple[list[Evidence], list[str]]:
    """Evidence that the op is called inside the compiled region, and the layers that call it."""
    if isinstance(shown, ReachedOpFact):
        text = f"the compiled region calls {shown.op} {shown.calls} times"
        return [Evidence(probe="model_trace", mode=shown.mode, observed=text, where=", ".join(shown.layers[:3]))], list(
            shown.layers
        )
    if shown is None or case.model is None:
        return [], []
    tables = case.get("kernel_table", KernelTableFacts)
    chosen = next((s for s in tables.selections if s.kernel in shown.kernels), None) if tables is not None else None
    layers = [use.layers for use in case.model.uses if use.scheme in shown.schemes and not use.moe]
    if chosen is not None:
        text = f"vLLM selects {chosen.kernel} for {chosen.scheme}, and its apply calls {shown.op}"
        return [Evidence(probe="kernel_table", mode=chosen.mode, observed=text, where=shown.source)], layers
    text = f"this layout of vLLM ({shown.layout}) calls {shown.op} for such layers"
    return [Evidence(probe="kernel_table", mode="static", observed=text, where=shown.source)], layers


@rule(
    "OPS001", "The compiled region calls an op that cannot be traced", "error",
    references=("pytorch.org: custom ops landing page", "vllm-project/vllm#38884"),
)  # fmt: skip
def reached_without_fake(self: Rule, case: Case) -> Iterator[Finding]:
    """The model's forward pass calls a custom op that has no fake, so torch.compile cannot trace it.

    ## What it means
    Before vLLM runs a model it lets torch.compile trace it with fake tensors: tensors that have a shape and a dtype but no data.
    For a custom op, torch must be told what the op would return. This op has nothing that tells it: no registered fake, no Meta
    kernel, no composite implementation. An op that returns nothing needs none if its schema says that it writes into an argument.

    ## Why it matters
    vLLM compiles a model as one graph, so Dynamo may not step around the op. The start ends in the memory profiling, after all
    weights were loaded, with `Operator does not support running with fake tensors`. Under a service manager that is a crash loop
    of minutes a turn. The common way out, `--enforce-eager`, works and gives up torch.compile for good.

    ## How it looks
    Dynamo's own message, from tracing the op alone, without a model: `unsupported operator: torch_ipex.fp8_gemm_w8a16.xpu`. Beside
    it what shows that the compiled region calls the op: the traced model and its layers, or the kernel that vLLM selects.

    ## How it is fixed
    The repair `fake:<op>` registers a fake that states the kernel's exact output, in every process of vLLM; it costs nothing. For
    an op whose output is not known there is `--enforce-eager`.
    """
    # Either probe is enough: the list of all ops, or the traced model that met one.
    facts = case.get(PROBE, FakeTensorFacts)
    named = set()
    for op in untraceable(facts) if facts is not None else []:
        reached, shown = reach(case, name_of(op))
        if reached != "compiled":
            continue
        named.add(name_of(op))
        seen, layers = _reached_evidence(shown, case)
        cause = f"torch.compile stops at {name_of(op)}: {_reason(op)}. The server ends while it profiles memory, after loading."
        harmless = eager(case)
        if harmless:
            cause = f"torch.compile would stop at {name_of(op)}: {_reason(op)}. With --enforce-eager nothing is traced, at a cost in speed."
        yield self.finding(
            name_of(op), cause, [*op_evidence(op), *seen], fixes=fixes_for(op), affects=layers, severity="info" if harmless else None,
        )  # fmt: skip
    trace = case.get("model_trace", ModelTraceFacts)
    for stand_in in trace.stand_ins if trace is not None else []:
        if stand_in.kind == "fake" and stand_in.region == "compiled" and stand_in.subject not in named and not eager(case):
            yield _met_by_the_trace(self, stand_in, trace.mode if trace is not None else "simulated")


def _met_by_the_trace(self: Rule, fact: StandInFact, mode: Mode) -> Finding:
    """A finding about an op that only the traced model brought in: a model's module registers it, or its fake refuses the call."""
    errors = [fact.error, root(fact.error)] if fact.error is not None else []
    messages = list(dict.fromkeys(first_words(error.message) for error in errors)) or [fact.detail]
    seen = [Evidence(probe="model_trace", mode=mode, observed=message, where=fact.subject) for message in messages]
    cause = f"torch.compile stops at {fact.subject}, which has no fake. The trace went on with an inferred one."
    fixes = [Fix(kind="runtime", action=f"fake:{fact.subject}")] if _plain(fact.subject) in repairable() else []
    return self.finding(fact.subject, cause, seen, fixes=[*fixes, EAGER], affects=fact.layers)


def _reason(op: OpFact) -> str:
    if op.tracing == "composite":
        return "its implementation cannot run on fake tensors"
    return (
        "it has no fake" if op.returns_tensor else "it has no fake, and its schema does not say that it writes into an argument"
    )


@rule("OPS002", "Ops without a fake that a model may reach", "warning", needs=(PROBE,))
def unreached_without_fake(self: Rule, case: Case) -> Iterator[Finding]:
    """Custom ops that torch.compile cannot trace, and nothing that was seen says whether the model calls them.

    ## What it means
    The same as OPS001, without the knowledge that the compiled region calls the op: there is no model, or it could not be traced.

    ## Why it matters
    If a model's layers call one of them outside the opaque attention and expert ops, its start ends as in OPS001. An op that
    quantized linear layers call is a warning; all others are one line for completeness.

    ## How it looks
    The op and Dynamo's message. `xpufp8 ops` shows each with its schema.

    ## How it is fixed
    Give the doctor the model: it traces it and says which of these ops matter. The repair `fake:all` registers every fake that is
    known.
    """
    facts = case.get(PROBE, FakeTensorFacts)
    if facts is None or eager(case):
        return
    open_ops = [op for op in untraceable(facts) if op.tracing == "none" and reach(case, name_of(op))[0] == "unknown"]
    serving = [op for op in open_ops if paths_of(name_of(op))]
    for op in serving:
        cause = f"torch.compile cannot trace {name_of(op)}: {_reason(op)}. Layers of {_schemes(op)} call it where it is the kernel chosen."
        yield self.finding(name_of(op), cause, op_evidence(op), fixes=fixes_for(op))
    others = [op for op in open_ops if op not in serving]
    # What a model on another device reaches is not this tool's subject: `xpufp8 ops` lists it, no finding warns of it.
    if others and case.platform == "XPU":
        listed = "; ".join(f"{namespace}: {', '.join(op.name for op in ops)}" for namespace, ops in _by_namespace(others).items())
        known = [op for op in others if _repairable(op)]
        yield self.finding(
            "others", f"torch.compile cannot trace {len(others)} further ops. Whether a model reaches one is not known here. {listed}.",
            [op_evidence(ops[0])[0] for ops in _by_namespace(others).values()], unknown=True, severity="info",
            fixes=[Fix(kind="runtime", action="fake:all")] if known else [],
        )  # fmt: skip


def _by_namespace(ops: list[OpFact]) -> dict[str, list[OpFact]]:
    found: dict[str, list[OpFact]] = {}
    for op in ops:
        found.setdefault(op.namespace, []).append(op)
    return found


def _schemes(op: OpFact) -> str:
    return ", ".join(dict.fromkeys(scheme for path in paths_of(name_of(op)) for scheme in path.schemes))


@rule("OPS003", "A library with the device's ops does not load", "error", needs=(PROBE,))
def library_fails(self: Rule, case: Case) -> Iterator[Finding]:
    """A shared object or module that registers the ops of this device could not be loaded.

    ## What it means
    The kernels of this platform live in libraries that are loaded when vLLM is imported. One of them failed: a missing library of
    the oneAPI runtime, a build for another torch, a package that is not installed.

    ## Why it matters
    Without it vLLM takes the machine for one without the device, or stops at the first layer. vLLM logs some of these failures as
    a warning and goes on, so the message that ends the start is often another one.

    ## How it looks
    The loader's own message (`libsycl.so.8: cannot open shared object file`) and the library it came from. Modules that failed
    for the same reason stand in the same finding.

    ## How it is fixed
    By what the message says: install the missing runtime or package, or the build that belongs to this torch. The ENV findings
    say which packages do not belong together.
    """
    facts = case.get(PROBE, FakeTensorFacts)
    if facts is None:
        return
    names = {library.name for library in facts.libraries}
    needed = NEEDED_LIBRARIES.get(case.platform, re.compile("torch"))
    by_message: dict[str, list[OpLibraryFact]] = {}
    for library in facts.libraries:
        ipex = library.name.split(".")[0] == IPEX and "vllm._ipex_ops" in names
        if not library.loaded and library.error is not None and (ipex or needed.fullmatch(library.name)):
            by_message.setdefault(root(library.error).message, []).append(library)
    mode: Literal["live", "simulated"] = "simulated" if case.simulated else "live"
    for message, libraries in by_message.items():
        first = libraries[0]
        also = f" {len(libraries) - 1} more failed for the same reason." if len(libraries) > 1 else ""
        evidence = [
            Evidence(probe=PROBE, mode=mode, observed=f"{library.name}: {_kind(library)}: {message}", where=library.path or "")
            for library in libraries[:4]
        ]
        yield self.finding(first.name, f"{first.name} does not load: {message}.{also}", evidence)


def root(error: ErrorFact) -> ErrorFact:
    """The exception at the end of the chain of causes."""
    while error.cause is not None:
        error = error.cause
    return error


def _kind(library: OpLibraryFact) -> str:
    return root(library.error).type.rpartition(".")[2] if library.error is not None else ""


@rule("OPS004", "Whether ops can be traced is not known", "warning", needs=(PROBE,))
def undetermined(self: Rule, case: Case) -> Iterator[Finding]:
    """Ops of which only the schema is known, because their library does not load here.

    ## What it means
    The schemas stand as text in the library's file. Whether its code registers a Meta kernel or a composite implementation does
    not, and Python code registers no fake for these ops.

    ## Why it matters
    They may stop torch.compile (OPS001) or not. Nothing is claimed.

    ## How it looks
    The ops by library, with the file that their schemas were read from.

    ## How it is fixed
    Make the library load (OPS003), or ask on a simulated XPU (`--device sim`).
    """
    facts = case.get(PROBE, FakeTensorFacts)
    if facts is None or eager(case):
        return
    open_ops = [
        op for op in facts.ops
        if op.tracing == "undetermined" and op.traces == "unknown" and op.returns_tensor and reach(case, name_of(op))[0] != "no"
    ]  # fmt: skip
    for matters in (True, False):
        ops = [op for op in open_ops if bool(paths_of(name_of(op))) is matters]
        if not ops:
            continue
        listed = "; ".join(
            f"{namespace}: {', '.join(op.name for op in found)}" for namespace, found in _by_namespace(ops).items()
        )
        evidence = [
            Evidence(
                probe=PROBE, mode=found[0].mode, observed=f"only its schema is known: {found[0].schema}", where=found[0].origin
            )
            for found in _by_namespace(ops).values()
        ]
        yield self.finding(
            "linear layers" if matters else "others", f"Only the schemas of {len(ops)} ops could be read. {listed}.", evidence,
            unknown=True, severity="warning" if matters else "info",
        )  # fmt: skip


RULES = (reached_without_fake, unreached_without_fake, library_fails, undetermined)
