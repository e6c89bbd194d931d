"""A client of an OpenAI-compatible server, with vLLM's additions where the server has them: token ids and prompt scores.

Whatever a server does, the one error is ``UnansweredError``, in words for the person who typed the address.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import urlsplit

from probes.redact import redact
from xpufp8.errors import UsageError

TOP = 20
"""Alternatives asked for when text is scored: what vLLM gives without further options."""
FEW = 5
PREFIX = "token_id:"
SHOWN = 200
"""Characters of a server's own error message that are quoted."""


class UnansweredError(Exception):
    """No answer that could be judged, and why."""


@dataclass
class Completion:
    """One greedy answer."""

    tokens: list[str]
    """Token ids as ``token_id:N``; pieces of the text where the server gives no tokens."""
    logprobs: list[float | None]
    top: list[dict[str, float]] = field(default_factory=list)

    def ids(self) -> list[int]:
        """Token ids.

        Raises:
            UnansweredError: the server gives texts instead.
        """
        if not self.tokens or not all(re.fullmatch(rf"{PREFIX}\d{{1,9}}", t) for t in self.tokens):
            raise UnansweredError("the server gives no token ids (vLLM does), so its tokens cannot be scored")
        return [int(t.removeprefix(PREFIX)) for t in self.tokens]


def origin(url: str) -> tuple[str, str, int | None]:
    """What may see the same key: scheme, host and port."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


class _SameOrigin(urllib.request.HTTPRedirectHandler):
    """Follows a redirect on the same server and no other: the key and the prompts are for the one that was named."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """The request to follow with.

        Raises:
            UnansweredError: the address is another server's.
        """
        try:
            same = origin(newurl) == origin(req.full_url)
        except ValueError:
            same = False
        if not same:
            raise UnansweredError(f"the server sends on to {redact(newurl)[:SHOWN]}: give that address if it is meant")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Client:
    """One server."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 300.0, option: str = "--api-key") -> None:
        """A server at a base address.

        Args:
            url: without a trailing ``/v1``.
            key: its API key.
            timeout: seconds for an answer.
            option: how the key is given, for messages.

        Raises:
            UsageError: a key that cannot be sent.
        """
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UsageError(f"{option}: holds a line end or another character that cannot be sent. Give the key alone.")
        self.url, self.key, self.timeout, self.option = url, key, timeout, option
        self.model = ""
        self._opener = urllib.request.build_opener(_SameOrigin())

    @contextmanager
    def _asking(self, path: str, body: dict[str, Any] | None, timeout: float) -> Iterator[http.client.HTTPResponse]:
        """An open answer; every way in which asking goes wrong is told apart here."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = json.dumps(body).encode() if body is not None else None
        try:
            request = urllib.request.Request(f"{self.url}{path}", data, headers)  # noqa: S310 - http(s) by check_url
            with self._opener.open(request, timeout=timeout) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            raise UnansweredError(self._refused(error)) from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            said = getattr(reason, "strerror", None) or str(reason) or "the connection broke"
            raise UnansweredError(f"no answer: {redact(said)}") from error
        except http.client.HTTPException as error:
            raise UnansweredError(f"not an OpenAI-like server: what came from {path} is cut off or no HTTP") from error
        except (ValueError, RecursionError) as error:
            raise UnansweredError(f"not an OpenAI-like server: {path} answers no JSON") from error

    def _refused(self, error: urllib.error.HTTPError) -> str:
        try:
            said = " ".join(error.read(4 * SHOWN).decode("utf-8", "replace").split())[:SHOWN]
        except (OSError, http.client.HTTPException):
            said = ""
        if error.code in (401, 403):
            advice = f"it refuses the key of {self.option}" if self.key else f"it wants a key: give {self.option}"
            return f"HTTP {error.code}, {advice}" + (f" ({redact(said)})" if said else "")
        return f"HTTP {error.code}" + (f": {redact(said)}" if said else "")

    def _ask(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> dict[str, Any]:
        """GET, or POST of a JSON body. NaN is taken, which broken logits give and ``finite`` judges."""
        with self._asking(path, body, timeout or self.timeout) as answer:
            found = json.loads(answer.read())
        if not isinstance(found, dict):
            raise UnansweredError(f"not an OpenAI-like server: {path} answers {_kind(found)} instead of an object")
        return found

    def connect(self) -> None:
        """Ask which model is served.

        Raises:
            UnansweredError: no connection, or no model in the answer.
        """
        models = self._ask("/v1/models", timeout=30).get("data")
        first = models[0] if isinstance(models, list) and models else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str) or not first["id"]:
            raise UnansweredError("not an OpenAI-like server: /v1/models names no model")
        self.model = first["id"].encode("utf-8", "replace").decode()

    def _body(self, prompt: Any, tokens: int, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 0, **more}

    def complete(self, prompts: list[Any], tokens: int) -> list[Completion]:
        """Greedy answers to texts or token ids, all in one request, in their order.

        Raises:
            UnansweredError: none, or none in the form of a completion.
        """
        prompt = prompts[0] if len(prompts) == 1 else prompts
        body = self._body(prompt, tokens, logprobs=FEW, ignore_eos=True, return_tokens_as_token_ids=True)
        choices = _choices(self._ask("/v1/completions", body))
        return [_completion(c) for c in sorted(choices, key=lambda c: c["index"] if isinstance(c.get("index"), int) else 0)]

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, by vLLM's own endpoint.

        Raises:
            UnansweredError: the server has no such endpoint.
        """
        tokens = self._ask("/tokenize", {"model": self.model, "prompt": text}).get("tokens")
        if not isinstance(tokens, list) or not tokens or not all(type(t) is int for t in tokens):
            raise UnansweredError("the server's /tokenize gives no token ids (vLLM does)")
        return tokens

    def score(self, ids: list[int]) -> list[dict[str, float]]:
        """The likeliest tokens at each position after the first, with their log-probabilities, by vLLM's ``prompt_logprobs``.

        Raises:
            UnansweredError: the server does not score prompts.
        """
        answer = self._ask("/v1/completions", self._body(ids, 1, prompt_logprobs=TOP))
        steps = _choices(answer)[0].get("prompt_logprobs")
        if not isinstance(steps, list) or len(steps) != len(ids):
            raise UnansweredError("the server does not score prompts (vLLM does, by prompt_logprobs)")
        found = []
        for step in steps:
            entries = {} if step is None else step
            if not isinstance(entries, dict) or not all(
                isinstance(e, dict) and _is_number(e.get("logprob")) for e in entries.values()
            ):
                raise UnansweredError("not an OpenAI-like server: prompt_logprobs has another form than vLLM's")
            ranked = {t: e for t, e in entries.items() if not isinstance(e.get("rank"), int) or e["rank"] <= TOP}
            found.append({t: float(e["logprob"]) for t, e in ranked.items()})
        return found[1:]

    def rates(self, prompt: str, tokens: int) -> tuple[float, float]:
        """Seconds to the first token, and tokens a second after it, from a streamed answer.

        Raises:
            UnansweredError: fewer than two tokens came.
        """
        start = time.monotonic()
        with self._asking("/v1/completions", self._body(prompt, tokens, ignore_eos=True, stream=True), self.timeout) as stream:
            times = [time.monotonic() for line in stream if line.startswith(b"data:") and b"[DONE]" not in line]
        if len(times) < 2 or times[-1] <= times[0]:
            raise UnansweredError("the streamed answer holds too few tokens to time")
        return times[0] - start, (len(times) - 1) / (times[-1] - times[0])


def _kind(value: Any) -> str:
    """A JSON value's kind in plain words."""
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else "a text" if isinstance(value, str) else "a single value"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(c, dict) for c in choices):
        raise UnansweredError("not an OpenAI-like server: /v1/completions answers without choices")
    return choices


def _completion(choice: dict[str, Any]) -> Completion:
    probs, text = choice.get("logprobs") or {}, choice.get("text") or ""
    wrong = UnansweredError("not an OpenAI-like server: the text or the logprobs of a choice have another form")
    if not isinstance(probs, dict) or not isinstance(text, str):
        raise wrong
    tokens, chosen, top = (probs.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs"))
    if not all(isinstance(part, list) for part in (tokens, chosen, top)):
        raise wrong
    steps = [step or {} for step in top]
    if (
        not all(isinstance(t, str) for t in tokens)
        or not all(p is None or _is_number(p) for p in chosen)
        or not all(isinstance(step, dict) and all(_is_number(p) for p in step.values()) for step in steps)
    ):
        raise wrong
    return Completion(tokens or re.findall(r"\w+|[^\w\s]", text), chosen, steps)
