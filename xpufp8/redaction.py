"""The one place where a report loses its secrets, just before it leaves the diagnosis.

Probes redact what they read of the environment; here everything else is covered: typed options, the plan, what processes
printed, and any known secret value wherever it may have got to.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from probes.redact import REDACTED, redact, redact_argv, redact_env, redact_json
from xpufp8.report import Report

SHORTEST = 6
"""A known secret shorter than this is not searched for everywhere: it would blank out ordinary words."""

ARGV_FIELDS = frozenset({"argv", "vllm_args"})
TRUSTED_FACTS = frozenset({"fake_tensor", "kernel_table"})
"""Probes whose facts hold only names out of the serving stack's own sources."""


def known_secrets(tokens: Sequence[str]) -> tuple[str, ...]:
    """Values that are secret by the name of their variable or option, longest first."""
    found = {text for name, text in os.environ.items() if redact_env(name, text) == REDACTED}
    found |= {typed for typed, shown in zip(tokens, redact_argv(list(tokens)), strict=False) if shown == REDACTED}
    found |= {t.partition("=")[2] for t, s in zip(tokens, redact_argv(list(tokens)), strict=False) if s.endswith(f"={REDACTED}")}
    return tuple(sorted((s for s in found if len(s) >= SHORTEST), key=len, reverse=True))


def _text(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, REDACTED)
    return redact(text)


def redact_text(text: str, tokens: Sequence[str]) -> str:
    """Text that a process printed, without the secrets of this environment and of what was typed."""
    return _text(text, known_secrets(tokens))


def _walk(value: Any, secrets: tuple[str, ...], name: str = "") -> Any:
    if isinstance(value, str):
        return _text(value, secrets)
    if isinstance(value, dict):
        return {k: _walk(v, secrets, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        if name in ARGV_FIELDS and all(isinstance(v, str) for v in value):
            value = redact_argv(value)
        return [_walk(v, secrets) for v in value]
    return value


def _probes(probes: list[dict[str, Any]], secrets: tuple[str, ...]) -> list[dict[str, Any]]:
    """Probe reports as JSON data without secrets; the facts of trusted probes stay as they are."""
    return [
        _walk(p | {"facts": {}}, secrets) | {"facts": p["facts"] if p["name"] in TRUSTED_FACTS else _walk(p["facts"], secrets)}
        for p in probes
    ]


def redact_facts(data: dict[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    """A facts file as JSON data without secrets: options, what probes printed and saw, and the model's config.json.

    Args:
        data: a dumped :class:`xpufp8.saved.Saved`.
        tokens: MODEL and options as they count, those of a ``--config`` file included.
    """
    secrets = known_secrets(tokens)
    shown = {name: redact_argv(data[name]) for name in ("vllm_args", "typed")}
    model = redact_json(_walk(data["model"], secrets)) if data["model"] else None
    rest: dict[str, Any] = _walk(data | {"probes": [], "model": None} | shown, secrets)
    return rest | {"probes": _probes(data["probes"], secrets), "model": model}


def redact_report(report: Report, tokens: Sequence[str]) -> Report:
    """The report without secrets; names of options and variables stay."""
    secrets = known_secrets(tokens)
    data = report.model_dump(mode="json")
    clean = _walk(data | {"probes": []}, secrets) | {"probes": _probes(data["probes"], secrets)}
    return Report.model_validate(clean)
