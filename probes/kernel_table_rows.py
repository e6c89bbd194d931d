"""Kernel tables as vLLM's source builds them: a small evaluator of the few statements that such tables are written with.

A table is a dict from platform to a list of kernel classes, or one list for every platform, whose name looks like
``_POSSIBLE_…KERNELS``. It may be written at once, by concatenation and unpacking, or grow after its definition (``update``,
``append``, ``extend``, ``setdefault``, item assignment), plainly or under an ``if``. Nothing is imported or executed; what
the source alone cannot decide is kept apart, with its condition.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from probes.vllm_source import Module

TABLE_NAME = re.compile(r"^_*POSSIBLE_(?:[A-Z0-9]+_)*KERNELS$")
EVERY = "*"
"""Row of a list that is not divided by platform."""

_GUARD = re.compile(r"(?:\w+\.)*is_(cuda|rocm|xpu|cpu|tpu|out_of_tree)\(\)")
_PLATFORM_OF_GUARD = {"out_of_tree": "OOT"}


def guarded_platform(condition: str) -> str | None:
    """``XPU`` for the condition ``current_platform.is_xpu()`` and nothing else beside it."""
    match = _GUARD.fullmatch(condition.strip())
    return _PLATFORM_OF_GUARD.get(match.group(1), match.group(1).upper()) if match else None


@dataclass(frozen=True)
class Kernel:
    """One class named in a row, and under which condition it stands there (empty: always)."""

    name: str
    line: int
    condition: str = ""


@dataclass
class Table:
    """A table under construction."""

    name: str
    module: Module
    line: int
    by_platform: bool
    annotation: str = ""
    rows: dict[str, list[Kernel]] = field(default_factory=dict)
    certain: set[str] = field(default_factory=set)
    """Platforms whose row exists whatever the conditions, even if it is empty."""

    def row(self, platform: str, condition: str) -> list[Kernel]:
        """The row of a platform, begun if it is not there."""
        if not condition:
            self.certain.add(platform)
        return self.rows.setdefault(platform, [])


def read_tables(module: Module) -> list[Table]:
    """Every kernel table that a module defines, in the order of their definition."""
    reader = _Reader(module)
    reader.block(module.tree.body, "")
    return [table for table in reader.tables.values() if _holds_kernels(table)]


def _holds_kernels(table: Table) -> bool:
    """A dict by platform under another name counts when kernel classes stand in it (attention backends, say, do not)."""
    if TABLE_NAME.match(table.name):
        return True
    names = [kernel.name for row in table.rows.values() for kernel in row]
    return bool(names) and all(name.endswith("Kernel") for name in names)


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _both(first: str, second: str) -> str:
    return f"{first} and {second}" if first and second else first or second


def _under(kernels: Sequence[Kernel], condition: str) -> list[Kernel]:
    return [replace(kernel, condition=_both(condition, kernel.condition)) for kernel in kernels] if condition else list(kernels)


class _Reader:
    """Walks a module's top level and keeps what it knows of each name."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.tables: dict[str, Table] = {}
        self.lists: dict[str, list[Kernel]] = {}
        self.platforms: dict[str, str] = {}
        self.enums = {"PlatformEnum"}
        self.skipped_under: set[str] = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}

    # -- statements ----------------------------------------------------------------------------------------------------

    def block(self, body: Sequence[ast.stmt], condition: str) -> None:
        for node in body:
            self.statement(node, condition)

    def statement(self, node: ast.stmt, condition: str) -> None:
        if isinstance(node, ast.ImportFrom | ast.Import):
            self.enums.update(
                alias.asname for alias in node.names if alias.name.split(".")[-1] == "PlatformEnum" and alias.asname
            )
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self.assign(target, node.value, "", condition)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, node.value, _text(node.annotation), condition)
        elif isinstance(node, ast.AugAssign):
            self.grow(node.target, node.value, condition)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self.call(node.value, condition)
        elif isinstance(node, ast.Delete):
            self.delete(node)
        elif isinstance(node, ast.If):
            self.branch(node, condition)
        elif isinstance(node, ast.With):
            self.block(node.body, condition)
        elif isinstance(node, ast.Try):
            # What a try brings is there only if nothing before it in the body raised.
            why = f"{_text(node.body[0]).splitlines()[0]} (in a try) does not raise" if node.handlers else ""
            imports = all(isinstance(item, ast.Import | ast.ImportFrom) for item in node.body)
            self.block(node.body, condition if imports else _both(condition, why))
            self.block(node.orelse, _both(condition, why))
            for handler in node.handlers:
                self.block(handler.body, _both(condition, f"{_text(node.body[0]).splitlines()[0]} raises"))
            self.block(node.finalbody, condition)

    def branch(self, node: ast.If, condition: str) -> None:
        test = _text(node.test)
        if test in self.skipped_under:
            self.block(node.orelse, condition)
            return
        self.block(node.body, _both(condition, test))
        self.block(node.orelse, _both(condition, f"not ({test})"))

    def assign(self, target: ast.expr, value: ast.expr, annotation: str, condition: str) -> None:
        if isinstance(target, ast.Subscript):
            self.assign_row(target, value, condition)
            return
        if not isinstance(target, ast.Name):
            return
        name = target.id
        if isinstance(value, ast.Name) and value.id in self.enums:
            self.enums.add(name)
        elif (platform := self.platform(value)) is not None:
            self.platforms[name] = platform
        elif (rows := self.dict_rows(value)) is not None and (rows or TABLE_NAME.match(name)):
            self.define(name, target.lineno, annotation, condition, rows)
        elif TABLE_NAME.match(name):
            self.define(name, target.lineno, annotation, condition, {EVERY: self.kernels(value)})
        elif isinstance(value, ast.List | ast.Tuple | ast.BinOp | ast.IfExp):
            self.lists[name] = _under(self.kernels(value), condition)

    def define(self, name: str, line: int, annotation: str, condition: str, rows: dict[str, list[Kernel]]) -> None:
        by_platform = EVERY not in rows
        known = self.tables.get(name)
        if not condition or known is None:
            known = self.tables[name] = Table(name, self.module, line, by_platform, annotation)
        for platform, kernels in rows.items():
            under = self.beside(platform, condition)
            known.row(platform, under).extend(_under(kernels, under))

    def assign_row(self, target: ast.Subscript, value: ast.expr, condition: str) -> None:
        table, platform = self.place(target)
        if table is None or platform is None:
            return
        under = self.beside(platform, condition)
        row = table.row(platform, under)
        if not under:
            row.clear()
        row.extend(_under(self.kernels(value), under))

    def grow(self, target: ast.expr, value: ast.expr, condition: str) -> None:
        if isinstance(target, ast.Name) and target.id in self.tables:
            table = self.tables[target.id]
            if table.by_platform:  # |=
                self.update(table, value, condition)
            else:
                table.row(EVERY, condition).extend(_under(self.kernels(value), condition))
        elif isinstance(target, ast.Name) and target.id in self.lists:
            self.lists[target.id] += _under(self.kernels(value), condition)
        elif isinstance(target, ast.Subscript):
            table_or_none, platform = self.place(target)
            if table_or_none is not None and platform is not None:
                under = self.beside(platform, condition)
                table_or_none.row(platform, under).extend(_under(self.kernels(value), under))

    def update(self, table: Table, value: ast.expr, condition: str) -> None:
        for platform, kernels in (self.dict_rows(value) or {}).items():
            under = self.beside(platform, condition)
            row = table.row(platform, under)
            if not under:
                row.clear()
            row.extend(_under(kernels, under))

    def call(self, node: ast.Call, condition: str) -> None:
        """``T.update({…})``, ``T[p].append(K)``, ``T.setdefault(p, []).extend([…])``, ``L.insert(0, K)``."""
        if not isinstance(node.func, ast.Attribute) or not node.args:
            return
        method, owner = node.func.attr, node.func.value
        if isinstance(owner, ast.Name) and owner.id in self.tables and method in {"update", "setdefault"}:
            table = self.tables[owner.id]
            if method == "update":
                self.update(table, node.args[0], condition)
            elif (platform := self.platform(node.args[0])) is not None and platform not in table.certain:
                default = self.kernels(node.args[1]) if len(node.args) > 1 else []
                under = self.beside(platform, condition)
                table.row(platform, under).extend(_under(default, under))
            return
        row, under = self.growing(owner, condition)
        if row is None:
            return
        if method == "append":
            row.extend(_under(self.kernel(node.args[0]), under))
        elif method == "extend":
            row.extend(_under(self.kernels(node.args[0]), under))
        elif method == "insert" and len(node.args) > 1:
            at = node.args[0]
            index = at.value if isinstance(at, ast.Constant) and isinstance(at.value, int) else len(row)
            row[index:index] = _under(self.kernel(node.args[1]), under)
        elif method == "remove" and not under:
            gone = {kernel.name for kernel in self.kernel(node.args[0])}
            row[:] = [kernel for kernel in row if kernel.name not in gone]

    def growing(self, owner: ast.expr, condition: str) -> tuple[list[Kernel] | None, str]:
        """The list that a method is called on, and the condition that holds for what is added."""
        if isinstance(owner, ast.Name):
            if owner.id in self.tables and not self.tables[owner.id].by_platform:
                return self.tables[owner.id].row(EVERY, condition), condition
            return self.lists.get(owner.id), condition
        if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "setdefault":
            self.call(owner, condition)
            owner = ast.Subscript(value=owner.func.value, slice=owner.args[0], ctx=ast.Load()) if owner.args else owner
        if isinstance(owner, ast.Subscript):
            table, platform = self.place(owner)
            if table is not None and platform is not None:
                under = self.beside(platform, condition)
                return table.row(platform, under), under
        return None, condition

    def delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                table, platform = self.place(target)
                if table is not None and platform is not None:
                    table.rows.pop(platform, None)
                    table.certain.discard(platform)

    # -- expressions ---------------------------------------------------------------------------------------------------

    def place(self, target: ast.Subscript) -> tuple[Table | None, str | None]:
        table = self.tables.get(target.value.id) if isinstance(target.value, ast.Name) else None
        return table, self.platform(target.slice)

    def beside(self, platform: str, condition: str) -> str:
        """The condition that remains for a platform's row: one that only asks for that very platform always holds there."""
        return "" if guarded_platform(condition) == platform else condition

    def platform(self, node: ast.expr) -> str | None:
        """Platform that an expression names: ``PlatformEnum.XPU``, an alias of either part, or a name bound to it."""
        if isinstance(node, ast.Name):
            return self.platforms.get(node.id)
        if isinstance(node, ast.Attribute) and node.attr.isupper():
            owner = node.value
            last = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            return node.attr if last in self.enums else None
        return None

    def dict_rows(self, node: ast.expr) -> dict[str, list[Kernel]] | None:
        """Rows of a dict expression by platform; None when it is not such a dict. A key that is no platform makes it none."""
        if isinstance(node, ast.Dict):
            return self.literal_rows(node)
        if isinstance(node, ast.DictComp):
            return self.comprehended_rows(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            left, right = self.dict_rows(node.left), self.dict_rows(node.right)
            return None if left is None or right is None else {**left, **right}
        if isinstance(node, ast.Name) and node.id in self.tables and self.tables[node.id].by_platform:
            return {platform: list(kernels) for platform, kernels in self.tables[node.id].rows.items()}
        if isinstance(node, ast.Call):
            func = _text(node.func).split(".")[-1]
            if func in {"dict", "OrderedDict", "defaultdict", "MappingProxyType", "copy", "deepcopy"}:
                owner = node.func.value if isinstance(node.func, ast.Attribute) and not node.args else None
                inner = node.args[-1] if node.args else owner
                return {} if inner is None or (func == "defaultdict" and len(node.args) == 1) else self.dict_rows(inner)
        return None

    def literal_rows(self, node: ast.Dict) -> dict[str, list[Kernel]] | None:
        rows: dict[str, list[Kernel]] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:  # **other
                inner = self.dict_rows(value)
                if inner is None:
                    return None
                rows.update(inner)
                continue
            platform = self.platform(key)
            if platform is None:
                return None
            rows[platform] = self.kernels(value)
        return rows

    def comprehended_rows(self, node: ast.DictComp) -> dict[str, list[Kernel]] | None:
        """``{p: [K] for p in (PlatformEnum.CUDA, PlatformEnum.ROCM)}``."""
        over = node.generators[0].iter
        if len(node.generators) != 1 or not isinstance(over, ast.List | ast.Tuple | ast.Set):
            return None
        platforms = [self.platform(item) for item in over.elts]
        if not platforms or None in platforms:
            return None
        return {platform: self.kernels(node.value) for platform in platforms if platform is not None}

    def kernels(self, node: ast.expr) -> list[Kernel]:
        """Class names of a list expression, in order."""
        if isinstance(node, ast.List | ast.Tuple):
            return [kernel for item in node.elts for kernel in self.kernel(item)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.kernels(node.left) + self.kernels(node.right)
        if isinstance(node, ast.IfExp):
            test = _text(node.test)
            return _under(self.kernels(node.body), test) + _under(self.kernels(node.orelse), f"not ({test})")
        if isinstance(node, ast.Name):
            if node.id in self.lists:
                return list(self.lists[node.id])
            if node.id in self.tables and not self.tables[node.id].by_platform:
                return list(self.tables[node.id].rows.get(EVERY, []))
        if isinstance(node, ast.Subscript):
            table, platform = self.place(node)
            if table is not None and platform is not None:
                return list(table.rows.get(platform, []))
        if isinstance(node, ast.Call):
            func = _text(node.func).split(".")[-1]
            if func in {"list", "tuple", "copy"} and len(node.args) <= 1:
                owner = node.func.value if isinstance(node.func, ast.Attribute) and not node.args else None
                inner = node.args[0] if node.args else owner
                return self.kernels(inner) if inner is not None else []
        return [Kernel(f"<{_text(node)}>", getattr(node, "lineno", 0), "its value is computed when the module is imported")]

    def kernel(self, node: ast.expr) -> list[Kernel]:
        """The class that one element of a list names: a name, an attribute, a string of a lazy registry, or ``*other``."""
        if isinstance(node, ast.Starred):
            return self.kernels(node.value)
        if isinstance(node, ast.Name):
            return [Kernel(node.id, node.lineno)]
        if isinstance(node, ast.Attribute):
            return [Kernel(node.attr, node.lineno)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [Kernel(re.split(r"[.:]", node.value)[-1], node.lineno)]
        if isinstance(node, ast.IfExp):
            test = _text(node.test)
            return _under(self.kernel(node.body), test) + _under(self.kernel(node.orelse), f"not ({test})")
        return [Kernel(f"<{_text(node)}>", node.lineno, "its value is computed when the module is imported")]
