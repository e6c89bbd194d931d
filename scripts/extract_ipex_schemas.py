"""Write the op-schema catalogue of one release of Intel Extension for PyTorch (XPU) from a checkout of its sources.

    python scripts/extract_ipex_schemas.py intel-extension-for-pytorch --tag v2.10.10+xpu

IPEX gives most ops no schema text: ``IPEX_OP_REGISTER("fp8_gemm_w8a16.xpu", fn)`` lets PyTorch infer it from the C++ function, so no
shared object holds it (csrc/gpu/utils/CustomOperatorRegistration.h). The same inference is made here: ``Tensor``, its references and
its optionals, ``int64_t`` as int, ``double`` as float; arguments are called _0, _1, …; nothing says what is written to. Only ops that
vLLM up to 0.14 or IPEX's own serving modules call are kept, each with the file and line it was read from.

The folder is a git checkout with --tag, or the unpacked sources without it. Python modules are read with ``ast``, never imported.
"""

from __future__ import annotations

import argparse
import datetime
import io
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from extract_op_schemas import call_text, exports  # noqa: E402 - a neighbour, wherever the script is called from

from probes.op_schemas import CATALOGUES, Catalogue, Export, OpSchema, SchemaError, parse  # noqa: E402 - the same

PACKAGE = "intel-extension-for-pytorch"
CSRC = "csrc/gpu"
PYTHON = "intel_extension_for_pytorch"
SERVING = ("llm/", "transformers/models/xpu/fusions/", "nn/utils/_quantize_convert.py")
"""Python files whose ops a vLLM process can reach: ``ipex.llm.functional`` and ``ipex.llm.modules``, and what these are made of."""

CALLED_BY_VLLM = (
    "fp8_gemm_w8a16",
    "dynamic_scaled_fp8_quant",
    "static_scaled_fp8_quant",
    "rms_norm_vllm",
    "fused_add_rms_norm_vllm",
)
"""Ops that vLLM itself calls: _ipex_ops.py and model_executor/layers/quantization/ipex_quant.py of 0.10.2 and 0.14.1."""

_REGISTER = re.compile(r"\b(IPEX_OP_REGISTER(?:_DISPATCH)?(?:_NEED_PLAIN)?(?:_OVERLOAD)?)\s*\(")
_DEFINE = re.compile(r"\bm\.(def|impl)\s*\(")
_FRAGMENT = re.compile(r"\b(?:IPEX_LIBRARY_FRAGMENT|TORCH_LIBRARY_FRAGMENT)\s*\(\s*(?:torch_ipex\s*,\s*m\s*)?\)")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TYPES = {
    "Tensor": "Tensor", "int64_t": "int", "int": "int", "double": "float", "float": "float", "bool": "bool", "string": "str",
    "string_view": "str", "Scalar": "Scalar", "ScalarType": "ScalarType", "IntArrayRef": "int[]", "TensorList": "Tensor[]",
    "ITensorListRef": "Tensor[]", "Device": "Device", "Generator": "Generator", "void": "()", "ArrayRef<Tensor>": "Tensor[]",
}  # fmt: skip


@dataclass
class Sources:
    """C++ and Python text of a release, by path."""

    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, tag: str | None) -> Sources:
        """From a tag of a git checkout, or from the files of a folder."""
        if tag is None:
            paths = [p for top in (CSRC, PYTHON) for p in (folder / top).rglob("*") if p.suffix in {".cpp", ".h", ".py"}]
            return cls({str(p.relative_to(folder)): p.read_text("utf-8", "replace") for p in sorted(paths)})
        command = ["git", "-C", str(folder), "archive", tag, CSRC, PYTHON]
        archive = subprocess.run(command, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            members = [m for m in tar if m.isfile() and m.name.endswith((".cpp", ".h", ".py"))]
            texts = {m.name: (tar.extractfile(m) or io.BytesIO()).read().decode("utf-8", "replace") for m in members}
        return cls(texts)

    def serving_ops(self) -> set[str]:
        """Names of the torch_ipex ops that the serving modules call."""
        names = set(CALLED_BY_VLLM)
        for path, text in self.files.items():
            if path.startswith(tuple(f"{PYTHON}/{part}" for part in SERVING)):
                names.update(re.findall(r"torch\.ops\.torch_ipex\.(\w+)", text))
        return names


def registered(path: str, original: str, wanted: set[str]) -> list[OpSchema]:
    """Ops that one C++ file registers, of those wanted."""
    text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), original)
    found: dict[str, OpSchema] = {}
    for match in [*_REGISTER.finditer(text), *(_DEFINE.finditer(text) if _FRAGMENT.search(text) else ())]:
        call = call_text(text, match.end())
        literals = _STRING.findall(call)
        name = re.match(r"(?:torch_ipex::)?([\w.]+)", "".join(literals[:1]))
        if name is None or name.group(1).split(".")[0] not in wanted:
            continue
        line = text.count("\n", 0, match.start()) + 1
        parts = [part.strip() for part in split(_STRING.sub("", call))]
        schema, function = schema_of(text, name.group(1), literals, parts, match.group(1))
        if schema is not None:
            key = next((part.rsplit("::", 1)[-1] for part in parts if "DispatchKey::" in part), "CompositeImplicitAutograd")
            source = f"{path}:{line}" + (f" ({function})" if function else "")
            found.setdefault(
                name.group(1), OpSchema("torch_ipex", schema, "intel_extension_for_pytorch", "source", [key], source)
            )
    return list(found.values())


