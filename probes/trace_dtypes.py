"""Where float16 stands beside bfloat16: inside one layer of a model, and in one call of a custom op."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from probes.model_facts import MixedDtypeFact

HALVES = frozenset({"float16", "bfloat16"})
SHOWN = 4
"""How many tensors of the model's own dtype a fact names."""


def half(value: Any) -> str | None:
    """``float16`` or ``bfloat16`` for a tensor of that dtype, None for everything else."""
    name = str(getattr(value, "dtype", "")).removeprefix("torch.")
    return name if name in HALVES else None


def meeting(values: dict[str, Any], layers: dict[str, Any]) -> dict[str, str]:
    """16-bit tensors of a call, name to dtype, if both dtypes are among them; else nothing.

    Args:
        values: arguments by name; lists of tensors count.
        layers: by name; where an argument is such a name, the op reads that layer's own parameters too.
    """
    found: dict[str, str] = {}
    for name, value in values.items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        for place, part in enumerate(parts):
            dtype = half(part)
            if dtype is not None:
                found[name if part is value else f"{name}[{place}]"] = dtype
            elif isinstance(part, str) and part in layers:
                found |= {f"{held} of the layer": d for held, d, _ in _own(layers[part])}
    return found if len(set(found.values())) > 1 else {}


def _own(module: Any) -> Iterator[tuple[str, str, Any]]:
    """16-bit parameters and buffers that a module itself holds and that are no payload of a quantization method."""
    method = type(getattr(module, "quant_method", None)).__name__
    payload = method != "NoneType" and not method.startswith("Unquantized")
    for tensors in (getattr(module, "_parameters", {}), getattr(module, "_buffers", {})):
        for name, tensor in tensors.items():
            dtype = half(tensor)
            if dtype is not None and not (payload and name != "bias"):
                yield name, dtype, tensor


def mixed_layers(model: Any, repeated: list[Any], model_dtype: Any) -> list[MixedDtypeFact]:
    """Layers in which a tensor has another 16-bit dtype than those around it.

    A tensor is compared with those of the innermost module that holds others too. A tower that is float16 throughout is thus no
    mixture, and a linear layer whose weight and bias agree is none: the product itself tells whether its input does.

    Args:
        model: after weight processing.
        repeated: its lists of repeating layers.
        model_dtype: what vLLM serves it in.
    """
    from probes.trace_layers import census
    from probes.trace_ops import pattern

    wanted = str(model_dtype).removeprefix("torch.")
    held: dict[str, str] = {}
    counts: dict[str, int] = {}
    classes: dict[str, str] = {}
    for name, module, count in census(model, repeated):
        classes[name], counts[name] = type(module).__name__, count
        held |= {f"{name}.{tensor}".lstrip("."): dtype for tensor, dtype, _ in _own(module)}
    found: dict[tuple[str, str, tuple[str, ...]], dict[str, int]] = {}
    for tensor, dtype in held.items():
        if dtype == wanted or (wanted not in HALVES and dtype == "bfloat16"):
            continue
        holder, around = _around(tensor, held)
        if len(set(around.values())) > 1:
            key = (classes.get(holder, ""), pattern(holder), tuple(_described(holder, around, dtype)))
            found.setdefault(key, {})[holder] = counts.get(holder, 1)
    return [MixedDtypeFact("layer", cls, layer, sum(n.values()), list(tensors)) for (cls, layer, tensors), n in found.items()]


def _around(tensor: str, held: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The innermost module around a tensor that holds other tensors too, and all that it holds, by their names in it."""
    holder = tensor
    while holder:
        holder = holder.rpartition(".")[0]
        prefix = f"{holder}." if holder else ""
        around = {name[len(prefix) :]: dtype for name, dtype in held.items() if name.startswith(prefix)}
        if len(around) > 1:
            return holder, around
    return "", {}


def _described(holder: str, around: dict[str, str], odd: str) -> Iterable[str]:
    strange = [f"{name} {dtype}" for name, dtype in around.items() if dtype == odd]
    return [*strange, *[f"{name} {dtype}" for name, dtype in around.items() if dtype != odd][:SHOWN]]
