"""From matches, tracebacks and circumstances to what happened: causes in order, or an unknown failure, or none."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from packaging.version import InvalidVersion, Version

from xpufp8.explain.signatures import Fix
from xpufp8.explain.text import quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xpufp8.explain.matcher import Match
    from xpufp8.explain.signatures import Certainty, Knowledge, Release, Result, Text, Variant
    from xpufp8.explain.structure.deployment import Deployment
    from xpufp8.explain.structure.prefixes import Line
    from xpufp8.explain.structure.tracebacks import Chain, Traceback

NEAR = 200
"""Lines within which a context belongs to a match."""
EVIDENCE = 8
"""Lines that a cause quotes."""
SAME_PLACE = 400
"""Characters within which two matches on one (very long) line are about the same thing."""
Outcome = Literal["cause", "unknown", "healthy"]

_SLOT = re.compile(r"\{(\w{1,40})(?:\|([^{}]{0,200}))?\}")
_OVERLOAD = re.compile(r"^(\w{1,80})(?:::|\.)(\w{1,200})(?:\.\w{1,60})?$")
_HARMLESS = frozenset({"KeyboardInterrupt", "CancelledError", "SystemExit", "GeneratorExit"})
_IMAGE_TAG = re.compile(r":(?:vllm-)?(\d{1,3})\.(\d{1,3})\.(\d{1,3})-b(\d{1,3})((?:\.\d{1,3}){0,3})")


@dataclass
class Cause:
    """One thing that explains the failure."""

    name: str
    """Name of the signature."""
    text: Text
    subject: str
    cause: str
    """The sentence, with what was seen filled in."""
    certainty: Certainty
    hint: bool
    evidence: list[tuple[int, str]] = field(default_factory=list)
    """Line number and text."""
    fixes: tuple[Fix, ...] = ()
    count: int = 1

    @property
    def code(self) -> str:
        """The rule that it means."""
        return self.text.code

    @property
    def first(self) -> int:
        """First line that shows it."""
        return self.evidence[0][0] if self.evidence else 0


@dataclass
class Conclusion:
    """What the log comes to."""

    outcome: Outcome
    causes: list[Cause]
    root: Chain | None
    """For an unknown failure: the traceback that the others followed from."""
    signs: list[tuple[int, str]]
    """Lines that show that something failed."""
    mentions: int = 0
    """Lines that speak of an error without being one."""


def fill(template: str, groups: dict[str, str]) -> str:
    """Put what a pattern captured into a template: ``{op|an operator}`` has its words for want of it."""

    def slot(match: re.Match[str]) -> str:
        value = groups.get(match[1]) or match[2] or "?"
        return quote(value, limit=200)

    return _SLOT.sub(slot, template)


def tidy(subject: str) -> str:
    """One spelling of an operator: ``ns.name`` for ``ns::name``, ``ns.name.default`` and ``ns.name.xpu``."""
    match = _OVERLOAD.match(subject)
    return f"{match[1]}.{match[2]}" if match else subject


def conclude(
    matches: Sequence[Match], chains: Sequence[Chain], errors: Sequence[Line], deployment: Deployment, knowledge: Knowledge
) -> Conclusion:
    """Judge a whole log."""
    judge = _Judge(matches, chains, deployment, knowledge)
    causes = judge.causes()
    signs = judge.signs(errors)
    root = None if causes else judge.unknown_root(signs)
    outcome: Outcome = "cause" if causes else ("unknown" if signs or root else "healthy")
    mentions = sum(not match.decisive and match.signature.kind in {"cause", "hint"} for match in matches)
    return Conclusion(outcome, causes, root, signs if outcome == "unknown" else [], mentions)


class _Judge:
    """The steps of a judgement, over the same evidence."""

    def __init__(self, matches: Sequence[Match], chains: Sequence[Chain], deployment: Deployment, knowledge: Knowledge) -> None:
        self.matches = matches
        self.chains = chains
        self.deployment = deployment
        self.knowledge = knowledge
        self.contexts: dict[str, list[int]] = {}
        for match in matches:
            if match.signature.kind == "context":
                self.contexts.setdefault(match.signature.name, []).append(match.first)
        self.up = max((match.first for match in matches if match.signature.kind == "health"), default=0)
        """The last line that shows a server that is up."""
        self._stopped = any(match.signature.kind == "stop" and match.first > self.up for match in matches)
        self.members = [
            (member, chain, index) for chain in chains for index, member in enumerate(chain.members) if member.complete
        ]

    # -- causes ---------------------------------------------------------------------------------------------------------

    def causes(self) -> list[Cause]:
        """Causes in order: the earliest first, hints only where there is nothing better."""
        claims = [
            match for match in self.matches
            if match.signature.kind in {"cause", "hint"} and match.decisive and self._counts(match)
        ]  # fmt: skip
        strong, hints = [], []
        for match in self._strongest(claims):
            if match.signature.kind == "hint":
                hints.append(match)
            elif match.level in {"ERROR", "CRITICAL"} or match.first > self.up:
                strong.append(match)
        strong = self._roots(strong)
        causes = self._merge(strong, hint=False)
        causes = self._first_of_groups(causes)
        if not causes:
            return self._merge([match for match in hints if match.first > self.up], hint=True)
        for cause in causes:
            joined = [match for match in hints if cause.code in match.signature.supports]
            for match in joined:
                self._quote(cause, match)
        return sorted(causes, key=lambda cause: cause.first)

    def _counts(self, match: Match) -> bool:
        """False where the circumstances that the signature asks for are missing, and for errors that are mere warnings."""
        signature = match.signature
        if signature.kind == "cause" and match.level == "WARNING":
            return False
        if signature.unfinished and not self._unfinished(match):
            return False
        return all(self._near(name, match.first) for name in signature.needs)

    @staticmethod
    def _strongest(matches: list[Match]) -> list[Match]:
        """Of the matches at one place those of the highest priority."""
        kept: list[Match] = []
        for match in matches:
            rivals = [
                other for other in matches
                if other is not match and abs(other.start - match.start) < SAME_PLACE
                and other.first <= match.lines[-1].number and match.first <= other.lines[-1].number
            ]  # fmt: skip
            if all(other.signature.priority <= match.signature.priority for other in rivals):
                kept.append(match)
        return kept

    def _place(self, match: Match) -> tuple[Traceback, Chain, int] | None:
        """The exception whose message the match stands in."""
        for member, chain, index in self.members:
            if match.process in {member.process, ""} and member.line <= match.lines[-1].number and match.first <= member.last:
                return member, chain, index
        return None

    def _unfinished(self, match: Match) -> bool:
        """True when the line stands in a traceback that breaks off before its exception, the last one of its process."""
        return any(
            not member.complete and member.first <= match.first <= member.last
            for chain in self.chains
            for member in chain.members
            if member.process == match.process
        )

    def _roots(self, matches: list[Match]) -> list[Match]:
        """Leave out what stands in a later exception of a chain whose earlier one is explained."""
        explained: dict[int, int] = {}
        places = [(match, self._place(match)) for match in matches]
        for _, place in places:
            if place is not None:
                _, chain, index = place
                explained[id(chain)] = min(index, explained.get(id(chain), index))
        return [match for match, place in places if place is None or place[2] <= explained[id(place[1])]]

    def _merge(self, matches: list[Match], *, hint: bool) -> list[Cause]:
        """One cause a code and subject; a match that names no subject joins one of the same code that does."""
        causes: dict[tuple[str, str], Cause] = {}
        unnamed: list[tuple[Match, Text]] = []
        for match in matches:
            text = self._text(match)
            subject = self._subject(match)
            if not subject:
                unnamed.append((match, text))
                continue
            self._add(causes, (text.code, subject), match, text, hint=hint)
        for match, text in unnamed:
            same = [cause for (code, _), cause in causes.items() if code == text.code]
            if same:
                self._quote(min(same, key=lambda cause: abs(cause.first - match.first)), match)
            else:
                self._add(causes, (text.code, ""), match, text, hint=hint)
        for cause in causes.values():
            cause.evidence.sort()
        return list(causes.values())

    def _add(self, causes: dict[tuple[str, str], Cause], key: tuple[str, str], match: Match, text: Text, *, hint: bool) -> None:
        if key not in causes:
            sentence, certainty = self._dated(text, fill(text.cause, self._groups(match)))
            groups = self._groups(match)
            fixes = tuple(Fix(fix.kind, fill(fix.action, groups), fix.cost, fix.when) for fix in text.fixes if self._applies(fix))
            fixes += self._updates(text)
            causes[key] = Cause(match.signature.name, text, key[1], sentence, certainty, hint, [], fixes, 0)
        fresh = causes[key].count == 0
        self._quote(causes[key], match)
        if fresh:
            self._tail(causes[key], match)

    def _tail(self, cause: Cause, match: Match) -> None:
        """Quote what the exception goes on to say: the reasons of each kernel, for instance."""
        place = self._place(match)
        if place is None or not match.signature.tail:
            return
        member = place[0]
        last = match.lines[-1].number
        for number, text in zip(member.message_lines, member.message, strict=True):
            if last < number <= last + match.signature.tail and text:
                cause.evidence.append((number, quote(text)))

    @staticmethod
    def _quote(cause: Cause, match: Match) -> None:
        cause.count += 1
        texts, numbers = {text for _, text in cause.evidence}, {number for number, _ in cause.evidence}
        for index, line in enumerate(match.lines):
            shown = quote(line.raw, start=match.start if index == 0 else 0)
            if shown and shown not in texts and line.number not in numbers and len(cause.evidence) < EVIDENCE:
                cause.evidence.append((line.number, shown))

    def _first_of_groups(self, causes: list[Cause]) -> list[Cause]:
        """Of the causes in one group the first; the others followed from it and become its evidence."""
        groups = {signature.name: signature.group for signature in self.knowledge.signatures}
        first: dict[str, Cause] = {}
        kept: list[Cause] = []
        for cause in sorted(causes, key=lambda one: one.first):
            group = groups.get(cause.name, "")
            if group and group in first and cause.first - first[group].first <= NEAR * 2:
                first[group].evidence.extend(cause.evidence[:2])
            else:
                kept.append(cause)
                if group:
                    first[group] = cause
        return kept

    # -- one match ------------------------------------------------------------------------------------------------------

    def _groups(self, match: Match) -> dict[str, str]:
        groups = dict(match.groups)
        if "op" in groups:
            groups["op"] = tidy(groups["op"])
            groups["qualified"] = groups["op"].replace(".", "::")
        groups.setdefault("vllm", self.deployment.versions.get("vllm", ""))
        result = self._result(match)
        if result is not None:
            groups["number"], groups["result"], groups["meaning"] = str(result.number), result.name, result.meaning
        return groups

    def _result(self, match: Match) -> Result | None:
        api = match.signature.results
        if not api:
            return None
        for name in ("result", "number"):
            value = match.groups.get(name, "").removeprefix("UR_RESULT_").removeprefix("ZE_RESULT_").removeprefix("ERROR_")
            if value.startswith("0x"):
                value = str(int(value, 16))
            found = self.knowledge.results.get((api, value)) if value else None
            if found is not None:
                return found
        return None

    def _text(self, match: Match) -> Text:
        """The reading of the match in its circumstances."""
        text = match.signature.text
        result = self._result(match)
        if result is not None and result.group in self.knowledge.groups:
            text = self.knowledge.groups[result.group]
        for variant in match.signature.variants:
            if self._holds(variant, match, result.group if result else ""):
                return variant.text
        return text

    def _holds(self, variant: Variant, match: Match, group: str) -> bool:
        captured = {**match.groups, "group": group}
        if any(not pattern.fullmatch("".join(captured.get(name, "").split())) for name, pattern in variant.captured.items()):
            return False
        if variant.parallel is True and self.deployment.parallel is False:
            return False
        if variant.parallel is False and self.deployment.parallel is not False:
            return False
        return all(self._near(name, match.first) for name in variant.near) and not any(
            self._near(name, match.first) for name in variant.absent
        )

    def _near(self, name: str, line: int) -> bool:
        return any(abs(number - line) <= NEAR for number in self.contexts.get(name, ()))

    def _subject(self, match: Match) -> str:
        template = match.signature.subject
        if not template:
            return ""
        names = [name for name, _ in _SLOT.findall(template)]
        groups = self._groups(match)
        if names and not any(groups.get(name) for name in names):
            return ""
        return fill(template, groups)

    def _applies(self, fix: Fix) -> bool:
        parallel = self.deployment.parallel
        return not (fix.when == "parallel" and parallel is False) and not (fix.when == "single" and parallel is True)

    # -- time -----------------------------------------------------------------------------------------------------------

    def _dated(self, text: Text, sentence: str) -> tuple[str, Certainty]:
        """Say which release brought the fix, and whether the log shows one that has it."""
        certainty = text.certainty
        for release in text.fixed:
            sentence += f" {release.what or 'Fixed'} in {release.package} {release.version}"
            has = self._has(release)
            if has is True:
                shown = self.deployment.image if "/" in release.package else self.deployment.versions[release.package]
                sentence += (
                    f"; the log shows {shown}, which has that already: look for a stale or mixed installation, or another cause."
                )
                certainty = "inferred"
            elif has is False:
                shown = self.deployment.image if "/" in release.package else self.deployment.versions[release.package]
                sentence += f"; the log shows {shown}."
            else:
                sentence += "."
        return sentence, certainty

    def _updates(self, text: Text) -> tuple[Fix, ...]:
        """A later release that has the cure, where the log shows an earlier one."""
        late = [f"{r.package} to {r.version} or later" for r in text.fixed if self._has(r) is False]
        return (Fix("host", f"Update {' and '.join(late)}."),) if late else ()

    def _has(self, release: Release) -> bool | None:
        """True when the log shows that release or a later one, None when it does not say."""
        if "/" in release.package:
            shown, wanted = _tag(self.deployment.image), _tag(f":{release.version}")
            return shown >= wanted if shown and wanted and release.package in self.deployment.image else None
        version = self.deployment.version(release.package)
        try:
            return version >= Version(release.version) if version is not None else None
        except InvalidVersion:
            return None

    # -- failures without a cause ---------------------------------------------------------------------------------------

    def signs(self, errors: Iterable[Line]) -> list[tuple[int, str]]:
        """Lines that show that something failed: wrappers, dying processes, errors after which nothing came up."""
        lines: dict[int, str] = {}
        stop = min((match.first for match in self.matches if match.signature.kind == "stop" and match.first > self.up), default=0)
        for match in self.matches:
            kind = match.signature.kind
            if kind in {"wrapper", "aftermath"} and match.decisive and match.level != "WARNING" and match.first > self.up:
                lines.setdefault(match.first, quote(match.lines[0].raw, start=match.start))
        for line in errors:
            if line.number > self.up:
                lines.setdefault(line.number, quote(line.raw))
        # Once it was asked to end, what its processes say of one another is no failure, unless there was one before.
        if stop and not any(number < stop for number in lines):
            return []
        return sorted(lines.items())[:EVIDENCE]

    def unknown_root(self, signs: Sequence[tuple[int, str]]) -> Chain | None:
        """The earliest traceback that is neither a wrapper nor an aftermath, nor the answer to a key press."""
        consequences = [match for match in self.matches if match.signature.kind in {"wrapper", "aftermath"}]
        best: tuple[int, int, Chain] | None = None
        for chain in self.chains:
            end, root = chain.end, chain.root
            if root.name in _HARMLESS or end.name in _HARMLESS or root.level in {"DEBUG", "INFO", "WARNING"}:
                continue
            if end.last <= self.up and root.level not in {"ERROR", "CRITICAL"}:
                continue
            if not signs and self.up and end.last > self.up and self._stopped:
                continue
            wrapped = root.complete and any(root.line <= match.first <= root.last for match in consequences)
            rank = (int(wrapped) + 2 * int(not root.complete), root.first, chain)
            if best is None or rank[:2] < best[:2]:
                best = rank
        # A wrapper alone explains nothing: then there is no root in this log.
        return best[2] if best and best[0] % 2 == 0 else None


def _tag(image: str) -> tuple[int, ...]:
    """``0.14.0-b8.3.1`` of an image's tag, as numbers."""
    match = _IMAGE_TAG.search(image)
    if match is None:
        return ()
    return tuple(int(part) for part in match.groups()[:4]) + tuple(int(part) for part in match[5].split(".") if part)
