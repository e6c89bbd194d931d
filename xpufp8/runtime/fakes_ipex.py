"""What ops of intel-extension-for-pytorch return, read from its C++ sources (Apache-2.0) and compared with the library itself.

IPEX derives most schemas from C++ types, which leaves arguments without names (``_0``, ``_1``, …); they are named here, in order.
The comparison runs in the IPEX lane (``make ipex``), against the CPU build; the XPU rows come from its source alone.
Ops on pre-packed weights, recurrent layers, optimizers and embedding bags are not here: FP8 serving calls none of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from xpufp8.runtime.catalogue import RepairError
from xpufp8.runtime.fakes import Arguments, Fake
from xpufp8.runtime.fakes_xpu import product

if TYPE_CHECKING:
    import torch

_EXPERTS = (
    "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "inplace", "is_vnni", "is_distributed", "is_woq", "woq_weight_dtype",
    "woq_group_size", "woq_lowp_mode", "w1_scale", "w1_zp", "w1_compensation", "w2_scale", "w2_zp", "w2_compensation",
)  # fmt: skip


def _w8a16(args: Arguments) -> torch.Tensor:
    return product(args["A"], args["B"].shape[0 if args["trans_B"] else 1], args["A"].dtype)


def _cast_to_fp8(args: Arguments) -> torch.Tensor:
    import torch

    # Float8Format of the library is c10::ScalarType, whose numbers never change (fp8_utils.h).
    formats = {23: torch.float8_e5m2, 24: torch.float8_e4m3fn}
    return torch.empty_like(args["input"], dtype=formats[args["otype"]])


def _cast_from_fp8(args: Arguments) -> torch.Tensor:
    import torch

    return torch.empty_like(args["input"], dtype=args["otype"])


def _linear(args: Arguments) -> torch.Tensor:
    import torch

    x = args["input"]
    if args["out"] is not None:
        return torch.empty_like(args["out"])
    shape = [*x.shape]
    shape[1] = args["weight"].shape[0]
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _experts(args: Arguments) -> torch.Tensor:
    import torch

    if args["inplace"]:
        raise RepairError("fused_experts with inplace writes to its input without saying so, which no fake can state")
    return torch.empty_like(args["hidden_states"])


def _like(name: str) -> Any:
    def make(args: Arguments) -> torch.Tensor:
        import torch

        return torch.empty_like(args[name])

    return make


def _dense_like(name: str) -> Any:
    def make(args: Arguments) -> torch.Tensor:
        import torch

        x = args[name]
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    return make


def _rms_norm(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    x, weight = args["X"], args["W"]
    rows = x.numel() // math.prod(args["normalized_shape"])
    dtype = torch.float32 if weight.dtype == torch.float32 else x.dtype
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty((rows,), dtype=dtype, device=x.device)


def _topk(args: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    tokens, device = args["hidden_states"].shape[0], args["hidden_states"].device
    # Ids come first here, unlike in the op of the same name of vllm-xpu-kernels.
    return (
        torch.empty((tokens, args["topk"]), dtype=torch.int32, device=device),
        torch.empty((tokens, args["topk"]), dtype=torch.float32, device=device),
    )


def plain_enums() -> None:
    """Make the enums that IPEX's FP8 modules pass to their ops plain integers.

    They are pybind11 types, which Dynamo cannot put into a graph; the ops take integers.
    """
    import importlib

    try:
        holder = importlib.import_module("intel_extension_for_pytorch._isa_help")
    except ImportError:
        return
    for name in ("FP8FwdTensors", "FP8BwdTensors", "Float8Format"):
        members = getattr(getattr(holder, name, None), "__members__", None)
        if members:
            setattr(holder, name, type(name, (), {member: int(value) for member, value in members.items()}))


def _converted(name: str) -> Fake:
    tail = ("with_denorm", "with_lut") if "e4m3" in name else ()
    return Fake(f"torch_ipex::{name}", ("src", "dst", "len", *tail), _like("dst"), "csrc/cpu/aten/MoE.cpp", writes="dst")


FAKES: tuple[Fake, ...] = (
    Fake("torch_ipex::fp8_gemm_w8a16", ("A", "B", "trans_B", "B_scale_", "bias_"), _w8a16,
         "csrc/gpu/aten/operators/fp8/FP8Linear.cpp fp8_gemm_w8a16", types="Tensor, Tensor, bool, Optional[Tensor], Optional[Tensor]"),
    Fake("torch_ipex::rms_norm", ("X", "normalized_shape", "W", "epsilon"), _rms_norm,
         "csrc/gpu/aten/operators/RMSNorm.cpp rms_norm_fw_xpu"),
    Fake("torch_ipex::cast_to_fp8", ("input", "scale", "amax_history", "scale_inv", "index", "otype"), _cast_to_fp8,
         "csrc/cpu/aten/Cast.cpp cast_to_fp8", also=plain_enums, types="Tensor, Tensor, Tensor, Tensor, int, int"),
    Fake("torch_ipex::cast_from_fp8", ("input", "scale_inv", "index", "itype", "otype"), _cast_from_fp8,
         "csrc/cpu/aten/Cast.cpp cast_from_fp8", types="Tensor, Tensor, int, int, int"),
    Fake("torch_ipex::fp8_linear",
         ("input", "scale_inv_input", "input_index", "input_type", "weight", "scale_inv_weight", "weight_index", "weight_type",
          "bias", "out"), _linear, "csrc/cpu/aten/FP8Linear.cpp fp8_linear_impl", writes="out", also=plain_enums,
         types="Tensor, Tensor, int, int, Tensor, Tensor, int, int, Tensor, Tensor"),
    *(_converted(name) for name in
      ("convert_e4m3_to_bf16", "convert_e4m3_to_fp16", "convert_e4m3_to_fp32", "convert_e5m2_to_fp16")),
    Fake("torch_ipex::fused_experts", _EXPERTS, _experts, "csrc/cpu/aten/kernels/DSMoEKrnl.cpp fused_experts_impl"),
    Fake("torch_ipex::fused_experts_with_shared", _EXPERTS, _experts,
         "csrc/cpu/aten/kernels/DSMoEKrnl.cpp fused_experts_impl"),
    Fake("torch_ipex::grouped_topk",
         ("hidden_states", "gating_output", "topk", "renormalize", "num_expert_group", "topk_group", "e_score_correction_bias",
          "routed_scaling_factor"), _topk, "csrc/cpu/aten/DSMoE.cpp grouped_topk"),
    Fake("torch_ipex::add_layernorm", ("a", "b", "alpha", "normalized_shape", "weight_opt", "bias_opt", "eps"), _dense_like("a"),
         "csrc/cpu/aten/AddLayerNorm.cpp"),
)  # fmt: skip
