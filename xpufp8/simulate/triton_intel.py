"""A Triton that believes in an Intel driver and launches nothing.

vLLM decides by the active Triton driver whether Triton exists at all; without one it takes other runners, other kernels and a
placeholder that lacks ``next_power_of_2``. The stand-in driver reports the profile's target. Launches do nothing: a kernel writes
into tensors allocated before, so a trace loses no shape; whether the kernel lowers for the card is another probe's question.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from xpufp8.simulate.profiles import Profile


def put_up(profile: Profile) -> None:
    """Register the driver and silence launches. Does nothing where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton import backends
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class StandInDriver(DriverBase):  # type: ignore[misc]  # Triton's classes are untyped here
        """Reports the simulated target; runs nothing."""

        def __init__(self) -> None:
            self.utils = None

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return GPUTarget("xpu", {"architecture": profile.architecture_value, "name": profile.name}, 32)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            return lambda kernel, *args, **kwargs: [0.0]

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            return None

        def get_device_interface(self) -> Any:
            import torch

            return torch.xpu

        def get_empty_cache_for_benchmark(self) -> Any:
            return None

    if "intel" not in backends.backends:
        backends.backends["intel"] = backends.Backend(BaseBackend, StandInDriver)
    for name, entry in list(backends.backends.items()):
        if name not in {"intel", "cpu"} and entry.driver is not None and entry.driver.is_active():
            del backends.backends[name]  # a real card of another maker in this machine is none of the simulation's business
    driver.set_active(StandInDriver())
    _silence_launches()


def _silence_launches() -> None:
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    for kind in (JITFunction, Autotuner, Heuristics):
        kind.run = run
