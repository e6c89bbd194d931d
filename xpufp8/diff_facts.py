"""What two diagnoses observed differently: ops, kernel tables, selected kernels, the traced model, speeds, versions.

Facts are read as plain data, so that files of an earlier or a later version compare as far as both have the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from xpufp8.report import Report

Kind = Literal["regression", "improvement", "change"]
Area = Literal["verdict", "finding", "probe", "op", "kernel table", "kernel", "model", "speed", "version"]


@dataclass(frozen=True)
class Change:
    """One difference. ``before`` and ``after`` are empty where the thing was not there."""

    area: Area
    subject: str
    before: str
    after: str
    kind: Kind = "change"


NOISE = 0.15
"""Two timings of the same thing that differ by less than this part are the same: the spread of repeated runs on an idle machine."""

Facts = dict[str, Any]


def facts(report: Report, probe: str) -> Facts | None:
    """A probe's facts, None where it gave no answer."""
    return next((p.facts for p in report.probes if p.name == probe and p.status == "ok"), None)


def changed_facts(old: Report, new: Report) -> Iterator[Change]:
    """Every difference in what the probes saw; a probe that did not answer on both sides is not compared."""
    platform = {"xpu": "XPU", "cpu": "CPU", "cuda": "CUDA"}
    names = {platform.get(r.target.device, "XPU" if r.target.simulated else r.target.device.upper()) for r in (old, new)}
    yield from _versions(old, new)
    compares: dict[str, Callable[[Facts, Facts], Iterator[Change]]] = {
        "fake_tensor": _ops,
        "kernel_table": lambda a, b: _tables(a, b, names),
        "model_trace": _model,
        "peer_access": _copies,
        "speed": _speeds,
    }
    for probe, compare in compares.items():
        before, after = facts(old, probe), facts(new, probe)
        if before is not None and after is not None:
            yield from compare(before, after)


