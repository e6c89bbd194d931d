"""Shared by all tests: a clean environment, and helpers that run xpufp8 as its user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No colour, no leftovers of the person's own settings, a cache of the test session's own."""
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "XPUFP8_APPLY", "XPUFP8_SIMULATE", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XPUFP8_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def xpufp8() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in a child, as a user does, and return what came of it."""

    def run(*args: str | Path, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "xpufp8", *map(str, args)],
            capture_output=True, text=True, timeout=timeout, check=False, env={**os.environ, **environment},
        )  # fmt: skip

    return run
