"""PCI topology as sysfs shows it: cards, the bridges above them, and what the kernel's rule for peer-to-peer DMA makes of it.

The rule is that of drivers/pci/p2pdma.c (calc_map_type_and_dist), in words: two functions under one bridge reach each other
directly unless ACS redirects their requests; everything else goes through the host bridge, which the kernel allows for AMD
Zen and for listed Intel host bridges.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from probes.facts import Observation
from probes.host_facts import BridgeFact, CardFact, LinkFact
from probes.host_reader import Host, extended_capabilities
from probes.pci_tables import AMD_ZEN_FAMILY, HOST_BRIDGES, NEWER_HOST_BRIDGES, ON_CARD_BRIDGES, PCI_CLASSES, family_of

ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
DEVICES = "/sys/bus/pci/devices"
ACS = 0x000D
ACS_REDIRECT = 0x04 | 0x08 | 0x20
"""Request redirect, completion redirect, egress control: any of them sends peer requests upstream."""

LinkCode = Literal["PIX", "PXB", "PHB", "SYS", "U"]


@dataclass(frozen=True)
class Function:
    """One PCI function and its place in the tree."""

    address: str
    path: tuple[str, ...]
    """Functions from the root bus down to it, itself last."""
    root: str
    """Root bus: ``pci0000:00``."""
    folder: str


@dataclass
class Tree:
    """All that was read of the PCI tree."""

    functions: dict[str, Function] = field(default_factory=dict)
    cards: list[CardFact] = field(default_factory=list)
    bridges: dict[str, BridgeFact] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)


def _hex(host: Host, path: str) -> str:
    text = (host.read(path) or "").strip().lower()
    return text.removeprefix("0x")


def identity(host: Host, folder: str, prefix: str = "") -> str:
    """``8086:e211`` of a function's folder; empty where it cannot be read."""
    vendor, device = _hex(host, f"{folder}/{prefix}vendor"), _hex(host, f"{folder}/{prefix}device")
    return f"{vendor}:{device}" if vendor and device else ""


def functions(host: Host) -> dict[str, Function]:
    """Every PCI function that sysfs lists, by address."""
    found = {}
    for address in host.listing(DEVICES) or []:
        folder = host.follow(f"{DEVICES}/{address}")
        parts = folder.split("/")
        root = next((part for part in parts if part.startswith("pci") and ":" in part), "")
        path = tuple(part for part in parts if ADDRESS.match(part))
        if path and path[-1] == address:
            found[address] = Function(address, path, root, folder)
    return found


def _speed(text: str | None) -> float | None:
    match = re.match(r"\s*([\d.]+)\s*GT/s", text or "")
    return float(match.group(1)) if match else None


def _width(text: str | None) -> int | None:
    digits = (text or "").strip()
    return int(digits) if digits.isdecimal() and 0 < int(digits) <= 32 else None


def _link(host: Host, tree: dict[str, Function], card: Function, integrated: bool) -> LinkFact | None:
    """The link between the card and the machine: read at the topmost bridge that sits on the card itself."""
    if integrated:
        return None
    at = card
    for address in reversed(card.path[:-1]):
        function = tree.get(address)
        vendor, _, device = identity(host, function.folder).partition(":") if function else ("", "", "")
        if function is None or vendor != "8086" or device not in ON_CARD_BRIDGES:
            break
        at = function
    values = [
        host.read(f"{at.folder}/{name}")
        for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    ]
    if not any(values):
        return None
    return LinkFact(at.address, _speed(values[0]), _width(values[1]), _speed(values[2]), _width(values[3]))


def largest_bar(host: Host, folder: str) -> int:
    """Size of the largest of a function's six memory BARs, 0 when its resource file cannot be read."""
    best = 0
    for line in (host.read(f"{folder}/resource") or "").splitlines()[:6]:
        try:
            start, end, flags = (int(part, 16) for part in line.split())
        except ValueError:
            continue
        if flags & 0x200 and end > start:  # IORESOURCE_MEM
            best = max(best, end - start + 1)
    return best