def _items(data: Facts, name: str) -> list[Facts]:
    """The objects of a list field; empty for one that is missing or of another form."""
    found = data.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _pairs(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Names whose values differ, in order, with both values; None for a name that one side lacks."""
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


# -- versions ----------------------------------------------------------------------------------------------------------


def _versions(old: Report, new: Report) -> Iterator[Change]:
    for name, before, after in _pairs(versions(old), versions(new)):
        yield Change("version", name, before or "", after or "")


def versions(report: Report) -> dict[str, str]:
    """Every version that the diagnosis saw: xpufp8, Python, kernel, packages, drivers, firmware."""
    found = {"xpufp8": report.tool.version, "device": report.target.device}
    environment = facts(report, "environment") or {}
    found |= {name: str(environment[name]) for name in ("python", "kernel", "libc") if environment.get(name)}
    for package in _items(environment, "packages"):
        if package.get("location"):
            found[str(package.get("name"))] = str(package.get("version") or "?")
    devices = facts(report, "devices") or {}
    runtime = devices.get("runtime")
    found |= {f"runtime {name}": str(version) for name, version in runtime.items()} if isinstance(runtime, dict) else {}
    for card in _items(devices, "cards"):
        if card.get("guc"):
            found[f"GuC of {card.get('address')}"] = str(card["guc"])
    return found


# -- ops ---------------------------------------------------------------------------------------------------------------


def _ops(before: Facts, after: Facts) -> Iterator[Change]:
    def table(data: Facts) -> dict[str, Facts]:
        return {f"{op.get('namespace')}::{op.get('name')}": op for op in _items(data, "ops")}

    old, new = table(before), table(after)
    for name in sorted({*old, *new}):
        was, now = old.get(name), new.get(name)
        if was is None or now is None:
            yield Change("op", name, _op(was), _op(now))
            continue
        if was.get("traces") != now.get("traces"):
            kind: Kind = "regression" if (was.get("traces"), now.get("traces")) == ("pass", "fail") else "change"
            kind = "improvement" if (was.get("traces"), now.get("traces")) == ("fail", "pass") else kind
            yield Change("op", name, _op(was), _op(now), kind)
        if was.get("schema") != now.get("schema"):
            yield Change("op", f"{name}, its schema", str(was.get("schema")), str(now.get("schema")))


def _op(op: Facts | None) -> str:
    words = {"pass": "can be traced", "fail": "cannot be traced"}
    return "" if op is None else words.get(str(op.get("traces")), "registered; whether it can be traced was not told")


# -- kernels -----------------------------------------------------------------------------------------------------------


def _tables(before: Facts, after: Facts, platforms: set[str]) -> Iterator[Change]:
    def rows(data: Facts) -> dict[str, list[str]]:
        return {
            f"{table.get('name')}[{platform}]": [str(kernel) for kernel in kernels]
            for table in _items(data, "tables")
            for platform, kernels in (table.get("rows") or {}).items()
            if platform in platforms or platform == "*"
        }

    for name, was, now in _pairs(rows(before), rows(after)):
        kind: Kind = "regression" if was and not now else "improvement" if now and not was else "change"
        yield Change("kernel table", name, _row(was), _row(now), kind)
    yield from _selections(before, after)


def _row(kernels: list[str] | None) -> str:
    return "" if kernels is None else ", ".join(kernels) or "empty"


def _selections(before: Facts, after: Facts) -> Iterator[Change]:
    def chosen(data: Facts) -> dict[str, str]:
        found = {}
        for one in _items(data, "selections"):
            shape = "x".join(map(str, one.get("shape") or []))
            name = f"{one.get('scheme')}, {one.get('activation_dtype')}{f', {shape}' if shape else ''}, {one.get('table')}"
            found[name] = _choice(one)
        return found

    old, new = chosen(before), chosen(after)
    for name in sorted({*old} & {*new}):
        if old[name] != new[name]:
            yield Change("kernel", name, old[name], new[name], _choice_kind(old[name], new[name]))


NOBODY = "no kernel"
NOT_TOLD = "not told"


def _choice(one: Facts) -> str:
    if one.get("kernel"):
        return str(one["kernel"])
    return NOT_TOLD if one.get("error") and not one.get("reasons") else NOBODY


def _choice_kind(before: str, after: str) -> Kind:
    if NOT_TOLD in (before, after):
        return "change"
    return "regression" if after == NOBODY else "improvement" if before == NOBODY else "change"


# -- the traced model --------------------------------------------------------------------------------------------------


def _model(before: Facts, after: Facts) -> Iterator[Change]:
    architectures = before.get("architecture"), after.get("architecture")
    if all(architectures) and architectures[0] != architectures[1]:
        yield Change("model", "architecture", str(architectures[0]), str(architectures[1]))
        return
    for name, was, now in _pairs(_parts(before), _parts(after)):
        if was is not None and now is not None:
            yield Change("kernel", name, was, now)
    stages = [{str(s.get("name")): str(s.get("status")) for s in _items(data, "stages")} for data in (before, after)]
    for name, was, now in _pairs(*stages):
        kind: Kind = (
            "regression" if (was, now) == ("done", "failed") else "improvement" if (was, now) == ("failed", "done") else "change"
        )
        yield Change("model", f"stage {name}", was or "", now or "", kind)
    for name, was, now in _pairs(_memory(before), _memory(after)):
        yield Change("model", name, was or "", now or "")


def _parts(data: Facts) -> dict[str, str]:
    """Kernels, backends and methods by part of the model."""
    found = {str(one.get("pattern")): str(one.get("kernel") or one.get("method")) for one in _items(data, "linear")}
    found |= {f"attention {one.get('kind')}": str(one.get("backend")) for one in _items(data, "attention")}
    found |= {f"experts {one.get('method')}": str(one.get("backend")) for one in _items(data, "moe")}
    return found


def _memory(data: Facts) -> dict[str, str]:
    memory = data.get("memory")
    if not isinstance(memory, dict):
        return {}
    units = {"weight_bytes": "weights", "kv_bytes_per_token": "KV cache a token"}
    found = {said: f"{memory[name]:,} bytes" for name, said in units.items() if isinstance(memory.get(name), int)}
    if isinstance(memory.get("fits_max_model_len"), int):
        found["longest sequence that fits"] = f"{memory['fits_max_model_len']:,} tokens"
    return found


# -- speeds ------------------------------------------------------------------------------------------------------------


def _copies(before: Facts, after: Facts) -> Iterator[Change]:
    def rates(data: Facts) -> dict[str, float]:
        pairs = ((p, p.get("transfer") or {}) for p in _items(data, "pairs"))
        return {
            f"copy {p.get('source')} to {p.get('target')}": t["bytes_per_second"] for p, t in pairs if t.get("bytes_per_second")
        }

    yield from _rates(rates(before), rates(after), lambda rate: f"{rate / 1e9:.2f} GB/s", more_is_better=True)


def _speeds(before: Facts, after: Facts) -> Iterator[Change]:
    def times(data: Facts) -> dict[str, float]:
        return {
            f"{one.get('layer')} {one.get('scheme')} {'x'.join(map(str, one.get('shape') or []))}": one["seconds"]
            for one in _items(data, "timings")
            if isinstance(one.get("seconds"), (int, float))
        }

    yield from _rates(times(before), times(after), lambda seconds: f"{seconds * 1e6:.1f} µs", more_is_better=False)
    tokens = [data.get("tokens_per_second") or {} for data in (before, after)]
    was, now = ({"decoding, one sequence": one["measured"]} if one.get("measured") else {} for one in tokens)
    yield from _rates(was, now, lambda rate: f"{rate:.1f} tokens/s", more_is_better=True)


def _rates(
    before: dict[str, float], after: dict[str, float], said: Callable[[float], str], *, more_is_better: bool
) -> Iterator[Change]:
    """Figures that both sides have and that differ beyond noise."""
    for name in sorted({*before} & {*after}):
        was, now = before[name], after[name]
        if was <= 0 or now <= 0 or max(was, now) / min(was, now) <= 1 + NOISE:
            continue
        yield Change("speed", name, said(was), said(now), "improvement" if (now > was) == more_is_better else "regression")
