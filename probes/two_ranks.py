"""A bare process group of two ranks through torch.distributed: what fails here fails in vLLM, and shows without it.

``run`` starts two processes that meet on the loopback interface, reduce a few tensors (one element as vLLM's own warm-up does, then
sizes at which other algorithms are chosen), optionally send one from rank to rank as pipeline parallelism does, and check every value.
The rendezvous is a TCP store: no file is written.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from probes.bounded import Child, Ended, child_environment, module_command
from probes.host_facts import CollectiveFact, CollectiveStepFact

BACKENDS = {"cpu": "gloo", "xpu": "xccl", "cuda": "nccl"}
SIZES = {"cpu": (4, 1 << 20), "xpu": (4, 1 << 20, 32 << 20), "cuda": (4, 1 << 20)}
"""Bytes of the all-reduces. oneCCL's large-message algorithm starts far below 32 MiB (vllm-project/vllm#50545 hangs at 21 MiB)."""
STAGES = ("start", "import", "init", "run", "done")


def free_port() -> int:
    """A TCP port on the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def _rank(device: str, rank: int, port: int, limit: float, send: bool) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    _say(stage="import")
    backend = BACKENDS[device]
    if device != "cpu":
        module = torch.get_device_module(device)
        if module.device_count() < 2:
            _say(skip=f"torch shows {module.device_count()} {device} devices, two ranks need two")
            return
        module.set_device(rank)
    where = torch.device(device if device == "cpu" else f"{device}:{rank}")
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=max(1.0, limit)),
    )  # fmt: skip
    _say(stage="init")
    for size in SIZES[device]:
        start = time.perf_counter()
        tensor = torch.full((size // 4,), float(rank + 1), device=where)
        dist.all_reduce(tensor)
        right = bool((tensor == 3.0).all().item())
        _say(step="all_reduce", bytes=size, right=right, seconds=time.perf_counter() - start)
    if send:
        start, size = time.perf_counter(), 1 << 20
        tensor = torch.full((size // 4,), 7.0 if rank == 0 else 0.0, device=where)
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        _say(step="send_recv", bytes=size, right=bool((tensor == 7.0).all().item()), seconds=time.perf_counter() - start)
    _say(stage="done")


def _events(ended: Ended) -> list[dict[str, Any]]:
    found = []
    for line in ended.out.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def _error(ended: Ended) -> str:
    lines = [line.strip() for line in ended.err.splitlines() if line.strip() and "Warning" not in line]
    telling = [line for line in lines if "Error" in line or "EXCEPTION" in line or "CCL_ERROR" in line or "error" in line]
    return (telling or lines or [""])[-1][:400]


def judge(device: str, ends: Sequence[Ended], *, send: bool = False) -> CollectiveFact:
    """What came of two ranks: the stage that both reached, and ``unknown`` where nothing was tried yet."""
    events = [_events(end) for end in ends]
    backend = BACKENDS[device]
    seconds = max(end.seconds for end in ends)
    skip = next((event["skip"] for rank in events for event in rank if "skip" in event), None)
    if skip is not None:
        return CollectiveFact("unknown", backend, "import", error=skip, seconds=seconds)
    reached = [max([STAGES.index(event["stage"]) for event in rank if "stage" in event], default=0) for rank in events]
    done = [[event for event in rank if "step" in event] for rank in events]
    both = min(len(done[0]), len(done[1]))
    steps = [
        CollectiveStepFact(
            a["step"], a["bytes"], "pass" if a["right"] and b["right"] else "fail", max(a["seconds"], b["seconds"])
        )
        for a, b in zip(done[0][:both], done[1][:both], strict=True)
    ]
    lowest = min(reached)
    stage = STAGES[lowest] if both == 0 or lowest == STAGES.index("done") else "run"
    timed_out = any(end.code is None for end in ends)
    if stage == "done" and all(step.status == "pass" for step in steps):
        return CollectiveFact("pass", backend, stage, steps, seconds=seconds)
    died = [end for end in ends if end.code not in (0, None)]
    error = _error(died[0]) or died[0].fate if died else ""
    if lowest == 0:
        # Neither oneCCL nor gloo was reached: importing torch took all the time, or failed.
        return CollectiveFact("unknown", backend, stage, steps, error or "torch was not imported in time", timed_out, seconds)
    wanted = [("all_reduce", size) for size in SIZES[device]] + ([("send_recv", 1 << 20)] if send else [])
    if stage in {"init", "run"} and both < len(wanted):
        steps.append(CollectiveStepFact(wanted[both][0], wanted[both][1], "fail"))
    return CollectiveFact("fail", backend, stage, steps, error, timed_out, seconds)


def run(device: str, limit: float, environment: dict[str, str], *, send: bool = False) -> CollectiveFact:
    """Run two ranks and end both at the limit. ``device``: cpu (gloo), xpu (xccl) or cuda (nccl); ``send`` adds rank to rank."""
    port = free_port()
    env = child_environment({**environment, "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"})
    end = time.monotonic() + limit
    ranks = []
    for rank in range(2):
        command = module_command("probes.two_ranks", device, str(rank), str(port), str(limit), "1" if send else "")
        try:
            ranks.append(Child(command, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
        except OSError as error:
            for child in ranks:
                child.wait(0)
            return CollectiveFact("unknown", BACKENDS[device], "start", error=str(error))
    # When one rank dies the other may wait for it for good: it gets two more seconds.
    while time.monotonic() < end and all(child.running() for child in ranks):
        time.sleep(0.02)
    grace = min(end, time.monotonic() + 2.0)
    return judge(device, [child.wait(grace - time.monotonic()) for child in ranks], send=send)


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), bool(sys.argv[5]))
    sys.stdout.flush()
    os._exit(0)
