"""Exit codes, the same for every command and format (DESIGN section 5)."""

from __future__ import annotations

from typing import Final, Literal

OK: Final = 0
"""It can be served as planned."""
REMAINS: Final = 1
"""It cannot, or a finding at or above ``--fail-on`` remains."""
USAGE: Final = 2
"""Wrong usage or unreadable input."""
NO_VERDICT: Final = 3
"""A needed probe gave no answer."""
INTERRUPTED: Final = 130

Code = Literal[0, 1, 3]
"""Exit codes that a verdict can have."""

FailOn = Literal["error", "warning", "never"]
