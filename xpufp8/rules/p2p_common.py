"""What the P2P rules share: when they speak, how pairs are shown as evidence, which settings and versions are known to matter."""

from __future__ import annotations

import re
from collections.abc import Sequence

from probes.host_facts import CollectiveFact, DevicesFacts, HostIpcFacts, PairFact, PeerAccessFacts
from probes.pci_tables import GUC_FLOOR, KERNEL_FLOOR, RUNTIME_FLOOR, RUNTIME_FLOOR_NAME
from xpufp8.report import Evidence, Fix
from xpufp8.rules.base import Case
from xpufp8.rules.ranks import host_action, on_xpu, proven, ranks, seen, short

HOST_MEMORY = "every collective is staged through host memory; about 15% slower at large batch than peer access, where that works"
NO_PATH = ("NSB", "ACS", "KRN", "LZN", "BAR", "DRV")
"""Reasons that say there is no way for one card to reach the other, whatever the runtime does."""
OTHER_WAYS = (
    "Serve with pipeline instead of tensor parallelism (-pp N): it moves little data, and with CCL_SEND=direct CCL_RECV=direct none of "
    "it by memory handles",
    "Serve from one card: a smaller or more strongly quantized model, or --max-model-len lowered until it fits",
)
BY_PATH = "Give the container the device folder as well: -v /dev/dri/by-path:/dev/dri/by-path"
TRACE = "Start the container with --cap-add SYS_PTRACE (or --security-opt seccomp=unconfined)"
TRACE_COST = "processes in the container may trace one another"
MEETING = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}
MEETING_COST = "none on one machine: only the start-up handshake uses it"
THRESHOLDS = {
    "CCL_SYCL_ALLREDUCE_SIMPLE_THRESHOLD": "4294967296",
    "CCL_SYCL_REDUCE_SCATTER_SIMPLE_THRESHOLD": "4294967296",
    "CCL_SYCL_ALLGATHERV_SIMPLE_THRESHOLD": "4294967296",
    "CCL_SYCL_ALLTOALL_TMP_BUF": "1",
}
THRESHOLD_COST = (
    "large messages take oneCCL's simple algorithm; two reporters saw no loss against one card's speed (no bare comparison)"
)
SYCL_COLLECTIVES = (2021, 17)
"""oneCCL from which large messages go through SYCL kernels that read the peer's memory."""
SEND_COST = "sends between stages are copied through host memory"


def applies(case: Case) -> bool:
    """True where several ranks of Intel GPUs exchange memory and it is not proven that they can. Without any card (DEV001) nothing does."""
    devices = case.get("devices", DevicesFacts)
    absent = devices is not None and devices.applies and not devices.cards and not devices.level_zero.devices
    return on_xpu(case) and ranks(case).exchange and not proven(case) and not absent


def has_no_path(pair: PairFact) -> bool:
    """True when topology, kernel or Level Zero rule the pair out, whether or not a handle was tried on top of that."""
    return pair.status == "fail" and (pair.reason in NO_PATH or pair.kernel_allows == "fail" or pair.can_access == "fail")


def pair_evidence(facts: PeerAccessFacts, pairs: Sequence[PairFact]) -> list[Evidence]:
    """One line a pair (each direction that differs), and what it rests on."""
    found = []
    for pair in pairs:
        if pair.source > pair.target and any((p.source, p.target) == (pair.target, pair.source) for p in pairs):
            continue
        where = f"{short(pair.source)} - {short(pair.target)}"
        paths = {card.address: " > ".join(map(short, card.path)) for card in facts.cards}
        words = f"{pair.link}; {paths.get(pair.source, '?')} and {paths.get(pair.target, '?')}"
        words += f"; nearest shared bridge {short(pair.common)}" if pair.common else "; no bridge above both"
        found.append(
            seen(facts, "peer_access", words, "a bridge above both, or a host bridge that the kernel lets peers through", where)
        )
        found += [seen(facts, "peer_access", line, where="kernel log") for line in dict.fromkeys(pair.kernel_log)]
        if pair.redirects:
            found.append(seen(facts, "peer_access", f"ACS redirect is set on {', '.join(pair.redirects)}", where=where))
        if pair.can_access != "unknown":
            answer = "yes" if pair.can_access == "pass" else "no"
            found.append(seen(facts, "peer_access", f"zeDeviceCanAccessPeer answers {answer}", where=where))
        if pair.transfer is not None and pair.transfer.status == "fail":
            found.append(
                seen(
                    facts,
                    "peer_access",
                    f"{pair.transfer.stage}: {pair.transfer.result} {pair.transfer.detail}".strip(),
                    where=where,
                )
            )
    bridges = sorted({f"{root} {device}" for root, device in facts.host_bridges.items() if device})
    if bridges:
        found.append(seen(facts, "peer_access", f"host bridge {', '.join(bridges)}; CPU {facts.cpu or 'unknown'}", where="sysfs"))
    return found


