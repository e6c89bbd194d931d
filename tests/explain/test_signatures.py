"""The signature files: well formed, honest about what is known, and safe to run on any text."""

from __future__ import annotations

import re
import time
from typing import get_args

import pytest

from xpufp8.explain import signatures
from xpufp8.explain.signatures import Certainty, Signature, Text, check_pattern, compile_pattern, load, squeeze
from xpufp8.report import Fix as ReportFix
from xpufp8.rules import BY_CODE

KNOWLEDGE = load()
CLAIMS = [one for one in KNOWLEDGE.signatures if one.kind in {"cause", "hint"}]
PATTERNS = [(one.name, pattern) for one in KNOWLEDGE.signatures for pattern in one.patterns if pattern.regex]


def texts(signature: Signature) -> list[Text]:
    return [signature.text, *(variant.text for variant in signature.variants)]


def test_names_are_unique() -> None:
    names = [one.name for one in KNOWLEDGE.signatures]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("signature", CLAIMS, ids=lambda one: one.name)
def test_a_claim_says_what_it_means_how_sure_and_what_to_do(signature: Signature) -> None:
    for text in texts(signature):
        assert text.code in BY_CODE
        assert text.certainty in get_args(Certainty)
        assert len(text.cause) > 30 or signature.results
        assert text.fixes
        for fix in text.fixes:
            ReportFix(kind=fix.kind, action=fix.action, cost=fix.cost)
            assert fix.kind != "env" or re.fullmatch(r"[A-Z][A-Z0-9_]*=\S+(?: [A-Z][A-Z0-9_]*=\S+)*", fix.action)
            assert fix.kind != "flag" or fix.action.startswith("-")


@pytest.mark.parametrize("group", KNOWLEDGE.groups)
def test_a_group_of_result_codes_is_a_claim_too(group: str) -> None:
    text = KNOWLEDGE.groups[group]
    assert text.code in BY_CODE
    assert text.fixes
    assert "{meaning}" in text.cause


def test_contexts_that_signatures_ask_for_exist() -> None:
    contexts = {one.name for one in KNOWLEDGE.signatures if one.kind == "context"}
    asked = {name for one in CLAIMS for variant in one.variants for name in (*variant.near, *variant.absent)}
    asked |= {name for one in CLAIMS for name in one.needs}
    assert asked <= contexts
    assert contexts <= asked


@pytest.mark.parametrize("signature", CLAIMS, ids=lambda one: one.name)
def test_templates_name_groups_that_their_patterns_capture(signature: Signature) -> None:
    captured = {name for pattern in signature.patterns if pattern.regex for name in pattern.regex.groupindex}
    captured |= {"number", "result", "meaning"} if signature.results else set()
    captured |= {"qualified"} if "op" in captured else set()
    for text in texts(signature):
        used = set(re.findall(r"\{(\w+)", text.cause + signature.subject + "".join(fix.action for fix in text.fixes)))
        assert used <= captured
    assert set(signature.phrases) <= captured


def test_every_result_code_is_there_with_its_meaning() -> None:
    results = {(one.api, one.number): one for one in KNOWLEDGE.results.values()}
    # Unified Runtime numbers its errors from 1 without a gap; Level Zero's come in three ranges.
    assert {number for api, number in results if api == "ur" and number < 0x1000} == set(range(1, 78))
    assert results["ur", 20].name == "DEVICE_LOST"
    assert results["ur", 40].name == "OUT_OF_RESOURCES"
    assert results["ze", 0x78000004].name == "INVALID_ARGUMENT"
    for one in results.values():
        assert one.group in KNOWLEDGE.groups
        assert len(one.meaning) > 10


@pytest.mark.parametrize(("name", "pattern"), PATTERNS, ids=lambda value: value if isinstance(value, str) else value.words[:30])
def test_a_literal_is_part_of_what_its_pattern_matches(name: str, pattern: signatures.Pattern) -> None:
    """The cheap test before a pattern must never hide a match: the pattern's own source holds the literal, unescaped."""
    assert pattern.regex is not None
    del name
    source = re.sub(r"\\(.)", r"\1", pattern.regex.pattern)
    loose = re.sub(r"\(\?P<\w+>|\(\?:|[()?]|\{\d*,?\d*\}", "", source)
    literal = re.sub(r"[()?]", "", pattern.literal)
    assert literal in loose or any(word in loose for word in (literal[:4], literal[-4:]))


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "(a|b)*c", "a.*b", r"(\w{1,9}){1,9}", r"(?:\w{1,20} ?){1,20}x", r"(a)\1", ".{1,70}a.{1,70}b.{1,70}c.{1,70}"],
)
def test_a_pattern_that_could_run_away_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"quantifier|reference"):
        check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", [r"(?:\.\d{1,6}){0,4}", r"(?:[\w-]{1,60}\.){1,12}weight", r"a{1,9}b?c", r"(?:x|y){0,1}z{1,2000}"]
)
def test_a_pattern_with_one_way_to_read_a_text_is_taken(pattern: str) -> None:
    check_pattern(pattern)


def test_blanks_of_a_pattern_go_with_their_quantifiers() -> None:
    assert compile_pattern("a b ?c {0,3}[d e]").pattern == "abc[de]"
    assert squeeze(" a\tb\n c ") == "abc"


ADVERSARIAL = (
    "a",
    "A1.",
    "0",
    "_",
    "a/",
    "'a':",
    "aA0_.",
    "Error:",
    "zeMem",
    "::",
    "KeyError:'a.",
    "EXCEPTION:",
    "libx.so.1",
    "-device",
)


@pytest.mark.parametrize(("name", "pattern"), PATTERNS, ids=lambda value: value if isinstance(value, str) else value.words[:30])
def test_no_pattern_runs_away(name: str, pattern: signatures.Pattern) -> None:
    """On texts made to provoke it (its own literal and pieces, repeated to the longest text a pattern ever sees) no search takes
    anywhere near as long as one that backtracks exponentially would: that takes minutes here, these take milliseconds."""
    assert pattern.regex is not None
    for piece in (*ADVERSARIAL, pattern.literal, pattern.literal[:-1], f"{pattern.literal}a"):
        text = (piece * 6000)[:6000]
        start = time.process_time()
        pattern.regex.search(text[:3000] + pattern.literal + text[:3000])
        assert time.process_time() - start < 5, (name, piece)
