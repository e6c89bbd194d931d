"""Inferred fakes: what an op without a fake would return, judged by its name and schema, so that a trace can go on past it.

They serve to find the next fault. None of them is a repair: those are in ``xpufp8.runtime`` and state exact shapes per schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GEMM = (
    "fp8_gemm",
    "fp8_gemm_w8a16",
    "fp4_gemm",
    "int4_gemm_w4a16",
    "int4_gemm_w4a8",
    "fp8_gemm_w8a8",
    "mm_low_bits",
    "fp8_gemm1",
    "fp8_gemm2",
)
"""Ops that multiply [..., K] by a weight and keep the leading dimensions (vllm-xpu-kernels onednn_matmul.cpp)."""


def named(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by the names of the schema."""
    values = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}
    return {**values, **kwargs}


def gemm(op: Any) -> Callable[..., Any]:
    """Fake of a GEMM: ``[..., K]`` and a weight give ``[..., N]``."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        import torch

        values = named(op, args, kwargs)
        tensors = [v for v in values.values() if isinstance(v, torch.Tensor)]
        rows = tensors[0]
        weight = next((v for k, v in values.items() if k in {"B", "weight", "q_weight"}), tensors[1])
        transposed = next((v for v in values.values() if isinstance(v, bool)), False)  # trans_B, in the schemas that have it
        columns = weight.shape[0] if transposed else weight.shape[-1]
        out = values.get("out_dtype") or (torch.float16 if op._schema.name.endswith("w4a8") else rows.dtype)
        if not out.is_floating_point or out.itemsize == 1:
            out = torch.get_default_dtype()
        return torch.empty((*rows.shape[:-1], columns), dtype=out, device=rows.device)

    return fake


def _topk(op: Any) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        import torch

        values = named(op, args, kwargs)
        scores = next(v for v in values.values() if isinstance(v, torch.Tensor))
        shape = (scores.shape[0], values["topk"])
        empty = [torch.empty(shape, dtype=d, device=scores.device) for d in (torch.float32, torch.int32)]
        return tuple(empty)

    return fake


def _attention(op: Any) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        import torch

        values = named(op, args, kwargs)
        q, v = values["q"], values["v"]
        out = values.get("out")
        if out is None:
            out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        return [out, torch.empty((q.shape[-2], q.shape[0]), dtype=torch.float32, device=q.device)]

    return fake


def generic(op: Any) -> Callable[..., Any]:
    """Fake by the schema alone: every returned tensor looks like the op's first tensor, or like an argument named for output."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        import torch

        values = named(op, args, kwargs)
        tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
        like = next(
            (v for k, v in tensors.items() if k in {"out", "output", "ptr_D", "result"}), next(iter(tensors.values()), None)
        )
        made = []
        for result in op._schema.returns:
            kind = str(result.type)
            if "Tensor" not in kind:
                made.append({"bool": False, "int": 0, "float": 0.0, "str": ""}.get(kind))
                continue
            tensor = torch.empty_like(like) if like is not None else torch.empty(0)
            made.append([tensor] if "List" in kind or "[]" in kind else tensor)
        return made[0] if len(made) == 1 else tuple(made) if made else None

    return fake


def infer(op: Any) -> Callable[..., Any]:
    """The inferred fake of an op."""
    name = str(op._schema.name).split("::")[-1]
    if name in GEMM or "gemm_w8a16" in name:
        return gemm(op)
    if name == "fp8_bmm":
        return gemm(op)
    if name == "grouped_topk":
        return _topk(op)
    if name == "varlen_fwd":
        return _attention(op)
    return generic(op)


_libraries: list[Any] = []


def register(op: Any, fake: Callable[..., Any]) -> None:
    """Make ``fake`` the op's fake, over whatever is there."""
    import torch

    namespace, name = str(op._schema.name).split("::")
    if op._overloadname != "default":
        # torch keeps one fake per packet name of the default overload; another overload gets a Meta kernel of its own.
        library = torch.library.Library(namespace, "IMPL")
        _libraries.append(library)
        library.impl(f"{name}.{op._overloadname}", fake, "Meta")
        return
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    library._register_fake(name, fake, allow_override=True)


def take_away(qualified: str) -> bool:
    """Remove every fake of an op (``namespace::name``), for asking what happens without it. False when it has none."""
    from torch._library import simple_registry

    holder = simple_registry.singleton.find(qualified).fake_impl
    kernels = getattr(holder, "kernels", None)
    if not kernels:
        return False
    kernels.clear()
    return True


def wrong_fakes() -> list[tuple[Any, Any, list[int], list[int]]]:
    """GEMMs whose registered fake loses a leading dimension: op, kernel that registered it, shape it gives, shape it must give.

    Called under a fake mode. The kernels keep the input's leading dimensions (vllm-xpu-kernels, onednn_matmul.cpp).
    """
    import torch
    from torch._library import simple_registry

    found = []
    for space in ("_xpu_C", "torch_ipex"):
        for name in GEMM:
            if not hasattr(getattr(torch.ops, space), name):
                continue
            packet = getattr(getattr(torch.ops, space), name)
            op = getattr(packet, packet.overloads()[0])
            holder = simple_registry.singleton.find(str(op._schema.name)).fake_impl
            if getattr(holder, "kernel", None) is None:
                continue
            call = _three_dimensional_call(op)
            if call is None:
                continue
            right = list(gemm(op)(*call).shape)
            try:
                given = list(holder.kernel.func(*call).shape)
            except Exception:  # noqa: BLE001, S112 - a fake that cannot take this call is not judged by it
                continue
            if given != right:
                found.append((op, holder.kernel, given, right))
    return found


def _three_dimensional_call(op: Any) -> list[Any] | None:
    import torch

    values: list[Any] = []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.name in {"A", "A_", "input", "q_input", "x"}:
            values.append(torch.empty(2, 3, 32, dtype=torch.bfloat16))
        elif argument.name in {"B", "weight", "q_weight"}:
            values.append(torch.empty(32, 48, dtype=torch.bfloat16))
        elif kind == "Tensor":
            values.append(torch.empty(1))
        elif kind == "int":
            values.append(32)
        elif kind == "bool":
            values.append(False)
        elif "int" in argument.name or "dtype" in argument.name:
            values.append(torch.bfloat16)
        elif kind.startswith("Optional"):
            values.append(None)
        else:
            return None
    return values
