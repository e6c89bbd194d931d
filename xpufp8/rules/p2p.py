"""P2P: can the cards of several ranks reach each other's memory, and with which settings of oneCCL.

Every rule here speaks only of more than one rank on Intel GPUs, and falls silent once two bare ranks have exchanged what the command
needs with the settings in force: then nothing is missing, whatever the topology says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from probes.host_facts import PairFact, PeerAccessFacts
from probes.pci_tables import REASONS, SMALL_BAR
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.p2p_common import HOST_MEMORY, NO_PATH, OTHER_WAYS, SEND_COST, applies, has_no_path, pair_evidence, stack_fixes
from xpufp8.rules.ranks import both_ways, host_action, missing, on_xpu, proven, ranks, seen, settings, short, used_pairs


def _reason(pair: PairFact) -> str:
    """Why there is no path: the first cause, not the failed handle that follows from it."""
    if pair.reason in NO_PATH:
        return pair.reason
    if pair.kernel_allows == "fail":
        return "NSB" if pair.common is None else "ACS"
    return "LZN"


def _host_ways(reason: str, facts: PeerAccessFacts, pairs: Sequence[PairFact]) -> list[Fix]:
    """What would change the machine itself, for one reason."""
    if reason == "ACS":
        names = sorted({address for pair in pairs for address in pair.redirects})
        where = f"pci=disable_acs_redir={';'.join(names)}" if names else "pci=disable_acs_redir=<the switch's downstream ports>"
        return [host_action(f"Boot with {where}", "devices below those bridges are no longer isolated from one another")]
    if reason == "BAR":
        cards = [short(card.address) for card in facts.cards if 0 < card.bar <= SMALL_BAR]
        return [host_action(f"Switch on Above 4G Decoding and Resizable BAR in the firmware set-up ({', '.join(cards)})")]
    if reason == "DRV":
        cards = [f"{short(card.address)} is bound to {card.driver or 'no driver'}" for card in facts.cards if card.driver != "xe"]
        return [host_action(f"Bind the cards to the xe driver ({'; '.join(cards)})", "a reboot")]
    return [host_action("Move both cards below one PCIe switch, or to a board whose host bridge forwards peer requests")]


@rule("P2P001", "Cards cannot reach each other's memory", "error", needs=("peer_access",), references=(
    "intel/llm-scaler#550", "intel/compute-runtime#935", "uxlfoundation/oneCCL src/topology/topo_manager.cpp check_p2p_access",
))  # fmt: skip
def no_path(self: Rule, case: Case) -> Iterator[Finding]:
    """Two cards that ranks would use have no way to each other's memory: by topology, kernel, driver or Level Zero.

    ## What it means
    Peer requests travel between two PCIe cards directly below a shared bridge, or through the host bridge. Linux allows the second way
    on AMD Zen and on a short list of Intel host bridges; desktop Intel chips are not on it. ACS redirect on a switch turns the
    first way into the second. A 256 MiB BAR, a card on another driver than xe, or a plain "no" from Level Zero end it as well.
    The matrix names the reason for each pair: NSB, ACS, KRN, BAR, DRV or LZN.

    ## Why it matters
    oneCCL asks Level Zero alone. Where Level Zero answers "yes", or is older than the kernel's rule, oneCCL exchanges memory handles and
    the first collective ends in `zeMemOpenIpcHandle`. Forcing the kernel to allow it is no way out: on such a chip the copies
    were silently wrong (intel/compute-runtime#935).

    ## How it looks
    `xe 0000:03:00.0: cannot be used for peer-to-peer DMA as the client and provider (0000:07:00.0) do not share an upstream bridge or
    whitelisted host bridge`, then `oneCCL: ze error at zeMemOpenIpcHandle, code: ZE_RESULT_ERROR_INVALID_ARGUMENT`.

    ## How it is fixed
    `CCL_TOPO_P2P_ACCESS=0` sends collectives through host memory. It helped on the machine of intel/llm-scaler#550 and was not enough on
    that of #486, so the two-rank run (P2P009) is asked again with it. It is not needed where Level Zero itself answers "no",
    because oneCCL then does the same by itself; such a finding is a warning. Newer oneCCL needs more (P2P010), pipeline parallelism
    other variables (P2P011).
    """
    facts = case.get("peer_access", PeerAccessFacts)
    env = settings(case)
    if facts is None or not applies(case) or env.get("CCL_TOPO_P2P_ACCESS") == "0":
        return
    bad = sorted((pair for pair in used_pairs(case) if has_no_path(pair)), key=_reason)
    for reason, group in groupby(bad, key=_reason):
        pairs = list(group)
        names = both_ways(pairs)
        # oneCCL turns peer access off for the whole group as soon as Level Zero denies it for one pair, unless it is told otherwise.
        alone = any(pair.can_access == "fail" for pair in used_pairs(case)) and "CCL_TOPO_P2P_ACCESS" not in env
        cause = f"{ranks(case).text} exchanges memory between {', '.join(names)}: {REASONS[reason][0]}."
        if alone:
            cause += " Level Zero says so too, so oneCCL goes through host memory by itself; the cost is the topology's, not a setting's."
        elif env.get("CCL_TOPO_P2P_ACCESS") == "1":
            cause += " CCL_TOPO_P2P_ACCESS=1 makes oneCCL try it all the same."
        # What keeps a card for a guest, or drives nothing, is no matter of settings (DEV002).
        driven = reason != "DRV" or all(card.driver in {"xe", "i915"} for card in facts.cards)
        fixes = [] if alone or not driven else missing(env, {"CCL_TOPO_P2P_ACCESS": "0"}, HOST_MEMORY)
        fixes += _host_ways(reason, facts, pairs)
        subject = f"{reason} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        yield self.finding(subject, cause, pair_evidence(facts, pairs), fixes=fixes, severity="warning" if alone else "error")


@rule("P2P002", "A peer's memory handle is refused", "error", needs=("peer_access",), references=(
    "intel/llm-scaler#486", "intel/llm-scaler#398", "vllm-project/vllm#48953",
))  # fmt: skip
def handle_refused(self: Rule, case: Case) -> Iterator[Finding]:
    """The topology allows peer access, and Level Zero still refuses to open a handle of the other card's memory.

    ## What it means
    One process exported an allocation, its file descriptor arrived in a second process, and `zeMemOpenIpcHandle` (or the export) failed.
    oneCCL does the same in the first collective.

    ## Why it matters
    Tensor parallelism dies when vLLM measures memory, after all weights were loaded.

    ## How it looks
    `oneCCL: ze_call.cpp:28 do_call: EXCEPTION: ze error at zeMemOpenIpcHandle, code: ZE_RESULT_ERROR_INVALID_ARGUMENT`

    ## How it is fixed
    No single variable is known to cure it everywhere: `CCL_TOPO_P2P_ACCESS=0` helped on one machine and not on another;
    `CCL_ZE_IPC_EXCHANGE=sockets`, `CCL_ATL_TRANSPORT=ofi` and `CCL_TOPO_FABRIC_VERTEX_CONNECTION_CHECK=0` are reported not to.
    Reporters got rid of it with Linux 7.1 and compute-runtime 26.18. Pipeline parallelism with direct sends, or one card, work
    meanwhile.
    """
    facts = case.get("peer_access", PeerAccessFacts)
    env = settings(case)
    if facts is None or not applies(case):
        return
    pairs = [pair for pair in used_pairs(case) if pair.reason == "IPC" and not has_no_path(pair)]
    if not pairs:
        return
    results = sorted({pair.transfer.result for pair in pairs if pair.transfer})
    cause = f"Handles between {', '.join(both_ways(pairs))} are refused ({', '.join(results)}), and nothing in the topology forbids them."
    fixes = missing(env, {"CCL_TOPO_P2P_ACCESS": "0"}, HOST_MEMORY + "; reported to help on one machine and not on another")
    if not fixes:
        cause += " CCL_TOPO_P2P_ACCESS=0 is set already; no other setting is known to help."
    fixes += [*stack_fixes(case), *map(host_action, OTHER_WAYS)]
    yield self.finding(
        both_ways(pairs)[0],
        cause,
        pair_evidence(facts, pairs),
        fixes=fixes,
        severity="error" if fixes[0].kind == "env" else "warning",
    )


@rule("P2P003", "Peer copies are wrong or take the card down", "error", needs=("peer_access",), references=(
    "intel/compute-runtime#942", "intel/compute-runtime#935", "ggml-org/llama.cpp#27198",
))  # fmt: skip
def wrong_copy(self: Rule, case: Case) -> Iterator[Finding]:
    """A copy between two cards was declared possible, and brought wrong bytes, or the process did not survive it.

    ## What it means
    Level Zero answered that the cards can access each other, the handle opened, and then the data differed, the device was lost, or
    the process died or hung.

    ## Why it matters
    Wrong bytes make a server that answers nonsense; nothing crashes. A lost device needs a reset.

    ## How it looks
    All-ones pages in the copy, `UR_RESULT_ERROR_DEVICE_LOST`, `Engine reset: engine_class=bcs` in the kernel log.

    ## How it is fixed
    No setting is known to make such copies right. `CCL_TOPO_P2P_ACCESS=0` avoids them. On a switch, ACS redirect off on every port
    between the cards cured one machine (intel/compute-runtime#935) and not another (#942).
    """
    facts = case.get("peer_access", PeerAccessFacts)
    env = settings(case)
    if facts is None or not applies(case) or env.get("CCL_TOPO_P2P_ACCESS") == "0":
        return
    pairs = [pair for pair in used_pairs(case) if pair.reason in {"BAD", "DIE"} and not has_no_path(pair)]
    if not pairs:
        return
    what = sorted({REASONS[pair.reason][0] for pair in pairs})
    cause = f"Between {', '.join(both_ways(pairs))}: {'; '.join(what)}. No setting is known that makes such copies right."
    fixes = missing(env, {"CCL_TOPO_P2P_ACCESS": "0"}, HOST_MEMORY)
    fixes += [*_host_ways("ACS", facts, pairs), *stack_fixes(case), *map(host_action, OTHER_WAYS)]
    yield self.finding(both_ways(pairs)[0], cause, pair_evidence(facts, pairs), fixes=fixes)


@rule("P2P011", "Pipeline stages send by memory handle", "error", needs=("peer_access",), references=("intel/llm-scaler#550",))
def direct_sends(self: Rule, case: Case) -> Iterator[Finding]:
    """Pipeline parallelism sends from card to card with memory handles, also where peer access is switched off for collectives.

    ## What it means
    `CCL_TOPO_P2P_ACCESS=0` is about collectives. Sends and receives between pipeline stages still export and open handles, unless both
    are told to go directly through the transport.

    ## Why it matters
    The server comes up, and the first request dies.

    ## How it looks
    `zeMemOpenIpcHandle` at the first send or receive of pipeline parallelism.

    ## How it is fixed
    `CCL_SEND=direct` and `CCL_RECV=direct`, always both: with one alone oneCCL refuses the pair.
    """
    facts = case.get("peer_access", PeerAccessFacts)
    if facts is None or not applies(case) or not ranks(case).sends:
        return
    pairs = [pair for pair in used_pairs(case) if pair.status == "fail"]
    fixes = missing(settings(case), {"CCL_SEND": "direct", "CCL_RECV": "direct"}, SEND_COST)
    if not pairs or not fixes:
        return
    reasons = sorted({REASONS[pair.reason][0] for pair in pairs})
    cause = f"{ranks(case).text} sends between {', '.join(both_ways(pairs))} by memory handle, which cannot work: {'; '.join(reasons)}."
    yield self.finding("send and receive", cause, pair_evidence(facts, pairs), fixes=fixes)


@rule("P2P013", "Peer access is not known", "info", needs=("peer_access",))
def not_known(self: Rule, case: Case) -> Iterator[Finding]:
    """Several ranks are asked for, and nothing tells whether their cards work together.

    ## What it means
    A simulated device has no topology; a recorded machine may come without a real exchange; a topology that allows peer access does
    not prove it.

    ## Why it matters
    Peer access is the most reported obstacle of several Intel GPUs, and only a copy between two real cards proves it.

    ## How it looks
    Reason ALW or U in the matrix, or no matrix at all.

    ## How it is fixed
    Run the doctor on the machine itself with the parallel sizes you want; or record it there with `xpufp8 collect --host FILE` and judge it
    elsewhere with `--sysfs FILE`.
    """
    facts = case.get("peer_access", PeerAccessFacts)
    if facts is None or not on_xpu(case) or not ranks(case).exchange or proven(case):
        return
    wanted = ranks(case)
    if not facts.applies or len(facts.cards) < 2:
        if not facts.applies:
            cause = f"{wanted.text} needs cards that exchange memory; a simulated device has none, so this is unknown."
            yield self.finding(
                "topology", cause, [Evidence(probe="peer_access", mode="simulated", observed=facts.detail)], unknown=True
            )
        return
    pairs = [pair for pair in used_pairs(case) if pair.status == "unknown"]
    if pairs:
        words = sorted({REASONS[pair.reason][0] for pair in pairs})
        cause = f"Between {', '.join(both_ways(pairs))}: {'; '.join(words)}."
        evidence = [*pair_evidence(facts, pairs), *([seen(facts, "peer_access", facts.detail)] if facts.detail else [])]
        yield self.finding(both_ways(pairs)[0], cause, evidence, unknown=True)


RULES = (no_path, handle_refused, wrong_copy, direct_sends, not_known)
