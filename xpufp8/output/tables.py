"""The op table and the kernel-table matrix as rich tables that fit 80 columns."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from probes.facts import FakeTensorFacts, KernelTableFacts, SelectionFact
from probes.schemes import BY_NAME
from xpufp8.output.text import plain

PLATFORMS = ("XPU", "CPU", "CUDA", "ROCM", "TPU")


KERNEL_LEGEND = (
    "Numbers: kernels in a platform's row; '-': no row. The last column is what vLLM raises for a platform that has no row "
    "or no kernel."
)
OP_LEGEND = (
    "traces: what torch.compile makes of a call. how: fake, meta, composite, or none of them. keys: devices with a kernel here. "
    "An op without a fake matters only to a model that calls it: xpufp8 doctor MODEL says which do."
)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for at, name in enumerate(columns):
        table.add_column(name, overflow="fold", no_wrap=False, style="" if at else "bold")
    return table


def kernel_view(facts: KernelTableFacts, device: str) -> RenderableType:
    """Which platforms have a row in which table, and what the choosers select."""
    head = plain(f"vLLM {facts.vllm or '(version unknown)'} · {facts.layout} · {facts.root}", "dim")
    present = {p for t in facts.tables for p in t.rows}
    platforms = [p for p in PLATFORMS if p in present] + sorted(present - {*PLATFORMS, "*"})
    matrix = _table("table", *platforms, "a missing row")
    for table in facts.tables:
        cells = [Text("all", "dim") if not table.by_platform else _cell(table.rows.get(p)) for p in platforms]
        matrix.add_row(plain(table.kind), *cells, plain(_consequence(table.lookup)))
    parts: list[RenderableType] = [head, Text(), matrix, plain(KERNEL_LEGEND, "dim")]
    if facts.selections:
        parts += [Text(), selection_table(facts.selections, device)]
    if facts.live_error is not None:
        parts += [Text(), plain(f"not asked live: {facts.live_error.type}: {facts.live_error.message}", "yellow")]
    if facts.moe:
        parts += [Text(), _moe_table(facts)]
    return Group(*parts)


def _cell(row: list[str] | None) -> Text:
    if row is None:
        return Text("-", "red")
    return Text(str(len(row)) if row else "empty", "green" if row else "yellow")


def _consequence(lookup: str) -> str:
    return {"index": "KeyError", "get": "ValueError", "iterate": "one list for all"}.get(lookup, "unknown")


DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def selection_table(selections: list[SelectionFact], device: str) -> Table:
    """What vLLM's own choosers answered; dtypes with the same answer share a line."""
    table = _table("scheme", "dtype", f"kernel on {device}")
    grouped: dict[tuple[bool, str, str, str], list[str]] = {}
    for one in selections:
        text, style = _answer(one)
        key = (one.table.startswith("moe"), one.scheme, text, style)
        grouped.setdefault(key, []).append(DTYPE.get(one.activation_dtype, one.activation_dtype))
    for (moe, scheme, text, style), dtypes in sorted(grouped.items(), key=lambda item: item[0][0]):
        name = BY_NAME[scheme].name if scheme in BY_NAME else scheme
        table.add_row(plain(name + (" (MoE)" if moe else "")), " ".join(dict.fromkeys(dtypes)), plain(text, style))
    return table


def _answer(one: SelectionFact) -> tuple[str, str]:
    if one.kernel:
        return one.kernel, "green"
    if one.error is not None and not one.reasons:
        return f"not told: {one.error.type.rsplit('.', 1)[-1]}: {one.error.message}".splitlines()[0], "yellow"
    if not one.reasons:
        return "none: this table has no kernel for the platform", "red"
    first = one.reasons[0].strip()
    more = f" (and {len(one.reasons) - 1} more refusals)" if len(one.reasons) > 1 else ""
    return f"none: {first}{more}", "red"


def _moe_table(facts: KernelTableFacts) -> Table:
    table = _table("MoE oracle", "names for a platform")
    for oracle in facts.moe:
        said = "; ".join(f"{platform}: {', '.join(names)}" for platform, names in sorted(oracle.by_platform.items()))
        table.add_row(plain(oracle.name), plain(said or "nothing platform-specific", "" if said else "dim"))
    return table


def op_view(facts: FakeTensorFacts, *, every: bool) -> RenderableType:
    """One line an op that torch.compile cannot trace (or every op), and a count by namespace."""
    count = Counter(op.namespace for op in facts.ops)
    bad = Counter(op.namespace for op in facts.ops if op.traces == "fail")
    unsure = Counter(op.namespace for op in facts.ops if op.traces == "unknown")
    summary = _table("namespace", "ops", "cannot be traced", "not told")
    for namespace in sorted(count):
        summary.add_row(
            plain(namespace),
            str(count[namespace]),
            Text(str(bad[namespace]), "red" if bad[namespace] else "dim"),
            str(unsure[namespace]),
        )
    shown = [op for op in facts.ops if every or op.traces == "fail"]
    table = _table("op", "traces", "how", "returns", "keys", "seen")
    for op in shown:
        style = {"pass": "green", "fail": "red"}.get(op.traces, "yellow")
        table.add_row(
            plain(f"{op.namespace}::{op.name}"),
            Text(op.traces, style),
            plain(op.tracing),
            "tensor" if op.returns_tensor else "nothing",
            plain(", ".join(op.dispatch_keys)),
            op.mode,
        )
    parts: list[RenderableType] = [
        plain(f"torch {facts.torch or '(not there)'} · device {facts.device}", "dim"),
        Text(),
        summary,
        Text(),
    ]
    for library in facts.libraries:
        if not library.loaded:
            reason = f"{library.error.type.rsplit('.', 1)[-1]}: {library.error.message}" if library.error else "not found"
            parts.append(plain(f"{library.name} did not load: {reason}".splitlines()[0], "yellow"))
    parts.append(table if shown else plain("Every op that was seen can be traced.", "green"))
    if shown:
        parts.append(plain(OP_LEGEND + ("" if every else f" --all shows the other {len(facts.ops) - len(shown)} ops."), "dim"))
    return Group(*parts)
