"""``xpufp8 verify URL``: is what a running server answers right? Asked over HTTP, as any client would.

Wrong kernels crash nothing. They show in answers that change from call to call or with the batch, in flat or infinite
log-probabilities, in one token repeated for ever; and, beside a reference server of the same checkpoint, in other tokens.
"""

from __future__ import annotations

import json
import math
import urllib.error
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field

from xpufp8.errors import UsageError
from xpufp8.report import Model
from xpufp8.verify_client import Client, Completion

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "In the year 1969, the first human being who walked on the Moon said:",
    "1, 2, 4, 8, 16, 32,",
    "Q: Name three primary colours.\nA:",
)
TOKENS = 32
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


class Verification(Model):
    """What a server was seen to do."""

    schema_version: str = "1"
    url: str
    model: str = ""
    reference: str = ""
    checks: list[Check] = Field(default_factory=list)

    @property
    def verdict(self) -> str:
        """``wrong`` when a check failed, ``unknown`` when the server gave no answers to judge, else ``right``."""
        seen = {c.observation for c in self.checks}
        if "fail" in seen:
            return "wrong"
        return "right" if any(c.observation == "pass" for c in self.checks) else "unknown"

    def exit_code(self) -> int:
        """0 right, 1 wrong, 3 no verdict."""
        return {"right": 0, "wrong": 1}.get(self.verdict, 3)

    def text(self) -> str:
        """For people: a line a check, and the verdict."""
        marks = {"pass": "ok     ", "fail": "FAIL   ", "unknown": "unknown"}
        lines = [f"{self.url}  {self.model}" + (f"  against {self.reference}" if self.reference else "")]
        lines += [f"  {marks[c.observation]}  {c.name}: {c.detail}" for c in self.checks]
        return "\n".join([*lines, f"Verdict: {self.verdict}"]) + "\n"


@dataclass
class Answers:
    """What one server said to the prompts; enough to judge another server by, later."""

    model: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    """Prompt and greedy continuation of each prompt, as token ids."""
    scored: list[list[dict[str, float]]] = field(default_factory=list)
    """For each position of those, the likeliest tokens' log-probabilities (token id as text)."""


def check_url(url: str) -> str:
    """A server's base address, without a trailing ``/v1``.

    Raises:
        UsageError: no http address.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"URL {url}: give the server's address, such as http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise UsageError("URL: leave credentials out of the address; use --api-key")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def verify(
    url: str, *, reference: str | None = None, save: Path | None = None, key: str | None = None, reference_key: str | None = None
) -> Verification:
    """Ask a server and judge its answers.

    Args:
        url: of an OpenAI-compatible server.
        reference: of a server of the same checkpoint that is known to be right, or a file that ``save`` wrote about one.
        save: where to keep what is needed to judge another server by this one.
        key: API key of the server.
        reference_key: API key of the reference server.

    Raises:
        UsageError: an address, or a file, that cannot be used.
    """
    client = Client(check_url(url), key)
    try:
        client.connect()
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return Verification(url=client.url, checks=[Check(name="reachable", observation="unknown", detail=f"no answer: {error}")])
    checks: list[Check] = []
    alone = _ask_alone(client, checks)
    if alone:
        checks += [finite(alone), flat(alone), collapse(alone), _repeats(client, alone), _batched(client, alone), _rates(client)]
    if reference is not None:
        checks.append(_compared(client, reference, reference_key or key))
    if save is not None:
        _save(client, save)
    return Verification(url=client.url, model=client.model, reference=reference or "", checks=checks)


def _ask_alone(client: Client, checks: list[Check]) -> list[Completion]:
    answers = []
    for prompt in PROMPTS:
        try:
            answers.append(client.complete([prompt], TOKENS)[0])
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            checks.append(Check(name="answers", observation="fail", detail=f"{prompt!r}: {_said(error)}"))
            return []
    checks.append(Check(name="answers", observation="pass", detail=f"{len(PROMPTS)} prompts of {TOKENS} tokens"))
    return answers


def _said(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}: {error.read(300).decode('utf-8', 'replace')}"
    return f"{type(error).__name__}: {error}"


def finite(answers: Sequence[Completion]) -> Check:
    """Every log-probability is a number, and none is above 0."""
    bad = [p for a in answers for p in a.logprobs if p is None or not math.isfinite(p) or p > 1e-3]
    count = sum(len(a.logprobs) for a in answers)
    if not count:
        return Check(name="log-probabilities", observation="unknown", detail="the server gives none")
    if bad:
        return Check(name="log-probabilities", observation="fail", detail=f"{len(bad)} of {count} are no finite number up to 0")
    return Check(name="log-probabilities", observation="pass", detail=f"{count} finite values")


def flat(answers: Sequence[Completion]) -> Check:
    """The likeliest tokens are not all equally likely."""
    steps = [list(step.values()) for a in answers for step in a.top if len(step) > 1]
    if not steps:
        return Check(name="not flat", observation="unknown", detail="the server gives no alternatives to its tokens")
    level = sum(1 for values in steps if max(values) - min(values) < FLAT)
    ok = level < len(steps) / 2
    return Check(name="not flat", observation="pass" if ok else "fail", detail=f"{level} of {len(steps)} steps are flat")


def collapse(answers: Sequence[Completion]) -> Check:
    """No single token makes up the answers."""
    heads = []
    for answer in answers:
        if len(answer.tokens) >= TOKENS // 2:
            token, times = Counter(answer.tokens).most_common(1)[0]
            if times >= SHARE * len(answer.tokens):
                heads.append(token)
    if heads:
        token, times = Counter(heads).most_common(1)[0]
        if times * 2 >= len(answers):
            detail = f"{times} of {len(answers)} answers are token {token!r} over and over"
            return Check(name="no collapse", observation="fail", detail=detail)
    return Check(name="no collapse", observation="pass", detail=f"{len(heads)} of {len(answers)} answers repeat one token")


def differ(first: Completion, second: Completion) -> str | None:
    """Where two greedy answers part although the choice was clear, in words; None where they agree or parted at a tie."""
    for step, (ours, theirs) in enumerate(zip(first.tokens, second.tokens, strict=False)):
        if ours == theirs:
            continue
        values = sorted(first.top[step].values(), reverse=True) if step < len(first.top) else []
        margin = first.top[step].get(ours, 0.0) - first.top[step].get(theirs, -math.inf) if values else math.inf
        return None if margin <= TIE else f"token {step + 1} is {theirs!r} instead of {ours!r}"
    return None


def _agree(name: str, pairs: Sequence[tuple[Completion, Completion]]) -> Check:
    found = [f"prompt {i + 1}: {said}" for i, pair in enumerate(pairs) if (said := differ(*pair)) is not None]
    same = sum(1 for a, b in pairs if a.tokens == b.tokens)
    detail = "; ".join(found[:3]) or f"{same} of {len(pairs)} answers are the same to the last token, the others part at a tie"
    return Check(name=name, observation="fail" if found else "pass", detail=detail, numbers={"same": same, "of": len(pairs)})


def _repeats(client: Client, alone: list[Completion]) -> Check:
    try:
        again = [client.complete([prompt], TOKENS)[0] for prompt in PROMPTS]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return Check(name="same answer again", observation="fail", detail=_said(error))
    return _agree("same answer again", list(zip(alone, again, strict=True)))


def _batched(client: Client, alone: list[Completion]) -> Check:
    try:
        together = client.complete(list(PROMPTS), TOKENS)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return Check(name="same answer in a batch", observation="fail", detail=_said(error))
    if len(together) != len(alone):
        return Check(
            name="same answer in a batch", observation="unknown", detail="the server does not take several prompts at once"
        )
    return _agree("same answer in a batch", list(zip(alone, together, strict=True)))


def _rates(client: Client) -> Check:
    try:
        first, rate = client.rates(PROMPTS[3], 2 * TOKENS)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return Check(name="rates", observation="unknown", detail=_said(error))
    numbers = {"first_token_seconds": first, "tokens_per_second": rate}
    return Check(
        name="rates", observation="pass", detail=f"first token after {first:.3f} s, then {rate:.1f} tokens/s", numbers=numbers
    )


def _answers(client: Client, tokens: list[list[int]] | None = None) -> Answers:
    """Score the prompts with their continuations; without ``tokens``, the server's own greedy ones."""
    if tokens is None:
        tokens = []
        for prompt in PROMPTS:
            ids = client.tokenize(prompt)
            tokens.append([*ids, *client.complete([ids], TOKENS)[0].ids()])
    return Answers(client.model, tokens, [client.score(ids) for ids in tokens])


