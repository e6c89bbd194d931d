"""The flags of the public reports' working configurations: the planner takes each only where its cause is, on recorded machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from machines import NAMES

from probes.device_facts import DeviceRunFact, DtypeAgreementFacts, DtypeSupportFact
from xpufp8.doctor import Request, conclude, judge, launch_for, observe
from xpufp8.planner import Bench, Trial, choose, shorten
from xpufp8.report import Fix, Plan
from xpufp8.target import resolve

pytestmark = pytest.mark.host

MODEL = str(Path(__file__).resolve().parents[1] / "data" / "models" / "Llama-3.1-8B-Instruct")
ONLY = ("devices", "peer_access", "host_ipc")
NO_PEER = {"CCL_TOPO_P2P_ACCESS": "0"}
TCP = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}
DIRECT = {"CCL_SEND": "direct", "CCL_RECV": "direct"}
APART = "root-ports-adl-s"
"""The machine of the block-FP8 report: two cards under separate root ports, and libfabric finds no provider by itself."""


def plan(root: Path, *arguments: str) -> Plan:
    target = resolve([MODEL, *arguments], device="xpu", sysfs=str(root))
    request = Request(only=ONLY)
    return conclude(target, observe(target, ONLY, request, launch_for(target, request)), request, live=True).plan


@pytest.mark.parametrize("name", NAMES)
def test_one_card_needs_no_variable_and_no_flag_on_any_machine(machine: Callable[..., Path], name: str) -> None:
    alone = plan(machine(name))
    assert (alone.items, alone.env) == ([], {})
    assert alone.argv[-1] == MODEL


@pytest.mark.parametrize(
    ("name", "arguments", "variables"),
    [
        (APART, ["-tp", "2"], NO_PEER | TCP),
        (APART, ["--pipeline-parallel-size=2"], NO_PEER | TCP | DIRECT),
        ("one-switch", ["-tp", "2"], {}),
        ("one-switch", ["-pp", "2"], {}),
    ],
)
def test_each_variable_comes_with_its_cause(
    machine: Callable[..., Path], name: str, arguments: list[str], variables: dict[str, str]
) -> None:
    made = plan(machine(name), *arguments)
    assert made.env == variables
    assert {item.kind for item in made.items} <= {"env"}, "no --enforce-eager and no --dtype for what the host lacks"
    assert made.argv[-len(arguments) :] == arguments
    assert all(reason.codes for reason in made.because)
    assert {name for reason in made.because for name in variables if name in reason.item} == set(variables)


def test_variables_of_the_transport_come_only_where_it_was_seen_to_fail(machine: Callable[..., Path]) -> None:
    """The same two cards apart: ranks that met need nothing, and where nobody tried, only what the kernel's log says is answered."""
    met = {"status": "pass", "backend": "xccl", "stage": "", "steps": [], "error": "", "timed_out": False, "seconds": 2.0}
    assert plan(machine(APART, observations={"collective": met}), "-tp", "2").env == {}
    assert plan(machine(APART, observations={"collective": None}), "-tp", "2").env == NO_PEER


def dtype_plan(bf16: DtypeSupportFact) -> frozenset[Fix]:
    """What the planner takes when the device has answered so; the rule judges each trial by the options that it would run with."""
    run = DeviceRunFact("xpu", "live", "a card")
    facts = DtypeAgreementFacts(run, "bfloat16", support=[bf16, DtypeSupportFact("float16", "pass", 0.001, 4096)])
    target = resolve([MODEL], device="xpu")

    class Device(Bench):
        def _probe(self, fixes: frozenset[Fix]) -> Trial:
            return Trial(
                judge(self.variant(self.items(sorted(fixes, key=str))), {"dtype_agreement": facts}, {}, partial=True), frozenset()
            )

    bench = Device(target, Request(), {}, {}, judge(target, {"dtype_agreement": facts}, {}, partial=True))
    return shorten(bench, choose(bench))


@pytest.mark.parametrize(
    ("bf16", "flags"),
    [
        (DtypeSupportFact("bfloat16", "fail", size=4096), {"--dtype float16"}),
        (DtypeSupportFact("bfloat16", "pass", 0.020, 4096), set()),
        (DtypeSupportFact("bfloat16", "pass", 0.001, 4096), set()),
    ],
    ids=["no bfloat16", "emulated: a finding to weigh, no change of numbers", "as good as float16"],
)
def test_float16_is_taken_only_where_the_device_cannot_do_bfloat16(bf16: DtypeSupportFact, flags: set[str]) -> None:
    assert {fix.action for fix in dtype_plan(bf16)} == flags
