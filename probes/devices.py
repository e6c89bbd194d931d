"""Probe ``devices``: Intel GPUs as torch, Level Zero and sysfs each show them, and what decides who may use them.

Options: ``sysfs_root`` (a recorded machine), ``environment``, ``ze_loader`` (path of a loader), ``limit`` (seconds, 6.5 by default).
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from probes.bounded import run_bounded
from probes.facts import Mode, Observation
from probes.host_facts import DevicesFacts, LevelZeroFact, NodeFact, TorchDevicesFact
from probes.host_reader import Host, applies, open_host
from probes.kernel_log import firmware, read_log
from probes.level_zero import ask, from_json
from probes.pci import read_tree
from probes.protocol import Context

LIMIT = 6.5
DRI = "/dev/dri"
ICD_FOLDERS = ("/etc/OpenCL/vendors", "/opt/intel/oneapi/compiler/latest/etc/OpenCL/vendors")
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/lib/x86_64-linux-gnu/intel-opencl",
)
RUNTIME_LIBRARIES = re.compile(r"^(libze_intel_gpu|libze_loader|libigdrcl)\.so(?:\.(?P<version>\d[\d.]*))?$")

TORCH_CODE = """
import json, os
try:
    import torch
except Exception as error:
    print(json.dumps({"status": "no-torch", "detail": f"{type(error).__name__}: {error}"[:300]}), flush=True)
    os._exit(0)
out = {"version": torch.__version__}
xpu = getattr(torch, "xpu", None)
built = bool(xpu) and hasattr(torch._C, "_xpu_getDeviceCount")
if not built:
    out["status"] = "not-built"
else:
    try:
        out["count"] = xpu.device_count()
        out["names"] = [xpu.get_device_name(i) for i in range(out["count"])]
        out["status"] = "answered"
    except Exception as error:
        out.update(status="failed", detail=f"{type(error).__name__}: {error}"[:300])
print(json.dumps(out), flush=True)
os._exit(0)
"""


def ask_torch(environment: dict[str, str], limit: float) -> dict[str, Any]:
    """What torch.xpu shows, from a process of its own; JSON of a :class:`TorchDevicesFact`."""
    ended = run_bounded([sys.executable, "-c", TORCH_CODE], limit, environment)
    data = ended.json()
    if data is None:
        data = {"status": "timeout" if ended.code is None else "crashed", "detail": ended.fate}
    return data


def _open_node(path: str) -> tuple[Observation, str | None]:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        return "fail", errno.errorcode.get(error.errno or 0, str(error.errno))
    return "pass", None


def _live_nodes() -> list[dict[str, Any]]:
    """What /dev/dri holds, and which of it this process may open. Opening a node reads and writes nothing."""
    found = []
    try:
        entries = sorted(Path(DRI).iterdir())
    except OSError:
        return []
    for entry in entries:
        try:
            info = entry.stat()
        except OSError as error:
            found.append(asdict(NodeFact(str(entry), opens="fail", error=errno.errorcode.get(error.errno or 0))))
            continue
        if not stat.S_ISCHR(info.st_mode):
            continue
        opens, error_name = _open_node(str(entry))
        found.append(asdict(NodeFact(str(entry), f"{stat.S_IMODE(info.st_mode):o}", info.st_uid, info.st_gid, opens, error_name)))
    return found


def nodes(host: Host) -> list[NodeFact]:
    """Entries of /dev/dri; on a recorded machine without a note of what opened, just their names."""
    seen = host.observed("nodes", _live_nodes)
    if seen is None:
        names = [name for name in host.listing(DRI) or [] if re.match(r"^(card|renderD)\d+$", name)]
        return [NodeFact(f"{DRI}/{name}") for name in names]
    return [NodeFact(**node) for node in seen]


def container_kind(host: Host) -> str | None:
    """docker, podman, kubernetes or None, from the marks that each leaves."""
    if "KUBERNETES_SERVICE_HOST" in host.environment:
        return "kubernetes"
    if host.exists("/run/.containerenv"):
        return "podman"
    if host.exists("/.dockerenv"):
        return "docker"
    return None


def boot_parameters(host: Host) -> list[str]:
    """Kernel parameters that bear on PCI and GPUs."""
    return (host.read("/proc/cmdline") or "").split()


def kernel_release(host: Host) -> str:
    """``7.0.0-28-generic``."""
    seen = host.observed("kernel", lambda: os.uname().release)
    return str(seen or host.read("/proc/sys/kernel/osrelease") or "").strip()


def _modules(host: Host) -> dict[str, str]:
    found = {}
    for name in ("xe", "i915"):
        if host.listing(f"/sys/module/{name}") is not None:
            found[name] = (host.read(f"/sys/module/{name}/parameters/force_probe") or "").strip()
    return found


def _runtime(host: Host) -> dict[str, str]:
    """User-mode driver versions: packages of the Debian database, and libraries whose file name holds one."""
    found = {}
    for stanza in (host.read("/var/lib/dpkg/status") or "").split("\n\n"):
        match = re.search(r"^Package: (\S+)$.*?^Version: (\S+)$", stanza, re.MULTILINE | re.DOTALL)
        if match:
            found[match.group(1)] = match.group(2)
    libraries = host.observed("runtime_libraries", _live_libraries)
    return {**found, **(libraries or {})}


def _live_libraries() -> dict[str, str]:
    found: dict[str, str] = {}
    for folder in LIBRARY_FOLDERS:
        try:
            names = sorted(entry.name for entry in Path(folder).iterdir())
        except OSError:
            continue
        for name in names:
            match = RUNTIME_LIBRARIES.match(name)
            if match and len(match["version"] or "") >= len(found.get(match.group(1), "")):
                found[match.group(1)] = match["version"] or ""
    return found


def opencl_libraries(host: Host) -> list[str]:
    """Libraries named by the OpenCL ICD files, in the folders that the ICD loader reads."""
    override = host.environment.get("OCL_ICD_VENDORS")
    found: list[str] = []
    for folder in [override] if override else ICD_FOLDERS:
        names = [name for name in host.listing(folder) or [] if name.endswith(".icd")]
        found += [(host.read(f"{folder}/{name}") or "").strip() for name in names]
    extra = host.environment.get("OCL_ICD_FILENAMES", "")
    return [line for line in [*found, *extra.split(":")] if line]


def level_zero(host: Host, context: Context, limit: float) -> LevelZeroFact:
    """Level Zero's answer, asked once a machine: the same question of two probes gives one recorded answer."""
    loader = context.options.get("ze_loader")
    data = host.observed("level_zero", lambda: asdict(ask(host.environment, limit, loader)))
    return LevelZeroFact(detail="not recorded") if data is None else from_json(data)


