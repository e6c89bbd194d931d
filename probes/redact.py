"""Keeps secrets out of facts and reports: values only, names stay. Standard library alone, since both halves use it.

A name is secret when it contains ``TOKEN``, ``KEY``, ``SECRET`` or ``PASSWORD`` (environment variables), or when its last
word is one of those (options and mapping keys, so that ``--tokenizer`` and ``num_key_value_heads`` keep their values).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

REDACTED = "<redacted>"

_SECRET = r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)"
_SECRET_NAME = re.compile(_SECRET, re.IGNORECASE)
_PUBLIC = frozenset({"NEOReadDebugKeys", "TOKENIZERS_PARALLELISM"})
"""Variables whose names only look secret and whose values explain what happens."""

_VALUE = r"'[^']*'|\"[^\"]*\""
_SECRET_WORDS = frozenset({"key", "keys", "apikey", "secret", "password", "passwd", "credential", "credentials", "authorization"})
_BEARERS = frozenset(
    {"access", "api", "auth", "bearer", "github", "gitlab", "hf", "hub", "huggingface", "refresh", "secret", "session"}
)
"""What stands before ``token`` when it is a credential; an ``eos_token`` or ``image_token`` is part of a vocabulary."""

_URL = re.compile(r"\b([a-z][a-z0-9+.-]{0,30}://)[^\s/@'\"<>]{1,512}@", re.IGNORECASE)
_ASSIGNMENT = re.compile(rf"\b([A-Za-z0-9_]{{0,64}}{_SECRET}[A-Z0-9_]{{0,64}})=({_VALUE}|[^\s,;&|)]+)")
_QUERY = re.compile(r"([?&](?:[a-z0-9]{1,32}[_-])?(?:token|key|secret|password|signature|sig)=)[^&\s'\"]+", re.IGNORECASE)
_OPTION = re.compile(
    rf"(?<![\w-])(--[A-Za-z][\w-]{{0,64}})(?:(=)(?:{_VALUE}|[^\s'\"]+)"
    rf"|([ \t]+)(?:{_VALUE}|[^\s'\"-][^\s'\"]*)((?:[ \t]+[^\s'\"-][^\s'\"]*)*))"
)
_ENTRY = re.compile(r"(['\"])([A-Za-z][\w-]{0,64})\1(\s*[:=]\s*)(\[[^\]]*\]|'[^']*'|\"(?:[^\"\\]|\\.)*\"|[^\s,}\]]+)")
_BEARER = re.compile(r"\b(Bearer|Basic)(\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16})\b"
)


def _is_secret_word(name: str) -> bool:
    """True for an option or mapping key that names a secret by its last word: ``api_key``, not ``num_key_value_heads``."""
    words = name.strip("-").replace("_", "-").lower().split("-")
    if words[-1] == "token":
        return len(words) == 1 or words[-2] in _BEARERS
    return words[-1] in _SECRET_WORDS


def _looks_opaque(word: str) -> bool:
    """True for a word that may be a second key of ``--api-key A B`` rather than the sentence that follows in a log line."""
    return len(word) >= 16 or any(character.isdigit() for character in word)


def _option(match: re.Match[str]) -> str:
    name, equals, gap, more = match.groups()
    if not _is_secret_word(name):
        return match.group(0)
    if equals:
        return f"{name}={REDACTED}"
    rest = re.sub(r"\S+", lambda word: REDACTED if _looks_opaque(word.group(0)) else word.group(0), more)
    return f"{name}{gap}{REDACTED}{rest}"


def _entry(match: re.Match[str]) -> str:
    quote, name, between, value = match.groups()
    if not _is_secret_word(name) or value in ("None", "null", "True", "False", "true", "false", "[]", "''", '""'):
        return match.group(0)
    return f"{quote}{name}{quote}{between}{quote}{REDACTED}{quote}"


def redact(text: str) -> str:
    """Text without the secrets it holds: URL credentials, ``--api-key X``, ``HF_TOKEN=X``, ``'api_key': 'X'``, bearer tokens.

    The same text comes back when there are none, and redacting twice changes nothing.
    """
    text = _URL.sub(rf"\1{REDACTED}@", text)
    text = _QUERY.sub(rf"\1{REDACTED}", text)
    text = _ENTRY.sub(_entry, text)
    text = _OPTION.sub(_option, text)
    text = _ASSIGNMENT.sub(lambda match: match.group(0) if match.group(1) in _PUBLIC else f"{match.group(1)}={REDACTED}", text)
    text = _BEARER.sub(rf"\1\2{REDACTED}", text)
    return _SHAPES.sub(REDACTED, text)


def redact_env(name: str, value: str) -> str:
    """Value of an environment variable as it may be shown: hidden whole when the name says that it is a secret."""
    if value and _SECRET_NAME.search(name) and name not in _PUBLIC:
        return REDACTED
    return redact(value)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line as it may be shown: the values of secret options are hidden, all of ``--api-key A B``, and nothing else moves."""
    shown: list[str] = []
    hiding = False
    for token in argv:
        if token.startswith("-") and len(token) > 1:
            name, equals, _ = token.partition("=")
            hiding = name.startswith("--") and _is_secret_word(name)
            shown.append(f"{name}={REDACTED}" if hiding and equals else redact(token))
            hiding = hiding and not equals
        else:
            shown.append(REDACTED if hiding else redact(token))
    return shown
