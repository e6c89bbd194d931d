"""The machine and the interpreter under the serving stack: operating system, processor, memory, container. Files only."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FLAGS = re.compile(r"^(?:amx_\w+|avx\w*|f16c|fma|sse4_\d|asimd\w*|sve\w*|bf16|i8mm|zvfh\w*)$")
"""Processor features that kernels ask for."""

_CGROUP_KINDS = (
    ("kubepods", "kubernetes"),
    ("docker", "docker"),
    ("libpod", "podman"),
    ("containerd", "containerd"),
    ("lxc", "lxc"),
)


def _text(path: Path, limit: int = 1_000_000) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(limit)
    except OSError:
        return ""


def system_name(root: Path = Path("/")) -> str:
    """Name of the operating system as it calls itself: ``Debian GNU/Linux 12 (bookworm)``."""
    for place in ("etc/os-release", "usr/lib/os-release"):
        match = re.search(r"""^PRETTY_NAME=(['"]?)(.+?)\1\s*$""", _text(root / place), re.MULTILINE)
        if match:
            return match.group(2)
    return platform.system() or "unknown"


def container_kind(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Kind of container this process runs in, None outside of one (or where nothing shows it)."""
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if environ.get("APPTAINER_CONTAINER") or environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    if named := environ.get("container"):
        return named
    groups = _text(root / "proc/1/cgroup")
    return next((kind for word, kind in _CGROUP_KINDS if word in groups), None)


def processor(root: Path = Path("/")) -> tuple[str, list[str]]:
    """Model name and the features of FLAGS, from /proc/cpuinfo."""
    text = _text(root / "proc/cpuinfo")
    name = re.search(r"^(?:model name|Model|Hardware|uarch)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features|isa)\s*:\s*(.+)$", text, re.MULTILINE)
    found = sorted({flag for flag in flags.group(1).split() if FLAGS.match(flag)}) if flags else []
    return (name.group(1).strip() if name else platform.processor() or platform.machine()), found


def memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may use: the machine's, or the control group's limit where that is lower. 0 when unknown."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    total = int(match.group(1)) * 1024 if match else 0
    limits = [total] if total else []
    for place in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(ValueError):  # "max" and an absent file both say that there is no limit
            limits.append(int(_text(root / place)))
    return min(limits, default=0)


def usable_cores() -> int:
    """Processors that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def markers() -> dict[str, str]:
    """Values of this interpreter for the environment markers of PEP 508."""
    implementation = sys.implementation
    version = ".".join(map(str, implementation.version[:3]))
    return {
        "implementation_name": implementation.name,
        "implementation_version": version,
        "os_name": os.name,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
        "platform_release": platform.release(),
        "platform_system": platform.system(),
        "platform_version": platform.version(),
        "python_full_version": platform.python_version(),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "sys_platform": sys.platform,
    }


@dataclass(frozen=True)
class Machine:
    """What :class:`probes.facts.EnvironmentFacts` says of the machine."""

    system: str
    kernel: str
    machine: str
    libc: str
    container: str | None
    cpu: str
    cpu_flags: list[str]
    cores: int
    memory_bytes: int


def observe_machine(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> Machine:
    """Read the machine. ``root`` is where its files are, for recorded ones."""
    cpu, flags = processor(root)
    return Machine(
        system=system_name(root),
        kernel=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        libc=" ".join(platform.libc_ver()).strip() or "unknown",
        container=container_kind(os.environ if environ is None else environ, root),
        cpu=cpu,
        cpu_flags=flags,
        cores=usable_cores(),
        memory_bytes=memory_bytes(root),
    )
