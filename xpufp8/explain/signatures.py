"""Signatures: what a kind of failure looks like in a log, and what is known of it. They are data (``xpufp8/data/signatures``).

Patterns are matched on text without any blanks, so that wrapped lines, lost indentation and doubled spaces make no
difference: a blank in a pattern stands for any number of blanks, none included. Every quantifier is bounded and none stands
inside another; :func:`check_pattern` refuses anything else, so no pattern can take more than linear time.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

if sys.version_info >= (3, 11):
    from re import _constants, _parser  # type: ignore[attr-defined]  # the only parser of this syntax there is

    import tomllib
else:
    import sre_constants as _constants
    import sre_parse as _parser

    import tomli as tomllib

Kind = Literal["cause", "hint", "wrapper", "aftermath", "context", "health", "stop"]
"""``cause``: it explains a failure. ``hint``: a warning that explains one only if nothing else does and the server did not
come up. ``wrapper``: says that something failed, never why. ``aftermath``: what other processes say once one has died.
``context``: a circumstance that other signatures ask for. ``health``: the server is up or answers. ``stop``: it was asked to
end."""
Certainty = Literal["confirmed", "reported", "inferred"]

_REPEATS = {_constants.MAX_REPEAT, _constants.MIN_REPEAT, getattr(_constants, "POSSESSIVE_REPEAT", None)}
_CATEGORIES = {
    _constants.CATEGORY_WORD: re.compile(r"\w"),
    _constants.CATEGORY_DIGIT: re.compile(r"\d"),
    _constants.CATEGORY_SPACE: re.compile(r"\s"),
}
_QUANTIFIER = re.compile(r"(?:[?*+]|\{\d*,?\d*\})\??")
MAX_REPEAT = 2000
WIDE_REPEATS = 3
"""Quantifiers above 64 that one pattern may hold."""


@dataclass(frozen=True)
class Fix:
    """One way out, as the report shows it. ``when`` limits it to ``parallel`` or ``single`` deployments."""

    kind: Literal["runtime", "flag", "env", "host"]
    action: str
    cost: str = ""
    when: str = ""


@dataclass(frozen=True)
class Release:
    """A release that brought the fix."""

    package: str
    version: str
    what: str = ""


@dataclass(frozen=True)
class Pattern:
    """One wording: ``literal`` must stand in the line (cheap), ``regex`` decides and names what it saw."""

    literal: str
    """Without blanks."""
    words: str
    """The literal as it is written."""
    regex: re.Pattern[str] | None


@dataclass(frozen=True)
class Text:
    """What a finding says: its code, cause and fixes."""

    code: str
    cause: str
    fixes: tuple[Fix, ...] = ()
    certainty: Certainty = "reported"
    references: tuple[str, ...] = ()
    fixed: tuple[Release, ...] = ()
    title: str = ""


@dataclass(frozen=True)
class Variant:
    """Another reading of the same line, where the log shows the circumstance."""

    text: Text
    near: tuple[str, ...] = ()
    """Contexts of which each must stand within ``NEAR`` lines."""
    absent: tuple[str, ...] = ()
    """Contexts of which none may stand within ``NEAR`` lines."""
    captured: dict[str, re.Pattern[str]] = field(default_factory=dict)
    """Groups of the match and what they must hold, whole."""
    parallel: bool | None = None
    """True: not if the log shows a single card. False: only if it shows that."""


@dataclass(frozen=True)
class Signature:
    """One kind of line."""

    name: str
    patterns: tuple[Pattern, ...]
    text: Text
    kind: Kind = "cause"
    subject: str = ""
    """Template from the pattern's groups: what exactly the finding is about."""
    variants: tuple[Variant, ...] = ()
    prose: bool = False
    """True when the words mean the same in a sentence as in a log line."""
    quiet: bool = False
    """True when it counts on INFO lines too."""
    priority: int = 0
    """On the same lines the higher one counts."""
    group: str = ""
    """Of the causes in one group the first in the log counts; later ones follow from it."""
    unfinished: bool = False
    """True when it counts only in a traceback whose exception the log does not show."""
    results: str = ""
    """``ur`` or ``ze``: the match names a result code, whose class (``results.toml``) gives code, cause and fixes."""
    needs: tuple[str, ...] = ()
    """Contexts of which each must stand near, or the match counts for nothing."""
    phrases: tuple[str, ...] = ()
    """Groups that hold several words; any other ends at the first blank."""
    tail: int = 0
    """Lines of the exception's message after the match that belong to the evidence, such as a list of reasons."""
    supports: tuple[str, ...] = ()
    """A hint's codes: it joins a cause with one of them as further evidence."""


