"""The kernel classes on vLLM's own interface: weights in either layout, scales in every shape, leading dimensions, bias."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.sim
torch = pytest.importorskip("torch")

from xpufp8.runtime import choice, int8_kernel, memory, table_kernels  # noqa: E402
from xpufp8.runtime.catalogue import RepairError  # noqa: E402


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(choice.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(choice, "_memo", {})
    memory.reset()


def config(group: tuple[int, int], n: int, k: int, activation: tuple[int, int] = (1, -1)) -> Any:
    from vllm.model_executor.kernels.linear import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, create_fp8_quant_key

    return FP8ScaledMMLinearLayerConfig(
        weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(*group)),
        activation_quant_key=create_fp8_quant_key(static=False, group_shape=GroupShape(*activation)),
        weight_shape=(n, k),
        input_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
    )


CASES: dict[str, tuple[Any, ...]] = {
    "block": (table_kernels.block_kernel, (128, 128), (1, 128), "weight_scale_inv", lambda n, k: (-(-n // 128), -(-k // 128)), False),
    "block of compressed-tensors": (table_kernels.block_kernel, (128, 128), (1, 128), "weight_scale",
                                    lambda n, k: (-(-n // 128), -(-k // 128)), False),
    "tensor": (table_kernels.scaled_kernel, (-1, -1), (-1, -1), "weight_scale", lambda n, k: (1,), True),
    "channel": (table_kernels.scaled_kernel, (-1, 1), (1, -1), "weight_scale", lambda n, k: (n, 1), True),
    "16-bit activations": (table_kernels.w8a16_kernel, (-1, 1), (-1, -1), "weight_scale", lambda n, k: (n, 1), True),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("n", "k"), [(256, 256), (192, 320), (320, 192)])
@pytest.mark.parametrize("candidate", [None, "dequantize-at-load", "dequantize-per-call"])
def test_layer_against_float64(monkeypatch: pytest.MonkeyPatch, candidate: str | None, n: int, k: int, case: str) -> None:
    made, group, activation, scale_name, scale_shape, transposed = CASES[case]
    if candidate is not None:
        monkeypatch.setenv(choice.FORCE_VARIABLE, candidate)
    kernel_class: Any = made()
    assert not kernel_class.__abstractmethods__
    settings = config(group, n, k, activation)
    assert kernel_class.is_supported()[0]
    assert kernel_class.can_implement(settings)[0]
    kernel = kernel_class(settings)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape(n, k), generator=generator) + 0.5
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.t() if transposed else weight, requires_grad=False)
    setattr(layer, scale_name, torch.nn.Parameter(scale, requires_grad=False))
    kernel.process_weights_after_loading(layer)
    assert tuple(layer.weight.shape) == ((k, n) if transposed else (n, k))
    if len(scale.shape) == 2 and group[0] > 1:
        full = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        # Whoever dequantizes once more (MLA does) must get the same weight, widened or not.
        after = getattr(layer, scale_name).repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        torch.testing.assert_close(layer.weight.float() * after, weight.float() * full, rtol=2.0**-8, atol=0)
    else:
        full = scale.reshape(-1, 1)
    wide = weight.double() * full.double()
    for shape in ((1, k), (2, 3, k)):
        x = torch.randn(shape, generator=generator).bfloat16()
        bias = torch.randn(n, generator=generator).bfloat16()
        for given in (None, bias):
            out = kernel.apply_weights(layer, x, given)
            wanted = x.double() @ wide.t() + (0 if given is None else given.double())
            assert out.dtype == torch.bfloat16
            assert out.shape == (*shape[:-1], n)
            limit = 2.0**-4 if candidate is None else 2.0**-7
            assert float((out.double() - wanted).norm() / wanted.norm()) < limit


@pytest.mark.parametrize(
    ("group", "able"),
    [((-1, -1), True), ((-1, 1), True), ((1, -1), True), ((128, 128), True), ((64, 128), True), ((1, 32), False)],
)
def test_schemes_that_are_taken(group: tuple[int, int], able: bool) -> None:
    assert table_kernels.block_kernel().can_implement(config(group, 64, 64))[0] is able  # type: ignore[attr-defined]  # made at run time


def test_batched_layer_is_refused() -> None:
    kernel: Any = table_kernels.block_kernel()
    layer = SimpleNamespace(is_bmm=True)
    with pytest.raises(RepairError, match="batched"):
        kernel(config((128, 128), 128, 128)).process_weights_after_loading(layer)


def test_weight_of_another_shape_is_refused() -> None:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(64, 64), requires_grad=False)
    with pytest.raises(RepairError, match="neither"):
        table_kernels.is_transposed(layer, 128, 64)


class OldBase(ABC):
    """``ScaledMMLinearKernel`` of vLLM to 0.14, as far as a kernel sees it."""

    def __init__(self, c: Any, w_q_param_name: str, w_s_param_name: str, *_: Any) -> None:
        self.config, self.w_q_name, self.w_s_name = c, w_q_param_name, w_s_param_name

    @abstractmethod
    def process_weights_after_loading(self, layer: Any) -> None: ...

    @abstractmethod
    def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any: ...


@pytest.mark.parametrize("scales", [1, 2, 96])
def test_int8_layer_of_the_old_table(scales: int) -> None:
    kernel: Any = int8_kernel.make(OldBase)(None, "weight", "weight_scale", "i", "z", "a")
    layer = torch.nn.Module()
    weight = torch.randint(-128, 128, (96, 64), dtype=torch.int8)
    scale = torch.rand(scales) + 0.1
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    layer.logical_widths = [64, 32]
    full = {1: lambda: scale, 2: lambda: torch.cat([scale[:1].expand(64), scale[1:].expand(32)]), 96: lambda: scale}[scales]()
    kernel.process_weights_after_loading(layer)
    x = torch.randn(2, 3, 64).bfloat16()
    wanted = x.double() @ (weight.double() * full.double().reshape(-1, 1)).t()
    got = kernel.apply_weights(layer, x)
    assert got.shape == (2, 3, 96)
    assert float((got.double() - wanted).norm() / wanted.norm()) < 2.0**-7
