"""Fakes of custom ops: what they say, that the compiler believes it, and that a wrong one is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.sim
torch = pytest.importorskip("torch")

from reference_cases import cases  # noqa: E402
from reference_gemms import fp8_gemm, w8a16, w8a16_trans_b  # noqa: E402
from torch._functorch import config as functorch_config  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402

from xpufp8.runtime import fakes, fakes_ipex, fakes_xpu, verify  # noqa: E402
from xpufp8.runtime.catalogue import RepairError  # noqa: E402

E4M3 = torch.float8_e4m3fn
SCHEMAS = {
    "w8a16": "(Tensor A, Tensor B, Tensor? B_scale_, Tensor? bias_) -> Tensor",
    "w8a16_trans_b": "(Tensor A, Tensor B, bool trans_B, Tensor? B_scale_, Tensor? bias_) -> Tensor",
    "anonymous": "(Tensor _0, Tensor _1, bool _2, Tensor? _3, Tensor? _4) -> Tensor",
    "fp8_gemm": "(Tensor A, Tensor B, ScalarType? out_dtype, Tensor? A_scale_, Tensor? B_scale_, Tensor? bias_) -> Tensor",
    "grouped": "(Tensor ptr_A, Tensor? ptr_A_scale, Tensor ptr_B, Tensor? ptr_B_scale, Tensor? ptr_bias, Tensor ptr_D, "
    "Tensor rows_per_expert, int N, int K, int num_experts) -> Tensor",
    "int4": "(Tensor A, Tensor B, Tensor? bias, Tensor B_scale, Tensor B_zp, int group_size, Tensor? g_idx) -> Tensor",
}


REFERENCES = {"w8a16": w8a16, "w8a16_trans_b": w8a16_trans_b, "anonymous": w8a16_trans_b, "fp8_gemm": fp8_gemm}


NAMES = itertools.count()
"""torch.fx keeps the signature of an op by its name for as long as the process lives, so that no name may come twice."""


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Define an op with a real CPU kernel in a namespace of the test's own, and row it under the name of the real one."""
    libraries: list[Any] = []

    def make(kind: str, like: str, *, fake: Any = None, reference: Any = None) -> tuple[str, Any]:
        namespace = f"xpufp8_test_{next(NAMES)}"
        library = torch.library.Library(namespace, "DEF")
        libraries.append(library)
        library.define(f"op{SCHEMAS.get(kind, kind)}")
        library.impl("op", reference or REFERENCES[kind], "CPU")
        if fake is not None:
            torch.library.register_fake(f"{namespace}::op", fake, lib=library)
        rows = [row for row in fakes.table() if row.op == like]
        renamed = tuple(replace(row, op=f"{namespace}::op") for row in rows)
        monkeypatch.setattr(fakes_xpu, "FAKES", renamed)
        monkeypatch.setattr(fakes_ipex, "FAKES", ())
        return f"{namespace}::op", fakes.find_op(f"{namespace}::op")

    yield make
    for library in libraries:
        library._destroy()


class VllmStyle(torch.nn.Module):  # type: ignore[misc,name-defined]  # torch is imported only if it is there
    """A linear layer as vLLM writes it: an op call between ordinary tensor code."""

    def __init__(self, op: Any, kind: str, n: int, k: int) -> None:
        super().__init__()
        self.op, self.kind = op, kind
        generator = torch.Generator().manual_seed(0)
        shape = (n, k) if kind in ("w8a16_trans_b", "anonymous") else (k, n)
        self.register_buffer("weight", torch.randn(shape, generator=generator).to(E4M3))
        self.register_buffer("scale", torch.rand(n, generator=generator) + 0.1)

    def forward(self, x: Any) -> Any:
        x = torch.nn.functional.silu(x)
        out = self.op(x, self.weight, True, self.scale, None) if self.weight.shape[1] == x.shape[-1] else self.op(
            x, self.weight, self.scale, None)  # fmt: skip
        return out.view(*x.shape[:-1], -1) + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("kind", "like"),
    [("w8a16", "_xpu_C::fp8_gemm_w8a16"), ("w8a16_trans_b", "_xpu_C::fp8_gemm_w8a16"),
     ("w8a16_trans_b", "torch_ipex::fp8_gemm_w8a16"), ("anonymous", "torch_ipex::fp8_gemm_w8a16")],
)  # fmt: skip
def test_module_compiles_after_and_not_before(define: Any, kind: str, like: str, backend: str) -> None:
    name, op = define(kind, like)
    module = VllmStyle(op, kind, 48, 32)
    x = torch.randn(2, 5, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        eager = module(x)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"fake|FakeTensor|meta"):
            torch.compile(module, fullgraph=True, backend=backend)(x)
        torch._dynamo.reset()
        assert "registered" in fakes.apply(name)
        compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=True)
        for rows in (5, 1, 7):
            x = torch.randn(2, rows, 32, dtype=torch.bfloat16)
            if backend == "inductor":
                # silu is rewritten there, so its rounding differs; the op's own part must not.
                torch.testing.assert_close(compiled(x), module(x), rtol=2e-2, atol=2e-2)
            else:
                assert torch.equal(compiled(x), module(x))
    assert eager.shape == (2, 5, 48)


