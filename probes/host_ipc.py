"""Probe ``host_ipc``: what oneCCL and vLLM's workers need from the host, tested by doing it.

Options: ``sysfs_root`` (a recorded machine), ``environment``, ``limit`` (seconds, 8.5 by default), ``collective`` (true or false:
whether two ranks are really run; by default only when several are asked for).
"""

from __future__ import annotations

import mmap
import os
import re
import resource
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from probes.devices import DRI, container_kind
from probes.facts import Mode
from probes.fd_exchange import check_self, check_siblings
from probes.host_facts import CheckFact, CollectiveFact, CollectiveStepFact, HostIpcFacts, InterfaceFact, ProviderFact
from probes.host_reader import Host, applies, errno_name, open_host
from probes.parallel import world_size
from probes.protocol import Context
from probes.two_ranks import BACKENDS, run

LIMIT = 8.5
SHM = "/dev/shm"  # noqa: S108 - the folder itself is what is looked at
SOCKET_FOLDER = "/tmp"  # noqa: S108 - where oneCCL binds its sockets
PTRACE_CAPABILITY = 19
FABRIC_LIBRARY = re.compile(r"^libfabric\.so(\.\d+)*$")
PROVIDER_LIBRARY = re.compile(r"^lib(?P<name>\w+)-fi\.so$")
PROVIDER_ROOTS = ("/opt/intel/oneapi/mpi", "/opt/intel/oneapi/ccl")
MEETING = re.compile(r"^(FI_|CCL_ATL_|CCL_KVS|I_MPI_|CCL_PROCESS_LAUNCHER|CCL_LOCAL)")
"""Variables that bear on how ranks find each other."""
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


def check_shm() -> CheckFact:
    """Whether a shared page can be made in /dev/shm. The file has no name, so nothing is left behind whatever happens."""
    try:
        descriptor = os.open(SHM, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        return CheckFact("fail", "no file can be made there", errno_name(error))
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as page:
            page[:4] = b"page"
            same = os.pread(descriptor, 4, 0) == b"page"
    except OSError as error:
        return CheckFact("fail", "a page cannot be mapped", errno_name(error))
    finally:
        os.close(descriptor)
    return CheckFact("pass" if same else "fail", "one page made, mapped and read back")


def check_loopback() -> CheckFact:
    """Whether two sockets meet on 127.0.0.1, which the tcp provider needs with FI_TCP_IFACE=lo."""
    try:
        with socket.socket() as server:
            server.settimeout(1.0)
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=1.0) as client:
                other, _ = server.accept()
                with other:
                    client.sendall(b"ping")
                    answer = other.recv(4)
    except OSError as error:
        return CheckFact("fail", "no connection on 127.0.0.1", errno_name(error))
    return CheckFact("pass" if answer == b"ping" else "fail", "connection on 127.0.0.1")


