"""Which layers a model has, of how many kinds, and a shorter model that holds every kind of repeating layer.

Real checkpoints repeat a few kinds of decoder layer dozens of times. Constructing them all is cheap and exact; having Dynamo
inline and vLLM process them all is not. So all are constructed and counted, and weight processing and the forward pass run over
a list that keeps, of each kind, the first two and the last of the whole list (the first layer of a model often starts the
residual stream).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from probes.model_facts import AttentionKindFact, KindOfLayerFact, LayerKindFact, MoeKindFact
from probes.trace_ops import Recorder, pattern

_INDEX_NAME = re.compile(r"(layer|block|expert)?_?(idx|id|index|number|no|num|name|prefix)$|prefix|layer_name|^name$")
_KERNEL_ATTRIBUTES = ("fp8_linear", "kernel", "mp_linear", "linear_kernel", "w8a8_linear")


def signature(layer: Any) -> tuple[Any, ...]:
    """Everything of a layer that bears on its trace: classes, tensors, plain settings, quantization methods, kernels."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        tensors = tuple(
            (n, tuple(t.shape), str(t.dtype))
            for own in (module._parameters, module._buffers)
            for n, t in own.items()
            if t is not None
        )
        parts.append((name, type(module).__qualname__, tensors, _settings(module), _method(module)))
    return tuple(parts)


def _settings(owner: Any) -> tuple[Any, ...]:
    found: list[tuple[str, Any]] = []
    for name, value in vars(owner).items():
        if name.startswith("_") or _INDEX_NAME.search(name):
            continue
        if value is None or isinstance(value, (bool, int, float)):
            found.append((name, value))
        elif isinstance(value, str):
            found.append((name, pattern(value)))
        elif isinstance(value, (tuple, list)) and all(isinstance(v, (bool, int, float, str)) for v in value):
            found.append((name, tuple(pattern(v) if isinstance(v, str) else v for v in value)))
    return tuple(sorted(found, key=lambda item: item[0]))


def _method(module: Any) -> tuple[Any, ...] | None:
    method = vars(module).get("quant_method")
    if method is None:
        return None
    return (type(method).__qualname__, kernel_of(module), _settings(method))


def kernel_of(layer: Any) -> str | None:
    """Class name of the kernel object that a layer's quantization method holds, None if it holds none."""
    for owner in (getattr(layer, "quant_method", None), getattr(layer, "scheme", None)):
        if owner is None:
            continue
        for name in _KERNEL_ATTRIBUTES:
            kernel = getattr(owner, name, None)
            if kernel is not None:
                return type(kernel).__name__
        for value in vars(owner).values():
            if type(value).__name__.endswith(("Kernel", "LinearOp")):
                return type(value).__name__
    return None


@dataclass
class Kind:
    """One kind of repeating layer of one list."""

    example: int
    members: list[int] = field(default_factory=list)
    traced: list[int] = field(default_factory=list)


@dataclass
class Repetition:
    """One list of repeating layers. All are constructed; only a few of each kind are processed and traced."""

    parent: Any
    attribute: str
    path: str
    """Name of the list in the model: ``model.layers``."""
    full: Any
    kinds: list[Kind]
    kept: list[int]
    """Indices into the full list that stand for all, in order."""
    compiled: bool
    """True inside a region that Dynamo traces: there the short list stays in place for the forward pass."""
    bounds: tuple[int, int] | None = None
    """The parent's start_layer and end_layer before."""
    shared: set[int] = field(default_factory=set)
    """Storages that more than one layer holds (a rotary table): they exist once."""

    def shorten(self) -> None:
        """Put the list of kept layers in place."""
        self._put([self.full[i] for i in self.kept])
        if self.bounds is not None:
            self.parent.start_layer, self.parent.end_layer = 0, len(self.kept)

    def spread(self) -> None:
        """Put a list of full length in place in which kept layers stand for all of their kind."""
        standing = {i: self.full[i if i in kind.traced else kind.traced[-1]] for kind in self.kinds for i in kind.members}
        self._put([standing.get(i, layer) for i, layer in enumerate(self.full)])
        if self.bounds is not None:
            self.parent.start_layer, self.parent.end_layer = self.bounds

    def undo(self) -> None:
        """Put the full list back."""
        setattr(self.parent, self.attribute, self.full)
        if self.bounds is not None:
            self.parent.start_layer, self.parent.end_layer = self.bounds

    def _put(self, layers: list[Any]) -> None:
        import torch

        setattr(self.parent, self.attribute, torch.nn.ModuleList(layers))


