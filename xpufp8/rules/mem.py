"""MEM: whether weights and the asked KV cache fit on each card."""

from __future__ import annotations

from collections.abc import Iterator

from probes.model_facts import MemoryFact, ModelTraceFacts
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.rules.base import Case, Rule, rule

PROBE = "model_trace"
GIB = float(1 << 30)


def gib(size: float) -> str:
    """Bytes as GiB with two decimals."""
    return f"{size / GIB:.2f} GiB"


def held(memory: MemoryFact) -> int:
    """Everything that a rank holds before its first request: parameters, buffers, tensors outside both."""
    return memory.weight_bytes + sum(memory.other_bytes.values())


def budget(memory: MemoryFact) -> int:
    """What vLLM lets itself use of a device."""
    return int(memory.device_bytes * memory.utilization)


@rule("MEM001", "Weights and KV cache do not fit", "error", needs=(PROBE,))
def does_not_fit(self: Rule, case: Case) -> Iterator[Finding]:
    """What one rank holds and the KV cache for one sequence of the asked length exceed what vLLM may use of a card.

    ## What it means
    vLLM takes `--gpu-memory-utilization` of a card. Weights and buffers come off first, exactly as summed here; activations and
    what the driver takes come off too and are not known without the card, so the true room is somewhat smaller. What is left is
    the KV cache, which must hold at least one sequence of `--max-model-len`.

    ## Why it matters
    vLLM finds this out after loading: `To serve at least one request with the model's max seq len …, … GiB KV cache is needed`,
    or the card runs out of memory while weights are read.

    ## How it looks
    GiB of weights a rank, GiB that the cache needs, GiB that there are, and the longest `--max-model-len` for which it holds by
    vLLM's own arithmetic.

    ## How it is fixed
    A shorter `--max-model-len`, `--kv-cache-dtype fp8` (half the cache), more cards (`-tp`), or a smaller checkpoint
    (`--quantization fp8`).
    """
    facts = case.get(PROBE, ModelTraceFacts)
    if facts is None or facts.memory is None or facts.memory.device_bytes <= 0:
        return
    memory = facts.memory
    left = budget(memory) - held(memory)
    told = [
        Evidence(
            probe=PROBE, mode=facts.mode,
            observed=f"weights and buffers {gib(held(memory))} a rank; {gib(budget(memory))} of {gib(memory.device_bytes)} may be used "
            f"(--gpu-memory-utilization {memory.utilization:g})",
        )
    ]  # fmt: skip
    ranks = f" on each of {facts.parallel.world_size} cards" if facts.parallel.world_size > 1 else ""
    if left <= 0:
        cause = f"The weights alone take {gib(held(memory))}{ranks}, more than the {gib(budget(memory))} that vLLM may use."
        yield self.finding("weights", cause, told, fixes=_smaller(facts), title="The weights do not fit")
        return
    if memory.kv_needed_bytes is None or memory.kv_needed_bytes <= left:
        return
    told.append(
        Evidence(
            probe=PROBE, mode=facts.mode,
            observed=f"one sequence of {memory.max_model_len} tokens needs {gib(memory.kv_needed_bytes)} of KV cache "
            f"({memory.kv_bytes_per_token} bytes a token, cache dtype {memory.kv_cache_dtype}); {gib(left)} are left",
        )
    )  # fmt: skip
    longest = memory.fits_max_model_len or 0
    cause = (
        f"--max-model-len {memory.max_model_len} needs {gib(memory.kv_needed_bytes)} of KV cache{ranks}; {gib(left)} are left."
    )
    cause += f" The longest that fits is {longest}, before activations." if longest else " No length fits."
    fixes = [Fix(kind="flag", action=f"--max-model-len {_round(longest)}", cost="shorter sequences")] if longest >= 1024 else []
    if memory.kv_cache_dtype in {"auto", "bfloat16", "float16"}:
        fixes.append(Fix(kind="flag", action="--kv-cache-dtype fp8", cost="KV values in 8 bits"))
    yield self.finding("kv-cache", cause, told, fixes=fixes, title="The KV cache does not fit")


def _round(longest: int) -> int:
    """A length a little below the limit, for the activations: 15/16 of it, in whole 1024s."""
    return max(longest * 15 // 16 // 1024 * 1024, 1024)


MOST_RANKS = 32
SPLIT = 0.9
"""Share of a rank that twice the ranks halve: embeddings, norms and what a layer keeps whole do not shrink with them."""


def _enough_ranks(memory: MemoryFact, ranks: int) -> int | None:
    """The first doubling of the tensor-parallel size under which the weights should fit, None where none does."""
    more, share = ranks * 2, held(memory) * (1 - SPLIT / 2)
    while more <= MOST_RANKS:
        if share <= budget(memory):
            return more
        more, share = more * 2, share * (1 - SPLIT / 2)
    return None


def _smaller(facts: ModelTraceFacts) -> list[Fix]:
    assert facts.memory is not None
    more = _enough_ranks(facts.memory, facts.parallel.tensor_parallel)
    few = f"no number of such cards up to {MOST_RANKS} holds it: use larger cards, or a smaller checkpoint"
    fixes = [Fix(kind="host", action=f"use more cards: -tp {more} or above" if more else few)]
    if facts.quantization is None:
        fixes.insert(0, Fix(kind="flag", action="--quantization fp8", cost="weights in 8 bits"))
    return fixes


RULES = (does_not_fit,)
