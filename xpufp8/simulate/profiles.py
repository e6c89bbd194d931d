"""Device profiles: what a device reports and which answers the kernels' query ops give on it. Data with its sources."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data" / "devices.json"


@dataclass(frozen=True)
class Profile:
    """One device. Memory in bytes, bandwidth in GB/s (decimal)."""

    key: str
    name: str
    generation: str
    architecture: str
    architecture_value: int
    """SYCL architecture value, as Triton's target description wants it."""
    pci_ids: tuple[str, ...]
    memory_bytes: int
    bandwidth_gb_s: float
    xe_cores: int
    compute_units: int
    sub_group_sizes: tuple[int, ...]
    max_work_group_size: int
    traits: dict[str, bool] = field(default_factory=dict)
    queries: dict[str, bool] = field(default_factory=dict)
    """Answers of the kernels' query ops (``is_xe2_arch``…)."""
    sources: tuple[str, ...] = ()
    memory_note: str = ""


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return table


def names() -> list[str]:
    """Keys of all profiles, as written after ``sim:``."""
    return list(_table()["devices"])


def default_name() -> str:
    """Profile meant by ``--device sim`` without a name."""
    return str(_table()["default"])


def find(name: str) -> Profile:
    """Profile by key; ``sim``, ``sim:NAME`` and an empty name are understood too.

    Raises:
        ValueError: no such profile; the message names those there are.
    """
    key = name.removeprefix("sim").removeprefix(":").strip().lower() or default_name()
    row = _table()["devices"].get(key)
    if row is None:
        raise ValueError(f"no device profile {key!r}; there are {', '.join(names())}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    return Profile(key=key, **values)
