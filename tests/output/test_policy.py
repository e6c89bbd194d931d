"""Policies: strict parsing, expiry, what ignoring does to the exit code and what it can never do."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_reports import recorded, small
from test_formats import CASES, finding, run

from xpufp8.errors import UsageError
from xpufp8.output import Format, renderer
from xpufp8.policy import Ignore, Loaded, Policy, find, judge, load
from xpufp8.report import Finding, ProbeReport, Report, TargetInfo

TODAY = date(2026, 6, 15)
GOOD = 'reason = "known"\nuntil = 2026-12-31\n'


def written(folder: Path, text: str, name: str = "xpufp8.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def ignoring(report: Report, *entries: dict[str, object], fail_on: str | None = None, baseline: Report | None = None) -> Report:
    policy = Policy(ignore=tuple(Ignore.model_validate({"reason": "known", "until": "2026-12-31"} | e) for e in entries))
    earlier = ("b.json", baseline) if baseline else None
    return judge(report, Loaded(policy, "xpufp8.toml"), fail_on=fail_on, baseline=earlier, today=TODAY)  # type: ignore[arg-type]  # sampled


def code(report: Report) -> int:
    assert report.outcome is not None
    return report.outcome.exit_code


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('fail-onn = "error"', "fail-onn: unknown key. Did you mean fail-on?"),
        ("failon = 1\n", "failon: unknown key. Did you mean fail-on?"),
        ("sparkle = 1\n", "sparkle: unknown key. Known: fail-on, baseline, ignore"),
        ('fail-on = "sometimes"', "fail-on: Input should be 'error', 'warning' or 'never'"),
        (f'[[ignore]]\ncode = "KRN001"\nreasn = "x"\n{GOOD}', "ignore 1 reasn: unknown key. Did you mean reason?"),
        ('[[ignore]]\ncode = "KRN001"\nuntil = 2026-12-31', "ignore 1 reason: Field required"),
        ('[[ignore]]\ncode = "KRN001"\nreason = "x"', "ignore 1 until: Field required"),
        ('[[ignore]]\ncode = "KRN001"\nreason = ""\nuntil = 2026-12-31', "ignore 1 reason: String should have at least 1"),
        ('[[ignore]]\ncode = "KRN001"\nreason = "x"\nuntil = "soon"', "ignore 1 until: Input should be a valid date"),
        (f"[[ignore]]\n{GOOD}", "ignore 1: say what it is about: code, op or model."),
        (f'[[ignore]]\ncode = "KRM002"\n{GOOD}', "ignore 1: no rule is called 'KRM002'. Did you mean KRN002?"),
        (f'[[ignore]]\ncode = "KRN001"\n{GOOD}\n[[ignore]]\ncode = "XYZ*"\n{GOOD}', "ignore 2: no rule is called 'XYZ*'."),
        ("ignore = 3", "ignore: Input should be a valid tuple"),
        ("= broken", "not TOML"),
        (f'[ignore]\ncode = "KRN001"\n{GOOD}', "Write [[ignore]], with two brackets"),
        ('[[ignore]]\ncode = "KRN001"\nreason = "  "\nuntil = 2030-01-01\n', "ignore 1 reason"),
        ('[[ignore]]\ncode = "KRN001"\nreason = "x"\nuntil = 0\n', "give a date, such as 2030-12-31"),
        ("\x00", "not TOML"),
    ],
)  # fmt: skip
def test_a_policy_that_is_wrong_is_exit_two_and_says_where(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, text)
    written(tmp_path, renderer(Format.JSON)(CASES["servable"]), "r.json")
    status, out, err = run(capsys, monkeypatch, "render", "r.json")
    assert (status, out) == (2, "")
    assert says in err
    assert "xpufp8.toml" in err


def test_where_a_policy_is_found(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    project = written(tmp_path, "[tool.other]\nx = 1\n", "pyproject.toml")
    assert find(tmp_path) is None
    project.write_text('[tool.xpufp8]\nfail-on = "warning"\n')
    assert find(tmp_path) == project
    assert load(project).policy.fail_on == "warning"
    assert find(tmp_path) == project
    own = written(tmp_path, "")
    assert find(tmp_path) == own
    project.write_text("broken [")
    own.unlink()
    assert find(tmp_path) is None
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "none.toml")


def test_an_ignored_error_no_longer_fails_and_is_still_shown() -> None:
    report = small(verdict="not-servable", findings=[finding()])
    judged = ignoring(report, {"code": "KRN001"})
    assert code(judged) == 0
    assert judged.verdict == "not-servable"
    for chosen in Format:
        assert "known" in renderer(chosen)(judged), chosen


@pytest.mark.parametrize("days", [-400, -1, 0, 1, 400])
def test_an_ignore_holds_through_its_last_day_and_then_says_so(days: int) -> None:
    until = TODAY + timedelta(days=days)
    judged = ignoring(small(verdict="not-servable", findings=[finding()]), {"code": "KRN001", "until": until.isoformat()})
    assert code(judged) == (0 if days >= 0 else 1)
    if days < 0:
        assert f"expired on {until}" in judged.findings[0].note
        assert "its findings count again" in judged.outcome.notes[0]  # type: ignore[union-attr]  # judged
        for chosen in Format:
            assert "expired on" in " ".join(renderer(chosen)(judged).split()), chosen


def test_an_ignore_that_meets_nothing_says_so() -> None:
    judged = ignoring(small(), {"code": "KRN001"})
    assert judged.outcome is not None
    assert "met nothing" in judged.outcome.notes[0]


@pytest.mark.parametrize(
    ("entry", "fits"),
    [
        ({"code": "KRN001"}, True), ({"code": "KRN*"}, True), ({"code": "OPS001"}, False), ({"op": "_xpu_C::fp8_gemm"}, True),
        ({"op": "*fp8_gemm"}, True), ({"op": "fp8_gemm"}, False), ({"op": "vllm/x.py:3"}, True), ({"model": "org/m-8B"}, True),
        ({"model": "m-8B"}, True), ({"model": "m-*"}, True), ({"model": "other"}, False),
        ({"code": "KRN001", "model": "other"}, False), ({"code": "OPS001", "op": "_xpu_C::fp8_gemm"}, False),
        ({"code": "KRN001", "op": "*gemm", "model": "*8B"}, True),
    ],
)  # fmt: skip
def test_all_that_an_ignore_names_must_fit(entry: dict[str, str], fits: bool) -> None:
    where = {"probe": "p", "mode": "static", "observed": "x", "where": "vllm/x.py:3"}
    one = finding(subject="_xpu_C::fp8_gemm (3 layers)", evidence=[where])
    target = TargetInfo(python="p", device="cpu", simulated=False, model="org/m-8B")
    assert code(ignoring(small(verdict="not-servable", findings=[one], target=target), entry)) == (0 if fits else 1)


def test_a_missing_answer_cannot_be_ignored_away() -> None:
    gone = small(
        verdict="unknown",
        probes=[ProbeReport(name="environment", status="ok")],
        findings=[finding("warning", "unknown", "ENV000")],
    )
    assert code(ignoring(gone, {"code": "ENV000"})) == 3
    told = small(verdict="unknown", findings=[finding("error", "unknown")])
    assert code(ignoring(told, {"code": "KRN001"})) == 0
    behind = small(verdict="not-servable", probes=[], findings=[finding()])
    lost = behind.model_copy(update={"probes": [ProbeReport(name="environment", status="crashed")]})
    assert code(ignoring(lost, {"code": "KRN001"})) == 3


def test_typed_threshold_wins_over_the_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, 'fail-on = "warning"\n')
    written(tmp_path, renderer(Format.JSON)(CASES["servable-warning"]), "r.json")
    assert run(capsys, monkeypatch, "render", "r.json")[0] == 1
    assert run(capsys, monkeypatch, "render", "r.json", "--fail-on", "error")[0] == 0
    other = written(tmp_path, "", "other.toml")
    assert run(capsys, monkeypatch, "render", "r.json", "--policy", other)[0] == 0


def test_baseline_lets_known_findings_pass_and_new_ones_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    earlier = recorded("cpu-block-fp8")
    written(tmp_path, renderer(Format.JSON)(earlier), "base.json")
    assert run(capsys, monkeypatch, "render", "base.json")[0] == 1
    status, out, _ = run(capsys, monkeypatch, "render", "base.json", "--baseline", "base.json", "--format", "json")
    assert status == 0
    assert json.loads(out)["outcome"]["baseline"] == "base.json"
    more = earlier.model_copy(update={"findings": [*earlier.findings, finding(subject="new")]})
    written(tmp_path, renderer(Format.JSON)(more), "now.json")
    assert run(capsys, monkeypatch, "render", "now.json", "--baseline", "base.json")[0] == 1
    written(tmp_path, 'baseline = "base.json"\n')
    assert run(capsys, monkeypatch, "render", "base.json")[0] == 0
    for bad in ("none.json", "xpufp8.toml"):
        assert run(capsys, monkeypatch, "render", "now.json", "--baseline", bad)[0] == 2


FIXED = [{"kind": "env", "action": "A=1", "verified": True}]


@pytest.mark.parametrize(
    ("was", "now", "passes"),
    [
        (finding(), finding(), True), (finding("warning"), finding("error"), False), (finding("error"), finding("warning"), True),
        (finding(status="unknown"), finding(), False), (finding(fixes=FIXED), finding(), False),
        (finding(subject="a"), finding(subject="b"), False), (finding(code="OPS001"), finding(), False),
    ],
)  # fmt: skip
def test_a_baseline_excuses_only_what_is_no_worse(was: Finding, now: Finding, passes: bool) -> None:
    verdict = "not-servable" if now.severity == "error" else "servable"
    judged = ignoring(small(verdict=verdict, findings=[now]), fail_on="warning", baseline=small(findings=[was]))
    assert (code(judged) == 0) is passes


@given(st.lists(st.sampled_from(["error", "warning", "info"]), max_size=5), st.sampled_from(["error", "warning", "never"]))
def test_judging_again_forgets_what_was_judged_before(severities: list[str], fail_on: str) -> None:
    findings = [finding(severity, subject=str(at)) for at, severity in enumerate(severities)]
    report = small(verdict="not-servable" if "error" in severities else "servable", findings=findings)
    once = judge(report, None, fail_on=fail_on, baseline=None, today=TODAY)  # type: ignore[arg-type]  # sampled
    ignored = ignoring(once, {"code": "KRN*"}, fail_on=fail_on)
    assert code(ignored) == 0
    assert judge(ignored, None, fail_on=fail_on, baseline=None, today=TODAY) == once  # type: ignore[arg-type]  # sampled


def test_a_saved_judgement_is_kept_where_no_policy_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report of a CI job, downloaded and shown elsewhere, ends as the job did."""
    judged = ignoring(small(verdict="not-servable", findings=[finding(), finding("warning", subject="w")]), {"code": "KRN001"})
    assert code(judged) == 0
    monkeypatch.chdir(tmp_path)
    written(tmp_path, renderer(Format.JSON)(judged), "r.json")
    status, out, _ = run(capsys, monkeypatch, "render", "r.json", "--format", "json")
    assert status == 0
    assert Report.model_validate_json(out) == judged
    assert run(capsys, monkeypatch, "render", "r.json", "--fail-on", "error")[0] == 1, "typed: judged anew, without the policy"


@pytest.mark.parametrize(
    "text", ["tool = 1", 'tool = "xpufp8"', "[tool.other]\nx = 1", "= broken", "a = " + "[" * 3000 + "]" * 3000]
)
def test_a_pyproject_of_somebody_else_is_passed_over(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, text, "pyproject.toml")
    written(tmp_path, renderer(Format.JSON)(CASES["servable-warning"]), "r.json")
    assert run(capsys, monkeypatch, "render", "r.json")[0] == 0


@pytest.mark.parametrize("kind", ["folder", "dangling link"])
def test_a_policy_that_cannot_be_read_is_not_passed_over(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, renderer(Format.JSON)(CASES["servable-warning"]), "r.json")
    place = tmp_path / "xpufp8.toml"
    place.mkdir() if kind == "folder" else place.symlink_to("nowhere")
    code, _, said = run(capsys, monkeypatch, "render", "r.json")
    assert code == 2
    assert "cannot be read" in said
