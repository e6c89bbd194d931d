"""Compile FP8 kernels with Intel's Triton compiler, on a machine without an Intel GPU, and say what became of their products.

    python scripts/intel_triton.py --json out.json                           every kernel and configuration of this project
    python scripts/intel_triton.py --vllm 0.32.0=FOLDER --vllm 0.21.0=FOLDER vLLM's own kernels too (FOLDER is the package vllm or holds it)
    python scripts/intel_triton.py --architectures bmg_g21

Runs in an interpreter of its own (``probes.triton_compiler.py``). For each kernel it tells whether it lowers to SPIR-V, how many of its
products are laid out for the matrix engine (``#dpas``), which block loads its LLVM IR calls, and how large it is.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from probes.triton_compiler import ARCHITECTURES, TITLES, Compiled, Job, bring_up, compile_one  # noqa: E402
from probes.triton_jobs import our_jobs  # noqa: E402 - found through the path above
from probes.triton_vllm import vllm_jobs  # noqa: E402


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
    parser.add_argument("--only-vllm", action="store_true", help="leave this project's own kernels out")
    parser.add_argument("--json", type=Path, help="write every result there")
    args = parser.parse_args()
    bring_up()
    import triton

    jobs = [] if args.only_vllm else list(our_jobs(thorough=args.thorough))
    for entry in args.vllm:
        release, _, folder = entry.partition("=")
        package = Path(folder) / "vllm"
        theirs = list(vllm_jobs(release, package if package.is_dir() else Path(folder)))
        if not theirs:
            parser.error(f"--vllm {entry}: no Triton FP8 kernel of vLLM is there. FOLDER is the package vllm, or holds it.")
        jobs += theirs
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
