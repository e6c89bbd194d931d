"""Rules: facts in, findings out. One module an area; ``ALL`` is the greppable list of every rule."""

from __future__ import annotations

from xpufp8.rules import cfg, env, krn, probe
from xpufp8.rules.base import AREAS, Case, Rule

ALL: tuple[Rule, ...] = (*cfg.RULES, *env.RULES, *krn.RULES, *probe.RULES)
BY_CODE: dict[str, Rule] = {one.code: one for one in ALL}

__all__ = ["ALL", "AREAS", "BY_CODE", "Case", "Rule"]
