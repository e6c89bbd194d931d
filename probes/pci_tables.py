"""Tables about Intel GPUs and PCI bridges, each with its source.

Read by the host probes; rules read them too. A row is data: adding a card or a bridge changes no code.
"""

from __future__ import annotations

INTEL = "8086"

CARDS: dict[str, tuple[str, str]] = {
    # include/drm/intel/pciids.h of Linux (family) and the products' own pages (name).
    "e20b": ("battlemage", "Arc B580"),
    "e20c": ("battlemage", "Arc B570"),
    "e211": ("battlemage", "Arc Pro B60"),
    "e212": ("battlemage", "Arc Pro B50"),
    "e223": ("battlemage", "Arc Pro B70"),
    "56a0": ("alchemist", "Arc A770"),
    "56a1": ("alchemist", "Arc A750"),
    "56a2": ("alchemist", "Arc A580"),
    "56a5": ("alchemist", "Arc A380"),
    "56a6": ("alchemist", "Arc A310"),
    "56b0": ("alchemist", "Arc Pro A30M"),
    "56b1": ("alchemist", "Arc Pro A40/A50"),
    "56b2": ("alchemist", "Arc Pro A60M"),
    "56b3": ("alchemist", "Arc Pro A60"),
    "56c0": ("flex", "Data Center GPU Flex 170"),
    "56c1": ("flex", "Data Center GPU Flex 140"),
    "0bd5": ("ponte-vecchio", "Data Center GPU Max 1550"),
    "0bd6": ("ponte-vecchio", "Data Center GPU Max 1550"),
    "0bd9": ("ponte-vecchio", "Data Center GPU Max 1100"),
    "0bda": ("ponte-vecchio", "Data Center GPU Max 1100"),
    "0bdb": ("ponte-vecchio", "Data Center GPU Max 1100"),
}
"""Device id of a discrete card to its family and name."""

FAMILIES: tuple[tuple[int, int, str], ...] = (
    # include/drm/intel/pciids.h: INTEL_BMG_IDS, INTEL_DG2_IDS, INTEL_ATS_M_IDS, INTEL_PVC_IDS.
    (0xE200, 0xE22F, "battlemage"),
    (0x5690, 0x56BF, "alchemist"),
    (0x56C0, 0x56CF, "flex"),
    (0x0B69, 0x0B6E, "ponte-vecchio"),
    (0x0BD0, 0x0BEB, "ponte-vecchio"),
)
"""Ranges of device ids for cards without a row of their own."""

ON_CARD_BRIDGES: frozenset[str] = frozenset({"4fa0", "4fa1", "4fa2", "4fa4", "e2ff", "e2f0", "e2f1"})
"""Ports of the switch that sits on every Arc card (lspci listings in geerlingguy/raspberry-pi-pcie-devices#510 and #695). The
GPU behind it always shows a 2.5 GT/s x1 link; the real one is at the topmost of these."""

HOST_BRIDGES: dict[str, bool] = {
    # pci_p2pdma_whitelist[] in drivers/pci/p2pdma.c: True where only cards under one host bridge may reach each other.
    "8086:3c00": True,
    "8086:3c01": True,
    "8086:2f00": True,
    "8086:2f01": True,
    "8086:2030": False,
    "8086:2031": False,
    "8086:2032": False,
    "8086:2033": False,
    "8086:2020": False,
    "8086:09a2": False,
}
"""Host bridges through which every Linux since 5.9 lets peers reach each other."""

NEWER_HOST_BRIDGES: frozenset[str] = frozenset(
    {
        "8086:0b25",
        "8086:0cfe",
        "8086:11fb",
        "8086:1212",
        "8086:1216",
        "8086:4940",
        "8086:4942",
        "8086:4944",
        "8086:4946",
        "8086:4948",
    }
)
"""Accelerators that stand first on a root bus of newer Xeons; listed by current kernels, not by older ones: not known either way."""

AMD_ZEN_FAMILY = 0x17
"""cpu_supports_p2pdma(): any AMD CPU of this family or newer forwards peer requests."""

SMALL_BAR = 256 << 20
"""The memory window of a card whose resizable BAR is off."""

PCI_CLASSES = ("0x0300", "0x0302", "0x0380", "0x0b40", "0x1200")
"""Display controllers, 3D controllers, other displays and accelerators."""

KERNEL_FLOOR = (7, 1)
"""Linux from which several Battlemage cards are reported to work together (vllm-project/vllm#41663, intel/llm-scaler#486)."""
RUNTIME_FLOOR = 37833
"""Build of compute-runtime 26.14, likewise; 26.18 is 38308."""
RUNTIME_FLOOR_NAME = "26.14"
GUC_FLOOR = (70, 65, 0)
"""GuC firmware that cured engine resets for one B580 (intel/compute-runtime#948)."""


def family_of(device: str) -> tuple[str, str]:
    """Family and name of a device id (four hexadecimal digits); ``("unknown", "")`` for one that no table holds."""
    if device in CARDS:
        return CARDS[device]
    try:
        number = int(device, 16)
    except ValueError:
        return "unknown", ""
    return next((family for low, high, family in FAMILIES if low <= number <= high), "unknown"), ""


REASONS: dict[str, tuple[str, str]] = {
    # code: (what a reader of the matrix needs to know, what it rests on)
    "OK": ("peer copy done, data right", "a real attempt"),
    "ALW": ("kernel and topology allow it; no copy was tried", "topology"),
    "NSB": ("no bridge is above both, and the kernel lets no peers through this host bridge", "topology"),
    "ACS": ("ACS redirect sends peers to the host bridge, and the kernel lets none through it", "topology"),
    "KRN": ("the kernel log says it refuses", "kernel log"),
    "BAR": ("resizable BAR is off: 256 MiB of the card's memory can be reached", "sysfs"),
    "DRV": ("a card is on a driver that does not share its memory with peers (i915, none)", "sysfs"),
    "LZN": ("Level Zero answers that one card cannot access the other", "zeDeviceCanAccessPeer"),
    "FDX": ("the handle's file descriptor could not be moved between the processes", "a real attempt"),
    "IPC": ("the peer's memory handle was refused", "a real attempt"),
    "BAD": ("the copy finished and the data is wrong", "a real attempt"),
    "DIE": ("the process died or hung during the attempt", "a real attempt"),
    "U": ("not known", ""),
}
"""Reason codes of the peer matrix."""
