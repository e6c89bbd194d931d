"""Imports what registers vLLM's custom ops, and watches which shared object or module registers which.

Loading is where op libraries fail (a missing libsycl, another torch's ABI), and vLLM swallows some of these failures with a log
line. Here each is kept with its exception, whoever caught it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probes.facts import ErrorFact, OpLibraryFact
from probes.op_tracing import op_names
from probes.protocol import Context, describe_error

OP_PACKAGES = ("vllm", "vllm_xpu_kernels", "intel_extension_for_pytorch", "vllm_kernels")
"""Packages whose extension modules are op libraries; others (numpy, transformers) load extensions that are none of our question."""

KERNEL_MODULES: dict[str, tuple[str, ...]] = {
    "xpu": ("intel_extension_for_pytorch", "vllm_xpu_kernels._C", "vllm_xpu_kernels._moe_C", "vllm_xpu_kernels._xpu_C",
            "vllm_xpu_kernels._vllm_fa2_C"),
    "cpu": (),
    "cuda": (),
}  # fmt: skip
"""Packages and extension modules with device kernels that vLLM imports by name, by device. Those of vLLM itself are loaded by its
platform (``current_platform.import_kernels``), which picks among builds for several CPUs; importing one by name can be fatal."""

OP_MODULES: dict[str, tuple[str, ...]] = {
    "xpu": ("vllm._ipex_ops", "vllm._xpu_ops", "vllm._custom_ops"),
    "cpu": ("vllm._custom_ops",),
    "cuda": ("vllm._custom_ops",),
}
"""vLLM's own Python modules that wrap the kernels and register their fakes; which of them exist depends on the release."""

_OTHER_DEVICES = {
    "xpu": {"cpu", "cuda", "nvidia", "rocm", "amd", "aiter", "cutedsl", "cutlass", "flashinfer", "helion", "rdna", "flydsl",
            "tilelang", "tpu"},
    "cpu": {"xpu", "cuda", "nvidia", "rocm", "amd", "aiter", "cutedsl", "cutlass", "flashinfer", "helion", "rdna", "flydsl",
            "tilelang", "tpu"},
    "cuda": {"xpu", "cpu", "rocm", "amd", "aiter", "rdna", "flydsl", "tpu"},
}  # fmt: skip
"""Words in a module's path that say it is for another device: a process on this one never imports it, so its ops do not count."""

_HINTS = (b"custom_op", b"register_fake", b"impl_abstract", b"torch.library", b"triton_op", b"CustomOp")
_REGISTERS = re.compile(
    rb"^[^#\n]*\b(?:direct_register_custom_op|torch\.library\.(?:custom_op|triton_op|Library|register_fake|define|impl)|"
    rb"register_fake|impl_abstract|CustomOp\.register_op)\s*\(",
    re.MULTILINE,
)


@dataclass
class Registrations:
    """What was loaded and what each load registered."""

    libraries: dict[str, OpLibraryFact] = field(default_factory=dict)
    """By module name or path, in order of loading."""
    origins: dict[str, str] = field(default_factory=dict)
    """Op to the shared object (its module name) whose loading registered it."""

    def note(self, name: str, path: str | None, error: BaseException | ErrorFact | None, *, loaded: bool) -> None:
        """Record a load; a later success replaces a failure, never the other way round."""
        known = self.libraries.get(name)
        if known is None or not known.loaded:
            fact = describe_error(error) if isinstance(error, BaseException) else error
            self.libraries[name] = OpLibraryFact(name, path, loaded, fact)


@contextlib.contextmanager
def watched(registrations: Registrations, packages: Iterable[str] = OP_PACKAGES) -> Iterator[None]:
    """While it lasts, note each ``torch.ops.load_library`` and each extension module of the packages, with the ops that appear."""
    import torch

    packages = frozenset(packages)

    create = importlib.machinery.ExtensionFileLoader.create_module
    load = torch.ops.load_library

    def watch(name: str, path: str | None, call: Any) -> Any:
        before = op_names()
        error: Exception | None = None
        try:
            return call()
        except Exception as exc:
            error = exc
            raise
        finally:
            new = op_names() - before
            registrations.origins.update(dict.fromkeys(new, name))
            # vLLM's CPU build is one module under three file names: the load ends in an ImportError after its ops are in.
            registrations.note(name, path, None if new else error, loaded=bool(new) or error is None)

    def create_module(self: Any, spec: Any) -> Any:
        if spec.name.split(".")[0] not in packages:
            return create(self, spec)
        return watch(spec.name, spec.origin, lambda: create(self, spec))

    def load_library(path: Any) -> Any:
        return watch(str(path), str(path), lambda: load(path))

    importlib.machinery.ExtensionFileLoader.create_module = create_module  # type: ignore[method-assign]  # restored below
    torch.ops.load_library = load_library
    try:
        yield
    finally:
        importlib.machinery.ExtensionFileLoader.create_module = create  # type: ignore[method-assign]  # its own again
        torch.ops.load_library = load


