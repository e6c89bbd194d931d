"""The kernel's own messages about GPUs and peer-to-peer DMA, where this user may read them."""

from __future__ import annotations

import contextlib
import ctypes
import re

from probes.facts import Observation
from probes.host_filters import KERNEL_LOGS, kernel_lines
from probes.host_reader import Host

READ_ALL = 3
SIZE = 4 << 20

REFUSED = re.compile(
    r"(?P<client>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): cannot be used for peer-to-peer DMA as .*?\((?P<provider>[0-9a-f:.]+)\)",
    re.IGNORECASE,
)
BY_CHIPSET = re.compile(r"Host bridge not in P2PDMA whitelist: (?P<id>[0-9a-f]{4}:[0-9a-f]{4})", re.IGNORECASE)
GUC = re.compile(
    r"(?P<card>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]).*GuC firmware.*?version (?P<version>\d+(?:\.\d+)+)", re.IGNORECASE
)


def _ring() -> str | None:
    """The kernel's ring buffer through syslog(2): allowed to everybody where kernel.dmesg_restrict is 0. Reads, takes nothing out."""
    buffer = ctypes.create_string_buffer(SIZE)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        count = libc.klogctl(READ_ALL, buffer, SIZE)
    except (OSError, AttributeError):
        return None
    return None if count < 0 else buffer.raw[:count].decode("utf-8", "replace")


def _look(host: Host) -> list[str] | None:
    if host.live:
        with contextlib.suppress(MemoryError):
            text = _ring()
            if text is not None:
                return kernel_lines(text).splitlines()
    for path in KERNEL_LOGS:
        found = host.read(path)
        if found is not None:
            return found.splitlines()
    return None


def read_log(host: Host) -> tuple[Observation, list[str]]:
    """``pass`` and the messages that bear on GPUs and peers; ``unknown`` when the log cannot be read."""
    lines = host.observed("kernel_log", lambda: _look(host))
    if lines is None and not host.live:
        lines = _look(host)
    return ("unknown", []) if lines is None else ("pass", [str(line) for line in lines])


def refusals(lines: list[str]) -> dict[frozenset[str], list[str]]:
    """Messages that refuse peer-to-peer DMA, by the two addresses they name."""
    found: dict[frozenset[str], list[str]] = {}
    for line in lines:
        match = REFUSED.search(line)
        if match:
            found.setdefault(frozenset({match["client"], match["provider"]}), []).append(line)
    return found


def firmware(lines: list[str]) -> dict[str, str]:
    """GuC firmware version by card, from the driver's start-up messages; the last one counts."""
    return {match["card"]: match["version"] for match in map(GUC.search, lines) if match}