@dataclass(frozen=True)
class Result:
    """One result code of Unified Runtime or Level Zero."""

    api: str
    number: int
    name: str
    group: str
    meaning: str


@dataclass(frozen=True)
class Knowledge:
    """Everything under ``data/signatures``."""

    signatures: tuple[Signature, ...]
    results: dict[tuple[str, str], Result]
    """By API and by name without prefix, and by API and number as text."""
    groups: dict[str, Text]
    """Result group to what it means."""


def squeeze(text: str) -> str:
    """The text without blanks of any kind."""
    return "".join(text.split())


def compile_pattern(source: str) -> re.Pattern[str]:
    """Compile a pattern of a signature file for squeezed text.

    Raises:
        ValueError: it could take more than linear time.
    """
    pattern = without_blanks(source)
    check_pattern(pattern)
    return re.compile(pattern)


def without_blanks(source: str) -> str:
    """A pattern as it must read for squeezed text: blanks go, each with its own quantifier (`` ?`` and `` {0,3}``)."""
    out: list[str] = []
    position, in_class = 0, False
    while position < len(source):
        character = source[position]
        if character == "\\":
            out.append(source[position : position + 2])
            position += 2
            continue
        if character.isspace():
            position += 1
            if not in_class and (quantifier := _QUANTIFIER.match(source, position)):
                position = quantifier.end()
            continue
        in_class = character == "[" or (in_class and character != "]")
        out.append(character)
        position += 1
    return "".join(out)


def check_pattern(pattern: str) -> None:
    r"""Refuse what could take more than linear time on a bounded text: unbounded, ambiguously nested, too many wide quantifiers.

    A quantifier inside another passes only when a fixed character that it cannot match itself separates the rounds of the
    outer one, as in ``(?:\.\d{1,6}){0,4}``: then there is one way to read a text, not many.

    Raises:
        ValueError: with what is wrong.
    """
    wide = 0

    def walk(items: Any, *, inside: bool) -> None:
        nonlocal wide
        for op, arguments in items:
            if op in _REPEATS:
                _, high, body = arguments
                if high is _constants.MAXREPEAT or high > MAX_REPEAT:
                    raise ValueError(f"a quantifier without a bound in {pattern!r}")
                wide += high > 64
                if high > 1 and inside:
                    raise ValueError(f"a quantifier inside another in {pattern!r}")
                walk(body, inside=inside or (high > 1 and not _delimited(high, body)))
            elif op is _constants.SUBPATTERN:
                walk(arguments[-1], inside=inside)
            elif op is _constants.BRANCH:
                for branch in arguments[1]:
                    walk(branch, inside=inside)
            elif op in {_constants.ASSERT, _constants.ASSERT_NOT}:
                walk(arguments[1], inside=inside)
            elif op is _constants.GROUPREF:
                raise ValueError(f"a back reference in {pattern!r}")

    walk(_parser.parse(pattern), inside=False)
    if wide > WIDE_REPEATS:
        raise ValueError(f"more than {WIDE_REPEATS} wide quantifiers in {pattern!r}")


