"""Intel's Triton compiler, ahead of time and without a device: whether a kernel lowers, and what became of its products.

Runs in an interpreter of its own, because triton-xpu and triton share an import name: triton-xpu, intel-sycl-rt (headers), setuptools.
torch is not needed. All of it is what one compiler made; a newer one may differ, and none of it says that a kernel runs, or how fast.
"""

from __future__ import annotations

import ctypes.util
import os
import re
import sys
import types
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = {
    # Names and values of sycl/ext/oneapi/experimental/device_architecture.def in intel-sycl-rt.
    "bmg_g21": 0x0000000500400400,
    "bmg_g31": 0x0000000500800000,
    "lnl_m": 0x0000000501000400,
    "pvc": 0x000000030F000700,
    "acm_g10": 0x000000030DC00800,
}
TITLES = {
    "bmg_g21": "Battlemage (B50, B60, B580)",
    "bmg_g31": "Battlemage (B70)",
    "lnl_m": "Lunar Lake",
    "pvc": "Data Center GPU Max",
    "acm_g10": "Alchemist, dg2 (A770)",
}
BLOCK_LOADS = ("bmg_g21", "bmg_g31", "lnl_m", "pvc")


@dataclass
class Compiled:
    """What became of one kernel in one configuration on one architecture."""

    source: str
    """``xpufp8``, or a vLLM release."""
    kernel: str
    configuration: str
    architecture: str
    lowers: bool
    products: int = 0
    """tt.dot in the IR that is lowered."""
    dpas: int = 0
    """Those with the layout of the matrix engine."""
    scalar_fma: int = 0
    block_loads: int = 0
    """Calls of two-dimensional block reads in the LLVM IR."""
    prefetches: int = 0
    llvm_lines: int = 0
    spirv_bytes: int = 0
    threads: int = 0
    """Threads of a warp."""
    error: str = ""
    loads: list[str] = field(default_factory=list)
    """Names of the block reads."""


@dataclass
class Job:
    """One kernel to compile."""

    source: str
    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    aligned: tuple[str, ...]
    text: str


def bring_up() -> None:
    """Make the Intel backend loadable where there is no torch and no GPU.

    The backend asks torch whether an XPU is there, only to pick a compiler for its helper; a stand-in answers. The helper is C++ that is
    built as C, so the C++ library must be in the process before it is loaded.
    """
    if "torch" not in sys.modules:
        no = types.SimpleNamespace(is_available=lambda: False)
        stand_in: Any = types.ModuleType("torch")
        stand_in.xpu = stand_in.cuda = no
        stand_in.version = types.SimpleNamespace(hip=None, cuda=None)
        sys.modules["torch"] = stand_in
    os.environ.setdefault("SYCL_DISABLE_FSYCL_SYCLHPP_WARNING", "1")
    library = ctypes.util.find_library("stdc++")
    if library:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def properties(architecture: str) -> dict[str, Any]:
    """What torch would report for a device of an architecture; the compiler asks no driver."""
    return {
        "architecture": ARCHITECTURES[architecture],
        "driver_version": "1.6",
        "gpu_eu_count": 160,
        "gpu_subslice_count": 20,
        "has_atomic64": True,
        "has_bfloat16_conversions": True,
        "has_fp16": True,
        "has_fp64": True,
        "has_subgroup_2d_block_io": architecture in BLOCK_LOADS,
        "has_subgroup_matrix_multiply_accumulate": True,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": architecture in BLOCK_LOADS,
        "max_compute_units": 160,
        "max_num_sub_groups": 64,
        "max_work_group_size": 1024,
        "name": architecture,
        "platform_name": "Level-Zero",
        "sub_group_sizes": [8, 16, 32] if architecture == "acm_g10" else [16, 32],
        "vendor": "Intel",
        "version": "20.1.0",
    }


def made_for(job: Job, target: Any, **options: Any) -> Any:
    """Triton's own result of compiling a job for a target; raises whatever the compiler does."""
    import triton
    from triton.compiler import ASTSource

    names = list(job.kernel.arg_names)
    signature = {name: "constexpr" if name in job.constants else job.signature[name] for name in names}
    constants = {(names.index(name),): value for name, value in job.constants.items() if name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in job.aligned}
    source = ASTSource(job.kernel, signature, constants, aligned)
    return triton.compile(source, target=target, options={"num_warps": job.warps, "num_stages": job.stages, **options})


def compile_one(job: Job, architecture: str) -> Compiled:
    """Compile, and read the IR."""
    from triton.backends.compiler import GPUTarget

    result = Compiled(job.source, job.name, job.text, architecture, lowers=False)
    try:
        made = made_for(job, GPUTarget("xpu", properties(architecture), 32))
    except Exception as error:  # noqa: BLE001 - what a compiler raises is the finding
        text = str(error).strip() or type(error).__name__
        result.error = (text.splitlines()[-1] if "\n" in text else text)[:160]
        return result
    return read(result, made.asm)


def read(result: Compiled, asm: Any) -> Compiled:
    """Fill in what the IR tells."""
    gpu, llvm = str(asm["ttgir"]), str(asm["llir"])
    layouts = set(re.findall(r"^(#\w+) = #triton_intel_gpu\.dpas<", gpu, re.MULTILINE))
    products = re.findall(r"tt\.dot .*->\s*tensor<[^>]*?(#\w+)>", gpu)
    result.lowers = bool(asm.get("spv"))
    result.products = len(products)
    result.dpas = sum(layout in layouts or layout == "#dpas" for layout in products)
    result.scalar_fma = llvm.count("fmuladd")
    calls = re.findall(r"call [^@\n]*@(\w*2d_block_\w+)\(", llvm)
    reads = [name for name in calls if "_read_" in name]
    result.block_loads, result.prefetches = len(reads), len(calls) - len(reads)
    result.loads = sorted({match.group(0) for name in reads if (match := re.search(r"\d+b_\d+r\d+x\d+c", name))})
    result.llvm_lines = llvm.count("\n")
    result.spirv_bytes = len(asm["spv"])
    threads = re.search(r'threads-per-warp"? = (\d+)', gpu)
    result.threads = int(threads.group(1)) if threads else 0
    return result