GEMM_INPUTS = {
    "2-D": lambda: torch.randn(7, 32),
    "3-D": lambda: torch.randn(3, 7, 32),
    "1 row": lambda: torch.randn(1, 32),
    "transposed batch": lambda: torch.randn(7, 3, 32).transpose(0, 1),
    "column slice": lambda: torch.randn(7, 96)[:, :32],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["w8a16", "w8a16_trans_b"])
@pytest.mark.parametrize("given", GEMM_INPUTS)
def test_w8a16_agrees_with_kernel(define: Any, given: str, kind: str, dtype: Any) -> None:
    name, _ = define(kind, "_xpu_C::fp8_gemm_w8a16")
    weight = torch.randn(32, 48).to(E4M3)
    samples: list[tuple[Any, ...]] = []
    for bias in (None, torch.randn(48, dtype=dtype)):
        a = GEMM_INPUTS[given]().to(dtype)
        if kind == "w8a16":
            samples.append((a, weight, torch.ones(1), bias))
        else:
            samples += [(a, weight, False, None, bias), (a, weight.t().contiguous(), True, torch.ones(48), bias)]
    compared = verify.check_registered(name, samples)
    assert compared.outcome == "agrees"
    assert compared.calls == len(samples)
    fakes.apply(name)
    # opcheck multiplies what it is given, which CPU cannot do in FP8; the reference kernel takes the weight in any dtype.
    wide = tuple(value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype == E4M3 else value for value in samples[0])
    assert set(verify.opcheck(name, wide).values()) == {"SUCCESS"}


@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.bfloat16])
def test_explicit_out_dtype_wins_and_none_means_float16(define: Any, out_dtype: Any) -> None:
    name, _ = define("fp8_gemm", "_xpu_C::fp8_gemm")
    a, b = torch.randn(2, 7, 32).to(E4M3), torch.randn(32, 48).to(E4M3)
    compared = verify.check_registered(name, [(a, b, out_dtype, torch.ones(1), torch.ones(1), None)])
    assert compared.outcome == "agrees"


def wrong(**changes: Any) -> Any:
    def fake(a: Any, b: Any, *_: Any) -> Any:
        shape = changes.get("shape", lambda a, b: (*a.shape[:-1], b.shape[1]))(a, b)
        return torch.empty(shape, dtype=changes.get("dtype", a.dtype), device=a.device)

    return fake


@pytest.mark.parametrize(
    ("fake", "said"),
    [(wrong(shape=lambda a, b: (a.shape[0] * a.shape[1], b.shape[1])), "shape"), (wrong(dtype=torch.float32), "dtype"),
     (wrong(shape=lambda a, b: (*a.shape[:-1], b.shape[0])), "shape"),
     (lambda a, b, *_: torch.empty((*a.shape[:-1], b.shape[1]), dtype=a.dtype).transpose(0, 1).contiguous().transpose(0, 1), "stride"),
     (lambda a, b, *_: (wrong()(a, b), wrong()(a, b)), "outputs")],
)  # fmt: skip
def test_wrong_fake_is_refused(fake: Any, said: str) -> None:
    sample = (torch.randn(2, 7, 32).bfloat16(), torch.randn(32, 48).to(E4M3), torch.ones(1), None)
    compared = verify.compare("x::y", w8a16, fake, [sample])
    assert compared.outcome == "differs"
    assert said in compared.differences[0]
    with pytest.raises(RepairError, match="refused"):
        verify.require(compared)


