"""Compile FP8 kernels with Intel's Triton compiler, on a machine without an Intel GPU, and say what became of their products.

    python scripts/intel_triton.py --json out.json                           every kernel and configuration of this project
    python scripts/intel_triton.py --vllm 0.32.0=FOLDER --vllm 0.21.0=FOLDER vLLM's own kernels too (FOLDER holds the package vllm)
    python scripts/intel_triton.py --architectures bmg_g21

Runs in an interpreter of its own, because triton-xpu and triton share an import name: triton-xpu, intel-sycl-rt (headers), setuptools.
torch is not needed. For each kernel it tells whether it lowers to SPIR-V, how many of its products are laid out for the matrix engine
(``#dpas``), which block loads its LLVM IR calls, and how large it is. All of it is what one compiler made; a newer one may differ, and
none of it says that a kernel runs, or how fast.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes.util
import json
import multiprocessing
import os
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURES = {
    # Names and values of sycl/ext/oneapi/experimental/device_architecture.def in intel-sycl-rt.
    "bmg_g21": 0x0000000500400400,
    "lnl_m": 0x0000000501000400,
    "pvc": 0x000000030F000700,
    "acm_g10": 0x000000030DC00800,
}
TITLES = {
    "bmg_g21": "Battlemage (B50, B60, B580)",
    "lnl_m": "Lunar Lake",
    "pvc": "Data Center GPU Max",
    "acm_g10": "Alchemist, dg2 (A770)",
}
BLOCK_LOADS = ("bmg_g21", "lnl_m", "pvc")


@dataclass
class Compiled:
    """What became of one kernel in one configuration on one architecture."""

    source: str
    """``xpufp8``, or a vLLM release."""
    kernel: str
    configuration: str
    architecture: str
    lowers: bool
    products: int = 0
    """tt.dot in the IR that is lowered."""
    dpas: int = 0
    """Those with the layout of the matrix engine."""
    scalar_fma: int = 0
    block_loads: int = 0
    """Calls of two-dimensional block reads in the LLVM IR."""
    prefetches: int = 0
    llvm_lines: int = 0
    spirv_bytes: int = 0
    threads: int = 0
    """Threads of a warp."""
    error: str = ""
    loads: list[str] = field(default_factory=list)
    """Names of the block reads."""


@dataclass
class Job:
    """One kernel to compile."""

    source: str
    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int
    aligned: tuple[str, ...]
    text: str


def bring_up() -> None:
    """Make the Intel backend loadable where there is no torch and no GPU.

    The backend asks torch whether an XPU is there, only to pick a compiler for its helper; a stand-in answers. The helper is C++ that is
    built as C, so the C++ library must be in the process before it is loaded.
    """
    if "torch" not in sys.modules:
        no = types.SimpleNamespace(is_available=lambda: False)
        stand_in: Any = types.ModuleType("torch")
        stand_in.xpu = stand_in.cuda = no
        stand_in.version = types.SimpleNamespace(hip=None, cuda=None)
        sys.modules["torch"] = stand_in
    os.environ.setdefault("SYCL_DISABLE_FSYCL_SYCLHPP_WARNING", "1")
    library = ctypes.util.find_library("stdc++")
    if library:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def properties(architecture: str) -> dict[str, Any]:
    """What torch would report for a device of an architecture; the compiler asks no driver."""
    return {
        "architecture": ARCHITECTURES[architecture],
        "driver_version": "1.6",
        "gpu_eu_count": 160,
        "gpu_subslice_count": 20,
        "has_atomic64": True,
        "has_bfloat16_conversions": True,
        "has_fp16": True,
        "has_fp64": True,
        "has_subgroup_2d_block_io": architecture in BLOCK_LOADS,
        "has_subgroup_matrix_multiply_accumulate": True,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": architecture in BLOCK_LOADS,
        "max_compute_units": 160,
        "max_num_sub_groups": 64,
        "max_work_group_size": 1024,
        "name": architecture,
        "platform_name": "Level-Zero",
        "sub_group_sizes": [8, 16, 32] if architecture == "acm_g10" else [16, 32],
        "vendor": "Intel",
        "version": "20.1.0",
    }


def compile_one(job: Job, architecture: str) -> Compiled:
    """Compile, and read the IR."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    result = Compiled(job.source, job.name, job.text, architecture, lowers=False)
    names = list(job.kernel.arg_names)
    signature = {name: "constexpr" if name in job.constants else job.signature[name] for name in names}
    constants = {(names.index(name),): value for name, value in job.constants.items() if name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in job.aligned}
    try:
        made = triton.compile(
            ASTSource(job.kernel, signature, constants, aligned),
            target=GPUTarget("xpu", properties(architecture), 32),
            options={"num_warps": job.warps, "num_stages": job.stages},
        )
    except Exception as error:  # noqa: BLE001 - what a compiler raises is the finding
        text = str(error).strip() or type(error).__name__
        result.error = (text.splitlines()[-1] if "\n" in text else text)[:160]
        return result
    return read(result, made.asm)


