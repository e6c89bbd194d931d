"""P2P rules: for recorded machines exactly the settings that the observation calls for, and silence wherever it does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "host"))

from machines import NAMES, Shelf, by_code, findings_of, settings_of

from xpufp8.rules.p2p_common import THRESHOLDS

HOST_MEMORY = {"CCL_TOPO_P2P_ACCESS": "0"}
DIRECT = {"CCL_SEND": "direct", "CCL_RECV": "direct"}
MEETING = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}

TP2 = {
    "root-ports-adl-s": HOST_MEMORY | MEETING,
    "dual-gpu-board": HOST_MEMORY | THRESHOLDS,
    "one-switch-acs": dict(THRESHOLDS),  # Level Zero denies access itself, so oneCCL stages through the host without being told
    "rebar-off": HOST_MEMORY,
    "i915": HOST_MEMORY,
    "one-switch": {},
    "root-ports-zen": {},
    "container-no-by-path": {},
}
PP2 = {
    "root-ports-adl-s": HOST_MEMORY | MEETING | DIRECT,
    "dual-gpu-board": HOST_MEMORY | DIRECT,
    "one-switch-acs": dict(DIRECT),
    "rebar-off": HOST_MEMORY | DIRECT,
    "i915": HOST_MEMORY | DIRECT,
    "one-switch": {},
    "root-ports-zen": {},
    "container-no-by-path": {},
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Context of a recorded machine for a command."""
    return Shelf(tmp_path_factory.mktemp("machines")).context


@pytest.mark.parametrize("name", NAMES)
def test_settings_for_tensor_parallel(asked, name):
    assert settings_of(findings_of(asked(name, "-tp", "2"))) == TP2[name]


@pytest.mark.parametrize("name", NAMES)
def test_settings_for_pipeline_parallel(asked, name):
    assert settings_of(findings_of(asked(name, "--pipeline-parallel-size=2"))) == PP2[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", [(), ("-tp", "1"), ("--tensor-parallel-size=1", "-pp", "1"), ("-dp", "2")])
def test_no_setting_for_one_rank_or_for_plain_replicas(asked, name, arguments):
    findings = findings_of(asked(name, *arguments))
    assert settings_of(findings) == {}
    assert [f for f in findings if f.code.startswith("P2P") and f.code != "P2P007"] == []


@pytest.mark.parametrize(
    "arguments", [("-tp", "2"), ("-tp2",), ("-tp=2",), ("--tensor-parallel-size", "2"), ("--tensor_parallel_size=2",)]
)
def test_every_spelling_of_the_size_counts(asked, arguments):
    assert settings_of(findings_of(asked("dual-gpu-board", *arguments))) == TP2["dual-gpu-board"]


def test_experts_spread_over_replicas_exchange_memory(asked):
    findings = findings_of(asked("dual-gpu-board", "-dp", "2", "--enable-expert-parallel"))
    assert settings_of(findings) == TP2["dual-gpu-board"]


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_are_in_force_are_not_asked_for_again(asked, name):
    """What a plan sets makes its findings go, on every machine; nothing else comes in their place."""
    for sizes, expected in ((("-tp", "2"), TP2), (("-pp", "2"), PP2), (("-tp", "2", "-pp", "2"), None)):
        wanted = settings_of(findings_of(asked(name, *sizes))) if expected is None else expected[name]
        assert settings_of(findings_of(asked(name, *sizes, environment=wanted))) == {}


@pytest.mark.parametrize("name", [name for name in NAMES if TP2[name]])
def test_each_setting_has_a_reason_an_observation_and_a_cost(asked, name):
    for finding in findings_of(asked(name, "-tp", "2", "-pp", "2")):
        assert finding.cause
        assert finding.evidence
        assert all(evidence.observed for evidence in finding.evidence)
        assert all(fix.cost for fix in finding.fixes if fix.kind == "env")


def test_the_report_machine_names_what_it_saw(asked):
    findings = findings_of(asked("root-ports-adl-s", "-tp", "2"))
    finding = by_code(findings, "P2P001")
    seen = " ".join(evidence.observed for evidence in finding.evidence)
    assert (finding.severity, finding.subject) == ("error", "NSB 03:00.0 - 07:00.0")
    assert "cannot be used for peer-to-peer DMA" in seen
    assert "8086:4660" in seen
    assert "no bridge above both" in seen
    assert "15%" in finding.fixes[0].cost
    meeting = by_code(findings, "P2P006")
    assert (meeting.severity, meeting.subject) == ("error", "libfabric")
    assert "never met" in meeting.cause
    older = by_code(findings, "P2P014")
    assert (older.severity, [fix.kind for fix in older.fixes]) == ("info", ["host"] * 3)
    assert "7.0.0-28-generic" in older.cause
    assert "33578" in older.cause
    assert "GuC 70.58.0" in older.cause


def test_settings_that_recipes_contradict_each_other_about_are_never_offered(asked):
    for name in NAMES:
        for sizes in (("-tp", "2"), ("-pp", "2"), ("-tp", "2", "-pp", "2")):
            for finding in findings_of(asked(name, *sizes)):
                offered = " ".join(fix.action for fix in finding.fixes if fix.kind == "env")
                for variable in (
                    "CCL_ENABLE_SYCL_KERNELS",
                    "CCL_ALLREDUCE",
                    "CCL_TOPO_FABRIC",
                    "CCL_ATL_TRANSPORT",
                    "CCL_ZE_IPC_EXCHANGE",
                ):
                    assert variable not in offered


def test_a_container_without_by_path_gets_container_options(asked):
    findings = findings_of(asked("container-no-by-path", "-tp", "2"))
    assert by_code(findings, "P2P005").severity == "error"
    actions = " ".join(fix.action for finding in findings for fix in finding.fixes)
    for option in ("-v /dev/dri/by-path:/dev/dri/by-path", "--cap-add SYS_PTRACE", "--shm-size=1g"):
        assert option in actions
    refused = by_code(findings, "P2P004")
    assert refused.severity == "warning"
    assert "seccomp filter" in refused.cause
