"""Asks the Level Zero loader, in a process of its own: drivers, devices, memory and peer access.

``python -m probes.level_zero [LOADER]`` prints one JSON line; :func:`ask` runs that with a time limit, because a driver may crash or
hang on a machine whose cards are in a bad state.
"""

from __future__ import annotations

import json
import os
import sys
from ctypes import byref, c_uint8, c_uint32, c_void_p
from dataclasses import asdict
from typing import Any

from probes.bounded import module_command, run_bounded
from probes.host_facts import LevelZeroDeviceFact, LevelZeroDriverFact, LevelZeroFact, PeerAnswerFact
from probes.level_zero_api import (
    DEVICE_TYPE_GPU,
    INTEGRATED,
    IPC_MEMORY,
    P2P_ATOMICS,
    DeviceProperties,
    DriverIpcProperties,
    DriverProperties,
    LevelZero,
    MemoryProperties,
    P2PProperties,
    PciProperties,
    ZeError,
    result_name,
)


def _driver(ze: LevelZero, handle: c_void_p) -> LevelZeroDriverFact:
    properties, api, ipc = DriverProperties(), c_uint32(), DriverIpcProperties()
    ze.call("zeDriverGetProperties", handle, byref(properties))
    ze.call("zeDriverGetApiVersion", handle, byref(api))
    answered = ze.raw("zeDriverGetIpcProperties", handle, byref(ipc)) == 0
    version = int(properties.driverVersion)
    return LevelZeroDriverFact(
        version, version & 0xFFFF, f"{api.value >> 16}.{api.value & 0xFFFF}", bool(ipc.flags & IPC_MEMORY) if answered else None
    )


def _memory(ze: LevelZero, device: c_void_p) -> int | None:
    count = c_uint32(0)
    if ze.raw("zeDeviceGetMemoryProperties", device, byref(count), None) or not count.value:
        return None
    parts = (MemoryProperties * count.value)(*(MemoryProperties() for _ in range(count.value)))
    if ze.raw("zeDeviceGetMemoryProperties", device, byref(count), parts):
        return None
    return sum(int(part.totalSize) for part in parts[: count.value])


def _address(ze: LevelZero, device: c_void_p) -> str | None:
    pci = PciProperties()
    if not ze.has("zeDevicePciGetPropertiesExt") or ze.raw("zeDevicePciGetPropertiesExt", device, byref(pci)):
        return None
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.{pci.function:x}"


def _device(ze: LevelZero, handle: c_void_p, index: int, driver: int) -> LevelZeroDeviceFact | None:
    properties = DeviceProperties()
    ze.call("zeDeviceGetProperties", handle, byref(properties))
    if properties.type != DEVICE_TYPE_GPU:
        return None
    return LevelZeroDeviceFact(
        index, driver, properties.name.decode("utf-8", "replace"), f"{properties.vendorId:04x}:{properties.deviceId:04x}",
        _address(ze, handle), _memory(ze, handle), bool(properties.flags & INTEGRATED),
    )  # fmt: skip


def _peer(ze: LevelZero, source: int, target: int, handles: list[c_void_p]) -> PeerAnswerFact:
    answer, properties = c_uint8(0), P2PProperties()
    code = ze.raw("zeDeviceCanAccessPeer", handles[source], handles[target], byref(answer))
    atomics: bool | None = None
    if not code and answer.value and not ze.raw("zeDeviceGetP2PProperties", handles[source], handles[target], byref(properties)):
        atomics = bool(properties.flags & P2P_ATOMICS)
    return PeerAnswerFact(source, target, None if code else bool(answer.value), atomics, result_name(code))


def look(loader: str | None = None) -> LevelZeroFact:
    """Ask the loader from this process. Use :func:`ask` where a crash would matter."""
    try:
        ze = LevelZero(loader)
    except OSError as error:
        return LevelZeroFact("no-loader", detail=str(error)[:300])
    try:
        pairs = ze.devices()
        drivers = ze.handles("zeDriverGet")
        order = [driver.value for driver in drivers]
        facts = [_device(ze, device, index, order.index(driver.value)) for index, (driver, device) in enumerate(pairs)]
        devices = [fact for fact in facts if fact is not None]
        found = [_driver(ze, driver) for driver in drivers]
        alone = [device for _, device in pairs]
        peers = [_peer(ze, a.index, b.index, alone) for a in devices for b in devices if a is not b]
    except ZeError as error:
        return LevelZeroFact("failed", ze.path, error.result if error.call == "zeInit" else result_name(0), detail=str(error))
    return LevelZeroFact("answered", ze.path, result_name(0), found, devices, peers)


def from_json(data: dict[str, Any]) -> LevelZeroFact:
    """The fact in a JSON object, as this module prints it."""
    return LevelZeroFact(
        data.get("status", "unknown"), data.get("loader"), data.get("init"),
        [LevelZeroDriverFact(**d) for d in data.get("drivers", [])], [LevelZeroDeviceFact(**d) for d in data.get("devices", [])],
        [PeerAnswerFact(**p) for p in data.get("peers", [])], data.get("detail", ""),
    )  # fmt: skip


def ask(environment: dict[str, str], limit: float, loader: str | None = None) -> LevelZeroFact:
    """Ask the loader in a child process with these variables; a crash or a hang is an answer too."""
    ended = run_bounded(module_command("probes.level_zero", *([loader] if loader else [])), limit, environment)
    data = ended.json()
    if data is not None:
        return from_json(data)
    detail = f"{ended.fate}; {ended.err.strip().splitlines()[-1][:300]}" if ended.err.strip() else ended.fate
    return LevelZeroFact("timeout" if ended.code is None else "crashed", loader, detail=detail)


if __name__ == "__main__":
    print(json.dumps(asdict(look(sys.argv[1] if len(sys.argv) > 1 else None))), flush=True)
    os._exit(0)  # the unloading of a driver is where such processes hang
