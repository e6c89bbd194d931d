"""PRF: are the kernels that vLLM selects as fast as this device allows? Judged on times measured on the device itself."""

from __future__ import annotations

from collections.abc import Iterator

from probes.device_facts import CompileFacts, SpeedFacts, TimingFact
from xpufp8 import options
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.device_common import by_kernel, concerns, disable, layers_of, lowered_evidence, selection, shape_text, where

PROBE = "speed"
SHARE = 0.3
"""A kernel that moves its operands at less than that part of the copy bandwidth wastes most of the device."""
SMALLEST_BYTES = 2**23
"""Calls that move less are bound by the time of a launch, which says nothing of the kernel."""
LAUNCHES = 2e-3
"""Seconds beyond which a call is more than the Python and launches around it."""
SLOWER = 1.2
"""A quantized kernel that takes that many times as long as 16-bit weights brings no speed."""
GAIN = 1.05


def _slowest(case: Case, worse: float, ratio: dict[int, float], timings: list[TimingFact]) -> Iterator[TimingFact]:
    """For each kernel the timing with the worst ratio, where it is worse than allowed."""
    by_kernel: dict[tuple[str, str], TimingFact] = {}
    for at, one in enumerate(timings):
        if at not in ratio or ratio[at] <= worse or not concerns(case, one.scheme):
            continue
        kept = by_kernel.get((one.scheme, one.kernel))
        if kept is None or ratio[at] > ratio[timings.index(kept)]:
            by_kernel[one.scheme, one.kernel] = one
    yield from by_kernel.values()


def _tells(case: Case, one: TimingFact) -> bool:
    """Whether a timing is the kernel's: not that of launching a small call, nor of a host that launches slower than a device runs."""
    own = one.timed == "graph" or case.platform == "CPU" or one.seconds >= LAUNCHES
    return own and one.bytes >= SMALLEST_BYTES


def _rates(facts: SpeedFacts) -> list[Evidence]:
    rates = facts.tokens_per_second
    if not rates:
        return []
    text = "linear layers of one rank alone: " + ", ".join(f"{name} {value:.1f} tokens/s" for name, value in rates.items())
    return [Evidence(probe=PROBE, mode=facts.run.mode, observed=text)]


@rule("PRF001", "A selected kernel is far slower than the device's memory", "warning", needs=(PROBE,))
def bandwidth(self: Rule, case: Case) -> Iterator[Finding]:
    """With one token, the kernel moves its weights at less than 30 % of the rate at which the device copies memory.

    ## What it means
    Decoding reads every weight once a token, so memory is its limit. A kernel far below it computes in software, misses the matrix
    engine, or widens weights at each call.

    ## Why it matters
    Public reports of 1.2 tokens a second come from kernels that work and are that slow.

    ## How it looks
    Bytes, seconds and the share of the copy bandwidth measured in the same process.

    ## How it is fixed
    Another kernel of the row (`VLLM_DISABLED_KERNELS`), or one of xpufp8's, which are chosen by measurement.
    """
    facts = case.get(PROBE, SpeedFacts)
    if facts is None or not facts.copy_bytes_per_second:
        return
    rate = facts.copy_bytes_per_second
    ratio = {i: rate * t.seconds / t.bytes for i, t in enumerate(facts.timings) if t.shape[0] == 1 and t.bytes >= SMALLEST_BYTES}
    for one in _slowest(case, 1 / SHARE, ratio, facts.timings):
        share = one.bytes / one.seconds / rate
        text = f"{one.kernel} {shape_text(one.shape)}: {one.bytes / 2**20:.1f} MiB in {1e3 * one.seconds:.3f} ms, "
        text += f"{share:.1%} of the copy bandwidth of {rate / 1e9:.1f} GB/s [{where(facts.run)}]"
        yield self.finding(
            f"{one.scheme}/{one.kernel}", f"{one.kernel}, selected for {one.scheme}, reaches {share:.1%} of what memory allows.",
            [Evidence(probe=PROBE, mode=facts.run.mode, observed=text), *_rates(facts), *selection(case, one.scheme, one.kernel)],
            fixes=[disable(one.kernel)], affects=layers_of(case, one.scheme),
        )  # fmt: skip


