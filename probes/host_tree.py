"""Probe ``host_tree``: records what the probes ``devices``, ``peer_access`` and ``host_ipc`` read and try on this machine.

Its facts replay elsewhere: saved as JSON they are a machine that ``options.sysfs_root`` names (``xpufp8 collect --host``).
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from probes import devices, host_ipc, peer_access
from probes.host_facts import HostTreeFacts
from probes.host_reader import RecordingHost, open_host
from probes.protocol import Context


def observe(context: Context) -> HostTreeFacts:
    """Run the three probes and keep everything they read. Memory is exchanged and ranks are run as if several were asked for."""
    host = RecordingHost(open_host(context))
    mode = "live" if host.live else "static"
    options = {"attempt": True, "collective": context.device != "cpu", **context.options}
    context = replace(context, options={key: value for key, value in options.items() if key != "limit"})
    for module in (devices, peer_access, host_ipc):
        module.observe_host(context, host, mode)
    return HostTreeFacts(**nameless(host.tree))


def nameless(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with every user's home folder called ``/home/user``."""
    text = re.sub(r"/(?:home|Users)/[^/\"\s:]+", "/home/user", json.dumps(tree))
    clean: dict[str, Any] = json.loads(text)
    return clean
