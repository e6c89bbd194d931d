"""Casting a GEMM's output: which methods, to which dtype, and when not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.sim
torch = pytest.importorskip("torch")

from reference_gemms import fp8_gemm, w8a16  # noqa: E402

from xpufp8.runtime import casts  # noqa: E402
from xpufp8.runtime.catalogue import RepairError  # noqa: E402

SOURCE = """
import torch

class Kernel:
    def __init__(self, out_dtype=None):
        self.config = type("Config", (), {"out_dtype": out_dtype})()

    def apply_weights(self, layer, x, bias=None):
        return torch.ops.xpufp8_cast_test.gemm(x, layer.weight)

class Other:
    def apply_weights(self, layer, x, bias=None):
        return x @ layer.weight
"""


@pytest.fixture
def module(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A module that calls an op which returns float16 or float32, whatever it is given."""
    returned = getattr(request, "param", torch.float32)
    library = torch.library.Library("xpufp8_cast_test", "DEF")
    library.define("gemm(Tensor a, Tensor b) -> Tensor")
    library.impl("gemm", lambda a, b: (a.float() @ b.float()).to(returned), "CPU")
    torch.library.register_fake(
        "xpufp8_cast_test::gemm", lambda a, b: torch.empty((*a.shape[:-1], b.shape[-1]), dtype=returned), lib=library
    )
    made = ModuleType("xpufp8_cast_module")
    exec(SOURCE, made.__dict__)  # noqa: S102 - the source stands above
    for owner in (made.Kernel, made.Other):
        owner.__module__ = made.__name__
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]
    library._destroy()


OP = "xpufp8_cast_test::gemm"


def test_only_callers_of_the_op_are_wrapped(module: Any) -> None:
    untouched = module.Other.apply_weights
    said = casts.apply(OP, (module.__name__,))
    assert "Kernel.apply_weights" in said
    assert "Other" not in said
    assert module.Other.apply_weights is untouched


@pytest.mark.parametrize("configured", [None, torch.float16])
def test_output_gets_the_wanted_dtype_eager_and_compiled(module: Any, configured: Any) -> None:
    layer = SimpleNamespace(weight=torch.randn(8, 4).bfloat16())
    x = torch.randn(2, 3, 8).bfloat16()
    kernel = module.Kernel(configured)
    assert kernel.apply_weights(layer, x).dtype == torch.float32
    casts.apply(OP, (module.__name__,))
    casts.apply(OP, (module.__name__,))  # a second time changes nothing
    out = kernel.apply_weights(layer, x)
    assert out.dtype == (configured or torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: kernel.apply_weights(layer, x), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), out)


@pytest.mark.parametrize("module", [torch.float16], indirect=True)
def test_cast_that_would_hide_an_overflow_is_refused(module: Any) -> None:
    casts.apply(OP, (module.__name__,))
    layer = SimpleNamespace(weight=torch.randn(8, 4).bfloat16())
    with pytest.raises(RepairError, match="--dtype float16"):
        module.Kernel().apply_weights(layer, torch.randn(3, 8).bfloat16())


@pytest.mark.parametrize(
    ("returned", "wanted", "safe"),
    [(torch.float32, torch.bfloat16, True), (torch.bfloat16, torch.float16, True), (torch.float16, torch.float16, True),
     (torch.float16, torch.bfloat16, False), (torch.float16, torch.float32, False)],
)  # fmt: skip
def test_range_decides(returned: Any, wanted: Any, safe: bool) -> None:
    assert casts.cast_is_safe(returned, wanted) is safe


def test_op_that_nothing_calls_stops() -> None:
    with pytest.raises(RepairError, match=r"no method of this vLLM calls torch\.ops\.nowhere\.gemm"):
        casts.apply("nowhere::gemm")


def test_vllms_own_callers_are_found() -> None:
    found = {(owner.__name__, method) for owner, method in casts.find_callers("_xpu_C::fp8_gemm_w8a16")}
    assert ("XPUW8A16FP8LinearKernel", "apply_weights") in found


