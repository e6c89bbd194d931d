"""The repairs there are, by name: what each removes and what it costs. Standard library only, for both halves.

A repair's name is one item of ``XPUFP8_APPLY`` (comma separated). ``kernel:fp8_block`` names one thing; ``fake:<ns>::<op>`` and
``cast:<ns>::<op>`` are families with one member an op. The planner reads this to turn findings into names; the plugin reads
it to refuse a name it does not know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

APPLY_VARIABLE = "XPUFP8_APPLY"
"""Environment variable that lists the repairs to make in every vLLM process."""

_OP = r"[A-Za-z_]\w*::[A-Za-z_]\w*(?:\.\w+)?"


class RepairError(RuntimeError):
    """A repair that is unknown, or that cannot be made here; the message says what was looked for."""


@dataclass(frozen=True)
class Repair:
    """One repair, or one family of repairs when ``pattern`` has a part that varies."""

    name: str
    """As in ``XPUFP8_APPLY``; ``fake:<ns>::<op>`` for a family."""
    pattern: str
    """Regular expression that the whole item must match."""
    title: str
    codes: tuple[str, ...]
    """Finding codes that it removes."""
    subject: str
    """Regular expression of what such a finding speaks of: an op (``ns::op``), a table kind, a package."""
    cost: str
    """What the person pays for it; empty when nothing."""
    stage: str = "process"
    """``process``: made by the plugin inside vLLM. ``start``: made by whoever starts the interpreter (files on PYTHONPATH)."""

    def item(self, subject: str) -> str:
        """Return the ``XPUFP8_APPLY`` item for a subject: ``Repair.item("_xpu_C::fp8_gemm")`` → ``fake:_xpu_C::fp8_gemm``.

        Raises:
            RepairError: the repair does not apply to that subject.
        """
        name = self.name.split(":", 1)[0] + ":" + subject if "<" in self.name else self.name
        if not re.fullmatch(self.pattern, name) or not re.fullmatch(self.subject, subject):
            raise RepairError(f"{self.name} does not apply to {subject!r}")
        return name


_SLOW = "weights stay FP8; without a native or Triton kernel they are widened at load (twice their memory) or at each call (slow)"

_REPAIRS: tuple[Repair, ...] = (
    Repair(
        name="fake:<ns>::<op>",
        pattern=rf"fake:{_OP}",
        title="Tell the compiler the output shape, dtype and stride of a custom op",
        codes=("OPS001", "OPS002", "MDL007"),
        subject=_OP,
        cost="",
    ),
    Repair(
        name="fake:all",
        pattern=r"fake:all",
        title="Give every op of the catalogue that lacks a fake its fake",
        codes=("OPS001", "OPS002", "MDL007"),
        subject=_OP,
        cost="",
    ),
    *(
        Repair(
            name=f"kernel:{kind}",
            pattern=rf"kernel:{kind}",
            title=f"Add a kernel to the end of the platform's row of the {kind} table",
            codes=("KRN001", "KRN002"),
            subject=kind,
            cost=_SLOW,
        )
        for kind in ("fp8", "fp8_block", "wfp8a16", "scaled_mm")
    ),
    Repair(
        name="moe:fp8",
        pattern=r"moe:fp8",
        title="Add FP8 expert layers where vLLM's oracle names no backend",
        codes=("KRN003", "MDL002"),
        # Where the oracle names no backend, vLLM goes on until it converts the weights for it.
        subject=r".*Unsupported FP8 MoE backend: NONE.*|moe(?:_fp8)?|fp8",
        cost="without a native or Triton kernel experts run one after another: slow, and not inside a captured graph",
    ),
    Repair(
        name="quant:fp8",
        pattern=r"quant:fp8",
        title="Quantize to FP8 in plain torch where the build lacks vLLM's op",
        codes=("MDL002",),
        subject=r".*scaled_fp8_quant.*|quant(?:_fp8)?|fp8",
        cost="slower loading; slower steps where activations are quantized by the op",
    ),
    Repair(
        name="cast:<ns>::<op>",
        pattern=rf"cast:{_OP}",
        title="Cast a GEMM's output to the dtype that vLLM asked for",
        codes=("DTY001",),
        subject=_OP,
        cost="one pass over the output of each call",
    ),
    Repair(
        name="metadata:vllm",
        pattern=r"metadata:vllm",
        title="Provide the distribution metadata that the vllm command asks for",
        codes=("ENV002",),
        subject=r"vllm.*",
        cost="",
        stage="start",
    ),
)


def known_repairs() -> tuple[Repair, ...]:
    """Return every repair and family of repairs, in the order in which they are made."""
    return _REPAIRS


def find(item: str) -> Repair:
    """Return the repair that an item of ``XPUFP8_APPLY`` names.

    Raises:
        RepairError: no repair has that name; the message lists those there are.
    """
    for repair in _REPAIRS:
        if re.fullmatch(repair.pattern, item):
            return repair
    known = ", ".join(repair.name for repair in _REPAIRS)
    raise RepairError(f"{APPLY_VARIABLE} names {item!r}, which is no repair that this version knows. Known: {known}")


def parse(value: str | None) -> tuple[str, ...]:
    """Split the value of ``XPUFP8_APPLY`` into items, in the order of ``known_repairs`` and each once.

    Raises:
        RepairError: an item is not known.
    """
    items = list(dict.fromkeys(item.strip() for item in (value or "").split(",") if item.strip()))
    order = {repair.name: index for index, repair in enumerate(_REPAIRS)}
    return tuple(sorted(items, key=lambda item: order[find(item).name]))
