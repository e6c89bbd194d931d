"""The ways to compute FP8 expert layers, in the order in which they are preferred.

Like ``xpufp8.runtime.candidates`` for linear layers: a candidate says whether it can take a pair of weights, brings them into its own
form once, and computes. What it keeps has the shapes that came in, so that vLLM finds what it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xpufp8.runtime.catalogue import RepairError
from xpufp8.runtime.problem import Problem, scale_to_float, widen

if TYPE_CHECKING:
    import torch

Pair = tuple[Any, Any]
"""A tensor of the gated layer and one of the way back."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class ExpertCall:
    """What an expert layer is given beside the tokens."""

    weights: Pair
    """``w13 [E, 2I, H]`` (gate above up) and ``w2 [E, H, I]``, FP8 or already widened."""
    scales: Pair
    """Those of each weight, in one of the layouts of ``layout_of``."""
    routing: Pair
    """Weights and expert ids, both ``[T, top_k]``."""
    block: tuple[int, int] | None = None
    """Edges of a block for block scales."""
    activation: str = "silu"
    """One of ``ACTIVATIONS``."""
    expert_map: torch.Tensor | None = None
    """Global expert id to local one, -1 for an expert of another rank."""
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    """Of each weight, ``[E, 2I]`` and ``[E, H]``."""
    weighted_input: bool = False
    """The router's weight was applied to the tokens already."""

    def local_ids(self) -> torch.Tensor:
        """The local expert of each slot, int64 ``[T * top_k]``; below zero for one of another rank."""
        import torch

        ids = self.routing[1].reshape(-1).to(torch.int64)
        return ids if self.expert_map is None else self.expert_map.to(torch.int64)[ids]


Forward = Callable[[Any, ExpertCall], Any]
"""``forward(x [T, H], call) -> [T, H]`` in the dtype of ``x``: the routed experts' weighted sum, which is kept in float32."""


