"""``xpufp8 verify URL``: is what a running server answers right? Asked over HTTP, as any client would.

Wrong kernels crash nothing. They show in answers that change from call to call or with the batch, in flat or infinite
log-probabilities, in one token repeated for ever; and, beside a reference server of the same checkpoint, in other tokens.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, computed_field

from xpufp8.report import Model
from xpufp8.verify_client import Client, Completion, UnansweredError
from xpufp8.verify_judge import TOKENS, Check, agree, answered, collapse, compare, finite, flat, unknown
from xpufp8.verify_reference import Answers, ask_answers, check_save, check_url, open_reference, save

__all__ = ["PROMPTS", "TOKENS", "Verification", "verify"]

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "In the year 1969, the first human being who walked on the Moon said:",
    "1, 2, 4, 8, 16, 32,",
    "Q: Name three primary colours.\nA:",
)
OPTIONAL = frozenset({"log-probabilities", "not flat", "no collapse", "rates", "saved"})
"""What a server may leave open, because it gives no log-probabilities or token ids, and still be called right."""
REFERENCE = "agrees with the reference"


class Verification(Model):
    """What a server was seen to do."""

    schema_version: str = "1"
    url: str
    model: str = ""
    reference: str = ""
    checks: list[Check] = Field(default_factory=list)

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own way; mypy knows no decorated property
    @property
    def verdict(self) -> str:
        """``wrong`` when a check failed, ``unknown`` when one that matters has no answer, else ``right``."""
        if any(c.observation == "fail" for c in self.checks):
            return "wrong"
        open_ = any(c.observation == "unknown" and c.name not in OPTIONAL for c in self.checks)
        return "unknown" if open_ or not self.checks else "right"

    def exit_code(self) -> int:
        """0 right, 1 wrong, 3 no verdict, or right and what was to be saved could not be."""
        if self.verdict == "right" and not any(c.name == "saved" for c in self.checks):
            return 0
        return 1 if self.verdict == "wrong" else 3

    def text(self) -> str:
        """For people: a line a check, and the verdict."""
        marks = {"pass": "ok     ", "fail": "FAIL   ", "unknown": "unknown"}
        lines = [f"{self.url}  {self.model}" + (f"  against {self.reference}" if self.reference else "")]
        lines += [f"  {marks[c.observation]}  {c.name}: {c.detail}" for c in self.checks]
        return "\n".join([*lines, f"Verdict: {self.verdict}"]) + "\n"


def verify(
    url: str, *, reference: str | None = None, save: Path | None = None, key: str | None = None, reference_key: str | None = None
) -> Verification:
    """Ask a server and judge its answers.

    Args:
        url: of an OpenAI-compatible server.
        reference: of a server of the same checkpoint that is known to be right, or a file that ``save`` wrote about one.
        save: where to keep what is needed to judge another server by this one.
        key: API key of the server; it is sent to no other one.
        reference_key: API key of the reference server.

    Raises:
        UsageError: an address, a key, or a file, that cannot be used; known before anything is asked.
    """
    client = Client(check_url(url), key)
    other = open_reference(reference, client, key, reference_key) if reference is not None else None
    if save is not None:
        check_save(save)
    try:
        client.connect()
    except UnansweredError as error:
        return Verification(url=client.url, checks=[unknown("reachable", str(error))])
    checks = _alone(client)
    if other is not None:
        checks.append(_compared(client, other))
    if save is not None:
        checks += _saved(client, save)
    return Verification(url=client.url, model=client.model, reference=reference or "", checks=checks)


def _alone(client: Client) -> list[Check]:
    """What the server's own answers show."""
    try:
        answers = [client.complete([prompt], TOKENS)[0] for prompt in PROMPTS]
    except UnansweredError as error:
        return [unknown("answers", str(error))]
    judged = [answered(answers), finite(answers), flat(answers), collapse(answers)]
    return [*judged, _repeats(client, answers), _batched(client, answers), _rates(client)]


def _repeats(client: Client, alone: list[Completion]) -> Check:
    name = "same answer again"
    try:
        again = [client.complete([prompt], TOKENS)[0] for prompt in PROMPTS]
    except UnansweredError as error:
        return unknown(name, str(error))
    return agree(name, list(zip(alone, again, strict=True)))


def _batched(client: Client, alone: list[Completion]) -> Check:
    name = "same answer in a batch"
    try:
        together = client.complete(list(PROMPTS), TOKENS)
    except UnansweredError as error:
        return unknown(name, str(error))
    if len(together) != len(alone):
        return unknown(name, "the server does not take several prompts at once")
    return agree(name, list(zip(alone, together, strict=True)))


def _rates(client: Client) -> Check:
    try:
        first, rate = client.rates(PROMPTS[3], 2 * TOKENS)
    except UnansweredError as error:
        return unknown("rates", str(error))
    numbers = {"first_token_seconds": first, "tokens_per_second": rate}
    return Check(
        name="rates", observation="pass", detail=f"first token after {first:.3f} s, then {rate:.1f} tokens/s", numbers=numbers
    )


def _compared(client: Client, other: Answers | Client) -> Check:
    """Both servers score the same tokens, so that one other choice does not make everything after it another text."""
    if isinstance(other, Client):
        try:
            other.connect()
            other = ask_answers(other, PROMPTS)
        except UnansweredError as error:
            return unknown(REFERENCE, f"the reference cannot be asked: {error}")
    try:
        got = ask_answers(client, PROMPTS, other.tokens)
    except UnansweredError as error:
        return unknown(REFERENCE, f"cannot be compared: {error}")
    return compare(other.scored, got.scored)


def _saved(client: Client, path: Path) -> list[Check]:
    """Nothing when the answers are kept; what hindered it otherwise, beside the verdict and not instead of it."""
    try:
        save(ask_answers(client, PROMPTS), path)
    except UnansweredError as error:
        return [unknown("saved", f"nothing was written to {path}: {error}")]
    except OSError as error:
        return [unknown("saved", f"{path} cannot be written: {error.strerror or error}")]
    return []
