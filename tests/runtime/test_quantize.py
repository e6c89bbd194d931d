"""FP8 quantization in plain torch: values, scales, groups, padding."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.sim
torch = pytest.importorskip("torch")

from xpufp8.runtime import quantize  # noqa: E402


def dequantized(output: Any, scale: Any, group: Any = None) -> Any:
    return output.float() * quantize.spread(scale, tuple(output.shape), group)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamic_scale_uses_the_whole_range(per_token: bool, dtype: Any) -> None:
    x = (torch.randn(7, 64) * torch.logspace(-3, 3, 7).reshape(-1, 1)).to(dtype)
    output, scale = quantize.scaled_fp8_quant(x, use_per_token_if_dynamic=per_token)
    assert scale.shape == ((7, 1) if per_token else (1,))
    peaks = output.float().abs().amax(dim=1 if per_token else None)
    assert torch.all(peaks == 448)
    # Half a unit of e4m3 (3 bits of mantissa) for normal numbers, half the smallest step below them.
    error = (dequantized(output, scale) - x.float()).abs()
    assert torch.all(error <= torch.maximum(x.float().abs() * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5))


STATIC: dict[str, tuple[Any, Any, Any]] = {
    "one": (torch.tensor([0.5]), None, lambda s: s.reshape(1, 1).expand(6, 8)),
    "a row": (torch.rand(6) + 0.1, (1, -1), lambda s: s.reshape(6, 1).expand(6, 8)),
    "a column": (torch.rand(8) + 0.1, (-1, 1), lambda s: s.reshape(1, 8).expand(6, 8)),
    "blocks": (torch.rand(2, 2) + 0.1, None, lambda s: s.repeat_interleave(3, 0).repeat_interleave(4, 1)),
}


@pytest.mark.parametrize("case", STATIC)
def test_static_scale_of_each_shape(case: str) -> None:
    scale, group, full = STATIC[case]
    x = torch.randn(6, 8)
    output, same = quantize.scaled_fp8_quant(x, scale, group_shape=group)
    assert same is scale
    assert torch.equal(output, (x * full(scale).reciprocal()).to(torch.float8_e4m3fn))


def test_values_beyond_the_range_saturate() -> None:
    output, _ = quantize.scaled_fp8_quant(torch.tensor([[1e6, -1e6, 1.0]]), torch.tensor([1.0]))
    assert output.float().tolist() == [[448.0, -448.0, 1.0]]


def test_zeros_have_a_scale() -> None:
    output, scale = quantize.scaled_fp8_quant(torch.zeros(2, 4), use_per_token_if_dynamic=True)
    assert torch.all(scale > 0)
    assert torch.all(output.float() == 0)


def test_padding_rows_and_an_output_of_the_callers() -> None:
    x = torch.randn(3, 8)
    padded, scale = quantize.scaled_fp8_quant(x, num_token_padding=5)
    assert padded.shape == (5, 8)
    mine = torch.empty(3, 8, dtype=torch.float8_e4m3fn)
    given, _ = quantize.scaled_fp8_quant(x, scale, output=mine)
    assert given is mine
    assert torch.equal(mine, padded[:3])


def test_scale_of_one_dimension_needs_to_say_which() -> None:
    with pytest.raises(ValueError, match="group_shape"):
        quantize.scaled_fp8_quant(torch.randn(4, 4), torch.ones(4))