def _save(client: Client, path: Path) -> None:
    try:
        path.write_text(json.dumps(asdict(_answers(client))), encoding="utf-8")
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UsageError(f"--save {path}: {_said(error)}") from error


def _reference(reference: str, key: str | None) -> Answers:
    if Path(reference).is_file():
        try:
            return Answers(**json.loads(Path(reference).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"--reference {reference}: is no file that xpufp8 verify --save wrote ({error})") from error
    client = Client(check_url(reference), key)
    client.connect()
    return _answers(client)


def _compared(client: Client, reference: str, key: str | None) -> Check:
    """Both servers score the same tokens, so that one other choice does not make everything after it another text."""
    try:
        wanted = _reference(reference, key)
        got = _answers(client, wanted.tokens)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return Check(name="agrees with the reference", observation="unknown", detail=f"cannot be compared: {_said(error)}")
    return compare(wanted.scored, got.scored)


def compare(wanted: list[list[dict[str, float]]], got: list[list[dict[str, float]]]) -> Check:
    """Top-1 agreement where the reference's choice is clear, and the mean KL divergence from it, position by position."""
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
    name = "agrees with the reference"
    if not clear or not divergences:
        return Check(name=name, observation="unknown", detail="no position where the reference's choice is clear")
    agreement, mean = same / clear, sum(divergences) / len(divergences)
    numbers = {"top1_agreement": agreement, "mean_kl": mean, "positions": clear + ties, "worst_kl": max(divergences)}
    ok = agreement >= AGREEMENT and mean <= DIVERGENCE
    detail = f"the same token at {agreement:.1%} of {clear} clear positions, mean KL {mean:.4f} nats"
    detail += "" if ok else f" (at least {AGREEMENT:.0%} and at most {DIVERGENCE} are expected of the same checkpoint)"
    return Check(name=name, observation="pass" if ok else "fail", detail=detail, numbers=numbers)


def divergence(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """KL(ours || theirs) in nats over the tokens that both list; the rest of the probability is one more outcome.

    A lower bound: a token that the other side does not list counts with the rest.
    """
    shared = ours.keys() & theirs.keys()
    total = sum(math.exp(ours[t]) * (ours[t] - theirs[t]) for t in shared)
    rest_ours = max(1 - sum(math.exp(ours[t]) for t in shared), 0.0)
    rest_theirs = max(1 - sum(math.exp(theirs[t]) for t in shared), 1e-9)
    if rest_ours > 1e-9:
        total += rest_ours * math.log(rest_ours / rest_theirs)
    return max(total, 0.0)
