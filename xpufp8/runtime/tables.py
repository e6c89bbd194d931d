"""vLLM's kernel tables: where each release keeps them, and adding a row's last resort to one.

A kernel is appended to the row of the running platform, so whatever vLLM would have chosen before is still chosen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xpufp8.runtime.catalogue import RepairError

MODULES = (
    "vllm.model_executor.kernels.linear",
    "vllm.model_executor.layers.quantization.kernels.scaled_mm",
)
"""Where the tables stand: since 0.15 or so, and before."""


@dataclass(frozen=True)
class Table:
    """One kernel table of the running vLLM."""

    kind: str
    name: str
    module: Any
    rows: dict[Any, list[type]]
    """Platform to kernel classes, most preferred first: vLLM's own dictionary, not a copy."""


NAMES: dict[str, tuple[str, ...]] = {
    "fp8": ("_POSSIBLE_FP8_KERNELS",),
    "fp8_block": ("_POSSIBLE_FP8_BLOCK_KERNELS",),
    "wfp8a16": ("_POSSIBLE_WFP8A16_KERNELS",),
    "scaled_mm": ("_POSSIBLE_KERNELS",),
}
"""Kind of table to the names it has had. ``scaled_mm`` is the single INT8 table of the releases to 0.14; later releases use the
same name in another module for mixed precision, which is not it."""


def find(kind: str) -> Table:
    """Return the table of a kind.

    Raises:
        RepairError: this vLLM has no such table; the message says where it was looked for.
    """
    if kind not in NAMES:
        raise RepairError(f"kernel:{kind}: no kernel is known for such a table; there are {', '.join(NAMES)}")
    looked = []
    for module_name in MODULES if kind != "scaled_mm" else MODULES[1:]:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            looked.append(f"{module_name} ({error})")
            continue
        for name in NAMES[kind]:
            rows = getattr(module, name, None)
            if isinstance(rows, dict):
                return Table(kind, name, module, rows)
            looked.append(f"{module_name}.{name}")
    raise RepairError(f"kernel:{kind}: this vLLM has no such table; looked for {', '.join(looked)}")


def _factory(kind: str) -> Callable[[], type]:
    from xpufp8.runtime import table_kernels

    return {
        "fp8": table_kernels.scaled_kernel,
        "fp8_block": table_kernels.block_kernel,
        "wfp8a16": table_kernels.w8a16_kernel,
        "scaled_mm": table_kernels.int8_kernel,
    }[kind]


def add_kernel(kind: str) -> str:
    """Append the project's kernel to the running platform's row of a table and say what was done.

    Raises:
        RepairError: there is no such table, or its kernels have another interface than expected.
    """
    from vllm.platforms import current_platform

    table = find(kind)
    kernel = _factory(kind)()
    platform = current_platform._enum
    row = table.rows.setdefault(platform, [])
    before = [known.__name__ for known in row]
    if kernel.__name__ not in before:
        row.append(kernel)
    return f"{kernel.__name__} added to {table.name}[{platform.name}] after {', '.join(before) or 'nothing'}"
