"""Every kernel that can be chosen on a Battlemage card is lowered by Intel's own compiler, with its products on the matrix engine.

Run by the interpreter that has triton-xpu (``make intel-triton``); no Intel GPU is needed, and nothing here says that a kernel runs.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.intel_triton
try:
    importlib.metadata.version("triton-xpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("triton-xpu is not in this interpreter", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from probes import triton_compiler, triton_vllm  # noqa: E402 - found through the path above
from probes.triton_jobs import layer_jobs, our_jobs  # noqa: E402

triton_compiler.bring_up()
JOBS = list(our_jobs(thorough=False))
PRODUCTS = [job for job in JOBS if job.name.startswith("w8a16")]


@pytest.mark.parametrize("job", JOBS, ids=[f"{job.name} {job.text}" for job in JOBS])
def test_lowers_for_battlemage_with_every_product_on_the_matrix_engine(job: triton_compiler.Job) -> None:
    found = triton_compiler.compile_one(job, "bmg_g21")
    assert found.lowers, found.error
    assert found.spirv_bytes > 1000
    assert found.dpas == found.products
    assert found.products >= (1 if job in PRODUCTS else 0)
    assert found.scalar_fma == 0 or job not in PRODUCTS


def test_weights_in_columns_are_read_by_block_loads() -> None:
    job = next(job for job in PRODUCTS if "columns, block scale" in job.text and "16x64x128" in job.text)
    rows = next(job for job in PRODUCTS if "rows, block scale" in job.text and "16x64x128" in job.text)
    columns_found, rows_found = (triton_compiler.compile_one(each, "bmg_g21") for each in (job, rows))
    assert any(load.startswith("8b_") for load in columns_found.loads), columns_found.loads
    assert rows_found.block_loads == 0
    assert columns_found.llvm_lines < rows_found.llvm_lines


def test_layers_that_compile_to_the_same_code_are_compiled_once() -> None:
    shapes = [(6144, 4096), (4096, 4096), (4096, 14336)]
    once = list(layer_jobs("bfloat16", "block", (128, 128), shapes[:1], moe=False))
    assert len(list(layer_jobs("bfloat16", "block", (128, 128), shapes, moe=False))) == len(once)
    ragged = list(layer_jobs("bfloat16", "block", (128, 128), [(6144, 4096), (6152, 4096)], moe=False))
    assert len(ragged) == 2 * len(once)
    assert {job.name for job in layer_jobs("bfloat16", "block", (128, 128), shapes, moe=True)} == {"w8a16_grouped"}


def test_a_product_off_the_matrix_engine_is_seen() -> None:
    """A float32 product with exact rounding has no place there; the reading of the IR must say so."""
    import triton.language as tl

    source = triton_vllm.HEADER + (
        "@triton.jit\n"
        "def plain(a, b, c, BM: tl.constexpr):\n"
        "    r = tl.arange(0, BM)\n"
        "    at = r[:, None] * BM + r[None, :]\n"
        "    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision='ieee'))\n"
    )
    kernel = triton_vllm.load("plain", source).plain
    signature = {"a": "*fp32", "b": "*fp32", "c": "*fp32"}
    job = triton_compiler.Job("test", "plain", kernel, signature, {"BM": 32}, 4, 2, ("a", "b", "c"), "32x32x32")
    found = triton_compiler.compile_one(job, "bmg_g21")
    assert found.lowers
    assert (found.products, found.dpas) == (1, 0)
    assert found.scalar_fma > 0
    assert tl.float32