def check_hostname() -> CheckFact:
    """Whether the machine's own name has an address here: oneCCL and gloo look it up when they meet. The name is not kept."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError as error:
        return CheckFact("fail", "the host's own name has no address", type(error).__name__)
    loop = all(str(entry[4][0]).startswith("127.") for entry in found)
    return CheckFact("pass", "the host's own name is a loopback address" if loop else "the host's own name has an address")


def check_socket_folder() -> CheckFact:
    """Whether oneCCL can bind its named sockets (drmfd and sockets exchange)."""
    if os.access(SOCKET_FOLDER, os.W_OK | os.X_OK):
        return CheckFact("pass", f"{SOCKET_FOLDER} can be written")
    return CheckFact("fail", f"{SOCKET_FOLDER} cannot be written")


def _tried(limit: float, environment: dict[str, str]) -> dict[str, Any]:
    """Everything that is tried by system calls, in a second or two."""
    checks = {
        "pidfd_self": check_self(), **check_siblings(limit, environment), "shm": check_shm(), "loopback": check_loopback(),
        "hostname": check_hostname(), "socket_folder": check_socket_folder(),
    }  # fmt: skip
    return {name: asdict(check) for name, check in checks.items()}


def _limits() -> dict[str, list[int]]:
    kinds = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE}
    return {
        name: [-1 if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind)]
        for name, kind in kinds.items()
    }


def _shm_size() -> list[int] | None:
    try:
        info = os.statvfs(SHM)
    except OSError:
        return None
    return [info.f_frsize * info.f_blocks, info.f_frsize * info.f_bavail]


def _interfaces() -> list[dict[str, Any]]:
    found = []
    try:
        names = sorted(entry.name for entry in Path("/sys/class/net").iterdir())
    except OSError:
        names = [name for _, name in socket.if_nameindex()]
    for name in names:
        try:
            flags = int(Path(f"/sys/class/net/{name}/flags").read_text(encoding="ascii"), 16)
        except (OSError, ValueError):
            flags = 0x9 if name == "lo" else 0
        found.append({"name": name, "up": bool(flags & 0x1), "loopback": bool(flags & 0x8)})
    return found


def _status(host: Host) -> dict[str, str]:
    rows = (host.read("/proc/self/status") or "").splitlines()
    return {key.strip(): value.strip() for key, _, value in (row.partition(":") for row in rows)}


def _user_namespace(host: Host) -> bool | None:
    """True inside a user namespace that does not map every user."""
    text = (host.read("/proc/self/uid_map") or "").split()
    return None if len(text) < 3 else text[:3] != ["0", "0", "4294967295"]


def _walk(folder: Path, depth: int) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    found = []
    for entry in entries:
        if entry.is_dir():
            if depth > 0:
                found += _walk(entry, depth - 1)
        elif FABRIC_LIBRARY.match(entry.name) or PROVIDER_LIBRARY.match(entry.name):
            found.append(entry)
    return found


def _fabric_files(environment: dict[str, str]) -> list[str]:
    """Libfabric and its provider libraries: oneAPI's folders, the interpreter's own lib folder, the loader's path, the system."""
    folders = [Path(root) for root in PROVIDER_ROOTS if Path(root).is_dir()]
    found = [path for folder in folders for path in _walk(folder, 7)]
    near = [
        Path(sys.prefix) / "lib",
        *(Path(p) for p in environment.get("LD_LIBRARY_PATH", "").split(":") if p),
        *map(Path, LIBRARY_FOLDERS),
    ]
    for folder in near:
        found += [path for sub in (folder, folder / "prov", folder / "libfabric") for path in _walk(sub, 0)]
    chosen = environment.get("FI_PROVIDER_PATH", "")
    found += _walk(Path(chosen), 0) if chosen else []
    return sorted({str(path) for path in found})


def _providers(host: Host) -> tuple[list[str], list[ProviderFact]]:
    files = [str(path) for path in host.observed("fabric_files", lambda: _fabric_files(host.environment)) or []]
    libraries = [path for path in files if FABRIC_LIBRARY.match(path.rsplit("/", 1)[-1])]
    found: dict[str, ProviderFact] = {}
    for path in files:
        match = PROVIDER_LIBRARY.match(path.rsplit("/", 1)[-1])
        if match:
            found.setdefault(match["name"], ProviderFact(match["name"], path))
    for line in (host.command(["fi_info", "-l"]) or "").splitlines():
        match = re.match(r"^(\w+):\s*$", line)
        if match:
            found.setdefault(match[1], ProviderFact(match[1], "built in"))
    return libraries, sorted(found.values(), key=lambda provider: provider.name)


def _provider_path(host: Host) -> CheckFact | None:
    path = host.environment.get("FI_PROVIDER_PATH")
    if not path:
        return None
    names = host.observed("provider_path", lambda: sorted(entry.name for entry in _walk(Path(path), 0)))
    if names is None:
        return CheckFact("unknown", "not recorded")
    held = [name for name in names if PROVIDER_LIBRARY.match(name)]
    return CheckFact("pass" if held else "fail", f"{len(held)} provider libraries")


