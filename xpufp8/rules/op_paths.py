"""Which op a linear layer's kernel calls inside the region that vLLM compiles: data, read from vLLM's source.

This is what is known without tracing the model. Attention and experts are opaque to the compiler (``vllm::unified_attention…``,
``vllm::moe_forward``): what their bodies call need not be traced, and does not stand here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OpPath:
    """One op and who calls it."""

    op: str
    """``namespace::name``, without overload."""
    kernels: tuple[str, ...]
    """Kernel classes whose ``apply`` calls it; none for a vLLM whose quantization method calls it without a table."""
    schemes: tuple[str, ...]
    """Schemes (``probes.schemes``) whose layers may call it."""
    source: str
    """File of vLLM and the releases that it was read in."""
    layout: str | None = None
    """``KernelTableFacts.layout`` of the releases in which it is called without a table; None when a table decides."""


_TENSOR = ("fp8-tensor-static", "fp8-tensor-dynamic")
_LINEAR = "model_executor/kernels/linear"

PATHS: tuple[OpPath, ...] = (
    OpPath(
        "torch_ipex::fp8_gemm_w8a16", (), _TENSOR,
        "model_executor/layers/quantization/ipex_quant.py, XPUFp8LinearMethod.apply (0.10.2, 0.14.1)", "quantization/kernels",
    ),
    OpPath(
        "_xpu_C::fp8_gemm_w8a16", ("XPUFP8ScaledMMLinearKernel", "XPUW8A16FP8LinearKernel"),
        (*_TENSOR, "fp8-tensor-token", "fp8-channel-static", "fp8-channel-token", "fp8-w8a16-tensor", "fp8-w8a16-channel"),
        f"{_LINEAR}/scaled_mm/xpu.py (0.21.0, 0.32.0, 0.33.0)",
    ),
    OpPath(
        "_xpu_C::fp8_gemm", ("XPUW8A8FP8LinearKernel", "XPUFp8BlockScaledMMKernel", "XPUMxFp8LinearKernel"),
        (*_TENSOR, "fp8-tensor-token", "fp8-channel-static", "fp8-channel-token", "fp8-block", "mxfp8"),
        f"{_LINEAR}/scaled_mm/xpu.py and {_LINEAR}/mxfp8/xpu.py (0.32.0, 0.33.0; MXFP8 in 0.21.0 too)",
    ),
    OpPath("_xpu_C::fp4_gemm", ("XPUMxFp4LinearKernel",), ("mxfp4",), f"{_LINEAR}/mxfp4/xpu.py (0.32.0, 0.33.0)"),
    OpPath(
        "_xpu_C::int4_gemm_w4a16", ("XPUwNa16LinearKernel",), ("wna16",),
        f"{_LINEAR}/mixed_precision/xpu.py (0.21.0, 0.32.0, 0.33.0)",
    ),
    OpPath(
        "_xpu_C::int4_gemm_w4a8", ("XPUW4A8IntLinearKernel",), ("wna16",),
        f"{_LINEAR}/mixed_precision/xpu.py (0.21.0, 0.32.0, 0.33.0)",
    ),
)  # fmt: skip


def paths_of(op: str) -> list[OpPath]:
    """The rows about an op; its overload (``fp8_gemm_w8a16.xpu``) does not matter."""
    namespace, _, name = op.partition("::")
    plain = f"{namespace}::{name.partition('.')[0]}"
    return [path for path in PATHS if path.op == plain]
