"""P2P: two bare ranks and what their collectives need of oneCCL, and the versions that several cards are known to work with."""

from __future__ import annotations

from collections.abc import Iterator

from probes.host_facts import CollectiveFact, DevicesFacts, HostIpcFacts, PeerAccessFacts
from xpufp8.report import Finding, Fix
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.p2p_common import (
    BY_PATH,
    HOST_MEMORY,
    MEETING,
    MEETING_COST,
    OTHER_WAYS,
    SEND_COST,
    SYCL_COLLECTIVES,
    THRESHOLD_COST,
    THRESHOLDS,
    TRACE,
    applies,
    collective_evidence,
    floors,
    has_no_path,
    large_only,
    meets,
    oneccl_version,
    pair_evidence,
    runtime_build,
    stack_fixes,
)
from xpufp8.rules.ranks import both_ways, host_action, missing, ranks, seen, used_cards, used_pairs


@rule("P2P009", "Two bare ranks do not work together", "error", needs=("host_ipc",), references=(
    "SergiioB/intel-arc-pro-b70-inference-cookbook#8", "intel/llm-scaler#594",
))  # fmt: skip
def bare_ranks(self: Rule, case: Case) -> Iterator[Finding]:
    """Two processes that only meet and reduce a tensor through torch.distributed fail, die or hang: no vLLM, no model.

    ## What it means
    The fault is in the layer below vLLM (oneCCL, Level Zero, the host), and every start of several ranks will meet it.

    ## Why it matters
    It shows in seconds what otherwise shows after minutes of loading, and tells whether a setting helps.

    ## How it looks
    The last stage names the layer: `init` never reached is the meeting of the ranks (P2P006), a failing first reduce is the exchange of
    memory (P2P001, P2P002, P2P004), a failing large reduce is the choice of algorithm (P2P010).

    ## How it is fixed
    By the settings of the finding that names the cause; they are tried on the bare ranks first. Where all of them are set already,
    no setting is known to help, and what remains is another way to split the model, one card, or a newer stack.
    """
    facts = case.get("host_ipc", HostIpcFacts)
    if facts is None or not ranks(case).exchange or facts.collective.status != "fail":
        return
    run = facts.collective
    if _named_elsewhere(case, facts):
        return
    cause = f"Two ranks of {run.backend} {_how(run)}."
    if run.backend == "xccl":
        fixes = _bare_fixes(facts)
        if not fixes:
            cause += " Every setting that is known to help is in force already."
            fixes = [*stack_fixes(case), *map(host_action, OTHER_WAYS)]
    else:
        fixes = [
            host_action("Make the loopback interface usable: the host's own name must have an address, and 127.0.0.1 must answer")
        ]
    yield self.finding(run.backend, cause, collective_evidence(facts), fixes=fixes)


def _how(run: CollectiveFact) -> str:
    if run.timed_out:
        return f"hang: after {run.seconds:.0f} s they had not got past stage {run.stage!r}"
    return f"fail at stage {run.stage!r}"


def _named_elsewhere(case: Case, facts: HostIpcFacts) -> bool:
    """True when P2P006 or P2P010 shows the same run with its cause and a setting that is not in force yet."""
    if not applies(case):
        return False
    if not meets(facts):
        wants = missing(facts.settings, MEETING, "")
        return bool(wants) and ranks(case).nodes == 1 and facts.settings.get("CCL_ATL_TRANSPORT") != "mpi"
    return large_only(facts.collective) and ranks(case).collectives and bool(missing(facts.settings, THRESHOLDS, ""))


def _bare_fixes(facts: HostIpcFacts) -> list[Fix]:
    """Settings for the stage at which the bare ranks ended, those not in force."""
    run, env = facts.collective, facts.settings
    if "opendir failed" in run.error:
        return [host_action(BY_PATH)]
    if "pidfd" in run.error:
        return [host_action(TRACE)]
    if run.stage in {"start", "import"} or "ATL" in run.error or "fi_getinfo" in run.error:
        return missing(env, MEETING, MEETING_COST)
    if any(step.name == "send_recv" and step.status == "fail" for step in run.steps):
        return missing(env, {"CCL_SEND": "direct", "CCL_RECV": "direct"}, SEND_COST)
    if large_only(run):
        return missing(env, THRESHOLDS, THRESHOLD_COST)
    return missing(env, {"CCL_TOPO_P2P_ACCESS": "0"}, HOST_MEMORY) or missing(env, THRESHOLDS, THRESHOLD_COST)


