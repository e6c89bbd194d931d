"""The decode kernel's tiles for pairs and twins through NVIDIA's compiler for Hopper, without a device: they compile, fit the shared
memory, and their products are those that they are there for. None of it says how fast a kernel is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402 - after the skip

from probes.triton_compiler import made_for  # noqa: E402 - after the skip
from probes.triton_jobs import Form, decode  # noqa: E402 - after the skip
from xpufp8.runtime.triton_kernels import space  # noqa: E402 - after the skip

SHARED = 227 * 1024
"""Bytes that a program can have on Hopper."""
ALL = {tile for how in ("fp16", "pair") for bucket in space.BUCKETS[:4] for tile in space.small("cuda", bucket, how)}
TILES = sorted((tile for tile in ALL if (tile.twin or tile.how == "pair") and not tile.stream), key=str)


def resources(cubin: Path) -> dict[str, int]:
    """Registers and bytes of stack of a thread, as the compiler's own tool reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_decode_tile_compiles_for_hopper(tile: space.Tile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = made_for(decode(tile, Form("bfloat16", "float8_e4m3fn", tile.how, "", "block", 8192, 8192)), GPUTarget("cuda", 90, 32))
    assert made.metadata.shared <= SHARED
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    used = resources(cubin)
    products = set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync[\w.]*", made.asm["ptx"]))
    assert products
    if tile.how == "pair":
        assert used["STACK"] == 0, "registers are spilled to memory"
        # FP8 operands as they are: nothing of the weights is widened.
        assert all(".e4m3.e4m3" in product for product in products)
        assert "cvt.rn.f16x2.e4m3x2" not in made.asm["ptx"]
