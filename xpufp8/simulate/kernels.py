"""The kernel package (vllm-xpu-kernels) without its device code: the same modules, the same op schemas, nothing that computes.

With the wheel installed its Python code runs as it is and only its shared objects are replaced, by the schemas they hold.
Without it a bundled catalogue of the release gives both. Ops that ask about the device answer from the profile; ops that
compute refuse outside tracing. Only a CPU kernel is registered for the refusal, so that under fake tensors an op without a fake
is as unknown to torch as it is on the card.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from xpufp8.simulate.profiles import Profile

if TYPE_CHECKING:
    from probes.op_schemas import Catalogue

PACKAGE = "vllm_xpu_kernels"
DISTRIBUTION = "vllm-xpu-kernels"
VARIABLE = "XPUFP8_SIMULATE_KERNELS"
"""Release whose catalogue to use, or the path of a catalogue file; without it the installed wheel, then the newest catalogue."""


class SimulationError(RuntimeError):
    """A kernel was asked to compute where only its schema exists."""


class State:
    """What this process put up; read by the trace."""

    catalogue: Catalogue | None = None
    origin: Literal["installed", "catalogue", "none"] = "none"
    libraries: list[Any] = []  # noqa: RUF012 - torch.library.Library objects must outlive the process's use of their ops
    defined: set[str] = set()  # noqa: RUF012 - one process, one set


def installed() -> str | None:
    """Folder of an installed kernel package, or None. Nothing is imported."""
    spec = importlib.machinery.PathFinder.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    return places[0] if places else None


def read_installed(folder: str) -> Catalogue:
    """Schemas of an installed wheel, from its shared objects, which are read and not loaded."""
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    from probes.op_libraries import read_library
    from probes.op_schemas import Catalogue

    root = Path(folder)
    try:
        release = version(DISTRIBUTION)
    except PackageNotFoundError:
        infos = sorted(root.parent.glob("vllm_xpu_kernels-*.dist-info"))
        release = infos[-1].name.split("-")[1] if infos else "unknown"
    ops = []
    modules = {}
    for file in sorted(root.glob("*.abi3.so")):
        modules[f"{PACKAGE}.{file.name.split('.')[0]}"] = f"{PACKAGE}/{file.name}"
        ops += read_library(file)
    return Catalogue(DISTRIBUTION, release, f"installed in {folder}", "", ops=ops, modules=modules)


def choose() -> tuple[Catalogue | None, Literal["installed", "catalogue", "none"]]:
    """The catalogue to simulate with and where it came from."""
    from probes.op_schemas import best_catalogue, load_catalogue

    wanted = os.environ.get(VARIABLE, "")
    if wanted == "none":
        return None, "none"
    if wanted.endswith(".json"):
        return load_catalogue(wanted), "catalogue"
    if wanted:
        return load_catalogue(f"{DISTRIBUTION}-{wanted}"), "catalogue"
    folder = installed()
    if folder:
        return read_installed(folder), "installed"
    found = best_catalogue(DISTRIBUTION)
    return found, "catalogue" if found else "none"


def put_up(profile: Profile) -> None:
    """Install the import hook for the kernel package and remember what it stands for."""
    from xpufp8.simulate import ipex

    if ipex.wanted() and (extension := ipex.choose()) is not None:
        State.catalogue, State.origin = extension, "catalogue"
        sys.meta_path.insert(0, ipex.Finder(extension, profile))
        return
    catalogue, origin = choose()
    State.catalogue, State.origin = catalogue, origin
    if catalogue is not None:
        sys.meta_path.insert(0, Finder(catalogue, profile, stand_in_python=origin != "installed"))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the extension modules of the kernel package, and its Python modules too where the wheel is absent."""

    def __init__(self, catalogue: Catalogue, profile: Profile, *, stand_in_python: bool) -> None:
        self.catalogue = catalogue
        self.profile = profile
        self.python = set(catalogue.python) | {PACKAGE} if stand_in_python else set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> Any:
        """Answer for the modules stood in for, and for nothing else."""
        if name in self.catalogue.modules or name in self.python:
            package = name == PACKAGE or any(other.startswith(name + ".") for other in self.python)
            return importlib.machinery.ModuleSpec(name, self, origin="simulated by xpufp8", is_package=package)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Use Python's ordinary module object."""
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Define an extension module's ops, or fill a Python module with stand-ins of its public names."""
        name = module.__name__
        if name in self.catalogue.modules:
            define(self.catalogue, self.profile, self.catalogue.modules[name])
            return
        from xpufp8.simulate import kernel_functions

        for needed in self.catalogue.modules:  # its Python modules import the extension modules they call
            if needed.rsplit(".", 1)[1].startswith(("_C", "_xpu_C", "_moe_C", "_vllm_fa")):
                importlib.import_module(needed)
        kernel_functions.fill(module, self.catalogue.python.get(name, []))


def define(catalogue: Catalogue, profile: Profile, library: str) -> None:
    """Define the ops that one shared object of the catalogue registers."""
    import torch

    fragments: dict[str, Any] = {}
    for op in catalogue.ops:
        if op.library != library or op.qualified in State.defined:
            continue
        fragment = fragments.get(op.namespace)
        if fragment is None:
            fragment = fragments[op.namespace] = torch.library.Library(op.namespace, "FRAGMENT")
            State.libraries.append(fragment)
        schema = op.parsed
        fragment.define(schema.text)
        State.defined.add(op.qualified)
        answer = _device_answer(schema.name, profile)
        if answer is not None:
            fragment.impl(schema.full_name, answer, "CompositeExplicitAutograd")
        elif any(argument.is_tensor for argument in schema.arguments):
            fragment.impl(schema.full_name, _refusal(op.qualified), "CPU")


def _device_answer(name: str, profile: Profile) -> Any:
    if name in profile.queries:
        return lambda *args, **kwargs: profile.queries[name]
    if name == "getMemoryInfo":
        return lambda *args, **kwargs: (profile.memory_bytes, profile.memory_bytes)
    if name == "get_onednn_version":
        return lambda *args, **kwargs: "simulated"
    return None


def _refusal(op: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise SimulationError(
            f"{op} was asked to compute, but this XPU is simulated: only the op's schema exists here. Trace it under fake tensors."
        )

    return refuse
