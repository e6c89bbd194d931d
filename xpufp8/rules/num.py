"""NUM: do the FP8 kernels that vLLM selects compute the right thing? Real calls against float64, with the likely confusion named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from probes.device_facts import ConfusionFact, NumericsCaseFact, NumericsFacts
from xpufp8.report import Evidence, Finding
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.device_common import concerns, disable, layers_of, place, said, selection, shape_text, where

PROBE = "numerics"
FEW = 0.25
"""Up to this part of the columns being wrong, the fault is of those columns and not of the kernel's arithmetic as a whole."""
SEVERAL = 4
"""Findings quote that many cases."""


@dataclass
class Wrong:
    """One kernel of one scheme with a wrong case."""

    scheme: str
    kernel: str
    cases: list[NumericsCaseFact] = field(default_factory=list)

    @property
    def failed(self) -> list[NumericsCaseFact]:
        """Its wrong cases."""
        return [one for one in self.cases if one.observation == "fail"]

    @property
    def confusion(self) -> ConfusionFact | None:
        """The reading that explains most of the wrong cases, the closest one of several."""
        found: dict[tuple[str, str], list[float]] = {}
        for one in self.failed:
            for c in one.confusions:
                found.setdefault((c.kind, c.name), []).append(c.error)
        if not found:
            return None
        kind, name = min(found, key=lambda k: (-len(found[k]), sum(found[k])))
        return ConfusionFact(kind, name, min(found[kind, name]))

    @property
    def some_rows_only(self) -> list[int]:
        """The row counts that are wrong, where ordinary operands are right with others."""
        ordinary = [one for one in self.cases if one.operands == "ordinary"]
        bad = sorted({one.shape[0] for one in ordinary if one.observation == "fail"})
        good = {one.shape[0] for one in ordinary if one.observation == "pass"}
        return bad if bad and good - set(bad) else []

    def code(self) -> str:
        """Which rule speaks of it: one finding a kernel, the most telling one."""
        if any(one.raised for one in self.failed):
            return "NUM007"
        if self.some_rows_only:
            return "NUM006"
        confusion = self.confusion
        by_kind = {"scale": "NUM002", "activation": "NUM002", "factor": "NUM002", "format": "NUM003"}
        if confusion is not None and confusion.kind in by_kind:
            return by_kind[confusion.kind]
        if any(one.nonfinite for one in self.failed):
            return "NUM004"
        if confusion is None and all(0 < one.wrong_columns <= FEW * one.shape[1] for one in self.failed):
            return "NUM005"
        return "NUM001"


def wrong(case: Case) -> list[Wrong]:
    """Kernels with a wrong case, among the schemes that the model has."""
    facts = case.get(PROBE, NumericsFacts)
    found: dict[tuple[str, str], Wrong] = {}
    for one in facts.cases if facts else ():
        if concerns(case, one.scheme):
            found.setdefault((one.scheme, one.kernel), Wrong(one.scheme, one.kernel)).cases.append(one)
    return [one for one in found.values() if one.failed]


def _quote(one: NumericsCaseFact) -> str:
    head = f"{one.layer} {shape_text(one.shape)} {one.dtype}, {one.operands} operands: "
    if one.raised is not None:
        return head + said(one.raised)
    error = f"relative error {one.error:.2e}" if one.error is not None else "no finite output"
    parts = [f"{error} (allowed {one.limit:.1e})", f"{one.wrong_columns} of {one.shape[1]} columns wrong"]
    if one.wrong_rows < one.shape[0]:
        parts.append(f"{one.wrong_rows} of {one.shape[0]} rows wrong")
    if one.nonfinite:
        parts.append(f"{one.nonfinite} NaN or Inf in {', '.join(one.nonfinite_at)}")
    elif one.worst_column is not None and one.worst_column_error is not None:
        parts.append(f"worst column {one.worst_column} with {one.worst_column_error:.2e}")
    return head + ", ".join(parts)