def _memory(host: Host, folder: str, nodes: list[str]) -> int | None:
    paths = [f"{folder}/tile{tile}/physical_vram_size_bytes" for tile in range(2)]
    sizes = [size for size in (host.number(path, 0) for path in paths) if size]
    if sizes:
        return sum(sizes)
    cards = [node for node in nodes if node.startswith("card")]
    return host.number(f"{folder}/drm/{cards[0]}/lmem_total_bytes", 0) if cards else None


def read_card(host: Host, tree: dict[str, Function], function: Function, guc: dict[str, str] | None = None) -> CardFact:
    """Everything sysfs says about one card."""
    folder = function.folder
    device = identity(host, folder)
    family, name = family_of(device.partition(":")[2])
    integrated = family == "unknown" and len(function.path) == 1  # a card passed into a guest also stands on the root bus
    nodes = [node for node in host.listing(f"{folder}/drm") or [] if re.match(r"^(card|renderD)\d+$", node)]
    numa = host.number(f"{folder}/numa_node")
    driver = host.link(f"{folder}/driver")
    group = host.link(f"{folder}/iommu_group")
    return CardFact(
        address=function.address, device=device, subsystem=identity(host, folder, "subsystem_"),
        family="integrated" if integrated else family, name=name,
        driver=driver.rsplit("/", 1)[-1] if driver else None, numa_node=numa if numa is not None and numa >= 0 else None,
        bar=largest_bar(host, folder), memory=_memory(host, folder, nodes), link=_link(host, tree, function, integrated),
        path=list(function.path), iommu_group=group.rsplit("/", 1)[-1] if group else None, nodes=nodes,
        guc=(guc or {}).get(function.address),
    )  # fmt: skip


def intel_gpus(host: Host, tree: dict[str, Function]) -> list[Function]:
    """Functions that are Intel GPUs, in the order of their addresses."""
    found = []
    for function in sorted(tree.values(), key=lambda f: f.address):
        if _hex(host, f"{function.folder}/vendor") != "8086":
            continue
        kind = (host.read(f"{function.folder}/class") or "").strip().lower()
        known = family_of(_hex(host, f"{function.folder}/device"))[0] != "unknown"
        if kind.startswith(PCI_CLASSES[:3]) or (known and kind.startswith(PCI_CLASSES)):
            found.append(function)
    return found


def acs_redirects(config: bytes | None) -> Observation:
    """``fail`` when the ACS capability redirects peers, ``pass`` when it does not or is missing, ``unknown`` without access.

    Only root reads more than the first 64 bytes of a config space, and the capability stands above 256.
    """
    if config is None or len(config) <= 0x100:
        return "unknown"
    at = extended_capabilities(config).get(ACS)
    if at is None or at + 8 > len(config):
        return "pass"
    return "fail" if int.from_bytes(config[at + 6 : at + 8], "little") & ACS_REDIRECT else "pass"


def _bridge(host: Host, function: Function) -> BridgeFact:
    device = identity(host, function.folder)
    vendor, _, number = device.partition(":")
    kind: Literal["root-port", "on-card", "switch", "bridge"] = "switch"
    if len(function.path) == 1:
        kind = "root-port"
    elif vendor == "8086" and number in ON_CARD_BRIDGES:
        kind = "on-card"
    redirects = acs_redirects(host.read_bytes(f"{function.folder}/config"))
    return BridgeFact(function.address, device, kind, redirects, "" if redirects == "unknown" else "config")


def _first_function(host: Host, tree: dict[str, Function], root: str) -> str:
    """Id of what stands for a host bridge: function 00.0 of the root bus, else a root port that is first on it; else empty."""
    on_bus = sorted((f for f in tree.values() if f.root == root and len(f.path) == 1), key=lambda f: f.address)
    if not on_bus:
        return ""
    first = on_bus[0]
    kind = (host.read(f"{first.folder}/class") or "").strip().lower()
    return identity(host, first.folder) if first.address.endswith(":00.0") or kind.startswith("0x0604") else ""


