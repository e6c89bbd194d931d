"""Starts a plan once, with dummy weights on a free port, and asks it for one completion.

That is the last proof a plan can have without the weights: every process of vLLM came up, compiled, allocated its cache and
answered. What it cannot prove is that the answer of the real weights is right (``xpufp8 verify`` asks that).
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xpufp8 import options
from xpufp8.children import TOKEN_VARIABLE, end_all
from xpufp8.command import Command

START_SECONDS = 900.0
"""Time for a server to answer /health. Compilation of a large model takes minutes."""
STOP_SECONDS = 20.0
REPLACED = (
    "--port",
    "--host",
    "--uds",
    "--load-format",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
    "--root-path",
    "--headless",
)
"""Typed options that the trial replaces: it listens on loopback, without TLS, and loads no weights."""
PROMPT = [3, 5, 7, 11, 13, 17, 19, 23]
"""Token ids, so that no tokenizer is needed."""
TOKENS = 16


@dataclass
class Trial:
    """What came of one launch."""

    ok: bool
    detail: str
    log: Path
    seconds: float = 0.0
    differences: list[str] = field(default_factory=list)
    """Options whose value in vLLM's own line of non-default arguments is not what was asked."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def trial_argv(argv: Sequence[str], port: int) -> list[str]:
    """The plan's command with dummy weights on a loopback port; everything else as it is."""
    at = argv.index("serve") + 1
    kept = options.without(argv[at:], REPLACED)
    return [*argv[:at], *kept, "--load-format", "dummy", "--host", "127.0.0.1", "--port", str(port)]


@contextmanager
def running(command: Command, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a session of its own; at the end it and everything that it started is gone."""
    token = uuid.uuid4().hex
    environment = {
        **os.environ,
        **command.env,
        TOKEN_VARIABLE: token,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "NO_COLOR": "1",
    }
    with log.open("wb") as out:
        server = subprocess.Popen(
            command.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        yield server
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):  # end_all is not as patient
                server.wait(STOP_SECONDS)
        end_all(token, server.pid)
        server.wait()


def ask(url: str, body: dict[str, Any] | None = None, key: str | None = None, timeout: float = 60.0) -> Any:
    """GET, or POST of a JSON body; the parsed answer, or None for an empty one.

    Raises:
        OSError: no connection, or an HTTP error.
        ValueError: the answer is no JSON (NaN among it, which JSON does not know and Python would take).
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode() if body is not None else None, headers)  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310 - as above
        text = answer.read()

    def refuse(name: str) -> float:
        raise ValueError(f"the answer holds {name}, which is no JSON")

    return json.loads(text, parse_constant=refuse) if text.strip() else None


def judge_completion(answer: Any) -> str | None:
    """What is wrong with one completion, or None: tokens missing, log-probabilities not finite or flat, nothing but token 0."""
    try:
        choice = answer["choices"][0]
        tokens, chosen, top = (choice["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    except (KeyError, IndexError, TypeError):
        return "the answer holds no tokens with log-probabilities"
    if not tokens:
        return "the answer holds no token"
    if any(p is None or not math.isfinite(p) or p > 1e-3 for p in chosen):
        return f"log-probabilities are not finite: {chosen[:4]}"
    if all(str(t) in ("token_id:0", "!") for t in tokens):
        return "every token is token 0 (the '!!!!' of broken logits)"
    flat = [len(set(step.values())) == 1 for step in top if step and len(step) > 1]
    if flat and all(flat):
        return "every token is equally likely at every step: the logits are flat"
    return None


def non_default_args(log: str) -> dict[str, Any] | None:
    """VLLM's own line of arguments that differ from its defaults, or None where the log has none."""
    found = re.search(r"non-default args: (\{.{0,20000}\})\s*$", log, re.MULTILINE)
    if found is None:
        return None
    try:
        value = ast.literal_eval(found.group(1))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def compare_args(tokens: Sequence[str], logged: dict[str, Any]) -> list[str]:
    """Typed scalar options whose logged value is another one. An option at its default is not logged and is not compared."""
    wrong = []
    for option in options.parse(tokens):
        dest = option.name[2:].replace("-", "_")
        if not option.name.startswith("--") or "." in option.name or dest not in logged or len(option.values) > 1:
            continue
        asked, got = option.value, logged[dest]
        if asked is None or isinstance(got, (dict, list)):
            continue
        if not _same(asked, got):
            wrong.append(f"{option.name}: asked {asked}, vLLM runs with {got}")
    return wrong


def _same(asked: str, got: Any) -> bool:
    if str(got).lower() == asked.lower():
        return True
    try:
        return math.isclose(float(asked), float(got))
    except (TypeError, ValueError):
        # Values that vLLM converts (4k, JSON, enum names) are its own to read.
        return not isinstance(got, str)


def launch(command: Command, limit: float = START_SECONDS) -> Trial:
    """Start the command with dummy weights and ask it for one completion."""
    folder = Path(tempfile.mkdtemp(prefix="xpufp8-launch-"))
    log, port, start = folder / "vllm.log", free_port(), time.monotonic()
    trial = Command(trial_argv(command.argv, port), command.env)
    key = options.value(command.argv, "--api-key") or os.environ.get("VLLM_API_KEY")
    base = f"http://127.0.0.1:{port}"
    try:
        with running(trial, log) as server:
            problem = _wait(server, base, start + limit) or _complete(base, key)
    except OSError as error:
        problem = f"{command.argv[0]} cannot be started: {error.strerror or error}"
        log.touch()
    text = log.read_text(encoding="utf-8", errors="replace")
    logged = non_default_args(text)
    differences = compare_args(trial.argv, logged) if logged is not None else []
    return Trial(problem is None, problem or "it came up and answered", log, time.monotonic() - start, differences)


def _wait(server: subprocess.Popen[bytes], base: str, deadline: float) -> str | None:
    while time.monotonic() < deadline:
        code = server.poll()
        if code is not None:
            return f"the server ended with {'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)} before it answered"
        try:
            ask(f"{base}/health", timeout=5)
        except (OSError, ValueError):
            time.sleep(0.5)
        else:
            return None
    return "the server did not answer /health in time"


def _complete(base: str, key: str | None) -> str | None:
    try:
        model = ask(f"{base}/v1/models", key=key)["data"][0]["id"]
        body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 4}
        body |= {"ignore_eos": True, "return_tokens_as_token_ids": True}
        return judge_completion(ask(f"{base}/v1/completions", body, key, timeout=300))
    except urllib.error.HTTPError as error:
        return f"the server answered HTTP {error.code}: {error.read(300).decode('utf-8', 'replace')}"
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return f"the server gave no completion: {error}"
