"""Recorded machines: what sysfs says of them, the matrix that follows, and that recordings replay."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from machines import NAMES, TREES, expand, facts_of, link_count

from probes import devices, host_ipc, host_tree, peer_access
from probes.host_filters import FILTERS, settings
from probes.host_reader import Host, RecordingHost, RootHost, TreeHost, extended_capabilities, without_serial
from probes.pci import acs_redirects
from probes.pci_tables import REASONS, family_of
from probes.protocol import PROBES, Context, run

MATRIX = {
    # machine: status, reason, link, shared bridge
    "root-ports-adl-s": ("fail", "NSB", "PHB", None),
    "dual-gpu-board": ("fail", "NSB", "PHB", None),
    "root-ports-zen": ("unknown", "ALW", "PHB", None),
    "container-no-by-path": ("unknown", "ALW", "PHB", None),
    "one-switch": ("unknown", "ALW", "PIX", "0000:01:00.0"),
    "one-switch-acs": ("fail", "ACS", "PIX", "0000:01:00.0"),
    "rebar-off": ("fail", "BAR", "PIX", "0000:01:00.0"),
    "i915": ("fail", "DRV", "PHB", None),
}


def test_every_machine_has_its_matrix_here():
    assert set(MATRIX) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_matrix(context, name):
    facts = peer_access.observe(context(name))
    assert (len(facts.cards), len(facts.pairs), facts.mode) == (2, 2, "static")
    assert {(pair.status, pair.reason, pair.link, pair.common) for pair in facts.pairs} == {MATRIX[name]}
    assert all(pair.reason in REASONS for pair in facts.pairs)


def test_the_machine_of_the_block_fp8_report(context):
    facts = facts_of(context("root-ports-adl-s", "-tp", "2"))
    peers, seen = facts["peer_access"], facts["devices"]
    assert [card.device for card in peers.cards] == ["8086:e211"] * 2
    assert [(card.name, card.family, card.driver, card.bar, card.memory) for card in peers.cards] == [
        ("Arc Pro B60", "battlemage", "xe", 32 << 30, 24 << 30)
    ] * 2
    assert peers.cards[0].path == ["0000:00:01.0", "0000:01:00.0", "0000:02:01.0", "0000:03:00.0"]
    assert peers.host_bridges == {"pci0000:00": "8086:4660"}
    assert peers.cpu == "GenuineIntel family 6 model 151"
    # The GPU function shows 2.5 GT/s x1 on every Arc card; the link is that of the card's own port.
    assert (peers.cards[0].link.where, peers.cards[0].link.speed, peers.cards[0].link.width) == ("0000:01:00.0", 16.0, 8)
    assert all("do not share an upstream bridge" in pair.kernel_log[0] for pair in peers.pairs)
    assert {bridge.kind for bridge in peers.bridges} == {"root-port", "on-card"}
    assert [card.guc for card in peers.cards] == ["70.58.0"] * 2
    # The CPU's own graphics is a device and no card.
    assert [card.family for card in seen.cards] == ["integrated", "battlemage", "battlemage"]
    assert (seen.container, seen.kernel, seen.by_path_folder) == ("docker", "7.0.0-28-generic", True)
    assert seen.runtime == {"libze-intel-gpu1": "25.18.33578.15-0", "intel-opencl-icd": "25.18.33578.15-0"}
    assert seen.opencl == ["/usr/lib/x86_64-linux-gnu/intel-opencl/libigdrcl.so"]
    assert seen.boot == []
    assert {node.path for node in seen.nodes if node.opens == "pass"} == {
        f"/dev/dri/{n}" for n in ("card0", "card1", "renderD128", "renderD129")
    }


def test_redirects_are_named_and_level_zero_agrees(context):
    pair = peer_access.observe(context("one-switch-acs")).pairs[0]
    assert pair.redirects == ["0000:02:00.0", "0000:02:08.0"]
    assert (pair.kernel_allows, pair.can_access) == ("fail", "fail")


@pytest.mark.parametrize(
    ("acs", "groups", "expected"),
    [
        (None, (None, None), ("unknown", "U", "unknown")),  # config space is root's alone and there is no IOMMU
        (None, (14, 14), ("unknown", "ALW", "pass")),  # one IOMMU group: nothing isolates them
        (None, (14, 15), ("fail", "ACS", "fail")),  # two groups: something does
        (0x1D, (14, 15), ("fail", "ACS", "fail")),
        (0x01, (14, 15), ("unknown", "ALW", "pass")),  # source validation alone redirects nothing; the register counts
    ],
)
def test_acs_without_root_is_concluded_from_iommu_groups(tmp_path, acs, groups, expected):
    tree = json.loads((TREES / "one-switch.json").read_text())
    port = tree["pci"]["pci0000:00"]["0000:00:01.0"]["children"]["0000:01:00.0"]
    for (_, downstream), group in zip(port["children"].items(), groups, strict=True):
        upper = next(iter(downstream["children"].values()))
        on_card = next(iter(upper["children"].values()))
        gpu = next(iter(on_card["children"].values()))
        gpu.pop("iommu_group")
        downstream["acs"] = acs
        if acs is None:
            upper["acs"] = on_card["acs"] = None
        if group is not None:
            gpu["iommu_group"] = group
    source = tmp_path / "tree.json"
    source.write_text(json.dumps(tree))
    expand(source, tmp_path / "machine")
    pairs = peer_access.observe(Context("xpu", options={"sysfs_root": str(tmp_path / "machine")})).pairs
    assert {(pair.status, pair.reason, pair.kernel_allows) for pair in pairs} == {expected}


@pytest.mark.parametrize(
    ("bridge", "same", "expected"),
    [
        ("8086:2f00", True, "ALW"),
        ("8086:2f00", False, "NSB"),
        ("8086:2030", False, "ALW"),
        ("8086:4668", True, "NSB"),
        ("8086:0b25", True, "U"),
    ],
)
def test_the_kernels_list_of_host_bridges(tmp_path, bridge, same, expected):
    tree = json.loads((TREES / "dual-gpu-board.json").read_text())
    root = tree["pci"]["pci0000:00"]
    root["0000:00:00.0"]["id"] = bridge
    if not same:
        moved = json.loads(json.dumps(root.pop("0000:00:01.1")).replace("0000:0", "0000:8"))
        tree["pci"]["pci0000:80"] = {"0000:80:00.0": {"id": bridge, "class": "0x060000"}, "0000:80:01.1": moved}
    source = tmp_path / "tree.json"
    source.write_text(json.dumps(tree))
    expand(source, tmp_path / "machine")
    facts = peer_access.observe(Context("xpu", options={"sysfs_root": str(tmp_path / "machine")}))
    assert {pair.reason for pair in facts.pairs} == {expected}
    assert {pair.link for pair in facts.pairs} == {"PHB" if same else "SYS"}


def test_an_expanded_machine_has_real_links(machine):
    assert link_count(machine("i915")) > 10


def test_a_simulated_device_says_nothing_of_this_machine():
    for module in (devices, peer_access, host_ipc):
        facts = module.observe(Context("sim:arc-pro-b60", vllm_args=["-tp", "2"]))
        assert (facts.applies, facts.mode) == (False, "simulated")


def test_a_simulated_device_with_a_recorded_machine_has_its_topology(context):
    facts = peer_access.observe(context("root-ports-adl-s", "-tp", "2", device="sim:arc-pro-b60"))
    assert (facts.applies, facts.mode, facts.pairs[0].reason) == (True, "static", "NSB")


# -- recording ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_replays_to_the_same_facts(context, tmp_path, name):
    first = context(name, "-tp", "2", "-pp", "2")
    tree = asdict(host_tree.observe(first))
    saved = tmp_path / "host.json"
    saved.write_text(json.dumps(tree))
    again = Context("xpu", vllm_args=first.vllm_args, options={"sysfs_root": str(saved)})
    assert facts_of(again) == facts_of(first)
    envelope = tmp_path / "envelope.json"
    envelope.write_text(json.dumps({"probe": "host_tree", "facts": tree}))
    assert facts_of(Context("xpu", vllm_args=first.vllm_args, options={"sysfs_root": str(envelope)})) == facts_of(first)


def test_a_recording_holds_only_what_was_read(context, machine):
    root = machine("root-ports-adl-s", files={
        "/etc/passwd": "bob:x:1000:1000::/home/bob:/bin/sh\n", "/proc/cmdline": "ro root=UUID=5e3f pci=realloc luks.key=hunter2\n",
        "/etc/group": "bob:x:1000:\nrender:x:992:bob,alice\n",
    }, environment={"HF_TOKEN": "hf_abcdefghijklmnopqrst", "CCL_KEY_FILE": "/home/bob/secret", "FI_PROVIDER_PATH": "/home/bob/prov",
                    "KUBERNETES_SERVICE_HOST": "10.0.0.1"})  # fmt: skip
    tree = asdict(host_tree.observe(Context("xpu", options={"sysfs_root": str(root)})))
    text = json.dumps(tree)
    for secret in ("bob", "alice", "hunter2", "5e3f", "hf_abc", "10.0.0.1", "BOOT_IMAGE", "bash"):
        assert secret not in text, secret
    assert tree["files"]["/proc/cmdline"] == "pci=realloc"
    assert tree["files"]["/etc/group"] == "render:x:992:\n"
    assert tree["environment"] == {
        "CCL_KEY_FILE": "<redacted>",
        "FI_PROVIDER_PATH": "/home/user/prov",
        "KUBERNETES_SERVICE_HOST": "(set)",
    }


def test_config_space_is_kept_without_the_serial_number():
    space = bytearray(4096)
    space[0x100:0x104] = (0x0003 | 0x1 << 16 | 0x148 << 20).to_bytes(4, "little")  # device serial number
    space[0x104:0x10C] = b"SERIALNO"
    space[0x148:0x14C] = (0x000D | 0x1 << 16).to_bytes(4, "little")
    space[0x14E] = 0x1D
    kept = without_serial(bytes(space))
    assert b"SERIALNO" not in kept
    assert extended_capabilities(kept) == {0x0003: 0x100, 0x000D: 0x148}
    assert acs_redirects(kept) == acs_redirects(bytes(space)) == "fail"


@pytest.mark.parametrize(
    ("config", "expected"),
    [(None, "unknown"), (bytes(64), "unknown"), (bytes(256), "unknown"), (bytes(4096), "pass"), (b"\xff" * 4096, "pass")],
)
def test_acs_of_what_can_be_read(config, expected):
    assert acs_redirects(config) == expected


def test_a_capability_list_that_loops_ends():
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 0x1 << 16 | 0x120 << 20).to_bytes(4, "little")
    space[0x120:0x124] = (0x0002 | 0x1 << 16 | 0x100 << 20).to_bytes(4, "little")
    assert extended_capabilities(bytes(space)) == {1: 0x100, 2: 0x120}


def test_settings_tried_on_a_recorded_machine_make_what_ran_there_say_nothing(context, monkeypatch):
    tried = context("root-ports-adl-s", "-tp", "2")
    assert host_ipc.observe(tried).collective.status == "fail"
    monkeypatch.setenv("FI_PROVIDER", "tcp")
    facts = host_ipc.observe(tried)
    assert (facts.collective.status, facts.settings["FI_PROVIDER"]) == ("unknown", "tcp")
    assert "with these settings" in facts.collective.error


def test_a_recorded_folder_cannot_lead_out_of_itself(tmp_path):
    (tmp_path / "outside").write_text("0x8086\n")
    root = tmp_path / "machine"
    expand(TREES / "i915.json", root)
    (root / "escape").symlink_to(tmp_path / "outside")
    (root / "up").symlink_to("../outside")
    host = RootHost(str(root))
    assert host.read("/escape") is None
    assert host.read("/up") is None
    assert host.read("/../outside") is None


def test_the_command_runner_and_the_environment_can_be_injected():
    asked = []
    host = Host(
        {"FI_PROVIDER": "tcp"}, lambda argv: asked.append(argv) or "verbs:\n    version: 120.0\ntcp:\n    version: 120.0\n"
    )
    facts = host_ipc.observe_host(Context("cpu", options={"limit": 5}), RecordingHost(host), "live")
    assert asked == [["fi_info", "-l"]]
    assert [(provider.name, provider.path) for provider in facts.providers if provider.path == "built in"] == [
        ("tcp", "built in"),
        ("verbs", "built in"),
    ]
    assert facts.settings["FI_PROVIDER"] == "tcp"


@pytest.mark.parametrize("content", ["[]", "{", "\x00"])
def test_an_unreadable_machine_is_a_clear_error(tmp_path, content):
    (tmp_path / "host.json").write_text(content)
    envelope = run("devices", Context("xpu", options={"sysfs_root": str(tmp_path / "host.json")}))
    assert envelope["facts"] is None
    assert envelope["error"]["type"].endswith("Error")


def test_a_missing_machine_is_a_clear_error(tmp_path):
    assert (
        "no folder and no file"
        in run("devices", Context("xpu", options={"sysfs_root": str(tmp_path / "none")}))["error"]["message"]
    )


@pytest.mark.parametrize("name", [name for name in PROBES if name in {"devices", "peer_access", "host_ipc", "host_tree"}])
@pytest.mark.parametrize(
    "tree", [{}, {"files": 3, "folders": [], "links": None}, {"folders": {"/sys/bus/pci/devices": ["0000:03:00.0", "x"]}}]
)
def test_a_broken_recording_never_stops_a_probe(tmp_path, name, tree):
    (tmp_path / "host.json").write_text(json.dumps(tree))
    envelope = run(name, Context("xpu", vllm_args=["-tp", "2"], options={"sysfs_root": str(tmp_path / "host.json")}))
    assert envelope["error"] is None


def test_filters_keep_what_is_needed_and_nothing_else():
    cpuinfo = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmicrocode\t: 0xb404023\n\nprocessor\t: 1\n"
    assert FILTERS["/proc/cpuinfo"](cpuinfo) == "vendor_id\t: AuthenticAMD\ncpu family\t: 26\n"
    line = "xe 0000:03:00.0: [drm] GT0: Using GuC firmware from xe/bmg_guc_70.bin version 70.58.0"
    log = f"Sep  1 10:00:00 bobs-box kernel: [   12.3] {line}\nSep 1 bobs-box sshd: bob\n"
    assert FILTERS["/var/log/kern.log"](log) == line
    assert settings({"PATH": "/bin", "CCL_SEND": "direct", "NOT_CCL_SEND": "x"}) == {"CCL_SEND": "direct"}


def test_a_tree_without_a_list_of_folders_shows_nothing():
    host = TreeHost({"files": {"/a": "1"}})
    assert (host.read("/a"), host.read("/b"), host.listing("/"), host.observed("x", lambda: 1)) == ("1", None, None, None)


@pytest.mark.parametrize(
    ("device", "family"),
    [
        ("e211", "battlemage"),
        ("e22f", "battlemage"),
        ("56a0", "alchemist"),
        ("5694", "alchemist"),
        ("0bd5", "ponte-vecchio"),
        ("4680", "unknown"),
        ("zz", "unknown"),
    ],
)
def test_families(device, family):
    assert family_of(device)[0] == family


def test_the_three_probes_end_within_twenty_seconds_together():
    assert devices.LIMIT + peer_access.LIMIT + host_ipc.LIMIT <= 20


def test_a_meeting_that_failed_still_fails_when_only_later_settings_change(context, monkeypatch):
    monkeypatch.setenv("CCL_TOPO_P2P_ACCESS", "0")
    assert host_ipc.observe(context("root-ports-adl-s", "-tp", "2")).collective.status == "fail"


def test_any_other_recorded_run_is_of_its_settings(context, monkeypatch):
    run = {"status": "pass", "backend": "xccl", "stage": "done", "steps": [], "error": "", "timed_out": False, "seconds": 3.0}
    asked = context("root-ports-zen", "-tp", "2", observations={"collective": run})
    assert host_ipc.observe(asked).collective.status == "pass"
    monkeypatch.setenv("CCL_ALLREDUCE", "ring")
    assert host_ipc.observe(asked).collective.status == "unknown"
