"""P2P: what collectives need from the host around the cards: descriptors, sockets, shared memory, providers, limits.

Like all P2P rules they speak of several ranks only. Each rests on something that was tried here, not on a version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from probes.host_facts import CheckFact, HostIpcFacts
from xpufp8.report import Evidence, Finding, Fix, Severity
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.p2p_common import BY_PATH, MEETING, MEETING_COST, TRACE, TRACE_COST, applies, collective_evidence, meets
from xpufp8.rules.ranks import Ranks, host_action, missing, on_xpu, ranks, seen

SHM = "/dev/shm"  # noqa: S108 - the folder itself is what is looked at
MIB = 1 << 20
BROADCAST_CHUNKS = 10
RESPONSE_BYTES = 24 * MIB * BROADCAST_CHUNKS
"""vllm/distributed/device_communicators/shm_broadcast.py: ten chunks a ring; 24 MiB each for a worker's answers."""
OPEN_FILES = 4096
"""oneCCL keeps up to a thousand opened handles a process (CCL_ZE_CACHE_OPEN_IPC_HANDLES_THRESHOLD), each a descriptor."""
PINNING = {"verbs", "psm2", "psm3", "mlx", "efa", "cxi"}
"""libfabric providers that lock memory."""
LOCKED = 64 * MIB


def _check(facts: HostIpcFacts, name: str) -> CheckFact:
    return facts.checks.get(name, CheckFact("unknown"))


def _check_evidence(facts: HostIpcFacts, name: str, expected: str = "") -> Evidence:
    check = _check(facts, name)
    error = f" ({check.error})" if check.error else ""
    return seen(
        facts, "host_ipc", f"{name}: {check.status}{error}: {check.detail}", expected, "tried between processes of the probe"
    )


def _guards(facts: HostIpcFacts) -> Evidence:
    words = [f"seccomp {('none', 'strict', 'filter')[facts.seccomp] if facts.seccomp in {0, 1, 2} else 'unknown'}"]
    words.append(f"ptrace_scope {'unknown' if facts.ptrace_scope is None else facts.ptrace_scope}")
    capability = {True: "held", False: "not held", None: "unknown"}[facts.ptrace_capability]
    words.append(f"CAP_SYS_PTRACE {capability}; container {facts.container or 'none seen'}")
    return seen(facts, "host_ipc", "; ".join(words), where="/proc/self/status")


@rule("P2P004", "Ranks cannot take descriptors from one another", "warning", needs=("host_ipc",), references=(
    "uxlfoundation/oneCCL#217", "uxlfoundation/oneCCL#213", "moby/moby#41665",
))  # fmt: skip
def pidfd_refused(self: Rule, case: Case) -> Iterator[Finding]:
    """`pidfd_getfd`, by which oneCCL moves memory handles, was refused between two sibling processes.

    ## What it means
    A Level Zero handle is a file descriptor. oneCCL takes it out of the other rank's process with `pidfd_open` and `pidfd_getfd`. A seccomp
    filter forbids that (Docker's default one does without CAP_SYS_PTRACE), or the kernel's ptrace rules do (Yama's
    ptrace_scope, different users). The probe tells the two apart: a filter refuses it also for a process's own descriptor.

    ## Why it matters
    oneCCL tests only the latter. Under a filter it falls back to the DRM device (drmfd), which needs /dev/dri/by-path (P2P005) and can
    deadlock when ranks see different cards. Under ptrace rules it notices nothing and dies at the first exchange.

    ## How it looks
    `pidfd is not supported, fallbacks to drmfd exchange mode`, or `pidfd_getfd failed … errno: Operation not permitted`.

    ## How it is fixed
    `--cap-add SYS_PTRACE` for the container, or `--security-opt seccomp=unconfined`; `sysctl kernel.yama.ptrace_scope=0` on bare metal.
    Asking for sockets (`CCL_ZE_IPC_EXCHANGE=sockets`) does not help: it is overridden where pidfd is unsupported.
    """
    facts = case.get("host_ipc", HostIpcFacts)
    if facts is None or not applies(case):
        return
    own, sibling, traced = (_check(facts, name) for name in ("pidfd_self", "pidfd_sibling", "pidfd_traced"))
    if own.status != "fail" and sibling.status != "fail":
        return
    evidence = [_check_evidence(facts, name) for name in ("pidfd_self", "pidfd_sibling", "pidfd_traced") if name in facts.checks]
    evidence.append(_guards(facts))
    if "ENOSYS" in {own.error, sibling.error}:
        cause = (
            "This kernel has no pidfd_getfd (it came with Linux 5.6), or a filter hides it; oneCCL falls back to the DRM device."
        )
        fixes = [host_action(TRACE, TRACE_COST), host_action("Install Linux 5.6 or newer")]
    elif own.status == "fail":
        cause = (
            "A seccomp filter forbids it even for a process's own descriptor; oneCCL sees that and falls back to the DRM device."
        )
        fixes = [host_action(TRACE, TRACE_COST)]
    else:
        cause = "It works for a process's own descriptor and not between processes: ptrace rules forbid it; oneCCL tests only the former."
        fixes = [host_action("Set kernel.yama.ptrace_scope to 0 (sysctl -w kernel.yama.ptrace_scope=0)", TRACE_COST)]
        if facts.container:
            fixes.insert(0, host_action(TRACE, TRACE_COST))
        if traced.status == "pass":
            cause += " Once the other process allows tracing (as newer oneCCL does by itself) it works."
    # Where collectives go through host memory no handle is exchanged; under a filter oneCCL takes another way by itself.
    dies = own.status == "pass" and traced.status != "pass" and facts.settings.get("CCL_TOPO_P2P_ACCESS") != "0"
    yield self.finding("pidfd_getfd", cause, evidence, fixes=fixes, severity="error" if dies else "warning")