def _delimited(high: int, body: Any) -> bool:
    """True when each round of a repeat of up to 16 starts or ends with a fixed character that nothing repeated in it matches."""
    items = list(body)
    if high > 16 or not items:
        return False
    if len(items) == 1 and items[0][0] is _constants.SUBPATTERN:
        items = list(items[0][1][-1])
    borders = [chr(items[end][1]) for end in (0, -1) if items[end][0] is _constants.LITERAL]
    repeated = [arguments[2] for op, arguments in items if op in _REPEATS and arguments[1] > 1]
    return any(all(len(inner) == 1 and not _may_match(inner[0], character) for inner in repeated) for character in borders)


def _may_match(item: Any, character: str) -> bool:
    """True unless the parsed single-character item surely does not match the character."""
    op, arguments = item
    if op is _constants.LITERAL:
        return chr(arguments) == character
    if op is not _constants.IN:
        return True
    negated = any(kind is _constants.NEGATE for kind, _ in arguments)
    found = False
    for kind, value in arguments:
        if kind is _constants.LITERAL:
            found = found or chr(value) == character
        elif kind is _constants.RANGE:
            found = found or value[0] <= ord(character) <= value[1]
        elif kind is _constants.CATEGORY:
            found = found or value not in _CATEGORIES or _CATEGORIES[value].match(character) is not None
    return found is not negated


def _fixes(rows: list[dict[str, str]]) -> tuple[Fix, ...]:
    return tuple(Fix(**row) for row in rows)  # type: ignore[arg-type]  # kinds are checked by the tests of the data


def _text(data: dict[str, Any], base: Text | None = None) -> Text:
    """The finding's words; a variant takes what it leaves out from its signature."""
    return Text(
        code=data.get("code", base.code if base else ""),
        cause=data.get("cause", base.cause if base else ""),
        fixes=_fixes(data["fixes"]) if "fixes" in data else (base.fixes if base else ()),
        certainty=data.get("certainty", base.certainty if base else "reported"),
        references=tuple(data.get("references", base.references if base else ())),
        fixed=tuple(Release(**row) for row in data["fixed"]) if "fixed" in data else (base.fixed if base else ()),
        title=data.get("title", base.title if base else ""),
    )


def _pattern(row: str | dict[str, str]) -> Pattern:
    if isinstance(row, str):
        return Pattern(squeeze(row), row, None)
    return Pattern(squeeze(row["literal"]), row["literal"], compile_pattern(row["regex"]))


def _signature(data: dict[str, Any]) -> Signature:
    text = _text(data)
    variants = tuple(
        Variant(
            text=_text(row, text), near=tuple(row.get("near", ())), absent=tuple(row.get("absent", ())),
            captured={name: compile_pattern(value) for name, value in row.get("captured", {}).items()},
            parallel=row.get("parallel"),
        )
        for row in data.get("variants", ())
    )  # fmt: skip
    plain = ("kind", "subject", "prose", "quiet", "priority", "group", "unfinished", "results", "tail")
    options: dict[str, Any] = {name: data[name] for name in plain if name in data}
    options.update({name: tuple(data[name]) for name in ("needs", "phrases", "supports") if name in data})
    patterns = tuple(_pattern(row) for row in data["patterns"])
    return Signature(name=data["name"], patterns=patterns, text=text, variants=variants, **options)


@functools.cache
def load() -> Knowledge:
    """Read every file of signatures and the table of result codes, once."""
    folder = resources.files("xpufp8") / "data" / "signatures"
    signatures: list[Signature] = []
    results: dict[tuple[str, str], Result] = {}
    groups: dict[str, Text] = {}
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if not entry.name.endswith(".toml"):
            continue
        data = tomllib.loads(entry.read_text(encoding="utf-8"))
        signatures.extend(_signature(row) for row in data.get("signature", ()))
        for row in data.get("group", ()):
            groups[row["name"]] = _text(row)
        for row in data.get("results", ()):
            result = Result(*row)
            results[result.api, result.name] = results[result.api, str(result.number)] = result
    return Knowledge(tuple(signatures), results, groups)
