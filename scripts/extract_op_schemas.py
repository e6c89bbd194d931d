"""Write the op-schema catalogue of one release of an op library from its wheel, or from a folder where one is unpacked.

    python scripts/extract_op_schemas.py vllm_xpu_kernels-0.1.16.2-….whl
    python scripts/extract_op_schemas.py site-packages --package vllm-xpu-kernels --csrc vllm-xpu-kernels/csrc

The schemas are read from the shared objects (``probes.op_libraries``), never by loading them; the Python modules are read with
``ast``, never imported. ``--csrc`` names the C++ sources of the same release, which say for which dispatch keys each op has a
kernel; without them that stays unknown. Given a catalogue (.json) in place of a wheel, only that is added to it. The result goes
to xpufp8/data/ops/<package>-<version>.json.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import hashlib
import io
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from email.parser import HeaderParser
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from probes.op_libraries import read_stream  # noqa: E402 - the repository's own package, wherever the script is called from
from probes.op_schemas import CATALOGUES, Catalogue, Export, OpSchema, load_catalogue  # noqa: E402 - the same


class Release:
    """The files of one distribution, in a wheel or in a folder that holds it unpacked."""

    def __init__(self, path: Path, package: str) -> None:
        self.path = path
        self.wheel = zipfile.ZipFile(path) if path.is_file() else None
        names = self.wheel.namelist() if self.wheel else [str(p.relative_to(path)) for p in path.glob("*.dist-info/METADATA")]
        wanted = re.sub(r"[-_.]+", "_", package).lower()
        found = [name for name in names if name.endswith(".dist-info/METADATA") and name.lower().startswith(wanted)]
        if len(found) != 1:
            raise SystemExit(f"{path}: {len(found)} distributions called {package or 'anything'}; use --package")
        with self.open(found[0]) as stream:
            self.metadata = HeaderParser().parsestr(stream.read().decode("utf-8"))
        with self.open(found[0].replace("METADATA", "RECORD")) as stream:
            self.files = [line.rsplit(",", 2)[0] for line in stream.read().decode("utf-8").splitlines() if line]

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """One file; a member of a wheel is held in memory, because ELF readers seek."""
        if self.wheel is None:
            with open(self.path / name, "rb") as stream:
                yield stream
        else:
            yield io.BytesIO(self.wheel.read(name))

    @property
    def source(self) -> str:
        """Where the catalogue comes from: name and SHA-256 of the wheel, or the folder's file list in short."""
        if self.wheel is None:
            return f"{self.metadata['Name']} {self.metadata['Version']}, installed files"
        return f"{self.path.name} sha256:{hashlib.sha256(self.path.read_bytes()).hexdigest()}"


