"""Facts of the probe ``vllm_options``."""

from __future__ import annotations

from dataclasses import dataclass, field

from probes.facts import ErrorFact


@dataclass(frozen=True)
class VllmOptionsFacts:
    """What the installed vLLM's own parser says of the typed options."""

    vllm: str | None
    known: list[str] = field(default_factory=list)
    """Every option string of ``vllm serve``."""
    unknown: list[str] = field(default_factory=list)
    """Typed tokens that the parser does not know, in order."""
    rejected: str | None = None
    """The parser's own message for a value that it refuses, None when it takes them all."""
    deprecated: dict[str, str] = field(default_factory=dict)
    """Typed options that the parser marks as deprecated, with its own words."""
    changed: dict[str, str] = field(default_factory=dict)
    """Destination to value (as JSON, or its repr) for every option whose value is not vLLM's default."""
    error: ErrorFact | None = None
    """Why the parser could not be built."""