def repetitions(model: Any) -> list[Repetition]:
    """Every outermost list of at least four layers that repeat, with its kinds. Nothing is changed yet."""
    import torch

    compiled = [name for name, module in model.named_modules() if getattr(module, "do_not_compile", True) is False]
    found: list[Repetition] = []
    for owner_name, owner in model.named_modules():
        for attribute, child in owner._modules.items():
            path = ".".join(part for part in (owner_name, attribute) if part)
            if not isinstance(child, torch.nn.ModuleList) or len(child) < 4:
                continue
            if any(path.startswith(done.path + ".") or done.full is child for done in found):
                continue
            kinds = _kinds(child)
            live = [i for kind in kinds for i in kind.members]
            if not live:
                continue
            kept = sorted({*(i for kind in kinds for i in kind.traced), max(live)})
            if len(kept) == len(child):
                continue
            for kind in kinds:
                kind.traced = [i for i in kept if i in kind.members]
            inside = any(name == "" or path.startswith(name + ".") for name in compiled)
            bounds = (
                (owner.start_layer, owner.end_layer) if hasattr(owner, "start_layer") and hasattr(owner, "end_layer") else None
            )
            found.append(Repetition(owner, attribute, path, child, kinds, kept, inside, bounds, _shared(child)))
    return found


def _kinds(layers: Any) -> list[Kind]:
    kinds: dict[Any, Kind] = {}
    for index, layer in enumerate(layers):
        if type(layer).__name__ in {"PPMissingLayer", "StageMissingLayer"}:
            continue
        kind = kinds.setdefault(signature(layer), Kind(index))
        kind.members.append(index)
        if len(kind.traced) < 2:
            kind.traced.append(index)
    return list(kinds.values())


def _shared(layers: Any) -> set[int]:
    holders: dict[int, int] = {}
    for layer in layers:
        for key in {tensor.untyped_storage()._cdata for tensor in [*layer.parameters(), *layer.buffers()]}:
            holders[key] = holders.get(key, 0) + 1
    return {key for key, count in holders.items() if count > 1}


def census(model: Any, repeated: list[Repetition]) -> Iterator[tuple[str, Any, int]]:
    """Every module of the full model once for each kind: its name, itself, and how many like it there are.

    Of a repeating list, one processed layer stands for all of its kind; the others are passed over.
    """
    for repetition in repeated:
        repetition.undo()
    weights: dict[str, dict[int, int]] = {
        r.path + ".": {i: (len(kind.members) if i == kind.traced[0] else 0) for kind in r.kinds for i in kind.members}
        for r in repeated
    }
    for name, module in model.named_modules():
        count = 1
        for prefix, weight in weights.items():
            if name.startswith(prefix):
                index = int(name[len(prefix) :].split(".", 1)[0])
                count = weight.get(index, 1)
        if count:
            yield name, module, count


def scale(recorder: Recorder, reduced: list[Repetition]) -> None:
    """Rewrite the recorder's calls so that they speak of the whole model: each kept layer's name becomes its own, and a kind's
    calls are those of its traced layers plus one traced layer's calls for every layer that was left out.
    """
    for call in recorder.calls.values():
        for reduction in reduced:
            call.calls = _scaled(call.calls, reduction)


def _scaled(calls: dict[str, int], reduction: Repetition) -> dict[str, int]:
    prefix = reduction.path + "."
    result: dict[str, int] = {}
    by_layer: dict[int, dict[str, int]] = {}
    for name, count in calls.items():
        head = re.match(re.escape(prefix) + r"(\d+)(.*)", name)
        if head is None:
            result[name] = result.get(name, 0) + count
            continue
        position = int(head.group(1))
        index = reduction.kept[position] if position < len(reduction.kept) else position
        slot = by_layer.setdefault(index, {})
        slot[head.group(2)] = slot.get(head.group(2), 0) + count
    for kind in reduction.kinds:
        typical = kind.traced[1] if len(kind.traced) > 1 else kind.traced[0]
        for index in kind.members:
            source = by_layer.get(index if index in kind.traced else typical, {})
            for rest, count in source.items():
                name = f"{prefix}{index}{rest}"
                result[name] = result.get(name, 0) + count
    return result


def repeating(recorder: Recorder, reduced: list[Repetition]) -> list[KindOfLayerFact]:
    """Facts about each kind of repeating layer; call after :func:`scale`."""
    facts = []
    for reduction in reduced:
        for kind in reduction.kinds:
            layer = reduction.full[kind.example]
            typical = kind.traced[1] if len(kind.traced) > 1 else kind.traced[0]
            prefix = f"{reduction.path}.{typical}"
            ops = sorted({name for (name, region, _), call in recorder.calls.items() if region == "compiled"
                          and any(at == prefix or at.startswith(prefix + ".") for at in call.calls)})  # fmt: skip
            held = {id(t): t.numel() * t.element_size() for t in [*layer.parameters(), *layer.buffers()]}
            facts.append(
                KindOfLayerFact(
                    type(layer).__name__,
                    f"{reduction.path}.{kind.example}",
                    len(kind.members),
                    len(kind.traced),
                    ops,
                    sum(held.values()),
                )
            )
    return facts


