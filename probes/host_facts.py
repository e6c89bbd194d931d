"""What is seen of the machine itself: cards, PCI topology, peer access, and what collectives need from the host.

Plain dataclasses with JSON types, like ``probes.facts``. Addresses are PCI addresses (``0000:03:00.0``); sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from probes.facts import Mode, Observation

# -- devices -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkFact:
    """A PCIe link. Speeds are GT/s per lane."""

    where: str
    """Address of the function it was read at: the card's own upstream port, not the GPU behind it."""
    speed: float | None = None
    width: int | None = None
    max_speed: float | None = None
    max_width: int | None = None


@dataclass(frozen=True)
class CardFact:
    """One Intel GPU as the kernel shows it in sysfs."""

    address: str
    device: str
    """``8086:e211``."""
    subsystem: str = ""
    family: str = "unknown"
    """battlemage, alchemist, flex, ponte-vecchio, integrated or unknown (``probes.pci_tables``)."""
    name: str = ""
    driver: str | None = None
    """Bound kernel driver: xe, i915, vfio-pci or None."""
    numa_node: int | None = None
    bar: int = 0
    """Size of the largest memory BAR: the window through which a peer reaches the card's memory."""
    memory: int | None = None
    """Size of the card's memory where a driver says it."""
    link: LinkFact | None = None
    path: list[str] = field(default_factory=list)
    """PCI functions from the root port down to the card, the card last."""
    iommu_group: str | None = None
    nodes: list[str] = field(default_factory=list)
    """Names of its DRM nodes: ``card0``, ``renderD128``."""
    guc: str | None = None
    """GuC firmware version, from the kernel log or debugfs where either can be read."""


@dataclass(frozen=True)
class NodeFact:
    """One entry of /dev/dri."""

    path: str
    mode: str = ""
    """Octal permissions, ``660``."""
    uid: int | None = None
    gid: int | None = None
    opens: Observation = "unknown"
    """Whether this process could open it for reading and writing."""
    error: str | None = None
    """errno name where it could not: EACCES (permissions), EPERM (device cgroup), ENXIO (no driver behind it)…"""


@dataclass(frozen=True)
class LevelZeroDriverFact:
    """One driver that the Level Zero loader found."""

    version: int
    """``driverVersion``: major, minor and build of compute-runtime in one number."""
    build: int
    """Its low 16 bits: the third part of the compute-runtime release (38308 of 26.18.38308.1)."""
    api: str = ""
    ipc_memory: bool | None = None


@dataclass(frozen=True)
class LevelZeroDeviceFact:
    """One GPU that Level Zero shows to this process."""

    index: int
    driver: int
    name: str = ""
    device: str = ""
    address: str | None = None
    memory: int | None = None
    integrated: bool = False


@dataclass(frozen=True)
class PeerAnswerFact:
    """What ``zeDeviceCanAccessPeer`` answered for one ordered pair of device indices."""

    source: int
    target: int
    access: bool | None
    atomics: bool | None = None
    result: str = "ZE_RESULT_SUCCESS"


@dataclass(frozen=True)
class LevelZeroFact:
    """What the Level Zero loader answered, asked in a process of its own."""

    status: Literal["answered", "no-loader", "failed", "crashed", "timeout", "unknown"] = "unknown"
    loader: str | None = None
    init: str | None = None
    """Result of zeInit by name: ZE_RESULT_SUCCESS, ZE_RESULT_ERROR_UNINITIALIZED, …"""
    drivers: list[LevelZeroDriverFact] = field(default_factory=list)
    devices: list[LevelZeroDeviceFact] = field(default_factory=list)
    peers: list[PeerAnswerFact] = field(default_factory=list)
    detail: str = ""


@dataclass(frozen=True)
class TorchDevicesFact:
    """What torch.xpu shows to a process of its own."""

    status: Literal["answered", "no-torch", "not-built", "failed", "crashed", "timeout", "unknown"] = "unknown"
    version: str | None = None
    count: int | None = None
    names: list[str] = field(default_factory=list)
    detail: str = ""


