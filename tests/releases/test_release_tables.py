"""Kernel tables of real vLLM releases (``make releases``), from their unpacked wheels; nothing of them is imported but at the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from probes.facts import KernelTableFacts, TableFact
from probes.kernel_table import observe
from probes.protocol import Context
from xpufp8.model import ModelSpec, SchemeUse
from xpufp8.report import Finding
from xpufp8.rules import krn
from xpufp8.rules.base import Case

ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.path.abspath(os.environ["XPUFP8_RELEASES"]) if os.environ.get("XPUFP8_RELEASES") else ""  # noqa: PTH100 - links stay links

pytestmark = [
    pytest.mark.releases,
    pytest.mark.skipif(not FOLDER, reason="XPUFP8_RELEASES names no folder of unpacked releases (tests/releases/fetch.py)"),
]

WITH_XPU = {
    "0.10.2": set(),
    "0.14.1": set(),
    "0.21.0": {"fp8", "wfp8a16", "mixed_precision", "mxfp8"},
    "0.33.0": {"int8", "fp8", "fp8_block", "wfp8a16", "mixed_precision", "mxfp8", "mxfp4"},
}
WITHOUT_XPU = {
    "0.10.2": {"scaled_mm"},
    "0.14.1": {"scaled_mm"},
    "0.21.0": {"fp8_block", "int8", "nvfp4"},
    "0.33.0": {"nvfp4", "mxfp6"},
}
LAYOUT = {
    "0.10.2": "quantization/kernels",
    "0.14.1": "quantization/kernels",
    "0.21.0": "kernels/linear",
    "0.33.0": "kernels/linear",
}
RELEASES = list(WITH_XPU)


@cache
def facts_of(release: str) -> KernelTableFacts:
    return observe(Context(device="xpu", vllm_path=str(Path(FOLDER) / release)))


def tables_of(release: str) -> dict[str, TableFact]:
    return {table.kind: table for table in facts_of(release).tables}


@pytest.mark.parametrize("release", RELEASES)
def test_platforms_of_every_table(release: str) -> None:
    facts = facts_of(release)
    assert (facts.vllm, facts.layout, facts.problems) == (release, LAYOUT[release], [])
    tables = [table for table in facts.tables if table.by_platform]
    assert len({table.kind for table in facts.tables}) == len(facts.tables)
    assert {table.kind for table in tables if "XPU" in table.rows} == WITH_XPU[release]
    assert {table.kind for table in tables if "XPU" not in table.rows} == WITHOUT_XPU[release]
    assert all(table.rows["XPU"] for table in tables if "XPU" in table.rows)
    assert all(not table.conditional for table in facts.tables)


@pytest.mark.parametrize("release", RELEASES)
def test_lines_are_those_of_the_definition_and_of_the_read(release: str) -> None:
    for table in facts_of(release).tables:
        lines = (Path(FOLDER) / release / table.file).read_text().splitlines()
        assert lines[table.line - 1].startswith(table.name)
        assert table.lookup_file == table.file
        read = lines[(table.lookup_line or 0) - 1]
        assert {"index": "[current_platform._enum]", "get": ".get(", "iterate": "in _POSSIBLE_KERNELS:"}[table.lookup] in read


@pytest.mark.parametrize("release", RELEASES)
def test_rows_are_those_that_a_plain_reading_of_the_text_gives(release: str) -> None:
    """A second reading of the same files, by their lines alone: every class of every row, in order."""
    for table in facts_of(release).tables:
        lines = [line.split("#")[0].rstrip() for line in (Path(FOLDER) / release / table.file).read_text().splitlines()]
        first = next(n for n in range(table.line - 1, len(lines)) if lines[n].endswith(("= {", "= [")))
        last = next(n for n in range(first, len(lines)) if lines[n] in {"}", "]"})
        named = re.findall(r"\b\w+Kernel\b", " ".join(lines[first + 1 : last]))
        assert named == [kernel for row in table.rows.values() for kernel in row]


@pytest.mark.parametrize(
    ("release", "kind", "lookup", "line"),
    [
        ("0.10.2", "scaled_mm", "index", 59),
        ("0.14.1", "scaled_mm", "index", 55),
        ("0.21.0", "fp8_block", "index", 355),
        ("0.21.0", "int8", "index", 355),
        ("0.21.0", "mixed_precision", "index", 507),
        ("0.21.0", "nvfp4", "get", 657),
        ("0.33.0", "fp8_block", "get", 722),
    ],
)
def test_how_a_missing_row_strikes(release: str, kind: str, lookup: str, line: int) -> None:
    """Line 355 of 0.21.0 is the one in the public reports of the KeyError."""
    table = tables_of(release)[kind]
    assert (table.lookup, table.lookup_line) == (lookup, line)


def test_releases_that_the_rule_recommends_have_the_row() -> None:
    for (platform, kind), releases in krn.RELEASES_WITH_ROW.items():
        for release in set(releases) & set(RELEASES):
            assert tables_of(release)[kind].rows.get(platform), (platform, kind, release)
        for release in set(RELEASES) - set(releases):
            table = tables_of(release).get(kind)
            assert table is None or platform not in table.rows, f"{release} has the row and the rule does not know"


def test_the_table_in_the_docs() -> None:
    lines = (ROOT / "docs" / "kernel-tables.md").read_text().splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("| table |"))
    releases = [cell.strip() for cell in lines[head].strip("|").split("|")[1:]]
    shown = {}
    for line in lines[head + 2 :]:
        if not line.startswith("|"):
            break
        kind, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        shown |= {(release, kind): cell for release, cell in zip(releases, cells, strict=True) if cell}
    read = {}
    for release in RELEASES:
        for table in facts_of(release).tables:
            row = table.rows.get("XPU")
            read[release, table.kind] = "one list" if not table.by_platform else "-" if row is None else str(len(row))
    assert shown == read


def test_oracles() -> None:
    names = {release: {oracle.name for oracle in facts_of(release).moe} for release in RELEASES}
    assert names["0.10.2"] == set()
    assert names["0.14.1"] == {"fp8", "nvfp4"}
    assert {"fp8", "int8", "int_wna16", "mxfp4", "mxfp8", "nvfp4", "unquantized"} <= names["0.21.0"] & names["0.33.0"]
    fp8 = {release: next(o for o in facts_of(release).moe if o.name == "fp8") for release in RELEASES[1:]}
    assert "XPU" not in fp8["0.14.1"].by_platform
    assert fp8["0.21.0"].by_platform["XPU"] == fp8["0.33.0"].by_platform["XPU"] == ["XPU"]


def block_fp8_findings(facts: KernelTableFacts) -> list[Finding]:
    uses = (SchemeUse("fp8-block", "every linear layer but lm_head"),)
    model = ModelSpec(source="m", folder="m", quant_method="fp8", uses=uses)
    case = Case(device="sim:arc-pro-b60", model=model, facts={"kernel_table": facts})
    return [finding for rule in krn.RULES for finding in rule.check(rule, case)]


def test_the_block_fp8_report_from_the_source_alone() -> None:
    (finding,) = block_fp8_findings(facts_of("0.21.0"))
    assert (finding.code, finding.severity, finding.status) == ("KRN001", "error", "fail")
    assert "KeyError: <PlatformEnum.XPU>" in finding.cause
    assert any(evidence.where.endswith("kernels/linear/__init__.py:355") for evidence in finding.evidence)


@pytest.mark.sim
def test_the_block_fp8_report_from_0_21_0_s_own_chooser(tmp_path: Path) -> None:
    """0.21.0's Python code beside a newer torch, on the simulated XPU: the KeyError of the report, at its line."""
    result = tmp_path / "result.json"
    release = Path(FOLDER) / "0.21.0"
    env = {
        **os.environ, "XPUFP8_RESULT": str(result), "XPUFP8_SIMULATE": "arc-pro-b60",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, release, Path(FOLDER) / "gguf"))),
    }  # fmt: skip
    context = {"device": "sim:arc-pro-b60", "options": {"schemes": ["fp8-block", "fp8-tensor-dynamic"], "moe": False}}
    subprocess.run(
        [sys.executable, "-m", "probes", "kernel_table"], input=json.dumps(context), env=env, cwd=tmp_path, check=True, text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    facts = TypeAdapter(KernelTableFacts).validate_python(json.loads(result.read_text())["facts"])
    assert (facts.vllm, facts.platform, facts.live_error) == ("0.21.0", "XPU", None)
    for answer in facts.selections:
        if answer.scheme == "fp8-tensor-dynamic":
            assert answer.kernel == "XPUFP8ScaledMMLinearKernel"
        else:
            assert answer.error is not None
            assert (answer.error.type, answer.error.message) == ("builtins.KeyError", "<PlatformEnum.XPU: 4>")
            assert answer.error.frames[-1].line == 355
    (finding,) = block_fp8_findings(facts)
    assert finding.code == "KRN001"
    assert "KeyError: <PlatformEnum.XPU: 4>" in finding.cause
    assert {evidence.mode for evidence in finding.evidence} == {"static", "simulated"}
    assert [fix.action for fix in finding.fixes if fix.kind == "runtime"] == ["kernel:fp8_block"]
