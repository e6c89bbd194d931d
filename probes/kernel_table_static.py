"""The static half of the ``kernel_table`` probe: vLLM's kernel tables, their readers and its MoE oracles, from source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from probes.facts import ConditionalRowFact, MoeOracleFact, TableFact
from probes.kernel_table_lookup import find_lookup
from probes.kernel_table_rows import EVERY, Table, guarded_platform, read_tables
from probes.vllm_source import Module, SourceTree

BELOW = "model_executor"
_NEEDLES = (b"POSSIBLE_", b"PlatformEnum")
_PLATFORMS = ("CUDA", "ROCM", "XPU", "CPU", "TPU", "OOT")


def read_source(tree: SourceTree) -> tuple[list[TableFact], list[MoeOracleFact], str]:
    """Tables, oracles and layout of a vLLM; what could not be read is added to ``tree.problems``."""
    modules = list(tree.containing(BELOW, _NEEDLES))
    tables = [table for module in modules for table in read_tables(module)]
    facts = [_table_fact(table, modules, tree) for table in tables]
    facts.sort(key=lambda fact: (fact.file, fact.line))
    if not facts:
        tree.problems.append(f"no kernel table was found below {tree.relative(tree.root / BELOW)}")
    return facts, read_oracles(tree), _layout(facts)


def _layout(facts: list[TableFact]) -> str:
    for layout, part in (("kernels/linear", "/kernels/linear/"), ("quantization/kernels", "/quantization/kernels/")):
        if any(part in fact.file for fact in facts):
            return layout
    return "unknown"


def _table_fact(table: Table, modules: list[Module], tree: SourceTree) -> TableFact:
    rows: dict[str, list[str]] = {}
    conditional: list[ConditionalRowFact] = []
    for platform, kernels in table.rows.items():
        if platform in table.certain:
            rows[platform] = [kernel.name for kernel in kernels if not kernel.condition]
        groups: dict[str, list[str]] = {}
        lines: dict[str, int] = {}
        for kernel in kernels:
            if kernel.condition:
                groups.setdefault(kernel.condition, []).append(kernel.name)
                lines.setdefault(kernel.condition, kernel.line)
        for condition, names in groups.items():
            whose = (guarded_platform(condition) or platform) if platform == EVERY else platform
            conditional.append(ConditionalRowFact(whose, names, condition, lines[condition]))
    lookup = find_lookup(table, modules, tree)
    return TableFact(
        name=table.name,
        kind=table_kind(table.name, table.module.file, table.annotation),
        file=table.module.file,
        line=table.line,
        by_platform=table.by_platform,
        rows=rows,
        lookup=lookup.how if lookup else "unknown",
        lookup_file=lookup.file if lookup else None,
        lookup_line=lookup.line if lookup else None,
        conditional=conditional,
    )


def table_kind(name: str, file: str, annotation: str) -> str:
    """What a table is for: the middle of its name, or, for the bare ``_POSSIBLE_KERNELS``, its folder and the class it lists."""
    middle = re.sub(r"^_*(?:POSSIBLE_?)?|_?KERNELS?$", "", name).lower().strip("_")
    if middle:
        return middle
    if "/mixed_precision/" in file or "MPLinearKernel" in annotation:
        return "mixed_precision"
    if "/scaled_mm/" in file or "ScaledMM" in annotation:
        return "scaled_mm"
    # The one bare table of the kernels/linear layout is the mixed-precision one.
    return "mixed_precision" if "/kernels/linear/" in file else "unknown"


# -- MoE oracles -------------------------------------------------------------------------------------------------------


def read_oracles(tree: SourceTree) -> list[MoeOracleFact]:
    """The MoE backend oracles (``fused_moe/oracle/*.py``), which vLLM has had since 0.14."""
    facts = []
    for path in tree.files(BELOW):
        if path.parent.name == "oracle" and path.stem not in {"__init__", "base"}:
            module = tree.parse(path)
            fact = _oracle(module) if module is not None else None
            if fact is not None:
                facts.append(fact)
    return facts


def _oracle(module: Module) -> MoeOracleFact | None:
    listed = _enum_members(module) or _listed_members(module)
    if listed is None:
        return None
    line, backends = listed
    known = set(backends)
    by_platform: dict[str, list[str]] = {}

    def note(platform: str, backend: str) -> None:
        row = by_platform.setdefault(platform, [])
        if backend not in row:
            row.append(backend)

    for node in ast.walk(module.tree):
        if isinstance(node, ast.If | ast.IfExp):
            body: list[ast.AST] = [*node.body] if isinstance(node.body, list) else [node.body]
            for platform in _asked_platforms(node.test):
                for backend in _backends_in(body):
                    if backend in known:
                        note(platform, backend)
    for backend in backends:
        first = backend.split("_")[0]
        if first in _PLATFORMS:
            note(first, backend)
    return MoeOracleFact(module.name.split(".")[-1], module.file, line, backends, by_platform)


def _enum_members(module: Module) -> tuple[int, list[str]] | None:
    for node in module.tree.body:
        if (
            isinstance(node, ast.ClassDef)
            and node.name.endswith("Backend")
            and any("Enum" in ast.unparse(base) for base in node.bases)
        ):
            targets = [item.targets[0] for item in node.body if isinstance(item, ast.Assign)]
            return node.lineno, [target.id for target in targets if isinstance(target, ast.Name) and target.id != "NONE"]
    return None


def _listed_members(module: Module) -> tuple[int, list[str]] | None:
    """An oracle without an enum of its own lists members of another's: ``_SUPPORTED_BACKENDS = (Fp8MoeBackend.XPU, …)``."""
    for node in module.tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Tuple | ast.List):
            members = _backends_in(value.elts)
            if members and len(members) == len(value.elts):
                return node.lineno, members
    return None


def _backends_in(nodes: Iterable[ast.AST]) -> list[str]:
    """Members named as ``SomethingBackend.MEMBER`` in a piece of code, in order of their place."""
    found = [
        (item.lineno, item.col_offset, item.attr)
        for node in nodes
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id.endswith("Backend")
    ]
    return list(dict.fromkeys(attr for _, _, attr in sorted(found)))


def _asked_platforms(test: ast.expr) -> list[str]:
    """Platforms that a condition asks for: ``current_platform.is_xpu()``, alone or among others, but not negated."""
    found = []
    stack: list[ast.AST] = [test]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            platform = guarded_platform(ast.unparse(node)) if not node.args else None
            if platform is not None:
                found.append(platform)
        stack.extend(ast.iter_child_nodes(node))
    return found
