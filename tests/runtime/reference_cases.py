"""What a test of a fake needs of an op: its real schema, a small true kernel of it in torch, and arguments for a call.

The kernels are written from what the libraries' sources say they compute. They return tensors of their own, except where the real
kernel returns the argument that it filled.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

DATA = Path(__file__).parents[2] / "xpufp8/data/ops"
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One generation of an op with a reference kernel."""

    op: str
    """As in the row of ``fakes.table()``."""
    kernel: Callable[..., Any]
    make: Callable[[int], dict[str, Any]]
    """Arguments by name for a number of tokens (or sequences)."""
    moving: tuple[str, ...]
    """Arguments that come from the caller at each step; the others stay with the layer."""
    schema: str = ""
    """Where the catalogues of the libraries' wheels have none (IPEX's CPU build)."""
    symbolic: bool = True
    """False where a plain number among the arguments changes with the tokens, which makes another graph anyway."""
    aliases: bool = False
    """True where the real kernel returns an argument that it filled."""
    packed: bool = False
    """True where an argument's bits matter and not its value, so that it cannot be widened for ``torch.library.opcheck``."""

    @property
    def key(self) -> str:
        return f"{self.op}:{len(self.make(2))}"


@cache
def _catalogue() -> dict[tuple[str, int], str]:
    """Schemas as the wheels have them, by op and number of arguments, the oldest wheel first."""
    found: dict[tuple[str, int], str] = {}
    for path in sorted(DATA.glob("*.json")):
        for op in json.loads(path.read_text(encoding="utf-8"))["ops"]:
            name, arguments = re.match(r"(\w+)(?:\.\w+)?\((.*)\) *->", op["schema"]).groups()  # type: ignore[union-attr]  # it is one
            found.setdefault((f"{op['namespace']}::{name}", arguments.count(",") + 1), op["schema"])
    return found


def schema_of(case: Case) -> str:
    """The schema under which a library registers the op, without its name: ``(Tensor A, …) -> Tensor``."""
    text = case.schema or _catalogue()[case.op, len(case.make(2))]
    return text[text.index("(") :]


def onednn_output(a: Any, n: int, dtype: Any) -> Any:
    """The oneDNN products' output tensor, by the arithmetic of the C++ function, on real integers."""
    k = a.shape[-1]
    strides = [int(step / k) * n if step % k == 0 else int(step // k * n) for step in a.stride()[:-1]]
    return torch.empty_strided((*a.shape[:-1], n), (*strides, a.stride(-1)), dtype=dtype)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=seeded(seed)).to(dtype)


def integers(low: int, high: int, *shape: int, dtype: Any = torch.int64, seed: int = 0) -> Any:
    return torch.randint(low, high, shape, generator=seeded(seed)).to(dtype)


def cases() -> list[Case]:
    """Every case there is."""
    modules = (importlib.import_module(name) for name in ("reference_gemms", "reference_model_ops", "reference_ipex"))
    return [case for module in modules for case in module.CASES]
