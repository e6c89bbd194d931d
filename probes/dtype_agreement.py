"""Probe ``dtype_agreement``: what selected kernels return, in which dtype, and whether their ops' fakes say the same.

For each scheme of the model, each activation dtype that the platform serves and each FP8 format, the kernel that vLLM selects
is run once on the device. Every custom op that it calls on the way is compared with its own fake.
"""

from __future__ import annotations

import time
from typing import Any

from probes.device_attention import cache_answer
from probes.device_facts import (
    CacheDtypeFact,
    DtypeAgreementFacts,
    DtypeSupportFact,
    KernelDtypeFact,
    OpOutputFact,
    SelectedFact,
)
from probes.device_layers import Bench, Built, bench, schemes, synchronize, unknown_run
from probes.device_operands import activations, make
from probes.device_shapes import ALONE, block_size, read_sizes
from probes.protocol import Context, describe_error
from probes.vllm_arguments import text

ROWS = 17
OWN = frozenset({"aten", "prims", "prim", "profiler"})
"""Namespaces of torch itself."""
PRODUCT = 192
"""Edge of the square matrices that show whether a dtype is done at all."""


def observe(context: Context) -> DtypeAgreementFacts:
    """Output dtypes, shapes and fakes of the selected kernels."""
    dtype = context.options.get("dtype")
    if context.simulated:
        run = unknown_run(context, "output dtypes of real kernels", "whether fakes agree with kernels")
        return DtypeAgreementFacts(run, dtype)
    selected: list[SelectedFact] = []
    kernels: list[KernelDtypeFact] = []
    with bench(context) as made:
        n, k = ALONE
        for scheme in schemes(context):
            for e5m2 in (False, True) if made.tables is not None else (False,):
                operands = make(scheme, n, k, e5m2=e5m2, block=block_size(context))
                for name in _asked(made, dtype):
                    for built in made.build(operands, name):
                        selected.append(built.selected)
                        if built.call is not None:
                            kernels.append(_call(made, built, name))
        support = [_support(made, name) for name in made.dtypes]
        cache = _cache(made, dtype or "bfloat16")
        return DtypeAgreementFacts(made.run, dtype, selected, kernels, support, cache)


def _asked(made: Bench, dtype: str | None) -> tuple[str, ...]:
    """Dtypes that are run: all that the platform serves; of the project's own candidates, which are many, the 16-bit ones."""
    wanted = {dtype or "bfloat16", "bfloat16", "float16"}
    return made.dtypes if made.tables is not None else tuple(name for name in made.dtypes if name in wanted)


def _call(made: Bench, built: Built, dtype: str) -> KernelDtypeFact:
    """Run a kernel once, listening to the custom ops that it calls."""
    import torch

    operands = built.operands
    x = activations(ROWS, operands.k, getattr(torch, dtype), group=operands.group).to(made.device)
    heard = Listener()
    base = (operands.scheme.name, built.kernel, dtype, built.selected.weight_dtype, operands.layout)
    shape = [ROWS, operands.n, operands.k]
    try:
        assert built.call is not None
        with heard.mode():
            out = built.call(x, None)
        synchronize(made.device)
    except Exception as exc:  # noqa: BLE001 - a kernel that raises is what is asked
        return KernelDtypeFact(*base, shape, None, observation="fail", ops=heard.facts(), error=describe_error(exc))
    right = (out.dtype, tuple(out.shape), out.device.type) == (x.dtype, (ROWS, operands.n), x.device.type)
    return KernelDtypeFact(
        *base, shape, _name(out.dtype), list(out.shape), out.device.type, "pass" if right else "fail", heard.facts()
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: Any) -> str:
    import torch

    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{_name(value.dtype)}{list(value.shape)} stride {list(value.stride())} {value.device.type}"


class Listener:
    """Hears every custom op that runs, and asks its fake the same question."""

    def __init__(self) -> None:
        self.heard: dict[str, OpOutputFact] = {}

    def facts(self) -> list[OpOutputFact]:
        """One fact an op: its first call."""
        return list(self.heard.values())

    def mode(self) -> Any:
        """A dispatch mode to run the kernel under."""
        from torch.utils._python_dispatch import TorchDispatchMode

        outer = self

        class Mode(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                name = f"{func.namespace}::{func._schema.name.split('::')[-1]}"
                if func._overloadname not in ("", "default"):
                    name += f".{func._overloadname}"
                custom = func.namespace not in OWN and name not in outer.heard
                # Taken before the call: an op may change an argument in place.
                fake, why = _fake_of(func, args, kwargs) if custom else (None, [])
                result = func(*args, **kwargs)
                if custom:
                    outer.heard[name] = _compare(name, fake, why, result)
                return result

        return Mode()


def _fake_of(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[str]]:
    """What the op's own fake returns for these arguments, or why it returns nothing."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_map

    with _disable_current_modes():
        mode = FakeTensorMode(allow_non_fake_inputs=False)

        def pretend(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        try:
            fake_args, fake_kwargs = tree_map(pretend, args), tree_map(pretend, kwargs)
            with mode:
                return func(*fake_args, **fake_kwargs), []
        except Exception as exc:  # noqa: BLE001 - an op without a fake, or one that raises: the OPS rules judge those
            return None, [f"the fake was not run: {str(exc).splitlines()[0] if str(exc) else type(exc).__name__}"[:300]]


def _compare(name: str, fake: Any, why: list[str], result: Any) -> OpOutputFact:
    import torch

    from xpufp8.runtime.verify import differences

    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    tensors = [value for value in outputs if isinstance(value, torch.Tensor)]
    described, dtypes = [_describe(v) for v in outputs if v is not None], [_name(t.dtype) for t in tensors]
    if why or not tensors:
        return OpOutputFact(name, described, dtypes, "unknown", why)
    found = differences(fake, result)
    return OpOutputFact(name, described, dtypes, "fail" if found else "pass", found)


def _support(made: Bench, dtype: str) -> DtypeSupportFact:
    """Run and time a plain product in a dtype."""
    import torch

    says = None
    if made.device.type != "cpu" and dtype == "bfloat16":
        ask = getattr(getattr(torch, made.device.type), "is_bf16_supported", None)
        says = bool(ask()) if ask is not None else None
    size = PRODUCT if made.device.type == "cpu" else 4096
    try:
        a = torch.ones(size, size, dtype=getattr(torch, dtype), device=made.device)
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            out = a @ a
            synchronize(made.device)
            best = min(best, time.perf_counter() - start)
        right = out.dtype == a.dtype and float(out[0, 0]) == size
    except Exception as exc:  # noqa: BLE001 - a device that refuses a dtype says so by raising
        return DtypeSupportFact(dtype, "fail", size=size, error=describe_error(exc), device_says=says)
    return DtypeSupportFact(dtype, "pass" if right else "fail", best, size, device_says=says)


def _cache(made: Bench, dtype: str) -> list[CacheDtypeFact]:
    """Run vLLM's attention layer with the KV-cache dtype that was typed; nothing where none was, or where the layer cannot be run alone."""
    wanted = text(made.context.vllm_args, "kv_cache_dtype")
    sizes = read_sizes(made.context.model)
    if wanted in (None, "auto") or sizes is None:
        return []
    backend, refusal = cache_answer(made, dtype, ROWS)
    if backend is None and refusal is None:
        return []
    return [CacheDtypeFact(str(wanted), dtype, sizes.head_dim, backend, describe_error(refusal) if refusal else None)]
