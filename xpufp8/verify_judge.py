"""What answers of a server show: pure judgements, each a question with its answer and its limit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from xpufp8.report import Model
from xpufp8.verify_client import Completion

TOKENS = 32
"""Asked for at each prompt."""
ENOUGH = TOKENS // 2
"""Fewer tokens than that show no collapse and no drift."""
TIE = 0.3
"""Nats. Where two tokens are closer than that, rounding in another order may choose the other one; it proves nothing."""
SHARE = 0.9
"""One token that makes up that part of the answers to at least half of the prompts is a collapse."""
FLAT = 1e-3
"""Nats between the likeliest and the least likely of the tokens returned, below which a step is flat."""
AGREEMENT = 0.95
"""Least part of the positions, ties left out, at which a server must choose the reference's token."""
DIVERGENCE = 0.05
"""Nats. Largest mean KL divergence from the reference; other roundings of the same weights stay below a tenth of it."""


class Check(Model):
    """One question and its answer."""

    name: str
    observation: str
    """pass, fail or unknown."""
    detail: str
    numbers: dict[str, float] = Field(default_factory=dict)


def unknown(name: str, detail: str) -> Check:
    """A question without an answer."""
    return Check(name=name, observation="unknown", detail=detail)


def answered(answers: Sequence[Completion]) -> Check:
    """Enough came to judge: half of the tokens asked for, at half of the prompts at least, and something at each."""
    full = sum(1 for a in answers if len(a.tokens) >= ENOUGH)
    empty = sum(1 for a in answers if not a.tokens)
    if empty or full * 2 < len(answers):
        counts = sorted(len(a.tokens) for a in answers)
        return unknown("answers", f"too few tokens to judge: {counts[0]} to {counts[-1]} of the {TOKENS} asked for")
    return Check(name="answers", observation="pass", detail=f"{len(answers)} prompts of {TOKENS} tokens")


def finite(answers: Sequence[Completion]) -> Check:
    """Every log-probability is a number, and none is above 0."""
    bad = [p for a in answers for p in a.logprobs if p is None or not math.isfinite(p) or p > 1e-3]
    count = sum(len(a.logprobs) for a in answers)
    if not count:
        return unknown("log-probabilities", "the server gives none")
    if bad:
        return Check(name="log-probabilities", observation="fail", detail=f"{len(bad)} of {count} are no finite number up to 0")
    return Check(name="log-probabilities", observation="pass", detail=f"{count} finite values")


def flat(answers: Sequence[Completion]) -> Check:
    """The likeliest tokens are not all equally likely."""
    steps = [list(step.values()) for a in answers for step in a.top if len(step) > 1]
    if not steps:
        return unknown("not flat", "the server gives no alternatives to its tokens")
    level = sum(1 for values in steps if max(values) - min(values) < FLAT)
    ok = level < len(steps) / 2
    return Check(name="not flat", observation="pass" if ok else "fail", detail=f"{level} of {len(steps)} steps are flat")


def collapse(answers: Sequence[Completion]) -> Check:
    """No single token makes up the answers."""
    heads = []
    long = [answer for answer in answers if len(answer.tokens) >= ENOUGH]
    for answer in long:
        token, times = Counter(answer.tokens).most_common(1)[0]
        if times >= SHARE * len(answer.tokens):
            heads.append(token)
    if heads:
        token, times = Counter(heads).most_common(1)[0]
        if times * 2 >= len(answers):
            detail = f"{times} of {len(answers)} answers are token {token!r} over and over"
            return Check(name="no collapse", observation="fail", detail=detail)
    if not long:
        return unknown("no collapse", f"no answer has {ENOUGH} tokens")
    return Check(name="no collapse", observation="pass", detail=f"{len(heads)} of {len(answers)} answers repeat one token")


def differ(first: Completion, second: Completion) -> str | None:
    """Where two greedy answers part although the choice was clear, in words; None where they agree or parted at a tie."""
    for step, (ours, theirs) in enumerate(zip(first.tokens, second.tokens, strict=False)):
        if ours == theirs:
            continue
        values = sorted(first.top[step].values(), reverse=True) if step < len(first.top) else []
        margin = first.top[step].get(ours, 0.0) - first.top[step].get(theirs, -math.inf) if values else math.inf
        return None if margin <= TIE else f"token {step + 1} is {theirs!r} instead of {ours!r}"
    if len(first.tokens) != len(second.tokens):
        return f"{len(second.tokens)} tokens instead of {len(first.tokens)}"
    return None


def agree(name: str, pairs: Sequence[tuple[Completion, Completion]]) -> Check:
    """Both answers to each prompt are the same, ties apart."""
    if not any(a.tokens or b.tokens for a, b in pairs):
        return unknown(name, "there are no tokens to compare")
    found = [f"prompt {i + 1}: {said}" for i, pair in enumerate(pairs) if (said := differ(*pair)) is not None]
    same = sum(1 for a, b in pairs if a.tokens == b.tokens)
    detail = "; ".join(found[:3]) or f"{same} of {len(pairs)} answers are the same to the last token, the others part at a tie"
    return Check(name=name, observation="fail" if found else "pass", detail=detail, numbers={"same": same, "of": len(pairs)})


def compare(wanted: list[list[dict[str, float]]], got: list[list[dict[str, float]]]) -> Check:
    """Top-1 agreement where the reference's choice is clear, and the mean KL divergence from it, position by position."""
    name = "agrees with the reference"
    if [len(steps) for steps in wanted] != [len(steps) for steps in got]:
        return unknown(name, "the server scores another number of tokens than the reference")
    same = clear = ties = 0
    divergences = []
    for left, right in zip(wanted, got, strict=True):
        for ours, theirs in zip(left, right, strict=True):
            if len(ours) < 2 or not theirs:
                continue
            order = sorted(ours, key=lambda t: -ours[t])
            divergences.append(divergence(ours, theirs))
            if ours[order[0]] - ours[order[1]] <= TIE:
                ties += 1
                continue
            clear += 1
            same += max(theirs, key=lambda t: theirs[t]) == order[0]
    if not clear or not divergences:
        return unknown(name, "no position where the reference's choice is clear")
    agreement, mean = same / clear, sum(divergences) / len(divergences)
    numbers = {"top1_agreement": agreement, "mean_kl": mean, "positions": clear + ties, "worst_kl": max(divergences)}
    ok = agreement >= AGREEMENT and mean <= DIVERGENCE
    detail = f"the same token at {agreement:.1%} of {clear} clear positions, mean KL {mean:.4f} nats"
    detail += "" if ok else f" (at least {AGREEMENT:.0%} and at most {DIVERGENCE} are expected of the same checkpoint)"
    return Check(name=name, observation="pass" if ok else "fail", detail=detail, numbers=numbers)


def divergence(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """KL(ours || theirs) in nats over the tokens that both list; the rest of the probability is one more outcome.

    A lower bound: a token that the other side does not list counts with the rest. Infinite where a value is no number.
    """
    shared = ours.keys() & theirs.keys()
    if any(math.isnan(values[t]) or values[t] > 1.0 for values in (ours, theirs) for t in shared):
        return math.inf
    total = sum(math.exp(ours[t]) * (ours[t] - theirs[t]) for t in shared if ours[t] > -math.inf)
    rest_ours = max(1 - sum(math.exp(ours[t]) for t in shared), 0.0)
    rest_theirs = max(1 - sum(math.exp(theirs[t]) for t in shared), 1e-9)
    if rest_ours > 1e-9:
        total += rest_ours * math.log(rest_ours / rest_theirs)
    return max(total, 0.0)
