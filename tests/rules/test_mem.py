"""MEM001: weights and KV cache against what vLLM may use of a card."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.model_facts import MemoryFact, ModelTraceFacts, ParallelFact
from xpufp8.report import Finding
from xpufp8.rules import mem
from xpufp8.rules.base import Case

GIB = 1 << 30


def judge(memory: MemoryFact | None, **others: object) -> list[Finding]:
    facts = ModelTraceFacts(
        "sim:arc-pro-b60", "simulated", "arc-pro-b60", "/m", "0.32.0", "2.13.0", "0.1.16.2", memory=memory, **others
    )  # type: ignore[arg-type]  # fields by name
    return list(mem.does_not_fit.check(mem.does_not_fit, Case("sim:arc-pro-b60", facts={"model_trace": facts})))


def memory(weights: float, needed: float | None, fits: int | None = None, device: float = 24, **others: object) -> MemoryFact:
    return MemoryFact(
        parameter_bytes={"bfloat16": int(weights * GIB)}, weight_bytes=int(weights * GIB), device_bytes=int(device * GIB), utilization=0.9,
        kv_bytes_per_token=131072, max_model_len=32768, kv_needed_bytes=None if needed is None else int(needed * GIB),
        fits_max_model_len=fits,
        **others,  # type: ignore[arg-type]  # fields by name
    )  # fmt: skip


def test_what_fits_has_no_finding() -> None:
    assert judge(memory(10, 4, 32768)) == []
    assert judge(memory(10, None)) == []
    assert judge(None) == []


def test_without_a_device_nothing_is_said() -> None:
    assert judge(memory(100, 100, 0, device=0)) == []


def test_weights_alone_too_large() -> None:
    (finding,) = judge(memory(26, 4, 0), parallel=ParallelFact(world_size=2, tensor_parallel=2))
    assert (finding.code, finding.subject) == ("MEM001", "weights")
    assert "26.00 GiB on each of 2 cards" in finding.cause
    assert "21.60 GiB" in finding.cause
    assert [fix.action for fix in finding.fixes] == ["--quantization fp8", "use more cards: -tp 4 or above"]


def test_tensors_outside_every_list_count() -> None:
    assert judge(memory(20, 1.5, 32768)) == []
    (finding,) = judge(memory(20, 1.5, 1000, other_bytes={"bfloat16": GIB}))
    assert finding.subject == "kv-cache"


def test_the_cache_too_large_names_the_longest_length() -> None:
    (finding,) = judge(memory(18, 4, 29491))
    assert finding.subject == "kv-cache"
    assert "29491" in finding.cause
    assert finding.fixes[0].action == "--max-model-len 26624"
    assert finding.fixes[1].action == "--kv-cache-dtype fp8"


def test_an_fp8_cache_is_not_offered_twice() -> None:
    (finding,) = judge(memory(18, 4, 29491, kv_cache_dtype="fp8"))
    assert [fix.action for fix in finding.fixes] == ["--max-model-len 26624"]


@given(st.floats(0.1, 60), st.floats(0.01, 60))
def test_a_finding_exactly_when_it_does_not_fit(weights: float, needed: float) -> None:
    fact = memory(weights, needed, 100)
    fits = fact.weight_bytes + (fact.kv_needed_bytes or 0) <= mem.budget(fact) and fact.weight_bytes < mem.budget(fact)
    assert bool(judge(fact)) is not fits


@pytest.mark.parametrize(
    ("weights", "ranks", "said"),
    [
        (24, 1, "-tp 2 or above"),
        (40, 1, "-tp 4 or above"),
        (21.88, 2, "-tp 4 or above"),
        (21.88, 2, "-tp 8 or above"),
        (900, 1, "no number of such cards"),
    ],
)
def test_the_first_size_that_fits_is_named(weights: float, ranks: int, said: str) -> None:
    """No doubling is proposed that the same arithmetic refuses."""
    device = 12 if "8 or" in said else 24
    [finding] = judge(memory(weights, None, device=device), parallel=ParallelFact(tensor_parallel=ranks))
    assert said in finding.fixes[-1].action
