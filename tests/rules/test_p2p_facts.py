"""P2P rules, one observation changed at a time: each answers its own question and no other."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "host"))

from machines import Shelf, by_code, codes, facts_of, findings_of, judged, settings_of

from probes.host_facts import (
    CheckFact,
    CollectiveFact,
    CollectiveStepFact,
    HostIpcFacts,
    InterfaceFact,
    LevelZeroDriverFact,
    LevelZeroFact,
    ProviderFact,
    TransferFact,
)
from probes.protocol import Context
from xpufp8.rules import Case
from xpufp8.rules.p2p_common import THRESHOLDS, oneccl_version, runtime_build
from xpufp8.rules.p2p_host import shm_needed
from xpufp8.rules.ranks import both_ways, ranks, used_cards

MIB = 1 << 20
HOST_MEMORY = {"CCL_TOPO_P2P_ACCESS": "0"}
DIRECT = {"CCL_SEND": "direct", "CCL_RECV": "direct"}
MEETING = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Context of a recorded machine for a command."""
    return Shelf(tmp_path_factory.mktemp("machines")).context


# -- facts changed one at a time -----------------------------------------------------------------------------------------


@pytest.fixture
def switch(asked):
    """Facts of two cards below one switch, and a way to judge them changed."""
    facts = facts_of(asked("one-switch", "-tp", "2"))

    def change(*arguments: str, device="xpu", pairs=None, **parts):
        new = {name: replace(value, **parts.get(name, {})) for name, value in facts.items()}
        if pairs is not None:
            peers = new["peer_access"]
            new["peer_access"] = replace(peers, pairs=[replace(pair, **pairs) for pair in peers.pairs])
        return judged(new, *(arguments or ("-tp", "2")), device=device)

    return change


def transfer(stage: str, result: str, status: str = "fail") -> TransferFact:
    return TransferFact(0, 1, "pidfd", stage, status, result)


INVALID = "ZE_RESULT_ERROR_INVALID_ARGUMENT"


def test_a_refused_handle_between_cards_that_could_reach_each_other(switch):
    pairs = {"status": "fail", "reason": "IPC", "can_access": "pass", "transfer": transfer("open", INVALID)}
    finding = by_code(switch(pairs=pairs), "P2P002")
    assert INVALID in finding.cause
    assert [fix.kind for fix in finding.fixes][:2] == ["env", "host"]
    assert "not on another" in finding.fixes[0].cost
    # With the variable in force no setting is left, which is said, and what works is offered.
    left = by_code(switch(pairs=pairs, host_ipc={"settings": HOST_MEMORY}, peer_access={"settings": HOST_MEMORY}), "P2P002")
    assert "no other setting is known" in left.cause
    assert {fix.kind for fix in left.fixes} == {"host"}
    offered = " ".join(fix.action for fix in left.fixes)
    assert "pipeline" in offered
    assert "one card" in offered


def test_old_kernel_and_runtime_are_named_with_a_refused_handle(switch):
    pairs = {"status": "fail", "reason": "IPC", "can_access": "pass", "transfer": transfer("open", INVALID)}
    old = {"kernel": "6.17.0-5-generic", "level_zero": LevelZeroFact("answered", drivers=[LevelZeroDriverFact(1, 33578)])}
    offered = [fix.action for fix in by_code(switch(pairs=pairs, devices=old), "P2P002").fixes]
    assert "Install Linux 7.1 or newer" in offered
    assert any(action.startswith("Install compute-runtime 26.14") for action in offered)


@pytest.mark.parametrize(
    ("reason", "stage", "result"), [("BAD", "check", "ZE_RESULT_SUCCESS"), ("DIE", "copy", "ZE_RESULT_ERROR_DEVICE_LOST")]
)
def test_wrong_or_deadly_copies(switch, reason, stage, result):
    pairs = {"status": "fail", "reason": reason, "can_access": "pass", "transfer": transfer(stage, result)}
    finding = by_code(switch(pairs=pairs), "P2P003")
    assert "No setting is known" in finding.cause
    assert finding.fixes[0].action == "CCL_TOPO_P2P_ACCESS=0"
    assert any("disable_acs_redir" in fix.action for fix in finding.fixes)