@dataclass(frozen=True)
class DevicesFacts:
    """Every way in which this machine shows Intel GPUs, side by side."""

    device: str
    mode: Mode
    applies: bool = True
    """False on a simulated device without an injected tree: then nothing was read."""
    cards: list[CardFact] = field(default_factory=list)
    nodes: list[NodeFact] = field(default_factory=list)
    dri_folder: bool = False
    by_path: list[str] = field(default_factory=list)
    """Names in /dev/dri/by-path."""
    by_path_folder: bool = False
    uid: int | None = None
    gids: list[int] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)
    """gid of the groups ``render`` and ``video`` where they exist."""
    container: str | None = None
    kernel: str = ""
    boot: list[str] = field(default_factory=list)
    """Kernel parameters that bear on GPUs and PCI; others are not read."""
    modules: dict[str, str] = field(default_factory=dict)
    """Loaded GPU modules and their force_probe parameter."""
    runtime: dict[str, str] = field(default_factory=dict)
    """User-mode driver packages and libraries with their versions."""
    opencl: list[str] = field(default_factory=list)
    """Libraries that the OpenCL ICD files name."""
    settings: dict[str, str] = field(default_factory=dict)
    log: Observation = "unknown"
    """Whether the kernel log could be read."""
    level_zero: LevelZeroFact = field(default_factory=LevelZeroFact)
    unmasked: int | None = None
    """Devices that Level Zero shows once ZE_AFFINITY_MASK is taken away; None where it is not set."""
    torch: TorchDevicesFact = field(default_factory=TorchDevicesFact)


# -- peer_access -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BridgeFact:
    """One PCI bridge above a card."""

    address: str
    device: str
    kind: Literal["root-port", "on-card", "switch", "bridge"]
    redirects: Observation = "unknown"
    """Whether ACS redirect is set: ``pass`` it is not, ``fail`` it is, ``unknown`` where config space cannot be read."""
    source: str = ""
    """How that was seen: ``config`` (the capability itself) or ``iommu-group`` (both cards in one group)."""


@dataclass(frozen=True)
class TransferFact:
    """A real attempt: one process exports an allocation, another opens the handle on a second card and copies from it."""

    source: int
    """Level Zero index of the card that owns the memory."""
    target: int
    """Index of the card that opens it."""
    exchange: str
    """How the handle's file descriptor moved: ``pidfd`` or ``sockets``."""
    stage: str
    """Last stage reached: start, init, allocate, export, exchange, open, copy, check, done."""
    status: Observation
    result: str = ""
    """Name of the Level Zero result, errno or signal where it ended."""
    bytes: int = 0
    bytes_per_second: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class PairFact:
    """One ordered pair of cards and why it can or cannot work together."""

    source: str
    target: str
    status: Observation
    reason: str
    """Code of ``probes.peer_reasons``: OK, ALW, NSB, ACS, KRN, BAR, DRV, LZN, FDX, IPC, BAD, DIE, U."""
    link: Literal["PIX", "PXB", "PHB", "SYS", "U"] = "U"
    """As in nvidia-smi: one switch, several switches, one host bridge, several host bridges."""
    common: str | None = None
    """Nearest bridge above both."""
    redirects: list[str] = field(default_factory=list)
    """Bridges between them with ACS redirect set."""
    kernel_allows: Observation = "unknown"
    """Kernel's rule for peer-to-peer DMA applied to this topology: shared bridge without redirect, or a listed host bridge."""
    kernel_log: list[str] = field(default_factory=list)
    """The kernel's own messages about this pair."""
    can_access: Observation = "unknown"
    """zeDeviceCanAccessPeer."""
    transfer: TransferFact | None = None


