"""How long a simulated model trace takes and what it holds: a 64-layer 27B, and the same model with 4 layers.

usage: python benchmarks/model_trace.py [--repeat N]

Must hold: 64 layers in at most 30 s and 2 GB, and time(64) ≤ 1.3 × time(4). CPU seconds (user and system, the architecture inspection child
included) are printed beside wall-clock seconds, because only they mean something on a machine that others use. Exits 1 when a bound
on CPU seconds, memory or the ratio does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "data" / "models" / "Qwen3.6-27B-FP8" / "config.json"

SECONDS, BYTES, RATIO = 30.0, 2 * 10**9, 1.3


def config(layers: int) -> dict[str, object]:
    """The 27B's config with that many decoder layers."""
    data = json.loads(MODEL.read_text())
    text = data["text_config"]
    text["num_hidden_layers"] = layers
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][:layers]
    return dict(data)


def run(layers: int) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and peak bytes of one doctor's child."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config(layers)))
        result = Path(folder, "result.json")
        context = json.dumps({"device": "sim:arc-pro-b60", "model": folder, "vllm_args": ["-tp", "2"]})
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "probes", "model_trace"], input=context, text=True, capture_output=True, check=True, cwd=ROOT,
            env={**os.environ, "XPUFP8_RESULT": str(result)},
        )  # fmt: skip
        wall = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        facts = json.loads(result.read_text())["facts"]
        assert [s["name"] for s in facts["stages"] if s["status"] not in {"done", "skipped"}] == []
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return wall, cpu, int(facts["peak_rss_bytes"])


def main() -> int:
    """Measure, print, compare with the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    best: dict[int, tuple[float, float, int]] = {}
    for layers in (4, 64):
        best[layers] = min((run(layers) for _ in range(repeat)), key=lambda figures: figures[1])
        wall, cpu, peak = best[layers]
        print(f"{layers:>3} layers: {wall:.1f} s wall, {cpu:.1f} s CPU, {peak / 1e9:.2f} GB")
    ratio = best[64][1] / best[4][1]
    print(f"time(64) / time(4) = {ratio:.2f} (CPU)")
    held = best[64][1] <= SECONDS and best[64][2] <= BYTES and ratio <= RATIO
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
