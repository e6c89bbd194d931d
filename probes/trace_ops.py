"""What a forward pass reaches: every custom op, whether Dynamo saw it, from which layer, and how it can be traced.

Two witnesses: the graphs that Dynamo hands to a recording backend (the compiled region), and the fake mode's own dispatch
(everything else). Bodies of opaque ops (``vllm::moe_forward``) run afterwards under the same fake mode, so that what they call
is seen too.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from probes.model_facts import Region

BUILT_IN = frozenset(
    {
        "aten",
        "prims",
        "prim",
        "profiler",
        "c10d",
        "_c10d_functional",
        "inductor",
        "higher_order",
        "quantized",
        "onednn",
        "mkldnn",
        "debugprims",
    }
)
"""Namespaces of torch itself; everything else is somebody's custom op."""

BODIES: dict[str, Callable[..., Any]] = {}
"""Python bodies of the opaque ops that this process registered, by ``namespace::name``."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def pattern(name: str) -> str:
    """Layer name with layer numbers replaced: ``model.layers.3.mlp`` → ``model.layers.*.mlp``."""
    return _NUMBER.sub("*", name)


def op_name(op: Any) -> str:
    """``namespace::name`` of an overload, with ``.overload`` unless it is the default one."""
    qualified = str(op._schema.name)
    return f"{qualified}.{op._overloadname}" if op._overloadname != "default" else qualified


def overload_of(target: Any) -> Any:
    """The op overload that a graph node calls; Dynamo's graphs name ops by their packet. None for other callables."""
    if hasattr(target, "_schema"):
        return target
    overloads = getattr(target, "overloads", None)
    if not callable(overloads) or not hasattr(target, "_qualified_op_name"):
        return None
    names = list(overloads())
    return getattr(target, "default" if "default" in names else names[0]) if names else None


def is_custom(op: Any) -> bool:
    """True for an op overload outside torch's own namespaces."""
    return hasattr(op, "_schema") and op.namespace not in BUILT_IN


def tracing_of(op: Any, inferred: set[str]) -> str:
    """How torch traces the op (``probes.facts.Tracing``); fakes that this trace put there do not count."""
    from probes.op_tracing import registered_tracing

    if str(op._schema.name) not in inferred:
        return registered_tracing(op)
    return "trivial" if op._schema.is_mutable and not op._schema.returns else "none"


