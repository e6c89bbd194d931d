"""What a start from the cache costs: `xpufp8 serve --dry-run` with nothing changed, beside a bare Python start.

usage: python benchmarks/serve_start.py MODEL [--device cpu] [-n 10]

The first run fills the cache (probes run). The figures are wall-clock seconds of whole processes, and their ratio to `python -c pass`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def timed(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-n", type=int, default=10)
    asked = parser.parse_args()
    serve = [sys.executable, "-m", "xpufp8", "serve", asked.model, "--device", asked.device, "--dry-run"]
    bare = [sys.executable, "-c", "pass"]
    print(f"first start (probes): {timed(serve):.1f} s")
    runs = {"from the cache": [timed(serve) for _ in range(asked.n)], "python -c pass": [timed(bare) for _ in range(asked.n)]}
    for name, seconds in runs.items():
        print(f"{name:<16} min {min(seconds):.3f}  median {statistics.median(seconds):.3f}  max {max(seconds):.3f} s")
    cached, empty = (statistics.median(s) for s in runs.values())
    print(f"ratio of medians {cached / empty:.1f}")


if __name__ == "__main__":
    main()
