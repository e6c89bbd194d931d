"""DTY: do the kernels that vLLM selects return what the model goes on with, and do a layer's own tensors agree? The first is judged
on real calls on the real device, the second on the traced model.
"""

from __future__ import annotations

from collections.abc import Iterator

from probes.device_facts import DtypeAgreementFacts, KernelDtypeFact, OpOutputFact
from probes.model_facts import MixedDtypeFact, ModelTraceFacts
from xpufp8 import options
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.cfg import WITHOUT
from xpufp8.rules.device_common import concerns, disable, dtype_of, layers_of, place, said, selection, shape_text, where

PROBE = "dtype_agreement"
SLOW_DTYPE = 4.0
"""A dtype whose plain product takes that many times another's is one that the device emulates."""


def _dtype_fixes(facts: DtypeAgreementFacts, one: KernelDtypeFact) -> list[Fix]:
    """``--dtype`` with each 16-bit dtype in which the same kernel was right."""
    right = [
        k.dtype
        for k in facts.kernels
        if (k.scheme, k.weight_dtype, k.observation) == (one.scheme, one.weight_dtype, "pass") and k.dtype != one.dtype
    ]
    cost = "the model computes in another dtype than it was made for; float16 overflows beyond 65504"
    return [Fix(kind="flag", action=f"--dtype {dtype}", cost=cost) for dtype in right if dtype != "float32"]


def _calls(case: Case, facts: DtypeAgreementFacts) -> Iterator[KernelDtypeFact]:
    """Calls in the dtype that is served, of schemes that the model has, with the usual format of the weights."""
    wanted = dtype_of(case, facts.model_dtype)
    for one in facts.kernels:
        if one.dtype == wanted and one.weight_dtype == "float8_e4m3fn" and concerns(case, one.scheme):
            yield one


def _observed(facts: DtypeAgreementFacts, one: KernelDtypeFact, text: str, error_place: str = "") -> Evidence:
    observed = f"{one.kernel} ({one.scheme}, {one.scale_layout} scales, {shape_text(one.shape)}): {text}"
    return Evidence(
        probe=PROBE, mode=facts.run.mode, observed=f"{observed} [{where(facts.run)}]",
        expected=f"{one.dtype} [{one.shape[0]}, {one.shape[1]}]", where=error_place,
    )  # fmt: skip


def _guilty(one: KernelDtypeFact) -> OpOutputFact | None:
    """The op whose output has the kernel's wrong dtype."""
    return next((op for op in one.ops if one.output_dtype in op.dtypes), None)


@rule("DTY001", "A kernel returns another dtype than the model's", "error", needs=(PROBE,))
def output_dtype(self: Rule, case: Case) -> Iterator[Finding]:
    """The kernel that vLLM selects was run, and its output does not have the dtype of the activations that went in.

    ## What it means
    An FP8 GEMM may return float16 whatever it was given. Under a bfloat16 model the next operation then meets two dtypes.

    ## Why it matters
    `expected self and mat2 to have the same dtype, but got: c10::Half != c10::BFloat16` at the first layer, or, where something
    casts on the way, values beyond 65504 that became infinite without an error.

    ## How it looks
    The kernel, the custom op that it called, the dtype that came back, and the one that went in.

    ## How it is fixed
    Where the returned dtype has the range of the wanted one, a cast at run time (`cast:<op>`). Otherwise `--dtype` with a dtype in
    which the same kernel was seen to agree, or another kernel (`VLLM_DISABLED_KERNELS`).
    """
    facts = case.get(PROBE, DtypeAgreementFacts)
    for one in _calls(case, facts) if facts else ():
        if facts is None or one.observation != "fail" or one.output_dtype in (None, one.dtype):
            continue
        op = _guilty(one)
        # Only float32 holds every bfloat16 or float16 value; a float16 result may have overflowed before any cast.
        safe = op is not None and one.output_dtype == "float32"
        fixes = [Fix(kind="runtime", action=f"cast:{op.op}", cost="one pass over each output")] if safe and op else []
        text = f"returned {one.output_dtype}" + (f" from {op.op}" if op else "")
        yield self.finding(
            op.op if op else one.kernel,
            f"{one.kernel} returns {one.output_dtype} for {one.dtype} activations"
            + (f", because {op.op} does" if op else "") + f". Layers of {one.scheme} stop there or lose range.",
            [_observed(facts, one, text), *selection(case, one.scheme, one.kernel)],
            fixes=[*fixes, *_dtype_fixes(facts, one), disable(one.kernel)], affects=layers_of(case, one.scheme),
        )  # fmt: skip