def test_proven_ranks_end_every_question(asked):
    facts = facts_of(asked("root-ports-adl-s", "-tp", "2", "-pp", "2"))
    proven = CollectiveFact("pass", "xccl", "done", [CollectiveStepFact("all_reduce", 4, "pass")])
    facts["host_ipc"] = replace(facts["host_ipc"], collective=proven)
    assert [f for f in judged(facts, "-tp", "2", "-pp", "2") if f.code.startswith("P2P")] == []


def steps(*states: str) -> list[CollectiveStepFact]:
    return [CollectiveStepFact("all_reduce", size, state) for size, state in zip((4, MIB, 32 * MIB), states, strict=False)]


def test_a_large_reduce_that_fails_after_a_small_one_calls_for_the_thresholds(switch):
    run = CollectiveFact("fail", "xccl", "run", steps("pass", "pass", "fail"), timed_out=True)
    findings = switch(host_ipc={"collective": run})
    assert settings_of(findings) == THRESHOLDS
    assert "P2P009" not in codes(findings)
    # Once they are set and it still fails, nothing is left, which is said.
    left = by_code(switch(host_ipc={"collective": run, "settings": dict(THRESHOLDS)}), "P2P009")
    assert settings_of([left]) == {}
    assert "Every setting that is known to help is in force already" in left.cause
    assert any("pipeline" in fix.action for fix in left.fixes)


def test_the_thresholds_are_not_offered_for_an_older_or_unknown_oneccl(asked):
    facts = facts_of(asked("dual-gpu-board", "-tp", "2"))
    for version, expected in (("2021.15.7", False), (None, False), ("2021.17.0", True), ("2022.1.1", True)):
        facts["host_ipc"] = replace(facts["host_ipc"], oneccl=version)
        assert ("P2P010" in codes(judged(facts, "-tp", "2"))) is expected


def test_pipeline_alone_needs_no_thresholds(asked):
    assert "P2P010" not in codes(findings_of(asked("dual-gpu-board", "-pp", "2")))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (CollectiveFact("fail", "xccl", "init", error=f"zeMemOpenIpcHandle, code: {INVALID}"), HOST_MEMORY),
        (
            CollectiveFact("fail", "xccl", "run", [*steps("pass", "pass", "pass"), CollectiveStepFact("send_recv", MIB, "fail")]),
            DIRECT,
        ),
        (
            CollectiveFact("fail", "xccl", "init", error="CCL_ERROR| atl_ofi_helper.cpp fi_getinfo error: ret -61, providers 0"),
            MEETING,
        ),
        (CollectiveFact("fail", "xccl", "init", error="EXCEPTION: opendir failed: could not open device directory"), {}),
        (CollectiveFact("fail", "xccl", "init", error="pidfd_getfd failed: errno: Operation not permitted"), {}),
    ],
)
def test_bare_ranks_that_fail_get_the_setting_of_their_stage(switch, run, expected):
    finding = by_code(switch("-tp", "2", "-pp", "2", host_ipc={"collective": run}), "P2P009")
    assert settings_of([finding]) == expected
    assert finding.fixes


def test_bare_ranks_on_a_cpu_that_fail_are_told_without_oneccl(switch):
    run = CollectiveFact("fail", "gloo", "import", timed_out=True)
    findings = switch(device="cpu", host_ipc={"collective": run})
    assert codes(findings) == ["P2P009"]
    assert [fix.kind for fix in findings[0].fixes] == ["host"]


def test_ranks_that_hang_before_they_meet_on_bare_metal(switch):
    run = CollectiveFact("fail", "xccl", "import", timed_out=True)
    assert settings_of(switch(host_ipc={"collective": run})) == MEETING
    other = switch(host_ipc={"collective": run, "settings": {"CCL_ATL_TRANSPORT": "mpi"}})
    assert "P2P006" not in codes(other)
    assert "P2P009" in codes(other)


def test_several_machines_do_not_meet_over_loopback(switch):
    run = CollectiveFact("fail", "xccl", "import", timed_out=True)
    findings = switch("-tp", "2", "--nnodes", "2", host_ipc={"collective": run})
    assert "P2P006" not in codes(findings)


