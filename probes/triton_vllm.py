"""vLLM's own Triton FP8 kernels, taken out of its source without importing vLLM, and the tiles that it launches them with.

vLLM cannot be imported beside another Triton, nor where its compiled parts are missing, but a Triton kernel is only a function in a
file. Each is found by name wherever a release keeps it and written to a module of its own.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from probes.triton_compiler import Job

KERNELS = {
    "_w8a8_triton_block_scaled_mm": "block-FP8 linear layers (called _w8a8_block_fp8_matmul before 0.11)",
    "_w8a8_block_fp8_matmul": "block-FP8 linear layers of releases before 0.11",
    "scaled_mm_kernel": "per-tensor and per-channel FP8 linear layers",
    "fused_moe_kernel": "FP8 expert layers",
    "_per_token_group_quant_fp8": "activations to FP8, one scale a group",
}
HEADER = "import triton\nimport triton.language as tl\n\n\n"


def installed() -> Path | None:
    """Folder of the vLLM that this interpreter would import; None without one."""
    spec = importlib.util.find_spec("vllm")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _helpers(tree: ast.Module, wanted: str) -> list[ast.FunctionDef]:
    """The function and the jitted functions of the same file that it calls, those first."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: list[ast.FunctionDef] = []

    def visit(name: str) -> None:
        node = functions[name]
        for call in ast.walk(node):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id in functions
                and call.func.id != name
            ):
                visit(call.func.id)
        if node not in found:
            found.append(node)

    visit(wanted)
    return found


