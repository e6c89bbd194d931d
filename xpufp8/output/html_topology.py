"""The PCI topology as an SVG: host bridges at the top, ports and switches below, cards at the bottom, arcs for peer access."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WIDTH = 148
"""Pixels from one card to the next."""
LEVEL = 64
BOX = (128, 36)
CARD = (132, 52)
MARGIN = 12
LABELLED = 5
"""Up to that many cards an arc that is not good carries its reason."""
WORST = ("fail", "unknown", "pass")


@dataclass
class Node:
    """One box of the tree: a root bus, a bridge or a card."""

    name: str
    label: str
    small: str
    kind: str
    children: dict[str, Node] = field(default_factory=dict)
    x: float = 0.0
    y: float = 0.0


def drawing(facts: dict[str, Any]) -> Any:
    """The SVG, as markup. The table beside it says the same in words."""
    from markupsafe import Markup

    cards = [card for card in facts.get("cards") or [] if isinstance(card, dict)]
    roots, leaves, depth = _tree(cards, facts)
    next_x = MARGIN + WIDTH / 2
    for root in roots:
        next_x = _place(root, 0, depth, next_x)
    bottom = MARGIN + depth * LEVEL + CARD[1]
    arcs, lowest = _arcs(leaves, facts, bottom)
    width, height = MARGIN * 2 + WIDTH * len(cards), lowest + MARGIN
    body = [part for root in roots for part in _draw(root)] + arcs
    said = f"{len(cards)} cards under {len(roots)} host bridge{'s' if len(roots) > 1 else ''}"
    head = Markup('<svg class="topology" role="img" aria-label="{}" width="{}" height="{:.0f}" viewBox="0 0 {} {:.0f}">').format(
        f"PCI topology: {said}", width, height, width, height
    )
    return head + Markup("").join(body) + Markup("</svg>")


def _tree(cards: list[dict[str, Any]], facts: dict[str, Any]) -> tuple[list[Node], dict[str, Node], int]:
    """Root buses, cards by address, and the number of levels above the cards. Ports on a card itself are left out."""
    bridges = {str(b.get("address")): b for b in facts.get("bridges") or [] if isinstance(b, dict)}
    hosts: dict[str, Any] = facts.get("host_bridges") or {}
    roots: dict[str, Node] = {}
    leaves: dict[str, Node] = {}
    depth = 1
    for at, card in enumerate(cards):
        address = str(card.get("address"))
        above = [str(one) for one in card.get("path") or []][:-1]
        bus = "pci" + (above[0] if above else address)[:7]
        node = roots.setdefault(bus, Node(bus, bus.removeprefix("pci"), str(hosts.get(bus, "")), "host"))
        level = 1
        for one in above:
            bridge = bridges.get(one, {})
            if bridge.get("kind") == "on-card":
                continue
            kind = "redirect" if bridge.get("redirects") == "fail" else "bridge"
            label = str(bridge.get("kind", "bridge")).replace("-", " ")
            node = node.children.setdefault(one, Node(one, label, one.removeprefix("0000:"), kind))
            level += 1
        depth = max(depth, level)
        leaf = Node(address, f"{at} {card.get('name') or card.get('device')}", address.removeprefix("0000:"), "card")
        leaves[address] = node.children.setdefault(address, leaf)
    return list(roots.values()), leaves, depth


def _place(node: Node, level: int, depth: int, next_x: float) -> float:
    """Give the node and all below it their places; returns where the next card goes."""
    node.y = MARGIN + (depth if node.kind == "card" else level) * LEVEL
    if not node.children:
        node.x = next_x
        return next_x + WIDTH
    for child in node.children.values():
        next_x = _place(child, level + 1, depth, next_x)
    places = [child.x for child in node.children.values()]
    node.x = (places[0] + places[-1]) / 2
    return next_x


def _draw(node: Node) -> list[Any]:
    from markupsafe import Markup

    width, height = CARD if node.kind == "card" else BOX
    parts: list[Any] = []
    for child in node.children.values():
        middle = (node.y + height + child.y) / 2
        parts.append(
            Markup('<path class="branch" d="M{:.1f} {:.1f}V{:.1f}H{:.1f}V{:.1f}"/>').format(
                node.x, node.y + height, middle, child.x, child.y
            )
        )
        parts += _draw(child)
    box = Markup('<g class="{}"><rect x="{:.1f}" y="{:.1f}" width="{}" height="{}" rx="6"/>').format(
        node.kind, node.x - width / 2, node.y, width, height
    )
    first = node.y + (22 if node.kind == "card" else 15)
    text = Markup('<text x="{:.1f}" y="{:.1f}">{}</text><text class="small" x="{:.1f}" y="{:.1f}">{}</text></g>').format(
        node.x, first, node.label[:20], node.x, first + 15, node.small + (" ACS redirect" if node.kind == "redirect" else "")
    )
    return [*parts, box + text]


def _arcs(leaves: dict[str, Node], facts: dict[str, Any], bottom: float) -> tuple[list[Any], float]:
    """An arc for each two cards, by the worse of both directions, and the lowest line that was drawn on."""
    from markupsafe import Markup

    both: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for pair in facts.get("pairs") or []:
        if isinstance(pair, dict) and pair.get("source") in leaves and pair.get("target") in leaves:
            one, other = sorted((str(pair["source"]), str(pair["target"])))
            both.setdefault((one, other), []).append(pair)
    parts: list[Any] = []
    lowest = bottom
    for (one, other), pairs in sorted(both.items()):
        a, b = sorted((leaves[one], leaves[other]), key=lambda node: node.x)
        status = min((str(p.get("status")) for p in pairs), key=lambda s: WORST.index(s) if s in WORST else 1)
        status = status if status in WORST else "unknown"
        depth = 26 + 16 * round((b.x - a.x) / WIDTH)
        parts.append(
            Markup('<path class="peer {}" d="M{:.1f} {:.1f}Q{:.1f} {:.1f} {:.1f} {:.1f}"/>').format(
                status, a.x, bottom, (a.x + b.x) / 2, bottom + 2 * depth, b.x, bottom
            )
        )
        lowest = max(lowest, bottom + depth + 4)
        if len(leaves) <= LABELLED and status != "pass":
            said = " / ".join(dict.fromkeys(str(p.get("reason")) for p in pairs))
            parts.append(
                Markup('<text class="small" x="{:.1f}" y="{:.1f}">{}</text>').format((a.x + b.x) / 2, bottom + depth + 14, said)
            )
            lowest = max(lowest, bottom + depth + 20)
    return parts, lowest