def linear_kinds(model: Any, repeated: list[Repetition]) -> list[LayerKindFact]:
    """The linear layers of the model, one fact for each kind, in the order of first appearance."""
    from vllm.model_executor.layers.linear import LinearBase

    counts: dict[tuple[Any, ...], int] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, module, count in census(model, repeated):
        if not isinstance(module, LinearBase):
            continue
        weight = getattr(module, "weight", None)
        if weight is None:
            weight = next(iter(module._parameters.values()), None)
        shape = tuple(weight.shape) if weight is not None else ()
        dtype = str(weight.dtype).removeprefix("torch.") if weight is not None else None
        scheme = getattr(module, "scheme", None)
        method = type(scheme).__name__ if scheme is not None else type(module.quant_method).__name__
        key = (type(module).__name__, pattern(name), method, kernel_of(module), dtype, shape)
        counts[key] = counts.get(key, 0) + count
        first.setdefault(key, name)
    return [
        LayerKindFact(key[0], first[key], key[1], count, key[2], key[3], key[4], list(key[5])) for key, count in counts.items()
    ]


def attention_kinds(model: Any, config: Any, repeated: list[Repetition]) -> list[AttentionKindFact]:
    """Attention and state-space layers of the model (vision attention included), one fact for each kind."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        get = getattr(layer, "get_attn_backend", None) or (lambda layer=layer: getattr(layer, "attn_backend", None))
        backend = get()
        if backend is None:
            continue
        kind = getattr(layer, "attn_type", None)
        kind = getattr(kind, "value", kind) or str(getattr(layer, "mamba_type", "") or "").rpartition(".")[2].lower()
        if getattr(layer, "use_mla", False) or "MLA" in type(layer).__name__:
            kind = "mla"
        key = (
            kind or type(layer).__name__, _backend_name(backend), type(layer.impl).__name__ if hasattr(layer, "impl") else None,
            getattr(layer, "head_size", None), getattr(layer, "num_heads", None), getattr(layer, "num_kv_heads", None),
            getattr(layer, "kv_cache_dtype", None), getattr(layer, "sliding_window", None),
        )  # fmt: skip
        found.setdefault(key, []).append(name)
    for name, module, count in census(model, repeated):
        if type(module).__name__ == "MMEncoderAttention":
            backend = getattr(module, "attn_backend", None)
            key = ("vision", getattr(backend, "name", str(backend)), None, getattr(module, "head_size", None),
                   getattr(module, "num_heads", None), getattr(module, "num_kv_heads", None), None, None)  # fmt: skip
            found.setdefault(key, []).extend([name] * count)
    return [
        AttentionKindFact(
            kind=str(k[0]),
            backend=k[1],
            implementation=k[2],
            count=len(names),
            head_size=_plain(k[3]),
            heads=_plain(k[4]),
            kv_heads=_plain(k[5]),
            kv_cache_dtype=k[6],
            sliding_window=_plain(k[7]),
            example=names[0],
        )
        for k, names in found.items()
    ]


def _plain(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def _backend_name(backend: Any) -> str:
    try:
        return str(backend.get_name())
    except Exception:  # noqa: BLE001 - an abstract backend has no name; its class has
        return str(getattr(backend, "__name__", backend))


def moe_kinds(model: Any, repeated: list[Repetition]) -> list[MoeKindFact]:
    """Mixture-of-experts layers, one fact for each kind."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, module, count in census(model, repeated):
        method = getattr(module, "quant_method", None)
        if method is None or not _is_moe(module):
            continue
        backend = next(
            (
                getattr(v, "value", None) or getattr(v, "name", str(v))
                for k, v in vars(method).items()
                if k.endswith("_backend") and v is not None
            ),
            None,
        )
        config = getattr(method, "moe", None) or getattr(module, "moe_config", None)
        key = (
            type(method).__name__, str(backend) if backend is not None else None, _experts_class(method),
            int(getattr(config, "num_experts", 0) or 0), int(getattr(config, "num_local_experts", 0) or 0),
            int(getattr(config, "experts_per_token", 0) or 0),
        )  # fmt: skip
        found.setdefault(key, []).extend([name] * count)
    return [MoeKindFact(k[0], k[1], k[2], len(names), k[3], k[4], k[5], names[0]) for k, names in found.items()]


def _is_moe(module: Any) -> bool:
    return any("FusedMoEMethodBase" in base.__name__ for base in type(module.quant_method).__mro__)


def _experts_class(method: Any) -> str | None:
    for name in ("experts_cls", "experts_class"):
        if getattr(method, name, None) is not None:
            return str(getattr(method, name).__name__)
    seen = [method]
    for _ in range(4):
        owner = seen[-1]
        step = next(
            (
                getattr(owner, n, None)
                for n in ("moe_kernel", "moe_mk", "kernel", "impl", "fused_experts", "experts")
                if getattr(owner, n, None) is not None
            ),
            None,
        )
        if step is None or (callable(step) and not hasattr(step, "__dict__")):
            break
        seen.append(step)
    return type(seen[-1]).__name__ if len(seen) > 1 else None
