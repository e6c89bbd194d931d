"""What `xpufp8 doctor` without a model costs: whole runs, beside one bare import of what its longest probes import.

usage: python benchmarks/doctor.py [--device cpu] [-n 3]

Two probes import vLLM, side by side on two cores, so a run cannot be shorter than that import. The bound is 10 s on two quiet
cores; the ratio tells a slow machine from a slow doctor.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

IMPORT = "import vllm.model_executor.layers.fused_moe"


def timed(command: list[str]) -> float:
    """Wall-clock seconds of one process; its exit code is part of what is measured, not of the benchmark's."""
    start = time.perf_counter()
    subprocess.run(command, check=False, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-n", type=int, default=3)
    asked = parser.parse_args()
    cases = {
        "xpufp8 doctor": [sys.executable, "-m", "xpufp8", "doctor", "--device", asked.device],
        "import vllm": [sys.executable, "-c", IMPORT],
    }
    medians = []
    for name, command in cases.items():
        timed(command)
        runs = [timed(command) for _ in range(asked.n)]
        medians.append(statistics.median(runs))
        print(f"{name:<16} min {min(runs):.2f}  median {medians[-1]:.2f}  max {max(runs):.2f} s")
    print(f"ratio of medians {medians[0] / medians[1]:.2f}")


if __name__ == "__main__":
    main()
