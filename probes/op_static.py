"""Ops of the kernel packages as their files describe them, for a target where they do not load.

Schemas come from the shared objects of the installed wheel, else from a bundled catalogue. What is registered for them on the Python
side is read from the sources: a fake is registered by name, ``register_fake("_xpu_C::fp8_gemm")``, so the text says which have one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from probes.facts import Observation, OpFact, Tracing
from probes.op_schemas import Catalogue, OpSchema, Schema, best_catalogue, load_catalogue

PACKAGES = {"vllm_xpu_kernels": "vllm-xpu-kernels", "intel_extension_for_pytorch": "intel-extension-for-pytorch"}
"""Import packages with device kernels for XPU, and their distributions."""

COMPOSITE = "CompositeImplicitAutograd"
"""Key of a kernel that was registered without one: PyTorch runs it, whatever the device, where it would trace the op."""

PYTHON_SIDE = ("vllm/_xpu_ops.py", "vllm/_ipex_ops.py", "vllm/_custom_ops.py", "vllm_xpu_kernels", "intel_extension_for_pytorch")
"""Files and folders, under a folder of packages, whose Python code may register fakes for the kernels."""

_FAKE = re.compile(r"""\b(?:register_fake|impl_abstract)\(\s*["']([\w.]+::[\w.]+)["']""")


@dataclass
class StaticOps:
    """Op schemas found without loading anything, and where."""

    ops: list[OpSchema] = field(default_factory=list)
    catalogues: list[Catalogue] = field(default_factory=list)
    """Catalogues that stood in for packages whose own files gave no schema."""


def find(package: str) -> Path | None:
    """Folder of an installed package, found without importing it."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


def installed_version(distribution: str) -> str | None:
    """Version of a distribution by its metadata, None when there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def static_ops(catalogue: str | None = None) -> StaticOps:
    """Schemas of the installed kernel packages.

    A package that is installed but whose schemas do not stand in its files (IPEX builds them in C++) is answered by the catalogue of
    its release or the nearest one. A package that is not installed has no ops, unless ``catalogue`` names what to take for it.
    """
    found = StaticOps()
    for package, distribution in PACKAGES.items():
        folder = find(package)
        if folder is None:
            continue
        ops = _read_folder(folder)
        version = installed_version(distribution)
        if ops:
            ops = with_keys(ops, distribution, version)
        elif best := best_catalogue(distribution, version):
            ops = best.ops
            found.catalogues.append(best)
        found.ops += ops
    if catalogue is not None:
        named = load_catalogue(catalogue)
        found.catalogues.append(named)
        known = {(op.namespace, op.schema) for op in found.ops}
        found.ops += [op for op in named.ops if (op.namespace, op.schema) not in known]
    return found


def with_keys(ops: list[OpSchema], distribution: str, version: str | None) -> list[OpSchema]:
    """Ops read from shared objects, with the dispatch keys that the bundled catalogues know of them.

    A neighbouring release will do: a kernel keeps its device while its schema stays the same.
    """
    best = best_catalogue(distribution, version)
    keys = {(op.namespace, op.schema): op.dispatch for op in best.ops} if best else {}
    return [op if op.dispatch else replace(op, dispatch=keys.get((op.namespace, op.schema), [])) for op in ops]


def _read_folder(folder: Path) -> list[OpSchema]:
    try:
        from probes.op_libraries import read_library

        found = [op for path in sorted(folder.rglob("*.so")) for op in read_library(path)]
        return [replace(op, library=str(Path(op.library).relative_to(folder.parent))) for op in found]
    except (ImportError, ValueError, OSError):  # no ELF reader beside us, or files that are none
        return []


def python_fakes(site: Path | None) -> set[str]:
    """Names of the ops for which the Python code of vLLM and of the kernel packages registers a fake."""
    found: set[str] = set()
    for name in PYTHON_SIDE if site else ():
        place = (site or Path()) / name
        for path in [place] if place.suffix == ".py" else sorted(place.rglob("*.py")):
            with contextlib.suppress(OSError):
                found.update(_FAKE.findall(path.read_text(encoding="utf-8", errors="replace")))
    return found


def judge(op: OpSchema, schema: Schema, fakes: set[str]) -> tuple[Tracing, Observation]:
    """Whether an op traces, as far as files can tell.

    Without the dispatch keys that the library's own sources name, an op without a Python fake is undetermined: its C++ side may
    register a Meta kernel or a composite one.
    """
    if op.qualified in fakes:
        return "fake", "pass"
    if COMPOSITE in op.dispatch:
        return "composite", "unknown"
    if "Meta" in op.dispatch:
        return "meta", "pass"
    if schema.mutates and not schema.returns:
        return "trivial", "pass"
    return ("none", "fail") if op.dispatch else ("undetermined", "unknown")


def static_facts(found: StaticOps, known: set[str], site: Path | None) -> list[OpFact]:
    """Facts of the ops that are not ``known`` to torch's dispatcher."""
    fakes = python_fakes(site)
    facts = {}
    for op in found.ops:
        schema = op.parsed
        if op.qualified in known or op.qualified in facts:
            continue
        tracing, traces = judge(op, schema, fakes)
        facts[op.qualified] = OpFact(
            namespace=op.namespace,
            name=schema.full_name,
            schema=f"{op.namespace}::{schema.text}",
            mode="static",
            origin=op.library,
            tracing=tracing,
            traces=traces,
            returns_tensor=schema.returns_tensor,
            dispatch_keys=list(op.dispatch),
            functional=not schema.mutates,
        )
    return list(facts.values())
