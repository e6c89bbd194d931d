"""The child of ``triton_lowering``: reads a request on stdin and compiles, in the interpreter that has Intel's Triton compiler.

``python -m probes.triton_worker`` prints one JSON object as its last line: the compiler's version and a result for each configuration.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from probes.triton_compiler import Compiled, Job, bring_up, compile_one

OURS = "xpufp8"


def jobs(request: dict[str, Any]) -> Iterator[tuple[str, Job]]:
    """(scheme, job) for every configuration that the request's layers may be run in."""
    from probes.triton_jobs import layer_jobs
    from probes.triton_vllm import vllm_jobs

    for layer in request["layers"]:
        shapes = [(int(n), int(k)) for n, k in layer["shapes"]]
        if layer["triton"] == OURS:
            found = layer_jobs(layer["dtype"], layer["scale"], tuple(layer["block"]), shapes, moe=bool(layer["moe"]))
        else:
            even = all(n % 16 == 0 and k % 16 == 0 for n, k in shapes)
            found = vllm_jobs(request["release"], Path(request["vllm"]), only=layer["triton"], dtype=layer["dtype"], even=even)
        for job in found:
            yield layer["scheme"], job


_work: list[tuple[Job, str]] = []


def _compile_at(place: int) -> Compiled:
    return compile_one(*_work[place])


def main() -> int:
    """Compile what stdin asks for."""
    request = json.loads(sys.stdin.read())
    bring_up()
    import triton
    from triton.backends import backends

    if "intel" not in backends:
        print(
            f"its Triton {triton.__version__} has no Intel backend, only {', '.join(sorted(backends)) or 'none'}", file=sys.stderr
        )
        return 3
    asked = list(jobs(request))
    _work[:] = [(job, request["architecture"]) for _, job in asked]
    # Forked, because jitted functions cannot be sent to another process; the first compilation builds the backend's helper for all.
    results = [_compile_at(0)] if _work else []
    with concurrent.futures.ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("fork")) as pool:
        results += pool.map(_compile_at, range(1, len(_work)), chunksize=4)
    answer = [{"scheme": scheme, **asdict(one)} for (scheme, _), one in zip(asked, results, strict=True)]
    print("\n" + json.dumps({"compiler": triton.__version__, "results": answer}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
