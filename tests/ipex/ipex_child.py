"""A child program for the IPEX lane: what the real library does before and after the repairs, as JSON on the last line.

Runs in an interpreter that has intel-extension-for-pytorch and not much else.
"""

from __future__ import annotations

import json
from typing import Any

import intel_extension_for_pytorch as ipex
import torch
from intel_extension_for_pytorch.quantization.fp8 import DelayedScaling, Format, fp8_autocast, prepare_fp8

from xpufp8.runtime import casts, fakes, verify

E4M3 = torch.float8_e4m3fn


def reference_gemm(
    x: Any, scale_a: Any, a: int, _ta: int, weight: Any, scale_b: Any, b: int, _tb: int, bias: Any, out: Any
) -> Any:
    """What ``fp8_linear`` computes, filling ``out`` without saying so as it does."""
    wide = (x.float() * scale_a[a]) @ (weight.float() * scale_b[b]).t()
    wide = wide if bias is None else wide + bias.float()
    return wide if out is None else out.copy_(wide)


def gemm_runs() -> str:
    """Say why the library's FP8 GEMM cannot run on this CPU; empty when it can."""
    one = torch.ones(3)
    try:
        x, w = torch.randn(4, 64).to(E4M3), torch.randn(16, 64).to(E4M3)
        torch.ops.torch_ipex.fp8_linear(x, one, 0, 24, w, one, 1, 24, torch.zeros(16, dtype=torch.bfloat16), torch.empty(4, 16))
    except RuntimeError as error:
        return str(error)
    return ""


def model(dtype: Any) -> tuple[Any, Any, Any]:
    """An FP8 model of the library's own modules, calibrated; its recipe; an input."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)).eval().to(dtype)
    x = torch.randn(5, 64).to(dtype)
    recipe = DelayedScaling(fp8_format=Format.E4M3)
    with fp8_autocast(enabled=False, calibrating=True, fp8_recipe=recipe), torch.no_grad():
        quantized = prepare_fp8(plain)
        quantized(x)
    return quantized, recipe, x


def compiled(dtype: Any, backend: str) -> dict[str, Any]:
    """Compile the model whole and compare it with eager, bit for bit."""
    quantized, recipe, x = model(dtype)
    torch._dynamo.reset()
    with fp8_autocast(enabled=True, fp8_recipe=recipe), torch.no_grad():
        try:
            got = torch.compile(quantized, fullgraph=True, backend=backend)(x)
        except Exception as error:  # noqa: BLE001 - how it fails is the result
            return {"error": f"{type(error).__name__}: {error}"[:500]}
        quantized, _, _ = model(dtype)
    with fp8_autocast(enabled=True, fp8_recipe=recipe), torch.no_grad():
        wanted = quantized(x)
    return {"equal": torch.equal(got, wanted), "dtype": str(got.dtype), "shape": list(got.shape)}


class Layer:
    """A layer as vLLM's kernel classes write it, on a real op whose output is float32 whatever the activation is."""

    def apply_weights(self, layer: Any, x: Any) -> Any:
        wide = torch.ops.torch_ipex.cast_from_fp8(layer.weight, torch.ones(1), 0, 24, torch.float32)
        return x.float() @ wide.t()


def cast() -> dict[str, Any]:
    """The output before and after the repair, and compiled."""
    layer, kernel, x = torch.nn.Module(), Layer(), torch.randn(5, 64).bfloat16()
    layer.register_buffer("weight", torch.randn(16, 64).to(E4M3))
    before = kernel.apply_weights(layer, x)
    said = casts.apply("torch_ipex::cast_from_fp8", (__name__,))
    after = kernel.apply_weights(layer, x)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: kernel.apply_weights(layer, x), fullgraph=True, backend="aot_eager")(x)
    return {"said": said, "before": str(before.dtype), "after": str(after.dtype), "equal": torch.equal(compiled, after),
            "value": torch.equal(after, before.bfloat16())}  # fmt: skip


def samples() -> dict[str, list[tuple[Any, ...]]]:
    """Calls of real ops for each fake that the CPU build can run."""
    x, one, history = torch.randn(6, 64), torch.ones(3), torch.zeros(3)
    f8, scores = x.to(E4M3), torch.randn(6, 8)
    casts = [
        (data, one, history.clone(), one.clone(), 0, kind) for kind in (23, 24) for data in (x, x.bfloat16(), x[:, :32], x.t())
    ]
    back = [(f8, one, 0, 24, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    groups = [(x, scores, 2, True, 4, 2, torch.zeros(8), torch.tensor(1.0))]
    return {
        "torch_ipex::cast_to_fp8": casts,
        "torch_ipex::cast_from_fp8": back,
        "torch_ipex::grouped_topk": groups,
        "torch_ipex::add_layernorm": [(x, x.clone(), 1, [64], torch.ones(64), torch.zeros(64), 1e-5)],
        "torch_ipex::convert_e4m3_to_bf16": [(f8.reshape(-1), torch.empty(384, dtype=torch.bfloat16), 384, True, True)],
        "torch_ipex::convert_e4m3_to_fp32": [(f8.reshape(-1), torch.empty(384), 384, True, True)],
    }


def main() -> None:
    """Before, repair, after."""
    why = gemm_runs()
    library = torch.library.Library("torch_ipex", "IMPL")
    if why:
        library.impl("fp8_linear", reference_gemm, "CPU")
    backends = ("eager", "aot_eager")
    before = {backend: compiled(torch.float32, backend) for backend in backends}
    compared = {op: verify.check_registered(op, calls) for op, calls in samples().items()}
    said = fakes.apply_all()
    after = {f"{backend} {dtype}": compiled(dtype, backend) for backend in backends for dtype in (torch.float32, torch.bfloat16)}
    checked = verify.opcheck(
        "torch_ipex::cast_from_fp8", (torch.zeros(2, 4).to(E4M3), torch.ones(1), 0, 24, torch.float32), ["test_faketensor"]
    )
    answer = {
        "version": ipex.__version__, "gemm": why, "before": before, "after": after, "said": said, "opcheck": checked, "cast": cast(),
        "compared": {op: [c.outcome, c.calls, c.differences] for op, c in compared.items()},
    }  # fmt: skip
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
