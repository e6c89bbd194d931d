"""The decode kernel's tiles that read ahead and those for pairs through NVIDIA's compiler for Hopper, without a device.

They compile, as many fit a multiprocessor as they are made for, and their products are those that they are there for. None of it says
how fast a kernel is.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402 - after the skip

from probes.triton_compiler import Job, made_for  # noqa: E402 - after the skip
from probes.triton_jobs import Form, decode  # noqa: E402 - after the skip
from xpufp8.runtime.triton_kernels import launch, space  # noqa: E402 - after the skip

SHARED, REGISTERS = 227 * 1024, 65536
"""Bytes and registers of a multiprocessor of Hopper."""
ALL = {tile for how in ("fp16", "pair") for bucket in space.BUCKETS[:4] for tile in space.small("cuda", bucket, how)}
TILES = sorted((tile for tile in ALL if (tile.ahead or tile.how == "pair") and not tile.stream), key=str)


def resources(cubin: Path) -> dict[str, int]:
    """Registers and bytes of stack of a thread, as the compiler's own tool reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}


def compiled(tile: space.Tile, folder: Path, monkeypatch: pytest.MonkeyPatch, *, early: bool) -> tuple[Any, dict[str, int]]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr("xpufp8.runtime.triton_kernels.backend", lambda: "cuda")
    launch.options.cache_clear()
    job = decode(tile, Form("bfloat16", "float8_e4m3fn", tile.how, "", "block", 8192, 8192))
    job.constants["EARLY"] = early
    made = made_for(job, GPUTarget("cuda", 90, 32), **(launch.options(tile, early) if tile.ahead else {}))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    return made, resources(cubin)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_decode_tile_compiles_for_hopper(tile: space.Tile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, used = compiled(tile, tmp_path, monkeypatch, early=False)
    programs = 2 if tile.ahead else 1
    assert used["STACK"] == 0, "registers are spilled to memory"
    assert programs * made.metadata.shared <= SHARED
    assert programs * used["REG"] * 32 * tile.warps <= REGISTERS
    products = set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync[\w.]*", made.asm["ptx"]))
    assert products
    if tile.how == "pair":
        # FP8 operands as they are: nothing of the weights is widened.
        assert all(".e4m3.e4m3" in product for product in products)
        assert "cvt.rn.f16x2.e4m3x2" not in made.asm["ptx"]


@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.ahead], ids=str)
def test_a_kernel_that_starts_early_reads_no_more_than_weights_before_it_waits(
    tile: space.Tile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = compiled(tile, tmp_path, monkeypatch, early=True)
    assert made.metadata.launch_pdl
    before, wait, after = made.asm["ptx"].partition("griddepcontrol.wait")
    assert wait
    assert "griddepcontrol.launch_dependents" in after
    # The weights that are fetched into the cache meanwhile are read volatile, and dropped.
    assert "ld.volatile.global" in before
    assert not re.search(r"ld\.global|cp\.async|st\.global|atom\.", before)
    assert re.search(r"cp\.async", after)


def test_rounding_to_fp8_keeps_a_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's plain minimum drops it; the interpreter's does not, so that only the compiled code tells."""
    from xpufp8.runtime.triton_kernels.large import fit_activations

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv", "f_ptr": "*fp32", "K": "i32", "stride_xm": "i32"}
    constants = {"LIMIT": 448.0, "POWER": False, "B": 1024}
    job = Job("xpufp8", "fit_activations", fit_activations, signature, constants, 8, 1, (), "")
    ptx = made_for(job, GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "min.NaN.f32" in ptx
    assert "max.NaN.f32" in ptx
