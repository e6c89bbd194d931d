"""A client of an OpenAI-compatible server, with vLLM's additions where the server has them: token ids and prompt scores."""

from __future__ import annotations

import json
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from xpufp8.launch import ask

TOP = 20
"""Alternatives asked for when text is scored: what vLLM gives without further options."""
FEW = 5
PREFIX = "token_id:"


@dataclass
class Completion:
    """One greedy answer."""

    tokens: list[str]
    logprobs: list[float | None]
    top: list[dict[str, float]] = field(default_factory=list)

    def ids(self) -> list[int]:
        """Token ids.

        Raises:
            ValueError: the server gives texts instead.
        """
        return [int(t.removeprefix(PREFIX)) for t in self.tokens]


class Client:
    """One server."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 300.0) -> None:
        self.url, self.key, self.timeout = url, key, timeout
        self.model = ""

    def connect(self) -> None:
        """Ask which model is served.

        Raises:
            OSError: no connection.
            ValueError: no JSON.
            KeyError: no model in the answer.
        """
        self.model = str(ask(f"{self.url}/v1/models", key=self.key, timeout=30)["data"][0]["id"])

    def _body(self, prompt: Any, tokens: int, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 0, **more}

    def complete(self, prompts: list[Any], tokens: int) -> list[Completion]:
        """Greedy answers to texts or token ids, all in one request, in their order."""
        prompt = prompts[0] if len(prompts) == 1 else prompts
        body = self._body(prompt, tokens, logprobs=FEW, ignore_eos=True, return_tokens_as_token_ids=True)
        answer = ask(f"{self.url}/v1/completions", body, self.key, self.timeout)
        return [_completion(c) for c in sorted(answer["choices"], key=lambda c: c.get("index", 0))]

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, by vLLM's own endpoint."""
        answer = ask(f"{self.url}/tokenize", {"model": self.model, "prompt": text}, self.key, self.timeout)
        return [int(t) for t in answer["tokens"]]

    def score(self, ids: list[int]) -> list[dict[str, float]]:
        """The likeliest tokens at each position after the first, with their log-probabilities, by vLLM's ``prompt_logprobs``."""
        answer = ask(f"{self.url}/v1/completions", self._body(ids, 1, prompt_logprobs=TOP), self.key, self.timeout)
        found = []
        for step in answer["choices"][0]["prompt_logprobs"]:
            ranked = {t: one for t, one in (step or {}).items() if int(one.get("rank") or TOP) <= TOP}
            found.append({t: float(one["logprob"]) for t, one in ranked.items()})
        return found[1:]

    def rates(self, prompt: str, tokens: int) -> tuple[float, float]:
        """Seconds to the first token, and tokens a second after it, from a streamed answer.

        Raises:
            ValueError: fewer than two tokens came.
        """
        body = self._body(prompt, tokens, ignore_eos=True, stream=True)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)  # noqa: S310 - checked by check_url
        start = time.monotonic()
        with urllib.request.urlopen(request, timeout=self.timeout) as stream:  # noqa: S310 - as above
            times = [time.monotonic() for line in stream if line.startswith(b"data:") and b"[DONE]" not in line]
        if len(times) < 2 or times[-1] <= times[0]:
            raise ValueError("the streamed answer holds too few tokens to time")
        return times[0] - start, (len(times) - 1) / (times[-1] - times[0])


def _completion(choice: dict[str, Any]) -> Completion:
    probs = choice.get("logprobs") or {}
    tokens = [str(t) for t in probs.get("tokens") or []] or [str(choice.get("text", ""))]
    top = [{str(t): float(p) for t, p in (step or {}).items()} for step in probs.get("top_logprobs") or []]
    return Completion(tokens, list(probs.get("token_logprobs") or []), top)
