"""The PRF rules on facts: what is slow, and what a timing cannot tell."""

from __future__ import annotations

from typing import Any

from device_cases import RUN, findings

from probes.device_facts import SpeedFacts, TimingFact

MIB = 2**20


def timing(seconds: float, plain: float = 1.0, rows: int = 1, size: int = 64 * MIB, timed: str = "graph") -> TimingFact:
    return TimingFact("fp8-block", "K", "down_proj", [rows, 8192, 8192], seconds, plain, size, timed=timed)


def judge(*timings: TimingFact, args: tuple[str, ...] = (), **more: Any) -> list[tuple[str, str]]:
    facts = SpeedFacts(RUN, "bfloat16", copy_bytes_per_second=400e9, timings=list(timings), **more)
    return [(f.code, f.severity) for f in findings("speed", facts, args=args)]


def test_below_thirty_percent_of_the_copy_bandwidth() -> None:
    at_full_rate = 64 * MIB / 400e9
    assert judge(timing(4 * at_full_rate)) == [("PRF001", "warning")]
    assert judge(timing(3 * at_full_rate)) == []


def test_slower_than_weights_in_16_bits() -> None:
    assert judge(timing(2.0, 1.0, rows=2048)) == [("PRF002", "warning")]
    assert judge(timing(1.1, 1.0, rows=2048)) == []


def test_times_of_the_host_and_of_launches_are_no_finding() -> None:
    assert judge(timing(2e-4, 1e-5, timed="calls")) == []
    assert judge(timing(2e-4, 1e-5, size=MIB)) == []
    assert {code for code, _ in judge(timing(1.0, 0.5, timed="calls"))} == {"PRF001", "PRF002"}


def test_one_finding_a_kernel_about_its_worst_shape() -> None:
    facts = SpeedFacts(RUN, "bfloat16", timings=[timing(2.0, rows=8), timing(9.0, rows=32), timing(3.0, rows=2048)])
    (found,) = findings("speed", facts)
    assert "M=32" in found.evidence[0].observed


def test_eager_is_named_only_where_it_was_typed_and_costs_something() -> None:
    assert judge(compile_gain=1.4, args=("--enforce-eager",)) == [("PRF003", "info")]
    assert judge(compile_gain=1.4) == []
    assert judge(compile_gain=1.01, args=("--enforce-eager",)) == []
