"""What the documentation shows: commands, Python, TOML and YAML, read out of README.md and docs/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    tags: tuple[str, ...]
    body: str


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        words = match["info"].split()
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(str(page.relative_to(ROOT)), line, words[0] if words else "", tuple(words[1:]), match["body"]))
    return found


def commands(block: Block) -> list[str]:
    """Commands of a block: lines after a ``$`` in a console block, every line of a shell block; comments are left out."""
    if block.language == "console":
        lines = [line[2:] for line in block.body.splitlines() if line.startswith("$ ")]
    elif block.language in ("sh", "bash", "shell"):
        lines = [line for line in block.body.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    else:
        return []
    return [re.sub(r"\s+#\s.*$", "", line).strip() for line in lines]


def all_commands() -> list[tuple[str, str]]:
    """Page and command, each once."""
    found = [(block.page, command) for page in PAGES for block in blocks(page) for command in commands(block)]
    return list(dict.fromkeys(found))


def inline_commands() -> list[tuple[str, str]]:
    """Page and ``xpufp8 …`` in running text or tables, each once."""
    found = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        name = str(page.relative_to(ROOT))
        found += [(name, match[1].replace("\\|", "|")) for match in re.finditer(r"`((?:[^`]*\| )?xpufp8 [a-z][^`]*)`", text)]
    return list(dict.fromkeys(found))