def _find(self: Rule, case: Case) -> Iterator[tuple[Wrong, list[Evidence]]]:
    facts = case.get(PROBE, NumericsFacts)
    for one in wrong(case) if facts else ():
        if facts is None or one.code() != self.code:
            continue
        right = len(one.cases) - len(one.failed)
        evidence = [
            Evidence(
                probe=PROBE, mode=facts.run.mode, observed=f"{one.kernel}: {_quote(bad)} [{where(facts.run)}]",
                expected="the float64 product of the same operands", where=place(bad.raised),
            )
            for bad in one.failed[:SEVERAL]
        ]  # fmt: skip
        if right:
            text = f"{one.kernel}: {right} of {len(one.cases)} cases agree with float64"
            evidence.append(Evidence(probe=PROBE, mode=facts.run.mode, observed=text))
        confusion = one.confusion
        if confusion is not None:
            text = f"with {confusion.name}, float64 gives the kernel's output (relative error {confusion.error:.1e})"
            evidence.append(Evidence(probe=PROBE, mode=facts.run.mode, observed=text))
        yield one, [*evidence, *selection(case, one.scheme, one.kernel)]


def _finding(self: Rule, case: Case, one: Wrong, cause: str, evidence: list[Evidence]) -> Finding:
    return self.finding(
        f"{one.scheme}/{one.kernel}", cause, evidence, fixes=[disable(one.kernel)], affects=layers_of(case, one.scheme)
    )


@rule("NUM001", "A selected kernel computes something else", "error", needs=(PROBE,))
def something_else(self: Rule, case: Case) -> Iterator[Finding]:
    """The kernel was run on made operands and its output is not their product. No known confusion explains it.

    ## What it means
    Weights, scales and activations go in, and what comes out is far from the float64 product of the same numbers.

    ## Why it matters
    The model serves and its answers are wrong: doubled tokens, `!!!!`, or merely worse text.

    ## How it looks
    Relative error, the worst column, and how many columns and rows are off, for each shape. If a layout was mixed up or a bias
    left out, and float64 gives the same output that way, it is said.

    ## How it is fixed
    `VLLM_DISABLED_KERNELS=<kernel>` lets vLLM ask the next kernel of the row. Report it to the kernel's makers with these shapes.
    """
    for one, evidence in _find(self, case):
        known = one.confusion
        why = f"; it is what float64 gives with {known.name}" if known else ", and no known confusion explains it"
        yield _finding(self, case, one, f"{one.kernel}, selected for {one.scheme}, is wrong{why}.", evidence)


@rule("NUM002", "A selected kernel misroutes or leaves out scales", "error", needs=(PROBE,))
def scales(self: Rule, case: Case) -> Iterator[Finding]:
    """The output is what float64 gives when the scales are read in another way than the checkpoint means.

    ## What it means
    Each channel or block of the weight has a scale of its own. Here some got another's, or none: a `[1, N]` scale taken for
    blocks, a transposed table, a scale left out or inverted.

    ## Why it matters
    Nothing crashes. Each layer is off by factors between its scales, and the answers are noise.

    ## How it looks
    The wrong reading in words, and how closely it reproduces the kernel's output.

    ## How it is fixed
    `VLLM_DISABLED_KERNELS=<kernel>` lets vLLM ask the next kernel of the row.
    """
    for one, evidence in _find(self, case):
        known = one.confusion
        name = known.name if known else "other scales"
        yield _finding(self, case, one, f"{one.kernel}, selected for {one.scheme}, computes with {name}.", evidence)


@rule("NUM003", "A selected kernel reads another FP8 format", "error", needs=(PROBE,))
def fp8_format(self: Rule, case: Case) -> Iterator[Finding]:
    """The output is what float64 gives when the weight's bytes are read as another 8-bit format.

    ## What it means
    e4m3fn, e5m2 and the fnuz variants share their size and not their meaning: 0x38 is 1.0 in e4m3fn and 0.5 in e5m2.

    ## Why it matters
    Nothing crashes, and every weight is another number. `!!!!` is a usual sign.

    ## How it looks
    The format whose reading reproduces the kernel's output.

    ## How it is fixed
    `VLLM_DISABLED_KERNELS=<kernel>` lets vLLM ask the next kernel of the row.
    """
    for one, evidence in _find(self, case):
        known = one.confusion
        name = known.name if known else "weights in another format"
        yield _finding(self, case, one, f"{one.kernel}, selected for {one.scheme}, computes with {name}.", evidence)


