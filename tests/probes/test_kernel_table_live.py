"""vLLM's real choosers, asked on the CPU, on the simulated XPU, and with a kernel that a plugin adds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from probes.facts import KernelTableFacts, SelectionFact
from probes.schemes import SCHEMES

pytestmark = pytest.mark.sim

ROOT = Path(__file__).resolve().parents[2]


def has_amx() -> bool:
    """Whether this CPU has matrix tiles, by what the kernel says of it."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return "amx_tile" in flags.split()


def probe(tmp_path: Path, context: dict[str, Any], **environment: str) -> KernelTableFacts:
    """Run the probe in a child, as the host does, and read its facts back as the host does."""
    result = tmp_path / "result.json"
    extra = environment.pop("PYTHONPATH", "")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), extra])),
        "XPUFP8_RESULT": str(result),
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-m", "probes", "kernel_table"], input=json.dumps(context), env=env, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    envelope = json.loads(result.read_text())
    assert envelope["error"] is None, envelope["error"]
    return TypeAdapter(KernelTableFacts).validate_python(envelope["facts"])


def pick(facts: KernelTableFacts, scheme: str, table: str = "") -> SelectionFact:
    """The answer for a scheme in bf16: of its linear table, or of its MoE oracle (``table="moe"``)."""
    (one,) = (
        s
        for s in facts.selections
        if (s.scheme, s.activation_dtype) == (scheme, "bfloat16") and s.table.startswith("moe:") == (table == "moe")
    )
    return one


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> KernelTableFacts:
    return probe(tmp_path_factory.mktemp("cpu"), {"device": "cpu"})


@pytest.fixture(scope="module")
def xpu(tmp_path_factory: pytest.TempPathFactory) -> KernelTableFacts:
    return probe(tmp_path_factory.mktemp("xpu"), {"device": "sim:arc-pro-b60"}, XPUFP8_SIMULATE="arc-pro-b60")


def test_every_scheme_with_a_table_is_asked_in_both_16_bit_dtypes(cpu: KernelTableFacts) -> None:
    assert (cpu.platform, cpu.live_error, cpu.problems) == ("CPU", None, [])
    asked = {(s.scheme, s.activation_dtype) for s in cpu.selections if not s.table.startswith("moe:")}
    kinds = {table.kind for table in cpu.tables}
    assert {(s.name, d) for s in SCHEMES if s.table in kinds for d in ("bfloat16", "float16")} <= asked
    assert {s.mode for s in cpu.selections} == {"live"}


def test_block_fp8_on_this_cpu(cpu: KernelTableFacts) -> None:
    answer = pick(cpu, "fp8-block")
    assert answer.table == "fp8_block"
    assert answer.error is None
    if has_amx():
        assert answer.kernel in {"CPUFp8W8A8BlockScaledMMKernel", "CPUFp8BlockScaledMMKernel"}
    else:
        assert answer.kernel is None
        assert answer.reasons == [
            "CPUFp8W8A8BlockScaledMMKernel requires AMX tile support (Sapphire Rapids or newer)..",
            "CPUFp8BlockScaledMMKernel requires AMX tile support (Sapphire Rapids or newer)..",
        ]


def test_a_kernel_that_is_chosen_comes_with_the_refusals_before_it(cpu: KernelTableFacts) -> None:
    answer = pick(cpu, "fp8-channel-token")
    assert answer.kernel is not None
    row = next(table.rows["CPU"] for table in cpu.tables if table.kind == "fp8")
    before = row[: row.index(answer.kernel)]
    assert [reason.partition(":")[0] for reason in answer.reasons] == before
    assert all(reason.partition(": ")[2] for reason in answer.reasons)