REFUSED = CheckFact("fail", "pidfd_getfd: Operation not permitted", "EPERM")
PASSED = CheckFact("pass")


@pytest.mark.parametrize(
    ("checks", "settings", "severity", "words"),
    [
        ({"pidfd_self": REFUSED, "pidfd_sibling": REFUSED}, {}, "warning", "seccomp filter"),
        ({"pidfd_self": PASSED, "pidfd_sibling": REFUSED}, {}, "error", "ptrace rules"),
        ({"pidfd_self": PASSED, "pidfd_sibling": REFUSED, "pidfd_traced": PASSED}, {}, "warning", "newer oneCCL"),
        ({"pidfd_self": PASSED, "pidfd_sibling": REFUSED}, HOST_MEMORY, "warning", "ptrace rules"),
        ({"pidfd_self": CheckFact("fail", "", "ENOSYS"), "pidfd_sibling": CheckFact("fail", "", "ENOSYS")}, {}, "warning", "5.6"),
    ],
)
def test_refused_descriptors(switch, checks, settings, severity, words):
    finding = by_code(switch(host_ipc={"checks": checks, "settings": settings}), "P2P004")
    assert finding.severity == severity
    assert words in finding.cause
    assert finding.fixes[0].kind == "host"


def test_descriptors_that_pass_or_were_not_tried_say_nothing(switch):
    assert "P2P004" not in codes(switch(host_ipc={"checks": {}}))
    assert "P2P004" not in codes(switch())


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ({"by_path_folder": False}, False),  # pidfd works, so the folder is not needed
        ({"by_path_folder": False, "checks": {"pidfd_self": REFUSED}}, True),
        ({"by_path_folder": True, "checks": {"pidfd_self": REFUSED}}, False),
        ({"by_path_folder": False, "settings": {"CCL_ZE_IPC_EXCHANGE": "drmfd"}}, True),
        (
            {
                "by_path_folder": False,
                "checks": {"pidfd_self": REFUSED},
                "settings": {"CCL_DRMFD_DEV_RENDER_DIR_PATH": "/dev/dri/"},
            },
            False,
        ),
    ],
)
def test_by_path_matters_only_where_drmfd_is_used(switch, parts, found):
    assert ("P2P005" in codes(switch(host_ipc=parts))) is found


MPI = "/opt/intel/oneapi/mpi/latest/opt/mpi/libfabric/lib/prov"


@pytest.mark.parametrize(
    ("parts", "subject", "action"),
    [
        (
            {
                "settings": {"FI_PROVIDER_PATH": "/nowhere"},
                "provider_path": CheckFact("fail", "0 provider libraries"),
                "provider_folders": [MPI],
            },
            "FI_PROVIDER_PATH",
            f"FI_PROVIDER_PATH={MPI}",
        ),
        (
            {"provider_folders": [MPI], "providers": [ProviderFact("tcp", f"{MPI}/libtcp-fi.so")]},
            "FI_PROVIDER_PATH",
            f"FI_PROVIDER_PATH={MPI}",
        ),
        (
            {
                "settings": {"FI_TCP_IFACE": "eth7"},
                "interfaces": [InterfaceFact("lo", True, True), InterfaceFact("eth0", True, False)],
            },
            "FI_TCP_IFACE",
            "FI_TCP_IFACE=lo",
        ),
        (
            {
                "settings": {"FI_TCP_IFACE": "eth0"},
                "interfaces": [InterfaceFact("lo", True, True), InterfaceFact("eth0", False, False)],
            },
            "FI_TCP_IFACE",
            "FI_TCP_IFACE=lo",
        ),
        ({"container": "docker"}, "libfabric", "FI_PROVIDER=tcp FI_TCP_IFACE=lo"),
    ],
)
def test_where_ranks_may_not_meet(switch, parts, subject, action):
    finding = by_code(switch(host_ipc=parts), "P2P006")
    assert (finding.subject, finding.fixes[0].action) == (subject, action)


def test_providers_that_fi_info_knows_need_no_path(switch):
    parts = {
        "provider_folders": [MPI],
        "providers": [ProviderFact("tcp", "built in"), ProviderFact("shm", f"{MPI}/libshm-fi.so")],
    }
    assert "P2P006" not in codes(switch(host_ipc=parts))


