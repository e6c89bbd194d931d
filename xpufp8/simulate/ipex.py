"""Intel Extension for PyTorch without its device code: its serving ops by schema, its Python names as placeholders.

vLLM up to 0.14 serves XPU through it (``vllm/_ipex_ops.py``). Its ops are defined from a bundled catalogue when the package is first
imported, and have no fakes, as in the package itself. Of its Python only what a trace without torch.compile calls has a body; the
rest has to be named by vLLM, not to run.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpufp8.simulate.profiles import Profile

if TYPE_CHECKING:
    from probes.op_schemas import Catalogue

PACKAGE = "intel_extension_for_pytorch"
DISTRIBUTION = "intel-extension-for-pytorch"
FUNCTIONAL = f"{PACKAGE}.llm.functional"
VARIABLE = "XPUFP8_SIMULATE_IPEX"
"""Release whose catalogue to use (``2.8.10+xpu``); the newest one without it."""


def wanted() -> bool:
    """True when the vLLM of this interpreter serves XPU through the extension and the extension is not installed."""
    spec = importlib.machinery.PathFinder.find_spec("vllm")
    places = list(spec.submodule_search_locations or []) if spec else []
    through = any((Path(place) / "_ipex_ops.py").exists() for place in places)
    return through and importlib.machinery.PathFinder.find_spec(PACKAGE) is None


def choose() -> Catalogue | None:
    """The catalogue of the release asked for, else the newest; None when there is none."""
    from probes.op_schemas import best_catalogue, load_catalogue

    release = os.environ.get(VARIABLE, "")
    return load_catalogue(f"{DISTRIBUTION}-{release}") if release else best_catalogue(DISTRIBUTION)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the package and every module below it."""

    def __init__(self, catalogue: Catalogue, profile: Profile) -> None:
        self.catalogue = catalogue
        self.profile = profile

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Answer for the package alone."""
        if name.split(".")[0] != PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin="simulated by xpufp8", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Use Python's ordinary module object."""
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Define the ops with the package itself; let any public name be a placeholder."""
        from xpufp8.simulate import ipex_functions, kernels
        from xpufp8.simulate.torchvision_ops import placeholder

        if module.__name__ == PACKAGE:
            for library in sorted({op.library for op in self.catalogue.ops}):
                kernels.define(self.catalogue, self.profile, library)
            module.__version__ = self.catalogue.version  # type: ignore[attr-defined]  # modules carry whatever they are given
        if module.__name__ == FUNCTIONAL:
            vars(module).update(ipex_functions.FUNCTIONAL)

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if f"{FUNCTIONAL}.".startswith(f"{module.__name__}.{name}."):  # read as attributes, without an import of their own
                return importlib.import_module(f"{module.__name__}.{name}")
            return placeholder(f"{module.__name__}.{name}", PACKAGE)

        module.__getattr__ = missing  # type: ignore[method-assign]  # PEP 562
