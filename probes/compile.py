"""Probe ``compile``: torch.compile on the model's FP8 linear, norm, activation and attention, each stage apart.

The stages are those in which reports fail: Dynamo's trace (whole graph, as vLLM demands), AOT, Inductor's code generation with
its compilers, autotuning, the first run (also against eager), graph capture. Where one fails, settings that avoid just that
stage are tried, cheapest first.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from probes.compile_stages import Attempt, avoid, take
from probes.device_attention import attention
from probes.device_facts import CompileFacts, CompileSubjectFact
from probes.device_layers import Bench, bench, default_dtype, schemes, unknown_run
from probes.device_operands import activations, make
from probes.device_shapes import ALONE, block_size
from probes.protocol import Context
from probes.triton_lowering import lower

ROWS = 16


def observe(context: Context) -> CompileFacts:
    """Stages of the model's parts; the parts one by one only where the whole fails."""
    dtype = context.options.get("dtype") or "bfloat16"
    if context.simulated:
        return _simulated(context, dtype)
    folder, why = _cache_folder()
    scratch = tempfile.mkdtemp(prefix="xpufp8-compile-", dir=folder if why is None else None)
    # Where vLLM puts Inductor's and Triton's files: below its own cache folder, and nothing there from an earlier run.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch
    os.environ["TRITON_CACHE_DIR"] = str(Path(scratch) / "triton")
    try:
        with bench(context) as made:
            compiler, trouble = _compiler()
            version, backends = _triton()
            with ExitStack() as stack:
                backend, notes = _with_attention(made, dtype, stack)
                subjects = _subjects(made, dtype, backend)
            run = replace(made.run, notes=[*made.run.notes, *notes])
            return CompileFacts(run, dtype, str(folder), why, compiler, trouble, version, backends, subjects)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _simulated(context: Context, dtype: str) -> CompileFacts:
    """Nothing runs; where Intel's Triton compiler is at hand, the Triton kernels of the plan are compiled."""
    run = unknown_run(context, "code generation", "graph capture", "whether compiled code is right")
    python = context.options.get("triton_xpu")
    if not python:
        return CompileFacts(run, dtype)
    lowered, notes, why = lower(context, dtype, str(python))
    return CompileFacts(replace(run, notes=notes), dtype, lowered=lowered, lowering_error=why)


def _cache_folder() -> tuple[Path, str | None]:
    """VLLM's folder for compiled code and why it cannot be written, None if it can."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(os.environ.get("VLLM_CACHE_ROOT") or Path(base) / "vllm").expanduser()
    folder = root / "torch_compile_cache"
    created: list[Path] = []
    try:
        for part in reversed([folder, *folder.parents]):
            if not part.exists():
                part.mkdir()
                created.append(part)
        handle, name = tempfile.mkstemp(dir=folder)
        os.close(handle)
        Path(name).unlink()
    except OSError as error:
        for part in reversed(created):
            with suppress(OSError):
                part.rmdir()
        return folder, f"{type(error).__name__}: {error.strerror or error}: {error.filename}"
    return folder, None


def _compiler() -> tuple[str | None, str | None]:
    """The C++ compiler that Inductor would call, or what it says when it finds none."""
    from torch._inductor import cpp_builder

    try:
        found = cpp_builder.get_cpp_compiler()
    except Exception as error:  # noqa: BLE001 - its complaint is the answer
        return None, str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return str(found), None


def _triton() -> tuple[str | None, list[str]]:
    """Version and backends of the Triton that torch would use."""
    if importlib.util.find_spec("triton") is None:
        return None, []
    try:
        import triton
        from triton.backends import backends
    except Exception as error:  # noqa: BLE001 - a broken Triton is an answer
        return f"not importable ({type(error).__name__}: {error})"[:200], []
    return str(triton.__version__), sorted(backends)


def _with_attention(made: Bench, dtype: str, stack: ExitStack) -> tuple[tuple[str, Any, str | None], list[str]]:
    """The model's attention as a part, and a note where torch's own stands for it."""
    module, backend, why = attention(made, dtype, ROWS, ALONE[1], stack)
    note = f"attention is torch's own (scaled_dot_product_attention), because vLLM's layer was not made alone: {why}"
    return ("attention", module, backend), [] if backend is not None else [note]


def _subjects(made: Bench, dtype: str, attention_part: tuple[str, Any, str | None]) -> list[CompileSubjectFact]:
    """The whole of a layer's parts; apart where it fails."""
    parts = [*_parts(made, dtype), attention_part]
    whole = _run(
        made, Attempt("layer", _chain([p for _, p, _ in parts]), _input(made, dtype)), " + ".join(n for n, _, _ in parts)
    )
    kernels = [k for _, _, k in parts if k]
    whole = replace(whole, kernel=", ".join(kernels) or None)
    if all(stage.observation != "fail" for stage in whole.stages):
        return [whole]
    alone = [replace(_run(made, Attempt(name, part, _input(made, dtype)), name), kernel=k) for name, part, k in parts]
    failed = [one for one in alone if any(stage.observation == "fail" for stage in one.stages)]
    return failed or [whole]


def layer_module(made: Bench, dtype: str) -> Any:
    """The parts of one layer as one module for ``[M, 384]``, or None where there is no selected kernel."""
    parts = _parts(made, dtype)
    return _chain([module for _, module, _ in parts]) if any(kernel for _, _, kernel in parts) else None


def _run(made: Bench, attempt: Attempt, name: str) -> CompileSubjectFact:
    ops, stages = take(attempt, made.device)
    avoided = avoid(attempt, made.device, stages) if any(stage.observation == "fail" for stage in stages) else []
    return CompileSubjectFact(name, None, ops, stages, avoided)


def _input(made: Bench, dtype: str) -> Any:
    import torch

    return activations(ROWS, ALONE[1], getattr(torch, dtype)).to(made.device)


def _chain(parts: list[Any]) -> Any:
    import torch

    class Chain(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(parts)

        def forward(self, x: Any) -> Any:
            # Every part takes the same input, so that each shape is known; their sums make one graph of all.
            return torch.cat([part(x) for part in self.parts], dim=-1)

    return Chain()


def _parts(made: Bench, dtype: str) -> list[tuple[str, Any, str | None]]:
    """(name, module, kernel): torch's own arithmetic, norm and activation of vLLM, and the selected linear kernels."""
    import torch

    n, k = ALONE
    found: list[tuple[str, Any, str | None]] = []

    class Bare(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.gelu(x * 1.5 + 0.25)

    found.append(("torch", Bare(), None))
    if made.tables is not None:
        found += _vllm_parts(made, dtype, k)
    for scheme in schemes(made.context):
        for built in made.build(make(scheme, n, k, block=block_size(made.context)), dtype):
            if built.module is not None:
                found.append((f"linear {scheme.name}", built.module, built.kernel))
                break
    return found


def _vllm_parts(made: Bench, dtype: str, size: int) -> list[tuple[str, Any, str | None]]:
    """RMSNorm and SiluAndMul as this vLLM builds them for the platform."""
    try:
        from vllm.model_executor.layers.activation import SiluAndMul
        from vllm.model_executor.layers.layernorm import RMSNorm

        with default_dtype(dtype), made.device:
            return [("norm", RMSNorm(size), None), ("activation", SiluAndMul(), None)]
    except Exception:  # noqa: BLE001 - other releases build them in other ways; the linear kernels are what matters
        return []