def _oneccl(host: Host) -> str | None:
    """OneCCL's version: its Python distribution, CCL_ROOT, the package of oneAPI, or the folder that holds it."""

    def look() -> str | None:
        import importlib.metadata

        for name in ("oneccl", "oneccl-devel"):
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        root = host.environment.get("CCL_ROOT") or "/opt/intel/oneapi/ccl/latest"
        match = re.search(r"/ccl/(\d{4}\.\d+(?:\.\d+)*)", os.path.realpath(root))
        return match[1] if match else None

    seen = host.observed("oneccl", look)
    return str(seen) if seen else None


def _collective(host: Host, context: Context, world: int, limit: float) -> CollectiveFact:
    device = "xpu" if context.simulated else context.device.split(":")[0]
    wanted = context.options.get("collective")
    if wanted is None:
        wanted = world > 1
    if not wanted or device not in BACKENDS:
        return CollectiveFact("skipped", BACKENDS.get(device, ""))
    send = pipeline_wanted(context.vllm_args)
    data = host.observed("collective", lambda: asdict(run(device, limit, host.environment, send=send)))
    if data is None:
        return CollectiveFact("unknown", BACKENDS[device], error="not recorded on that machine")
    fact = CollectiveFact(**{**data, "steps": [CollectiveStepFact(**step) for step in data.get("steps", [])]})
    # Ranks that never met still do not, whatever is set for what comes after the meeting; any other result is of its settings.
    stays = fact.status == "fail" and fact.stage == "import" and not any(MEETING.match(name) for name in host.changed)
    if host.changed and not stays:
        return CollectiveFact("unknown", BACKENDS[device], error="not recorded on that machine with these settings")
    return fact


def pipeline_wanted(tokens: list[str]) -> bool:
    """True when the options ask for pipeline parallelism."""
    kept: list[str] = []
    for at, token in enumerate(tokens):
        if token.startswith(("-pp", "--pipeline")):
            kept += tokens[at : at + 2]
    return world_size(kept) > 1


def observe(context: Context) -> HostIpcFacts:
    """Try what several ranks need from this host."""
    host = open_host(context)
    mode: Mode = "live" if host.live else "static"
    if not applies(context, host):
        return HostIpcFacts(context.device, "simulated", applies=False, world=world_size(context.vllm_args))
    return observe_host(context, host, mode)


def observe_host(context: Context, host: Host, mode: Mode) -> HostIpcFacts:
    """As :func:`observe`, of a host that is already open."""
    deadline = time.monotonic() + float(context.options.get("limit", LIMIT))
    world = world_size(context.vllm_args)
    tried = host.observed("checks", lambda: _tried(2.0, host.environment)) or {}
    status = _status(host)
    capabilities = status.get("CapEff")
    shm = host.observed("shm", _shm_size)
    libraries, providers = _providers(host)
    return HostIpcFacts(
        device=context.device, mode=mode, world=world, checks={name: CheckFact(**check) for name, check in tried.items()},
        seccomp=int(status["Seccomp"]) if status.get("Seccomp", "").isdecimal() else None,
        ptrace_scope=host.number("/proc/sys/kernel/yama/ptrace_scope"),
        ptrace_capability=bool(int(capabilities, 16) >> PTRACE_CAPABILITY & 1) if capabilities else None,
        user_namespace=_user_namespace(host), container=container_kind(host),
        shm_bytes=shm[0] if shm else None, shm_free=shm[1] if shm else None, limits=host.observed("limits", _limits) or {},
        libfabric=libraries, providers=providers,
        provider_folders=sorted({provider.path.rsplit("/", 1)[0] for provider in providers if "/" in provider.path}),
        provider_path=_provider_path(host), interfaces=[InterfaceFact(**item) for item in host.observed("interfaces", _interfaces) or []],
        by_path_folder=host.listing(f"{DRI}/by-path") is not None, oneccl=_oneccl(host),
        start_method=host.environment.get("VLLM_WORKER_MULTIPROC_METHOD"),
        collective=_collective(host, context, world, max(1.0, deadline - time.monotonic())), settings=host.settings(),
    )  # fmt: skip