@rule("P2P005", "The fallback for memory handles has no device folder", "error", needs=("host_ipc",), references=(
    "uxlfoundation/oneCCL#121", "uxlfoundation/oneCCL#217", "intel/ipex-llm#12990",
))  # fmt: skip
def no_by_path(self: Rule, case: Case) -> Iterator[Finding]:
    """Handles would move through the DRM device here, and the folder in which oneCCL looks for devices is missing.

    ## What it means
    `docker run --device /dev/dri` maps the device nodes and not the links in /dev/dri/by-path. oneCCL's drmfd exchange, which it takes
    wherever pidfd is refused, opens that folder.

    ## Why it matters
    Every process group dies when it is made, whether or not the cards could reach each other.

    ## How it looks
    `oneCCL: ze_fd_manager.cpp:143 init_device_fds: EXCEPTION: opendir failed: could not open device directory`

    ## How it is fixed
    Map the folder, or make pidfd work so that it is not needed. Without pidfd oneCCL does not honour `CCL_ZE_IPC_EXCHANGE=sockets`
    (uxlfoundation/oneCCL#213).
    """
    facts = case.get("host_ipc", HostIpcFacts)
    if facts is None or not applies(case) or facts.by_path_folder or facts.settings.get("CCL_DRMFD_DEV_RENDER_DIR_PATH"):
        return
    asked = facts.settings.get("CCL_ZE_IPC_EXCHANGE") == "drmfd"
    if not asked and _check(facts, "pidfd_self").status != "fail":
        return
    why = "CCL_ZE_IPC_EXCHANGE=drmfd asks for it" if asked else "pidfd is refused (P2P004)"
    cause = f"oneCCL moves handles through the DRM device, because {why}, and /dev/dri/by-path is not here."
    evidence = [
        seen(facts, "host_ipc", "/dev/dri/by-path is missing", "a folder with links to the render nodes"),
        _check_evidence(facts, "pidfd_self"),
    ]
    fixes = [host_action(BY_PATH), host_action(TRACE, TRACE_COST)] if facts.container else [
        host_action("Start udev, which makes /dev/dri/by-path"), host_action(TRACE, TRACE_COST),
    ]  # fmt: skip
    yield self.finding("/dev/dri/by-path", cause, evidence, fixes=fixes)


