"""Secrets planted in the environment, options, URLs, logs and paths are in no format, however the format encodes them."""

from __future__ import annotations

import html
import json
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest
from made_reports import facts_file

from xpufp8.doctor import Request, conclude
from xpufp8.output import Format, renderer
from xpufp8.policy import Ignore, Loaded, Policy, judge
from xpufp8.report import ProbeReport, Report
from xpufp8.target import Target

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

ENVIRONMENT = "Sp3cial&va<l>%41words"
OPTION = "opt10n-0nly-known-to-me-77"
URL = "b4sic-auth-in-a-url-88"
LOGGED = "hf_LOGGEDlogged1234567890abcd"
BEARER = "eyJhbGciOiJIUzI1NiJ9.c2VjcmV0.abc123"
SECRETS = (ENVIRONMENT, OPTION, URL, LOGGED, BEARER)


def planted() -> Report:
    """A diagnosis with a secret in every kind of place, through the same path as a real one."""
    saved = facts_file()
    probes = [ProbeReport.model_validate(p) for p in saved["probes"]]
    by_name = {p.name: p for p in probes}
    environment = by_name["environment"].facts
    environment["settings"].append({"name": "VLLM_EXTRA", "value": f"x={ENVIRONMENT}"})
    environment["packages"][0]["origin"] = f"https://user:{URL}@index.example/simple"
    environment["problems"].append(f"/home/{ENVIRONMENT}/lib could not be read; HF_TOKEN={LOGGED}")
    lines = [f"GET /v1 Authorization: Bearer {BEARER}", f"non-default args: {{'api_key': ['{OPTION}']}}", f"token {LOGGED}"]
    by_name["model_trace"] = ProbeReport(
        name="model_trace", status="crashed", detail=f"died of SIGSEGV after --api-key {OPTION}", last_lines=lines
    )
    kernel = by_name["kernel_table"].facts
    kernel["problems"].append("nothing secret here")
    target = Target(
        python=f"/opt/{ENVIRONMENT}/bin/python",
        device="sim:arc-pro-b60",
        vllm_args=("--api-key", OPTION, "--served-model-name", "m", "--download-dir", f"s3://key:{URL}@bucket/x"),
        typed=("--api-key", OPTION, "--served-model-name", "m", "--download-dir", f"s3://key:{URL}@bucket/x"),
    )
    report = conclude(target, list(by_name.values()), Request(replan=False), live=False)
    reason = f"see https://me:{URL}@tracker.example/1"
    policy = Policy(ignore=(Ignore.model_validate({"code": "ENV*", "reason": reason, "until": "2030-01-01"}),))
    from datetime import date

    loaded = Loaded(policy, f"/srv/{LOGGED}/xpufp8.toml")
    return judge(report, loaded, fail_on=None, baseline=(f"https://x:{URL}@h/b.json", report), today=date(2026, 1, 1))


def decoded(text: str) -> list[str]:
    """The text as written, and as readers of the formats decode it."""
    found = [text, html.unescape(text), unquote(text), unquote(html.unescape(text)), re.sub(r"\\(.)", r"\1", text)]
    if text.startswith("{"):
        found.append(json.dumps(json.loads(text), ensure_ascii=False))
    return found


@pytest.fixture
def _secret_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_PASSWORD", ENVIRONMENT)


@pytest.mark.usefixtures("_secret_environment")
@pytest.mark.parametrize("chosen", list(Format))
def test_no_format_holds_a_secret(chosen: Format) -> None:
    report = planted()
    for text in decoded(renderer(chosen)(report)):
        assert [secret for secret in SECRETS if secret in text] == []


@pytest.mark.usefixtures("_secret_environment")
def test_the_planted_report_says_where_the_secrets_were() -> None:
    """The test above could pass on a report that lost the places themselves."""
    text = renderer(Format.JSON)(planted())
    for kept in ("--api-key", "index.example", "VLLM_EXTRA", "Authorization: Bearer", "api_key", "bucket/x", "HF_TOKEN"):
        assert kept in text
    assert text.count("<redacted>") >= 8


@pytest.mark.parametrize("chosen", [f.value for f in Format])
def test_explain_writes_no_secret_of_a_log(
    chosen: str, xpufp8: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        f"INFO non-default args: {{'model': 'm', 'api_key': ['{OPTION}'], 'quantization': 'fp8'}}\n"
        f"INFO HF_TOKEN={LOGGED} loading from https://user:{URL}@hub.example/m\n"
        f"Authorization: Bearer {BEARER}\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/vllm/x.py", line 1, in f\n    g()\n'
        f"KeyError: <PlatformEnum.XPU: 4>, --api-key {OPTION}\n"
    )
    done = xpufp8("explain", log, "--format", chosen)
    assert done.returncode in (1, 3)
    for text in decoded(done.stdout):
        assert [secret for secret in (OPTION, URL, LOGGED, BEARER) if secret in text] == []


def test_a_facts_file_holds_no_secret(xpufp8: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """The file that is made to be sent elsewhere: options, a YAML file, config.json, and what an interpreter prints as it dies."""
    model, python, options = tmp_path / "model", tmp_path / "python", tmp_path / "options.yaml"
    model.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "hf_token": LOGGED,
              "_name_or_path": f"https://user:{URL}@hub.example/m", "note": f"made with {ENVIRONMENT}"}  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    options.write_text("api-key: y4ml-key-of-mine-99\nmax-model-len: 128\n")
    python.write_text(f'#!/bin/sh\necho "--api-key {OPTION} and $MY_SERVICE_PASSWORD and y4ml-key-of-mine-99"; exit 3\n')
    python.chmod(0o755)
    command = ["collect", model, "--device", "cpu", "--api-key", OPTION, "--config", options, "--only", "environment"]
    secrets = (*SECRETS, "y4ml-key-of-mine-99")
    for chosen in ([], ["--python", python]):
        done = xpufp8(*command, *chosen, MY_SERVICE_PASSWORD=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        for text in decoded(done.stdout):
            assert [secret for secret in secrets if secret in text] == []
        saved = json.loads(done.stdout)
        assert saved["model"]["config"]["hidden_size"] == 64
        assert saved["model"]["config"]["hf_token"] == "<redacted>"
        assert "128" in saved["vllm_args"]


@pytest.mark.parametrize("command", [["ops"], ["kernels"], ["collect", "--host"]])
def test_what_a_dying_interpreter_prints_is_shown_without_secrets(
    command: list[str], xpufp8: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "died with $MY_SERVICE_PASSWORD and HF_TOKEN={LOGGED}"; exit 3\n')
    python.chmod(0o755)
    done = xpufp8(*command, "--device", "cpu", "--python", python, MY_SERVICE_PASSWORD=ENVIRONMENT)
    said = done.stdout + done.stderr
    assert done.returncode in (2, 3)
    assert "died with <redacted>" in said
    assert not [secret for secret in SECRETS if secret in said]
