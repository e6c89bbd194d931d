"""diff: each kind of change by its name, what is worse and what is not, files that cannot be read, other versions."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from made_reports import DATA, RECORDED, everything, facts_file, peers, recorded, small
from markdown_it import MarkdownIt
from pydantic import BaseModel
from test_formats import finding, run

from xpufp8.diff import compare
from xpufp8.diff_facts import NOISE, Change
from xpufp8.doctor import facts_class
from xpufp8.output import Format, renderer
from xpufp8.report import Finding, ProbeReport, Report
from xpufp8.saved import Saved

FIXED = [{"kind": "env", "action": "A=1", "verified": True}]


def with_facts(report: Report, probe: str, facts: dict[str, Any]) -> Report:
    probes = [p for p in report.probes if p.name != probe] + [ProbeReport(name=probe, status="ok", facts=facts)]
    return report.model_copy(update={"probes": probes})


def changes(old: Report, new: Report) -> list[tuple[str, str, str]]:
    return [(c.kind, c.area, c.subject) for c in compare(old, new).changes]


@pytest.mark.parametrize("name", RECORDED)
def test_a_report_does_not_differ_from_itself(name: str) -> None:
    report = recorded(name)
    assert compare(report, report).changes == ()
    assert compare(everything(), everything()).changes == ()


def test_turning_a_comparison_round_swaps_better_and_worse() -> None:
    pairs = [(recorded(a), recorded(b)) for a in RECORDED for b in RECORDED if a != b]
    swap = {"regression": "improvement", "improvement": "regression", "change": "change"}
    for old, new in pairs:
        there = {(c.area, c.subject, c.before): c.kind for c in compare(old, new).changes if c.area not in ("probe", "finding")}
        back = {
            (c.area, c.subject, c.after): swap[c.kind] for c in compare(new, old).changes if c.area not in ("probe", "finding")
        }
        assert there == back


@pytest.mark.parametrize(
    ("was", "now", "kind"),
    [
        (None, finding(), "regression"), (finding(), None, "improvement"), (None, finding("info"), "change"),
        (None, finding("warning"), "regression"), (None, finding(status="unknown"), "change"),
        (finding("warning"), finding("error"), "regression"), (finding(), finding(fixes=FIXED), "improvement"),
        (finding(fixes=FIXED), finding(), "regression"), (finding(status="unknown"), finding(), "change"),
        (finding(), finding(status="unknown"), "change"), (None, finding(fixes=FIXED), "regression"),
    ],
)  # fmt: skip
def test_findings_gained_lost_and_changed(was: Finding | None, now: Finding | None, kind: str) -> None:
    old, new = (small(findings=[f] if f else []) for f in (was, now))
    found = compare(old, new)
    assert [(c.kind, c.area) for c in found.changes] == [(kind, "finding")]
    assert found.regressed is (kind == "regression")


def test_what_one_side_did_not_look_at_is_neither_better_nor_worse() -> None:
    looked = small(findings=[finding()])
    blind = small(probes=[ProbeReport(name="environment", status="ok")])
    for old, new in ((blind, looked), (looked, blind)):
        (change,) = [c for c in compare(old, new).changes if c.area == "finding"]
        assert change.kind == "change"
        assert "not looked at" in (change.before, change.after)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("servable", "not-servable", "regression"), ("servable", "servable-with-fixes", "regression"),
        ("servable", "unknown", "regression"),
        ("not-servable", "servable", "improvement"), ("unknown", "not-servable", "change"), ("not-servable", "unknown", "change"),
        ("unknown", "servable", "change"),
    ],
)  # fmt: skip
def test_verdicts(before: str, after: str, kind: str) -> None:
    assert changes(small(verdict=before), small(verdict=after)) == [(kind, "verdict", "verdict")]


def test_a_probe_that_died_is_worse() -> None:
    new = small(
        probes=[
            ProbeReport(name="environment", status="crashed", detail="SIGSEGV"),
            ProbeReport(name="kernel_table", status="ok"),
        ]
    )
    assert ("regression", "probe", "environment") in changes(small(), new)
    assert ("improvement", "probe", "environment") in changes(new, small())


def test_ops_rows_kernels_and_versions_are_named() -> None:
    old = recorded("sim-block-fp8")
    data = json.loads(old.model_dump_json())
    facts = {p["name"]: p["facts"] for p in data["probes"]}
    ops = facts["fake_tensor"]["ops"]
    good = next(op for op in ops if op["traces"] == "pass")
    good["traces"], good["tracing"] = "fail", "none"
    gone = ops.pop(next(at for at, op in enumerate(ops) if op is not good))
    ops.append({**good, "name": "brand_new"})
    table = next(t for t in facts["kernel_table"]["tables"] if t["rows"].get("XPU"))
    other = next(t for t in facts["kernel_table"]["tables"] if t is not table and t["rows"].get("XPU"))
    del table["rows"]["XPU"]
    other["rows"]["XPU"].append("NewKernel")
    other["rows"]["CUDA"] = []
    chosen = [s for s in facts["kernel_table"]["selections"] if s["kernel"]]
    chosen[0].update(kernel=None, reasons=["no"], error=None)
    chosen[1].update(kernel="OtherKernel")
    facts["model_trace"]["linear"][0]["kernel"] = "SlowKernel"
    facts["model_trace"]["memory"]["weight_bytes"] += 1
    vllm = next(p for p in facts["environment"]["packages"] if p["name"] == "vllm")
    vllm["version"] = "0.33.0"
    found = changes(old, Report.model_validate(data))
    name = f"{good['namespace']}::{good['name']}"
    assert ("regression", "op", name) in found
    assert ("change", "op", f"{gone['namespace']}::{gone['name']}") in found
    assert ("change", "op", f"{good['namespace']}::brand_new") in found
    assert ("regression", "kernel table", f"{table['name']}[XPU]") in found
    assert ("change", "kernel table", f"{other['name']}[XPU]") in found
    assert not [c for c in found if "[CUDA]" in c[2]]
    assert [c[0] for c in found if c[1] == "kernel" and chosen[0]["scheme"] in c[2]].count("regression") == 1
    assert ("change", "model", "weights") in found
    assert ("change", "version", "vllm") in found
    assert any(c[2] == facts["model_trace"]["linear"][0]["pattern"] for c in found)


@pytest.mark.parametrize("probe", ["peer_access", "speed"])
@pytest.mark.parametrize("factor", [1.0, 1 + NOISE * 0.9, 1 / (1 + NOISE * 0.9), 1.5, 1 / 1.5])
def test_speeds_count_only_beyond_noise(probe: str, factor: float) -> None:
    def facts(scale: float) -> dict[str, Any]:
        if probe == "speed":
            timing = {"layer": "qkv", "scheme": "s", "shape": [1, 2, 3], "kernel": "K", "seconds": 1e-4 / scale}
            return {"timings": [timing], "tokens_per_second": {"measured": 10.0 * scale}}
        data = peers(3)
        for pair in data["pairs"]:
            if pair.get("transfer"):
                pair["transfer"]["bytes_per_second"] *= scale
        return data

    found = compare(with_facts(small(), probe, facts(1.0)), with_facts(small(), probe, facts(factor))).changes
    beyond = max(factor, 1 / factor) > 1 + NOISE
    assert bool(found) is beyond
    assert all(c.area == "speed" and c.kind == ("improvement" if factor > 1 else "regression") for c in found)


def test_order_is_stable_whatever_the_order_of_facts() -> None:
    old, new = recorded("cpu-block-fp8"), recorded("sim-block-fp8")
    first = compare(old, new)
    data = json.loads(new.model_dump_json())
    for seed in range(3):
        mixed = copy.deepcopy(data)
        random.Random(seed).shuffle(mixed["probes"])  # noqa: S311 - a reproducible order, no secret
        for probe in mixed["probes"]:
            for name in ("ops", "packages", "tables", "selections"):
                random.Random(seed).shuffle(probe["facts"].get(name, []))  # noqa: S311 - as above
        assert compare(old, Report.model_validate(mixed)).changes == first.changes
    kinds = [c.kind for c in first.changes]
    assert kinds == sorted(kinds, key=["regression", "improvement", "change"].index)


def grown(value: Any, kind: Any) -> Any:
    """A value of this type as a later version might write it: one more field in every object, mappings left alone."""
    if value is None:
        return None
    kinds = [one for one in get_args(kind) if one is not type(None)] if get_origin(kind) in (Union, UnionType) else [kind]
    kind = kinds[0]
    if is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        hints = get_type_hints(kind)
        return {key: grown(inner, hints.get(key)) for key, inner in value.items()} | {"added_later": {"x": [1]}}
    if get_origin(kind) is list:
        return [grown(inner, get_args(kind)[0]) for inner in value]
    if get_origin(kind) is dict:
        return {key: grown(inner, get_args(kind)[1]) for key, inner in value.items()}
    return value


def later(data: dict[str, Any]) -> dict[str, Any]:
    """A report or facts file with a field added in every object, those in facts included."""
    kind = Report if "schema_version" in data else Saved
    probes = [probe | {"facts": grown(probe["facts"], facts_class(probe["name"]))} for probe in data["probes"]]
    data = data | {"probes": probes}
    if kind is Saved:
        return data | {"added_later": 1, "probes": [probe | {"added_later": 1} for probe in probes]}
    written: dict[str, Any] = grown(data, Report)
    return written


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("version", ["1", "2"])
def test_a_report_of_a_later_version_is_compared(
    name: str, version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads((DATA / f"{name}.json").read_bytes())
    (tmp_path / "later.json").write_text(json.dumps(later(data) | {"schema_version": version}))
    code, out, _ = run(capsys, monkeypatch, "diff", DATA / f"{name}.json", tmp_path / "later.json")
    assert (code, out.splitlines()[1]) == (0, "Nothing changed.")


def test_facts_of_a_later_version_are_judged_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "later.json").write_text(json.dumps(later(facts_file())))
    old = run(capsys, monkeypatch, "doctor", "--facts", DATA / "sim-llama.facts.json", "--format", "json")
    new = run(capsys, monkeypatch, "doctor", "--facts", "later.json", "--format", "json")
    assert old[0] == new[0] == 1
    for key in ("verdict", "findings", "plan", "outcome"):
        assert json.loads(old[1])[key] == json.loads(new[1])[key]
    assert run(capsys, monkeypatch, "diff", DATA / "sim-llama.facts.json", "later.json")[0] == 0


@pytest.mark.parametrize("name", RECORDED)
def test_a_report_of_a_later_version_is_judged_again_from_its_facts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = json.loads((DATA / f"{name}.json").read_bytes())
    data["target"]["model"] = None  # a report holds the facts of the installation, not the config.json of a model
    (tmp_path / "earlier.json").write_text(json.dumps(data))
    (tmp_path / "later.json").write_text(json.dumps(later(data)))
    old = run(capsys, monkeypatch, "doctor", "--facts", "earlier.json", "--format", "json")
    new = run(capsys, monkeypatch, "doctor", "--facts", "later.json", "--format", "json")
    assert old[0] == new[0] != 2
    for key in ("verdict", "findings", "plan"):
        assert json.loads(old[1])[key] == json.loads(new[1])[key]


@pytest.mark.parametrize("name", RECORDED)
def test_a_report_about_a_model_is_not_judged_without_it(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, said = run(capsys, monkeypatch, "doctor", "--facts", DATA / f"{name}.json")
    assert (code, out) == (2, "")
    assert f"a report about {recorded(name).target.model}, without the config.json" in said
    assert "xpufp8 collect MODEL" in said


def earlier(value: Any, optional: set[str]) -> Any:
    """The value without fields that have a default."""
    if isinstance(value, dict):
        return {key: earlier(inner, optional) for key, inner in value.items() if key not in optional}
    return [earlier(inner, optional) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", RECORDED)
def test_a_report_of_an_earlier_version_is_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields that this version added (outcome, ignored, note) and facts that it may add are simply absent."""
    data = json.loads((DATA / f"{name}.json").read_bytes())
    old = earlier(
        data, {"outcome", "ignored", "note", "affects", "expected", "last_lines", "flavour_from", "dispatch_keys", "moe"}
    )
    (tmp_path / "old.json").write_text(json.dumps(old))
    monkeypatch.chdir(tmp_path)
    for chosen in Format:
        code, out, err = run(capsys, monkeypatch, "render", "old.json", "--format", chosen.value)
        assert code == run(capsys, monkeypatch, "render", DATA / f"{name}.json", "--format", "json")[0]
        assert out
        assert err == ""
    assert run(capsys, monkeypatch, "diff", "old.json", DATA / f"{name}.json")[0] in (0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", "null", "{}", '{"schema_version": "1"}', '{"facts_version": "1"}',
        '{"schema_version": "9", "verdict": "splendid"}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_file_that_is_neither_is_exit_two(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.json").write_text(text)
    for args in ((tmp_path / "bad.json", DATA / "sim-block-fp8.json"), (DATA / "sim-block-fp8.json", tmp_path / "bad.json")):
        code, out, err = run(capsys, monkeypatch, "diff", *args)
        assert (code, out) == (2, "")
        assert "bad.json" in err
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize("chosen", ["rich", "json", "markdown"])
def test_exit_code_and_regressions_are_the_same_in_every_format(
    chosen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = DATA / "sim-block-fp8.json", tmp_path / "bad.json"
    worse = recorded("sim-block-fp8").model_copy(update={"verdict": "not-servable", "findings": [finding(subject="<b>@x")]})
    bad.write_text(renderer(Format.JSON)(worse))
    code, out, _ = run(capsys, monkeypatch, "diff", good, bad, "--format", chosen)
    assert code == 1
    assert "KRN001" in out
    assert run(capsys, monkeypatch, "diff", bad, good, "--format", chosen)[0] == 0
    if chosen == "json":
        assert json.loads(out)["regressed"] is True
    if chosen == "markdown":
        assert "<b>" not in MarkdownIt().render(out)


def test_a_change_says_what_was_and_what_is() -> None:
    (change,) = compare(small(), small(findings=[finding(subject="s")])).changes
    assert change == Change("finding", "KRN001 t: s", "", "error", "regression")
