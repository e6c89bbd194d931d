"""Op schemas as text: how they are parsed, and the catalogues of released op libraries that ship with xpufp8.

A schema is one line of PyTorch's operator language, ``fp8_gemm_w8a16(Tensor A, Tensor B, …) -> Tensor``. It is understood here
with the standard library alone, because it must be readable where torch is absent or will not load.

A catalogue (``xpufp8/data/ops/<package>-<version>.json``) is what one release of an op library registers, so that a machine
without the release can define the same ops. ``scripts/extract_op_schemas.py`` writes them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
"""Format of the catalogue files; a reader refuses a newer one."""

CATALOGUES = Path(__file__).resolve().parent.parent / "xpufp8" / "data" / "ops"

_NAME = re.compile(r"\s*((?:\w+::)?\w+)(?:\.(\w+))?\s*\(")
_BASE = re.compile(
    r"\s*(Tensor|SymInt|SymFloat|SymBool|int|float|complex|bool|str|Scalar|ScalarType|DeviceIndex|Device|Layout|MemoryFormat|"
    r"Generator|Storage|Stream|QScheme|DimnameList|Dimname|AnyEnumType|Any|NoneType|None|__torch__(?:\.\w+)+)(?!\w)"
)
_ALIAS = re.compile(r"!|\(\s*[\w|*]+\s*!?\s*(?:->\s*[\w|* ]+)?\)")
_SUFFIX = re.compile(r"\?|\[\s*\d*\s*\]")
_WORD = re.compile(r"\s*(\w+)")
_ARROW = re.compile(r"\s*->\s*")


class SchemaError(ValueError):
    """The text is not an op schema."""


@dataclass(frozen=True)
class Argument:
    """One argument or result: ``Tensor(a!)? out=None`` is type ``Tensor?``, mutated, named ``out``, default ``None``."""

    type: str
    """Without alias annotation: ``Tensor``, ``Tensor?``, ``Tensor[]``, ``int[2]``, ``(int, int)?``."""
    name: str = ""
    default: str | None = None
    mutated: bool = False
    keyword_only: bool = False

    @property
    def is_tensor(self) -> bool:
        """True for a tensor, an optional one, or a list of them."""
        return self.type.startswith("Tensor")


@dataclass(frozen=True)
class Schema:
    """A parsed op schema."""

    name: str
    """Without namespace and overload."""
    overload: str
    arguments: tuple[Argument, ...]
    returns: tuple[Argument, ...]
    text: str
    """The schema with its white space made regular; a valid argument of ``torch.library.Library.define``."""

    @property
    def full_name(self) -> str:
        """Name with the overload when there is one: ``gemm.out``."""
        return f"{self.name}.{self.overload}" if self.overload else self.name

    @property
    def returns_tensor(self) -> bool:
        """True when any result is a tensor or a list of tensors."""
        return any("Tensor" in result.type for result in self.returns)

    @property
    def mutates(self) -> bool:
        """True when the op writes into an argument."""
        return any(argument.mutated for argument in self.arguments)


class _Reader:
    """Cursor over one schema."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def take(self, pattern: re.Pattern[str], what: str = "") -> re.Match[str] | None:
        """Match at the cursor and move past it; without a match raise if ``what`` names something that must be there."""
        match = pattern.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        elif what:
            raise SchemaError(f"{what} expected at {self.text[self.at : self.at + 30]!r} in {self.text[:80]!r}")
        return match

    def sign(self, char: str) -> bool:
        """Skip white space and take one character if it is there."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        if self.text.startswith(char, self.at):
            self.at += len(char)
            return True
        return False

    def type(self) -> tuple[str, bool]:
        """A type and whether its annotation says that it is written to."""
        if self.sign("("):
            inner = []
            while not self.sign(")"):
                inner.append(self.type()[0])
                self.take(_WORD)
                if not self.sign(",") and not self.text.startswith(")", self.at):
                    raise SchemaError(f"broken tuple type in {self.text[:80]!r}")
            name, mutated = f"({', '.join(inner)})", False
        else:
            match = self.take(_BASE, "a type")
            name, mutated = (match.group(1) if match else ""), False
        while True:
            if suffix := self.take(_SUFFIX):
                name += suffix.group().replace(" ", "")
            elif alias := self.take(_ALIAS):
                mutated = mutated or "!" in alias.group()
            else:
                return name, mutated

    def default(self) -> str:
        """The text of a default value, up to the comma or bracket that ends it."""
        start, depth, quote = self.at, 0, ""
        while self.at < len(self.text):
            char = self.text[self.at]
            if quote:
                if char == "\\":
                    self.at += 1
                elif char == quote:
                    quote = ""
            elif char in "'\"":
                quote = char
            elif char in "[(":
                depth += 1
            elif char in "])" and depth:
                depth -= 1
            elif char in ",)" and not depth:
                break
            self.at += 1
        value = self.text[start : self.at].strip()
        if not value:
            raise SchemaError(f"empty default in {self.text[:80]!r}")
        return value

    def arguments(self) -> tuple[Argument, ...]:
        """Arguments up to the closing bracket; the opening one is behind the cursor."""
        found: list[Argument] = []
        keyword_only = False
        while not self.sign(")"):
            if self.sign("*"):
                keyword_only = True
            else:
                kind, mutated = self.type()
                word = self.take(_WORD)
                name = word.group(1) if word else ""
                default = self.default() if self.sign("=") else None
                found.append(Argument(kind, name, default, mutated, keyword_only))
            if not self.sign(",") and not self.text.startswith(")", self.at):
                raise SchemaError(f"broken argument list in {self.text[:80]!r}")
        return tuple(found)


def parse(text: str) -> Schema:
    """Parse one schema.

    Raises:
        SchemaError: it is not one. Arguments must be named, as torch demands of them.
    """
    text = " ".join(text.split())
    reader = _Reader(text)
    head = reader.take(_NAME, "a name")
    arguments = reader.arguments()
    if any(not argument.name for argument in arguments):
        raise SchemaError(f"an argument has no name in {text[:80]!r}")
    reader.take(_ARROW, "->")
    if reader.sign("("):
        returns = reader.arguments()
    else:
        kind, mutated = reader.type()
        word = reader.take(_WORD)
        returns = (Argument(kind, word.group(1) if word else "", None, mutated),)
    if text[reader.at :].strip():
        raise SchemaError(f"text after the results: {text[reader.at :]!r}")
    name = (head.group(1) if head else "").rpartition("::")[2]
    return Schema(name, (head.group(2) or "") if head else "", arguments, returns, text)


@dataclass(frozen=True)
class OpSchema:
    """One op of a library, as text."""

    namespace: str
    schema: str
    library: str
    """File of the wheel that registers it, relative to its root: ``vllm_xpu_kernels/_C.abi3.so``."""
    namespace_from: str = ""
    """How the namespace was decided (``probes.op_libraries``), or where a hand-written entry was read."""
    dispatch: list[str] = field(default_factory=list)
    """Dispatch keys that the library's own source gives it a kernel for, where that was read; empty means not known."""
    source: str = ""
    """For an entry that no shared object shows: file, line and version it was read from."""

    @property
    def parsed(self) -> Schema:
        """The schema, parsed."""
        return parse(self.schema)

    @property
    def qualified(self) -> str:
        """``namespace::name.overload``."""
        return f"{self.namespace}::{self.parsed.full_name}"


