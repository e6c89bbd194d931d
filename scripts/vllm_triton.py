"""vLLM's own Triton FP8 kernels, taken out of its source without importing vLLM.

vLLM cannot be imported beside another Triton, nor where its compiled parts are missing, but a Triton kernel is only a function in a
file. Each is found by name wherever a release keeps it and written to a module of its own.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

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
