"""Small packages in each layout that vLLM's kernel tables have had, written for the tests."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

PLATFORM = "from vllm.platforms import PlatformEnum, current_platform\n"


def write(root: Path, files: dict[str, str]) -> Path:
    """Write a package ``vllm`` below ``root`` and return its folder."""
    package = root / "vllm"
    for name, text in {"__init__.py": "raise RuntimeError('imported')\n", "model_executor/__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return package


def oldest(root: Path) -> Path:
    """To 0.14: one table for INT8, indexed; one list without platforms for mixed precision."""
    base = "model_executor/layers/quantization/kernels"
    return write(root, {
        "_version.py": "__version__ = version = '0.14.1'\n",
        f"{base}/scaled_mm/__init__.py": PLATFORM + """
_POSSIBLE_KERNELS: dict[PlatformEnum, list[type[ScaledMMLinearKernel]]] = {
    PlatformEnum.CPU: [CPUScaledMMLinearKernel],
    PlatformEnum.CUDA: [CutlassScaledMMLinearKernel, TritonScaledMMLinearKernel],
}


def choose_scaled_mm_linear_kernel(config, compute_capability=None):
    for kernel in _POSSIBLE_KERNELS[current_platform._enum]:
        return kernel
""",
        f"{base}/mixed_precision/__init__.py": """
_POSSIBLE_KERNELS: list[type[MPLinearKernel]] = [
    MarlinLinearKernel,
    XPUwNa16LinearKernel,
]


def choose_mp_linear_kernel(config):
    for kernel in _POSSIBLE_KERNELS:
        return kernel
""",
    })  # fmt: skip


def middle(root: Path) -> Path:
    """0.15 and after it: FP8 tables beside the INT8 one, in the old folder, handed to a shared chooser that indexes."""
    base = "model_executor/layers/quantization/kernels/scaled_mm/__init__.py"
    return write(root, {
        "_version.py": "__version__ = version = '0.16.0'\n",
        base: PLATFORM + """
_POSSIBLE_INT8_KERNELS: dict[PlatformEnum, list[type]] = {PlatformEnum.CPU: [CPUInt8ScaledMMLinearKernel]}
_POSSIBLE_FP8_KERNELS: dict[PlatformEnum, list[type]] = {
    PlatformEnum.CPU: [PerTensorTorchFP8ScaledMMLinearKernel],
    PlatformEnum.XPU: [XPUFP8ScaledMMLinearKernel],
}


def choose_scaled_mm_linear_kernel(config, possible_kernels, compute_capability=None):
    for kernel in possible_kernels[current_platform._enum]:
        return kernel


def init_fp8_linear_kernel(config):
    return choose_scaled_mm_linear_kernel(config=config, possible_kernels=_POSSIBLE_FP8_KERNELS)


def init_int8_linear_kernel(config):
    return choose_scaled_mm_linear_kernel(config, _POSSIBLE_INT8_KERNELS)
""",
    })  # fmt: skip


def newest(root: Path) -> Path:
    """Since: every table in ``kernels/linear``, read with ``.get``; oracles for experts."""
    return write(root, {
        "_version.py": "__version__ = version = '0.33.0'\n",
        "model_executor/kernels/linear/__init__.py": PLATFORM + """
_POSSIBLE_FP8_BLOCK_KERNELS: dict[
    PlatformEnum, list[type[Fp8BlockScaledMMLinearKernel | FP8ScaledMMLinearKernel]]
] = {
    PlatformEnum.CPU: [
        CPUFp8W8A8BlockScaledMMKernel,  # preferred
        CPUFp8BlockScaledMMKernel,
    ],
    PlatformEnum.XPU: [XPUFp8BlockScaledMMKernel, TritonFp8BlockScaledMMKernel],
}
_POSSIBLE_WFP8A16_KERNELS = {PlatformEnum.XPU: [XPUW8A16FP8LinearKernel], PlatformEnum.ROCM: [
    # To be added
]}
_POSSIBLE_KERNELS: dict[PlatformEnum, list[type[MPLinearKernel]]] = {PlatformEnum.XPU: [XPUwNa16LinearKernel]}
_POSSIBLE_NVFP4_KERNELS = {PlatformEnum.CUDA: [CutlassNvFp4LinearKernel]}
if current_platform.is_xpu() and has_emulation():
    _POSSIBLE_NVFP4_KERNELS[PlatformEnum.XPU] = [EmulationNvFp4LinearKernel]


def choose_scaled_mm_linear_kernel(config, possible_kernels, *, quantization):
    platform_kernels = possible_kernels.get(current_platform._enum, [])
    for kernel in platform_kernels:
        return kernel


def init_fp8_linear_kernel(config):
    return choose_scaled_mm_linear_kernel(config, possible_kernels=_POSSIBLE_FP8_BLOCK_KERNELS, quantization="x")


def init_wfp8_a16_linear_kernel(config):
    return choose_scaled_mm_linear_kernel(config, _POSSIBLE_WFP8A16_KERNELS, quantization="x")


def choose_mp_linear_kernel(config):
    return _POSSIBLE_KERNELS.get(current_platform._enum, [])


def init_nvfp4_linear_kernel():
    possible = list(_POSSIBLE_NVFP4_KERNELS.get(current_platform._enum, []))
    return possible
""",
        "model_executor/layers/fused_moe/oracle/__init__.py": "",
        "model_executor/layers/fused_moe/oracle/base.py": "class MoEKernelOracle: ...\n",
        "model_executor/layers/fused_moe/oracle/fp8.py": """
class Fp8MoeBackend(Enum):
    NONE = "NONE"
    TRITON = "TRITON"
    AITER = "AITER"
    XPU = "XPU"
    CPU_W8A8 = "CPU_W8A8"


def _get_priority_backends(config):
    backends = [Fp8MoeBackend.TRITON, Fp8MoeBackend.XPU]
    if current_platform.is_rocm() and config.fast:
        backends.insert(0, Fp8MoeBackend.AITER)
    if not current_platform.is_cuda():
        backends.remove(Fp8MoeBackend.TRITON)
    if current_platform.is_xpu():
        backends = [Fp8MoeBackend.XPU, Fp8MoeBackend.TRITON]
    return backends
""",
        "model_executor/layers/fused_moe/oracle/mxfp8.py": """
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

_SUPPORTED_BACKENDS = (Fp8MoeBackend.TRITON, Fp8MoeBackend.XPU)
""",
    })  # fmt: skip