# -- vLLM's own kernels ------------------------------------------------------------------------------------------------


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The GEMMs of vllm-xpu-kernels under their own names, with reference kernels that return another dtype than asked for."""
    library = torch.library.Library("_xpu_C", "FRAGMENT")
    returned = torch.float32
    kernels = {
        "fp8_gemm_w8a16(Tensor A, Tensor B, Tensor? B_scale_, Tensor? bias_) -> Tensor": lambda a, b, scale, bias: w8a16(
            a.to(returned), b, scale, bias
        ),
        "fp8_gemm(Tensor A, Tensor B, ScalarType? out_dtype, Tensor? A_scale_, Tensor? B_scale_, Tensor? bias_) -> Tensor": (
            lambda a, b, out_dtype, a_scale, b_scale, bias: fp8_gemm(a, b, returned, a_scale, b_scale, bias)
        ),
    }
    for schema, kernel in kernels.items():
        name = library.define(schema)
        library.impl(name, kernel, "CPU")
        torch.library.register_fake(f"_xpu_C::{name}", _fake_of(returned), lib=library)
    for owner, method in (*casts.find_callers("_xpu_C::fp8_gemm_w8a16"), *casts.find_callers("_xpu_C::fp8_gemm")):
        monkeypatch.setattr(owner, method, vars(owner)[method])  # put back what the repair wraps
    yield
    library._destroy()


def _fake_of(returned: Any) -> Any:
    return lambda a, b, *_: torch.empty((*a.shape[:-1], b.shape[-1]), dtype=returned, device=a.device)


def _xpu_kernel(table: str, name: str) -> Any:
    """A kernel of the XPU row of one of vLLM's tables, for a layer ``[48, 32]`` with a scale a channel, and its layer."""
    from vllm.model_executor.kernels.linear import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys
    from vllm.platforms import PlatformEnum

    from xpufp8.runtime import tables

    owner = next(known for known in tables.find(table).rows[PlatformEnum.XPU] if known.__name__ == name)
    settings = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=keys.kFp8StaticChannelSym, activation_quant_key=keys.kFp8DynamicTokenSym, weight_shape=(48, 32),
        input_dtype=torch.bfloat16, out_dtype=torch.bfloat16,
    )  # fmt: skip
    names = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
    kernel = object.__new__(owner)
    kernel.config, kernel.layer_param_names = settings, names
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(48, 32).to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.rand(48, 1) + 0.1, requires_grad=False)
    layer.input_scale = None
    kernel.process_weights_after_loading(layer)
    return kernel, layer


def test_w8a16_kernel_of_vllms_table_fails_before_and_serves_after(registered: None) -> None:
    kernel, layer = _xpu_kernel("wfp8a16", "XPUW8A16FP8LinearKernel")
    x, following = torch.randn(2, 3, 32).bfloat16(), torch.randn(8, 48).bfloat16()

    def model(x: Any) -> Any:
        return torch.nn.functional.linear(kernel.apply_weights(layer, x), following)

    with pytest.raises(RuntimeError, match="same dtype"):
        model(x)
    said = casts.apply("_xpu_C::fp8_gemm_w8a16")
    assert "XPUW8A16FP8LinearKernel.apply_weights" in said
    out = model(x)
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 3, 8))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), out)


def test_w8a8_kernel_of_vllms_table_is_cast_to_what_it_was_asked_for(registered: None) -> None:
    kernel, layer = _xpu_kernel("fp8", "XPUW8A8FP8LinearKernel")
    call = {"A": torch.randn(6, 32).to(torch.float8_e4m3fn), "B": layer.weight, "out_dtype": torch.bfloat16, "As": torch.rand(6, 1),
            "Bs": layer.weight_scale, "bias": None, "output_shape": [2, 3, 48]}  # fmt: skip
    wide = kernel.apply_scaled_mm(**call)
    assert wide.dtype == torch.float32
    casts.apply("_xpu_C::fp8_gemm")
    out = kernel.apply_scaled_mm(**call)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wide.bfloat16())
