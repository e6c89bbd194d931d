"""Expands the compact machines of tests/data/sysfs into a folder that looks like the root of a file system.

A machine is JSON: ``pci`` is the tree below each root bus (``id``, ``class``, ``link``, ``driver``, ``bar_gib``, ``acs`` = ACS control
register, ``children``), ``files`` and ``links`` are added as they stand, ``observations`` is what was tried there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from probes.protocol import Context

TREES = Path(__file__).resolve().parent.parent / "data" / "sysfs"
NAMES = sorted(path.stem for path in TREES.glob("*.json"))


def _config(acs: int | None) -> bytes:
    """Config space as root reads it, with an ACS capability; 64 bytes, as others read it, for None."""
    if acs is None:
        return bytes(64)
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 0x1 << 16 | 0x148 << 20).to_bytes(4, "little")  # AER first, ACS behind it
    space[0x148:0x14C] = (0x000D | 0x1 << 16).to_bytes(4, "little")
    space[0x14C:0x14E] = (0x5F).to_bytes(2, "little")
    space[0x14E:0x150] = acs.to_bytes(2, "little")
    return bytes(space)


def _bars(gib: float) -> str:
    size = int(gib * (1 << 30))
    rows = [(0x80000000, 0x80FFFFFF, 0x140204), (0, 0, 0), (0x4000000000, 0x4000000000 + size - 1, 0x14220C)] + [(0, 0, 0)] * 10
    return "".join(f"0x{a:016x} 0x{b:016x} 0x{c:016x}\n" for a, b, c in rows)


def _write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def _link(root: Path, place: str, target: str) -> None:
    path = root / place.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _function(root: Path, folder: str, address: str, entry: dict[str, Any]) -> None:
    vendor, device = entry["id"].split(":")
    base = root / folder.lstrip("/")
    values = {"vendor": f"0x{vendor}\n", "device": f"0x{device}\n", "class": f"{entry['class']}\n", "numa_node": "-1\n"}
    if "subsystem" in entry:
        values["subsystem_vendor"], values["subsystem_device"] = (f"0x{part}\n" for part in entry["subsystem"].split(":"))
    if "link" in entry:
        names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
        values |= {name: f"{value}\n" for name, value in zip(names, entry["link"], strict=True)}
    if "bar_gib" in entry:
        values["resource"] = _bars(entry["bar_gib"])
    if "vram_gib" in entry and entry.get("driver") == "xe":
        values["tile0/physical_vram_size_bytes"] = f"0x{entry['vram_gib'] << 30:x}\n"
    for name, text in values.items():
        _write(base / name, text)
    _write(base / "config", _config(entry.get("acs")))
    _link(root, f"/sys/bus/pci/devices/{address}", f"../../../{folder.removeprefix('/sys/')}")
    if entry.get("driver"):
        _link(root, f"{folder}/driver", f"/sys/bus/pci/drivers/{entry['driver']}")
    if "iommu_group" in entry:
        (root / "sys/kernel/iommu_groups" / str(entry["iommu_group"])).mkdir(parents=True, exist_ok=True)
        _link(root, f"{folder}/iommu_group", f"/sys/kernel/iommu_groups/{entry['iommu_group']}")
    for node in entry.get("nodes", []):
        _write(base / "drm" / node / "dev", "226:0\n")
        if not (root / "dev/dri" / node).exists():
            _write(root / "dev/dri" / node, "")
    for child, below in entry.get("children", {}).items():
        _function(root, f"{folder}/{child}", child, below)


def expand(tree: Path, root: Path, *, observations: dict[str, Any] | None = None, environment: dict[str, str] | None = None,
           files: dict[str, str] | None = None) -> None:  # fmt: skip
    """Write a machine into ``root``. ``observations``, ``environment`` and ``files`` replace or add to what the tree holds."""
    data = json.loads(tree.read_text(encoding="utf-8"))
    for bus, functions in data["pci"].items():
        for address, entry in functions.items():
            _function(root, f"/sys/devices/{bus}/{address}", address, entry)
    for path, text in {**data.get("files", {}), **(files or {})}.items():
        _write(root / path.lstrip("/"), text)
    for path, target in data.get("links", {}).items():
        _link(root, path, target)
    note = {
        "observations": {**data.get("observations", {}), **(observations or {})},
        "environment": {**data.get("environment", {}), **(environment or {})},
    }
    (root / "xpufp8-host.json").write_text(json.dumps(note), encoding="utf-8")


class Shelf:
    """Expanded machines, each made once: a tree is some hundred small files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def machine(self, name: str, **changes: Any) -> Path:
        """The folder of a machine. It is shared: nobody writes into it."""
        key = json.dumps([name, changes], sort_keys=True)
        if key not in self._made:
            self._made[key] = self._folder / f"{name}-{len(self._made)}"
            expand(TREES / f"{name}.json", self._made[key], **changes)
        return self._made[key]

    def context(self, name: str, *arguments: str, device: str = "xpu", **changes: Any) -> Context:
        """Context of a machine for a command: ``context("i915", "-tp", "2")``."""
        return Context(device, vllm_args=list(arguments), options={"sysfs_root": str(self.machine(name, **changes))})


def facts_of(context: Context) -> dict[str, Any]:
    """Facts of the three host probes for one context."""
    from probes import devices, host_ipc, peer_access

    return {
        "devices": devices.observe(context),
        "peer_access": peer_access.observe(context),
        "host_ipc": host_ipc.observe(context),
    }


def findings_of(context: Context):
    """Findings of the DEV and P2P rules for one context."""
    return judged(facts_of(context), *context.vllm_args, device=context.device)


def settings_of(findings) -> dict[str, str]:
    """Variables of the fixes that a plan would carry: the first usable fix of each error."""
    chosen: dict[str, str] = {}
    for finding in findings:
        fix = next((fix for fix in finding.fixes if fix.kind == "env"), None)
        if finding.severity == "error" and finding.status == "fail" and fix is not None:
            chosen |= dict(word.split("=", 1) for word in fix.action.split())
    return chosen


def link_count(folder: Path) -> int:
    """How many links a folder's tree holds (a check that the expansion made real ones)."""
    return sum(path.is_symlink() for path in folder.rglob("*"))


def judged(facts: dict[str, Any], *arguments: str, device: str = "xpu"):
    """Findings of the P2P and DEV rules for facts at hand."""
    from xpufp8.rules import ALL, Case

    case = Case(device, arguments, facts=facts)
    rules = [one for one in ALL if one.code.startswith(("P2P", "DEV")) and all(name in facts for name in one.needs)]
    return [finding for one in rules for finding in one.check(one, case)]


def codes(findings) -> list[str]:
    """Codes of findings, each once."""
    return sorted({finding.code for finding in findings})


def by_code(findings, code):
    """The one finding of a code."""
    found = [finding for finding in findings if finding.code == code]
    assert len(found) == 1, [f.code for f in findings]
    return found[0]