def by_name(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by the names of the op's schema."""
    return {**{a.name: value for a, value in zip(op._schema.arguments, args, strict=False)}, **kwargs}


def _example(value: Any) -> Any:
    """The fake tensor that a node of Dynamo's graph stands for; anything else as it is."""
    return value.meta.get("example_value") if hasattr(value, "meta") and hasattr(value, "graph") else value


@dataclass
class Call:
    """How often one op was called in one region, and by which layers."""

    op: Any
    region: Region
    via: str = ""
    calls: dict[str, int] = field(default_factory=dict)
    """Calls by layer name as traced."""
    tracing: str = "undetermined"
    dimensions: int = 0
    """Most dimensions that its first tensor had."""
    mixed: dict[str, dict[str, str]] = field(default_factory=dict)
    """By layer: 16-bit tensors of a call in which both 16-bit dtypes met, name to dtype."""


class Recorder:
    """Collects calls of custom ops. One for a whole trace; ``reset`` before a stage is tried again."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, Region, str], Call] = {}
        self.names: dict[int, str] = {}
        """Module identity to its name in the model."""
        self.layers: dict[str, Any] = {}
        """Layers that opaque ops are told by name."""
        self.inferred: set[str] = set()
        """Ops whose fake this trace put there."""
        self.graphs = 0
        self.inside = 0
        self.via = ""
        self.bodies = BODIES
        self.pending: dict[tuple[str, str], tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        """First call of each opaque op from each kind of layer: its arguments, to run the body with."""

    def reset(self) -> None:
        """Forget the calls seen so far."""
        self.calls.clear()
        self.pending.clear()
        self.graphs = 0

    def watch(self, model: Any) -> None:
        """Learn the names of a model's modules."""
        self.names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}

    def note(self, op: Any, region: Region, layer: str, values: dict[str, Any]) -> None:
        """Count one call. ``values``: its arguments by name."""
        from probes.trace_dtypes import meeting

        key = (op_name(op), region, self.via)
        call = self.calls.get(key)
        if call is None:
            call = self.calls[key] = Call(op, region, self.via, tracing=tracing_of(op, self.inferred))
        call.calls[layer] = call.calls.get(layer, 0) + 1
        first = next((v for v in values.values() if hasattr(v, "shape")), None)
        call.dimensions = max(call.dimensions, len(getattr(first, "shape", ())))
        mixed = meeting(values, self.layers)
        if mixed:
            call.mixed.setdefault(layer, mixed)

    # -- compiled region -----------------------------------------------------------------------------------------------

    def backend_of(self, module: Any) -> Callable[..., Any]:
        """A Dynamo backend for one compiled module: notes the graph's ops and runs the graph as it is."""
        from torch.utils._pytree import tree_map

        identity = id(module)

        def record(graph: Any, example_inputs: Any, **kwargs: Any) -> Any:
            self.graphs += 1
            owner = self.names.get(identity, "")
            for node in graph.graph.nodes:
                op = overload_of(node.target) if node.op == "call_function" else None
                if op is not None and is_custom(op):
                    arguments, named = tree_map(_example, (node.args, node.kwargs))
                    self.note(op, "compiled", self._layer_of(node, owner), by_name(op, arguments, named))

            def run(*args: Any) -> Any:
                self.inside += 1
                try:
                    return graph.forward(*args)
                finally:
                    self.inside -= 1

            return run

        return record

    def _layer_of(self, node: Any, owner: str) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        path = ""
        for value in stack.values():
            path = str(value[0])
        path = re.sub(r"L\['self'\]|L\['fn'\]|_forward_method\.__self__|_modules|_orig_mod|getattr\(|\)", "", path)
        path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
        path = re.sub(r"\.{2,}", ".", path.replace("'", "").replace(", ", ".")).strip(".")
        return ".".join(part for part in (owner, path) if part)

    # -- everything else -----------------------------------------------------------------------------------------------

    def dispatched(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by the fake mode for every op that it sees."""
        if not is_custom(op) or _compiling():
            return
        layer = self._calling_layer(args, kwargs)
        body = self.bodies.get(str(op._schema.name))
        if body is not None and not self.via:
            self.pending.setdefault((str(op._schema.name), pattern(layer)), (op, args, kwargs))
        if not self.inside:
            self.note(op, "outside", layer, by_name(op, args, kwargs))

    def _calling_layer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        for value in (*args, *kwargs.values()):
            if isinstance(value, str) and "." in value and not value.startswith(("http", "/")):
                return value  # opaque ops are told the name of their layer
        frame: Any = sys._getframe(2)
        depth = 0
        while frame is not None and depth < 60:
            owner = frame.f_locals.get("self")
            name = self.names.get(id(owner)) if owner is not None else None
            if name:
                return name
            frame, depth = frame.f_back, depth + 1
        return ""


def _compiling() -> bool:
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def make_fake_mode(recorder: Recorder, on_missing: Callable[[Any, BaseException, tuple[Any, ...], dict[str, Any]], bool]) -> Any:
    """A FakeTensorMode that reports each op to ``recorder``. ``on_missing`` may register a fake for an op without one (True:
    try again).

    With ``mode.islands`` set, metadata made of real tensors is computed for real. ``mode.answered`` counts the ``.item()``
    calls that were answered for values that only real weights hold.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

    # An instance with another dispatch, not a subclass: torch registers its rules for higher-order ops for the class itself.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    plain = mode.dispatch
    mode.answered = 0
    mode.islands = False

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return _scalar(mode, args[0])
        if mode.islands and func.namespace == "aten" and _real(func, args, kwargs):
            with torch.utils._python_dispatch._disable_current_modes():
                return func(*args, **kwargs)
        if not hasattr(func, "_schema") or func.namespace in BUILT_IN:
            return plain(func, types, args, kwargs)
        recorder.dispatched(func, args, kwargs)
        try:
            return plain(func, types, args, kwargs)
        except UnsupportedOperatorException as exc:
            if _compiling() or not on_missing(func, exc, args, kwargs):
                raise
            return plain(func, types, args, kwargs)

    mode.dispatch = dispatch
    return mode


_ISLAND_BYTES = 16 << 20
_CREATIONS = frozenset({"aten::arange", "aten::full", "aten::zeros", "aten::ones", "aten::scalar_tensor"})


def _real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for an op on real tensors only, or one that makes a small tensor of integers: metadata, whose values decide shapes."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if tensors:
        return (
            not any(isinstance(t, FakeTensor) for t in tensors)
            and sum(t.numel() * t.element_size() for t in tensors) < _ISLAND_BYTES
        )
    if func._schema.name not in _CREATIONS:
        return False
    numbers = [abs(leaf) for leaf in tree_leaves(args) if isinstance(leaf, int) and not isinstance(leaf, bool)]
    dtype = kwargs.get("dtype")
    whole = not dtype.is_floating_point if dtype is not None else func._schema.name == "aten::arange"
    return whole and math.prod(max(n, 1) for n in numbers) <= 1 << 20


def _scalar(mode: Any, tensor: Any) -> Any:
    """Answer ``.item()`` for a value that only real weights hold: 1, or False (True would make rejection loops endless)."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(tensor, FakeTensor):
        with torch.utils._python_dispatch._disable_current_modes():
            return tensor.item()
    if tensor.constant is not None:
        return tensor.constant.item()
    mode.answered += 1
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


def record_bodies() -> None:
    """Learn the Python body of each op that vLLM registers from now on. Before the modules that register them are imported."""
    try:
        from vllm.utils import torch_utils as home
    except ImportError:
        import vllm.utils as home

    register = home.direct_register_custom_op
    if getattr(register, "remembers", False):
        return

    def remember(op_name: str, op_func: Any, *args: Any, **kwargs: Any) -> Any:
        BODIES[f"vllm::{op_name}"] = op_func
        return register(op_name, op_func, *args, **kwargs)

    remember.remembers = True  # type: ignore[attr-defined]  # marks the patch, so that it is made once
    home.direct_register_custom_op = remember
