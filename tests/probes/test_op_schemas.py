"""Schemas as text, the catalogues, and schemas read from shared objects, each against what torch itself says of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from probes import op_schemas
from probes.op_libraries import default_namespace, read_library
from probes.op_schemas import Catalogue, Export, OpSchema, SchemaError, best_catalogue, catalogues, load_catalogue, parse

KERNELS = os.environ.get("XPUFP8_KERNELS")
"""Folder that holds an unpacked vllm-xpu-kernels wheel, for the tests marked ``releases``."""

W8A16 = "fp8_gemm_w8a16(Tensor! A, Tensor! B, bool trans_B, Tensor? B_scale_, Tensor? bias_) -> Tensor"


def test_parse_knows_arguments_results_and_mutation() -> None:
    schema = parse(
        "rotary(Tensor positions, Tensor! query,\n    Tensor(b!)? key, int[2] s, (int, int)? g=None, *, str k='a,b)')"
        " -> (Tensor q, Tensor(b!)[] r)"
    )
    assert schema.full_name == "rotary"
    assert [(a.type, a.name, a.mutated, a.default, a.keyword_only) for a in schema.arguments] == [
        ("Tensor", "positions", False, None, False), ("Tensor", "query", True, None, False), ("Tensor?", "key", True, None, False),
        ("int[2]", "s", False, None, False), ("(int, int)?", "g", False, "None", False), ("str", "k", False, "'a,b)'", True),
    ]  # fmt: skip
    assert [(r.type, r.name) for r in schema.returns] == [("Tensor", "q"), ("Tensor[]", "r")]
    assert schema.returns_tensor
    assert schema.mutates
    assert "\n" not in schema.text
    assert "  " not in schema.text


@pytest.mark.parametrize(
    ("text", "name", "returns_tensor", "mutates", "results"),
    [
        (W8A16, "fp8_gemm_w8a16", True, True, 1),
        ("ns::op.out(Tensor a, *, Tensor(a!) out) -> Tensor(a!)", "op.out", True, True, 1),
        ("is_bmg(int device_index=-1) -> bool", "is_bmg", False, False, 1),
        ("memory() -> (int, int)", "memory", False, False, 2),
        ("rms(Tensor! result, Tensor input, float eps=1e-6) -> ()", "rms", False, True, 0),
        ("obj(__torch__.torch.classes._C.ScalarType t, Scalar[] x=[1, 2]) -> Tensor?", "obj", True, False, 1),
    ],
)
def test_parse_kinds(text: str, name: str, returns_tensor: bool, mutates: bool, results: int) -> None:
    schema = parse(text)
    assert (schema.full_name, schema.returns_tensor, schema.mutates, len(schema.returns)) == (
        name,
        returns_tensor,
        mutates,
        results,
    )


@pytest.mark.parametrize(
    "text",
    ["", "desc()->b_desc", "desc()->c_desc.ndims", "f(Tensor a) -> Banana", "f(Tensor a", "f(Tensor) -> Tensor",
     "f(Tensor a, ) -> ", "f(int x=) -> int",
     "f(Tensor a) -> Tensor or so", "std::vector<int> f() -> int", "[](int a) -> int", "f((int, ) x) -> (", "f(Tensor a b) -> Tensor"],
)  # fmt: skip
def test_parse_refuses_what_is_no_schema(text: str) -> None:
    with pytest.raises(SchemaError):
        parse(text)


@pytest.mark.parametrize("name", catalogues())
def test_catalogue_holds(name: str) -> None:
    catalogue = load_catalogue(name)
    assert f"{catalogue.package}-{catalogue.version}" == name
    assert catalogue.source
    assert catalogue.extracted
    assert len(catalogue.ops) >= 25
    names = [op.qualified for op in catalogue.ops]
    assert len(set(names)) == len(names)
    assert all(op.namespace_from in {"registration function", "static initialiser", "source"} for op in catalogue.ops), (
        "a namespace was guessed"
    )
    assert all(op.source for op in catalogue.ops if op.namespace_from == "source"), "an op without its source"
    assert {op.library for op in catalogue.ops} <= {*catalogue.modules.values(), "intel_extension_for_pytorch"}


@pytest.mark.sim
@pytest.mark.parametrize("name", catalogues())
def test_catalogue_means_to_torch_what_it_means_to_us(name: str) -> None:
    import torch

    for op in load_catalogue(name).ops:
        ours, theirs = op.parsed, torch._C.parse_schema(f"{op.namespace}::{op.schema}")
        assert [
            (a.name, a.has_default_value(), bool(a.alias_info and a.alias_info.is_write), a.kwarg_only) for a in theirs.arguments
        ] == [(a.name, a.default is not None, a.mutated, a.keyword_only) for a in ours.arguments]
        assert theirs.overload_name == ours.overload
        assert any("Tensor" in str(r.type) for r in theirs.returns) == ours.returns_tensor
        assert len(theirs.returns) == len(ours.returns)


def test_both_generations_of_w8a16_are_there() -> None:
    def w8a16(name: str) -> OpSchema:
        return next(op for op in load_catalogue(name).ops if op.parsed.name == "fp8_gemm_w8a16")

    ipex, early, released = (
        w8a16("intel-extension-for-pytorch-2.10.10+xpu"),
        w8a16("vllm-xpu-kernels-0.1.0.dev20251021"),
        w8a16("vllm-xpu-kernels-0.1.16.2"),
    )
    assert ipex.qualified == "torch_ipex::fp8_gemm_w8a16.xpu", "the overload is in the message of the public reports"
    assert [a.type for a in ipex.parsed.arguments] == ["Tensor", "Tensor", "bool", "Tensor?", "Tensor?"]
    assert ipex.dispatch == ["XPU"]
    assert early.schema == W8A16
    assert [a.type for a in released.parsed.arguments] == ["Tensor", "Tensor", "Tensor?", "Tensor?"]
    assert (early.namespace, released.namespace) == ("_xpu_C", "_xpu_C")


def test_cache_ops_have_their_own_namespace_in_the_same_object() -> None:
    by_namespace = load_catalogue("vllm-xpu-kernels-0.1.16.2").namespaces()
    assert {name: len(ops) for name, ops in by_namespace.items()} == {
        "_C": 44,
        "_C_cache_ops": 11,
        "_moe_C": 12,
        "_vllm_fa2_C": 1,
        "_xpu_C": 45,
    }
    assert {op.library for op in by_namespace["_C_cache_ops"]} == {"vllm_xpu_kernels/_C.abi3.so"}
    assert "reshape_and_cache_flash" in {op.parsed.name for op in by_namespace["_C_cache_ops"]}


def test_python_side_of_a_release() -> None:
    python = load_catalogue("vllm-xpu-kernels-0.1.16.2").python
    fused = {export.name: export for export in python["vllm_xpu_kernels.fused_moe_interface"]}
    assert fused["XpuFusedMoe"].kind == "class"
    assert "_xpu_C::cutlass_grouped_gemm_interface" in fused["XpuFusedMoe"].ops
    assert python["vllm_xpu_kernels.rotary"] == [
        Export(
            "apply_rotary_emb",
            "function",
            "x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool=False",
            ["_xpu_C::apply_rotary_emb"],
        )
    ]


def test_catalogue_survives_writing_and_reading(tmp_path: Path) -> None:
    original = Catalogue(
        "p", "1.2", "by hand", "2026-01-01", ops=[OpSchema("ns", "f(Tensor a) -> Tensor", "p/a.so", "file name", ["XPU"])],
        python={"p.m": [Export("g", "function", "x, y=1", ["ns::f"])], "p": []}, modules={"p.a": "p/a.so"}, requires=["torch"], notes="n",
    )  # fmt: skip
    path = tmp_path / "p-1.2.json"
    path.write_text(original.to_json())
    assert load_catalogue(path) == original


@pytest.mark.parametrize(
    ("content", "what"),
    [("{", "is not an op catalogue"), ("[]", "is not an op catalogue"), ('{"format": 1}', "is not an op catalogue"),
     ('{"format": 99}', "has format 99"), (None, "no op catalogue")],
)  # fmt: skip
def test_unreadable_catalogue_is_one_clear_line(tmp_path: Path, content: str | None, what: str) -> None:
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=what):
        load_catalogue(path)


def test_field_of_a_later_version_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "later.json"
    op = {"namespace": "ns", "schema": "f() -> int", "library": "l", "mood": "new"}
    path.write_text(
        json.dumps({"format": 1, "package": "p", "version": "1", "source": "s", "extracted": "d", "ops": [op], "later": True})
    )
    assert load_catalogue(path).ops == [OpSchema("ns", "f() -> int", "l")]


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("0.1.13.1", "0.1.13.1"),
        ("0.1.14.9", "0.1.14.1"),
        ("9", "0.1.16.2"),
        (None, "0.1.16.2"),
        ("0.0.1", "0.1.0.dev20251021"),
        ("0.1.13.2+git", "0.1.13.2"),
    ],
)
def test_best_catalogue(asked: str | None, given: str) -> None:
    best = best_catalogue("vllm-xpu-kernels", asked)
    assert best is not None
    assert best.version == given


def test_no_catalogue_of_an_unknown_package() -> None:
    assert best_catalogue("nobody", "1.0") is None


def test_reading_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'elftools', 'pydantic')))\n"
        "from probes.op_schemas import best_catalogue; print(len(best_catalogue('vllm-xpu-kernels').ops))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "113"


# -- shared objects ----------------------------------------------------------------------------------------------------

SOURCE = """
struct Library {};
void define(Library &, const char *);
void TorchLibraryInit(void (*)(Library &), const char *, void *);
%(bodies)s
"""
BODY = """
struct Init_%(ns)s { Init_%(ns)s(); int held; };
static void %(prefix)s_init_%(ns)s%(uid)s(Library &m) { %(defs)s }
static Init_%(ns)s %(prefix)s_static_init_%(ns)s%(uid)s;
Init_%(ns)s::Init_%(ns)s() { held = 1; TorchLibraryInit(&%(prefix)s_init_%(ns)s%(uid)s, "%(ns)s", this); }
"""


def shared_object(
    folder: Path,
    libraries: dict[str, list[str]],
    *flags: str,
    name: str = "_odd_name.abi3.so",
    prefix: str = "TORCH_LIBRARY",
    uid: str = "",
) -> Path:
    """A shared object with registrations as torch's macros leave them."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    bodies = "".join(
        BODY % {"ns": ns, "prefix": prefix, "uid": uid, "defs": " ".join(f"define(m, {json.dumps(s)});" for s in schemas)}
        for ns, schemas in libraries.items()
    )
    source = folder / "lib.cpp"
    source.write_text(SOURCE % {"bodies": bodies} + 'const char *other() { return "desc()->b_desc -> Tensor"; }\n')
    path = folder / name
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", path, source], check=True)
    return path