@rule("NUM004", "A selected kernel returns NaN or infinity", "error", needs=(PROBE,))
def nonfinite(self: Rule, case: Case) -> Iterator[Finding]:
    """Finite operands went in, their product is finite and small, and NaN or Inf came out.

    ## What it means
    Often 0/0 for a block, channel or row that is all zero (padding, dead experts), or an overflow of float16 on the way.

    ## Why it matters
    One NaN in a row makes the whole row NaN after the next norm; the sampler then returns token 0 for ever.

    ## How it looks
    How many, and what the places have in common.

    ## How it is fixed
    `VLLM_DISABLED_KERNELS=<kernel>` lets vLLM ask the next kernel of the row.
    """
    for one, evidence in _find(self, case):
        places = list(dict.fromkeys(p for bad in one.failed for p in bad.nonfinite_at))
        cause = f"{one.kernel}, selected for {one.scheme}, returns NaN or infinity in {'; '.join(places)}."
        yield _finding(self, case, one, cause, evidence)


@rule("NUM005", "Some columns of a selected kernel's output are wrong", "error", needs=(PROBE,))
def columns(self: Rule, case: Case) -> Iterator[Finding]:
    """Most columns agree with float64, and a few do not.

    ## What it means
    A tile at the edge, a tail that is not a multiple of the tile, or an index that is off by one.

    ## Why it matters
    An error norm over all outputs hides it. One wrong feature in every layer is enough to spoil an answer.

    ## How it looks
    The number of wrong columns, the worst of them and its error.

    ## How it is fixed
    `VLLM_DISABLED_KERNELS=<kernel>` lets vLLM ask the next kernel of the row.
    """
    for one, evidence in _find(self, case):
        worst = max(one.failed, key=lambda bad: bad.worst_column_error or 0)
        cause = f"{one.kernel}, selected for {one.scheme}, is wrong in "
        cause += f"{worst.wrong_columns} of {worst.shape[1]} columns (worst: {worst.worst_column})."
        yield _finding(self, case, one, cause, evidence)


@rule("NUM006", "A selected kernel is wrong for some numbers of rows", "error", needs=(PROBE,))
def rows(self: Rule, case: Case) -> Iterator[Finding]:
    """With the same weights, some numbers of activation rows give the right product and others do not.

    ## What it means
    Kernels take other paths for one token, for full tiles and for what is left over.

    ## Why it matters
    Short prompts are answered well and longer ones badly, or answers change with the load.

    ## How it looks
    The row counts that are wrong and those that are right.

    ## How it is fixed
    `VLLM_DISABLED_KERNELS=<kernel>` lets vLLM ask the next kernel of the row.
    """
    for one, evidence in _find(self, case):
        bad = ", ".join(f"M={m}" for m in one.some_rows_only)
        good = sorted({x.shape[0] for x in one.cases if x.operands == "ordinary" and x.shape[0] not in one.some_rows_only})
        cause = f"{one.kernel}, selected for {one.scheme}, is wrong at {bad} and right at {', '.join(f'M={m}' for m in good)}."
        yield _finding(self, case, one, cause, evidence)


@rule("NUM007", "A selected kernel fails on the model's shapes", "error", needs=(PROBE,))
def fails(self: Rule, case: Case) -> Iterator[Finding]:
    """VLLM's chooser selects the kernel, and running it on a layer of the model's shape raises.

    ## What it means
    The kernel takes the scheme and not this shape, this number of rows, a bias, or this kind of scale.

    ## Why it matters
    The server ends at its first forward pass, or at the first request of such a length.

    ## How it looks
    The exception and the shape.

    ## How it is fixed
    `VLLM_DISABLED_KERNELS=<kernel>` lets vLLM ask the next kernel of the row.
    """
    for one, evidence in _find(self, case):
        error = next(bad.raised for bad in one.failed if bad.raised)
        count = sum(1 for bad in one.failed if bad.raised)
        cause = f"{one.kernel}, selected for {one.scheme}, raises in {count} of {len(one.cases)} calls: {said(error)}."
        yield _finding(self, case, one, cause, evidence)


RULES = (something_else, scales, fp8_format, nonfinite, columns, rows, fails)