def test_kernel_that_cannot_run_leaves_the_fake_unverified() -> None:
    def no_device(*_: Any) -> Any:
        raise RuntimeError("Could not run on CPU")

    compared = verify.compare("x::y", no_device, wrong(), [(torch.randn(2, 2),)])
    assert compared.outcome == "not compared"
    assert "Could not run" in compared.differences[0]


def test_two_dimensional_fake_of_vllm_is_replaced_and_said(define: Any) -> None:
    def as_vllm(a: Any, b: Any, scale: Any, bias: Any = None) -> Any:
        flat = a.view(-1, a.shape[-1])
        return torch.empty((flat.size(0), b.size(1)), dtype=a.dtype, device=a.device)

    name, op = define("w8a16", "_xpu_C::fp8_gemm_w8a16", fake=as_vllm)
    said = fakes.apply(name)
    assert "replaced" in said
    assert "(6, 32)" in said
    with FakeTensorMode() as mode:
        out = op(mode.from_tensor(torch.empty(2, 3, 64)), mode.from_tensor(torch.empty(64, 32)), None, None)
    assert tuple(out.shape) == (2, 3, 32)
    assert "nothing to do" in fakes.apply(name)


def test_right_fake_of_somebody_else_is_left_alone(define: Any) -> None:
    theirs = wrong()
    name, op = define("w8a16", "_xpu_C::fp8_gemm_w8a16", fake=theirs)
    before = fakes.registered_fake(op)
    assert "nothing to do" in fakes.apply(name)
    assert fakes.registered_fake(op) is before


def test_unknown_generation_gets_no_fake(define: Any) -> None:
    name, op = define("fp8_gemm", "_xpu_C::fp8_gemm_w8a16")
    with pytest.raises(RepairError, match="not known"):
        fakes.apply(name)
    assert not fakes.traces_already(op)


def test_other_op_of_the_same_name_and_number_of_arguments_gets_no_fake(define: Any) -> None:
    """IPEX has a ``grouped_topk`` for each device; that for XPU names no argument, and returns other things than that for CPU."""
    xpu = "(Tensor _0, Tensor _1, int _2, bool _3, int _4, int _5, str _6, Tensor? _7) -> (Tensor, Tensor, Tensor, Tensor)"
    name, op = define(xpu, "torch_ipex::grouped_topk", reference=w8a16)
    assert fakes.known_fake(op) is None
    with pytest.raises(RepairError, match="not known"):
        fakes.apply(name)