@rule("DTY002", "An op's fake promises something else than its kernel returns", "error", needs=(PROBE,))
def wrong_fake(self: Rule, case: Case) -> Iterator[Finding]:
    """A custom op was run on the device and its fake was asked the same question; shape, dtype, stride or device differ.

    ## What it means
    torch.compile plans with what the fake says. Code is generated for that output, and reads the real one through it.

    ## Why it matters
    Wrong numbers without an error, a crash in generated code, or an assertion of strides at the first request.

    ## How it looks
    `output 0: dtype torch.bfloat16, the kernel returns torch.float16`.

    ## How it is fixed
    A right fake at run time where the op is known (`fake:<op>`); otherwise `--enforce-eager`, which asks no fake.
    """
    facts = case.get(PROBE, DtypeAgreementFacts)
    seen: set[str] = set()
    for one in _calls(case, facts) if facts else ():
        for op in one.ops if facts else ():
            if facts is None or op.fake != "fail" or op.op in seen:
                continue
            seen.add(op.op)
            fixes = [Fix(kind="flag", action="--enforce-eager", cost="no torch.compile and no graph capture")]
            yield self.finding(
                op.op, f"The fake of {op.op} is not what its kernel returns: {'; '.join(op.differences)}.",
                [_observed(facts, one, f"{op.op} returned {', '.join(op.outputs)}; its fake: {'; '.join(op.differences)}")],
                fixes=fixes, affects=layers_of(case, one.scheme),
            )  # fmt: skip


@rule("DTY003", "The selected kernel fails on the model's dtype", "error", needs=(PROBE,))
def call_fails(self: Rule, case: Case) -> Iterator[Finding]:
    """VLLM's chooser selects a kernel, and calling it with activations of the model's dtype raises.

    ## What it means
    A kernel says what it can do before it is run. What it says is not always what it does.

    ## Why it matters
    The server comes up to its first forward pass, minutes after the start, and ends there.

    ## How it looks
    The exception of the call, and the place that raised it.

    ## How it is fixed
    `--dtype` with a dtype in which the same layer ran, or take the kernel out with `VLLM_DISABLED_KERNELS`, so that the next one of
    the row, or a repair's, is asked.
    """
    facts = case.get(PROBE, DtypeAgreementFacts)
    for one in _calls(case, facts) if facts else ():
        if facts is None or one.error is None:
            continue
        yield self.finding(
            f"{one.scheme}/{one.kernel}", f"{one.kernel}, which vLLM selects for {one.scheme}, raised {said(one.error)}.",
            [_observed(facts, one, said(one.error), place(one.error)), *selection(case, one.scheme, one.kernel)],
            fixes=[*_dtype_fixes(facts, one), disable(one.kernel)], affects=layers_of(case, one.scheme),
        )  # fmt: skip


@rule("DTY004", "The device does the model's dtype badly", "warning", needs=(PROBE,))
def device_dtype(self: Rule, case: Case) -> Iterator[Finding]:
    """A plain matrix product in the model's dtype fails on the device, or takes far longer than one in the other 16-bit dtype.

    ## What it means
    Some devices have no matrix units for a dtype and emulate it (bfloat16 on older cards).

    ## Why it matters
    Everything that is not FP8 (attention, norms, the head) runs in that dtype.

    ## How it looks
    Time of one product in each dtype, and what the device says of itself; in a log `Intel Arc A770 have bfloat16 accuracy known
    issue`.

    ## How it is fixed
    `--dtype` with the dtype that the device does well, if the model's range allows it.
    """
    facts = case.get(PROBE, DtypeAgreementFacts)
    if facts is None or facts.run.mode == "simulated" or case.platform == "CPU":
        return
    wanted = dtype_of(case, facts.model_dtype)
    by_name = {s.dtype: s for s in facts.support}
    other_name = {"bfloat16": "float16", "float16": "bfloat16"}.get(wanted, "")
    mine, other = by_name.get(wanted), by_name.get(other_name)
    if mine is None:
        return
    fails = mine.runs == "fail"
    slow = bool(mine.seconds and other is not None and other.seconds and mine.seconds > SLOW_DTYPE * other.seconds)
    if not fails and not slow:
        return
    text = f"a plain product in {wanted} fails: {said(mine.error)}"
    if not fails and mine.seconds and other is not None and other.seconds:
        times = f"{1e3 * mine.seconds:.2f} ms in {wanted}, {1e3 * other.seconds:.2f} ms in {other.dtype}"
        text = f"a product of {mine.size}x{mine.size} takes {times}"
    usable = other is not None and other.runs == "pass"
    fixes = [Fix(kind="flag", action=f"--dtype {other_name}", cost="another range of numbers")] if usable else []
    evidence = [Evidence(probe=PROBE, mode=facts.run.mode, observed=f"{text} [{where(facts.run)}]")]
    yield self.finding(wanted, f"On this device {text}.", evidence, fixes=fixes, severity="error" if fails else None)


