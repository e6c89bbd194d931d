"""Recorded machines as folders, and the Level Zero stand-in built from C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from machines import TREES, expand

from probes.protocol import Context


@pytest.fixture
def machine(tmp_path):
    """``machine("root-ports-adl-s")``: that machine as a folder, with real links; returns its path."""

    def build(name: str, **changes) -> Path:
        folder = tmp_path / name
        expand(TREES / f"{name}.json", folder, **changes)
        return folder

    return build


@pytest.fixture
def context(machine):
    """Context of a recorded machine: ``context("i915", "-tp", "2")``."""

    def build(name: str, *arguments: str, device: str = "xpu", **changes) -> Context:
        return Context(device, vllm_args=list(arguments), options={"sysfs_root": str(machine(name, **changes))})

    return build


@pytest.fixture(scope="session")
def loader(tmp_path_factory) -> str:
    """The stand-in for libze_loader.so.1, built with the system's C compiler."""
    target = tmp_path_factory.mktemp("level-zero") / "libze_loader.so.1"
    source = Path(__file__).with_name("fake_level_zero.c")
    subprocess.run(["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return str(target)
