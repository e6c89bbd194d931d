"""Making untrusted text safe to show: probe output, logs and config files may hold anything."""

from __future__ import annotations

import re
import unicodedata

from rich.text import Text

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


def clean(text: str) -> str:
    """The text without escape sequences and control characters, newlines and tabs kept; direction marks are dropped too."""
    plain = ESCAPES.sub("", text)
    return "".join(c for c in plain if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co"))


def plain(text: str, style: str = "") -> Text:
    """Rich text of untrusted text: cleaned, and its square brackets never read as markup."""
    return Text(clean(text), style=style)
