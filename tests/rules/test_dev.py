"""DEV rules: which card is invisible to what serves, and who stands in the way."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "host"))

from machines import NAMES, Shelf, findings_of

from probes import devices
from probes.facts import EnvironmentFacts, PackageFact
from probes.host_facts import LevelZeroDeviceFact, LevelZeroFact, LinkFact, NodeFact, TorchDevicesFact
from probes.protocol import Context
from xpufp8.rules import Case, dev, dev_cards

RULES = (*dev.RULES, *dev_cards.RULES)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Facts of the report's machine: two Arc Pro B60 and the CPU's graphics, in a container, all nodes open."""
    return devices.observe(Shelf(tmp_path_factory.mktemp("machines")).context("root-ports-adl-s"))


def judge(facts, *arguments, device="xpu", environment=None):
    known = {"devices": facts} | ({"environment": environment} if environment else {})
    case = Case(device, arguments, facts=known)
    return [finding for one in RULES if all(name in known for name in one.needs) for finding in one.check(one, case)]


def one(findings, code):
    found = [finding for finding in findings if finding.code == code]
    assert len(found) == 1, [finding.code for finding in findings]
    return found[0]


def cards(facts, **changes):
    """The facts with every discrete card changed."""
    return replace(facts, cards=[card if card.family == "integrated" else replace(card, **changes) for card in facts.cards])


def shown(count, status="answered", **more):
    found = [
        LevelZeroDeviceFact(i, 0, "Intel(R) Arc(TM) Pro B60 Graphics", "8086:e211", f"0000:0{3 + 4 * i}:00.0")
        for i in range(count)
    ]
    return LevelZeroFact(status, "libze_loader.so.1", more.pop("init", "ZE_RESULT_SUCCESS"), devices=found, **more)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "rebar-off"])
def test_the_recorded_machines_have_healthy_devices(tmp_path, name):
    findings = findings_of(Shelf(tmp_path).context(name))
    assert [finding.code for finding in findings if finding.code.startswith("DEV")] == []


def test_no_card_at_all(base):
    empty = replace(base, cards=[], nodes=[])
    assert one(judge(empty), "DEV001").severity == "error"
    assert judge(replace(empty, level_zero=shown(1))) == []  # a guest may hide the bus and still have the device


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"driver": None, "nodes": []}, "no driver"),
        ({"driver": "vfio-pci", "nodes": []}, "virtual machine"),
        ({"driver": "i915"}, "bound to i915"),
    ],
)
def test_a_card_without_the_driver_it_needs(base, changes, words):
    findings = [finding for finding in judge(cards(base, **changes)) if finding.code == "DEV002"]
    assert len(findings) == 2
    assert all(words in finding.cause for finding in findings)
    if changes["driver"] != "vfio-pci":
        assert "force_probe=e211" in findings[0].fixes[0].action


def test_alchemist_on_i915_is_where_it_belongs(base):
    assert judge(cards(base, driver="i915", family="alchemist", device="8086:56a0")) == []


@pytest.mark.parametrize(
    ("error", "container", "action"),
    [
        ("EACCES", None, "usermod -aG render"),
        ("EACCES", "docker", "--group-add 992"),
        ("EPERM", "docker", "--device /dev/dri"),
        ("ENXIO", None, "kernel log"),
    ],
)
def test_a_node_that_cannot_be_opened(base, error, container, action):
    nodes = [replace(node, opens="fail", error=error) if "renderD128" in node.path else node for node in base.nodes]
    finding = one(judge(replace(base, nodes=nodes, container=container)), "DEV003")
    assert action in finding.fixes[0].action
    assert error in finding.evidence[0].observed


def test_a_node_that_is_not_in_the_container(base):
    finding = one(judge(replace(base, nodes=[node for node in base.nodes if "129" not in node.path])), "DEV003")
    assert finding.subject == "renderD129"
    assert "--device /dev/dri" in finding.fixes[0].action


def test_nodes_that_were_not_tried_say_nothing(base):
    assert judge(replace(base, nodes=[NodeFact(node.path) for node in base.nodes])) == []


@pytest.mark.parametrize(
    ("changes", "words", "severity"),
    [
        ({"level_zero": LevelZeroFact("no-loader")}, "no Level Zero loader", "error"),
        (
            {"level_zero": shown(0, "failed", init="ZE_RESULT_ERROR_UNINITIALIZED"), "runtime": {}},
            "compute runtime is missing",
            "error",
        ),
        (
            {"level_zero": shown(0, "failed", init="ZE_RESULT_ERROR_UNINITIALIZED")},
            "although an Intel GPU driver is installed",
            "error",
        ),
        ({"level_zero": shown(0, "crashed", detail="died of SIGSEGV")}, "died of SIGSEGV", "error"),
        (
            {"level_zero": shown(1), "unmasked": 2, "settings": {"ZE_AFFINITY_MASK": "0"}},
            "ZE_AFFINITY_MASK=0 hides 1 of 2",
            "warning",
        ),
        ({"level_zero": shown(1)}, "nothing that was looked at says why", "warning"),
    ],
)
def test_cards_that_level_zero_does_not_show(base, changes, words, severity):
    finding = one(judge(replace(base, **changes)), "DEV004")
    assert words in finding.cause
    assert finding.severity == severity


