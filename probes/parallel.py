"""How many ranks the options for ``vllm serve`` ask for, in any spelling (the host half has its own parser, xpufp8/options.py)."""

from __future__ import annotations

import re
from collections.abc import Sequence

SIZES = re.compile(r"^(?:--(?:tensor|pipeline|data)[-_]parallel[-_]size|-tp|-pp|-dp)(?:=(?P<equal>\d+)|(?P<glued>\d+))?$")


def world_size(tokens: Sequence[str]) -> int:
    """Product of the tensor, pipeline and data parallel sizes; the last spelling of each counts."""
    sizes: dict[str, int] = {}
    for at, token in enumerate(tokens):
        match = SIZES.match(token)
        if match is None:
            continue
        text = match["equal"] or match["glued"] or (tokens[at + 1] if at + 1 < len(tokens) else "")
        kind = {"t": "t", "p": "p", "d": "d"}[token.lstrip("-")[0]]
        sizes[kind] = int(text) if text.isdecimal() and int(text) else 1
    return sizes.get("t", 1) * sizes.get("p", 1) * sizes.get("d", 1)
