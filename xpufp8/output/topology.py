"""The peer matrix for a terminal: which card reaches which, and by which reason not. Fits 80 columns up to eight cards."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from probes.host_facts import CardFact, PairFact, PeerAccessFacts
from probes.pci_tables import REASONS
from xpufp8.output.text import plain

STYLE = {"pass": "green", "fail": "red", "unknown": "yellow"}
LINKS = {
    "PIX": "one PCIe switch", "PXB": "several PCIe switches", "PHB": "one host bridge", "SYS": "several host bridges", "U": "not known",
}  # fmt: skip
FEW = 5
"""Cards up to which a cell holds the link as well."""


def topology_table(facts: PeerAccessFacts) -> Table:
    """The matrix of a machine: a row for the card that owns the memory, a column for the card that reaches for it.

    A cell holds the reason code (``probes.pci_tables.REASONS``), the kind of link while there is room, and the measured GB/s of a copy
    that was made. The caption explains the codes that occur. A machine without two cards gives a table that says so.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, caption_justify="left", padding=(0, 1))
    if len(facts.cards) < 2:
        table.add_column("peer access", style="bold")
        table.add_row(plain(facts.detail or f"{len(facts.cards)} Intel card: there is no pair to look at"))
        return table
    table.add_column("owner of the memory", style="bold", no_wrap=True)
    for index in range(len(facts.cards)):
        table.add_column(str(index), no_wrap=True)
    pairs = {(pair.source, pair.target): pair for pair in facts.pairs}
    for index, source in enumerate(facts.cards):
        cells = [_cell(pairs.get((source.address, target.address)), source is target, len(facts.cards)) for target in facts.cards]
        table.add_row(plain(f"{index} {_card(source)}"), *cells)
    table.caption = _legend(facts.pairs, len(facts.cards))
    return table


def _card(card: CardFact) -> str:
    return f"{card.address.removeprefix('0000:')} {card.name or card.device}"[:30]


def _cell(pair: PairFact | None, itself: bool, count: int) -> Text:
    if itself:
        return Text("-", "dim")
    if pair is None:
        return Text("U", STYLE["unknown"])
    words = [pair.reason]
    if count <= FEW:
        words.append(pair.link)
        if pair.transfer is not None and pair.transfer.bytes_per_second:
            words.append(f"{pair.transfer.bytes_per_second / 1e9:.1f}")
    return plain(" ".join(words), STYLE.get(pair.status, ""))


def _legend(pairs: list[PairFact], count: int) -> Text:
    reasons = [code for code in REASONS if any(pair.reason == code for pair in pairs)]
    lines = [f"{code}: {REASONS[code][0]}" for code in reasons]
    if count <= FEW:
        lines += [f"{code}: {words}" for code, words in LINKS.items() if any(pair.link == code for pair in pairs)]
        if any(pair.transfer is not None and pair.transfer.bytes_per_second for pair in pairs):
            lines.append("number: GB/s of a copy of 8 MiB")
    return plain("\n".join(lines), "dim")