@pytest.mark.parametrize(
    ("world", "settings", "need"),
    [(2, {}, 640), (4, {}, 1120), (2, {"VLLM_MQ_MAX_CHUNK_BYTES_MB": "32"}, 800), (2, {"VLLM_MQ_MAX_CHUNK_BYTES_MB": "x"}, 640)],
)
def test_shared_memory_that_the_queues_may_fill(world, settings, need):
    assert shm_needed(world, settings) == need * MIB


@pytest.mark.parametrize(
    ("parts", "severity"),
    [
        ({"shm_free": 64 * MIB, "shm_bytes": 64 * MIB}, "warning"),
        ({"shm_free": 640 * MIB}, None),
        ({"shm_free": None}, None),
        ({"checks": {"shm": CheckFact("fail", "no file can be made there", "EACCES")}}, "error"),
    ],
)
@pytest.mark.parametrize("device", ["xpu", "cpu"])
def test_shared_memory(switch, device, parts, severity):
    found = [finding.severity for finding in switch(device=device, host_ipc=parts) if finding.code == "P2P007"]
    assert found == ([severity] if severity else [])


def test_forked_workers(switch):
    assert settings_of(switch(host_ipc={"start_method": "fork"})) == {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    assert "P2P008" not in codes(switch(host_ipc={"start_method": "spawn"}))
    assert "P2P008" not in codes(switch("-tp", "1", host_ipc={"start_method": "fork"}))


@pytest.mark.parametrize(
    ("arguments", "settings", "checks", "subject"),
    [
        (("-tp", "2"), {"CCL_ZE_IPC_EXCHANGE": "sockets"}, {"pidfd_self": REFUSED}, "CCL_ZE_IPC_EXCHANGE"),
        (("-pp", "2"), {"CCL_ZE_IPC_EXCHANGE": "sockets"}, {"pidfd_self": PASSED}, "CCL_ZE_IPC_EXCHANGE"),
        (("-pp", "2"), {"CCL_SEND": "direct"}, {}, "CCL_RECV"),
        (("-pp", "2"), {"CCL_RECV": "direct"}, {}, "CCL_SEND"),
        (("-tp", "2"), {"CCL_ENABLE_SYCL_KERNELS": "0"}, {}, "CCL_ENABLE_SYCL_KERNELS"),
        (("-tp", "2"), {"CCL_TOPO_FABRIC_VERTEX_CONNECTION_CHECK": "0"}, {}, "CCL_TOPO_FABRIC_VERTEX_CONNECTION_CHECK"),
    ],
)
def test_settings_that_do_nothing_or_harm(switch, arguments, settings, checks, subject):
    findings = switch(*arguments, host_ipc={"settings": settings, "checks": checks})
    assert subject in [finding.subject for finding in findings if finding.code == "P2P012"]


def test_settings_that_do_what_they_say_are_left_alone(switch):
    for settings in ({"CCL_ZE_IPC_EXCHANGE": "sockets"}, {"CCL_ENABLE_SYCL_KERNELS": "1"}, DIRECT, HOST_MEMORY):
        assert "P2P012" not in codes(switch(host_ipc={"settings": settings}))


@pytest.mark.parametrize(
    ("limits", "settings", "subject"),
    [
        ({"nofile": [1024, 1024]}, {}, "nofile"),
        ({"memlock": [65536, 65536]}, {"FI_PROVIDER": "verbs"}, "memlock"),
        ({"nofile": [1024, 1048576]}, {}, None),
        ({"nofile": [-1, -1]}, {}, None),
        ({"memlock": [65536, 65536]}, {"FI_PROVIDER": "tcp"}, None),
        ({}, {}, None),
    ],
)
def test_limits(switch, limits, settings, subject):
    found = [finding.subject for finding in switch(host_ipc={"limits": limits, "settings": settings}) if finding.code == "P2P015"]
    assert found == ([subject] if subject else [])


def test_peer_access_forced_against_the_topology_is_named(asked):
    finding = by_code(findings_of(asked("dual-gpu-board", "-tp", "2", environment={"CCL_TOPO_P2P_ACCESS": "1"})), "P2P001")
    assert "CCL_TOPO_P2P_ACCESS=1" in finding.cause
    assert finding.fixes[0].action == "CCL_TOPO_P2P_ACCESS=0"


def test_only_the_cards_that_ranks_land_on_count(asked):
    """Four cards, two below a switch and two on root ports: TP=2 on the first two needs nothing, on the others everything."""
    facts = facts_of(asked("root-ports-adl-s", "-tp", "2"))["peer_access"]
    four = replace(
        facts, cards=[*facts.cards, *(replace(card, address=card.address.replace("0000:0", "0000:1")) for card in facts.cards)]
    )
    assert [card.address for card in used_cards(four, 2)] == ["0000:03:00.0", "0000:07:00.0"]
    masked = replace(four, settings={"ZE_AFFINITY_MASK": "2,3"})
    assert [card.address for card in used_cards(masked, 2)] == ["0000:13:00.0", "0000:17:00.0"]
    assert len(used_cards(replace(four, settings={"ZE_AFFINITY_MASK": "0.0,0.1"}), 4)) == 4


def test_a_simulated_device_is_unknown_and_names_no_setting():
    facts = facts_of(Context("sim:arc-pro-b60", vllm_args=["-tp", "2"]))
    findings = judged(facts, "-tp", "2", device="sim:arc-pro-b60")
    assert [(f.code, f.status) for f in findings] == [("P2P013", "unknown")]
    assert judged(facts, "-tp", "1", device="sim:arc-pro-b60") == []


def test_a_simulated_device_with_a_recorded_machine_gets_its_settings(asked):
    context = replace(asked("root-ports-adl-s", "-tp", "2"), device="sim:arc-pro-b60")
    assert settings_of(findings_of(context)) == HOST_MEMORY | MEETING


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_platforms_hear_nothing_of_peers(asked, device):
    context = replace(asked("root-ports-adl-s", "-tp", "2", observations={"collective": None}), device=device)
    assert codes(findings_of(context)) == []


def test_helpers():
    assert ranks(Case("xpu", ("-tp", "2", "-pp", "2"))).text == "TP=2 PP=2"
    assert oneccl_version("2021.17.2-5") == (2021, 17, 2)
    assert oneccl_version("2022.0") == (2022, 0)
    assert oneccl_version(None) is None
    assert both_ways([]) == []
    assert HostIpcFacts("xpu", "live").collective.status == "skipped"


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"libze-intel-gpu1": "25.18.33578.15-0"}, 33578),
        ({"intel-opencl-icd": "26.18.38308.1"}, 38308),
        ({"libze1": "1.28.2-2"}, None),
        ({}, None),
    ],
)
def test_build_of_the_runtime_from_its_package(asked, packages, expected):
    devices = facts_of(asked("one-switch"))["devices"]
    assert runtime_build(replace(devices, runtime=packages)) == expected