LIBRARIES = {
    "_C": [
        "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()",
        "weak_ref_tensor(Tensor input) -> Tensor",
    ],
    "_C_cache_ops": ["swap_blocks(Tensor src, Tensor! dst,    Tensor block_mapping) -> ()"],
    "torch_ipex": [W8A16, "shared(Tensor a) -> Tensor"],
}


@pytest.mark.parametrize("flags", [("-O0",), ("-O2",), ("-O3", "-fno-inline")], ids=" ".join)
@pytest.mark.parametrize(
    ("prefix", "uid"), [("TORCH_LIBRARY", ""), ("TORCH_LIBRARY_FRAGMENT", "_7"), ("STABLE_TORCH_LIBRARY", "")]
)
def test_namespace_comes_from_the_registering_code(tmp_path: Path, flags: tuple[str, ...], prefix: str, uid: str) -> None:
    ops = read_library(shared_object(tmp_path, LIBRARIES, *flags, prefix=prefix, uid=uid))
    assert {op.namespace_from for op in ops} <= {"registration function", "static initialiser"}
    found: dict[str, list[str]] = {}
    for op in ops:
        found.setdefault(op.namespace, []).append(op.schema)
    assert found == {ns: [" ".join(schema.split()) for schema in schemas] for ns, schemas in LIBRARIES.items()}