@rule("DTY005", "No attention backend takes the KV-cache dtype", "error", needs=(PROBE,))
def cache_dtype(self: Rule, case: Case) -> Iterator[Finding]:
    """VLLM's attention layer was made and run with the typed `--kv-cache-dtype`: it fails with that dtype and runs without it.

    ## What it means
    Each attention backend takes some dtypes of the cache. What this platform selects does not take the one that was typed.

    ## Why it matters
    The start ends when the first attention layer is built.

    ## How it looks
    vLLM's own refusal.

    ## How it is fixed
    Leave `--kv-cache-dtype` out: the cache then has the model's dtype and takes twice the memory of an FP8 one.
    """
    facts = case.get(PROBE, DtypeAgreementFacts)
    typed = options.find(case.vllm_args, "--kv-cache-dtype")
    action = WITHOUT + (typed.text if typed else "--kv-cache-dtype")
    for one in facts.cache if facts else ():
        if facts is None or one.error is None:
            continue
        yield self.finding(
            one.cache_dtype, f"Attention does not take a {one.cache_dtype} cache with {one.dtype} queries: {said(one.error)}.",
            [Evidence(probe=PROBE, mode=facts.run.mode, observed=said(one.error), where=place(one.error))],
            fixes=[Fix(kind="flag", action=action, cost="the cache takes the memory of a 16-bit one")],
        )  # fmt: skip


@rule("DTY006", "float16 and bfloat16 meet inside one layer", "error", needs=("model_trace",))
def mixed(self: Rule, case: Case) -> Iterator[Finding]:
    """The traced model hands both 16-bit dtypes to one custom op, or holds a tensor of the other one beside those of its own dtype.

    ## What it means
    Some code makes a buffer or a parameter in a fixed dtype instead of the model's. An op that reads both checks for it and
    raises, or takes the bits of one for the other. Only float16 beside bfloat16 counts: float32 is what models keep norms,
    scales and decay in on purpose, and quantized layers hold what their method put there.

    ## Why it matters
    It strikes at the first request, after the start: `dt_bias dtype must match core_attn_out dtype (float16/bfloat16), but got
    dt_bias=BFloat16, core_attn_out=Half`.

    ## How it looks
    `vllm::gdn_attention_core_xpu: core_attn_out float16, projected_states_qkvz bfloat16`. A tensor that no op was seen to read beside
    the others is a warning.

    ## How it is fixed
    `--dtype` with the dtype that the code has fixed, tried by tracing again. Where that too leaves a mixture, the model's code must
    be mended.
    """
    facts = case.get("model_trace", ModelTraceFacts)
    if facts is None:
        return
    calls = [one for one in facts.mixed if one.where == "op"]
    read = {name.partition(" of the layer")[0] for one in calls for name in _names(one)}
    alone = [
        one for one in facts.mixed if one.where == "layer" and not read & {n.rpartition(".")[2] for n in _names(one, facts.dtype)}
    ]
    for one in (*calls, *alone):
        others = sorted({dtype for _, _, dtype in (t.rpartition(" ") for t in one.tensors)} - {facts.dtype})
        beside = [o for o in facts.mixed if o.where == "layer" and one.where == "op" and o.pattern == one.pattern]
        shown = [Evidence(probe="model_trace", mode=facts.mode, observed=f"{o.subject} ({o.pattern}, {o.count}): {', '.join(o.tensors)}")
                 for o in (one, *beside)]  # fmt: skip
        cost = "the model computes in another dtype than it was made for; float16 overflows beyond 65504"
        meet = "meet in one call of" if one.where == "op" else "stand side by side in"
        yield self.finding(
            f"{one.subject} {one.pattern}".strip(),
            f"float16 and bfloat16 {meet} {one.subject}, in a model that is served in {facts.dtype}.",
            shown, fixes=[Fix(kind="flag", action=f"--dtype {dtype}", cost=cost) for dtype in others],
            severity=None if one.where == "op" else "warning", affects=[one.pattern] if one.pattern else [],
        )  # fmt: skip


def _names(one: MixedDtypeFact, without: str | None = None) -> set[str]:
    """Names of a fact's tensors; ``without`` leaves out those of a dtype."""
    return {name for name, _, dtype in (text.rpartition(" ") for text in one.tensors) if dtype != without}


RULES = (output_dtype, wrong_fake, call_fails, device_dtype, cache_dtype, mixed)