def test_without_any_card_there_is_nothing_to_say_of_peers(switch):
    assert codes(switch(devices={"cards": []}, peer_access={"cards": [], "pairs": []}, host_ipc={"container": "docker"})) == [
        "DEV001"
    ]


def test_a_refused_handle_after_the_usual_recipe_leaves_the_thresholds(asked):
    """intel/llm-scaler#486: host memory and sockets were asked for already, and the first collective still opened a handle."""
    run = {
        "status": "fail", "backend": "xccl", "stage": "init", "timed_out": False, "seconds": 5.0,
        "steps": [{"name": "all_reduce", "bytes": 4, "status": "fail", "seconds": None}],
        "error": f"RuntimeError: oneCCL: ze_call.cpp:28 do_call: EXCEPTION: ze error at zeMemOpenIpcHandle, code: {INVALID}",
    }  # fmt: skip
    recipe = {
        "CCL_TOPO_P2P_ACCESS": "0",
        "CCL_ZE_IPC_EXCHANGE": "sockets",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "ZE_AFFINITY_MASK": "0,1",
    }
    findings = findings_of(
        asked("dual-gpu-board", "-tp", "2", environment=recipe, observations={"collective": run, "oneccl": "2021.15.7"})
    )
    assert settings_of(findings) == THRESHOLDS
    assert by_code(findings, "P2P009").evidence[-1].observed == run["error"]