@dataclass(frozen=True)
class Export:
    """One public name of a Python module of the package."""

    name: str
    kind: str
    """function, class, or name (a constant or a re-export)."""
    signature: str = ""
    """Parameters as written, for a function or a class's ``__init__``."""
    ops: list[str] = field(default_factory=list)
    """Ops that its body calls: ``_xpu_C::cutlass_grouped_gemm_interface``."""


@dataclass(frozen=True)
class Catalogue:
    """What one release of an op library registers, and what its Python modules offer."""

    package: str
    """Distribution name: ``vllm-xpu-kernels``."""
    version: str
    source: str
    """What it was extracted from: the wheel's file name and SHA-256, or the documents that were read."""
    extracted: str
    """Date, ISO."""
    ops: list[OpSchema] = field(default_factory=list)
    python: dict[str, list[Export]] = field(default_factory=dict)
    """Module name to its public names."""
    modules: dict[str, str] = field(default_factory=dict)
    """Importable extension modules: ``vllm_xpu_kernels._C`` to the file that holds it."""
    requires: list[str] = field(default_factory=list)
    """Requires-Dist of the wheel."""
    notes: str = ""

    def namespaces(self) -> dict[str, list[OpSchema]]:
        """Ops by namespace, in the order of registration."""
        found: dict[str, list[OpSchema]] = {}
        for op in self.ops:
            found.setdefault(op.namespace, []).append(op)
        return found

    def to_json(self) -> str:
        """The catalogue file's text: one op a line, so that a diff between two releases can be read."""
        head = {"format": FORMAT, "package": self.package, "version": self.version, "source": self.source,
                "extracted": self.extracted, "notes": self.notes, "requires": self.requires, "modules": self.modules}  # fmt: skip
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        ops = ",\n".join("    " + json.dumps(_lean(op)) for op in self.ops)
        python = ",\n".join(
            f"    {json.dumps(name)}: [\n" + ",\n".join("      " + json.dumps(_lean(e)) for e in exports) + "\n    ]"
            for name, exports in self.python.items()
        )
        return "{\n" + "\n".join(lines) + f'\n  "ops": [\n{ops}\n  ],\n  "python": {{\n{python}\n  }}\n}}\n'