@rule("P2P006", "The ranks may not find each other", "warning", needs=("host_ipc",), references=(
    "intel/llm-scaler#550", "llm-d/llm-d#2270",
))  # fmt: skip
def meeting(self: Rule, case: Case) -> Iterator[Finding]:
    """libfabric, over which oneCCL's ranks meet, has no provider here, an interface that is not up, or was seen to hang.

    ## What it means
    vLLM sets oneCCL's transport to OFI (libfabric). libfabric picks a provider and an interface by itself; in a container the pick can
    be one that never connects, and a libfabric whose providers are elsewhere finds none.

    ## Why it matters
    The start-up ends in an error about ATL, or spins for good without a word.

    ## How it looks
    No line after `world_size=2 rank=0 … backend=xccl`; or `fi_getinfo error: ret -61, providers 0`, `failed to initialize ATL`.

    ## How it is fixed
    `FI_PROVIDER=tcp FI_TCP_IFACE=lo` on one machine; `FI_PROVIDER_PATH` to the folder that holds the providers. It is an error where two
    bare ranks were seen to hang before they met, and a warning in a container where that was not tried.
    """
    facts = case.get("host_ipc", HostIpcFacts)
    if facts is None or not applies(case) or facts.settings.get("CCL_ATL_TRANSPORT") == "mpi":
        return
    yield from _providers(self, facts)
    iface = facts.settings.get("FI_TCP_IFACE")
    names = {interface.name: interface for interface in facts.interfaces}
    if iface and names and (iface not in names or not names[iface].up):
        cause = f"FI_TCP_IFACE names {iface}, which is {'not up' if iface in names else 'not here'}."
        yield self.finding(
            "FI_TCP_IFACE", cause, [seen(facts, "host_ipc", f"interfaces: {', '.join(sorted(names))}")], severity="error",
            fixes=missing(facts.settings, {"FI_TCP_IFACE": "lo"}, "for ranks on one machine"),
        )  # fmt: skip
        return
    fixes = missing(facts.settings, MEETING, MEETING_COST) if ranks(case).nodes == 1 else []
    hung = not meets(facts)
    if not fixes or not (hung or facts.container):
        return
    listed = ", ".join(f"{i.name}{'' if i.up else ' (down)'}" for i in facts.interfaces) or "unknown"
    evidence = [seen(facts, "host_ipc", f"container {facts.container or 'none seen'}; interfaces {listed}")]
    if hung:
        cause = "Two bare ranks were started and never met: libfabric picked a provider or interface that does not connect here."
        evidence += collective_evidence(facts)
    else:
        cause = f"In a container ({facts.container}) libfabric's own pick is reported never to connect; here it was not tried."
    yield self.finding("libfabric", cause, evidence, fixes=fixes, severity="error" if hung else "warning")


def _providers(self: Rule, facts: HostIpcFacts) -> Iterator[Finding]:
    """FI_PROVIDER_PATH that leads nowhere, and providers that libfabric is not told of."""
    folders = facts.provider_folders
    fix = missing(facts.settings, {"FI_PROVIDER_PATH": folders[0]}, "none") if folders else [
        host_action("Install Intel MPI (it brings libfabric's providers) or source /opt/intel/oneapi/setvars.sh")
    ]  # fmt: skip
    if facts.provider_path is not None and facts.provider_path.status == "fail":
        path = facts.settings.get("FI_PROVIDER_PATH", "")
        cause = f"FI_PROVIDER_PATH names {path}, which holds no provider library."
        evidence = [seen(facts, "host_ipc", f"{path}: {facts.provider_path.detail}")]
        yield self.finding("FI_PROVIDER_PATH", cause, evidence, fixes=fix, severity="error")
    elif facts.provider_path is None and folders and not any(p.path == "built in" for p in facts.providers):
        hidden = [folder for folder in folders if "/oneapi/mpi/" in folder or folder.endswith("/prov")]
        if hidden and not any("oneapi" in lib and "/mpi/" not in lib for lib in facts.libfabric):
            cause = (
                "libfabric looks into the folder of its providers only when FI_PROVIDER_PATH (setvars.sh) says so; it is not set."
            )
            evidence = [seen(facts, "host_ipc", f"{', '.join(p.name for p in facts.providers)} in {', '.join(hidden)}")]
            none_found = "fi_getinfo" in facts.collective.error
            fixes = missing(facts.settings, {"FI_PROVIDER_PATH": hidden[0]}, "none")
            yield self.finding("FI_PROVIDER_PATH", cause, evidence, fixes=fixes, severity="error" if none_found else "warning")


def shm_needed(world: int, settings: dict[str, str]) -> int:
    """Bytes of shared memory that the message queues of one engine may fill."""
    chunk = settings.get("VLLM_MQ_MAX_CHUNK_BYTES_MB", "16")
    return (int(chunk) if chunk.isdecimal() else 16) * MIB * BROADCAST_CHUNKS + world * RESPONSE_BYTES


