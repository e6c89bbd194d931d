"""What kernel-table facts say of the schemes in question: one answer a table or MoE oracle, live evidence before static."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from probes.facts import KernelTableFacts, SelectionFact, TableFact
from probes.schemes import BY_NAME, SCHEMES, Scheme
from xpufp8.report import Evidence
from xpufp8.rules.base import Case

PROBE = "kernel_table"
FP8_TABLES = ("fp8", "fp8_block", "wfp8a16", "mxfp8")
"""Tables that FP8 checkpoints and ``--quantization fp8`` ask, most common first."""
ORACLES = {
    "fp8": "fp8", "fp8_block": "fp8", "wfp8a16": "fp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "int8": "int8",
    "mixed_precision": "int_wna16",
}  # fmt: skip
"""Scheme's table to the MoE oracle that answers for experts of that scheme."""
_OLDER_KINDS = {"int8": ("int8", "scaled_mm")}
_SAME_DEVICE = {"CUDA": {"CUDA", "ROCM"}}

Outcome = Literal["chosen", "refused", "no row", "not told", "no table"]


@dataclass(frozen=True)
class Need:
    """Something that a model asks of vLLM's kernel selection: some schemes of one table (or oracle), for some layers."""

    table: str
    """Table kind, or ``moe:<oracle>``."""
    schemes: tuple[Scheme, ...]
    layers: tuple[str, ...] = ()

    @property
    def moe(self) -> bool:
        """True for experts, whose kernels an oracle chooses."""
        return self.table.startswith("moe:")


@dataclass
class Answer:
    """What is known of one need, and from what."""

    need: Need
    outcome: Outcome
    table: TableFact | None = None
    selections: list[SelectionFact] = field(default_factory=list)
    """Those that the outcome rests on; empty when it rests on the source alone."""
    why: str = ""
    """For ``not told``: what stood in the way."""

    @property
    def kind(self) -> str:
        """Kind of the table that answers, which older releases named otherwise; the need's own where there is none."""
        return self.table.kind if self.table is not None else self.need.table

    @property
    def names(self) -> str:
        """The schemes of the outcome, for people."""
        seen = {selection.scheme for selection in self.selections}
        return ", ".join(scheme.name for scheme in self.need.schemes if scheme.name in seen or not seen)


def needs(case: Case) -> list[Need]:
    """What the model asks for; without a model, every FP8 table and the FP8 oracle."""
    if case.model is None:
        linear = [Need(kind, tuple(s for s in SCHEMES if s.table == kind)) for kind in FP8_TABLES]
        return [*linear, Need("moe:fp8", tuple(s for s in SCHEMES if ORACLES.get(s.table) == "fp8"))]
    found: dict[str, tuple[list[Scheme], list[str]]] = {}
    for use in case.model.uses:
        scheme = BY_NAME.get(use.scheme)
        if scheme is None or scheme.table == "none":
            continue
        table = f"moe:{ORACLES[scheme.table]}" if use.moe and scheme.table in ORACLES else scheme.table
        if use.moe and scheme.table not in ORACLES:
            continue
        schemes, layers = found.setdefault(table, ([], []))
        schemes.append(scheme)
        layers.append(use.layers)
    return [Need(table, tuple(dict.fromkeys(s)), tuple(dict.fromkeys(ls))) for table, (s, ls) in found.items()]


def answers(case: Case, facts: KernelTableFacts) -> Iterator[Answer]:
    """One answer or more for each need: some of its schemes may have a kernel and others none."""
    for need in needs(case):
        table = None if need.moe else table_of(facts, need.table)
        asked = _asked(case, facts, need)
        if asked:
            yield from _live(case, need, table, asked)
            missing = tuple(s for s in need.schemes if s.name not in {one.scheme for one in asked})
            need = Need(need.table, missing, need.layers)
        if need.schemes:
            yield _static(case, facts, need, table)


def table_of(facts: KernelTableFacts, kind: str) -> TableFact | None:
    """The table of a kind, under any name that it has had."""
    kinds = _OLDER_KINDS.get(kind, (kind,))
    return next((table for wanted in kinds for table in facts.tables if table.kind == wanted), None)


def same_platform(case: Case, facts: KernelTableFacts) -> bool:
    """Whether vLLM detected the platform that the target names; live answers for another one prove nothing."""
    return facts.platform in _SAME_DEVICE.get(case.platform, {case.platform})


def _asked(case: Case, facts: KernelTableFacts, need: Need) -> list[SelectionFact]:
    """Live selections about the need, for the model's dtype where there are some."""
    if not same_platform(case, facts):
        return []
    kinds = {need.table, *_OLDER_KINDS.get(need.table, ())}
    names = {scheme.name for scheme in need.schemes}
    found = [one for one in facts.selections if one.table in kinds and one.scheme in names]
    dtype = case.model.dtype if case.model is not None else "bfloat16"
    return [one for one in found if one.activation_dtype == dtype] or found


def _live(case: Case, need: Need, table: TableFact | None, asked: Sequence[SelectionFact]) -> Iterator[Answer]:
    groups: dict[Outcome, list[SelectionFact]] = {}
    for one in asked:
        groups.setdefault(_outcome(one, table, case.platform), []).append(one)
    for outcome, selections in groups.items():
        why = ""
        if outcome == "not told":
            error = selections[0].error
            why = (
                f"{_short(error.type)}: {first_line(error.message)}"
                if error is not None
                else "vLLM gave neither a kernel nor a reason"
            )
        yield Answer(need, outcome, table, selections, why)


