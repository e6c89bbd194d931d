"""Rules: facts in, findings out. One module an area; ``ALL`` is the greppable list of every rule."""

from __future__ import annotations

from xpufp8.rules.base import AREAS, Case, Rule

ALL: tuple[Rule, ...] = ()

__all__ = ["ALL", "AREAS", "Case", "Rule"]
