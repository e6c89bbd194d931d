"""Level Zero through ctypes: the few structures and functions of ze_api.h (v1.12) that the host probes call.

Layouts follow the public header, https://github.com/oneapi-src/level-zero/blob/master/include/ze_api.h; a test compares them with
what a C compiler makes of the same declarations.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

LOADERS = ("libze_loader.so.1", "libze_loader.so")

SUCCESS = 0
GPU_ONLY = 1
DEVICE_TYPE_GPU = 1
INTEGRATED = 1
IPC_MEMORY = 1
P2P_ATOMICS = 2
SYNCHRONOUS = 1

RESULTS: dict[int, str] = {
    0x0: "SUCCESS", 0x1: "NOT_READY", 0x70000001: "ERROR_DEVICE_LOST", 0x70000002: "ERROR_OUT_OF_HOST_MEMORY",
    0x70000003: "ERROR_OUT_OF_DEVICE_MEMORY", 0x70000004: "ERROR_MODULE_BUILD_FAILURE", 0x70000005: "ERROR_MODULE_LINK_FAILURE",
    0x70000006: "ERROR_DEVICE_REQUIRES_RESET", 0x70000007: "ERROR_DEVICE_IN_LOW_POWER_STATE",
    0x70010000: "ERROR_INSUFFICIENT_PERMISSIONS", 0x70010001: "ERROR_NOT_AVAILABLE", 0x70020000: "ERROR_DEPENDENCY_UNAVAILABLE",
    0x70020001: "WARNING_DROPPED_DATA", 0x78000001: "ERROR_UNINITIALIZED", 0x78000002: "ERROR_UNSUPPORTED_VERSION",
    0x78000003: "ERROR_UNSUPPORTED_FEATURE", 0x78000004: "ERROR_INVALID_ARGUMENT", 0x78000005: "ERROR_INVALID_NULL_HANDLE",
    0x78000006: "ERROR_HANDLE_OBJECT_IN_USE", 0x78000007: "ERROR_INVALID_NULL_POINTER", 0x78000008: "ERROR_INVALID_SIZE",
    0x78000009: "ERROR_UNSUPPORTED_SIZE", 0x7800000A: "ERROR_UNSUPPORTED_ALIGNMENT",
    0x7800000B: "ERROR_INVALID_SYNCHRONIZATION_OBJECT", 0x7800000C: "ERROR_INVALID_ENUMERATION",
    0x7800000D: "ERROR_UNSUPPORTED_ENUMERATION", 0x7800000E: "ERROR_UNSUPPORTED_IMAGE_FORMAT",
    0x7800000F: "ERROR_INVALID_NATIVE_BINARY", 0x78000019: "ERROR_INVALID_COMMAND_LIST_TYPE", 0x7800001A: "ERROR_OVERLAPPING_REGIONS",
    0x7800001B: "WARNING_ACTION_REQUIRED", 0x7800001C: "ERROR_INVALID_KERNEL_HANDLE", 0x7FFFFFFE: "ERROR_UNKNOWN",
}  # fmt: skip
"""ze_result_t, without the codes of modules and kernels, which nothing here can meet."""


def result_name(code: int) -> str:
    """``ZE_RESULT_ERROR_INVALID_ARGUMENT`` of 0x78000004; the number itself for a code that the table lacks."""
    code &= 0xFFFFFFFF
    return f"ZE_RESULT_{RESULTS[code]}" if code in RESULTS else f"ze_result_t {code:#x}"


class _Chained(Structure):
    """What every structure begins with: its type and a chain of extensions."""

    _fields_: ClassVar[list[Any]] = [("stype", c_uint32), ("pNext", c_void_p)]
    STYPE: ClassVar[int] = 0

    def __init__(self, **values: Any) -> None:
        super().__init__(stype=self.STYPE, **values)


class DriverProperties(_Chained):
    """ze_driver_properties_t."""

    STYPE = 0x1
    _fields_: ClassVar[list[Any]] = [("uuid", c_uint8 * 16), ("driverVersion", c_uint32)]


class DriverIpcProperties(_Chained):
    """ze_driver_ipc_properties_t."""

    STYPE = 0x2
    _fields_: ClassVar[list[Any]] = [("flags", c_uint32)]


class DeviceProperties(_Chained):
    """ze_device_properties_t."""

    STYPE = 0x3
    _fields_: ClassVar[list[Any]] = [
        ("type", c_uint32), ("vendorId", c_uint32), ("deviceId", c_uint32), ("flags", c_uint32), ("subdeviceId", c_uint32),
        ("coreClockRate", c_uint32), ("maxMemAllocSize", c_uint64), ("maxHardwareContexts", c_uint32),
        ("maxCommandQueuePriority", c_uint32), ("numThreadsPerEU", c_uint32), ("physicalEUSimdWidth", c_uint32),
        ("numEUsPerSubslice", c_uint32), ("numSubslicesPerSlice", c_uint32), ("numSlices", c_uint32),
        ("timerResolution", c_uint64), ("timestampValidBits", c_uint32), ("kernelTimestampValidBits", c_uint32),
        ("uuid", c_uint8 * 16), ("name", c_char * 256),
    ]  # fmt: skip


class MemoryProperties(_Chained):
    """ze_device_memory_properties_t."""

    STYPE = 0x7
    _fields_: ClassVar[list[Any]] = [
        ("flags", c_uint32), ("maxClockRate", c_uint32), ("maxBusWidth", c_uint32), ("totalSize", c_uint64), ("name", c_char * 256),
    ]  # fmt: skip


class P2PProperties(_Chained):
    """ze_device_p2p_properties_t."""

    STYPE = 0xB
    _fields_: ClassVar[list[Any]] = [("flags", c_uint32)]


class ContextDesc(_Chained):
    """ze_context_desc_t."""

    STYPE = 0xD
    _fields_: ClassVar[list[Any]] = [("flags", c_uint32)]


class QueueDesc(_Chained):
    """ze_command_queue_desc_t."""

    STYPE = 0xE
    _fields_: ClassVar[list[Any]] = [
        ("ordinal", c_uint32), ("index", c_uint32), ("flags", c_uint32), ("mode", c_uint32), ("priority", c_uint32),
    ]  # fmt: skip


class DeviceMemAllocDesc(_Chained):
    """ze_device_mem_alloc_desc_t."""

    STYPE = 0x15
    _fields_: ClassVar[list[Any]] = [("flags", c_uint32), ("ordinal", c_uint32)]


class PciProperties(_Chained):
    """ze_pci_ext_properties_t, its two inner structures spelled out."""

    STYPE = 0x10008
    _fields_: ClassVar[list[Any]] = [
        ("domain", c_uint32), ("bus", c_uint32), ("device", c_uint32), ("function", c_uint32),
        ("genVersion", c_int32), ("width", c_int32), ("maxBandwidth", c_int64),
    ]  # fmt: skip


class IpcMemHandle(Structure):
    """ze_ipc_mem_handle_t: opaque, but its first four bytes are a file descriptor on Linux, as oneCCL and MPICH use it."""

    _fields_: ClassVar[list[Any]] = [("data", c_uint8 * 64)]


class ZeError(Exception):
    """A Level Zero call that did not return success."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {result_name(code)}")
        self.call = call
        self.result = result_name(code)