def layout_of(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> str:
    """Name the scale layout of one expert.

    Args:
        weight: ``[E, N, K]``.
        scale: ``[E]`` or ``[E, 1]`` for tensor, ``[E, N]`` or ``[E, N, 1]`` for channel, ``[E, ceil(N/bn), ceil(K/bk)]`` for block.
        block: edges of a block, where the quantization is by block.

    Raises:
        RepairError: the scale fits none of them.
    """
    experts, n, k = weight.shape
    if block is not None:
        if tuple(scale.shape) == (experts, -(-n // block[0]), -(-k // block[1])):
            return "block"
    elif scale.numel() == experts:
        return "tensor"
    elif scale.numel() == experts * n:
        return "channel"
    raise RepairError(f"moe:fp8: a scale of shape {tuple(scale.shape)} fits no layout of a weight {tuple(weight.shape)}")


@dataclass(frozen=True)
class ExpertProblem:
    """What one expert layer asks for."""

    first: Problem
    """One expert's gated layer, ``[2I, H]``."""
    second: Problem
    """One expert's way back, ``[H, I]``."""
    experts: int
    top_k: int
    activation: str = "silu"
    biased: bool = False

    def key(self) -> str:
        """Text that is equal for equal problems, for caches and logs."""
        extra = f"{self.activation}{'-bias' if self.biased else ''}"
        return f"experts-{self.experts}of{self.top_k}-{extra}-{self.first.key()}+{self.second.n}x{self.second.k}"

    @property
    def numel(self) -> int:
        """Weight elements of all experts."""
        return self.experts * (self.first.n * self.first.k + self.second.n * self.second.k)


def problem_of(call: ExpertCall, dtype: torch.dtype, top_k: int) -> ExpertProblem:
    """Describe a layer of which the routing may not be known yet.

    Raises:
        RepairError: a scale fits no layout.
    """
    first, second = (
        Problem(layout_of(w, s, call.block), "none", w.shape[1], w.shape[2], dtype, w.dtype, call.block)
        for w, s in zip(call.weights, call.scales, strict=True)
    )
    return ExpertProblem(first, second, call.weights[0].shape[0], top_k, call.activation, call.biases[0] is not None)


def activate(name: str, x: torch.Tensor) -> torch.Tensor:
    """Apply a gated activation to ``[tokens, 2 * I]`` whose first half is the gate."""
    import torch

    gate, up = x.chunk(2, dim=-1)
    if name == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up


def plain_forward(x: torch.Tensor, call: ExpertCall) -> torch.Tensor:
    """Compute expert by expert in plain torch; FP8 weights are widened at each call, one expert at a time."""
    import torch

    ids, top_k = call.local_ids(), call.routing[1].shape[1]
    wide_already = call.weights[0].dtype == x.dtype
    problem = None if wide_already else problem_of(call, x.dtype, top_k)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(ids).tolist():
        if expert < 0:
            continue
        slots = (ids == expert).nonzero().reshape(-1)
        tokens = torch.div(slots, top_k, rounding_mode="floor")
        hidden = x[tokens]
        for step, bias in enumerate(call.biases):
            weight = call.weights[step][expert]
            if problem is not None:
                weight = widen((problem.first, problem.second)[step], weight, call.scales[step][expert])
            hidden = torch.nn.functional.linear(hidden, weight, None if bias is None else bias[expert].to(x.dtype))
            if step == 0:
                hidden = activate(call.activation, hidden)
        _add(total, hidden, tokens, None if call.weighted_input else call.routing[0].reshape(-1)[slots])
    return total.to(x.dtype)


def _add(total: torch.Tensor, out: torch.Tensor, tokens: torch.Tensor, shares: torch.Tensor | None) -> None:
    """Add rows to those of their tokens, times the router's weights."""
    import torch

    wide = out.to(torch.float32)
    total.index_add_(0, tokens, wide if shares is None else wide * shares.to(torch.float32).unsqueeze(1))


# -- the device's own grouped product ----------------------------------------------------------------------------------


def native_grouped() -> Any:
    """The grouped GEMM of vllm-xpu-kernels, in the generation that takes one scale an expert; None where no library has it."""
    import torch

    try:
        op = torch.ops._xpu_C.cutlass_grouped_gemm_interface.default
    except (AttributeError, RuntimeError):
        return None
    names = tuple(argument.name for argument in op._schema.arguments)
    return op if names[:6] == ("ptr_A", "ptr_A_scale", "ptr_B", "ptr_B_scale", "ptr_bias", "ptr_D") else None


def _native_refuses(problem: ExpertProblem, device: str) -> str | None:
    if native_grouped() is None:
        return "no library registers cutlass_grouped_gemm_interface with scales of experts"
    if (problem.first.layout, problem.second.layout) != ("tensor", "tensor"):
        return "the grouped GEMM takes one scale an expert"
    if device != "xpu":
        return "the grouped GEMM is an XPU kernel"
    return None


def native_forward(x: torch.Tensor, call: ExpertCall) -> torch.Tensor:
    """Sort the slots by expert and multiply each group with the library's kernel; weights are ``[E, N, K]`` by strides of ``[E, K, N]``."""
    import torch

    op = native_grouped()
    ids, top_k, experts = call.local_ids(), call.routing[1].shape[1], call.weights[0].shape[0]
    order = torch.argsort(ids, stable=True)
    if call.expert_map is not None:
        order = order[ids[order] >= 0]
    rows = torch.bincount(ids[order], minlength=experts).to(torch.int32)
    tokens = torch.div(order, top_k, rounding_mode="floor")
    hidden = x[tokens]
    for step, (weight, scale, bias) in enumerate(zip(call.weights, call.scales, call.biases, strict=True)):
        _, n, k = weight.shape
        out = torch.empty((hidden.shape[0], n), dtype=x.dtype, device=x.device)
        bias = None if bias is None else bias.to(x.dtype)
        op(hidden, None, weight.transpose(1, 2), scale.reshape(-1), bias, out, rows, n, k, experts)
        hidden = activate(call.activation, out).contiguous() if step == 0 else out
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    _add(total, hidden, tokens, None if call.weighted_input else call.routing[0].reshape(-1)[order])
    return total.to(x.dtype)


def _native(problem: ExpertProblem, weights: Pair, scales: Pair) -> PreparedExperts:
    kept = tuple(weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in weights)
    return PreparedExperts((kept[0], kept[1]), _as_float(scales), native_forward)


# -- candidates --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreparedExperts:
    """An expert layer in a candidate's form."""

    weights: Pair
    scales: Pair
    """In the shapes they came in; all ones where the weights are widened."""
    forward: Forward


@dataclass(frozen=True)
class ExpertCandidate:
    """One way to compute an expert layer."""

    name: str
    refuses: Callable[[ExpertProblem, str], str | None]
    """Why it cannot take a problem on a device type, or None."""
    prepare: Callable[[ExpertProblem, Pair, Pair], PreparedExperts]
    bytes_per_weight: int = 1
    """Bytes that it keeps for each weight element."""


def _as_float(scales: Pair) -> Pair:
    return scale_to_float(scales[0]).contiguous(), scale_to_float(scales[1]).contiguous()


def _triton_refuses(problem: ExpertProblem, device: str) -> str | None:
    from xpufp8.runtime import triton_kernels

    return triton_kernels.experts_refuse((problem.first, problem.second), device)


def _triton(problem: ExpertProblem, weights: Pair, scales: Pair) -> PreparedExperts:
    from xpufp8.runtime import triton_kernels

    return PreparedExperts(weights, scales, triton_kernels.experts_forward)


def _at_load(problem: ExpertProblem, weights: Pair, scales: Pair) -> PreparedExperts:
    """Widen once, expert by expert, so that no float32 copy of all is held."""
    import torch

    made = []
    for one, weight, scale in zip((problem.first, problem.second), weights, scales, strict=True):
        wide = torch.empty(weight.shape, dtype=one.dtype, device=weight.device)
        for expert in range(weight.shape[0]):
            wide[expert] = widen(one, weight[expert], scale[expert])
        made.append(wide)
    ones = tuple(torch.ones_like(scale, dtype=torch.float32) for scale in scales)
    return PreparedExperts((made[0], made[1]), (ones[0], ones[1]), plain_forward)


def _per_call(problem: ExpertProblem, weights: Pair, scales: Pair) -> PreparedExperts:
    return PreparedExperts(weights, scales, plain_forward)


def _always(problem: ExpertProblem, device: str) -> str | None:
    return None


NATIVE = ExpertCandidate("native-grouped", _native_refuses, _native)
TRITON = ExpertCandidate("triton-experts", _triton_refuses, _triton)
AT_LOAD = ExpertCandidate("dequantize-at-load", _always, _at_load, bytes_per_weight=2)
PER_CALL = ExpertCandidate("dequantize-per-call", _always, _per_call)


def candidates() -> list[ExpertCandidate]:
    """Every candidate, most preferred first; the last one always works."""
    return [NATIVE, TRITON, AT_LOAD, PER_CALL]
