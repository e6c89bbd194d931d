"""Exit codes, the same for every command and format (DESIGN section 5)."""

from __future__ import annotations

from typing import Literal

OK = 0
"""It can be served as planned."""
REMAINS = 1
"""It cannot, or a finding at or above ``--fail-on`` remains."""
USAGE = 2
"""Wrong usage or unreadable input."""
NO_VERDICT = 3
"""A needed probe gave no answer."""
INTERRUPTED = 130

FailOn = Literal["error", "warning", "never"]