def read_tree(host: Host, guc: dict[str, str] | None = None) -> Tree:
    """Cards, the bridges above them and their host bridges."""
    tree = Tree(functions=functions(host))
    for function in intel_gpus(host, tree.functions):
        tree.cards.append(read_card(host, tree.functions, function, guc))
        tree.hosts.setdefault(function.root, _first_function(host, tree.functions, function.root))
        for address in function.path[:-1]:
            above = tree.functions.get(address)
            if above is not None and address not in tree.bridges:
                tree.bridges[address] = _bridge(host, above)
    return tree


def cpu(host: Host) -> tuple[str, bool]:
    """The CPU in words, and whether the kernel lets peers through its host bridges whatever they are (AMD Zen)."""
    fields = {}
    for line in (host.read("/proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    vendor, family = fields.get("vendor_id", ""), fields.get("cpu family", "")
    text = f"{vendor} family {family} model {fields.get('model', '')}" if vendor else ""
    return text, vendor == "AuthenticAMD" and family.isdecimal() and int(family) >= AMD_ZEN_FAMILY


def _host_bridges_allow(a: str, b: str, same: bool) -> Observation:
    if not a or not b:
        return "unknown"
    for bridge in (a, b):
        if bridge in NEWER_HOST_BRIDGES:
            return "unknown"
        if bridge not in HOST_BRIDGES or (HOST_BRIDGES[bridge] and not same):
            return "fail"
    return "pass"


@dataclass(frozen=True)
class Route:
    """How two cards would reach each other."""

    link: LinkCode
    common: str | None
    redirects: list[str]
    inferred: bool
    """True when ACS redirect is concluded from IOMMU groups and no bridge can be named."""
    kernel_allows: Observation
    reason: str


def _between(first: Function, second: Function) -> tuple[str | None, list[str], list[str]]:
    """The nearest bridge above both (None: only the root bus is), and the bridges below it on either side."""
    shared = [one for one, other in zip(first.path, second.path, strict=False) if one == other]
    return (shared[-1] if shared else None), list(first.path[len(shared) : -1]), list(second.path[len(shared) : -1])


def route(tree: Tree, a: CardFact, b: CardFact, *, zen: bool) -> Route:
    """The kernel's rule applied to two cards."""
    first, second = tree.functions[a.address], tree.functions[b.address]
    common, left, right = _between(first, second)
    known = {address: tree.bridges[address].redirects for address in (*left, *right) if address in tree.bridges}
    redirects, inferred, unseen = [x for x, state in known.items() if state == "fail"], False, "unknown" in known.values()
    if unseen and a.iommu_group is not None and b.iommu_group is not None:
        # Config space is root's alone, IOMMU groups are everybody's: two functions below one bridge are in one group because
        # nothing between them isolates them, and in two because ACS redirects their requests.
        unseen, inferred = False, a.iommu_group != b.iommu_group
    host_bridges: Observation = "pass"
    if not zen:
        host_bridges = _host_bridges_allow(
            tree.hosts.get(first.root, ""), tree.hosts.get(second.root, ""), first.root == second.root
        )
    if common is None:
        link: LinkCode = "PHB" if first.root == second.root else "SYS"
        return Route(link, None, redirects, False, host_bridges, {"pass": "ALW", "fail": "NSB", "unknown": "U"}[host_bridges])
    own = [[x for x in side if x in tree.bridges and tree.bridges[x].kind != "on-card"] for side in (left, right)]
    link = "PIX" if max(map(len, own)) <= 1 else "PXB"
    if not redirects and not inferred:
        allowed: Observation = "unknown" if unseen and host_bridges != "pass" else "pass"
        return Route(link, common, [], False, allowed, "ALW" if allowed == "pass" else "U")
    return Route(
        link, common, redirects, not redirects, host_bridges, {"pass": "ALW", "fail": "ACS", "unknown": "U"}[host_bridges],
    )  # fmt: skip