def read(result: Compiled, asm: Any) -> Compiled:
    """Fill in what the IR tells."""
    gpu, llvm = str(asm["ttgir"]), str(asm["llir"])
    layouts = set(re.findall(r"^(#\w+) = #triton_intel_gpu\.dpas<", gpu, re.MULTILINE))
    products = re.findall(r"tt\.dot .*->\s*tensor<[^>]*?(#\w+)>", gpu)
    result.lowers = bool(asm.get("spv"))
    result.products = len(products)
    result.dpas = sum(layout in layouts or layout == "#dpas" for layout in products)
    result.scalar_fma = llvm.count("fmuladd")
    calls = re.findall(r"call [^@\n]*@(\w*2d_block_\w+)\(", llvm)
    reads = [name for name in calls if "_read_" in name]
    result.block_loads, result.prefetches = len(reads), len(calls) - len(reads)
    result.loads = sorted({match.group(0) for name in reads if (match := re.search(r"\d+b_\d+r\d+x\d+c", name))})
    result.llvm_lines = llvm.count("\n")
    result.spirv_bytes = len(asm["spv"])
    threads = re.search(r'threads-per-warp"? = (\d+)', gpu)
    result.threads = int(threads.group(1)) if threads else 0
    return result


def _spec(n: int, k: int, tile: Any, columns: str, scale: str, how: str) -> dict[str, Any]:
    block = scale == "block"
    return {
        "BN": tile.n,
        "BK": tile.k,
        "SCALE": scale,
        "GN": 128 if block else 1,
        "GK": 128 if block else 1,
        "HOW": how,
        "COLUMNS": columns,
        "BIAS": True,
        "EVEN_N": n % tile.n == 0,
        "EVEN_K": k % tile.k == 0,
        "PLAIN": False,
    }


SCALES = ("block", "channel", "tensor")
DTYPES = (
    ("bf16", "bfloat16", "fp8e4nv", "float8_e4m3fn"),
    ("fp16", "float16", "fp8e4nv", "float8_e4m3fn"),
    ("bf16", "bfloat16", "fp8e5", "float8_e5m2"),
    ("fp16", "float16", "fp8e5", "float8_e5m2"),
)


