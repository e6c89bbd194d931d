"""Fakes of custom ops: what they say, that the compiler believes it, and that a wrong one is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.sim
torch = pytest.importorskip("torch")

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


def onednn_output(a: Any, n: int, dtype: Any) -> Any:
    """The reference kernels' output tensor, by the arithmetic of the C++ function, on real integers."""
    k = a.shape[-1]
    strides = [int(step / k) * n if step % k == 0 else int(step // k * n) for step in a.stride()[:-1]]
    return torch.empty_strided((*a.shape[:-1], n), (*strides, a.stride(-1)), dtype=dtype)


def reference_w8a16(a: Any, b: Any, scale: Any, bias: Any) -> Any:
    """``fp8_gemm_w8a16`` without ``trans_B``: B is [K, N]."""
    wide = a.float() @ (b.float() * (1.0 if scale is None else scale.float().reshape(1, -1)))
    return onednn_output(a, b.shape[1], a.dtype).copy_(wide if bias is None else wide + bias.float())


def reference_trans_b(a: Any, b: Any, trans: bool, scale: Any, bias: Any) -> Any:
    return reference_w8a16(a, b.t() if trans else b, scale, bias)


def reference_fp8_gemm(a: Any, b: Any, out_dtype: Any, a_scale: Any, b_scale: Any, bias: Any) -> Any:
    wide = torch.matmul(a.float(), b.float()) * (1.0 if a_scale is None else a_scale) * (1.0 if b_scale is None else b_scale)
    return onednn_output(a, b.shape[-1], out_dtype or torch.float16).copy_(wide)


REFERENCES = {"w8a16": reference_w8a16, "w8a16_trans_b": reference_trans_b, "anonymous": reference_trans_b,
              "fp8_gemm": reference_fp8_gemm}  # fmt: skip


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Define an op with a real CPU kernel in a namespace of the test's own, and row it under the name of the real one."""
    libraries: list[Any] = []
    counter = itertools.count()

    def make(kind: str, like: str, *, fake: Any = None, reference: Any = None) -> tuple[str, Any]:
        namespace = f"xpufp8_test_{id(libraries)}_{next(counter)}"
        library = torch.library.Library(namespace, "DEF")
        libraries.append(library)
        library.define(f"op{SCHEMAS[kind]}")
        library.impl("op", reference or REFERENCES[kind], "CPU")
        if fake is not None:
            torch.library.register_fake(f"{namespace}::op", fake, lib=library)
        rows = [row for row in fakes.table() if row.op == like]
        from dataclasses import replace

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
    compared = verify.compare("x::y", reference_w8a16, fake, [sample])
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


def sample_arguments() -> dict[str, dict[str, Any]]:
    """Arguments for every row of the tables, the first size of the first input being the one that varies."""
    x, e = torch.empty, torch.float8_e4m3fn
    gemm = {"A": x(6, 64), "B": x(64, 32), "A_": x(6, 64), "A_scale": x(6, 1), "A_zp": x(6, 1), "B_scale": x(1), "B_zp": x(1)}
    hyper = {"residual": x(6, 4, 64, dtype=torch.bfloat16), "x": x(6, 64), "post_layer_mix": x(6, 4), "comb_res_mix": x(6, 4, 4)}
    everything: dict[str, Any] = {
        **gemm, **hyper, "trans_B": False, "out_dtype": torch.bfloat16, "group_size": 64, "g_idx": None, "out": x(6, 32),
        "ptr_D": x(6, 32), "q": x(6, 4, 64), "kv": x(9, 64), "q_fp8": x(6, 1, 4, 64), "max_model_len": 128,
        "attn_output": x(6, 8, 512), "n_groups": 2, "heads_per_group": 4, "query": x(6, 4, 64), "key": x(6, 2, 64),
        "is_neox_style": False, "projected_states_qkvz": x(6, 64), "spec_token_indx": x(6), "num_k_heads": 4, "num_v_heads": 8,
        "head_k_dim": 16, "head_v_dim": 16, "tp_size": 2, "scores": x(6, 16), "gating_output": x(6, 16), "topk": 4, "n_topk": 4,
        "A_scales": x(6, 2), "total_padded_rows": 16, "input": x(6, 64), "otype": torch.bfloat16, "weight": x(32, 64),
        "dst": x(6, 64, dtype=torch.bfloat16), "hidden_states": x(6, 64), "a": x(6, 64),
    }  # fmt: skip
    special: dict[str, dict[str, Any]] = {"torch_ipex::cast_to_fp8": {"otype": 24}, "torch_ipex::fp8_linear": {"out": None},
               "_xpu_C::fp8_bmm": {"A": x(6, 7, 64).to(e), "B": x(6, 64, 32).to(e)}}  # fmt: skip
    return {f"{row.op}:{len(row.arguments)}": {name: {**everything, **special.get(row.op, {})}.get(name) for name in row.arguments}
            for row in fakes.table()}  # fmt: skip


ROWS = {f"{row.op}:{len(row.arguments)}": row for row in fakes.table()}


@pytest.mark.parametrize("key", ROWS)
def test_sizes_stay_symbolic(key: str) -> None:
    row, arguments = ROWS[key], sample_arguments()[key]
    if row.op == "_moe_C::reorder_mxfp_scales":
        pytest.skip("its rows are an argument, not a size of an input")
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        varying = {
            n: symbolic(mode, v) if isinstance(v, torch.Tensor) and v.shape[:1] == (6,) else v for n, v in arguments.items()
        }
        fixed = {
            n: mode.from_tensor(v) if isinstance(v, torch.Tensor) and v is varying[n] else varying[n]
            for n, v in arguments.items()
        }
        result = row.output(fixed)
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
