"""Rule pages, made from the rules themselves."""

from __future__ import annotations

from xpufp8.errors import UsageError
from xpufp8.rules import ALL, AREAS, BY_CODE, Rule


def page(code: str) -> str:
    """A rule's page in markdown.

    Raises:
        UsageError: no such rule.
    """
    found = BY_CODE.get(code.upper())
    if found is None:
        raise UsageError(f"no rule is called {code!r}. `xpufp8 rule` lists them all.")
    return markdown(found)


def markdown(one: Rule) -> str:
    """Title, severity and area, the rule's docstring, references."""
    lines = [f"# {one.code}: {one.title}", "", f"{AREAS[one.code[:3]]} · {one.severity} · since {one.since}", "", one.page, ""]
    if one.needs:
        lines += [f"Rests on the probes: {', '.join(one.needs)}.", ""]
    if one.references:
        lines += ["## References", "", *(f"* {ref}" for ref in one.references), ""]
    return "\n".join(lines)


def listing() -> str:
    """Every rule, a line each."""
    return "".join(f"{one.code}  {one.severity:<8} {one.title}\n" for one in sorted(ALL, key=lambda r: r.code))
