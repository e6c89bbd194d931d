"""What several ranks would use: sizes asked for, the cards they land on, the pairs among them, the settings in force."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from probes.host_facts import CardFact, DevicesFacts, HostIpcFacts, PairFact, PeerAccessFacts
from xpufp8.options import ParallelSizes, parallel_sizes, value
from xpufp8.report import Evidence, Fix
from xpufp8.rules.base import Case


@dataclass(frozen=True)
class Ranks:
    """The ranks of one command on one machine."""

    sizes: ParallelSizes
    nodes: int = 1

    @property
    def several(self) -> bool:
        """True when more than one card is asked for."""
        return self.sizes.world > 1

    @property
    def collectives(self) -> bool:
        """True when ranks reduce among one another: tensor parallel, or experts spread over data-parallel ranks."""
        return self.sizes.tensor > 1 or (self.sizes.expert and self.sizes.data > 1)

    @property
    def sends(self) -> bool:
        """True when ranks send to one another: pipeline parallel."""
        return self.sizes.pipeline > 1

    @property
    def exchange(self) -> bool:
        """True when ranks exchange device memory at all; replicas of data parallelism alone do not."""
        return self.collectives or self.sends

    @property
    def text(self) -> str:
        """``TP=2 PP=2``."""
        parts = [("TP", self.sizes.tensor), ("PP", self.sizes.pipeline), ("DP", self.sizes.data)]
        return " ".join(f"{name}={size}" for name, size in parts if size > 1) or "one rank"


def ranks(case: Case) -> Ranks:
    """Ranks that the typed options ask for."""
    nodes = value(list(case.vllm_args), "--nnodes", "1") or "1"
    return Ranks(parallel_sizes(case.vllm_args), int(nodes) if nodes.isdecimal() else 1)


def on_xpu(case: Case) -> bool:
    """True where the ranks would be Intel GPUs."""
    return case.platform == "XPU"


def proven(case: Case) -> bool:
    """True when two bare ranks exchanged everything asked of them with the settings in force: then no setting is missing."""
    host = case.get("host_ipc", HostIpcFacts)
    return host is not None and host.collective.status == "pass" and host.collective.backend == "xccl"


def settings(case: Case) -> dict[str, str]:
    """Environment variables in force, as the host probes saw them."""
    for name, kind in (("host_ipc", HostIpcFacts), ("peer_access", PeerAccessFacts), ("devices", DevicesFacts)):
        facts = case.get(name, kind)
        if isinstance(facts, HostIpcFacts | PeerAccessFacts | DevicesFacts):
            return facts.settings
    return {}


def used_cards(facts: PeerAccessFacts, wanted: int) -> list[CardFact]:
    """The cards that the ranks land on: those of ZE_AFFINITY_MASK where it is a plain list, else the first ones."""
    cards = facts.cards
    mask = facts.settings.get("ZE_AFFINITY_MASK", "")
    if re.fullmatch(r"\d+(,\d+)*", mask):
        chosen = [int(part) for part in mask.split(",")]
        cards = [cards[at] for at in chosen if at < len(cards)]
    return cards[:wanted]


def used_pairs(case: Case) -> list[PairFact]:
    """Ordered pairs among the cards that the ranks land on."""
    facts = case.get("peer_access", PeerAccessFacts)
    if facts is None:
        return []
    names = {card.address for card in used_cards(facts, ranks(case).sizes.world)}
    return [pair for pair in facts.pairs if pair.source in names and pair.target in names]


def both_ways(pairs: Iterable[PairFact]) -> list[str]:
    """Pairs by name, each once: ``03:00.0 - 07:00.0`` when both directions are among them, ``03:00.0 > 07:00.0`` when one is."""
    found = {(pair.source, pair.target) for pair in pairs}
    names = []
    for source, target in sorted(found):
        if (target, source) not in found:
            names.append(f"{short(source)} > {short(target)}")
        elif source < target:
            names.append(f"{short(source)} - {short(target)}")
    return names


def short(address: str) -> str:
    """A PCI address without the domain that every ordinary machine has."""
    return address.removeprefix("0000:")


def missing(env: dict[str, str], wanted: dict[str, str], cost: str) -> list[Fix]:
    """One fix that sets those of the wanted variables that are not set so already; none when all are."""
    lacking = {name: text for name, text in wanted.items() if env.get(name) != text}
    if not lacking:
        return []
    return [Fix(kind="env", action=" ".join(f"{name}={text}" for name, text in lacking.items()), cost=cost)]


def host_action(text: str, cost: str = "") -> Fix:
    """A thing to do on the host, in a sentence."""
    return Fix(kind="host", action=text, cost=cost)


def seen(
    facts: PeerAccessFacts | HostIpcFacts | DevicesFacts, probe: str, observed: str, expected: str = "", where: str = ""
) -> Evidence:
    """Evidence of one of the host probes."""
    return Evidence(probe=probe, mode=facts.mode, observed=observed, expected=expected, where=where)