def extract(release: Release) -> Catalogue:
    """The catalogue of a release, dispatch keys not yet known."""
    ops: list[OpSchema] = []
    modules: dict[str, str] = {}
    python: dict[str, list[Export]] = {}
    for name in release.files:
        if name.endswith(".so"):
            with release.open(name) as stream:
                ops += read_stream(stream, name)
            if ".abi3." in name or ".cpython-" in name:
                modules[name.split(".")[0].replace("/", ".")] = name
        elif name.endswith(".py"):
            with release.open(name) as stream:
                python[name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = exports(
                    stream.read().decode("utf-8")
                )
    return Catalogue(
        package=release.metadata["Name"],
        version=release.metadata["Version"],
        source=release.source,
        extracted=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        ops=ops,
        python=python,
        modules=modules,
        requires=release.metadata.get_all("Requires-Dist") or [],
    )


def exports(source: str) -> list[Export]:
    """Public names of a module: what it defines, assigns and re-exports at its top level."""
    found: dict[str, Export] = {}
    for node in top_level(ast.parse(source).body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = Export(node.name, "function", ast.unparse(node.args), ops_called(node))
        elif isinstance(node, ast.ClassDef):
            init = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
            found[node.name] = Export(node.name, "class", ast.unparse(init[0].args) if init else "", ops_called(node))
        elif isinstance(node, ast.Assign):
            found.update((t.id, Export(t.id, "name")) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.update((a.asname or a.name, Export(a.asname or a.name, "name")) for a in node.names)
    return [export for name, export in found.items() if not name.startswith("_")]


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, those under ``if`` and ``try`` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                for inner in getattr(node, part, []):
                    yield from top_level(inner.body) if isinstance(inner, ast.ExceptHandler) else top_level([inner])


def ops_called(node: ast.AST) -> list[str]:
    """Ops that stand in the code as ``torch.ops.<namespace>.<name>``, each once, in order."""
    found: dict[str, None] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute):
            parts = ast.unparse(inner).split(".")
            if len(parts) == 4 and parts[:2] == ["torch", "ops"]:
                found[f"{parts[2]}::{parts[3]}"] = None
    return list(found)


_LIBRARY = re.compile(r"(?:STABLE_)?TORCH_LIBRARY(?:_FRAGMENT|_EXPAND)?\s*\(\s*(.+?)\s*,\s*(\w+)\s*\)\s*\{")
_CALL = re.compile(r"\b(\w+)\s*\.\s*(def|impl)\s*\(")
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_COMMENT = re.compile(r"^\s*//.*$", re.MULTILINE)
_KEY = re.compile(r"(?:torch|c10|at)::(?:DispatchKey::)?k?(\w+)")


def kernels_in_sources(folder: Path, namespaces: dict[str, str]) -> dict[str, list[str]]:
    """Op to dispatch keys, from the ``def`` and ``impl`` calls of the C++ sources.

    ``namespaces``: name of an op to its namespace, as the shared objects say. A function given without a key, in ``def`` or in
    ``impl``, is registered for CompositeImplicitAutograd, whatever device it needs.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.cpp")):
        text = _COMMENT.sub("", path.read_text(encoding="utf-8", errors="replace"))
        if not _LIBRARY.search(text):
            continue
        for match in _CALL.finditer(text):
            call = call_text(text, match.end())
            words = "".join(_LITERAL.findall(call))
            name = re.match(r"\s*(?:\w+::)?([\w.]+)", words)
            if name is None or name.group(1) not in namespaces:
                continue
            rest = _LITERAL.sub("", call)
            key = _KEY.search(rest)
            if "&" in rest:
                kernel = key.group(1) if key else "CompositeImplicitAutograd"
                found.setdefault(f"{namespaces[name.group(1)]}::{name.group(1)}", []).append(kernel)
    return found


def call_text(text: str, at: int) -> str:
    """Text of a call's arguments, from behind its opening bracket to the one that closes it."""
    depth, end, quoted = 1, at, False
    while depth and end < len(text):
        char = text[end]
        if char == "\\" and quoted:
            end += 1
        elif char == '"':
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(char, 0)
        end += 1
    return text[at : end - 1]


def main() -> int:
    """Read the arguments, extract, write, and say what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("release", type=Path, help="wheel file, or a folder that holds the package and its .dist-info")
    parser.add_argument("--package", default="", help="distribution to read, where a folder holds several")
    parser.add_argument("--csrc", type=Path, help="C++ sources of the same release")
    parser.add_argument("--output", type=Path, default=CATALOGUES, help="folder for the catalogue (default: %(default)s)")
    parser.add_argument("--notes", default="", help="a remark that the catalogue carries")
    args = parser.parse_args()
    catalogue = load_catalogue(args.release) if args.release.suffix == ".json" else extract(Release(args.release, args.package))
    if not catalogue.ops:
        print(f"{args.release} registers no op: no catalogue written", file=sys.stderr)
        return 1
    if args.csrc:
        kernels = kernels_in_sources(args.csrc, {op.parsed.full_name: op.namespace for op in catalogue.ops})
        catalogue = replace(catalogue, ops=[replace(op, dispatch=kernels.get(op.qualified, [])) for op in catalogue.ops])
    if args.notes:
        catalogue = replace(catalogue, notes=args.notes)
    args.output.mkdir(parents=True, exist_ok=True)
    target = args.output / f"{catalogue.package}-{catalogue.version}.json"
    target.write_text(catalogue.to_json(), encoding="utf-8")
    print(f"{target}: " + ", ".join(f"{name} {len(ops)}" for name, ops in catalogue.namespaces().items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