@rule("PRF002", "A selected FP8 kernel is slower than 16-bit weights", "warning", needs=(PROBE,))
def slower(self: Rule, case: Case) -> Iterator[Finding]:
    """The same product with weights in the model's dtype takes less time than the FP8 kernel.

    ## What it means
    The checkpoint saves memory and costs speed on this device with this kernel.

    ## Why it matters
    Where memory suffices, the 16-bit checkpoint (or weights widened at load) would answer faster.

    ## How it looks
    Both times for the shape where they differ most.

    ## How it is fixed
    Another kernel (`VLLM_DISABLED_KERNELS`), or the 16-bit checkpoint if it fits.
    """
    facts = case.get(PROBE, SpeedFacts)
    if facts is None:
        return
    ratio = {i: t.seconds / t.plain_seconds for i, t in enumerate(facts.timings) if t.plain_seconds and _tells(case, t)}
    for one in _slowest(case, SLOWER, ratio, facts.timings):
        times = f"{1e3 * one.seconds:.3f} ms, with {facts.model_dtype} weights {1e3 * one.plain_seconds:.3f} ms"
        text = f"{one.kernel} {shape_text(one.shape)}: {times} [{where(facts.run)}]"
        host = Fix(kind="host", action="Serve the 16-bit checkpoint if it fits, or take a kernel that is faster here.")
        yield self.finding(
            f"{one.scheme}/{one.kernel}",
            f"{one.kernel}, selected for {one.scheme}, takes {one.seconds / one.plain_seconds:.1f} times as long as 16-bit weights.",
            [Evidence(probe=PROBE, mode=facts.run.mode, observed=text), *_rates(facts), *selection(case, one.scheme, one.kernel)],
            fixes=[disable(one.kernel), host], affects=layers_of(case, one.scheme),
        )  # fmt: skip


@rule("PRF003", "Eager mode was asked for where compiling works", "info", needs=(PROBE,))
def eager(self: Rule, case: Case) -> Iterator[Finding]:
    """`--enforce-eager` was typed, and the parts of a layer compile here and are faster so.

    ## What it means
    The flag is in most recipes because compilation failed for somebody once.

    ## Why it matters
    Public reports guess 10-20 %. This is the difference measured here, of one layer's linear, norm and activation at one token;
    attention and graph capture are not in it.

    ## How it looks
    Eager time over compiled time.

    ## How it is fixed
    Leave the flag out (CFG005 says whether the model's trace passes without it).
    """
    facts = case.get(PROBE, SpeedFacts)
    if (
        facts is None
        or facts.compile_gain is None
        or facts.compile_gain < GAIN
        or not options.flag(case.vllm_args, "--enforce-eager")
    ):
        return
    text = f"eager takes {facts.compile_gain:.2f} times as long as compiled, one layer's parts at one token [{where(facts.run)}]"
    yield self.finding(
        "--enforce-eager", f"Here {text}.", [Evidence(probe=PROBE, mode=facts.run.mode, observed=text)],
        fixes=[Fix(kind="flag", action="without --enforce-eager")],
    )  # fmt: skip


@rule("PRF004", "A Triton kernel of the plan misses the matrix engine", "warning", needs=("compile",))
def off_engine(self: Rule, case: Case) -> Iterator[Finding]:
    """The Triton kernels of the plan were compiled ahead of time for the card's architecture (`doctor --triton-xpu PYTHON`), and
    products of one are not laid out for its matrix engine. Compiled, not run.

    ## What it means
    In the compiler's IR a product that the engine computes has the layout `#dpas`. Every other one becomes scalar multiply-adds.

    ## Why it matters
    The kernel works and is many times slower than the card: the class of 1.2 tokens a second.

    ## How it looks
    How many products of a configuration have the layout, the number of scalar multiply-adds, and the compiler's version. Another version
    may lay them out differently.

    ## How it is fixed
    Another kernel of the row (`VLLM_DISABLED_KERNELS`), or a newer triton-xpu. On Alchemist (A770) triton-xpu 3.3.0b1 lays out no product
    for the engine.
    """
    facts = case.get("compile", CompileFacts)
    for kernel, group in by_kernel(facts.lowered).items() if facts else ():
        good = [one for one in group if one.lowers == "pass"]
        off = [one for one in good if one.matrix_engine == "fail"]
        if facts is None or not off or (off[0].source == "xpufp8" and len(off) < len(good)):
            continue
        first = off[0]
        made = f"as triton-xpu {first.compiler} compiles them for {first.architecture}"
        yield self.finding(
            kernel, f"Products of {len(off)} of {len(good)} configurations of {kernel}, {made}, miss the matrix engine.",
            [lowered_evidence(facts, one) for one in off[:3]],
            fixes=[disable(first.selected)] if first.selected else [], affects=[first.scheme],
        )  # fmt: skip


RULES = (bandwidth, slower, eager, off_engine)
