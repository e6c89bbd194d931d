"""Probe ``peer_access``: can every two cards reach each other's memory, by topology, by the kernel, by Level Zero and by doing it.

Options: ``sysfs_root`` (a recorded machine), ``environment``, ``ze_loader``, ``limit`` (seconds, 4 by default), ``attempt`` (true or
false: whether two processes really exchange memory; by default only when several ranks are asked for).
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from probes.devices import boot_parameters, kernel_release, level_zero
from probes.facts import Mode, Observation
from probes.fd_exchange import check_self
from probes.host_facts import CardFact, LevelZeroFact, PairFact, PeerAccessFacts, TransferFact
from probes.host_reader import Host, applies, open_host
from probes.kernel_log import firmware, read_log, refusals
from probes.level_zero_transfer import transfers
from probes.parallel import world_size
from probes.pci import Route, Tree, cpu, read_tree, route
from probes.pci_tables import SMALL_BAR
from probes.protocol import Context

LIMIT = 4.0


def exchange_of(settings: dict[str, str], self_check: Observation) -> str:
    """How oneCCL would move a handle: pidfd by default, drmfd whenever it finds pidfd unsupported, sockets only if asked for.

    That a request for sockets is dropped where pidfd is unsupported is uxlfoundation/oneCCL#213.
    """
    wanted = settings.get("CCL_ZE_IPC_EXCHANGE", "pidfd")
    if self_check != "pass":
        return "drmfd"
    return wanted if wanted in {"pidfd", "drmfd", "sockets"} else "pidfd"


def index_of(cards: list[CardFact], ze: LevelZeroFact) -> dict[str, int]:
    """Level Zero index of each card: by address, else by order where both show as many cards."""
    by_address = {device.address: device.index for device in ze.devices if device.address}
    found = {card.address: by_address[card.address] for card in cards if card.address in by_address}
    discrete = [device for device in ze.devices if not device.integrated]
    if not found and len(discrete) == len(cards) and not any(device.address for device in discrete):
        found = {card.address: device.index for card, device in zip(cards, discrete, strict=True)}
    return found


def _access(ze: LevelZeroFact, source: int | None, target: int | None) -> Observation:
    """``zeDeviceCanAccessPeer`` of the opening card for the owning one."""
    for answer in ze.peers:
        if answer.source == target and answer.target == source and answer.access is not None:
            return "pass" if answer.access else "fail"
    return "unknown"


def _by_transfer(transfer: TransferFact) -> tuple[Observation, str] | None:
    """What the real attempt says, None when it says nothing of the pair."""
    if transfer.status == "pass":
        return "pass", "OK"
    if transfer.status == "unknown":
        return None
    if transfer.stage == "check":
        return "fail", "BAD"
    if transfer.stage in {"exchange", "open", "export"} and not transfer.result.startswith(("died", "no answer")):
        return "fail", "FDX" if transfer.stage == "exchange" else "IPC"
    return "fail", "DIE"


def judge(
    cards: tuple[CardFact, CardFact], way: Route, log: list[str], access: Observation, transfer: TransferFact | None,
) -> tuple[Observation, str]:  # fmt: skip
    """Status and reason of one ordered pair: what was done counts before what was said, and that before what follows from a rule."""
    if transfer is not None and (answer := _by_transfer(transfer)) is not None:
        return answer
    if any(card.driver != "xe" for card in cards):
        return "fail", "DRV"
    if any(0 < card.bar <= SMALL_BAR and (card.memory or SMALL_BAR + 1) > SMALL_BAR for card in cards):
        return "fail", "BAR"
    if log and way.kernel_allows == "unknown":
        return "fail", "KRN"
    if way.kernel_allows == "fail" and not (way.inferred and access == "pass"):
        return "fail", way.reason
    if access == "fail":
        return "fail", "LZN"
    return ("unknown", "ALW") if way.kernel_allows == "pass" or access == "pass" else ("unknown", "U")


def _attempts(
    host: Host, context: Context, ze: LevelZeroFact, indices: list[int], limit: float,
) -> tuple[dict[tuple[int, int], TransferFact], str]:  # fmt: skip
    """Real attempts between all pairs, and why there is none where there is none."""
    wanted = context.options.get("attempt")
    if wanted is None:
        wanted = world_size(context.vllm_args) > 1
    if len(indices) < 2:
        return {}, "Level Zero shows fewer than two of the cards"
    if not wanted:
        return {}, "one rank is asked for, so no memory was exchanged"
    plan = [(a, b, _access(ze, a, b) == "pass") for a in indices for b in indices if a != b]
    exchange = exchange_of(host.settings(), check_self().status if host.live else "pass")

    def attempt() -> list[dict[str, Any]]:
        facts = transfers(plan, exchange, limit, host.environment, context.options.get("ze_loader"))
        return [asdict(fact) for fact in facts]

    data = host.observed("transfers", attempt)
    if data is None or host.changed:
        return {}, "no exchange of memory was recorded on that machine" + (" with these settings" if host.changed else "")
    facts = [TransferFact(**item) for item in data]
    return {(fact.source, fact.target): fact for fact in facts}, ""


def pairs_of(
    tree: Tree, cards: list[CardFact], messages: dict[frozenset[str], list[str]], ze: LevelZeroFact,
    done: dict[tuple[int, int], TransferFact], *, zen: bool,
) -> list[PairFact]:  # fmt: skip
    """The matrix: every ordered pair, its source (owner of the memory) first."""
    index = index_of(cards, ze)
    found = []
    for source in cards:
        for target in cards:
            if source is target:
                continue
            way = route(tree, source, target, zen=zen)
            log = messages.get(frozenset({source.address, target.address}), [])
            access = _access(ze, index.get(source.address), index.get(target.address))
            transfer = done.get((index.get(source.address, -1), index.get(target.address, -1)))
            status, reason = judge((source, target), way, log, access, transfer)
            pair = PairFact(
                source.address,
                target.address,
                status,
                reason,
                way.link,
                way.common,
                way.redirects,
                way.kernel_allows,
                log,
                access,
                transfer,
            )
            found.append(pair)
    return found


def observe(context: Context) -> PeerAccessFacts:
    """Look at every pair of discrete cards."""
    host = open_host(context)
    mode: Mode = "live" if host.live else "static"
    if not applies(context, host):
        return PeerAccessFacts(context.device, "simulated", applies=False, detail="peer access is a property of real cards")
    return observe_host(context, host, mode)


def observe_host(context: Context, host: Host, mode: Mode) -> PeerAccessFacts:
    """As :func:`observe`, of a host that is already open."""
    deadline = time.monotonic() + float(context.options.get("limit", LIMIT))
    log, lines = read_log(host)
    tree = read_tree(host, firmware(lines))
    cards = [card for card in tree.cards if card.family != "integrated"]
    ze = level_zero(host, context, 2.0)
    index = index_of(cards, ze)
    text, zen = cpu(host)
    limit = max(0.5, deadline - time.monotonic())
    done, why = _attempts(host, context, ze, sorted(index.values()), limit) if len(cards) > 1 else ({}, "fewer than two cards")
    boot = boot_parameters(host)
    groups = host.listing("/sys/kernel/iommu_groups")
    return PeerAccessFacts(
        device=context.device, mode=mode, cards=cards, bridges=list(tree.bridges.values()), host_bridges=tree.hosts, cpu=text,
        kernel=kernel_release(host), iommu=None if groups is None else bool(groups), boot=boot, log=log,
        pairs=pairs_of(tree, cards, refusals(lines), ze, done, zen=zen), settings=host.settings(), detail=why,
    )  # fmt: skip
