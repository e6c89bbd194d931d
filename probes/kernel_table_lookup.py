"""How vLLM's choosers read their kernel tables: ``table[platform]`` dies of a KeyError, ``.get`` ends in listed reasons.

A table is often handed to a shared chooser as an argument; the parameter is then followed into that function, so that the
line reported is the one that reads it (and the one a KeyError would name).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from probes.kernel_table_rows import Table
from probes.vllm_source import Module, SourceTree

How = Literal["index", "get", "iterate"]

_MUTATORS = {"append", "extend", "insert", "remove", "update", "setdefault", "pop", "clear", "sort", "reverse"}
_WRAPPERS = {"list", "tuple", "enumerate", "reversed", "sorted"}
_CHOOSER = re.compile(r"^_*(choose|select|init|get|find|pick|resolve)_")
_DEPTH = 4
_MEMBERSHIP = (ast.In, ast.NotIn)  # codespell:ignore notin
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Lookup:
    """One place that reads a table."""

    how: How
    file: str
    line: int
    chooser: str
    """Function that the reading starts from, empty at module level."""


def find_lookup(table: Table, modules: Sequence[Module], tree: SourceTree) -> Lookup | None:
    """The read that decides for a platform: choosers before other functions, an index before ``.get`` before a loop."""
    found = [
        lookup
        for module in modules
        if (name := _name_in(table, module)) is not None
        for scope in _scopes(module)
        for lookup in _reads(scope, name, module, tree, _DEPTH)
    ]
    order = ("index", "get", "iterate")
    found.sort(key=lambda lookup: (_CHOOSER.match(lookup.chooser) is None, order.index(lookup.how), lookup.file, lookup.line))
    return found[0] if found else None


def _name_in(table: Table, module: Module) -> str | None:
    """What a module calls the table: its own name where it is defined, the imported one elsewhere, None where it is unknown."""
    if module is table.module:
        return table.name
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and module.absolute(node.module, node.level) == table.module.name:
            for alias in node.names:
                if alias.name == table.name:
                    return alias.asname or alias.name
    return None


@dataclass(frozen=True)
class _Scope:
    name: str
    node: ast.AST
    parents: dict[ast.AST, ast.AST]


def _scopes(module: Module) -> Iterator[_Scope]:
    """Every outermost function of a module (methods too), and its top level without them."""
    functions = [node for node in module.tree.body if isinstance(node, _Function)]
    methods = [
        item for node in module.tree.body if isinstance(node, ast.ClassDef) for item in node.body if isinstance(item, _Function)
    ]
    for function in [*functions, *methods]:
        yield _Scope(function.name, function, _parents(function))
    rest = [node for node in module.tree.body if not isinstance(node, _Function | ast.ClassDef)]
    top = ast.Module(body=rest, type_ignores=[])
    yield _Scope("", top, _parents(top))


def _parents(root: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: parent for parent in ast.walk(root) for child in ast.iter_child_nodes(parent)}


def _reads(scope: _Scope, name: str, module: Module, tree: SourceTree, depth: int) -> Iterator[Lookup]:
    """Reads of a name in one function, and in the functions it is handed to."""
    names = _aliases(scope.node, name)
    for node in ast.walk(scope.node):
        if not (isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)):
            continue
        parent = scope.parents.get(node)
        how = _how(node, parent, scope)
        if how is not None:
            safe = how == "index" and _guarded(node, names, scope)
            yield Lookup("get" if safe else how, module.file, node.lineno, scope.name)
        elif depth and (call := _call_of(node, scope)) is not None:
            for lookup in _follow(call, node, module, tree, depth - 1):
                yield Lookup(lookup.how, lookup.file, lookup.line, scope.name or lookup.chooser)


def _aliases(scope: ast.AST, name: str) -> set[str]:
    """Local names that stand for the same table: ``possible = table``, ``possible = list(table)``."""
    names = {name}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            value = node.value
            if isinstance(value, ast.Call) and _text_of_call(value) in _WRAPPERS and value.args:
                value = value.args[0]
            if isinstance(value, ast.Name) and value.id in names:
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def _how(node: ast.Name, parent: ast.AST | None, scope: _Scope) -> How | None:
    if isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.ctx, ast.Load):
        grand = scope.parents.get(parent)
        return None if isinstance(grand, ast.Attribute) and grand.attr in _MUTATORS else "index"
    if isinstance(parent, ast.Attribute) and parent.attr == "get":
        return "get"
    looping: ast.AST = node
    while isinstance(parent, ast.BinOp) or (isinstance(parent, ast.Call) and _text_of_call(parent) in _WRAPPERS):
        looping, parent = parent, scope.parents.get(parent)
    if isinstance(parent, ast.For | ast.comprehension) and parent.iter is looping:
        return "iterate"
    return None


def _text_of_call(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _guarded(node: ast.Name, names: set[str], scope: _Scope) -> bool:
    """True when the function asks ``platform in table`` itself, or catches the KeyError around the read."""
    for other in ast.walk(scope.node):
        if isinstance(other, ast.Compare) and isinstance(other.ops[-1], _MEMBERSHIP):
            last = other.comparators[-1]
            if isinstance(last, ast.Name) and last.id in names:
                return True
    above: ast.AST | None = node
    while above is not None:
        parent = scope.parents.get(above)
        if (
            isinstance(parent, ast.Try)
            and above in parent.body
            and any(_catches_key_error(handler) for handler in parent.handlers)
        ):
            return True
        above = parent
    return False


def _catches_key_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in {"KeyError", "LookupError", "Exception"} for kind in kinds)


def _call_of(node: ast.Name, scope: _Scope) -> ast.Call | None:
    """The call that takes the name as an argument, by position or keyword."""
    parent = scope.parents.get(node)
    if isinstance(parent, ast.keyword):
        parent = scope.parents.get(parent)
        return parent if isinstance(parent, ast.Call) else None
    return parent if isinstance(parent, ast.Call) and node in parent.args else None


def _follow(call: ast.Call, argument: ast.Name, module: Module, tree: SourceTree, depth: int) -> Iterator[Lookup]:
    found = _function(_text_of_call(call), module, tree)
    if found is None:
        return
    function, home = found
    parameters = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    keyword = next((item.arg for item in call.keywords if item.value is argument), None)
    if keyword is None:
        at = call.args.index(argument) + (
            1 if parameters[:1] in (["self"], ["cls"]) and isinstance(call.func, ast.Attribute) else 0
        )
        keyword = parameters[at] if at < len(parameters) else None
    if keyword is not None:
        yield from _reads(_Scope(function.name, function, _parents(function)), keyword, home, tree, depth)


def _function(name: str, module: Module, tree: SourceTree) -> tuple[_Function, Module] | None:
    """The function of that name in the module, or where the module imports it from."""
    for node in ast.walk(module.tree):
        if isinstance(node, _Function) and node.name == name:
            return node, module
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    home = tree.module(module.absolute(node.module, node.level))
                    if home is not None and home is not module:
                        return _function(alias.name, home, tree)
    return None
