"""Probe ``numerics``: the FP8 kernels that vLLM selects, at the model's layer shapes, against float64.

Operands are made so that a misreading cannot cancel (``device_operands``). Where a result is wrong, ``device_confusions`` looks
for the wrong reading of the operands that gives it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from probes.device_confusions import explain
from probes.device_facts import LayerShapeFact, NumericsCaseFact, NumericsFacts, SelectedFact
from probes.device_layers import Bench, Built, bench, schemes, synchronize, unknown_run
from probes.device_operands import Operands, activations, bias, make, reference
from probes.device_shapes import block_size, distinct, layer_shapes
from probes.protocol import Context, describe_error
from probes.schemes import Scheme

if TYPE_CHECKING:
    import torch

ROWS = (1, 16, 257)
"""One token, a full tile, and one row more than a power of two."""
ODD = 17
LARGEST = 2**23
"""Largest N*K that is run: errors grow with K, which is kept, and more columns of the same kind show nothing new."""
LIMITS = {"bfloat16": 2.0**-6, "float16": 2.0**-6, "float32": 2.0**-6}
"""Allowed relative error. Activations come through quantization exactly, so what is left is the rounding of weights and output
to bfloat16 (about 2^-8); weights rounded to FP8 again, as some kernels do with several scales, cost up to 2^-6."""
COLUMN_LIMIT = 2.0**-4
"""Allowed error of one column: fewer values are averaged in it. A wrong scale costs far more."""

Base = tuple[str, str, str, str, list[int], str]
"""Scheme, kernel, layer, dtype, shape and operands of a case."""


def observe(context: Context) -> NumericsFacts:
    """Errors of the selected kernels, case by case."""
    dtype = context.options.get("dtype") or "bfloat16"
    if context.simulated:
        return NumericsFacts(unknown_run(context, "numerics"), dtype)
    layers = layer_shapes(context, LARGEST)
    selected: list[SelectedFact] = []
    cases: list[NumericsCaseFact] = []
    with bench(context) as made:
        notes = [f"{one.name} was run as [{one.run_n}, {one.run_k}] instead of [{one.n}, {one.k}]" for one in layers if _cut(one)]
        for scheme in schemes(context):
            for layer in distinct(layers):
                found, answered = _layer(made, scheme, layer, dtype)
                cases += found
                selected += answered
        run = replace(made.run, notes=[*made.run.notes, *notes])
    return NumericsFacts(run, dtype, layers, selected, cases)


def _cut(layer: LayerShapeFact) -> bool:
    return (layer.n, layer.k) != (layer.run_n, layer.run_k)


def _layer(made: Bench, scheme: Scheme, layer: LayerShapeFact, dtype: str) -> tuple[list[NumericsCaseFact], list[SelectedFact]]:
    cases: list[NumericsCaseFact] = []
    selected: list[SelectedFact] = []
    for edges in (False, True):
        operands = make(scheme, layer.run_n, layer.run_k, edges=edges, block=block_size(made.context))
        for built in made.build(operands, dtype, layer.name):
            if not edges:
                selected.append(built.selected)
            if built.call is None:
                continue
            if edges:
                cases.append(check(made, built, dtype, ODD, "edges"))
                continue
            cases += [check(made, built, dtype, rows, "ordinary") for rows in ROWS]
            cases.append(check(made, built, dtype, ODD, "bias"))
    return cases, selected


def check(made: Bench, built: Built, dtype: str, rows: int, kind: str) -> NumericsCaseFact:
    """Run a layer once and compare every output."""
    import torch

    operands = built.operands
    kind_of = getattr(torch, dtype)
    x = activations(rows, operands.k, kind_of, edges=operands.edges, group=operands.group)
    added = bias(operands.n, kind_of) if kind == "bias" else None
    base: Base = (operands.scheme.name, built.kernel, built.selected.layer, dtype, [rows, operands.n, operands.k], kind)
    limit = LIMITS[dtype]
    try:
        assert built.call is not None
        out = built.call(x.to(made.device), added.to(made.device) if added is not None else None)
        synchronize(made.device)
        got = out.detach().to("cpu").to(torch.float64).reshape(rows, -1)
    except Exception as exc:  # noqa: BLE001 - a kernel that raises is what is asked
        return NumericsCaseFact(*base, "fail", limit=limit, raised=describe_error(exc))
    if tuple(got.shape) != (rows, operands.n):
        error = describe_error(ValueError(f"the output has shape {list(out.shape)}, [{rows}, {operands.n}] was expected"))
        return NumericsCaseFact(*base, "fail", limit=limit, raised=error)
    wanted, size = reference(operands, x)
    if added is not None:
        wanted = wanted + added.to(torch.float64)
        size = torch.hypot(size, added.to(torch.float64))
    return _judge(base, operands, (x, added), got, wanted, size, limit)


def _judge(
    base: Base, operands: Operands, given: tuple[torch.Tensor, torch.Tensor | None], got: torch.Tensor,
    wanted: torch.Tensor, size: torch.Tensor, limit: float,
) -> NumericsCaseFact:  # fmt: skip
    """Compare, and look for an explanation where it is wrong."""
    import torch

    finite = torch.isfinite(got)
    off = torch.where(finite, (got - wanted) / size, torch.zeros_like(size))
    count = finite.sum()
    error = float((off.square().sum() / count).sqrt()) if count else None
    columns, rows = off.square().mean(dim=0).sqrt(), off.square().mean(dim=1).sqrt()
    worst = int(columns.argmax())
    broken = ~finite
    wrong_columns = int(((columns > COLUMN_LIMIT) | broken.any(dim=0)).sum())
    wrong_rows = int(((rows > COLUMN_LIMIT) | broken.any(dim=1)).sum())
    right = error is not None and error <= limit and wrong_columns == 0 and wrong_rows == 0
    fact = NumericsCaseFact(
        *base, "pass" if right else "fail", error, limit, worst_column=worst, worst_column_error=float(columns[worst]),
        wrong_columns=wrong_columns, wrong_rows=wrong_rows, nonfinite=int(broken.sum()),
        nonfinite_at=[] if right else _places(operands, broken),
    )  # fmt: skip
    return fact if right else replace(fact, confusions=explain(operands, *given, got))


def _places(operands: Operands, broken: torch.Tensor) -> list[str]:
    """What the NaN and Inf have in common, in words."""
    import torch

    if not broken.any():
        return []
    rows, columns = broken.any(dim=1).nonzero().flatten().tolist(), broken.any(dim=0).nonzero().flatten().tolist()
    said = []
    if operands.edges:
        zero = set(range(min(operands.block[0], operands.n))) | {operands.n - 1}
        if set(columns) <= zero:
            said.append("columns whose weights hold a block or a channel of zeros")
        if set(rows) <= {3, 5}:
            said.append("rows whose activations are zero, or zero in one group")
    if not said and bool(torch.all(broken)):
        said.append("everywhere")
    if not said and len(columns) <= 8:
        said.append(f"columns {', '.join(map(str, columns))}")
    return said or [f"{len(rows)} rows and {len(columns)} columns"]
