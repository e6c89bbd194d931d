"""xpufp8: says before a weight is loaded whether an FP8 model will serve with vLLM on this Intel GPU, and repairs what it can.

Public names load on first use, because this file is also imported inside vLLM's processes, where the host half's
dependencies may be missing.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["Report", "__version__", "diagnose"]


def __getattr__(name: str) -> Any:
    if name == "diagnose":
        from xpufp8.api import diagnose

        return diagnose
    if name == "Report":
        from xpufp8.report import Report

        return Report
    raise AttributeError(f"module 'xpufp8' has no attribute {name!r}")
