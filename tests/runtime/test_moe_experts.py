"""The FP8 experts against float64: layouts, routing, other ranks' experts."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.sim
torch = pytest.importorskip("torch")

from xpufp8.runtime import moe  # noqa: E402
from xpufp8.runtime.catalogue import RepairError  # noqa: E402

EXPERTS, HIDDEN, INTER, TOP_K = 5, 192, 128, 2
BLOCK = (128, 64)


def layer(layout: str, weight_dtype: Any) -> tuple[Any, Any, Any, Any]:
    """Weights and scales of an expert layer, each scale different; and both dequantized in float64."""
    generator = torch.Generator().manual_seed(3)
    weights, scales, wide = [], [], []
    for n, k in ((2 * INTER, HIDDEN), (HIDDEN, INTER)):
        weight = torch.randn(EXPERTS, n, k, generator=generator).to(weight_dtype)
        shape = {"tensor": (EXPERTS,), "channel": (EXPERTS, n, 1), "block": (EXPERTS, -(-n // BLOCK[0]), -(-k // BLOCK[1]))}[
            layout
        ]
        scale = torch.exp2(torch.rand(shape, generator=generator) * 2 - 4)
        if layout == "block":
            full = scale.repeat_interleave(BLOCK[0], 1)[:, :n].repeat_interleave(BLOCK[1], 2)[:, :, :k]
        else:
            full = scale.reshape(EXPERTS, -1, 1)
        weights.append(weight)
        scales.append(scale)
        wide.append(weight.double() * full.double())
    return tuple(weights), tuple(scales), wide[0], wide[1]


def reference(x: Any, w13: Any, w2: Any, topk_weights: Any, ids: Any, act: Any) -> Any:
    """Token by token, slot by slot."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if expert < 0:
                continue
            gate, up = (w13[expert] @ x[token].double()).chunk(2)
            out[token] += topk_weights[token, slot].double() * (w2[expert] @ (act(gate) * up))
    return out


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
@pytest.mark.parametrize("weight_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_against_float64(tokens: int, weight_dtype: Any, layout: str, activation: str) -> None:
    weights, scales, w13, w2 = layer(layout, weight_dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)]).int()
    topk_weights = torch.rand(tokens, TOP_K, generator=generator)
    block = BLOCK if layout == "block" else None
    got = moe.experts_forward(x, weights, scales, (topk_weights, ids), block=block, activation=activation)
    wanted = reference(x, w13, w2, topk_weights, ids, ACTIVATIONS[activation])
    assert got.dtype == torch.bfloat16
    # Three roundings to bfloat16 on the way (weights, hidden state, output): 2^-8 each at the worst, and they do not cancel.
    assert float((got.double() - wanted).norm() / wanted.norm()) < 3 * 2.0**-8


def test_experts_of_other_ranks_are_passed_over() -> None:
    weights, scales, w13, w2 = layer("tensor", torch.float8_e4m3fn)
    x = torch.randn(4, HIDDEN).bfloat16()
    ids = torch.tensor([[0, 7], [9, 8], [4, 5], [6, 1]])
    expert_map = torch.full((10,), -1, dtype=torch.int32)
    expert_map[torch.tensor([7, 4, 1])] = torch.tensor([0, 1, 2], dtype=torch.int32)
    topk_weights = torch.rand(4, 2)
    got = moe.experts_forward(x, weights, scales, (topk_weights, ids), expert_map=expert_map)
    wanted = reference(x, w13, w2, topk_weights, expert_map[ids], torch.nn.functional.silu)
    assert torch.equal(got[1], torch.zeros(HIDDEN, dtype=torch.bfloat16))
    assert float((got.double() - wanted).norm() / wanted.norm()) < 3 * 2.0**-8


def test_router_weight_is_applied_once() -> None:
    weights, scales, _, _ = layer("tensor", torch.float8_e4m3fn)
    x, ids = torch.randn(3, HIDDEN).bfloat16(), torch.tensor([[0], [1], [0]])
    half = torch.full((3, 1), 0.5)
    weighted = moe.experts_forward(x, weights, scales, (half, ids))
    already = moe.experts_forward(x, weights, scales, (half, ids), weighted_input=True)
    torch.testing.assert_close(weighted * 2, already)


def test_scale_of_no_known_layout_is_refused() -> None:
    with pytest.raises(RepairError, match="fits no layout"):
        moe.layout_of(torch.empty(4, 16, 8), torch.empty(4, 3), None)


class Oracle:
    """``select_fp8_moe_backend`` with a given outcome."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def __call__(self, *_: Any, **__: Any) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    __name__ = __qualname__ = "select_fp8_moe_backend"


def moe_config(activation: str = "silu", **changes: Any) -> Any:
    from types import SimpleNamespace

    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    fields = {"is_act_and_mul": True, "activation": MoEActivation(activation), "has_hash_routing": False, "routing_method": None,
              "router_logits_dtype": None, "hidden_dim": 64, "is_lora_enabled": False,
              "moe_parallel_config": SimpleNamespace(use_batched_activation_format=False)}  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def quant_key() -> Any:
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Static128BlockSym

    return kFp8Static128BlockSym


def test_what_vllm_selects_is_kept() -> None:
    chosen = ("BACKEND", object)
    assert moe.wrap(Oracle(chosen), "TRITON")(moe_config(), quant_key()) is chosen


@pytest.mark.parametrize(
    "outcome", [("NONE", None), NotImplementedError("No FP8 MoE backend supports the deployment configuration.")]
)
def test_fallback_answers_where_vllm_finds_nothing(outcome: Any) -> None:
    backend, experts = moe.wrap(Oracle(outcome), "TRITON")(moe_config(), quant_key())
    assert (backend, experts.__name__) == ("TRITON", "Xpufp8Experts")


def test_a_backend_that_was_typed_and_cannot_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="does not support"):
        moe.wrap(Oracle(ValueError("backend MARLIN does not support this")), "TRITON")(moe_config(), quant_key())


def test_what_the_fallback_does_not_cover_stops() -> None:
    with pytest.raises(RepairError, match="neither vLLM nor this repair"):
        moe.wrap(Oracle(("NONE", None)), "TRITON")(moe_config("swigluoai"), quant_key())
