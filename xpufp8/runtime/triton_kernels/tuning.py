"""Which configuration is fastest on this device, found by running them; answers are kept in a file per device and software.

A trial that does not compile, does not run or is wrong is out. Nothing is tuned while a graph is being captured or on tensors
without data: the first configuration of the space is taken then.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

REVISION = 3
"""Raised when a kernel or the space changes, so that older answers are measured again."""
ROUNDS = (5, 25)
"""Calls that are timed: of every trial, and then of those that came close to the best."""
CLOSE = 1.15
"""How far from the best a trial may be in the first round to be timed again."""
ALLOWED = 2.0**-5
"""Error, relative by norm, above which a configuration is out. Rounding activations to FP8 costs 2^-5.3; a wrong one costs more."""

_logger = logging.getLogger("vllm.xpufp8")
_known: dict[Path, dict[str, Any]] = {}
_scratch: dict[str, Any] = {}


@dataclass(frozen=True)
class Trial:
    """One thing that can be run."""

    name: dict[str, Any]
    """What it is, as plain data; this is what the cache holds."""
    run: Callable[[], torch.Tensor]


def units(device: torch.device) -> int:
    """Compute units that run programs side by side: multiprocessors, Xe cores, or CPU threads."""
    import torch

    if device.type == "cpu":
        return int(torch.get_num_threads())
    properties = getattr(torch, device.type).get_device_properties(device)
    for name in ("multi_processor_count", "gpu_subslice_count", "max_compute_units"):
        count = getattr(properties, name, None)
        if count:
            return int(count)
    return 16


def cache_file(device: torch.device) -> Path:
    """File that holds the answers for this device and software."""
    import torch
    import triton

    from xpufp8.runtime import choice

    name = "cpu" if device.type == "cpu" else str(getattr(torch, device.type).get_device_name(device))
    parts = [str(REVISION), device.type, name, str(units(device)), torch.__version__, triton.__version__]
    digest = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
    return choice.cache_file(device).with_name(f"tiles-{digest}.json")


def _answers(path: Path) -> dict[str, Any]:
    if path not in _known:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            data = {}
        _known[path] = data if isinstance(data, dict) else {}
    return _known[path]


def _keep(path: Path, key: str, name: dict[str, Any]) -> None:
    """Add an answer; written beside and renamed, because ranks of one server write at the same time."""
    _answers(path)[key] = name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = {}
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({**(content if isinstance(content, dict) else {}), key: name}, out)
        Path(part).replace(path)
    except OSError as error:
        _logger.debug("xpufp8 could not keep a tile choice in %s: %s", path, error)


def seconds(runs: list[Callable[[], Any]], device: torch.device, rounds: int) -> list[float]:
    """Median time of a call of each, taken in turns, with nothing of its weights in the cache.

    Two calls follow one another, as kernels do in a server, for how one begins while the last one ends is part of what is measured.
    Before them a buffer larger than any cache is read, as the other layers of a model would do; reading leaves nothing behind
    that must be written back while the next call runs.
    """
    import torch

    module = getattr(torch, device.type)
    flush = _scratch.setdefault(f"flush {device}", torch.zeros(2**26, dtype=torch.int32, device=device))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for place, run in enumerate(runs):
            flush.sum()
            start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
            start.record()
            run()
            run()
            end.record()
            module.synchronize()
            times[place].append(start.elapsed_time(end) / 2e3)
    return [statistics.median(each) for each in times]


def release(device: torch.device) -> None:
    """Give back the memory that timing took."""
    _scratch.pop(f"flush {device}", None)


def known(device: torch.device, key: str) -> dict[str, Any] | None:
    """The answer that is kept for a key, if any."""
    answer = _answers(cache_file(device)).get(key)
    return answer if isinstance(answer, dict) else None


def _fastest(trials: list[Trial], device: torch.device) -> Trial:
    """Time all, then those that came close again."""
    for rounds in ROUNDS:
        if len(trials) == 1:
            break
        times = seconds([trial.run for trial in trials], device, rounds)
        least = min(times)
        order = sorted(range(len(trials)), key=times.__getitem__)
        trials = [trials[place] for place in order if times[place] <= least * CLOSE]
    return trials[0]


def best(device: torch.device, key: str, trials: list[Trial], wanted: Callable[[torch.Tensor], float]) -> dict[str, Any]:
    """Return the name of the fastest right trial, and keep it.

    Args:
        device: where the trials run.
        key: what the answer is for; equal keys share an answer.
        trials: in order of preference.
        wanted: gives the relative error of an output.

    Raises:
        RuntimeError: no trial ran and was right; the last error is in the message.
    """
    answer = known(device, key)
    if answer is not None and any(trial.name == answer for trial in trials):
        return answer
    right: list[Trial] = []
    last = ""
    for trial in trials:
        try:
            error = wanted(trial.run())
        except Exception as exc:  # noqa: BLE001 - compilers and drivers raise anything; the next trial is tried
            last = f"{trial.name}: {type(exc).__name__}: {str(exc)[:200]}"
            continue
        if error <= ALLOWED:
            right.append(trial)
        else:
            last = f"{trial.name}: relative error {error:.2e}"
    if not right:
        raise RuntimeError(f"no configuration is right for {key}; the last one: {last}")
    # Without events there is nothing to time by; the order of preference decides.
    name = right[0].name if device.type == "cpu" else _fastest(right, device).name
    _logger.debug("xpufp8 tiles for %s: %s of %d", key, name, len(trials))
    _keep(cache_file(device), key, name)
    return name
