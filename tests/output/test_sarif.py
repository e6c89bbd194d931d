"""SARIF: the standard's own schema, the shape that code scanning takes, unknown as notifications, places of causes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from made_reports import RECORDED, everything, recorded, small
from test_formats import CASES, finding

from xpufp8.output import sarif
from xpufp8.output.places import COMMAND, command_text
from xpufp8.report import Evidence, Finding, Ignored, Report, TargetInfo

SCHEMA = json.loads((Path(__file__).resolve().parents[1] / "data" / "schemas" / "sarif-2.1.0.json").read_text(encoding="utf-8"))
REPORTS = {name: recorded(name) for name in RECORDED} | CASES | {"everything": everything()}


def written(report: Report) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(sarif.render(report))
    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    run: dict[str, Any] = data["runs"][0]
    return run


@pytest.mark.parametrize("name", REPORTS)
def test_validates_and_has_what_code_scanning_asks_for(name: str) -> None:
    run = written(REPORTS[name])
    rules = run["tool"]["driver"]["rules"]
    assert run["automationDetails"]["id"].endswith("/")
    for rule in rules:
        assert rule["shortDescription"]["text"]
        assert rule["fullDescription"]["text"]
        assert rule["help"]["text"]
        assert rule["properties"]["precision"] in ("very-high", "high", "medium", "low")
        assert rule["properties"]["problem.severity"] in ("error", "warning", "recommendation")
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"].strip()
        location = result["locations"][0]["physicalLocation"]
        assert location["artifactLocation"]["uri"]
        assert location["region"]["startLine"] >= 1
        assert result["partialFingerprints"]["primaryLocationLineHash"]
    prints = [r["partialFingerprints"]["primaryLocationLineHash"] for r in run["results"]]
    assert len(prints) == len(set(prints))


def test_unknown_is_a_notification_and_never_a_result() -> None:
    run = written(CASES["unknown-finding"])
    assert run["results"] == []
    (note,) = run["invocations"][0]["toolConfigurationNotifications"]
    assert note["associatedRule"]["id"] == "KRN001"
    assert run["invocations"][0]["executionSuccessful"] is False
    lost = written(CASES["unknown-probe"])["invocations"][0]["toolExecutionNotifications"]
    assert "environment gave no answer (crashed): SIGSEGV" in lost[0]["message"]["text"]


def test_what_counts_keeps_its_level_and_what_is_repaired_or_ignored_does_not() -> None:
    results = {r["ruleId"]: r for r in written(everything())["results"]}
    assert results["MDL001"]["level"] == "error"
    assert results["KRN002"]["level"] == "note"
    assert results["CFG005"]["level"] == "warning"
    assert results["OPS001"]["suppressions"][0]["justification"] == "ignored (policy, until 2030-01-01): known, fixed upstream"
    assert "suppressions" not in results["MDL001"]


def place(
    where: Evidence | None, subject: str = "", model: str | None = "models/m", args: tuple[str, ...] = ()
) -> dict[str, Any]:
    one = Finding(
        code="CFG005", severity="error", status="fail", title="t", cause="c", subject=subject, evidence=[where] if where else []
    )
    target = TargetInfo(python="p", device="cpu", simulated=False, model=model, vllm_args=list(args))
    location: dict[str, Any] = written(small(findings=[one], target=target))["results"][0]["locations"][0]["physicalLocation"]
    return location


def test_an_option_is_pointed_at_by_its_columns_on_the_command_line() -> None:
    args = ("--kv-cache-dtype", "fp8", "--enforce-eager", "-tp", "2")
    spot = place(Evidence(probe="command line", mode="static", observed="x"), "--enforce-eager", args=args)
    assert spot["artifactLocation"] == {"uri": COMMAND, "index": 0}
    target = TargetInfo(python="p", device="cpu", simulated=False, model="models/m", vllm_args=list(args))
    text = command_text(small(target=target))
    assert text[spot["region"]["startColumn"] - 1 : spot["region"]["endColumn"] - 1] == "--enforce-eager"
    run = written(small(target=target, findings=[finding()]))
    assert run["artifacts"][0]["contents"]["text"] == text + "\n"


@pytest.mark.parametrize(
    ("model", "uri"),
    [
        ("models/m", "models/m/config.json"), ("./models/m/", "models/m/config.json"), ("models/m/config.json", "models/m/config.json"),
        ("/srv/my model", "file:///srv/my%20model/config.json"), ("org/name", "org/name/config.json"),
    ],
)  # fmt: skip
def test_a_cause_in_the_model_points_at_its_config(model: str, uri: str) -> None:
    spot = place(Evidence(probe="config.json", mode="static", observed="x", where="config.json"), model=model)
    assert spot["artifactLocation"]["uri"] == uri


@pytest.mark.parametrize(
    ("where", "uri", "line"),
    [
        ("vllm/platforms/interface.py:1339 in check", "vllm/platforms/interface.py", 1339),
        ("/opt/venv/lib/libtorch.so.2: schema", "file:///opt/venv/lib/libtorch.so.2", 1),
        ("fp8-block; bfloat16; [N, K] 4096x4096", "models/m/config.json", 1),
        ("", "models/m/config.json", 1),
    ],
)
def test_a_cause_in_the_stack_points_at_its_file(where: str, uri: str, line: int) -> None:
    spot = place(Evidence(probe="kernel_table", mode="static", observed="x", where=where))
    assert spot["artifactLocation"]["uri"] == uri
    assert spot["region"]["startLine"] == line


def test_without_a_model_the_command_stands_for_the_question() -> None:
    assert place(None, model=None)["artifactLocation"]["uri"] == COMMAND


def test_two_models_do_not_overwrite_each_other() -> None:
    targets = [TargetInfo(python="p", device=d, simulated=False, model=m) for d in ("cpu", "xpu") for m in ("a", "b")]
    assert len({written(small(target=target))["automationDetails"]["id"] for target in targets}) == 4


def test_an_ignored_unknown_is_only_noted() -> None:
    one = finding(status="unknown").model_copy(update={"ignored": Ignored(by="policy", reason="simulated", until="2030-01-01")})
    (note,) = written(small(findings=[one]))["invocations"][0]["toolConfigurationNotifications"]
    assert note["level"] == "note"
