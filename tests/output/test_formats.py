"""What holds for every format: the same verdict, codes and exit code, the same text twice, nothing that a terminal obeys."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import unicodedata
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_reports import RECORDED, everything, facts_file, plan, recorded, small

from xpufp8 import cli
from xpufp8.output import MODULES, Format, renderer, wording
from xpufp8.report import Finding, Fix, ProbeReport, Report, TargetInfo
from xpufp8.saved import Saved, diagnose_saved
from xpufp8.verdict import counted, exit_code

if TYPE_CHECKING:
    from pathlib import Path

FORMATS = list(Format)


def finding(severity: str = "error", status: str = "fail", code: str = "KRN001", **more: object) -> Finding:
    return Finding.model_validate({"code": code, "severity": severity, "status": status, "title": "t", "cause": "c"} | more)


FIXED = {"fixes": [Fix(kind="env", action="A=1", verified=True)]}
CASES: dict[str, Report] = {
    "servable": small(),
    "servable-info": small(findings=[finding("info")]),
    "servable-warning": small(findings=[finding("warning")]),
    "with-fixes": small(verdict="servable-with-fixes", findings=[finding(**FIXED)], plan=plan()),
    "not-servable": small(verdict="not-servable", findings=[finding(), finding("warning", code="ENV009")]),
    "unknown-probe": small(verdict="unknown", probes=[ProbeReport(name="environment", status="crashed", detail="SIGSEGV")]),
    "unknown-finding": small(verdict="unknown", findings=[finding(status="unknown")]),
}
EXPECTED = {
    "servable": {"error": 0, "warning": 0, "never": 0},
    "servable-info": {"error": 0, "warning": 0, "never": 0},
    "servable-warning": {"error": 0, "warning": 1, "never": 0},
    "with-fixes": {"error": 0, "warning": 0, "never": 0},
    "not-servable": {"error": 1, "warning": 1, "never": 0},
    "unknown-probe": {"error": 3, "warning": 3, "never": 3},
    "unknown-finding": {"error": 3, "warning": 3, "never": 3},
}


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: object) -> tuple[int, str, str]:
    """The command line in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["xpufp8", *map(str, args)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out = capsys.readouterr()
    return int(end.value.code or 0), out.out, out.err


@pytest.mark.parametrize("fail_on", ["error", "warning", "never"])
@pytest.mark.parametrize("case", CASES)
def test_exit_code_is_the_same_in_every_format(
    case: str, fail_on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "report.json"
    path.write_text(renderer(Format.JSON)(CASES[case]))
    codes = {}
    for chosen in FORMATS:
        codes[chosen], out, err = run(capsys, monkeypatch, "render", path, "--format", chosen.value, "--fail-on", fail_on)
        assert out.strip(), chosen
        assert err == ""
    assert set(codes.values()) == {EXPECTED[case][fail_on]}


def verdict_and_codes(chosen: Format, text: str) -> tuple[str | None, set[str]]:
    """What a reader of the format learns."""
    codes = set(re.findall(r"\b(?:ENV|DEV|OPS|KRN|DTY|NUM|CMP|MDL|MEM|P2P|PRF|CFG)\d{3}\b", text))
    if chosen is Format.JSON:
        return json.loads(text)["verdict"], codes
    if chosen is Format.SARIF:
        run_ = json.loads(text)["runs"][0]
        named = {r["ruleId"] for r in run_["results"]}
        named |= {n["associatedRule"]["id"] for n in run_["invocations"][0]["toolConfigurationNotifications"]}
        return run_["properties"]["verdict"], named
    words = {"will not be served here": "not-servable", "as asked": "servable", "with the plan below": "servable-with-fixes"}
    plain = " ".join(text.split())
    return next(
        (verdict for said, verdict in words.items() if said in plain), "unknown" if "No verdict" in plain else None
    ), codes


@pytest.mark.parametrize("chosen", FORMATS)
@pytest.mark.parametrize("name", [*RECORDED, "everything"])
def test_every_format_names_the_verdict_and_every_code(chosen: Format, name: str) -> None:
    report = everything() if name == "everything" else recorded(name)
    verdict, codes = verdict_and_codes(chosen, renderer(chosen)(report))
    assert verdict == report.verdict
    assert {f.code for f in report.findings} <= codes


def test_every_format_has_a_module_and_a_renderer() -> None:
    assert set(MODULES) == set(Format)
    for chosen in Format:
        assert renderer(chosen)(small()).strip()


@pytest.mark.parametrize("chosen", FORMATS)
def test_nothing_that_a_terminal_obeys(chosen: Format) -> None:
    text = renderer(chosen)(everything())
    bad = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t"}
    assert not bad


def test_the_same_facts_give_the_same_report_in_any_order_of_probes() -> None:
    saved = Saved.model_validate(facts_file())
    first = diagnose_saved(saved)
    assert first.findings, "a fixture without findings shows nothing"
    for seed in range(5):
        probes = list(saved.probes)
        random.Random(seed).shuffle(probes)  # noqa: S311 - a reproducible order, no secret
        again = diagnose_saved(saved.model_copy(update={"probes": probes}))
        assert again.findings == first.findings
        assert (again.verdict, again.plan) == (first.verdict, first.plan)
        same = again.model_copy(update={"probes": first.probes})
        for chosen in FORMATS:
            assert renderer(chosen)(same) == renderer(chosen)(first)


made = st.builds(
    lambda severity, status, code, subject, fixed: finding(severity, status, code, subject=subject, **(FIXED if fixed else {})),
    st.sampled_from(["error", "warning", "info"]),
    st.sampled_from(["fail", "unknown"]),
    st.sampled_from(["KRN001", "ENV009", "CFG005", "OPS001"]),
    st.text(max_size=20),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(findings=st.lists(made, max_size=12), fail_on=st.sampled_from(["error", "warning", "never"]))
def test_grouping_keeps_every_finding_and_its_order(findings: list[Finding], fail_on: str) -> None:
    report = small(findings=findings, outcome={"exit_code": 0, "fail_on": fail_on})
    entries = wording.entries(report)
    assert sorted(map(id, (e.finding for e in entries))) == sorted(map(id, report.findings))
    assert [id(e.finding) for e in entries if e.state == "failing"] == [id(f) for f in counted(report, fail_on)]  # type: ignore[arg-type]  # sampled
    for state in wording.HEADINGS:
        group = [e.finding for e in entries if e.state == state]
        assert group == [f for f in report.findings if any(f is g for g in group)]
        if state == "unknown":
            assert all(f.status == "unknown" for f in group)


@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=60), chosen=st.sampled_from([f for f in FORMATS if f is not Format.HTML]))
def test_any_text_can_be_written(text: str, chosen: Format) -> None:
    report = small(
        findings=[finding(subject=text, cause=text or "x")],
        target=TargetInfo(python=text, device="cpu", simulated=False, model=text),
    )
    assert renderer(chosen)(report).encode("utf-8")


class Tags(HTMLParser):
    """Counts elements and collects text."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0
        self.events: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.events += [name for name, _ in attrs if name.startswith("on")]


@settings(max_examples=25, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("<>\"'&/scriptonload= {}%-!`"), max_size=60))
def test_html_never_lets_text_become_markup(text: str) -> None:
    target = TargetInfo(python="p", device=text or "cpu", simulated=False, model=text or "m", vllm_args=[text])
    page = renderer(Format.HTML)(small(findings=[finding(subject=text, cause=text or "x")], target=target))
    tags = Tags()
    tags.feed(page)
    assert tags.scripts == 1
    assert tags.events == []


def test_help_and_import_stay_light() -> None:
    code = "import sys, xpufp8.cli; print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & {
        "pydantic",
        "jinja2",
        "junitparser",
        "xpufp8.policy",
        "xpufp8.diff",
        "xpufp8.rules",
        "xpufp8.output.html",
        "tomllib",
    }


def test_the_job_summary_is_written_beside_the_annotations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (tmp_path / "report.json").write_text(renderer(Format.JSON)(CASES["not-servable"]))
    for _ in range(2):
        code, out, _err = run(capsys, monkeypatch, "render", "report.json", "--format", "github")
        assert code == 1
        assert out.startswith("::error ")
    assert (tmp_path / "summary.md").read_text().count("### ❌ xpufp8") == 2


@pytest.mark.parametrize("command", [["ops"], ["kernels"], ["serve", "m", "--dry-run"], ["diff", "a", "b"]])
def test_formats_of_reports_are_refused_where_there_is_no_report(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(capsys, monkeypatch, *command, "--format", "sarif")
    assert (code, out) == (2, "")
    assert "--format sarif" in err


def test_exit_code_of_a_report_says_the_same_as_its_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, report in CASES.items():
        (tmp_path / "r.json").write_text(renderer(Format.JSON)(report))
        code, out, _ = run(capsys, monkeypatch, "render", "r.json", "--format", "json", "--fail-on", "warning")
        assert json.loads(out)["outcome"]["exit_code"] == code == exit_code(report, "warning"), name


LOGS = {
    "cause": 'Traceback (most recent call last):\n  File "/x/vllm/a.py", line 1, in f\n    x\nKeyError: <PlatformEnum.XPU: 4>\n',
    "unknown": 'Traceback (most recent call last):\n  File "/x/b.py", line 1, in f\n    x\nZorkError: nobody has seen this\n',
    "nothing": "INFO: Application startup complete.\n",
}


@pytest.mark.parametrize("name", LOGS)
def test_explain_ends_alike_in_every_format_and_junit_agrees(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "server.log"
    log.write_text(LOGS[name])
    ends = {chosen: run(capsys, monkeypatch, "explain", log, "--format", chosen.value) for chosen in FORMATS}
    codes = {code for code, _, _ in ends.values()}
    assert len(codes) == 1
    assert ("<failure" in ends[Format.JUNIT][1] or "<error" in ends[Format.JUNIT][1]) is (codes != {0})