@rule("P2P007", "Shared memory is too small for the workers' queues", "warning", needs=("host_ipc",))
def small_shm(self: Rule, case: Case) -> Iterator[Finding]:
    """Shared memory is smaller than the message queues that vLLM's engine and workers make in it, or none can be made.

    ## What it means
    Each engine makes one ring for all workers (ten chunks of 16 MiB) and each worker one for its answers (ten of 24 MiB). The rings are
    sparse files: they take memory as they fill. Docker gives a container 64 MiB.

    ## Why it matters
    A page that does not fit ends the process with SIGBUS, at any time after the start.

    ## How it looks
    `Bus error (core dumped)`, a worker that died unexpectedly, `No available shared memory broadcast block found in 60 seconds`.

    ## How it is fixed
    `--shm-size` with at least the size named here, or `--ipc=host`.
    """
    facts = case.get("host_ipc", HostIpcFacts)
    wanted = ranks(case)
    if facts is None or not facts.applies or not wanted.several:
        return
    need = shm_needed(wanted.sizes.tensor * wanted.sizes.pipeline, facts.settings)
    check = _check(facts, "shm")
    short_of = facts.shm_free is not None and facts.shm_free < need
    if check.status != "fail" and not short_of:
        return
    size = max(1, -(-need // (1 << 30)))
    free = "unknown" if facts.shm_free is None else f"{facts.shm_free // MIB} MiB free of {(facts.shm_bytes or 0) // MIB}"
    cause = f"The queues of {wanted.text} may take {need // MIB} MiB of /dev/shm; {free}."
    if check.status == "fail":
        cause = f"No shared memory can be made in /dev/shm ({check.error or check.detail})."
    evidence = [seen(facts, "host_ipc", f"{SHM}: {free}", f"{need // MIB} MiB"), _check_evidence(facts, "shm")]
    fix = host_action(f"Start the container with --shm-size={size}g or --ipc=host") if facts.container else host_action(
        f"Make /dev/shm larger: mount -o remount,size={size}G /dev/shm"
    )  # fmt: skip
    yield self.finding(SHM, cause, evidence, fixes=[fix], severity="error" if check.status == "fail" else "warning")


@rule(
    "P2P008",
    "Workers are forked, which an Intel GPU does not survive",
    "error",
    needs=("host_ipc",),
    references=("vllm-project/vllm#20649",),
)
def forked(self: Rule, case: Case) -> Iterator[Finding]:
    """VLLM_WORKER_MULTIPROC_METHOD=fork is set.

    ## What it means
    A forked process inherits a Level Zero context that it cannot use. vLLM picks `spawn` by itself on XPU unless the variable says
    otherwise.

    ## Why it matters
    Workers fail to initialise the device or hang.

    ## How it looks
    `Cannot re-initialize XPU in forked subprocess`

    ## How it is fixed
    `VLLM_WORKER_MULTIPROC_METHOD=spawn`, or not setting it.
    """
    facts = case.get("host_ipc", HostIpcFacts)
    if facts is None or not on_xpu(case) or not ranks(case).several or facts.start_method != "fork":
        return
    evidence = [seen(facts, "host_ipc", "VLLM_WORKER_MULTIPROC_METHOD=fork", "spawn")]
    fixes = [
        Fix(
            kind="env", action="VLLM_WORKER_MULTIPROC_METHOD=spawn", cost="workers import everything anew: a few seconds at start"
        )
    ]
    yield self.finding(
        "VLLM_WORKER_MULTIPROC_METHOD", "Forked workers inherit a Level Zero context that they cannot use.", evidence, fixes=fixes
    )


@rule("P2P012", "A setting does not do what it is set for", "warning", needs=("host_ipc",), references=(
    "uxlfoundation/oneCCL#213", "vllm-project/vllm-xpu-kernels#570", "intel/llm-scaler#398",
))  # fmt: skip
def idle_settings(self: Rule, case: Case) -> Iterator[Finding]:
    """A variable from public recipes is set that has no effect here, contradicts another, or costs more than it brings.

    ## What it means
    Working sets that people pass on contradict one another (`CCL_ENABLE_SYCL_KERNELS` 0 and 1) and hold variables that oneCCL drops.

    ## Why it matters
    They hide what is really needed, and one of them makes each reduce several times slower.

    ## How it looks
    `pidfd is not supported, fallbacks to drmfd exchange mode` with CCL_ZE_IPC_EXCHANGE=sockets; `pt2pt operations algo must be the same`;
    half the expected speed without a message.

    ## How it is fixed
    Take the variable away, or set its partner as well.
    """
    facts = case.get("host_ipc", HostIpcFacts)
    if facts is None or not facts.applies or not on_xpu(case) or not ranks(case).exchange:
        return
    env = facts.settings
    for name, cause, fix in _idle(env, facts, ranks(case)):
        severity: Severity = "info" if name == "CCL_TOPO_FABRIC_VERTEX_CONNECTION_CHECK" else "warning"
        observed = seen(facts, "host_ipc", f"{name}={env.get(name, '(not set)')}")
        yield self.finding(name, cause, [observed], fixes=fix, severity=severity)


def _idle(env: dict[str, str], facts: HostIpcFacts, wanted: Ranks) -> Iterator[tuple[str, str, list[Fix]]]:
    if env.get("CCL_ZE_IPC_EXCHANGE") == "sockets":
        if _check(facts, "pidfd_self").status == "fail":
            yield "CCL_ZE_IPC_EXCHANGE", "Sockets are asked for, and oneCCL takes drmfd instead wherever pidfd is refused.", []
        elif wanted.sends:
            cause = "The sockets exchange is not implemented for sends between pipeline stages."
            yield "CCL_ZE_IPC_EXCHANGE", cause, missing(env, {"CCL_ZE_IPC_EXCHANGE": "pidfd"}, "none: it is the default")
    one, other = env.get("CCL_SEND"), env.get("CCL_RECV")
    if (one == "direct") != (other == "direct"):
        cause = "CCL_SEND and CCL_RECV must be the same; with one alone oneCCL refuses both."
        name = "CCL_RECV" if one == "direct" else "CCL_SEND"
        yield name, cause, missing(env, {name: "direct"}, "sends between stages are copied through host memory")
    if env.get("CCL_ENABLE_SYCL_KERNELS") == "0":
        cause = (
            "CCL_ENABLE_SYCL_KERNELS=0 makes each reduce four to seven times slower (286 against 56 µs at 1 MiB on two Arc Pro B70). "
            "Where it is set to avoid lost devices, raised SYCL thresholds do that at no such cost (P2P010)."
        )
        yield "CCL_ENABLE_SYCL_KERNELS", cause, []
    if env.get("CCL_TOPO_FABRIC_VERTEX_CONNECTION_CHECK") == "0":
        yield (
            "CCL_TOPO_FABRIC_VERTEX_CONNECTION_CHECK",
            "It silences a warning about PCIe; it is reported not to help on its own.",
            [],
        )


@rule("P2P015", "A limit of this host is low for several ranks", "warning", needs=("host_ipc",))
def low_limits(self: Rule, case: Case) -> Iterator[Finding]:
    """Open files or locked memory are limited below what several ranks may need.

    ## What it means
    Each opened memory handle is a descriptor; oneCCL keeps up to a thousand. vLLM raises its own soft limit, so the hard one counts.
    Locked memory matters only to libfabric providers that pin it.

    ## Why it matters
    The ranks fail after a while, with errors about files or memory registration.

    ## How it looks
    `Too many open files`; `fi_mr_reg … Cannot allocate memory`.

    ## How it is fixed
    `--ulimit nofile=65535 --ulimit memlock=-1` for a container; limits.conf or the unit file elsewhere.
    """
    facts = case.get("host_ipc", HostIpcFacts)
    if facts is None or not facts.applies or not on_xpu(case) or not ranks(case).exchange:
        return
    files = facts.limits.get("nofile", [-1, -1])[1]
    if 0 <= files < OPEN_FILES:
        cause = f"At most {files} files may be open; oneCCL alone keeps up to a thousand handles open in each rank."
        evidence = [seen(facts, "host_ipc", f"nofile hard limit {files}", f"{OPEN_FILES} or more")]
        yield self.finding(
            "nofile",
            cause,
            evidence,
            fixes=[host_action("Raise the limit: --ulimit nofile=65535 (container) or LimitNOFILE=65535")],
        )
    locked = facts.limits.get("memlock", [-1, -1])[1]
    provider = re.split(r"[;,]", facts.settings.get("FI_PROVIDER", ""))[0]
    if provider in PINNING and 0 <= locked < LOCKED:
        cause = f"The {provider} provider locks memory, and at most {locked // 1024} KiB may be locked."
        evidence = [seen(facts, "host_ipc", f"memlock hard limit {locked}", f"{LOCKED} or more")]
        yield self.finding(
            "memlock",
            cause,
            evidence,
            fixes=[host_action("Raise the limit: --ulimit memlock=-1 (container) or LimitMEMLOCK=infinity")],
        )


RULES = (pidfd_refused, no_by_path, meeting, small_shm, forked, idle_settings, low_limits)