def our_jobs(*, thorough: bool) -> Iterator[Job]:
    """Every kernel in every configuration that can be chosen on an XPU.

    Args:
        thorough: ragged sizes, careful widening and every scale layout for every tile; otherwise those of even sizes and blocks, and each
            of the rest once.
    """
    from xpufp8.runtime.triton_kernels import space
    from xpufp8.runtime.triton_kernels.grouped import w8a16_grouped
    from xpufp8.runtime.triton_kernels.large import fit_activations, w8a16_large, widen_weight
    from xpufp8.runtime.triton_kernels.small import w8a16_small

    for short, activation, fp8, weight in DTYPES:
        hows = {how for careful in (False, True) for how in space.ways("xpu", activation, weight, careful=careful)}
        usual = space.ways("xpu", activation, weight, careful=False)[0]
        first = (short, fp8) == ("bf16", "fp8e4nv")
        pointers = {
            "x_ptr": f"*{short}",
            "w_ptr": f"*{fp8}",
            "s_ptr": "*fp32",
            "b_ptr": f"*{short}",
            "o_ptr": f"*{short}",
            "part_ptr": "*fp32",
            "count_ptr": "*i32",
            "share_ptr": "*fp32",
            "order_ptr": "*i32",
            "owner_ptr": "*i32",
        }
        numbers = dict.fromkeys(
            (
                "M",
                "N",
                "K",
                "slots",
                "top_k",
                "split",
                "stride_xm",
                "stride_w",
                "stride_we",
                "stride_sn",
                "stride_s0",
                "stride_s1",
            ),
            "i32",
        )
        signature = {**pointers, **numbers}
        even = ("x_ptr", "w_ptr", "s_ptr", "b_ptr", "o_ptr", "N", "K", "stride_xm", "stride_w")
        ragged = even[:5]
        cases = [
            (how, columns, scale, n, k)
            for how in sorted(hows)
            for columns in ("block", "")
            for scale in SCALES
            for n, k in ((8192, 8192), (8208, 8200))
            if thorough
            or (how == usual and (scale, n) == ("block", 8192))
            or (how == usual and first and "block" in (scale, columns))
        ]
        for how, columns, scale, n, k in cases:
            aligned = even if n == 8192 else ragged
            order = "columns" if columns else "rows"
            said = f"{short} x {fp8}, {how}, {order}, {scale} scale{'' if n == 8192 else ', ragged'}"
            whole = thorough or (first and (scale, n) == ("block", 8192))
            for bucket in space.BUCKETS[:4] if whole else (16,):
                for tile in space.small("xpu", bucket, how):
                    constants = {
                        **_spec(n, k, tile, columns, scale, how),
                        "BM": tile.m,
                        "FIT": False,
                        "SWAP": tile.swap,
                        "STREAM": tile.stream,
                    }
                    text = f"{tile.m}x{tile.n}x{tile.k}, {tile.warps} warps{', stream' if tile.stream else ''}; {said}"
                    yield Job(
                        "xpufp8",
                        "w8a16_small",
                        w8a16_small,
                        signature,
                        constants,
                        tile.warps,
                        tile.stages,
                        (*aligned, "part_ptr", "count_ptr"),
                        text,
                    )
            for tile in space.large("xpu", how):
                constants = {**_spec(n, k, tile, columns, scale, how), "BM": tile.m, "GROUP": tile.group, "f_ptr": None}
                text = f"{tile.m}x{tile.n}x{tile.k}, {tile.warps} warps; {said}"
                yield Job("xpufp8", "w8a16_large", w8a16_large, signature, constants, tile.warps, tile.stages, aligned, text)
            if columns:
                continue
            for rows in (1, 64):
                for tile in space.experts("xpu", rows, how):
                    constants = {**_spec(n, k, tile, "", scale, how), "BM": tile.m, "FIT": False, "SHARES": True}
                    del constants["COLUMNS"]
                    text = f"{tile.m}x{tile.n}x{tile.k}, {tile.warps} warps; {said}"
                    at = (*(a for a in aligned if a != "b_ptr"), "order_ptr", "owner_ptr", *(("stride_we",) if n == 8192 else ()))
                    yield Job("xpufp8", "w8a16_grouped", w8a16_grouped, signature, constants, tile.warps, tile.stages, at, text)
        if first:
            constants = {"BN": 64, "BK": 128, "SCALE": "block", "GN": 128, "GK": 128}
            yield Job(
                "xpufp8",
                "widen_weight",
                widen_weight,
                signature,
                constants,
                4,
                2,
                ("w_ptr", "s_ptr", "o_ptr", "N", "K", "stride_w"),
                "64x128, 4 warps; bf16 from fp8e4nv, block scale",
            )
            constants = {"LIMIT": 16384.0, "POWER": True, "B": 4096}
            yield Job(
                "xpufp8",
                "fit_activations",
                fit_activations,
                {**signature, "q_ptr": "*fp16", "f_ptr": "*fp32"},
                constants,
                8,
                2,
                ("x_ptr", "q_ptr", "K", "stride_xm"),
                "rows of 4096, 8 warps; bf16 to fp16",
            )


VLLM_BLOCK_TILES = ((64, 128, 128, 4), (16, 64, 128, 4), (32, 64, 128, 4), (128, 128, 128, 8), (64, 64, 128, 4))
VLLM_SCALED_TILES = ((64, 64, 256, 4), (64, 128, 256, 4), (64, 128, 128, 4), (128, 128, 128, 4))


