"""vLLM's command line as the host half sees it: tokens that pass through unchanged, and questions about them.

vLLM's own parser is the authority (probe ``vllm_options``); the grammar here only knows which options take no value or several
(``data/vllm_options.json``), which is what it takes to find MODEL and the value of an option in a list of tokens.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Grammar:
    """Which options take no value, which take several, and which names mean the same."""

    flags: frozenset[str]
    multi: frozenset[str]
    optional: frozenset[str]
    alias: dict[str, str]

    def canonical(self, name: str) -> str:
        """The option's long name with dashes: ``--max_model_len`` and ``-tp`` have one; dotted suffixes stay."""
        head, dot, tail = name.partition(".")
        if head.startswith("--"):
            head = "--" + head[2:].replace("_", "-")
        return self.alias.get(head, head) + dot + tail


@cache
def grammar() -> Grammar:
    """The bundled grammar."""
    data = json.loads((DATA / "vllm_options.json").read_text(encoding="utf-8"))
    return Grammar(frozenset(data["flags"]), frozenset(data["multi"]), frozenset(data["optional"]), data["alias"])


@dataclass(frozen=True)
class Option:
    """One option as typed. ``raw`` are its tokens unchanged, ``index`` the place of the first among all tokens."""

    name: str
    """Canonical name; empty for a positional token."""
    values: tuple[str, ...]
    raw: tuple[str, ...]
    index: int

    @property
    def value(self) -> str | None:
        """Its only (or first) value."""
        return self.values[0] if self.values else None

    @property
    def text(self) -> str:
        """As a shell would read it."""
        return shlex.join(self.raw)


def is_option(token: str) -> bool:
    """True for ``-x`` and ``--xy``, not for ``-``, ``--`` and negative numbers."""
    return len(token) > 1 and token[0] == "-" and token != "--" and token[1] not in "0123456789."


def parse(tokens: Sequence[str]) -> list[Option]:
    """Split tokens into options with their values and positional tokens, in order; joining all ``raw`` gives the input back."""
    rules = grammar()
    found: list[Option] = []
    at = 0
    while at < len(tokens):
        token, start = tokens[at], at
        at += 1
        if token == "--":
            found += [Option("", (rest,), (rest,), start + 1 + i) for i, rest in enumerate(tokens[at:])]
            break
        if not is_option(token):
            found.append(Option("", (token,), (token,), start))
            continue
        head, equals, inline = token.partition("=")
        name = rules.canonical(head)
        if equals:
            found.append(Option(name, (inline,), (token,), start))
            continue
        glued = _glued(token, rules)
        if glued is not None:
            found.append(Option(glued[0], (glued[1],), (token,), start))
            continue
        if name in rules.flags:
            found.append(Option(name, (), (token,), start))
            continue
        most = len(tokens) if name in rules.multi else 1
        values: list[str] = []
        while at < len(tokens) and len(values) < most and not is_option(tokens[at]) and tokens[at] != "--":
            values.append(tokens[at])
            at += 1
        found.append(Option(name, tuple(values), tuple(tokens[start:at]), start))
    return found


def _glued(token: str, rules: Grammar) -> tuple[str, str] | None:
    """``-tp2`` and ``-O3``: a short option with its value in one token."""
    if token.startswith("--") or token in rules.alias or token in rules.flags or "." in token:
        return None
    for short in sorted((s for s in rules.alias if not s.startswith("--")), key=len, reverse=True):
        if token.startswith(short) and len(token) > len(short) and token[len(short)].isdecimal():
            return rules.alias[short], token[len(short) :]
    return None


def find(tokens: Sequence[str], name: str) -> Option | None:
    """The last occurrence of an option (by any spelling), which is the one that counts, or None."""
    wanted = grammar().canonical(name)
    return next((o for o in reversed(parse(tokens)) if o.name == wanted), None)


def value(tokens: Sequence[str], name: str, default: str | None = None) -> str | None:
    """The option's value, or the default."""
    found = find(tokens, name)
    return default if found is None or found.value is None else found.value


def flag(tokens: Sequence[str], name: str) -> bool:
    """True when a flag is switched on (a later ``--no-…`` switches it off again)."""
    wanted = grammar().canonical(name)
    negated = "--no-" + wanted[2:]
    for option in reversed(parse(tokens)):
        if option.name == wanted:
            return option.value is None or option.value.lower() not in {"false", "0"}
        if option.name == negated:
            return False
    return False


def without(tokens: Sequence[str], names: Iterable[str]) -> list[str]:
    """The tokens less every occurrence of the named options."""
    drop = {grammar().canonical(n) for n in names}
    dropped = {i for o in parse(tokens) if o.name in drop for i in range(o.index, o.index + len(o.raw))}
    return [t for i, t in enumerate(tokens) if i not in dropped]


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel groups asked for; 1 where nothing was typed or what was typed is no number."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False

    @property
    def world(self) -> int:
        """Devices needed."""
        return self.tensor * self.pipeline * self.data


def parallel_sizes(tokens: Sequence[str]) -> ParallelSizes:
    """Tensor, pipeline and data parallel sizes in any spelling (``-tp 2``, ``--tensor-parallel-size=2``, ``-tp2``)."""

    def number(name: str) -> int:
        text = value(tokens, name, "1") or "1"
        return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else 1

    return ParallelSizes(
        number("--tensor-parallel-size"), number("--pipeline-parallel-size"), number("--data-parallel-size"),
        flag(tokens, "--enable-expert-parallel"),
    )  # fmt: skip


def split_model(tokens: Sequence[str]) -> tuple[str | None, list[str]]:
    """MODEL and the other tokens. MODEL is the first positional token, or the value of ``--model`` (which vLLM still reads).

    ``--model X`` stays among the tokens: what the person typed is passed on as typed.
    """
    options = parse(tokens)
    positional = next((o for o in options if not o.name), None)
    if positional is not None:
        rest = [t for i, t in enumerate(tokens) if i != positional.index]
        return positional.values[0], rest
    return value(tokens, "--model"), list(tokens)