def _outcome(one: SelectionFact, table: TableFact | None, platform: str) -> Outcome:
    if one.kernel is not None:
        return "chosen"
    if one.error is not None:
        return "no row" if one.error.type.endswith("KeyError") and "PlatformEnum" in one.error.message else "not told"
    if one.reasons:
        return "refused"
    # No kernel and no reason: the chooser went through an empty list.
    return "refused" if table is not None and _row(table, platform) else "no row"


def _row(table: TableFact, platform: str) -> list[str] | None:
    return table.rows.get(platform) if table.by_platform else table.rows.get("*")


def _static(case: Case, facts: KernelTableFacts, need: Need, table: TableFact | None) -> Answer:
    not_asked = _why_not_asked(case, facts)
    if need.moe:
        known = any(f"moe:{oracle.name}" == need.table for oracle in facts.moe)
        return Answer(need, "not told" if known or not facts.tables else "no table", why=not_asked)
    if table is None:
        by_method = facts.layout == "quantization/kernels" or need.table not in FP8_TABLES[:2]
        if facts.tables and by_method:
            return Answer(need, "no table", why=not_asked)
        return Answer(
            need, "not told", why=not_asked if not facts.tables else f"no table of the kind {need.table} was found in its source"
        )
    if _row(table, case.platform):
        return Answer(need, "not told", table, why=not_asked)
    maybe = [one for one in table.conditional if one.platform in {case.platform, "*"}]
    if maybe:
        said = "; ".join(f"{', '.join(one.kernels)} if {one.condition} (line {one.line})" for one in maybe)
        return Answer(need, "not told", table, why=f"its {case.platform} row depends on a condition: {said}")
    return Answer(need, "no row", table) if table.by_platform else Answer(need, "not told", table, why=not_asked)


def _why_not_asked(case: Case, facts: KernelTableFacts) -> str:
    if facts.live_error is not None:
        return f"{_short(facts.live_error.type)}: {first_line(facts.live_error.message)}"
    if facts.problems:
        return facts.problems[0]
    if facts.platform is None:
        return "only vLLM's source was read, no chooser was asked"
    if not same_platform(case, facts):
        return f"vLLM detects the platform {facts.platform}, not {case.platform}"
    return "vLLM's chooser was not asked about it"


def _short(type_name: str) -> str:
    return type_name.rsplit(".", 1)[-1]


def first_line(text: str) -> str:
    """The first line of a text, or all of it if there is no other."""
    return text.strip().splitlines()[0] if text.strip() else ""


# -- evidence ----------------------------------------------------------------------------------------------------------


def row_evidence(table: TableFact, platform: str) -> Evidence:
    """The table as it stands in the source: which platforms have a row, or what the one in question holds."""
    row = table.rows.get(platform if table.by_platform else "*")
    if row is None:
        observed = f"{table.name} has rows for {', '.join(sorted(table.rows)) or 'no platform'}; none for {platform}"
    elif row:
        observed = f"{table.name} lists for {platform}: {', '.join(row)}"
    else:
        observed = f"{table.name} has a row for {platform}, and it is empty"
    return Evidence(probe=PROBE, mode="static", observed=observed, where=f"{table.file}:{table.line}")


def reader_evidence(table: TableFact) -> Evidence | None:
    """How the chooser reads the table, with the line that does."""
    how = {
        "index": "the chooser indexes the table with the platform",
        "get": "the chooser asks with .get, so a missing row is an empty list",
        "iterate": "the chooser goes through the whole list",
    }.get(table.lookup)
    if how is None or table.lookup_file is None:
        return None
    return Evidence(probe=PROBE, mode="static", observed=how, where=f"{table.lookup_file}:{table.lookup_line}")


def selection_evidence(selections: Iterable[SelectionFact], limit: int = 6) -> list[Evidence]:
    """What vLLM answered, in its own words; equal answers for several schemes, dtypes or shapes are said once."""
    said: dict[str, list[SelectionFact]] = {}
    for one in selections:
        said.setdefault(_words(one), []).append(one)
    evidence = [
        Evidence(probe=PROBE, mode=group[0].mode, observed=words, where=_about(group))
        for words, group in list(said.items())[:limit]
    ]
    left = len(said) - len(evidence)
    if left > 0:
        rest = f"{left} more answers of this kind are in the probe's facts"
        evidence.append(Evidence(probe=PROBE, mode=evidence[0].mode, observed=rest))
    return evidence


def _words(one: SelectionFact) -> str:
    refusals = "\n".join(_grouped(one.reasons))
    if one.kernel is not None:
        return f"selected {one.kernel}" + (f", after\n{refusals}" if refusals else "")
    if one.error is not None:
        return f"{_short(one.error.type)}: {one.error.message.strip()}"
    return refusals or "ValueError without a reason: the list of kernels was empty"


def _grouped(reasons: Sequence[str]) -> list[str]:
    """Refusals as they are; of a long list (MoE oracles ask some twenty classes) those that say the same share a line."""
    if len(reasons) <= 4:
        return list(reasons)
    by_text: dict[str, list[str]] = {}
    for reason in reasons:
        name, colon, text = reason.partition(": ")
        by_text.setdefault(text if colon else reason, []).extend([name] if colon else [])
    return [f"{', '.join(names)}: {text}" if names else text for text, names in by_text.items()]


def _about(group: Sequence[SelectionFact]) -> str:
    schemes = ", ".join(dict.fromkeys(one.scheme for one in group))
    dtypes = ", ".join(dict.fromkeys(one.activation_dtype for one in group))
    shapes = list(dict.fromkeys("x".join(map(str, one.shape)) for one in group if one.shape))
    shown = ", ".join(shapes[:4]) + (f" and {len(shapes) - 4} more" if len(shapes) > 4 else "")
    return f"{schemes}; {dtypes}" + (f"; [N, K] {shown}" if shown else "")
