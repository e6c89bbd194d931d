"""The platform plugin: makes ``current_platform`` vLLM's own XPU platform where a profile is asked for.

vLLM calls :func:`plugin` when a process first asks for the current platform, in every process it starts, before
``vllm.triton_utils`` and the kernel tables load; so everything that must stand before them is put up here.
"""

from __future__ import annotations

from xpufp8.simulate import requested

PLATFORM = "vllm.platforms.xpu.XPUPlatform"


def plugin() -> str | None:
    """Entry point ``xpufp8_sim`` of group ``vllm.platform_plugins``: the platform's class path, or None to stay out of the way.

    Raises:
        ValueError: ``XPUFP8_SIMULATE`` names no profile.
    """
    name = requested()
    if name is None:
        return None
    from xpufp8.simulate import profiles

    put_up(profiles.find(name))
    return PLATFORM


_up = False


def put_up(profile: object) -> None:
    """Put up every stand-in of this process, once. ``profile`` is a :class:`xpufp8.simulate.profiles.Profile`."""
    global _up
    if _up:
        return
    _up = True
    from xpufp8.simulate import kernels, torch_xpu, torchvision_ops, triton_intel, vllm_xpu
    from xpufp8.simulate.profiles import Profile

    assert isinstance(profile, Profile)
    torch_xpu.put_up(profile)
    torchvision_ops.put_up()
    kernels.put_up(profile)
    triton_intel.put_up(profile)
    vllm_xpu.put_up(profile)