@rule("P2P010", "Large collectives read the peer's memory", "error", needs=("host_ipc", "peer_access"), references=(
    "intel/llm-scaler#594", "intel/llm-scaler#595", "SergiioB/intel-arc-pro-b70-inference-cookbook#8", "vllm-project/vllm#50545",
))  # fmt: skip
def large_messages(self: Rule, case: Case) -> Iterator[Finding]:
    """Above a small size oneCCL's SYCL collectives switch to an algorithm that reads the peer's memory, peer access or not.

    ## What it means
    Since oneCCL 2021.17 collectives run as SYCL kernels. Small messages use a simple algorithm, large ones one that opens the peer's
    memory; the switch goes by size, not by whether the cards can reach each other.

    ## Why it matters
    vLLM's one-element warm-up passes, and the profile run that follows loses the device or ends in zeMemOpenIpcHandle.

    ## How it looks
    `UR_RESULT_ERROR_DEVICE_LOST` or `zeMemOpenIpcHandle` in `determine_available_memory`; the bare ranks pass at 4 bytes and fail at
    32 MiB.

    ## How it is fixed
    Four variables keep the simple algorithm for all sizes; a maintainer's advice, confirmed by reporters on two kinds of machine. They are
    offered where a large reduce was seen to fail after a small one passed, or where the cards have no path to each other and oneCCL is
    known to be of that generation. `CCL_ENABLE_SYCL_KERNELS=0` is not offered: it avoids the fault at several times the
    cost of each reduce (45 against 10 µs at 16 KiB, 286 against 56 at 1 MiB on two B70, vllm-project/vllm-xpu-kernels#570), and other
    working sets need it at 1.
    """
    facts, peers = case.get("host_ipc", HostIpcFacts), case.get("peer_access", PeerAccessFacts)
    if facts is None or peers is None or not applies(case) or not ranks(case).collectives:
        return
    shown = large_only(facts.collective)
    version = oneccl_version(facts.oneccl)
    without = [pair for pair in used_pairs(case) if has_no_path(pair)]
    if not shown and not (without and version is not None and version[:2] >= SYCL_COLLECTIVES):
        return
    fixes = missing(facts.settings, THRESHOLDS, THRESHOLD_COST)
    if not fixes:
        return
    cause = f"oneCCL {facts.oneccl or '(version unknown)'} picks an algorithm by size that reads the peer's memory"
    cause += (
        "; a small reduce passed and a large one did not." if shown else f", and {', '.join(both_ways(without))} cannot be read."
    )
    evidence = (
        collective_evidence(facts)
        if shown
        else [seen(facts, "host_ipc", f"oneCCL {facts.oneccl}"), *pair_evidence(peers, without)]
    )
    yield self.finding("SYCL collectives", cause, evidence, fixes=fixes)


@rule("P2P014", "Older than what several Battlemage cards are known to work with", "info", needs=("devices", "peer_access"), references=(
    "vllm-project/vllm#41663", "intel/llm-scaler#486",
))  # fmt: skip
def older_stack(self: Rule, case: Case) -> Iterator[Finding]:
    """Kernel or compute-runtime are older than the versions that reporters of several Battlemage cards name, and nothing was tried.

    ## What it means
    Reports of two and four Arc Pro B70 agree on Linux 7.1 and compute-runtime 26.14 (typically 26.18); GuC firmware 70.65.0 ended
    engine resets for the owner of one B580 (intel/compute-runtime#948). Older ones work for some: the two B60 of
    intel/llm-scaler#550 ran on Linux 7.0 and 25.18 with collectives through host memory.

    ## Why it matters
    It is a hint, not a fault: it is given only where no exchange between the cards was tried.

    ## How it looks
    Engine resets, lost devices and refused handles under load.

    ## How it is fixed
    A newer kernel on the host, a newer image or runtime for the process that serves; or a real attempt on the machine, which decides.
    """
    devices, facts = case.get("devices", DevicesFacts), case.get("peer_access", PeerAccessFacts)
    if devices is None or facts is None or not applies(case) or any(pair.transfer for pair in used_pairs(case)):
        return
    if not any(card.family == "battlemage" for card in used_cards(facts, ranks(case).sizes.world)):
        return
    low = floors(devices)
    if low:
        wanted, here = (" and ".join(part) for part in zip(*low, strict=True))
        cause = f"Reporters of several Battlemage cards name {wanted}; here it is {here}. Whether this machine needs them was not tried."
        evidence = [
            seen(devices, "devices", f"Linux {devices.kernel}; compute-runtime build {runtime_build(devices) or 'unknown'}")
        ]
        yield self.finding("kernel and runtime", cause, evidence, fixes=[host_action(f"Install {name}") for name, _ in low])


RULES = (bare_ranks, large_messages, older_stack)
