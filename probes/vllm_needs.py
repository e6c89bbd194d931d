"""What vLLM's own source asks of its surroundings before it does anything: distribution metadata, and modules of its platform.

Read from the source with ``ast``, so that the answer is that of the release which is installed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path

from probes.facts import CommandFact, ImportFact
from probes.packages import find_package

CLI = "entrypoints/cli/main.py"
PLATFORM_FILES = ("platforms/__init__.py", "platforms/xpu.py", "_xpu_ops.py")
PLATFORM_PACKAGES = frozenset({"vllm_xpu_kernels", "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"})
METADATA_CALLS = frozenset({"version", "distribution", "metadata"})


def _tree(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(path.read_bytes(), filename=str(path))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def asked_distribution(vllm: Path) -> tuple[str, int] | None:
    """Distribution whose metadata the ``vllm`` command asks for, and the line; None when it asks for none."""
    tree = _tree(vllm / CLI)
    for node in ast.walk(tree) if tree else ():
        if not isinstance(node, ast.Call) or len(node.args) != 1:
            continue
        source, argument = ast.unparse(node.func), node.args[0]
        direct = source in METADATA_CALLS or ("metadata" in source and source.rpartition(".")[2] in METADATA_CALLS)
        if direct and isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            return argument.value, node.lineno
    return None


def _lookup(name: str, paths: Sequence[str]) -> str | None:
    """The error with which this interpreter answers when metadata of a distribution is asked for; None when it is there."""
    if next(iter(importlib.metadata.distributions(name=name, path=list(paths))), None) is not None:
        return None
    error = importlib.metadata.PackageNotFoundError(name)
    return f"importlib.metadata.PackageNotFoundError: {error}"


def script_interpreter(path: Path) -> str | None:
    """Interpreter of a console script: from ``#!/path/python``, or from the ``exec`` that pip writes for a long path."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(1024).decode("utf-8", "replace")
    except OSError:
        return None
    first, _, rest = head.partition("\n")
    if not first.startswith("#!"):
        return None
    words = first[2:].split()
    if words and Path(words[0]).name == "env":
        name = next((w for w in words[1:] if not w.startswith("-")), "")
        return shutil.which(name) or name or None
    if words and Path(words[0]).name == "sh" and (match := re.match(r"""'''exec'\s+(?:"([^"]+)"|(\S+))""", rest)):
        return match.group(1) or match.group(2)
    return words[0] if words else None


def find_command(name: str, executable: str = sys.executable) -> str | None:
    """Path of a command: beside the interpreter first, then on PATH."""
    for folder in (sysconfig.get_path("scripts"), str(Path(executable).parent)):
        path = Path(folder) / name
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return shutil.which(name)


def same_python(one: str | None, other: str = sys.executable) -> bool | None:
    """Whether two interpreters are the same: in the same folder, since environments share the file behind their links."""
    if one is None:
        return None
    return os.path.realpath(Path(one).parent) == os.path.realpath(Path(other).parent)


def observe_command(vllm: Path | None, paths: Sequence[str]) -> CommandFact:
    """The ``vllm`` command and whether the metadata it asks for is there.

    Args:
        vllm: folder of the vLLM package, None when there is none.
        paths: search path of the interpreter.
    """
    command = find_command("vllm")
    interpreter = script_interpreter(Path(command)) if command else None
    asked = asked_distribution(vllm) if vllm else None
    error = _lookup(asked[0], paths) if asked else None
    return CommandFact(
        name="vllm",
        path=command,
        needs_distribution=asked[0] if asked else None,
        distribution_found=error is None if asked else None,
        asked_at=f"vllm/{CLI}:{asked[1]}" if asked else "",
        error=error,
        interpreter=interpreter,
        same_interpreter=same_python(interpreter),
    )


def _imports(tree: ast.AST, conditional: bool = False) -> Iterator[tuple[str, int, bool]]:
    """Absolute imports with their line, and whether an ``if`` decides on them. A ``try`` does not: it only hides the failure."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, conditional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno, conditional
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("xpu_platform"):
            continue
        else:
            yield from _imports(node, conditional or isinstance(node, (ast.If, ast.IfExp, ast.ExceptHandler, ast.ClassDef)))


def _exists(module: str) -> bool:
    """Whether a module's file is there, without importing its package."""
    top, *rest = module.split(".")
    place = find_package(top)
    if place.folder is None:
        return False
    if not rest:
        return True
    base = place.folder.joinpath(*rest)
    return (base / "__init__.py").is_file() or any(
        base.with_name(base.name + s).is_file() for s in (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES)
    )


def observe_imports(vllm: Path | None) -> list[ImportFact]:
    """What vLLM imports to find out that it runs on an XPU, and whether it is there; each module once."""
    found: dict[str, ImportFact] = {}
    for file in PLATFORM_FILES if vllm else ():
        tree = _tree(vllm / file) if vllm else None
        for module, line, conditional in _imports(tree) if tree else ():
            if module.partition(".")[0] in PLATFORM_PACKAGES and (module not in found or found[module].conditional):
                found[module] = ImportFact(module, f"vllm/{file}", line, _exists(module), conditional)
    return list(found.values())


def unknown_variables(vllm: Path | None, names: Iterable[str]) -> list[str]:
    """Those ``VLLM_*`` variables that vLLM's own list of variables does not hold; none when the list cannot be read."""
    tree = _tree(vllm / "envs.py") if vllm else None
    known = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)} if tree else set()
    return sorted(n for n in names if n.startswith("VLLM_") and n not in known) if known else []