def register_everything(context: Context, registrations: Registrations) -> None:
    """Import kernels, vLLM's wrappers, the modules of vLLM that register ops, and what ``options["modules"]`` names; then make
    the repairs that ``XPUFP8_APPLY`` lists.

    ``options["vllm"]`` false leaves vLLM and its kernels out.
    """
    if context.options.get("vllm", True):
        device = "xpu" if context.simulated else context.device.split(":")[0]
        # Named kernel modules come first, so that each failure is its own, not the platform's. A simulated XPU is put up when
        # vLLM asks for its platform, so there they come after.
        steps = [*([] if context.simulated else KERNEL_MODULES.get(device, ())), "", *KERNEL_MODULES.get(device, ())]
        for step in [*dict.fromkeys(steps), *OP_MODULES.get(device, ())]:
            if step == "":
                attempt("vllm.platforms", registrations, lambda: _platform_kernels(device))
            elif exists(step):
                attempt(step, registrations)
            elif exists(step.split(".")[0]) and step in KERNEL_MODULES.get(device, ()):
                registrations.note(
                    step, None, ErrorFact("builtins.ModuleNotFoundError", f"No module named {step!r}"), loaded=False
                )
        for name in registering_modules(device):
            attempt(name, registrations)
    for name in context.options.get("modules", []):
        attempt(str(name), registrations)
    if context.options.get("vllm", True) and exists("vllm"):
        attempt("vllm.plugins", registrations, _general_plugins)
    elif os.environ.get("XPUFP8_APPLY"):
        attempt("xpufp8.runtime.plugin", registrations, _repairs)


def attempt(name: str, registrations: Registrations, action: Any = None) -> None:
    """Import one module (or call ``action``) and note how it went."""
    before = op_names()
    try:
        module = importlib.import_module(name)
        if action is not None:
            action()
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - whatever an import does is a fact about it
        # An extension of vLLM's CPU build raises after its ops are in; then the watch has noted it as loaded.
        registrations.note(name, _origin(name), exc, loaded=False)
    else:
        if action is None and (op_names() - before or name in _named()):
            registrations.note(name, getattr(module, "__file__", None), None, loaded=True)


def _named() -> set[str]:
    return {name for table in (KERNEL_MODULES, OP_MODULES) for names in table.values() for name in names}


def _platform_kernels(device: str) -> None:
    """Ask vLLM which platform this is and let it load that platform's kernels, as its workers do.

    Where vLLM takes the machine for another platform than was asked about, its kernels would answer for the wrong device under the
    same names (``_C::rms_norm``), so they stay out.
    """
    from vllm.platforms import current_platform

    load = getattr(current_platform, "import_kernels", None)  # the platform's own choice since 0.14
    if load is not None and str(current_platform._enum.name).lower() in {device, "rocm" if device == "cuda" else device}:
        load()


def _general_plugins() -> None:
    """Load vLLM's general plugins, as each of its processes does: a repair of the runtime half is one of them."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def _repairs() -> None:
    from xpufp8.runtime.plugin import activate

    activate()


def exists(name: str) -> bool:
    """True when a module could be imported; its parents but not itself are imported for the answer."""
    with contextlib.suppress(Exception):
        return importlib.util.find_spec(name) is not None
    return False


def _origin(name: str) -> str | None:
    with contextlib.suppress(Exception):
        spec = importlib.util.find_spec(name)
        return spec.origin if spec else None
    return None


def registering_modules(device: str) -> list[str]:
    """Modules of vLLM whose text registers ops, without those of single models and those of other devices.

    A serving process imports one model's module; what that model reaches is asked of the model (``probes.model_trace``).
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations)))
    others = _OTHER_DEVICES.get(device, set())
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in {"models", "__pycache__"}]
        inside = Path(folder).relative_to(root.parent).parts
        for file in files:
            name, dot, extension = file.rpartition(".")
            words = set(re.split(r"[/_.]", "/".join((*inside[1:], name))))
            if (dot + extension) != ".py" or words & others or "deep_gemm" in file:
                continue
            with contextlib.suppress(OSError):
                text = Path(folder, file).read_bytes()
                # The cheap question first: there are thousands of files.
                if any(hint in text for hint in _HINTS) and _REGISTERS.search(text):
                    found.append(".".join((*inside, name)).removesuffix(".__init__"))
    return sorted(found)