def schema_of(text: str, name: str, literals: list[str], parts: list[str], macro: str) -> tuple[str | None, str]:
    """Schema of one registration and the function it was inferred from (empty when the schema is written out)."""
    written = "".join(literals).removeprefix("torch_ipex::")
    if macro == "def" or macro.endswith("_OVERLOAD"):
        written = literals[0].removeprefix("torch_ipex::") if macro.endswith("_OVERLOAD") else written
        try:
            return parse(written).text, ""
        except SchemaError:
            return None, ""
    if macro == "impl" or len(parts) < 2:
        return None, ""
    function = parts[1].lstrip("&").rsplit("::", 1)[-1].strip()
    inferred = infer(text, function)
    return (f"{name}{inferred}", function) if inferred else (None, function)


def infer(text: str, function: str) -> str | None:
    """The signature that PyTorch infers for a C++ function defined in the text; None when a type is not one of an op."""
    for match in re.finditer(rf"([\w:<>,&*\s]+?)\b{re.escape(function)}\s*\(", text):
        arguments = call_text(text, match.end())
        behind = text[match.end() + len(arguments) + 1 :].lstrip()
        result = translate(re.split(r"[;{}]", match.group(1))[-1])
        if not behind.startswith("{") or result is None:
            continue
        types = [translate(argument_type(part)) for part in split(arguments) if part.strip()]
        if None in types:
            return None
        listed = ", ".join(f"{kind} _{index}" for index, kind in enumerate(types))
        return f"({listed}) -> {result}"
    return None


def argument_type(declaration: str) -> str:
    """The type of ``const c10::optional<Tensor>& bias_ = {}``."""
    declaration = declaration.split("=")[0].strip()
    return re.sub(r"[\s&]\w+$", lambda m: m.group()[0], declaration)


def translate(cpp: str) -> str | None:
    """C++ type to schema type; None for another than PyTorch can infer."""
    cpp = re.sub(r"\b(?:const|static|inline|at|c10|std|torch|detail)\b|::|&|\*", " ", cpp)
    cpp = re.sub(r"\s+", "", cpp)
    if cpp in _TYPES:
        return _TYPES[cpp]
    inner = re.fullmatch(r"(optional|OptionalRef|vector|List|ArrayRef|tuple)<(.*)>", cpp)
    if inner is None:
        return None
    parts = [translate(part) for part in split(inner.group(2))]
    if None in parts:
        return None
    if inner.group(1) == "tuple":
        return f"({', '.join(str(part) for part in parts)})"
    return f"{parts[0]}{'?' if inner.group(1).startswith('Opt') or inner.group(1) == 'optional' else '[]'}"


def split(text: str) -> list[str]:
    """Split at commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += {"<": 1, "(": 1, "{": 1, "[": 1, ">": -1, ")": -1, "}": -1, "]": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def main() -> int:
    """Read the arguments, extract, write, and say what was found and what was not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="checkout or unpacked sources")
    parser.add_argument("--tag", help="tag of the release; its name gives the version")
    parser.add_argument("--version", help="version, where there is no tag")
    parser.add_argument("--output", type=Path, default=CATALOGUES)
    args = parser.parse_args()
    sources = Sources.read(args.folder, args.tag)
    wanted = sources.serving_ops()
    ops: dict[str, OpSchema] = {}
    for path, text in sources.files.items():
        if path.startswith(CSRC) and path.endswith(".cpp"):
            ops |= {op.parsed.full_name: op for op in registered(path, text, wanted) if op.parsed.full_name not in ops}
    python: dict[str, list[Export]] = {}
    for path, text in sources.files.items():
        if path.startswith(tuple(f"{PYTHON}/{part}" for part in SERVING)) and path.endswith(".py"):
            python[path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = exports(text)
    version = args.version or args.tag.lstrip("v")
    catalogue = Catalogue(
        PACKAGE,
        version,
        f"github.com/intel/{PACKAGE} {args.tag or version}, C++ sources",
        datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        ops=list(ops.values()),
        python={module: found for module, found in python.items() if found},
        notes="Inferred from C++ signatures as PyTorch does at registration; only ops that serving code calls.",
    )
    (args.output / f"{PACKAGE}-{version}.json").write_text(catalogue.to_json(), encoding="utf-8")
    print(f"{version}: {len(ops)} ops; not found: {', '.join(sorted(wanted - {name.split('.')[0] for name in ops})) or 'none'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