def sources(folder: Path) -> dict[str, str]:
    """Source of a module for each known kernel of a vLLM.

    Args:
        folder: the ``vllm`` package, installed or unpacked.

    Returns:
        kernel name to module text, in the order of ``KERNELS``; kernels that this release lacks are missing.
    """
    found: dict[str, str] = {}
    for path in sorted((folder / "model_executor").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for name in KERNELS:
            if name in found or f"def {name}(" not in text:
                continue
            tree = ast.parse(text)
            if not any(isinstance(node, ast.FunctionDef) and node.name == name and node.decorator_list for node in tree.body):
                continue
            lines = text.splitlines(keepends=True)
            parts = []
            for node in _helpers(tree, name):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                parts.append("".join(lines[first - 1 : node.end_lineno]))
            found[name] = HEADER + "\n\n".join(parts)
    return {name: found[name] for name in KERNELS if name in found}


def load(name: str, source: str) -> ModuleType:
    """Import a module's text; it is written to a file, because Triton reads the source of its kernels from there."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-triton-"))
    path = folder / f"vllm_kernel_{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


VLLM_BLOCK_TILES = ((64, 128, 128, 4), (16, 64, 128, 4), (32, 64, 128, 4), (128, 128, 128, 8), (64, 64, 128, 4))
VLLM_SCALED_TILES = ((64, 64, 256, 4), (64, 128, 256, 4), (64, 128, 128, 4), (128, 128, 128, 4))


def vllm_jobs(
    release: str, folder: Path, *, only: str | None = None, dtype: str = "bfloat16", even: bool = True
) -> Iterator[Job]:
    """VLLM's kernels of one release, at the tiles that it takes where it has no tuned file.

    Args:
        release: names the kernels' source.
        folder: the ``vllm`` package.
        only: one kernel instead of all.
        dtype: of the outputs.
        even: N and K are multiples of 16, which a launch then says.
    """
    import triton.language as tl

    out = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[dtype]
    for name, source in sources(folder).items():
        if only not in (None, name):
            continue
        kernel = getattr(load(f"{name}_{release.replace('.', '_')}", source), name)
        if name in ("_w8a8_triton_block_scaled_mm", "_w8a8_block_fp8_matmul"):
            yield from _block(release, kernel, out, even)
        elif name == "scaled_mm_kernel":
            yield from _scaled(release, kernel, out, even)
        elif name == "fused_moe_kernel":
            yield from _vllm_experts(release, kernel, out, getattr(tl, dtype), even)


ONE = ("stride_ak", "stride_bk", "stride_cn")
"""Strides that are 1, which Triton compiles in."""
SIZED = ("N", "K", "stride_am", "stride_bn", "stride_be", "stride_cm")
"""Arguments that are multiples of 16 where N and K are."""


def _job(
    release: str,
    kernel: Any,
    pointers: dict[str, str],
    tile: tuple[int, int, int, int],
    more: dict[str, Any],
    even: bool,
    said: str = "",
) -> Job:
    m, n, k, warps = tile
    constants = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, **dict.fromkeys(ONE, 1), **more}
    numbers = {name: "i32" for name in kernel.arg_names if name not in pointers}
    at = tuple(name for name in (*pointers, *(SIZED if even else ())) if name in kernel.arg_names and name not in UNALIGNED)
    text = f"{m}x{n}x{k}, {warps} warps{said}{'' if even else ', ragged'}"
    return Job(release, kernel.__name__, kernel, {**pointers, **numbers}, constants, warps, 2, at, text)


UNALIGNED = ("b_bias_ptr", "topk_weights_ptr", "sorted_token_ids_ptr", "expert_ids_ptr", "num_tokens_post_padded_ptr")


def _block(release: str, kernel: Any, out: str, even: bool) -> Iterator[Job]:
    pointers = {"A": "*fp8e4nv", "B": "*fp8e4nv", "C": out, "As": "*fp32", "Bs": "*fp32"}
    for tile in VLLM_BLOCK_TILES:
        yield _job(release, kernel, pointers, tile, {"GROUP_SIZE_M": 32}, even)


def _scaled(release: str, kernel: Any, out: str, even: bool) -> Iterator[Job]:
    import triton.language as tl

    pointers = {
        "a_ptr": "*fp8e4nv",
        "b_ptr": "*fp8e4nv",
        "c_ptr": out,
        "scale_a_ptr": "*fp32",
        "scale_b_ptr": "*fp32",
        "bias_ptr": out,
    }
    for tile in VLLM_SCALED_TILES:
        more = {
            "ACCUMULATOR_DTYPE": tl.float32,
            "BLOCK_SIZE_SCALE_A": tile[0],
            "BLOCK_SIZE_SCALE_B": tile[1],
            "USE_TD": False,
            "B_T": False,
        }
        yield _job(release, kernel, pointers, tile, more, even)


def _vllm_experts(release: str, kernel: Any, out: str, compute: Any, even: bool) -> Iterator[Job]:
    """The expert kernel with FP8 weights and activations, block and per-tensor scales; releases differ in their arguments."""
    pointers = {
        "a_ptr": "*fp8e4nv",
        "b_ptr": "*fp8e4nv",
        "c_ptr": out,
        "a_scale_ptr": "*fp32",
        "b_scale_ptr": "*fp32",
        "b_bias_ptr": out,
    }
    pointers |= {"topk_weights_ptr": "*fp32"} | dict.fromkeys(UNALIGNED[2:], "*i32")
    flags = ("MUL_ROUTED_WEIGHT", "use_int8_w8a8", "use_int8_w8a16", "per_channel_quant", "HAS_BIAS", "SWAP_AB", "USE_TD")
    for tile in ((64, 128, 128, 4), (16, 64, 128, 4), (64, 64, 32, 4)):
        for group in (128, 0):
            if group and tile[2] > group:
                continue
            more = {"group_n": group, "group_k": group, "GROUP_SIZE_M": 32, "SPLIT_K": 1, "top_k": 8, "compute_type": compute}
            more |= {"use_fp8_w8a8": True, "naive_block_assignment": False, **dict.fromkeys(flags, False)}
            yield _job(release, kernel, pointers, tile, more, even, f", {'block' if group else 'tensor'} scale")