H = c_void_p
PROTOTYPES: dict[str, list[Any]] = {
    "zeInit": [c_uint32],
    "zeDriverGet": [POINTER(c_uint32), POINTER(H)],
    "zeDriverGetApiVersion": [H, POINTER(c_uint32)],
    "zeDriverGetProperties": [H, POINTER(DriverProperties)],
    "zeDriverGetIpcProperties": [H, POINTER(DriverIpcProperties)],
    "zeDeviceGet": [H, POINTER(c_uint32), POINTER(H)],
    "zeDeviceGetProperties": [H, POINTER(DeviceProperties)],
    "zeDevicePciGetPropertiesExt": [H, POINTER(PciProperties)],
    "zeDeviceGetMemoryProperties": [H, POINTER(c_uint32), POINTER(MemoryProperties)],
    "zeDeviceCanAccessPeer": [H, H, POINTER(c_uint8)],
    "zeDeviceGetP2PProperties": [H, H, POINTER(P2PProperties)],
    "zeContextCreate": [H, POINTER(ContextDesc), POINTER(H)],
    "zeMemAllocDevice": [H, POINTER(DeviceMemAllocDesc), c_size_t, c_size_t, H, POINTER(c_void_p)],
    "zeMemFree": [H, c_void_p],
    "zeMemGetIpcHandle": [H, c_void_p, POINTER(IpcMemHandle)],
    "zeMemOpenIpcHandle": [H, H, IpcMemHandle, c_uint32, POINTER(c_void_p)],
    "zeMemCloseIpcHandle": [H, c_void_p],
    "zeCommandListCreateImmediate": [H, H, POINTER(QueueDesc), POINTER(H)],
    "zeCommandListAppendMemoryCopy": [H, c_void_p, c_void_p, c_size_t, H, c_uint32, c_void_p],
}
"""Argument types; every function returns ze_result_t."""


class LevelZero:
    """The loader, opened. Calls raise :class:`ZeError` unless they return success."""

    def __init__(self, path: str | None = None) -> None:
        """Open the loader.

        Raises:
            OSError: there is none, or it cannot be loaded.
        """
        failure: OSError | None = None
        for name in [path] if path else LOADERS:
            try:
                self._library = ctypes.CDLL(name)
                self.path = name
                break
            except OSError as error:
                failure = failure or error
        else:
            raise failure or OSError("no Level Zero loader")

    def has(self, name: str) -> bool:
        """True when the loader exports a function (older ones lack the extensions)."""
        return hasattr(self._library, name)

    def raw(self, name: str, *arguments: Any) -> int:
        """Call a function and return its result code, whatever it is."""
        function = getattr(self._library, name)
        function.argtypes, function.restype = PROTOTYPES[name], c_uint32
        return int(function(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            ZeError: it returned anything but success.
        """
        code = self.raw(name, *arguments)
        if code != SUCCESS:
            raise ZeError(name, code)

    def handles(self, name: str, *before: Any) -> list[c_void_p]:
        """The usual two calls of a ``…Get`` function: how many, and which."""
        count = c_uint32(0)
        self.call(name, *before, byref(count), None)
        if not count.value:
            return []
        found = (H * count.value)()
        self.call(name, *before, byref(count), found)
        return [c_void_p(handle) for handle in found[: count.value]]

    def devices(self) -> list[tuple[c_void_p, c_void_p]]:
        """Initialise, and return (driver, device) of every device in the order in which torch and oneCCL number them.

        Raises:
            ZeError: zeInit or a query failed.
        """
        self.call("zeInit", GPU_ONLY)
        return [(driver, device) for driver in self.handles("zeDriverGet") for device in self.handles("zeDeviceGet", driver)]