def vllm_jobs(release: str, folder: Path) -> Iterator[Job]:
    """VLLM's kernels of one release, at the tiles that it takes where it has no tuned file."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import triton.language as tl
    import vllm_triton

    for name, source in vllm_triton.sources(folder).items():
        kernel = getattr(vllm_triton.load(f"{name}_{release.replace('.', '_')}", source), name)
        arguments = set(kernel.arg_names)
        if name in ("_w8a8_triton_block_scaled_mm", "_w8a8_block_fp8_matmul"):
            pointers = {"A": "*fp8e4nv", "B": "*fp8e4nv", "C": "*bf16", "As": "*fp32", "Bs": "*fp32"}
            numbers = {a: "i32" for a in arguments if a not in pointers and not a.startswith(("BLOCK", "GROUP"))}
            for m, n, k, warps in VLLM_BLOCK_TILES:
                constants = {
                    "BLOCK_SIZE_M": m,
                    "BLOCK_SIZE_N": n,
                    "BLOCK_SIZE_K": k,
                    "GROUP_SIZE_M": 32,
                    "stride_ak": 1,
                    "stride_bk": 1,
                    "stride_cn": 1,
                }
                at = ("A", "B", "C", "As", "Bs", "N", "K", "stride_am", "stride_bn", "stride_cm")
                yield Job(release, name, kernel, {**pointers, **numbers}, constants, warps, 2, at, f"{m}x{n}x{k}, {warps} warps")
        elif name == "scaled_mm_kernel":
            pointers = {
                "a_ptr": "*fp8e4nv",
                "b_ptr": "*fp8e4nv",
                "c_ptr": "*bf16",
                "scale_a_ptr": "*fp32",
                "scale_b_ptr": "*fp32",
                "bias_ptr": "*bf16",
            }
            numbers = {a: "i32" for a in arguments if a not in pointers}
            for m, n, k, warps in VLLM_SCALED_TILES:
                constants = {
                    "ACCUMULATOR_DTYPE": tl.float32,
                    "BLOCK_SIZE_M": m,
                    "BLOCK_SIZE_N": n,
                    "BLOCK_SIZE_K": k,
                    "BLOCK_SIZE_SCALE_A": m,
                    "BLOCK_SIZE_SCALE_B": n,
                    "stride_ak": 1,
                    "stride_bk": 1,
                    "stride_cn": 1,
                    "USE_TD": False,
                    "B_T": False,
                }
                at = tuple(a for a in (*pointers, "N", "K", "stride_am", "stride_bn", "stride_cm"))
                yield Job(release, name, kernel, {**pointers, **numbers}, constants, warps, 2, at, f"{m}x{n}x{k}, {warps} warps")
        elif name == "fused_moe_kernel":
            yield from _vllm_experts(release, kernel, tl.bfloat16)


def _vllm_experts(release: str, kernel: Any, dtype: Any) -> Iterator[Job]:
    """The expert kernel with FP8 weights and activations, block and per-tensor scales; releases differ in their arguments."""
    pointers = {
        "a_ptr": "*fp8e4nv",
        "b_ptr": "*fp8e4nv",
        "c_ptr": "*bf16",
        "a_scale_ptr": "*fp32",
        "b_scale_ptr": "*fp32",
        "b_bias_ptr": "*bf16",
        "topk_weights_ptr": "*fp32",
        "sorted_token_ids_ptr": "*i32",
        "expert_ids_ptr": "*i32",
        "num_tokens_post_padded_ptr": "*i32",
    }
    numbers = {name: "i32" for name in kernel.arg_names if name not in pointers}
    for m, n, k, warps in ((64, 128, 128, 4), (16, 64, 128, 4), (64, 64, 32, 4)):
        for group in (128, 0):
            if group and k > group:
                continue
            constants = {
                "group_n": group,
                "group_k": group,
                "BLOCK_SIZE_M": m,
                "BLOCK_SIZE_N": n,
                "BLOCK_SIZE_K": k,
                "GROUP_SIZE_M": 32,
                "SPLIT_K": 1,
                "MUL_ROUTED_WEIGHT": False,
                "top_k": 8,
                "compute_type": dtype,
                "use_fp8_w8a8": True,
                "use_int8_w8a8": False,
                "use_int8_w8a16": False,
                "per_channel_quant": False,
                "HAS_BIAS": False,
                "SWAP_AB": False,
                "USE_TD": False,
                "naive_block_assignment": False,
                "stride_ak": 1,
                "stride_bk": 1,
                "stride_cn": 1,
            }
            at = (
                "a_ptr",
                "b_ptr",
                "c_ptr",
                "a_scale_ptr",
                "b_scale_ptr",
                "N",
                "K",
                "stride_am",
                "stride_bn",
                "stride_be",
                "stride_cm",
            )
            text = f"{m}x{n}x{k}, {warps} warps, {'block' if group else 'tensor'} scale"
            yield Job(release, "fused_moe_kernel", kernel, {**pointers, **numbers}, constants, warps, 2, at, text)


def table(results: list[Compiled]) -> str:
    """Markdown, one line for a kernel and architecture: ranges over its configurations."""
    lines = [
        "| source | kernel | architecture | lowers | products on #dpas | scalar fma | block reads | LLVM lines | SPIR-V kB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str, str], list[Compiled]] = {}
    for one in results:
        order = one.kernel + (
            " (columns)" if ", columns," in one.configuration else " (rows)" if ", rows," in one.configuration else ""
        )
        groups.setdefault((one.source, order, one.architecture), []).append(one)

    def span(values: list[int]) -> str:
        return "0" if not values else str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"

    for (source, kernel, architecture), group in groups.items():
        good = [one for one in group if one.lowers]
        products, dpas = sum(one.products for one in good), sum(one.dpas for one in good)
        engine = f"{dpas} of {products}" if products else "no products"
        lines.append(
            f"| {source} | `{kernel}` | {architecture} | {len(good)} of {len(group)} | {engine} "
            f"| {span([one.scalar_fma for one in good])} | {span([one.block_loads for one in good])} "
            f"| {span([one.llvm_lines for one in good])} | {span([one.spirv_bytes // 1000 for one in good])} |"
        )
    return "\n".join(lines)


_work: list[tuple[Job, str]] = []


def _compile_at(place: int) -> Compiled:
    return compile_one(*_work[place])


def main() -> int:
    """Compile everything asked for; exit 1 if something of this project that can be chosen on bmg_g21 misses the matrix engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--architectures", default=",".join(ARCHITECTURES), help="of " + ", ".join(f"{a} ({t})" for a, t in TITLES.items())
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations side by side")
    parser.add_argument(
        "--thorough", action="store_true", help="every tile with every scale layout, ragged sizes and careful widening"
    )
    parser.add_argument(
        "--vllm", action="append", default=[], metavar="RELEASE=FOLDER", help="vLLM's own kernels of an unpacked release"
    )
    parser.add_argument("--json", type=Path, help="write every result there")
    args = parser.parse_args()
    bring_up()
    sys.path.insert(0, str(ROOT))
    import triton

    jobs = list(our_jobs(thorough=args.thorough))
    for entry in args.vllm:
        release, _, folder = entry.partition("=")
        jobs += vllm_jobs(release, Path(folder))
    _work[:] = [(job, architecture) for architecture in args.architectures.split(",") for job in jobs]
    # Forked, because jitted functions cannot be sent to another process.
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("fork")) as pool:
        results = []
        for one in pool.map(_compile_at, range(len(_work)), chunksize=4):
            results.append(one)
            if not one.lowers or one.dpas < one.products:
                why = one.error or f"{one.products - one.dpas} of {one.products} products miss the matrix engine"
                print(f"{one.source} {one.kernel} {one.architecture}: {one.configuration}: {why}", file=sys.stderr, flush=True)
    print(f"triton-xpu {triton.__version__}, {len(results)} compilations\n\n{table(results)}")
    if args.json:
        args.json.write_text(json.dumps({"compiler": triton.__version__, "results": [asdict(one) for one in results]}, indent=1))
    bad = [
        one
        for one in results
        if one.source == "xpufp8" and one.architecture == "bmg_g21" and (not one.lowers or one.dpas < one.products)
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
