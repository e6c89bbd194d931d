"""Level Zero through ctypes: layouts against the public header, every answer of a stand-in loader, and Debian's real one."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import subprocess
from pathlib import Path

import pytest

from probes import level_zero_api as api
from probes.level_zero import ask
from probes.protocol import Context

LAYOUT = {
    # sizeof and offsetof of ze_api.h v1.12 as gcc gives them on x86-64
    "ze_driver_properties_t": (api.DriverProperties, 40, {"driverVersion": 32}),
    "ze_driver_ipc_properties_t": (api.DriverIpcProperties, 24, {"flags": 16}),
    "ze_device_properties_t": (
        api.DeviceProperties, 368, {"vendorId": 20, "flags": 28, "maxMemAllocSize": 40, "timerResolution": 80, "uuid": 96, "name": 112},
    ),
    "ze_device_memory_properties_t": (api.MemoryProperties, 296, {"totalSize": 32, "name": 40}),
    "ze_device_p2p_properties_t": (api.P2PProperties, 24, {"flags": 16}),
    "ze_context_desc_t": (api.ContextDesc, 24, {"flags": 16}),
    "ze_device_mem_alloc_desc_t": (api.DeviceMemAllocDesc, 24, {"ordinal": 20}),
    "ze_command_queue_desc_t": (api.QueueDesc, 40, {"mode": 28, "priority": 32}),
    "ze_pci_ext_properties_t": (api.PciProperties, 48, {"domain": 16, "function": 28, "maxBandwidth": 40}),
    "ze_ipc_mem_handle_t": (api.IpcMemHandle, 64, {"data": 0}),
}  # fmt: skip
HEADER = Path("/usr/include/level_zero/ze_api.h")


@pytest.mark.parametrize("name", LAYOUT)
def test_structures_have_the_layout_of_the_header(name):
    structure, size, offsets = LAYOUT[name]
    assert ctypes.sizeof(structure) == size
    assert {field: getattr(structure, field).offset for field in offsets} == offsets


@pytest.mark.host
@pytest.mark.skipif(not HEADER.exists(), reason="the header (package libze-dev) is not installed")
def test_the_header_itself_agrees(tmp_path):
    inner = {"domain": "address.domain", "function": "address.function", "maxBandwidth": "maxSpeed.maxBandwidth"}
    lines = ['#include "level_zero/ze_api.h"', "#include <stdio.h>", "#include <stddef.h>", "int main(void){"]
    for name, (_, _, offsets) in LAYOUT.items():
        lines.append(f'printf("{name} %zu", sizeof({name}));')
        for field in offsets:
            member = inner.get(field, field) if name == "ze_pci_ext_properties_t" else field
            lines.append(f'printf(" {field} %zu", offsetof({name}, {member}));')
        lines.append('puts("");')
    for code, name in api.RESULTS.items():
        lines.append(
            f'printf("result {name} %u {code}\\n", (unsigned)ZE_RESULT_{name});'
            if code != 0x70000007 and code != 0x7800001C
            else ""
        )
    source = tmp_path / "layout.c"
    source.write_text("\n".join([*lines, "return 0;}"]))
    subprocess.run(["gcc", "-o", str(tmp_path / "layout"), str(source)], check=True)
    for line in subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout.splitlines():
        words = line.split()
        if words[0] == "result":
            assert words[2] == words[3], line
        else:
            _, size, offsets = LAYOUT[words[0]]
            assert int(words[1]) == size
            assert {words[i]: int(words[i + 1]) for i in range(2, len(words), 2)} == offsets


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_every_device_with_its_address_memory_and_driver(loader, count):
    fact = ask({**os.environ, "FAKE_ZE_DEVICES": str(count), "FAKE_ZE_BUILD": "37833"}, 10, loader)
    assert (fact.status, fact.init, len(fact.devices), len(fact.peers)) == (
        "answered",
        "ZE_RESULT_SUCCESS",
        count,
        count * (count - 1),
    )
    assert [device.address for device in fact.devices] == [f"0000:{3 + 4 * i:02x}:00.0" for i in range(count)]
    assert all(device.memory == 24 << 30 and device.device == "8086:e211" and not device.integrated for device in fact.devices)
    assert [(driver.build, driver.api, driver.ipc_memory) for driver in fact.drivers] == [(37833, "1.12", True)]


@pytest.mark.parametrize(
    ("peers", "expected"),
    [("all", {(0, 1): True, (1, 0): True}), ("none", {(0, 1): False, (1, 0): False}), ("0>1", {(0, 1): True, (1, 0): False})],
)
def test_peer_access_yes_no_and_one_way(loader, peers, expected):
    fact = ask({**os.environ, "FAKE_ZE_PEERS": peers}, 10, loader)
    assert {(answer.source, answer.target): answer.access for answer in fact.peers} == expected


@pytest.mark.parametrize("code", [0x78000001, 0x70020000, 0x7FFFFFFE, 0x70000001])
def test_a_failed_init_is_named(loader, code):
    fact = ask({**os.environ, "FAKE_ZE_INIT": hex(code)}, 10, loader)
    assert (fact.status, fact.init) == ("failed", f"ZE_RESULT_{api.RESULTS[code]}")


def test_a_code_without_a_name_keeps_its_number():
    assert api.result_name(0x12345) == "ze_result_t 0x12345"


@pytest.mark.parametrize("call", ["zeInit", "zeDeviceCanAccessPeer"])
def test_a_driver_that_crashes_is_an_answer(loader, call):
    fact = ask({**os.environ, "FAKE_ZE_CRASH": call}, 10, loader)
    assert fact.status == "crashed"
    assert "SIGABRT" in fact.detail
    assert f"crash in {call}" in fact.detail


def test_a_driver_that_hangs_is_an_answer(loader):
    assert ask({**os.environ, "FAKE_ZE_HANG": "zeInit"}, 1.0, loader).status == "timeout"


def test_no_loader_at_all():
    assert ask(dict(os.environ), 10, "/nonexistent/libze_loader.so.1").status == "no-loader"


@pytest.mark.host
@pytest.mark.skipif(
    ctypes.util.find_library("ze_loader") is None, reason="the Level Zero loader (package libze1) is not installed"
)
@pytest.mark.skipif(Path("/dev/dri").exists(), reason="this machine may have a real Intel GPU")
def test_the_real_loader_without_a_device_answers_uninitialized():
    from probes.devices import observe

    facts = observe(Context("xpu", options={"limit": 60}))
    assert facts.level_zero.status == "failed"
    assert facts.level_zero.init == "ZE_RESULT_ERROR_UNINITIALIZED"
    assert facts.level_zero.loader == "libze_loader.so.1"