def test_op_made_in_python_without_a_fake_is_not_taken_for_traceable(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.library.custom_op`` registers a stand-in that only complains; the live probe must say of such an op what this does."""
    from probes import op_tracing

    schema = SCHEMAS["w8a16"]
    op = torch.library.custom_op("xpufp8_test_made::op", lambda *args: w8a16(*args), mutates_args=(), schema=schema)
    overload = torch.ops.xpufp8_test_made.op.default
    arguments = (torch.randn(2, 3, 32).bfloat16(), torch.randn(32, 48).to(E4M3), None, None)
    compiled = torch.compile(lambda *a: overload(*a), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="no fake impl registered"):
        compiled(*arguments)
    assert not fakes.traces_already(overload)
    assert op_tracing.registered_tracing(overload) == "none"
    rows = tuple(replace(row, op="xpufp8_test_made::op") for row in fakes_xpu.FAKES if row.op == "_xpu_C::fp8_gemm_w8a16")
    monkeypatch.setattr(fakes_xpu, "FAKES", rows)
    assert "registered" in fakes.apply("xpufp8_test_made::op")
    assert fakes.traces_already(overload)
    assert op_tracing.registered_tracing(overload) == "fake"
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda *a: overload(*a), fullgraph=True, backend="eager")(*arguments), overload(*arguments))
    assert op is not None


def test_padding_of_the_convolution_follows_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "vllm_xpu_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert fakes_xpu.built_for_xe2()
    (package / "_xpu_C.abi3.so").write_text("")
    assert not fakes_xpu.built_for_xe2()
    (package / "libgdn_attn_kernels_xe_2.so").write_text("")
    assert fakes_xpu.built_for_xe2()


def test_experts_that_write_to_their_input_are_refused() -> None:
    arguments = next(case for case in cases() if case.op == "torch_ipex::fused_experts").make(2)
    row = next(row for row in fakes_ipex.FAKES if row.op == "torch_ipex::fused_experts")
    with pytest.raises(RepairError, match="inplace"):
        row.output({**arguments, "inplace": True})


def test_missing_op_stops_with_what_was_looked_for() -> None:
    with pytest.raises(RepairError, match=r"no such op.*vllm_xpu_kernels"):
        fakes.apply("_xpu_C::fp8_gemm_w8a16")


def symbolic(mode: Any, x: Any) -> Any:
    """A fake tensor whose first size is a symbol."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    dims = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (x.dim() - 1)
    context = StatelessSymbolicContext(dynamic_sizes=dims)
    return mode.from_tensor(x, symbolic_context=context, source=ConstantSource("x"))


ROWS = {f"{row.op}:{len(row.arguments)}": row for row in fakes.table()}
CASES = {case.key: case for case in cases()}


@pytest.mark.parametrize("key", ROWS)
def test_sizes_stay_symbolic(key: str) -> None:
    row, case = ROWS[key], CASES[key]
    if row.op == "_moe_C::reorder_mxfp_scales":
        pytest.skip("its rows are an argument, not a size of an input")
    arguments, given = case.make(6), {}
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        for name, value in arguments.items():
            tensor = isinstance(value, torch.Tensor)
            given[name] = symbolic(mode, value) if name in case.moving else mode.from_tensor(value) if tensor else value
        result = row.output(given)
    for out in result if isinstance(result, (tuple, list)) else [result]:
        assert any(isinstance(size, torch.SymInt) for size in out.shape), out.shape


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_undeclared_write_survives_compilation(define: Any, backend: str) -> None:
    """The grouped GEMM fills an argument without saying so; a fake alone would let the compiler drop the call.

    The real op returns the tensor that it filled. torch warns of that in a server and raises where the variable CI is set,
    so the test takes the server's setting.
    """

    def kernel(a: Any, a_s: Any, b: Any, b_s: Any, bias: Any, d: Any, rows: Any, n: int, k: int, e: int) -> Any:
        d.copy_(a @ b)
        return d.view_as(d)

    name, op = define("grouped", "_xpu_C::cutlass_grouped_gemm_interface", reference=kernel)
    fakes.apply(name)

    def layer(a: Any, b: Any, rows: Any) -> Any:
        out = torch.zeros(a.shape[0], b.shape[1])
        op(a, None, b, None, None, out, rows, 8, 4, 1)
        return out * 2

    args = (torch.randn(5, 4), torch.randn(4, 8), torch.tensor([5]))
    torch._dynamo.reset()
    with functorch_config.patch(error_on_custom_op_aliasing=False):
        assert torch.equal(torch.compile(layer, fullgraph=True, backend=backend)(*args), layer(*args))
    assert layer(*args).abs().sum() > 0


def test_ops_without_a_fake_are_no_rows_and_say_why(define: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.op for row in (*fakes_xpu.FAKES, *fakes_ipex.FAKES)}
    assert not {op.partition(".")[0] for op in fakes_xpu.UNSTATED} & rows - {"torch_ipex::grouped_topk"}
    name, op = define("(Tensor logits) -> Tensor", "_xpu_C::compact_sampling_mask", reference=w8a16)
    monkeypatch.setitem(fakes_xpu.UNSTATED, op._name, fakes_xpu.UNSTATED["_xpu_C::compact_sampling_mask"])
    with pytest.raises(RepairError, match=r"not known .*not published.*--enforce-eager"):
        fakes.apply(name)