def _lean(item: OpSchema | Export) -> dict[str, Any]:
    """Fields of a row that say something."""
    return {key: value for key, value in vars(item).items() if value}


def _row(kind: type[Any], data: dict[str, Any]) -> Any:
    """A row of a catalogue file; keys that a later version added are ignored."""
    return kind(**{key: value for key, value in data.items() if key in kind.__dataclass_fields__})


def load_catalogue(name_or_path: str | Path) -> Catalogue:
    """Read a catalogue by name (``vllm-xpu-kernels-0.1.16.2``) or path.

    Raises:
        ValueError: there is no such catalogue, it is of a newer format, or it is not one.
    """
    path = Path(name_or_path)
    if path.suffix != ".json":
        path = CATALOGUES / f"{name_or_path}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] > FORMAT:
            raise ValueError(f"{path.name} has format {data['format']}, this version reads up to {FORMAT}")
        return Catalogue(
            **{key: data[key] for key in ("package", "version", "source", "extracted")},
            ops=[_row(OpSchema, op) for op in data["ops"]],
            python={module: [_row(Export, e) for e in exports] for module, exports in data.get("python", {}).items()},
            **{key: data[key] for key in ("modules", "requires", "notes") if key in data},
        )
    except FileNotFoundError:
        raise ValueError(f"no op catalogue {path.stem!r}; there are {', '.join(catalogues())}") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as exc:
        raise ValueError(f"{path} is not an op catalogue: {type(exc).__name__} {exc}") from exc


def version_key(version: str) -> tuple[int, ...]:
    """Order of versions: their numbers, the local part (``+xpu``) and pre-release words left out."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def catalogues(package: str | None = None) -> list[str]:
    """Names of the bundled catalogues (of one package), oldest release first."""
    names = [path.stem for path in CATALOGUES.glob("*.json")]
    if package is not None:
        names = [name for name in names if name.rpartition("-")[0] == package]
    return sorted(names, key=lambda name: (name.rpartition("-")[0], version_key(name.rpartition("-")[2])))


def best_catalogue(package: str, version: str | None = None) -> Catalogue | None:
    """The catalogue of that release, else of the newest one before it, else of the oldest; without a version the newest.

    None when there is no catalogue of the package. Compare ``version`` of the answer: a neighbour's is a guess.
    """
    names = catalogues(package)
    if not names:
        return None
    if version is None:
        return load_catalogue(names[-1])
    wanted = version_key(version)
    not_later = [name for name in names if version_key(name.rpartition("-")[2]) <= wanted]
    return load_catalogue(not_later[-1] if not_later else names[0])
