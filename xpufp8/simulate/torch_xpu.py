"""``torch.xpu`` that answers from a device profile, on a torch build without XPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from xpufp8.simulate.profiles import Profile

COUNT_VARIABLE = "XPUFP8_SIMULATE_COUNT"
"""How many such devices the machine has; as many as any command asks for by default."""


def device_count() -> int:
    """Devices of the simulated machine."""
    return int(os.environ.get(COUNT_VARIABLE) or 64)


def properties(profile: Profile) -> Any:
    """What ``torch.xpu.get_device_properties`` returns for the profile."""
    return SimpleNamespace(
        name=profile.name,
        platform_name="simulated by xpufp8",
        type="gpu",
        vendor="Intel(R) Corporation",
        driver_version="0",
        version="0",
        total_memory=profile.memory_bytes,
        max_compute_units=profile.compute_units,
        gpu_eu_count=profile.compute_units,
        gpu_subslice_count=profile.xe_cores,
        max_work_group_size=profile.max_work_group_size,
        max_num_sub_groups=profile.max_work_group_size // min(profile.sub_group_sizes),
        sub_group_sizes=list(profile.sub_group_sizes),
        has_fp16=profile.traits["fp16"],
        has_fp64=profile.traits["fp64"],
        has_atomic64=True,
        architecture=profile.architecture_value,
        local_mem_size=128 * 1024,
        has_subgroup_matrix_multiply_accumulate=profile.traits["matrix_engine"],
        has_bfloat16_conversions=profile.traits["bf16"],
    )


def put_up(profile: Profile) -> None:
    """Patch ``torch.xpu`` and the parts of ``torch.accelerator`` that need a device. Before ``torch._dynamo`` is imported.

    ``torch.accelerator.is_available`` stays as it is: were it True, Dynamo would ask for a current stream and die.
    """
    import torch

    props = properties(profile)
    answers = {
        "is_available": True,
        "device_count": device_count(),
        "current_device": 0,
        "is_initialized": True,
        "get_device_name": profile.name,
        "get_device_properties": props,
        "get_device_capability": {"name": profile.name, "architecture": profile.architecture_value},
        "set_device": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "empty_cache": None,
        "synchronize": None,
        "mem_get_info": (profile.memory_bytes, profile.memory_bytes),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "is_bf16_supported": profile.traits["bf16"],
    }
    for name, value in answers.items():
        setattr(torch.xpu, name, _constant(value))
    for name, value in {
        "device_count": device_count(),
        "empty_cache": None,
        "synchronize": None,
        "set_device_index": None,
        "current_device_index": 0,
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
    }.items():
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, _constant(value))


def _constant(value: Any) -> Any:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer
