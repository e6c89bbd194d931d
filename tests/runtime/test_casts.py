"""Casting a GEMM's output: which methods, to which dtype, and when not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.sim
torch = pytest.importorskip("torch")

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