@dataclass(frozen=True)
class PeerAccessFacts:
    """Peer access between every two cards."""

    device: str
    mode: Mode
    applies: bool = True
    cards: list[CardFact] = field(default_factory=list)
    """Discrete cards in PCI order; the matrix is about them."""
    bridges: list[BridgeFact] = field(default_factory=list)
    host_bridges: dict[str, str] = field(default_factory=dict)
    """First function of each root bus (``pci0000:00``) to its id (``8086:4660``)."""
    cpu: str = ""
    """``GenuineIntel family 6 model 151``."""
    kernel: str = ""
    iommu: bool | None = None
    boot: list[str] = field(default_factory=list)
    log: Observation = "unknown"
    pairs: list[PairFact] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    detail: str = ""
    """Why there is no real attempt, where there is none."""


# -- host_ipc ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckFact:
    """One thing tried on this host."""

    status: Observation
    detail: str = ""
    error: str | None = None
    """errno name where the kernel refused."""


@dataclass(frozen=True)
class ProviderFact:
    """One libfabric provider."""

    name: str
    path: str
    """Library that holds it, or ``built in`` when fi_info named it."""


@dataclass(frozen=True)
class InterfaceFact:
    """One network interface. Addresses are not read."""

    name: str
    up: bool
    loopback: bool


@dataclass(frozen=True)
class CollectiveStepFact:
    """One collective of the two-rank run."""

    name: str
    bytes: int
    status: Observation
    seconds: float | None = None


@dataclass(frozen=True)
class CollectiveFact:
    """A bare two-rank process group of torch.distributed, without vLLM."""

    status: Literal["pass", "fail", "unknown", "skipped"] = "skipped"
    backend: str = ""
    stage: str = ""
    """Last stage that both ranks reached: start, import, init, run, done."""
    steps: list[CollectiveStepFact] = field(default_factory=list)
    error: str = ""
    """Last lines of the rank that failed."""
    timed_out: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class HostIpcFacts:
    """What oneCCL and vLLM's workers need from the host, tried where it can be tried."""

    device: str
    mode: Mode
    applies: bool = True
    world: int = 1
    checks: dict[str, CheckFact] = field(default_factory=dict)
    """pidfd_self, pidfd_sibling, scm_rights, shm, loopback, hostname, socket_folder."""
    seccomp: int | None = None
    """/proc/self/status Seccomp: 0 none, 1 strict, 2 filter."""
    ptrace_scope: int | None = None
    ptrace_capability: bool | None = None
    user_namespace: bool | None = None
    container: str | None = None
    shm_bytes: int | None = None
    shm_free: int | None = None
    limits: dict[str, list[int]] = field(default_factory=dict)
    """``memlock`` (bytes) and ``nofile``: [soft, hard], -1 for unlimited."""
    libfabric: list[str] = field(default_factory=list)
    providers: list[ProviderFact] = field(default_factory=list)
    provider_folders: list[str] = field(default_factory=list)
    """Folders that hold provider libraries, wherever they were found."""
    provider_path: CheckFact | None = None
    """Whether FI_PROVIDER_PATH names a folder with providers; None when it is not set."""
    interfaces: list[InterfaceFact] = field(default_factory=list)
    by_path_folder: bool = False
    oneccl: str | None = None
    """Version of oneCCL where its metadata says it."""
    start_method: str | None = None
    """VLLM_WORKER_MULTIPROC_METHOD as set, None when it is not."""
    collective: CollectiveFact = field(default_factory=CollectiveFact)
    settings: dict[str, str] = field(default_factory=dict)


# -- host_tree ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostTreeFacts:
    """Everything the three probes read on a machine, redacted, so that it replays elsewhere (``options.sysfs_root``)."""

    version: int = 1
    files: dict[str, str] = field(default_factory=dict)
    binary: dict[str, str] = field(default_factory=dict)
    """Hexadecimal."""
    links: dict[str, str] = field(default_factory=dict)
    folders: dict[str, list[str]] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    observations: dict[str, Any] = field(default_factory=dict)
    """What was tried rather than read: opened nodes, limits, Level Zero, transfers, collectives."""
    environment: dict[str, str] = field(default_factory=dict)
