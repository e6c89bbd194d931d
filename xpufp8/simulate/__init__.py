"""A stand-in XPU: vLLM's own XPU code runs unchanged on a machine without the card, under fake tensors.

One environment variable switches it on, ``XPUFP8_SIMULATE=<profile>``; the entry points ``xpufp8_sim``
(``vllm.platform_plugins``) and ``xpufp8_sim_general`` (``vllm.general_plugins``) carry it into every process that vLLM starts.
docs/simulated-xpu.md says what is stood in for and why. Nothing that runs here says anything about numerics, speed, peer access
or real output dtypes.
"""

from __future__ import annotations

import os

VARIABLE = "XPUFP8_SIMULATE"
"""Name of a device profile of ``xpufp8/data/devices.json``. Unset or empty: nothing of this package does anything."""


def requested() -> str | None:
    """Profile that this process is asked to simulate, or None."""
    return os.environ.get(VARIABLE) or None
