"""torchvision where it is absent or was built for another torch: neither may stop a multimodal model.

Its Python code registers fakes for ops that its shared object defines; with a library for another torch the import dies with
``operator torchvision::nms does not exist``, so the ops' schemas are defined first. Where it is not installed at all, its
modules are placeholders: models import them for image processing, which no trace runs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio, "
    "bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, SymInt batch_size, "
    "SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) -> (Tensor, Tensor)",
    "_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor",
    "ps_roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, int sampling_ratio) "
    "-> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, int sampling_ratio, SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor",
    "ps_roi_pool(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width) -> Tensor",
    "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, SymInt pad_h, "
    "SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor",
    "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "_cuda_version() -> int",
)
"""Schemas of torchvision's C++ ops (torchvision/csrc/ops), in the forms of release 0.2x."""

_library: list[object] = []


def put_up() -> str:
    """Make ``import torchvision`` succeed. Says what was done: ``sound``, ``ops`` (schemas defined) or ``placeholder``."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(Placeholders())
        return "placeholder"
    import torch

    with contextlib.suppress(Exception):
        importlib.import_module("torchvision")  # a sound installation brings its own ops

        return "sound"
    fragment = torch.library.Library("torchvision", "FRAGMENT")
    _library.append(fragment)
    for schema in SCHEMAS:
        name = schema.split("(", 1)[0]
        if not hasattr(torch.ops.torchvision, name):
            fragment.define(schema)
    for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
        del sys.modules[module]
    return "ops"


class _AnyName(type):
    """Class of placeholders: any attribute is another placeholder."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(f"{cls.__name__}.{name}", cls.__module__)


def placeholder(name: str, package: str = "torchvision") -> Any:
    """A class that can be named, subclassed and decorated with, and that refuses to be used."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{name} was used, but {package} is not installed in this environment")

    return _AnyName(name, (), {"__init__": refuse, "__module__": package})


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below ``torchvision``, empty but for placeholders."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Answer for torchvision alone."""
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, origin="simulated by xpufp8", is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Use Python's ordinary module object."""
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Let any public name be a placeholder."""
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]  # modules carry whatever they are given

        def missing(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return placeholder(f"{module.__name__}.{name}")

        module.__getattr__ = missing  # type: ignore[method-assign]  # PEP 562
