"""The few places of vLLM's platform code that would touch a real device."""

from __future__ import annotations

from typing import Any

from xpufp8.simulate import torch_xpu
from xpufp8.simulate.profiles import Profile


def put_up(profile: Profile) -> None:
    """Patch vLLM's platform package and import its XPU platform on top of the stand-ins."""
    import vllm.platforms as platforms

    # A "+cpu" version switches Triton off and the CPU platform on; the simulated stack is not a CPU build.
    platforms.vllm_version_matches_substr = _never

    from vllm.platforms.xpu import XPUPlatform

    # Fake tensors live on cpu: assigning into one on xpu needs a device guard that only an XPU build of torch has. What selects
    # kernels is the platform's enum, not the tensor's device.
    XPUPlatform.device_type = "cpu"

    def answer(value: Any) -> Any:
        return classmethod(lambda cls, *args, **kwargs: value)

    XPUPlatform.device_count = answer(torch_xpu.device_count())
    XPUPlatform.num_compute_units = answer(profile.compute_units)
    XPUPlatform.is_pin_memory_available = answer(False)
    XPUPlatform.set_device = answer(None)
    XPUPlatform.manual_seed_all = answer(None)
    XPUPlatform.get_device_name = answer(profile.name)
    XPUPlatform.get_device_total_memory = answer(profile.memory_bytes)
    XPUPlatform.dist_backend = "gloo"


def _never(substr: str) -> bool:
    return False
