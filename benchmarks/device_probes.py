"""CPU seconds of the four device probes for one model, each in a child as the doctor starts it.

``python benchmarks/device_probes.py FOLDER [--apply kernel:fp8_block]`` (FOLDER from scripts/tiny_models.py). The sum is to stay
below 60 s on two cores for the tiny block-FP8 Llama.
"""

from __future__ import annotations

import argparse
import resource
import time

from xpufp8.children import run_probe
from xpufp8.doctor import DEVICE, Request, launch_for, scheme_options
from xpufp8.target import resolve


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--apply", default="kernel:fp8_block")
    options = parser.parse_args()
    target = resolve([options.model], device=options.device)
    context = target.context()
    context.options.update(scheme_options(target))
    launch = launch_for(target, Request(), [item for item in options.apply.split(",") if item])
    total = 0.0
    for name in DEVICE:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        report = run_probe(name, context, launch)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        total += seconds
        print(f"{name:16} {report.status:8} {seconds:6.1f} CPU s {time.monotonic() - start:6.1f} s  {report.detail}", flush=True)
    print(f"{'all':16} {'':8} {total:6.1f} CPU s")


if __name__ == "__main__":
    main()