def test_a_table_without_a_row_for_the_cpu_gives_neither_kernel_nor_reason(cpu: KernelTableFacts) -> None:
    for kind, scheme in (("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("wfp8a16", "fp8-w8a16-channel")):
        assert not next(table.rows.get("CPU") for table in cpu.tables if table.kind == kind)
        answer = pick(cpu, scheme)
        assert (answer.kernel, answer.reasons, answer.error) == (None, [], None)


def test_no_scheme_is_answered_by_an_error_of_the_probe_s_own(cpu: KernelTableFacts, xpu: KernelTableFacts) -> None:
    """The one chooser that asks for a whole quantization config is said to be unknown; every other gives its answer."""
    for facts in (cpu, xpu):
        errors = {(s.table, s.error.type.rpartition(".")[2]) for s in facts.selections if s.error is not None}
        assert errors <= {("moe:int_wna16", "UnknownSignatureError")}


def test_experts_on_this_cpu(cpu: KernelTableFacts) -> None:
    answer = pick(cpu, "fp8-block", table="moe")
    if has_amx():
        assert answer.kernel is not None
    else:
        assert answer.kernel is None
        assert "CPUExpertsFp8: kernel does not support current device cpu" in answer.reasons


def test_simulated_xpu_has_a_kernel_for_every_fp8_scheme_of_0_32(xpu: KernelTableFacts) -> None:
    assert (xpu.platform, xpu.live_error) == ("XPU", None)
    assert {s.mode for s in xpu.selections} == {"simulated"}
    for scheme in (s for s in SCHEMES if s.table in {"fp8", "fp8_block", "wfp8a16", "mxfp8"}):
        answer = pick(xpu, scheme.name)
        row = next(table.rows["XPU"] for table in xpu.tables if table.kind == scheme.table)
        assert answer.kernel in row, answer
    assert pick(xpu, "fp8-block").kernel == "XPUFp8BlockScaledMMKernel"
    assert pick(xpu, "fp8-block", table="moe").kernel == "XPUExpertsBlockFp8"
    assert pick(xpu, "fp8-tensor-dynamic", table="moe").kernel == "XPUExpertsFp8"


def test_layers_of_a_model_settings_and_disabled_kernels(tmp_path: Path) -> None:
    shapes = [[6144, 4096], [4096, 2048]]
    context = {"device": "cpu", "options": {"schemes": ["fp8-tensor-dynamic", "no-such-scheme"], "shapes": shapes, "moe": False}}
    facts = probe(tmp_path, context, VLLM_DISABLED_KERNELS="CPUFP8W8A8ScaledMMLinearKernel,CPUFp8PerTensorScaledMMLinearKernel")
    assert {s.scheme for s in facts.selections} == {"fp8-tensor-dynamic"}
    assert [s.shape for s in facts.selections if s.activation_dtype == "bfloat16"] == shapes
    for answer in facts.selections:
        assert answer.kernel == "PerTensorTorchFP8ScaledMMLinearKernel"
        assert answer.reasons[:2] == [
            "CPUFP8W8A8ScaledMMLinearKernel: disabled by VLLM_DISABLED_KERNELS",
            "CPUFp8PerTensorScaledMMLinearKernel: disabled by VLLM_DISABLED_KERNELS",
        ]


def test_the_linear_backend_that_was_typed_is_the_one_asked(tmp_path: Path) -> None:
    context = {
        "device": "cpu",
        "vllm_args": ["--linear-backend=torch"],
        "options": {"schemes": ["fp8-tensor-dynamic"], "moe": False},
    }
    answer = pick(probe(tmp_path, context), "fp8-tensor-dynamic")
    assert (answer.kernel, answer.reasons) == ("PerTensorTorchFP8ScaledMMLinearKernel", [])


def test_another_platform_than_the_one_asked_about_is_no_answer(tmp_path: Path) -> None:
    facts = probe(tmp_path, {"device": "xpu"})
    assert (facts.platform, facts.selections) == ("CPU", [])
    assert facts.live_error is not None
    assert facts.live_error.message == "vLLM detects the platform CPU in this process, not XPU"
    assert facts.tables


PLUGIN = """
def register():
    import vllm.model_executor.kernels.linear as linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.platforms import PlatformEnum

    class AddedByPlugin(Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def apply_block_scaled_mm(self, A, B, As, Bs):
            raise AssertionError("only the choice was asked for")

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [AddedByPlugin]
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder that brings a vLLM plugin when it is on PYTHONPATH; the returned file holds its code."""
    site = tmp_path / "site"
    info = site / "kernel_adder-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernel-adder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nkernel_adder = kernel_adder:register\n")
    (site / "kernel_adder.py").write_text(PLUGIN)
    return site


def test_a_kernel_that_a_plugin_adds_is_chosen_as_vllm_would(tmp_path: Path, plugin: Path) -> None:
    context = {"device": "cpu", "options": {"schemes": ["fp8-block"], "moe": False}}
    facts = probe(tmp_path, context, PYTHONPATH=str(plugin))
    assert pick(facts, "fp8-block").kernel == "AddedByPlugin"
    static = next(table for table in facts.tables if table.kind == "fp8_block")
    assert "AddedByPlugin" not in static.rows["CPU"]


def test_a_vllm_that_cannot_be_imported_is_an_error_with_its_source_still_read(tmp_path: Path) -> None:
    package = tmp_path / "site" / "vllm"
    (package / "model_executor").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libsycl.so.8: cannot open shared object file')\n")
    (package / "model_executor" / "tables.py").write_text("_POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: [K]}\n")
    facts = probe(tmp_path, {"device": "cpu"}, PYTHONPATH=str(package.parent))
    assert facts.live_error is not None
    assert facts.live_error.type == "builtins.ImportError"
    assert "libsycl.so.8" in facts.live_error.message
    assert [table.kind for table in facts.tables] == ["fp8"]
    assert facts.selections == []
