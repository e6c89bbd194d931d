"""A general plugin of vLLM for tests: kernels with known faults, first in the CPU's rows of the FP8 tables.

Written into a folder on a child's PYTHONPATH by ``device_children``. The fault is read from FAULT at each call. The arithmetic is
an op of ``torch.library`` with a fake that promises the activations' dtype.
"""

from __future__ import annotations

import os
from typing import Any

BLOCK = 128
FAULTS = (
    "none", "fp16", "wrong-stride", "scale-neighbour", "scale-transposed", "scale-missing", "e5m2", "one-column",
    "nan-on-zero-block", "wrong-at-257", "bias-missing", "doubled", "raises", "breaks-codegen", "breaks-graph",
    "breaks-attention",
)  # fmt: skip


def _wide(weight: Any, scale: Any, fault: str) -> Any:
    """The dequantized weight ``[N, K]`` in float32, as a kernel with this fault sees it."""
    import torch

    values = (weight.view(torch.float8_e5m2) if fault == "e5m2" else weight).to(torch.float32)
    n, k = weight.shape
    if fault == "scale-missing":
        scale = torch.ones_like(scale)
    if fault == "scale-neighbour":
        scale = scale.roll(1, -1 if scale.dim() == 2 and scale.shape[1] > 1 else 0)
    if fault == "scale-transposed":
        scale = scale.t().contiguous().reshape(scale.shape)
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    else:
        scale = scale.reshape(-1, 1)
    out = values * scale
    if fault == "nan-on-zero-block":
        # What normalizing each block by its largest value does to a block of zeros.
        for row in range(0, n, BLOCK):
            for column in range(0, k, BLOCK):
                block = out[row : row + BLOCK, column : column + BLOCK]
                largest = block.abs().max()
                out[row : row + BLOCK, column : column + BLOCK] = block / largest * largest
    return out


def product(x: Any, weight: Any, scale: Any, bias: Any, fault: str) -> Any:
    """``x @ weight.T + bias`` with a fault."""
    import torch

    if fault == "raises" and x.shape[0] > 1:
        raise RuntimeError("expected self and mat2 to have the same dtype, but got: c10::Half != c10::BFloat16")
    out = x.to(torch.float32) @ _wide(weight, scale, fault).t()
    if bias is not None and fault != "bias-missing":
        out = out + bias.to(torch.float32)
    if fault == "one-column":
        out[:, 77] += 3.0
    if fault == "wrong-at-257" and x.shape[0] == 257:
        out[256:] = out[:1]
        out[128:256] = -out[128:256]
    if fault == "doubled":
        out = out * 2
    out = out.to(torch.float16 if fault == "fp16" else x.dtype)
    return out.t().contiguous().t() if fault == "wrong-stride" else out


def _op() -> Any:
    import torch

    if not hasattr(torch.ops.faulty, "gemm"):
        library = torch.library.Library("faulty", "DEF")
        library.define("gemm(Tensor x, Tensor weight, Tensor scale, Tensor? bias, str fault) -> Tensor")
        library.impl("gemm", product, "CPU")
        torch.library.register_fake("faulty::gemm", lambda x, w, s, b, f: x.new_empty(x.shape[0], w.shape[0]), lib=library)
        globals()["_kept"] = library
        from torch._inductor import lowering

        usual = lowering.fallback_handler(torch.ops.faulty.gemm.default, add_to_fallback_set=False)

        def lower(*args: Any) -> Any:
            # As a Triton whose passes fail: the op traces, and only code generation stops at it.
            if args[-1] == "breaks-codegen":
                raise RuntimeError("PassManager::run failed")
            return usual(*args)

        lowering.lowerings[torch.ops.faulty.gemm.default] = lower
    return torch.ops.faulty.gemm


def register() -> None:
    """Entry point: put the kernels first, and an attention that can be told to break the graph."""
    import torch
    import vllm.model_executor.kernels.linear as linear
    from vllm.platforms import PlatformEnum

    op = _op()

    class Shared:
        @classmethod
        def is_supported(cls, compute_capability: Any = None) -> Any:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> Any:
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            pass

        def apply_weights(self, layer: Any, x: Any, bias: Any = None, **_: Any) -> Any:
            block = hasattr(layer, "weight_scale_inv")
            weight = layer.weight if block else layer.weight.t()
            scale = layer.weight_scale_inv if block else layer.weight_scale
            fault = os.environ.get("FAULT", "none")
            if fault == "breaks-graph" and float(x.sum().item()) > 1e30:
                return x
            return op(x.reshape(-1, x.shape[-1]), weight, scale, bias, fault)

    class FaultyBlockKernel(Shared, linear.Fp8BlockScaledMMLinearKernel):
        def apply_block_scaled_mm(self, *_: Any) -> Any:
            raise AssertionError("apply_weights is the whole kernel")

    class FaultyScaledKernel(Shared, linear.FP8ScaledMMLinearKernel):
        def apply_scaled_mm(self, **_: Any) -> Any:
            raise AssertionError("apply_weights is the whole kernel")

    for table, kernel in (
        (linear._POSSIBLE_FP8_BLOCK_KERNELS, FaultyBlockKernel),
        (linear._POSSIBLE_FP8_KERNELS, FaultyScaledKernel),
    ):
        row = table.setdefault(PlatformEnum.CPU, [])
        if kernel.__name__ not in [k.__name__ for k in row]:
            row.insert(0, kernel)

    from vllm.model_executor.layers.attention import Attention

    attend = Attention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("FAULT") == "breaks-attention":
            torch._dynamo.graph_break()
        return attend(self, *args, **kwargs)

    Attention.forward = forward
