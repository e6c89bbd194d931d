"""What the HTML report shows of facts, as rows of plain text with a state for the colour.

Facts are read as plain data: a report of an earlier or a later version has fewer or more fields and is shown all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from xpufp8.output.html_topology import drawing
from xpufp8.output.wording import facts_of
from xpufp8.report import Report

PLATFORMS = ("XPU", "CPU", "CUDA", "ROCM", "TPU")
NOT_TOLD = "not told"
REFUSALS = 3
"""Refusals of a selection that are shown; the JSON report has all."""
TRACES = {"pass": "can be traced", "fail": "cannot be traced", "unknown": NOT_TOLD}
MISSING = {"index": "KeyError", "get": "ValueError", "iterate": "one list for all"}


@dataclass(frozen=True)
class Cell:
    """One cell; ``state`` is pass, fail, unknown or nothing."""

    text: str
    state: str = ""


@dataclass(frozen=True)
class Row:
    """One row; ``keys`` are what filters look at."""

    cells: list[Cell]
    keys: dict[str, str] = field(default_factory=dict)


def _row(*cells: str | Cell, **keys: str) -> Row:
    return Row([cell if isinstance(cell, Cell) else Cell(cell) for cell in cells], keys)


def items(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The objects of a list field; empty for one that is missing or of another form."""
    found = data.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def op_view(report: Report) -> dict[str, Any] | None:
    """The op table, or None where the probe gave no answer."""
    rows = []
    for op in items(facts_of(report, "fake_tensor"), "ops"):
        traces = str(op.get("traces", "unknown"))
        rows.append(
            _row(
                f"{op.get('namespace')}::{op.get('name')}",
                Cell(TRACES.get(traces, NOT_TOLD), traces),
                str(op.get("tracing", "")),
                "tensor" if op.get("returns_tensor") else "nothing",
                ", ".join(map(str, op.get("dispatch_keys") or [])),
                str(op.get("mode", "")),
                traces=TRACES.get(traces, NOT_TOLD),
                namespace=str(op.get("namespace", "")),
            )
        )
    if not rows:
        return None
    return {
        "columns": ["op", "torch.compile", "how", "returns", "keys", "seen"],
        "rows": rows,
        "traces": [said for said in TRACES.values() if any(row.keys["traces"] == said for row in rows)],
        "chosen": TRACES["fail"] if any(row.keys["traces"] == TRACES["fail"] for row in rows) else "",
        "namespaces": sorted({row.keys["namespace"] for row in rows}),
    }


def kernel_view(report: Report) -> dict[str, Any] | None:
    """The kernel-table matrix and what vLLM's choosers select, or None where the probe gave no answer."""
    facts = facts_of(report, "kernel_table")
    tables = items(facts, "tables")
    if not tables:
        return None
    present = {platform for table in tables for platform in table.get("rows") or {}} - {"*"}
    platforms = [name for name in PLATFORMS if name in present] + sorted(present - {*PLATFORMS})
    own = "XPU" if report.target.simulated else report.target.device.upper()
    selections = [_selection(one) for one in items(facts, "selections")]
    return {
        "platforms": platforms,
        "platform": own if own in platforms else (platforms[0] if platforms else ""),
        "matrix": [_matrix_row(table, platforms) for table in tables],
        "columns": ["scheme", "activations", "table", "kernel", "refusals"],
        "selections": selections,
        "results": sorted({row.keys["result"] for row in selections}),
        "dtypes": sorted({row.keys["dtype"] for row in selections}),
    }


def _matrix_row(table: dict[str, Any], platforms: list[str]) -> dict[str, Any]:
    rows = table.get("rows") or {}
    cells = []
    for platform in platforms:
        names = rows.get("*") if not table.get("by_platform", True) else rows.get(platform)
        said = "no row" if names is None else str(len(names)) if names else "empty"
        state = "fail" if names is None else "pass" if names else "unknown"
        cells.append({"platform": platform, "names": names or [], "said": said, "state": state})
    return {"kind": table.get("kind"), "cells": cells, "missing": MISSING.get(str(table.get("lookup")), "unknown")}


def _selection(one: dict[str, Any]) -> Row:
    reasons = [str(reason) for reason in one.get("reasons") or []]
    error = one.get("error") or {}
    if one.get("kernel"):
        kernel, result = Cell(str(one["kernel"]), "pass"), "kernel"
    elif error and not reasons:
        kernel, result = Cell(NOT_TOLD, "unknown"), NOT_TOLD
        reasons = [f"{error.get('type')}: {error.get('message')}"]
    else:
        kernel, result = Cell("none", "fail"), "none"
    dtype = str(one.get("activation_dtype", ""))
    return _row(str(one.get("scheme")), dtype, str(one.get("table", "")), kernel, "; ".join(reasons), result=result, dtype=dtype)


