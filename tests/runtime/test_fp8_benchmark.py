"""The benchmark of FP8 linear layers runs, with every way that a CPU has, and its errors are those of the operands."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from benchmarks import fp8_linear  # noqa: E402 - after the skip


@pytest.mark.parametrize("rows", [1, 512])
def test_a_case_is_measured_on_the_cpu(rows: int, tmp_path: Path) -> None:
    device = torch.device("cpu")
    case = fp8_linear.make_case(256, 256, device, 1.0)
    args = argparse.Namespace(compile=False, vllm=tmp_path, sweep=True, busy=0.0)
    found = fp8_linear.measure_case(case, rows, fp8_linear.Clock(device), (1e9, 1e9), args)
    ways = {row.way: row for row in found}
    assert ways["floor"].microseconds == pytest.approx(256 * 256 / 1e3 if rows == 1 else 2 * rows * 256 * 256 / 2e3)
    dequantized = ways["dequantize, then matmul"]
    assert dequantized.ratio == pytest.approx(1, rel=0.05)
    assert dequantized.repeats
    assert dequantized.share is not None
    assert all(row.error is None or row.error < 2**-7 for row in found)
    # What a CPU lacks is said, not left out.
    assert "vLLM's Triton block kernel: no Triton target on a CPU" in ways
