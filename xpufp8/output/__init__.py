"""Formats: ``render(report) -> str``, one module each, all pure."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xpufp8.report import Report


class Format(str, Enum):
    """Values of ``--format``."""

    RICH = "rich"
    JSON = "json"
    SARIF = "sarif"
    JUNIT = "junit"
    GITHUB = "github"
    MARKDOWN = "markdown"
    HTML = "html"


MODULES = {
    Format.RICH: "terminal",
    Format.JSON: "json_report",
    Format.SARIF: "sarif",
    Format.JUNIT: "junit",
    Format.GITHUB: "github",
    Format.MARKDOWN: "markdown",
    Format.HTML: "html",
}
"""Format to the module of this package that renders it."""


def renderer(chosen: Format) -> Callable[[Report], str]:
    """The format's ``render``; rich is drawn by ``xpufp8.output.terminal`` because it asks the terminal for its width."""
    import importlib

    render: Callable[[Report], str] = importlib.import_module(f"xpufp8.output.{MODULES[chosen]}").render
    return render
