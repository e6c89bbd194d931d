"""Recorded machines as folders, and the Level Zero stand-in built from C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from machines import Shelf


@pytest.fixture(scope="session")
def shelf(tmp_path_factory) -> Shelf:
    """Expanded machines of this session."""
    return Shelf(tmp_path_factory.mktemp("machines"))


@pytest.fixture
def machine(shelf):
    """``machine("root-ports-adl-s")``: that machine as a folder, with real links; returns its path."""
    return shelf.machine


@pytest.fixture
def context(shelf):
    """Context of a recorded machine: ``context("i915", "-tp", "2")``."""
    return shelf.context


@pytest.fixture(scope="session")
def loader(tmp_path_factory) -> str:
    """The stand-in for libze_loader.so.1, built with the system's C compiler."""
    target = tmp_path_factory.mktemp("level-zero") / "libze_loader.so.1"
    source = Path(__file__).with_name("fake_level_zero.c")
    subprocess.run(["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return str(target)
