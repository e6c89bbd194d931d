"""The peer matrix at a terminal, and the recorder's file."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "host"))

from machines import NAMES, Shelf

from probes import peer_access
from probes.host_facts import PeerAccessFacts, TransferFact
from probes.pci_tables import REASONS
from probes.protocol import Context
from xpufp8.children import Launch
from xpufp8.errors import UsageError
from xpufp8.output.topology import topology_table
from xpufp8.record import host_json, record_host, write_host

ROOT = Path(__file__).resolve().parents[2]


def printed(facts, width=80):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(topology_table(facts))
    return out.getvalue()


def observed(name, tmp_path):
    return peer_access.observe(Shelf(tmp_path).context(name))


@pytest.mark.parametrize("name", NAMES)
def test_matrix_names_cards_and_reasons_and_explains_them(name, tmp_path):
    facts = observed(name, tmp_path)
    text = printed(facts)
    for card in facts.cards:
        assert card.address.removeprefix("0000:") in text
    reason = facts.pairs[0].reason
    assert text.count(f" {reason} ") >= 2
    assert f"{reason}: " in text
    assert " ".join(REASONS[reason][0].split()[:3]) in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("count", [3, 5, 8])
def test_many_cards_fit_eighty_columns(count, tmp_path):
    facts = observed("root-ports-adl-s", tmp_path)
    cards = [replace(facts.cards[0], address=f"0000:{0x10 + i:02x}:00.0") for i in range(count)]
    pairs = [replace(facts.pairs[0], source=a.address, target=b.address) for a in cards for b in cards if a is not b]
    text = printed(replace(facts, cards=cards, pairs=pairs))
    assert max(map(len, text.splitlines())) <= 80
    rows = [line for line in text.splitlines() if ":00.0" in line]
    assert len(rows) == count
    assert all(row.split().count("NSB") == count - 1 for row in rows)
    assert "…" not in text


def test_one_direction_may_differ_and_a_measured_copy_shows_its_rate(tmp_path):
    facts = observed("one-switch", tmp_path)
    done = TransferFact(0, 1, "pidfd", "done", "pass", "ZE_RESULT_SUCCESS", 8 << 20, 28.04e9)
    pairs = [
        replace(facts.pairs[0], status="pass", reason="OK", transfer=done),
        replace(facts.pairs[1], status="fail", reason="LZN"),
    ]
    rows = [line for line in printed(replace(facts, pairs=pairs)).splitlines() if line.startswith(("0 ", "1 "))]
    assert rows[0].rstrip().endswith("OK PIX 28.0")
    assert "LZN PIX" in rows[1]


@pytest.mark.parametrize(
    "facts",
    [PeerAccessFacts("xpu", "live"), PeerAccessFacts("sim:x", "simulated", detail="peer access is a property of real cards")],
)
def test_without_a_pair_the_table_says_so(facts):
    assert (facts.detail or "there is no pair to look at") in printed(facts)


def test_names_of_cards_cannot_carry_escapes(tmp_path):
    facts = observed("i915", tmp_path)
    text = printed(replace(facts, cards=[replace(card, name="\x1b[31m[red]x") for card in facts.cards]))
    assert "\x1b" not in text
    assert "[red]x" in text


def test_a_machine_is_recorded_through_the_targets_interpreter_and_replays(tmp_path):
    launch = Launch(sys.executable, [ROOT], timeout=120)
    context = Shelf(tmp_path).context("root-ports-adl-s", "-tp", "2")
    tree = record_host(context, launch)
    saved = tmp_path / "host.json"
    write_host(tree, saved)
    assert json.loads(host_json(tree)) == tree
    again = peer_access.observe(Context("xpu", vllm_args=["-tp", "2"], options={"sysfs_root": str(saved)}))
    assert again == peer_access.observe(context)


def test_a_recording_that_fails_is_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match="could not be recorded"):
        record_host(Context("xpu", options={"sysfs_root": str(tmp_path / "none")}), Launch(sys.executable, [ROOT], timeout=60))
    with pytest.raises(UsageError, match="cannot be written"):
        write_host({}, tmp_path / "no" / "folder.json")


@pytest.mark.host
def test_this_machine_can_be_recorded():
    tree = record_host(Context("cpu"), Launch(sys.executable, [ROOT], timeout=120))
    assert tree["observations"]["checks"]["loopback"]["status"] == "pass"
    assert tree["observations"]["level_zero"]["status"] in {"no-loader", "failed", "answered"}
    assert os.uname().nodename not in json.dumps(tree) or len(os.uname().nodename) < 4


def test_the_report_at_a_terminal_shows_the_matrix(tmp_path):
    from dataclasses import asdict

    from xpufp8.output.terminal import render
    from xpufp8.report import ProbeReport, Report, TargetInfo, Tool

    facts = asdict(observed("root-ports-adl-s", tmp_path))
    target = TargetInfo(python="python3", device="xpu", simulated=False)
    for probes, shown in (([ProbeReport(name="peer_access", status="ok", facts=facts)], True), ([], False)):
        text = render(Report(tool=Tool(version="0"), verdict="unknown", target=target, probes=probes))
        assert ("owner of the memory" in text) is shown
