"""The other side of ``verify``: a server, or a file about one, that is known to be right."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from probes.redact import redact
from xpufp8.errors import UsageError
from xpufp8.verify_client import Client, origin
from xpufp8.verify_judge import TOKENS

_HOST_AND_PORT = re.compile(r"(?:localhost|[\w.-]+:\d{1,5}|\[[0-9a-fA-F:.]+\](?::\d{1,5})?)(?:/.*)?")
"""What is an address without ``http://`` before it; anything else is the name of a file."""


@dataclass
class Answers:
    """What one server said to the prompts; enough to judge another server by, later."""

    model: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    """Prompt and greedy continuation of each prompt, as token ids."""
    scored: list[list[dict[str, float]]] = field(default_factory=list)
    """For each position of those after the first, the likeliest tokens' log-probabilities (token id as text)."""


def check_url(url: str, said: str = "URL") -> str:
    """A server's base address, without a trailing ``/v1``.

    Raises:
        UsageError: no http address.
    """
    wrong = UsageError(f"{said} {redact(url)}: no server's address. Give one such as http://127.0.0.1:8000")
    if not url.isprintable() or " " in url:
        raise wrong
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise wrong from error
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise wrong
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{said}: leave credentials out of the address; use --api-key")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def check_save(path: Path) -> None:
    """See, before anything is asked, that a file can be written there.

    Raises:
        UsageError: it cannot.
    """
    if path.is_dir():
        raise UsageError(f"--save {path}: is a folder. Give a file.")
    if not path.parent.is_dir():
        raise UsageError(f"--save {path}: there is no folder {path.parent}.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--save {path}: cannot be written.")


def open_reference(reference: str, client: Client, key: str | None, reference_key: str | None) -> Answers | Client:
    """The file's answers, or the server to ask. The key of the judged server goes to the same server only.

    Raises:
        UsageError: no such file, one that ``--save`` did not write, or no address.
    """
    path = Path(reference)
    if "://" not in reference and (path.exists() or not _HOST_AND_PORT.fullmatch(reference)):
        return read(path)
    url = check_url(reference, "--reference")
    own = reference_key or (key if origin(url) == origin(client.url) else None)
    return Client(url, own, option="--reference-api-key")


def read(path: Path) -> Answers:
    """A file that ``--save`` wrote.

    Raises:
        UsageError: it cannot be read, or is another one.
    """
    wrong = UsageError(f"--reference {path}: is no file that xpufp8 verify --save wrote.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--reference {path}: cannot be read ({error.strerror or error}). Give a file that --save wrote, or a server's "
            "address with http:// before it."
        ) from error
    except (ValueError, RecursionError) as error:
        raise wrong from error
    if not isinstance(data, dict) or not _is_saved(data.get("tokens"), data.get("scored")):
        raise wrong
    return Answers(str(data.get("model", "")), data["tokens"], data["scored"])


def _is_saved(tokens: Any, scored: Any) -> bool:
    """True for prompts of token ids with, for each token after the first, the log-probabilities of some."""
    return (
        isinstance(tokens, list)
        and isinstance(scored, list)
        and 0 < len(tokens) == len(scored)
        and all(isinstance(ids, list) and len(ids) > 1 and all(type(i) is int and i >= 0 for i in ids) for ids in tokens)
        and all(isinstance(steps, list) and all(isinstance(step, dict) for step in steps) for steps in scored)
        and all(len(steps) == len(ids) - 1 for ids, steps in zip(tokens, scored, strict=True))
        and all(type(p) in (int, float) and p < math.inf for steps in scored for step in steps for p in step.values())
        and any(len(step) > 1 for steps in scored for step in steps)
    )


def ask_answers(client: Client, prompts: Sequence[str], tokens: list[list[int]] | None = None) -> Answers:
    """Score the prompts with their continuations; without ``tokens``, the server's own greedy ones.

    Raises:
        UnansweredError: the server does not answer, or knows no token ids.
    """
    if tokens is None:
        tokens = []
        for prompt in prompts:
            ids = client.tokenize(prompt)
            tokens.append([*ids, *client.complete([ids], TOKENS)[0].ids()])
    return Answers(client.model, tokens, [client.score(ids) for ids in tokens])


def save(answers: Answers, path: Path) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written.
    """
    path.write_text(json.dumps(asdict(answers)), encoding="utf-8")
