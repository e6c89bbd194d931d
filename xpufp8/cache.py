"""What was diagnosed stays true while nothing changes: reports kept by a key of everything that matters.

A service that is restarted must not wait for probes. The key covers package versions, the contents of vLLM's tables, the
device and its driver, config.json, the typed options, the environment variables that bear on serving, and xpufp8 itself. A
cache that is missing, torn, foreign, read-only or full never breaks a start: it only costs a probe.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from probes.redact import redact_env
from xpufp8.report import Report
from xpufp8.staging import cache_root, stage
from xpufp8.target import Target

RELEVANT = (
    *(
        "VLLM_",
        "CCL_",
        "FI_",
        "ZE_",
        "ZES_",
        "SYCL_",
        "UR_",
        "ONEAPI",
        "TORCH",
        "PYTORCH",
        "TRITON",
        "IPEX",
        "HF_HUB_CACHE",
        "HF_HOME",
    ),
    *(
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "PYTHONPATH",
        "PATH",
        "XPUFP8_APPLY",
        "OMP_",
        "CUDA_VISIBLE",
        "NEORead",
        "I_MPI",
        "DISABLE_ESIMD",
    ),
)
"""Variables whose name begins like this bear on serving."""

TABLES = ("model_executor/kernels/linear", "model_executor/layers/quantization", "model_executor/layers/fused_moe/oracle", "_xpu_ops.py",
  "_ipex_ops.py", "platforms")  # fmt: skip
"""Parts of vLLM whose files are part of the key by content: people patch them in place."""

DRIVERS = ("/sys/module/xe", "/sys/module/i915", "/sys/module/nvidia")
KEPT = 64
"""Reports kept; the oldest go first."""


def _search_path(python: str) -> list[str]:
    """``sys.path`` of the target interpreter."""
    command = [python, "-c", "import sys, json; print(json.dumps(sys.path))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return [str(p) for p in json.loads(done.stdout)]
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return []  # what is wrong with it, the probes will say


def _stat(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return f"{path}:absent"
    return f"{path}:{found.st_size}:{found.st_mtime_ns}"


def _packages(path: list[str]) -> Iterator[str]:
    """Every distribution on the path with its version and the time it was written, and the tables of vLLM by content."""
    for place in path:
        folder = Path(place)
        if not folder.is_dir():
            continue
        for info in sorted([*folder.glob("*.dist-info"), *folder.glob("*.egg-info"), *folder.glob("*.pth")]):
            yield f"{info.name}:{_stat(info / 'RECORD' if info.is_dir() else info)}"
        yield from _tables(folder / "vllm")


def _tables(vllm: Path) -> Iterator[str]:
    for part in TABLES:
        place = vllm / part
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            yield f"{file}:{hashlib.sha256(file.read_bytes()).hexdigest()}"


def _devices() -> Iterator[str]:
    """GPUs on the PCI bus and their drivers: what a new card, driver or kernel changes."""
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        with contextlib.suppress(OSError):
            if (device / "class").read_text(encoding="ascii").startswith("0x03"):
                names = ("vendor", "device", "subsystem_device", "revision")
                yield device.name + ":" + ":".join((device / n).read_text(encoding="ascii").strip() for n in names)
                yield str((device / "driver").resolve())
    for driver in DRIVERS:
        for name in ("version", "srcversion"):
            with contextlib.suppress(OSError):
                yield f"{driver}/{name}:" + (Path(driver) / name).read_text(encoding="ascii").strip()
    for library in ("libze_loader.so.1", "libze_intel_gpu.so.1", "libsycl.so.8", "libsycl.so.9"):
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/local/lib", "/usr/lib64"):
            yield _stat(Path(folder) / library)


def _environment() -> Iterator[str]:
    for name, text in sorted(os.environ.items()):
        if name.startswith(RELEVANT):
            yield f"{name}={redact_env(name, text)}"


def key_of(target: Target, settings: object) -> str:
    """The key of a diagnosis.

    Args:
        target: What is diagnosed.
        settings: Whatever else the outcome depends on (its ``repr`` counts).
    """
    seen = hashlib.sha256()

    def add(*parts: object) -> None:
        for part in parts:
            seen.update(repr(part).encode())
            seen.update(b"\0")

    add(stage().name, target.python, target.device, target.typed, target.vllm_args, target.vllm_path, target.sysfs, settings)
    add(platform.platform(), platform.machine(), os.cpu_count(), os.uname().nodename)
    if target.model is not None:
        for name in ("config.json", "generation_config.json", "hf_quant_config.json", "tokenizer_config.json"):
            file = Path(target.model.folder) / name
            add(name, file.read_bytes() if file.is_file() else None)
    add(_stat(Path(target.python).resolve()))
    add(*_packages(_search_path(target.python)), *_devices(), *_environment())
    return seen.hexdigest()


def _place(key: str) -> Path:
    return cache_root() / "reports" / f"{key}.json"


def load(key: str) -> Report | None:
    """The report kept under a key, or None: not there, torn, or written by something else."""
    try:
        data = json.loads(_place(key).read_bytes())
        return Report.model_validate(data["report"]) if data.get("key") == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ValidationError):
        return None


def save(key: str, report: Report) -> bool:
    """Keep a report; False where the cache cannot be written. Written beside and renamed, so readers never see half of it."""
    goal = _place(key)
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=goal.parent, prefix=".part-")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({"key": key, "report": report.model_dump(mode="json")}, out)
        Path(part).replace(goal)
        _forget_old(goal.parent)
    except OSError:
        return False
    return True


def _forget_old(folder: Path) -> None:
    def age(path: Path) -> float:
        try:
            return path.stat().st_mtime
        except OSError:
            return 0.0

    for old in sorted(folder.glob("*.json"), key=age, reverse=True)[KEPT:]:
        with contextlib.suppress(OSError):
            old.unlink()
