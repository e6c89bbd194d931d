"""The stand-in itself: which platform, which answers, what refuses, and whether it holds in vLLM's children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from xpufp8.simulate import entry_points, profiles

ROOT = Path(__file__).resolve().parents[2]

ASK = """
import json, sys
sys.path.insert(0, {root!r})
from probes.protocol import Context
from probes import model_trace
model_trace.enter_simulation(Context(device={device!r}))
from vllm.platforms import current_platform
import torch, vllm._xpu_ops
from vllm.triton_utils import HAS_TRITON
from torch._subclasses.fake_tensor import FakeTensorMode
answers = {{"platform": current_platform._enum.name, "triton": HAS_TRITON, "memory": current_platform.get_device_total_memory(),
           "name": current_platform.get_device_name()}}
ops = torch.ops._xpu_C
answers["queries"] = {{q: getattr(ops, q)(0) for q in ("is_bmg_g21", "is_bmg_g31", "is_bmg", "is_pvc", "is_xe2_arch", "is_xe3_arch")}}
answers["free"] = list(torch.ops._C_cache_ops.getMemoryInfo(0))
a, b = torch.zeros(2, 32, dtype=torch.bfloat16), torch.zeros(32, 48, dtype=torch.float8_e4m3fn)
try:
    ops.fp8_gemm_w8a16(a, b, torch.ones(1), None)
except Exception as exc:
    answers["refusal"] = f"{{type(exc).__name__}}: {{exc}}"
with FakeTensorMode() as mode:
    answers["fake"] = list(ops.fp8_gemm_w8a16(mode.from_tensor(a), mode.from_tensor(b), mode.from_tensor(torch.ones(1)), None).shape)
try:
    current_platform.check_if_supports_dtype(torch.bfloat16)
    answers["bf16"] = True
except ValueError as exc:
    answers["bf16"] = str(exc)
import subprocess
child = [sys.executable, "-c", "from vllm.platforms import current_platform as c; import vllm._xpu_ops, torchvision; print(c._enum.name)"]
answers["child"] = subprocess.run(child, capture_output=True, text=True).stdout.split()[-1:]
print("ANSWERS" + json.dumps(answers))
"""


def ask(device: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("XPUFP8")}
    child = subprocess.run(
        [sys.executable, "-c", ASK.format(root=str(ROOT), device=device)], capture_output=True, text=True, timeout=300,
        env=environment, check=False,
    )  # fmt: skip
    line = next((x for x in child.stdout.splitlines() if x.startswith("ANSWERS")), None)
    assert line, child.stderr[-2000:]
    answers: dict[str, Any] = json.loads(line.removeprefix("ANSWERS"))
    return answers


@pytest.mark.sim
@pytest.mark.parametrize("device", ["sim", "sim:arc-a770"])
def test_a_simulated_device_answers_from_its_profile_and_refuses_to_compute(device: str) -> None:
    profile = profiles.find(device)
    answers = ask(device)
    assert (answers["platform"], answers["triton"], answers["name"]) == ("XPU", True, profile.name)
    assert answers["queries"] == profile.queries
    assert answers["memory"] == profile.memory_bytes
    assert answers["free"] == [profile.memory_bytes] * 2
    assert answers["refusal"].startswith("SimulationError: _xpu_C::fp8_gemm_w8a16 was asked to compute")
    assert answers["fake"] == [2, 48]
    assert answers["child"] == ["XPU"]
    # vLLM itself refuses bfloat16 on the A770; that is a true failure and must stay one.
    assert answers["bf16"] is True if profile.key != "arc-a770" else "A770" in answers["bf16"]


@pytest.mark.parametrize("name", profiles.names())
def test_profiles_are_whole_and_sourced(name: str) -> None:
    profile = profiles.find(f"sim:{name}")
    assert profile.sources
    assert profile.memory_note
    assert all(len(pci.split(":")) == 2 and pci == pci.lower() for pci in profile.pci_ids)
    assert set(profile.queries) == {"is_bmg_g21", "is_bmg_g31", "is_bmg", "is_pvc", "is_xe2_arch", "is_xe3_arch"}
    assert profile.queries["is_bmg"] == (profile.queries["is_bmg_g21"] or profile.queries["is_bmg_g31"])
    assert {"bf16", "fp16", "fp64", "fp8_matrix", "fp8_storage"} <= set(profile.traits)


def test_the_six_devices_are_there_and_b60_is_meant_by_default() -> None:
    assert set(profiles.names()) == {"arc-pro-b50", "arc-pro-b60", "arc-pro-b70", "arc-b580", "arc-a770", "max-1550"}
    assert profiles.find("sim").key == "arc-pro-b60"
    with pytest.raises(ValueError, match="no device profile 'b61'"):
        profiles.find("sim:b61")


def test_entry_points_name_what_exists() -> None:
    import importlib

    for entries in entry_points.GROUPS.values():
        for target in entries.values():
            module, function = target.split(":")
            assert callable(getattr(importlib.import_module(module), function))
    for group, entries in entry_points.GROUPS.items():
        assert f"[{group}]" in entry_points.text()
        for name, target in entries.items():
            assert f"{name} = {target}" in entry_points.text()


def test_nothing_happens_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from xpufp8.simulate import platform, plugin

    monkeypatch.delenv("XPUFP8_SIMULATE", raising=False)
    assert platform.plugin() is None
    plugin.activate()
    assert platform._up is False