def _unmasked(host: Host, context: Context, limit: float) -> int | None:
    """How many devices there are without ZE_AFFINITY_MASK: asked, not guessed from the mask."""
    if not host.environment.get("ZE_AFFINITY_MASK"):
        return None
    environment = {key: value for key, value in host.environment.items() if key != "ZE_AFFINITY_MASK"}
    count = host.observed("unmasked", lambda: len(ask(environment, limit, context.options.get("ze_loader")).devices))
    return int(count) if count is not None else None


def observe(context: Context) -> DevicesFacts:
    """Look at the machine's Intel GPUs in every way there is."""
    host = open_host(context)
    mode: Mode = "live" if host.live else "static"
    if not applies(context, host):
        return DevicesFacts(context.device, "simulated", applies=False)
    return observe_host(context, host, mode)


def observe_host(context: Context, host: Host, mode: Mode) -> DevicesFacts:
    """As :func:`observe`, of a host that is already open."""
    deadline = time.monotonic() + float(context.options.get("limit", LIMIT))
    log, lines = read_log(host)
    tree = read_tree(host, firmware(lines))
    identity = host.observed("identity", lambda: {"uid": os.geteuid(), "gids": sorted({os.getegid(), *os.getgroups()})}) or {}
    ze = level_zero(host, context, min(3.0, max(0.2, deadline - time.monotonic())))
    torch_data = None
    if context.device == "xpu":
        torch_data = host.observed("torch", lambda: ask_torch(host.environment, max(0.2, deadline - time.monotonic())))
    groups = re.findall(r"^(render|video):x?:(\d+)", host.read("/etc/group") or "", re.MULTILINE)
    by_path = host.listing(f"{DRI}/by-path")
    return DevicesFacts(
        device=context.device, mode=mode, cards=tree.cards, nodes=nodes(host), dri_folder=host.listing(DRI) is not None,
        by_path=by_path or [], by_path_folder=by_path is not None, uid=identity.get("uid"), gids=identity.get("gids", []),
        groups={name: int(gid) for name, gid in groups}, container=container_kind(host), kernel=kernel_release(host),
        boot=boot_parameters(host), modules=_modules(host), runtime=_runtime(host), opencl=opencl_libraries(host),
        settings=host.settings(), log=log, level_zero=ze, unmasked=_unmasked(host, context, max(0.2, deadline - time.monotonic())),
        torch=TorchDevicesFact(**torch_data) if torch_data else TorchDevicesFact(),
    )  # fmt: skip
