"""JUnit through a real parser, GitHub's workflow commands by their grammar, markdown through a real parser."""

from __future__ import annotations

import re
from datetime import date
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Skipped
from made_reports import RECORDED, everything, recorded, small
from markdown_it import MarkdownIt
from test_formats import CASES, finding

from xpufp8.output import github, junit, markdown
from xpufp8.policy import judge
from xpufp8.report import Evidence

REPORTS = {name: recorded(name) for name in RECORDED} | CASES | {"everything": everything()}

TODAY = date(2026, 1, 1)


@pytest.mark.parametrize("fail_on", ["error", "warning", "never"])
@pytest.mark.parametrize("name", REPORTS)
def test_junit_fails_exactly_when_the_exit_code_is_not_zero(name: str, fail_on: str) -> None:
    report = judge(REPORTS[name], None, fail_on=fail_on, baseline=None, today=TODAY)  # type: ignore[arg-type]  # parametrized
    assert report.outcome is not None
    xml = JUnitXml.fromstring(junit.render(report))
    cases = [case for suite in xml for case in suite]
    assert xml.tests == len(cases) == 1 + len(report.findings) + len(report.probes)
    assert ((xml.failures + xml.errors) > 0) == (report.outcome.exit_code != 0)
    assert (xml.errors > 0) == (report.outcome.exit_code == 3)
    kinds = [type(result) for case in cases for result in case.result]
    assert xml.skipped == kinds.count(Skipped)
    assert (xml.failures, xml.errors) == (kinds.count(Failure), kinds.count(Error))
    suites = ET.fromstring(junit.render(report))  # noqa: S314 - our own output, read by a second parser
    assert len(suites.findall("./testsuite/testcase")) == len(cases)


def test_what_could_not_be_told_is_skipped_and_never_passed() -> None:
    cases = [case for suite in JUnitXml.fromstring(junit.render(everything())) for case in suite]
    unknown = [case for case in cases if case.name.startswith("ENV000") or case.name == "compile"]
    assert len(unknown) == 2
    assert all(case.is_skipped for case in unknown)
    assert [c.name[:6] for c in cases if c.is_failure] == ["verdic", "MDL001"]


COMMAND = re.compile(r"::(error|warning|notice) ((?:(?:file|line|title)=[^,:\n]*)(?:,(?:file|line|title)=[^,:\n]*)*)::([^\n]*)")


@pytest.mark.parametrize("name", REPORTS)
def test_each_line_is_one_workflow_command(name: str) -> None:
    lines = github.render(REPORTS[name]).splitlines()
    assert len(lines) == len(REPORTS[name].findings) + 1
    for line in lines:
        assert COMMAND.fullmatch(line), line


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=80))
def test_no_text_ends_a_command_or_starts_another(text: str) -> None:
    report = small(
        findings=[finding(subject=text, cause=text or "x", evidence=[Evidence(probe="p", mode="live", observed=text)])]
    )
    lines = github.render(report).splitlines()
    assert len(lines) == 2
    assert all(COMMAND.fullmatch(line) for line in lines)


def test_levels_and_places_of_annotations() -> None:
    found = {m[3]: m for line in github.render(everything()).splitlines() if (m := re.match(r"::(\w+) (.*?)title=(\w+)", line))}
    assert {code: found[code][1] for code in ("MDL001", "CFG005", "ENV009", "KRN002", "ENV000", "OPS001")} == {
        "MDL001": "error", "CFG005": "warning", "ENV009": "notice", "KRN002": "notice", "ENV000": "notice", "OPS001": "notice",
    }  # fmt: skip
    assert found["CFG006"][2] == "file=models/tiny-block-fp8/config.json,"
    assert found["ENV009"][2] == found["MDL001"][2] == ""
    text = github.render(everything())
    assert "On the command line: vllm serve models/tiny-block-fp8 --enforce-eager" in text


def test_what_github_would_drop_is_counted() -> None:
    report = small(verdict="not-servable", findings=[finding(subject=str(n)) for n in range(30)])
    lines = github.render(report).splitlines()
    assert sum(line.startswith("::error ") for line in lines) == github.PER_LEVEL
    assert "21 more findings are in the job summary." in lines[-1]


ALLOWED = re.compile(r"</?(?:details(?: open)?|summary|b|sub|code)>")


def html_of(text: str) -> str:
    return MarkdownIt("gfm-like", {"linkify": False}).render(text)


def raw_html(text: str) -> list[str]:
    """Raw HTML that a markdown reader would pass on."""
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(text)
    flat = [inner for token in tokens for inner in [token, *(token.children or [])]]
    return [tag for token in flat if token.type in ("html_block", "html_inline") for tag in re.findall(r"<[^>]*>", token.content)]


@pytest.mark.parametrize("name", REPORTS)
def test_markdown_holds_no_html_but_its_own(name: str) -> None:
    text = markdown.render(REPORTS[name])
    assert all(ALLOWED.fullmatch(tag) for tag in raw_html(text))
    assert html_of(text).count("<details") == html_of(text).count("</details>") == len(REPORTS[name].findings)


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("1.+=ab <>&@#`|*_[]()!\\/\n-:details"), max_size=60))
def test_no_text_becomes_markup_or_calls_people(text: str) -> None:
    report = small(
        findings=[
            finding(subject=text, cause=text or "x", affects=[text], evidence=[Evidence(probe="p", mode="live", observed=text)])
        ]
    )
    written = markdown.render(report)
    assert all(ALLOWED.fullmatch(tag) for tag in raw_html(written))
    page = html_of(written)
    assert page.count("<details") == 1
    assert "<a " not in page
    assert "<img" not in page
    seen = Outside()
    seen.feed(page)
    assert not re.search(r"[@#]", "".join(seen.text).replace("xpufp8", ""))


class Outside(HTMLParser):
    """Text that is not in code: where a forge looks for names of people and numbers of issues."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.depth += tag == "code"

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "code"

    def handle_data(self, data: str) -> None:
        if not self.depth:
            self.text.append(data)


def test_a_long_report_stays_within_an_issue() -> None:
    many = small(
        findings=[finding(subject=str(n), evidence=[Evidence(probe="p", mode="live", observed="x" * 500)]) for n in range(400)]
    )
    text = markdown.render(many)
    assert len(text) < 65_536
    assert "more parts were left out" in text
    assert html_of(text).count("<details") == html_of(text).count("</details>")


def test_markdown_is_short_and_opens_what_is_in_the_way() -> None:
    text = markdown.render(everything())
    assert text.count("<details open>") == 1
    assert len(text) < 8_000
