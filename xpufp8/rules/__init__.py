"""Rules: facts in, findings out. One module an area; ``ALL`` is the greppable list of every rule."""

from __future__ import annotations

from xpufp8.rules import (
    cfg,
    checkpoint,
    cmp,
    dev,
    dev_cards,
    dty,
    env,
    krn,
    launched,
    log_stack,
    log_unrelated,
    mdl,
    mem,
    num,
    ops,
    p2p,
    p2p_collectives,
    p2p_host,
    prf,
    probe,
)
from xpufp8.rules.base import AREAS, Case, Rule

ALL: tuple[Rule, ...] = (
    *cfg.RULES, *checkpoint.RULES, *cmp.RULES, *dev.RULES, *dev_cards.RULES, *dty.RULES, *env.RULES, *krn.RULES, *launched.RULES,
    *log_stack.RULES, *log_unrelated.RULES, *mdl.RULES, *mem.RULES, *num.RULES, *ops.RULES, *p2p.RULES, *p2p_collectives.RULES,
    *p2p_host.RULES, *prf.RULES, *probe.RULES,
)  # fmt: skip
BY_CODE: dict[str, Rule] = {one.code: one for one in ALL}

__all__ = ["ALL", "AREAS", "BY_CODE", "Case", "Rule"]