def test_stripped_object_is_named_after_its_file_and_says_so(tmp_path: Path) -> None:
    ops = read_library(shared_object(tmp_path, {"_xpu_C": LIBRARIES["torch_ipex"]}, "-O2", "-s", name="_xpu_C.abi3.so"))
    assert {(op.namespace, op.namespace_from) for op in ops} == {("_xpu_C", "file name")}
    assert {op.schema for op in ops} == set(LIBRARIES["torch_ipex"])


def test_object_without_ops_and_file_that_is_none(tmp_path: Path) -> None:
    assert read_library(shared_object(tmp_path, {}, "-O2")) == []
    (tmp_path / "text.so").write_text("rms_norm(Tensor a) -> Tensor")
    with pytest.raises(ValueError, match="not an ELF object"):
        read_library(tmp_path / "text.so")


@pytest.mark.parametrize(
    ("file", "namespace"),
    [("a/_moe_C.abi3.so", "_moe_C"), ("libtorch-ipex.so.2", "torch_ipex"), ("_vllm_fa2_C.cpython-312.so", "_vllm_fa2_C")],
)
def test_default_namespace(file: str, namespace: str) -> None:
    assert default_namespace(file) == namespace


@pytest.mark.sim
def test_reading_vllm_agrees_with_loading_it() -> None:
    """Every build of vLLM's CPU kernels that loads here registers exactly the schemas that were read from its file."""
    code = """
import json, sys, torch
from vllm.platforms import current_platform
current_platform.import_kernels()
from probes.op_registration import op_names
import importlib.machinery
live = sorted({str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("_C")})
from probes.op_libraries import read_library
path = next(m for m in map(str.strip, open("/proc/self/maps")) if "/vllm/_C" in m).split(maxsplit=5)[5]
read = sorted({str(torch._C.parse_schema(f"{op.namespace}::{op.schema}")) for op in read_library(path)})
print(json.dumps([live, read]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    live, read = json.loads(done.stdout.splitlines()[-1])
    assert len(live) > 40
    assert live == read


@pytest.mark.releases
@pytest.mark.skipif(not KERNELS, reason="XPUFP8_KERNELS names no unpacked wheel")
def test_real_wheel_gives_the_bundled_catalogue(tmp_path: Path) -> None:
    root = Path(op_schemas.__file__).resolve().parent.parent
    script = str(root / "scripts" / "extract_op_schemas.py")
    command = [sys.executable, script, str(KERNELS), "--package", "vllm-xpu-kernels", "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    written = load_catalogue(next(tmp_path.glob("*.json")))
    bundled = load_catalogue(f"vllm-xpu-kernels-{written.version}")
    assert [(op.namespace, op.schema, op.library) for op in written.ops] == [
        (op.namespace, op.schema, op.library) for op in bundled.ops
    ]
    assert written.python == bundled.python
    assert written.modules == bundled.modules
