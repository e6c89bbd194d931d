"""How much memory widened weights may take: a share of what was free when the first layer asked.

Weights are widened one layer at a time while the KV cache is not allocated yet, so the free memory of the moment says nothing of
what the cache will need. The budget is therefore set once, and each layer is booked against it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHARE = 0.5
"""Part of the free memory that widened weights may take; the rest is for the KV cache and activations."""
BUDGET_VARIABLE = "XPUFP8_WIDEN_BYTES"
"""Bytes that widened weights may take, where a person knows better; 0 forbids widening at load."""

_left: dict[str, float] = {}


def free_host_bytes() -> int:
    """Memory that this process could still get: what the kernel says is available, or less where a control group is smaller."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass
    return max(available, 0)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return free_host_bytes()
    import torch

    return int(getattr(torch, device.type).mem_get_info(device)[0])


def _ranks_sharing(device: torch.device) -> int:
    """Ranks that take from the same memory: all of a host's on a CPU, one on a card of its own."""
    import torch.distributed as dist

    return dist.get_world_size() if device.type == "cpu" and dist.is_available() and dist.is_initialized() else 1


def _budget(device: torch.device) -> float:
    key = str(device)
    if key not in _left:
        typed = os.environ.get(BUDGET_VARIABLE)
        _left[key] = float(typed) if typed is not None else SHARE * _free_bytes(device) / _ranks_sharing(device)
    return _left[key]


def may_take(size: int, device: torch.device) -> bool:
    """True when widened weights may take so many bytes more."""
    return size <= _budget(device)


def take(size: int, device: torch.device) -> None:
    """Book bytes that were taken."""
    if size:
        _left[str(device)] = _budget(device) - size


def reset() -> None:
    """Forget what was booked, so that the next layer sets the budget anew."""
    _left.clear()
