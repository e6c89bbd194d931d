"""The GitHub Action and the GitLab template: by the schemas of their makers, and run as those runners run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from junitparser import JUnitXml
from shown import ROOT

ACTION = ROOT / "action.yml"
GITLAB = ROOT / "ci-templates" / "gitlab.yml"
SCRIPT = ROOT / "ci-templates" / "check.sh"
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(("schema", "path"), [("vendor.github-actions", ACTION), ("vendor.gitlab-ci", GITLAB)])
def test_templates_are_what_their_systems_take(schema: str, path: Path) -> None:
    words = [BIN / "check-jsonschema", "--builtin-schema", schema, path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_that_is_typed_in_a_workflow_is_read_as_shell() -> None:
    """Inputs reach the script as variables; an expression inside ``run`` would paste them into the shell's text."""
    for step in yaml.safe_load(ACTION.read_text(encoding="utf-8"))["runs"]["steps"]:
        assert "${{" not in step["run"]


def test_every_input_reaches_the_script_and_every_output_comes_from_it() -> None:
    action = yaml.safe_load(ACTION.read_text(encoding="utf-8"))
    step = next(step for step in action["runs"]["steps"] if step.get("id") == "doctor")
    script = SCRIPT.read_text(encoding="utf-8")
    for name in action["inputs"]:
        (variable,) = [key for key, value in step["env"].items() if f"inputs.{name} " in value]
        assert variable in script
    for name in action["outputs"]:
        assert f'echo "{name}=' in script


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    tiny = [sys.executable, ROOT / "scripts" / "tiny_models.py", "llama-fp8-block", tmp_path / "my model", "--no-weights"]
    subprocess.run(tiny, check=True)
    return tmp_path


def run(workspace: Path, script: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GITHUB_", "CI_"))}
    environment |= {"XPUFP8": str(BIN / "xpufp8"), "XPUFP8_CI_PYTHON": sys.executable, "XPUFP8_CI_DEVICE": "cpu"} | settings
    environment["PATH"] = f"{environment['PATH']}{os.pathsep}{BIN}"
    return subprocess.run(script, cwd=workspace, env=environment, capture_output=True, text=True, check=False)


def report(workspace: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((workspace / "xpufp8-report" / "report.json").read_bytes())
    return data


def test_the_action_writes_every_report_and_ends_as_the_diagnosis(workspace: Path) -> None:
    """One probe alone gives no verdict: exit code 3, with all reports there."""
    done = run(
        workspace, ["bash", str(SCRIPT)], GITHUB_ACTIONS="true", GITHUB_OUTPUT="out", GITHUB_STEP_SUMMARY="summary.md",
        XPUFP8_CI_MODEL="my model", XPUFP8_CI_ARGS="--only model_config --served-model-name 'a b' '$(touch pwned)'",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert report(workspace)["target"]["vllm_args"] == ["--served-model-name", "a b", "$(touch pwned)"]
    assert not (workspace / "pwned").exists()
    outputs = dict(line.split("=", 1) for line in (workspace / "out").read_text().splitlines())
    assert (outputs["verdict"], outputs["exit-code"]) == ("unknown", "3")
    assert json.loads((workspace / outputs["sarif"]).read_text())["version"] == "2.1.0"
    folder = workspace / outputs["report"]
    assert JUnitXml.fromfile(str(folder / "report.junit.xml")).errors == 1
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert "### ❔ xpufp8" in (workspace / "summary.md").read_text()
    assert done.stdout.splitlines()[-1].startswith("::error title=xpufp8%3A unknown::")


def test_wrong_usage_ends_with_two_and_says_so(workspace: Path) -> None:
    done = run(workspace, ["bash", str(SCRIPT)], XPUFP8_CI_MODEL="nowhere", GITHUB_OUTPUT="out")
    assert done.returncode == 2
    assert "no such folder" in done.stderr
    assert "exit-code=2" in (workspace / "out").read_text()


def test_the_policy_and_the_baseline_of_the_settings_are_taken(workspace: Path) -> None:
    (workspace / "p.toml").write_text('fail-on = "never"\n')
    settings = {"XPUFP8_CI_ARGS": "--only model_config", "XPUFP8_CI_POLICY": "p.toml"}
    assert run(workspace, ["bash", str(SCRIPT)], **settings).returncode == 3
    assert report(workspace)["outcome"]["policy"] == "p.toml"
    assert report(workspace)["outcome"]["fail_on"] == "never"
    (workspace / "xpufp8-report" / "report.json").rename(workspace / "b.json")
    settings = {"XPUFP8_CI_ARGS": "--only model_config", "XPUFP8_CI_BASELINE": "b.json", "XPUFP8_CI_FAIL_ON": "warning"}
    assert run(workspace, ["bash", str(SCRIPT)], **settings).returncode == 3
    assert report(workspace)["outcome"]["baseline"] == "b.json"
    assert report(workspace)["outcome"]["fail_on"] == "warning"


def test_the_gitlab_job_writes_its_reports_and_ends_as_the_diagnosis(workspace: Path) -> None:
    job = yaml.safe_load(GITLAB.read_text(encoding="utf-8"))[".xpufp8"]
    script = "set -eu\n" + "\n".join(job["script"])
    settings = job["variables"] | {"XPUFP8_CI_MODEL": "my model", "XPUFP8_CI_PYTHON": sys.executable, "XPUFP8_CI_DEVICE": "cpu"}
    settings["XPUFP8_CI_ARGS"] = "--only model_config --served-model-name 'a b'"
    done = run(
        workspace,
        ["sh", "-c", script],
        **job["variables"] | settings | {"XPUFP8_CI_PYTHON": sys.executable, "XPUFP8_CI_DEVICE": "cpu"},
    )
    assert done.returncode == 3, done.stderr
    assert report(workspace)["target"]["vllm_args"] == ["--served-model-name", "a b"]
    assert JUnitXml.fromfile(str(workspace / job["artifacts"]["reports"]["junit"])).errors == 1
    assert job["artifacts"]["paths"] == ["xpufp8-report/"] == [job["variables"]["XPUFP8_CI_OUTPUT"] + "/"]