def model_view(report: Report) -> dict[str, Any] | None:
    """Layers, their kernels and the memory of one rank, or None where the model was not traced."""
    facts = facts_of(report, "model_trace")
    layers = [
        _row(
            str(one.get("pattern")),
            str(one.get("count")),
            "x".join(map(str, one.get("weight_shape") or [])),
            str(one.get("weight_dtype") or ""),
            str(one.get("method", "")),
            str(one.get("kernel") or ""),
        )
        for one in items(facts, "linear")
    ]
    if not layers:
        return None
    memory: Any = facts.get("memory")
    memory = memory if isinstance(memory, dict) else {}
    said = [
        ("architecture", facts.get("architecture")),
        ("dtype", facts.get("dtype")),
        ("quantization", facts.get("quantization")),
    ]
    for name, title in (("weight_bytes", "weights"), ("device_bytes", "device memory")):
        said.append((title, f"{memory[name] / 2**30:.2f} GiB" if memory.get(name) else None))
    for name, title, unit in (
        ("kv_bytes_per_token", "KV cache a token", "bytes"),
        ("fits_max_model_len", "longest that fits", "tokens"),
    ):
        said.append((title, f"{memory[name]:,} {unit}" if memory.get(name) is not None else None))
    return {
        "facts": [(title, str(value)) for title, value in said if value],
        "columns": ["layers", "count", "weight", "dtype", "method", "kernel"],
        "rows": layers,
    }


def topology_view(report: Report) -> dict[str, Any] | None:
    """The drawing and the matrix of peers, or None where there is nothing to look at."""
    facts = facts_of(report, "peer_access")
    cards = items(facts, "cards")
    if not facts or not facts.get("applies", True):
        return None
    if len(cards) < 2:
        return {"drawing": None, "detail": str(facts.get("detail") or f"{len(cards)} Intel card: there is no pair to look at.")}
    names = {str(card.get("address")): f"{at} {card.get('name') or card.get('device')}" for at, card in enumerate(cards)}
    rows = []
    for pair in items(facts, "pairs"):
        source, target = (names.get(str(pair.get(end)), str(pair.get(end))) for end in ("source", "target"))
        transfer = pair.get("transfer") or {}
        rate = transfer.get("bytes_per_second")
        rows.append(
            _row(
                f"{target} reaches {source}",
                Cell({"pass": "can", "fail": "cannot"}.get(str(pair.get("status")), NOT_TOLD), str(pair.get("status"))),
                f"{pair.get('reason')}: {_reason(str(pair.get('reason')))}",
                str(pair.get("link", "")),
                f"{rate / 1e9:.1f} GB/s" if rate else "",
            )
        )
    return {
        "drawing": drawing(facts),
        "columns": ["cards", "peer access", "reason", "link", "measured"],
        "rows": rows,
        "detail": "",
    }


def _reason(code: str) -> str:
    from probes.pci_tables import REASONS

    found = REASONS.get(code)
    return found[0] if found else ""


def timing_view(report: Report) -> list[dict[str, Any]]:
    """Each probe, its status and the length of its bar in per cent of the longest."""
    longest = max((probe.seconds for probe in report.probes), default=0.0) or 1.0
    return [
        {
            "name": probe.name,
            "status": probe.status,
            "state": "" if probe.status == "ok" else "unknown",
            "detail": probe.detail,
            "seconds": f"{probe.seconds:.1f}",
            "width": f"{100 * probe.seconds / longest:.1f}",
        }
        for probe in report.probes
    ]


def speed_view(report: Report) -> dict[str, Any] | None:
    """Measured times of the model's layers, or None where nothing was measured."""
    rows = []
    for one in items(facts_of(report, "speed"), "timings"):
        seconds, plain = (float(one.get(name) or 0.0) for name in ("seconds", "plain_seconds"))
        rows.append(
            _row(
                str(one.get("layer")),
                str(one.get("scheme")),
                "x".join(map(str, one.get("shape") or [])),
                str(one.get("kernel")),
                f"{seconds * 1e6:.1f} µs",
                f"{plain * 1e6:.1f} µs" if plain else "",
            )
        )
    columns = ["layer", "scheme", "M x N x K", "kernel", "a call", "16-bit weights"]
    return {"columns": columns, "rows": rows} if rows else None