def test_a_closed_node_explains_what_level_zero_leaves_out(base):
    nodes = [replace(node, opens="fail", error="EACCES") for node in base.nodes]
    finding = one(
        judge(replace(base, nodes=nodes, level_zero=shown(0, "failed", init="ZE_RESULT_ERROR_UNINITIALIZED"))), "DEV004"
    )
    assert "DEV003" in finding.cause


def test_level_zero_that_was_not_asked_says_nothing(base):
    assert base.level_zero.status == "unknown"
    assert judge(base) == []
    assert judge(replace(base, level_zero=shown(2))) == []


@pytest.mark.parametrize(
    ("torch", "settings", "words", "severity"),
    [
        (TorchDevicesFact("not-built", "2.13.0+cpu"), {}, "not built for XPU", "error"),
        (TorchDevicesFact("failed", "2.12.0+xpu", detail="RuntimeError: x"), {}, "does not start", "error"),
        (TorchDevicesFact("answered", "2.12.0+xpu", 0), {}, "0 of 2", "error"),
        (
            TorchDevicesFact("answered", "2.12.0+xpu", 1),
            {"ONEAPI_DEVICE_SELECTOR": "level_zero:0"},
            "ONEAPI_DEVICE_SELECTOR=level_zero:0",
            "warning",
        ),
    ],
)
def test_cards_that_torch_does_not_show(base, torch, settings, words, severity):
    finding = one(judge(replace(base, torch=torch, settings=settings, level_zero=shown(2))), "DEV005")
    assert words in finding.cause
    assert finding.severity == severity


def test_torch_that_agrees_or_gave_no_answer_says_nothing(base):
    for torch in (TorchDevicesFact("answered", "2.12.0+xpu", 2), TorchDevicesFact("timeout"), TorchDevicesFact()):
        assert judge(replace(base, torch=torch, level_zero=shown(2))) == []


@pytest.mark.parametrize(
    ("arguments", "level_zero", "found"),
    [
        (("-tp", "4"), LevelZeroFact(), True),
        (("-tp", "2", "-pp", "2"), shown(2), True),
        (("-tp", "2"), shown(2), False),
        (("-tp", "2"), shown(1), True),
        (("-tp", "4", "--nnodes", "2"), shown(2), False),
        ((), shown(1), False),
    ],
)
def test_fewer_cards_than_ranks(base, arguments, level_zero, found):
    assert ("DEV006" in {finding.code for finding in judge(replace(base, level_zero=level_zero), *arguments)}) is found


def test_a_small_window_is_told_for_each_card(base):
    findings = [finding for finding in judge(cards(base, bar=256 << 20)) if finding.code == "DEV007"]
    assert [finding.subject for finding in findings] == ["03:00.0", "07:00.0"]
    assert judge(cards(base, bar=0)) == []  # not readable is not small


@pytest.mark.parametrize(("width", "where", "found"), [(4, "0000:01:00.0", True), (8, "0000:01:00.0", False), (1, None, False)])
def test_a_narrow_link_is_read_at_the_cards_own_port(base, width, where, found):
    changed = replace(
        base,
        cards=[
            card if card.family == "integrated" else replace(card, link=LinkFact(where or card.address, 16.0, width, 16.0, 8))
            for card in base.cards
        ],
    )
    assert ("DEV008" in {finding.code for finding in judge(changed)}) is found


def packages(version, distribution="triton-xpu"):
    package = PackageFact("triton", version, "/x", distribution=distribution)
    return EnvironmentFacts("3.12", "/x", "Linux", "7.1", "x86_64", "2.39", None, "", [], 8, 1, packages=[package])


@pytest.mark.parametrize(
    ("version", "settings", "opencl", "subject"),
    [
        ("3.6.0", {"ONEAPI_DEVICE_SELECTOR": "level_zero:0"}, ["/usr/lib/libigdrcl.so"], "ONEAPI_DEVICE_SELECTOR"),
        ("3.6.0", {}, [], "OpenCL"),
        ("3.6.0", {}, ["/opt/intel/oneapi/lib/libintelocl.so"], "OpenCL"),
        ("3.6.0", {}, ["/usr/lib/libigdrcl.so"], None),
        ("3.7.0", {"ONEAPI_DEVICE_SELECTOR": "level_zero:0"}, [], None),
        ("3.6.0", {"ONEAPI_DEVICE_SELECTOR": "level_zero:0;opencl:gpu"}, ["/usr/lib/libigdrcl.so"], None),
    ],
)
def test_the_opencl_twin_that_triton_wants(base, version, settings, opencl, subject):
    findings = judge(replace(base, settings=settings, opencl=opencl), environment=packages(version))
    assert [finding.subject for finding in findings if finding.code == "DEV009"] == ([subject] if subject else [])


def test_a_triton_for_another_device_wants_no_opencl(base):
    assert judge(replace(base, opencl=[]), environment=packages("3.6.0", "triton")) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_platforms_hear_nothing_of_intel_cards(base, device):
    assert judge(replace(base, cards=[], level_zero=LevelZeroFact("no-loader")), "-tp", "4", device=device) == []


def test_a_simulated_device_has_no_devices():
    facts = devices.observe(Context("sim:arc-pro-b60"))
    assert judge(facts, "-tp", "2", device="sim:arc-pro-b60") == []
