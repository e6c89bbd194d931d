"""What the host probes may see of files that could carry somebody's secrets, cut down while they are read.

A probe never holds more than a report may show, and a recorded machine needs no second redaction.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from probes.redact import redact_env

SETTING = re.compile(
    r"^(CCL_|FI_|ZE_|ZES_|ZET_|ONEAPI_|SYCL_|UR_|NEO|I_MPI_|OCL_ICD|VLLM_WORKER_MULTIPROC_METHOD$|VLLM_XPU|VLLM_MQ_MAX_CHUNK"
    r"|TRITON_INTEL|EnableHostUsm|RenderCompressed|OverrideDefaultFP64|LOCAL_WORLD_SIZE$|VLLM_HOST_IP$|KUBERNETES_SERVICE_HOST$)"
)
"""Environment variables that bear on several cards; no other variable is ever looked at."""
ADDRESS = {"VLLM_HOST_IP", "KUBERNETES_SERVICE_HOST"}
"""Variables of which only the presence matters."""

BOOT = re.compile(
    r"^(pci|pcie_\w+|iommu|intel_iommu|amd_iommu|(xe|i915)\.\w+|modprobe\.blacklist|module_blacklist|nomodeset|pci_\w+)(=|$)"
)
CPU_KEYS = ("vendor_id", "cpu family", "model", "model name", "stepping")
PACKAGES = re.compile(
    r"^(lib)?(ze-intel-gpu\d*|ze1|ze-loader|level-zero\S*|intel-level-zero-gpu\S*|intel-opencl-icd|igdgmm\d*|intel-igc-\S+|igc\S*"
    r"|intel-oneapi-(ccl|mpi)\S*|fabric1?)$"
)

KERNEL_LOGS = ("/var/log/kern.log", "/var/log/dmesg", "/var/log/messages")
KERNEL_KEEP = re.compile(
    r"p2pdma|peer-to-peer DMA|ACS redirect|ACS blocks|GuC firmware|force_probe|wedged|Engine reset", re.IGNORECASE
)


def settings(environment: dict[str, str]) -> dict[str, str]:
    """The variables of :data:`SETTING`, without secrets and addresses."""
    kept = {}
    for name in sorted(environment):
        if SETTING.match(name):
            kept[name] = "(set)" if name in ADDRESS else redact_env(name, environment[name])[:400]
    return kept


def _boot(text: str) -> str:
    return " ".join(token for token in text.split() if BOOT.match(token))


def _cpu(text: str) -> str:
    block = text.split("\n\n", 1)[0]
    return "\n".join(line for line in block.splitlines() if line.split(":")[0].strip() in CPU_KEYS) + "\n"


def _groups(text: str) -> str:
    rows = [line.split(":") for line in text.splitlines()]
    return "".join(f"{row[0]}:x:{row[2]}:\n" for row in rows if len(row) > 2 and row[0] in {"render", "video"})


def _status(text: str) -> str:
    keys = {"Seccomp", "NoNewPrivs", "CapEff", "CapBnd", "Uid", "Gid", "Groups"}
    return "".join(line + "\n" for line in text.splitlines() if line.split(":")[0] in keys)


def _packages(text: str) -> str:
    kept = []
    for stanza in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if line[:1] not in {" ", ""} and ": " in line)
        if PACKAGES.match(fields.get("Package", "")) and " installed" in fields.get("Status", ""):
            kept.append(f"Package: {fields['Package']}\nStatus: install ok installed\nVersion: {fields.get('Version', '')}\n")
    return "\n".join(kept)


def kernel_lines(text: str) -> str:
    """The kernel's messages about GPUs and peers, without date and host name, the last four hundred of them."""
    kept = []
    for line in text.splitlines():
        if KERNEL_KEEP.search(line):
            # A line of a log file starts with a date and the host's name; one of the ring buffer with its level and time.
            line = re.sub(r"^.*?\bkernel:\s*", "", line)
            kept.append(re.sub(r"^(<\d+>)?\s*(\[[^\]]*\]\s*)?", "", line).strip()[:300])
    return "\n".join(kept[-400:])


FILTERS: dict[str, Callable[[str], str]] = {
    "/proc/cmdline": _boot,
    "/proc/cpuinfo": _cpu,
    "/proc/self/status": _status,
    "/etc/group": _groups,
    "/var/lib/dpkg/status": _packages,
    **dict.fromkeys(KERNEL_LOGS, kernel_lines),
}