def floors(devices: DevicesFacts | None) -> list[tuple[str, str]]:
    """What Battlemage cards are reported to need and what is here, for kernel, runtime and firmware that are known to be older."""
    if devices is None:
        return []
    low = []
    match = re.match(r"(\d+)\.(\d+)", devices.kernel)
    if match and (int(match[1]), int(match[2])) < KERNEL_FLOOR:
        low.append((f"Linux {KERNEL_FLOOR[0]}.{KERNEL_FLOOR[1]} or newer", f"Linux {devices.kernel}"))
    build = runtime_build(devices)
    if build is not None and build < RUNTIME_FLOOR:
        low.append((f"compute-runtime {RUNTIME_FLOOR_NAME} or newer where vLLM runs", f"compute-runtime build {build}"))
    firmware = sorted(card.guc for card in devices.cards if card.guc and card.family == "battlemage")
    if firmware and tuple(int(part) for part in firmware[0].split(".")) < GUC_FLOOR:
        low.append((f"GuC firmware {'.'.join(map(str, GUC_FLOOR))} or newer (linux-firmware)", f"GuC {firmware[0]}"))
    return low


def runtime_build(devices: DevicesFacts) -> int | None:
    """Build number of compute-runtime: from Level Zero, else from its package's version (``25.18.33578.15``)."""
    if devices.level_zero.drivers:
        return max(driver.build for driver in devices.level_zero.drivers)
    for name, text in sorted(devices.runtime.items()):
        match = re.match(r"(?:\d+:)?\d+\.\d+\.(\d{4,6})", text)
        if match and ("ze" in name or "opencl" in name):
            return int(match[1])
    return None


def stack_fixes(case: Case) -> list[Fix]:
    """A newer kernel and runtime where they are older than the floor, and a reboot."""
    devices = case.get("devices", DevicesFacts)
    fixes = [host_action(f"Install {wanted}") for wanted, _ in floors(devices)]
    fixes.append(host_action("Reboot before trying again: xe keeps state after crashed starts"))
    return fixes


def collective_evidence(facts: HostIpcFacts) -> list[Evidence]:
    """What the two bare ranks did."""
    run = facts.collective
    steps = ", ".join(f"{step.name} of {step.bytes} bytes {step.status}" for step in run.steps) or "no collective was reached"
    words = f"{run.backend}, two ranks: last stage {run.stage or 'start'}; {steps}; {run.seconds:.1f} s"
    found = [seen(facts, "host_ipc", words, "both ranks reduce and agree")]
    if run.error:
        found.append(seen(facts, "host_ipc", run.error, where="the rank's last words"))
    return found


def large_only(run: CollectiveFact) -> bool:
    """True when a small collective passed and a larger one did not."""
    sizes = {step.bytes: step.status for step in run.steps if step.name == "all_reduce"}
    return run.status == "fail" and len(sizes) > 1 and sizes.get(min(sizes)) == "pass" and "fail" in sizes.values()


def oneccl_version(text: str | None) -> tuple[int, ...] | None:
    """(2021, 17, 2) of ``2021.17.2``."""
    match = re.match(r"(\d{4})\.(\d+)(?:\.(\d+))?", text or "")
    return tuple(int(part) for part in match.groups() if part is not None) if match else None


def meets(facts: HostIpcFacts) -> bool:
    """False when two bare ranks of xccl were started and never met."""
    run = facts.collective
    return not (run.backend == "xccl" and run.status == "fail" and run.stage == "import")
