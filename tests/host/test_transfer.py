"""Two real processes exchange an allocation of the stand-in: pidfd or sockets, open, copy, check; and every way that can end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from probes import peer_access
from probes.bounded import run_bounded
from probes.level_zero_transfer import SIZE, transfers
from probes.protocol import Context

PAIRS = [(0, 1, True), (1, 0, True)]


def attempt(loader: str, pairs=PAIRS, exchange="pidfd", limit=20.0, **variables: str):
    return {(fact.source, fact.target): fact for fact in transfers(pairs, exchange, limit, {**os.environ, **variables}, loader)}


@pytest.mark.parametrize("exchange", ["pidfd", "sockets"])
def test_memory_of_one_process_is_read_by_another(loader, exchange):
    facts = attempt(loader, exchange=exchange)
    assert set(facts) == {(0, 1), (1, 0)}
    for fact in facts.values():
        assert (fact.status, fact.stage, fact.exchange, fact.bytes, fact.detail) == ("pass", "done", exchange, SIZE, "")
        assert fact.bytes_per_second > 0


def test_four_devices_give_twelve_pairs(loader):
    pairs = [(a, b, True) for a in range(4) for b in range(4) if a != b]
    facts = attempt(loader, pairs, limit=60.0, FAKE_ZE_DEVICES="4")
    assert set(facts) == {pair[:2] for pair in pairs}
    assert {fact.status for fact in facts.values()} == {"pass"}


def test_drmfd_is_said_not_to_have_been_used(loader):
    fact = attempt(loader, exchange="drmfd")[0, 1]
    assert (fact.status, fact.exchange) == ("pass", "sockets")
    assert "drmfd" in fact.detail


def test_a_refused_handle_names_the_result(loader):
    for fact in attempt(loader, FAKE_ZE_OPEN="0x78000004").values():
        assert (fact.status, fact.stage, fact.result) == ("fail", "open", "ZE_RESULT_ERROR_INVALID_ARGUMENT")


def test_a_lost_device_names_the_result(loader):
    assert attempt(loader, FAKE_ZE_COPY="0x70000001")[0, 1].result == "ZE_RESULT_ERROR_DEVICE_LOST"


def test_silent_corruption_is_seen_although_every_call_succeeds(loader):
    fact = attempt(loader, FAKE_ZE_CORRUPT="1")[0, 1]
    assert (fact.status, fact.stage, fact.result) == ("fail", "check", "ZE_RESULT_SUCCESS")
    assert "2048 of 2048 pages differ (all ones)" in fact.detail


def test_no_copy_where_level_zero_denies_access(loader):
    fact = attempt(loader, [(0, 1, False)], FAKE_ZE_CRASH="peer copy")[0, 1]
    assert (fact.status, fact.stage, fact.bytes) == ("unknown", "open", 0)
    assert "no copy was tried" in fact.detail


@pytest.mark.parametrize(
    ("call", "stage"),
    [("zeMemOpenIpcHandle", "open"), ("peer copy", "copy"), ("zeMemGetIpcHandle", "export"), ("zeMemAllocDevice", "allocate")],
)
def test_a_crash_is_told_with_the_stage_and_the_other_pairs_still_get_their_turn(loader, call, stage):
    facts = attempt(loader, FAKE_ZE_CRASH=call)
    assert {key: (fact.status, fact.stage) for key, fact in facts.items()} == dict.fromkeys(((0, 1), (1, 0)), ("fail", stage))
    assert all("SIGABRT" in fact.detail for fact in facts.values())


def test_a_hang_ends_at_the_limit_with_the_stage(loader):
    fact = attempt(loader, [(0, 1, True)], limit=2.0, FAKE_ZE_HANG="peer copy")[0, 1]
    assert (fact.status, fact.stage) == ("fail", "copy")
    assert "no answer within" in fact.detail


def test_a_crash_before_anything_was_tried_is_unknown(loader):
    assert {fact.status for fact in attempt(loader, FAKE_ZE_CRASH="zeInit").values()} == {"unknown"}


@pytest.mark.host
def test_under_a_filter_pidfd_is_refused_and_the_handle_still_opens_over_a_socket(loader):
    code = (
        "import os, json; from dataclasses import asdict; from probes.level_zero_transfer import transfers; "
        f"print(json.dumps(asdict(transfers([(0, 1, True)], 'pidfd', 20, dict(os.environ), {loader!r})[0])))"
    )
    filtered = str(Path(__file__).with_name("filtered.py"))
    fact = run_bounded([sys.executable, filtered, "438=EPERM", sys.executable, "-c", code], 30).json()
    assert (fact["status"], fact["exchange"]) == ("pass", "sockets")
    assert "pidfd was refused (pidfd_getfd: Operation not permitted)" in fact["detail"]


# -- the whole probe, over the stand-in and a recorded topology ----------------------------------------------------------


def live_peers(loader, machine, *arguments, **variables):
    """The probe on a machine whose sysfs is a recorded one and whose Level Zero is the stand-in."""
    from probes.host_reader import RootHost

    class Mixed(RootHost):
        live = True
        changed = frozenset()

        def observed(self, key, look):
            return look() if key in {"level_zero", "transfers"} else super().observed(key, look)

    host = Mixed(str(machine), {**os.environ, **variables})
    context = Context("xpu", vllm_args=list(arguments), options={"ze_loader": loader, "limit": 30})
    return peer_access.observe_host(context, host, "live")


ADDRESSES = {"FAKE_ZE_ADDRESSES": "05:00.0,09:00.0", "FAKE_ZE_ID": "0xe223"}
BOTH = [("0000:05:00.0", "0000:09:00.0"), ("0000:09:00.0", "0000:05:00.0")]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [("pass", "OK"), ("pass", "OK")]),
        ({"FAKE_ZE_PEERS": "none"}, [("fail", "LZN"), ("fail", "LZN")]),
        # The second card may read the first, not the other way round: a pair is about who opens.
        ({"FAKE_ZE_PEERS": "1>0"}, [("pass", "OK"), ("fail", "LZN")]),
        ({"FAKE_ZE_OPEN": "0x78000004"}, [("fail", "IPC"), ("fail", "IPC")]),
        ({"FAKE_ZE_CORRUPT": "1"}, [("fail", "BAD"), ("fail", "BAD")]),
        ({"FAKE_ZE_CRASH": "peer copy"}, [("fail", "DIE"), ("fail", "DIE")]),
        ({"FAKE_ZE_COPY": "0x70000001"}, [("fail", "DIE"), ("fail", "DIE")]),
        ({"FAKE_ZE_CRASH": "zeInit"}, [("unknown", "ALW"), ("unknown", "ALW")]),
    ],
)
def test_matrix_of_one_switch(loader, machine, variables, expected):
    facts = live_peers(loader, machine("one-switch"), "-tp", "2", **ADDRESSES, **variables)
    assert [(pair.source, pair.target) for pair in facts.pairs] == BOTH
    assert [(pair.status, pair.reason) for pair in facts.pairs] == expected
    assert {pair.link for pair in facts.pairs} == {"PIX"}


def test_what_the_topology_rules_out_is_not_copied(loader, machine):
    facts = live_peers(
        loader, machine("root-ports-adl-s"), "-tp", "2", FAKE_ZE_ADDRESSES="03:00.0,07:00.0", FAKE_ZE_PEERS="none",
        FAKE_ZE_CRASH="peer copy",
    )  # fmt: skip
    assert [(pair.status, pair.reason) for pair in facts.pairs] == [("fail", "NSB"), ("fail", "NSB")]
    assert {pair.transfer.stage for pair in facts.pairs} == {"open"}


def test_one_rank_exchanges_nothing(loader, machine):
    facts = live_peers(loader, machine("one-switch"), "-tp", "1", **ADDRESSES, FAKE_ZE_CRASH="zeMemAllocDevice")
    assert [(pair.status, pair.reason, pair.transfer) for pair in facts.pairs] == [("unknown", "ALW", None)] * 2
    assert "one rank" in facts.detail
