"""Entry points for processes that vLLM starts, where this package is not installed as a distribution.

vLLM finds plugins by distribution metadata. A folder with one ``*.dist-info`` on PYTHONPATH is enough, for the process itself
and for every child that inherits its environment.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

PLATFORM_GROUP, GENERAL_GROUP = "vllm.platform_plugins", "vllm.general_plugins"
GROUPS = {
    PLATFORM_GROUP: {"xpufp8_sim": "xpufp8.simulate.platform:plugin"},
    GENERAL_GROUP: {"xpufp8": "xpufp8.runtime.plugin:activate", "xpufp8_sim_general": "xpufp8.simulate.plugin:activate"},
}


def text(groups: dict[str, dict[str, str]] | None = None) -> str:
    """Contents of an ``entry_points.txt``."""
    lines = []
    for group, entries in (groups or GROUPS).items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {target}" for name, target in entries.items()]
        lines.append("")
    return "\n".join(lines)


def missing() -> dict[str, dict[str, str]]:
    """Those of our entry points that this interpreter does not find."""
    found = {}
    for group, entries in GROUPS.items():
        known = {entry.name for entry in entry_points(group=group)}
        lacking = {name: target for name, target in entries.items() if name not in known}
        if lacking:
            found[group] = lacking
    return found


def ensure() -> None:
    """Make our entry points found here and in children, in a temporary folder where they are not."""
    lacking = missing()
    if not lacking:
        return
    folder = tempfile.mkdtemp(prefix="xpufp8-entry-points-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    info = Path(folder) / "xpufp8_target-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xpufp8-target\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(text(lacking), encoding="utf-8")
    root = str(Path(__file__).resolve().parents[2])
    for place in (root, folder):
        if place not in sys.path:
            sys.path.append(place)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, known), *(p for p in (root, folder) if p not in known)])
