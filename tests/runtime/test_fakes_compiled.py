"""For each op with a fake of ours: a compiled module that calls it fails without the fake and equals eager with it, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytestmark = pytest.mark.sim
torch = pytest.importorskip("torch")

from reference_cases import Case, cases, schema_of  # noqa: E402
from torch._functorch import config as functorch_config  # noqa: E402

from xpufp8.runtime import fakes, fakes_ipex, fakes_xpu, verify  # noqa: E402

CASES = {case.key: case for case in cases()}
WITHOUT_REFERENCE: dict[str, str] = {}
"""Rows for which no honest kernel can be written, with the reason."""


def test_every_row_has_a_reference_kernel_or_a_reason() -> None:
    rows = {f"{row.op}:{len(row.arguments)}" for row in fakes.table()}
    assert len(rows) == len(fakes.table())
    assert CASES.keys() | WITHOUT_REFERENCE.keys() == rows
    assert not CASES.keys() & WITHOUT_REFERENCE.keys()


class Layer(torch.nn.Module):  # type: ignore[misc,name-defined]  # torch is imported only if it is there
    """A layer as vLLM writes it: ordinary tensor code, the op with the layer's weights, ordinary tensor code."""

    def __init__(self, op: Any, arguments: dict[str, Any], moving: tuple[str, ...]) -> None:
        super().__init__()
        self.op, self.names, self.moving = op, tuple(arguments), moving
        self.fixed: dict[str, Any] = {}
        for name, value in arguments.items():
            if name not in moving and isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            elif name not in moving:
                self.fixed[name] = value

    def forward(self, *inputs: Any) -> Any:
        given = {}
        for name, value in zip(self.moving, inputs, strict=True):
            given[name] = torch.nn.functional.silu(value) if value.dtype in (torch.float32, torch.bfloat16) else value.clone()
        arguments = [
            given[name] if name in given else self.fixed[name] if name in self.fixed else getattr(self, name)
            for name in self.names
        ]
        result = self.op(*arguments)
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        return [out.to(torch.float32) * 2 if out.dtype.itemsize > 1 else out for out in outputs], list(given.values())


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Define an op under its real schema with the reference kernel, in a namespace of the test's own, and row it there."""
    libraries: list[Any] = []

    def make(case: Case) -> tuple[str, Any]:
        namespace = f"xpufp8_case_{abs(hash(case.key))}_{len(libraries)}"
        library = torch.library.Library(namespace, "DEF")
        libraries.append(library)
        library.define(f"op{schema_of(case)}")
        library.impl("op", case.kernel, "CPU")
        name = f"{namespace}::op"
        rows = tuple(replace(row, op=name) for row in fakes.table() if row.op == case.op)
        monkeypatch.setattr(fakes_xpu, "FAKES", rows)
        monkeypatch.setattr(fakes_ipex, "FAKES", ())
        return name, fakes.find_op(name)

    yield make
    for library in libraries:
        library._destroy()


def as_server(case: Case) -> Any:
    """torch raises on a kernel that returns its argument where the variable CI is set, and warns in a server."""
    return functorch_config.patch(error_on_custom_op_aliasing=False) if case.aliases else contextlib.nullcontext()


def bits(result: Any) -> list[Any]:
    """Outputs and what the call changed, as integers, so that NaN equals NaN."""
    found = []
    for value in [*result[0], *result[1]]:
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.dtype.itemsize]
        found.append((value.dtype, tuple(value.shape), value.contiguous().view(kind).tolist()))
    return found


@pytest.mark.parametrize("key", CASES)
def test_module_compiles_with_the_fake_and_not_without(register: Any, key: str) -> None:
    case = CASES[key]
    name, op = register(case)
    arguments = case.make(5)
    layer = Layer(op, arguments, case.moving)
    inputs = [arguments[moving] for moving in case.moving]
    torch._dynamo.reset()
    with torch.no_grad(), as_server(case):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="does not support running with fake tensors") as caught:
            torch.compile(layer, fullgraph=True, backend="eager")(*inputs)
        assert type(caught.value) is torch._dynamo.exc.Unsupported
        assert "registered" in fakes.apply(name)
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()
            compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
            assert bits(compiled(*inputs)) == bits(layer(*inputs))
            if case.symbolic:
                other = case.make(7)
                more = [other[moving] for moving in case.moving]
                with torch.compiler.set_stance("fail_on_recompile"):
                    again = compiled(*more)
                # What stays with the layer is that of five tokens.
                assert bits(again) == bits(layer(*more))


@pytest.mark.parametrize("key", CASES)
def test_fake_agrees_with_the_kernel(register: Any, key: str) -> None:
    case = CASES[key]
    name, _ = register(case)
    samples = [tuple(case.make(tokens).values()) for tokens in (2, 6)]
    compared = verify.check_registered(name, samples)
    assert (compared.outcome, compared.calls) == ("agrees", 2), compared
    fakes.apply(name)
    with as_server(case):
        verdicts = verify.opcheck(name, samples[1], ["test_faketensor"])
    if case.aliases:
        # The kernel breaks torch's rule that an output is no input; the fake does not, and a rule for what is written stands beside it.
        assert "outputs_alias_inputs" in verdicts["test_faketensor"]
        return
    assert verdicts == {"test_faketensor": "SUCCESS"}
    if not case.packed:
        # The schema's test multiplies inputs, which a CPU cannot do in FP8; the kernels take any dtype.
        wide = tuple(widened(value) for value in samples[1])
        assert verify.opcheck(name, wide, ["test_schema"]) == {"test_schema": "SUCCESS"}


def widened(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) and str(value.dtype).startswith("torch.float8") else value
