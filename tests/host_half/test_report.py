"""Verdict, exit code, redaction and the terminal report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xpufp8.doctor import Request, conclude
from xpufp8.exits import NO_VERDICT, OK, REMAINS
from xpufp8.output import json_report, terminal
from xpufp8.report import Evidence, Finding, Fix, Plan, ProbeReport, Report, TargetInfo, Tool
from xpufp8.target import Target
from xpufp8.verdict import exit_code, judge, needed_for

NEEDED = ("environment", "kernel_table")
OKAY = [ProbeReport(name=n, status="ok") for n in NEEDED]


def finding(severity: Any = "error", status: Any = "fail", *, verified: bool = False, **more: Any) -> Finding:
    fixes = [Fix(kind="runtime", action="kernel:fp8_block", verified=verified)]
    return Finding(code="KRN001", severity=severity, status=status, title="t", cause="c", fixes=fixes, **more)


@pytest.mark.parametrize(
    ("findings", "probes", "verdict"),
    [
        ([], OKAY, "servable"),
        ([finding("warning"), finding("info")], OKAY, "servable"),
        ([finding()], OKAY, "not-servable"),
        ([finding(verified=True)], OKAY, "servable-with-fixes"),
        ([finding(status="unknown")], OKAY, "unknown"),
        ([finding("warning", "unknown")], OKAY, "servable"),
        ([], OKAY[:1], "unknown"),
        ([], [OKAY[0], ProbeReport(name="kernel_table", status="crashed")], "unknown"),
        ([], [OKAY[0], ProbeReport(name="kernel_table", status="timeout")], "unknown"),
        ([], [OKAY[0], ProbeReport(name="kernel_table", status="skipped")], "unknown"),
        ([finding()], [], "not-servable"),
    ],
)
def test_verdicts(findings: list[Finding], probes: list[ProbeReport], verdict: str) -> None:
    assert judge(findings, probes, NEEDED, Plan()) == verdict


@pytest.mark.parametrize(("device", "simulated"), [("cpu", False), ("xpu", False), ("sim:arc-pro-b60", True)])
@pytest.mark.parametrize("status", ["crashed", "timeout", "failed", "skipped", None])
def test_a_model_is_not_servable_while_its_trace_is_missing(device: str, simulated: bool, status: Any) -> None:
    target = TargetInfo(python="p", device=device, simulated=simulated, model="m")
    trace = [] if status is None else [ProbeReport(name="model_trace", status=status)]
    assert judge([], [*OKAY, *trace], needed_for(target), Plan()) == "unknown"
    assert judge([], [*OKAY, ProbeReport(name="model_trace", status="ok")], needed_for(target), Plan()) == "servable"
    assert judge([], OKAY, needed_for(target.model_copy(update={"model": None})), Plan()) == "servable"


@pytest.mark.parametrize(
    ("verdict", "severities", "codes"),
    [
        ("servable", [], {"error": OK, "warning": OK, "never": OK}),
        ("servable", ["warning"], {"error": OK, "warning": REMAINS, "never": OK}),
        ("servable", ["info"], {"error": OK, "warning": OK, "never": OK}),
        ("servable-with-fixes", [], {"error": OK, "warning": OK, "never": OK}),
        ("not-servable", ["error"], {"error": REMAINS, "warning": REMAINS, "never": OK}),
        ("unknown", [], {"error": NO_VERDICT, "warning": NO_VERDICT, "never": NO_VERDICT}),
        ("unknown", ["error"], {"error": NO_VERDICT, "warning": NO_VERDICT, "never": NO_VERDICT}),
    ],
)
def test_exit_codes(verdict: Any, severities: list[str], codes: dict[Any, int]) -> None:
    report = made([finding(s) for s in severities], verdict)
    assert {level: exit_code(report, level) for level in codes} == codes


def made(findings: list[Finding], verdict: Any = "not-servable", **more: Any) -> Report:
    info = TargetInfo(python="p", device="sim:arc-pro-b60", simulated=True, model="M", vllm_args=["-tp", "2"])
    return Report(tool=Tool(version="0.1.0"), verdict=verdict, target=info, findings=findings, **more)


SECRETS = ("hunter2hunter2", "sk-topsecret-000000", "hf_abcdefghijklmnopqrstuvwx", "pa55word")


def test_no_secret_survives_anywhere_in_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    password, api_key, token, url = SECRETS
    monkeypatch.setenv("MY_DB_PASSWORD", password)
    monkeypatch.setenv("HF_TOKEN", token)
    args = ("--api-key", api_key, "--hf-token=" + token, "--download-dir", f"https://me:{url}@host/x")
    printed = [f"connecting with {password}", f"key {api_key}", f"GET https://me:{url}@host/", f"token={token}"]
    probes = [
        ProbeReport(name="environment", status="crashed", detail=f"died with {password} in {api_key}", last_lines=printed),
        ProbeReport(name="kernel_table", status="failed", detail=f"x: {token}", last_lines=printed),
    ]
    target = Target("python", "cpu", vllm_args=args, typed=("M", *args))
    report = conclude(target, probes, Request(), live=False)
    for text in (json_report.render(report), terminal.render(report), report.model_dump_json()):
        assert [secret for secret in SECRETS if secret in text] == []
        assert "--api-key" in text or text.startswith("xpufp8"), "names stay"


def test_the_terminal_report_fits_eighty_columns_and_names_what_to_do() -> None:
    long = "word " * 60
    evidence = [Evidence(probe="kernel_table", mode="simulated", observed=f"{long}{n}", where="f.py:1") for n in range(9)]
    report = made(
        [finding(evidence=evidence, affects=["every linear layer"], subject="fp8_block")],
        plan=Plan(argv=["vllm"], shell="vllm serve M"),
    )
    text = terminal.render(report)
    assert max(map(len, text.splitlines())) <= 80
    at = [text.index(word) for word in ("ERROR KRN001", "why ", "hits ", "seen ", "do ", "vllm serve M")]
    assert at == sorted(at), "what is wrong, what was seen, what to do, in that order"
    assert "simulated: word" in text
    assert "and 3 more (--format json has all)" in text
    assert "simulated XPU" in text


def test_untrusted_text_neither_colours_nor_marks_up_the_terminal() -> None:
    evil = "\x1b[31mred\x1b[0m [bold]x[/bold] [/nonsense] \x1b]0;title\x07 \u202ereversed\x00"
    report = made([finding(subject=evil, evidence=[Evidence(probe="p", mode="live", observed=evil)])])
    text = terminal.render(report)
    assert not set(text) & {"\x1b", "\x00", "\x07", "\u202e"}
    assert "[bold]x[/bold] [/nonsense]" in text


def test_json_carries_everything_and_reads_back() -> None:
    report = made([finding(evidence=[Evidence(probe="p", mode="static", observed="é\x1b")])])
    text = json_report.render(report)
    assert "\x1b" not in text
    assert Report.model_validate(json.loads(text)) == report
    assert Report.model_validate(json.loads(text) | {"a_later_field": 1}) == report
