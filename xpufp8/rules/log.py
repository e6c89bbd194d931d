"""Rules that only a log can show: what happened at run time, or has nothing to do with the stack that the probes look at.

Their checks yield nothing in a doctor run; ``xpufp8 explain`` names them, and ``xpufp8 rule CODE`` shows their pages. Numbers
from 901 up are theirs in every area.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xpufp8.report import Finding, Severity
from xpufp8.rules.base import Case, Rule


@dataclass(frozen=True)
class Page:
    """What a rule's page says, under the headings that every page has."""

    code: str
    title: str
    lead: str
    means: str
    matters: str
    looks: str
    fixed: str
    severity: Severity = "error"
    references: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The page in markdown, in the shape of a rule's docstring."""
        return (
            f"{self.lead}\n\n## What it means\n{self.means}\n\n## Why it matters\n{self.matters}\n\n## How it looks\n{self.looks}\n\n"
            f"## How it is fixed\n{self.fixed}\n"
        )


def seen_in_logs(page: Page) -> Rule:
    """A rule whose findings come from logs alone."""

    def check(self: Rule, case: Case) -> Iterator[Finding]:
        del self, case
        yield from ()

    check.__doc__ = page.text
    return Rule(page.code, page.title, page.severity, (), check, references=page.references)
