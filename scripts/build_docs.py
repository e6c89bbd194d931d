"""Write the parts of docs/ that are made from the program: a page per rule with an index, and the report's JSON Schema.

``python scripts/build_docs.py`` writes them, ``--check`` says which are stale and ends with 1. ``mkdocs build`` makes the site.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NOTE = "<!-- Made from the rule itself by scripts/build_docs.py. -->\n\n"


def pages() -> dict[Path, str]:
    """Every generated file and its text."""
    from xpufp8.output.json_report import schema
    from xpufp8.pages import markdown
    from xpufp8.rules import ALL

    made = {DOCS / "rules" / f"{one.code}.md": NOTE + markdown(one).rstrip() + "\n" for one in ALL}
    made[DOCS / "rules" / "index.md"] = index()
    made[DOCS / "schema" / "report-1.json"] = schema()
    return made


def index() -> str:
    """All rules by area."""
    from xpufp8.rules import ALL, AREAS

    lines = ["# Rules", "", "A code never changes its meaning. `xpufp8 rule CODE` prints a page."]
    for area, title in AREAS.items():
        rows = sorted((one for one in ALL if one.code[:3] == area), key=lambda one: one.code)
        if rows:
            lines += ["", f"## {area}: {title}", "", "| code | severity | finds |", "| --- | --- | --- |"]
            lines += [f"| [{one.code}]({one.code}.md) | {one.severity} | {one.title} |" for one in rows]
    return NOTE + "\n".join(lines) + "\n"


def stale(made: dict[Path, str]) -> list[str]:
    """Files that differ from what the program says, are missing, or belong to a rule that is gone."""
    differing = [path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    gone = [path for path in (DOCS / "rules").glob("*.md") if path not in made]
    return sorted(str(path.relative_to(ROOT)) for path in [*differing, *gone])


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when anything is stale")
    typed = parser.parse_args()
    made = pages()
    old = stale(made)
    if typed.check:
        print("\n".join(old) or "everything is current")
        return 1 if old else 0
    for name in old:
        path = ROOT / name
        if path in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[path], encoding="utf-8")
        else:
            path.unlink()
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
