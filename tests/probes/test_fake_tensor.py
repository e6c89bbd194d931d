"""The fake_tensor probe on real torch, in real child processes: every kind of registration, in every namespace that vLLM uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from probes.facts import FakeTensorFacts, OpFact

pytestmark = pytest.mark.sim

NAMESPACES = ("torch_ipex", "_C", "_xpu_C", "_moe_C", "_C_cache_ops", "_vllm_fa2_C", "vllm", "somebody_elses")
NO_FAKE = "Operator does not support running with fake tensors"

HEADER = """
import torch

LIBRARIES = {}


def define(namespace, schema, **kernels):
    library = LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    library.define(schema)
    for key, kernel in kernels.items():
        library.impl(schema.split("(")[0], kernel, key)
"""


def probe(folder: Path, module: str, **context: Any) -> tuple[FakeTensorFacts, str]:
    """Facts of ``python -m probes fake_tensor`` about the ops that one module registers, and what it wrote to stderr."""
    (folder / "registering.py").write_text(HEADER + module)
    return run(folder, {"device": "cpu", "options": {"modules": ["registering"], "vllm": False}} | context)


def run(folder: Path, context: dict[str, Any], **environment: str) -> tuple[FakeTensorFacts, str]:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    result = folder / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "probes", "fake_tensor"], input=json.dumps(context), capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": path, "XPUFP8_RESULT": str(result), "VLLM_LOGGING_LEVEL": "ERROR", **environment},
    )  # fmt: skip
    envelope = json.loads(result.read_text())
    assert envelope["error"] is None, envelope["error"]
    return TypeAdapter(FakeTensorFacts).validate_python(envelope["facts"]), done.stderr


def by_name(facts: FakeTensorFacts) -> dict[str, OpFact]:
    return {f"{op.namespace}::{op.name}": op for op in facts.ops}


@pytest.fixture(scope="module")
def siblings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpFact]:
    """The op of the reports in every namespace, once without a fake and once with one."""
    module = f"""
for namespace in {NAMESPACES!r}:
    for name in ("fp8_gemm_w8a16.xpu", "with_fake"):
        define(namespace, f"{{name}}(Tensor _0, Tensor _1, bool _2, Tensor? _3, Tensor? _4) -> Tensor _0",
               CPU=lambda a, b, transposed, scale, bias: a @ (b.t() if transposed else b))
    torch.library.register_fake(f"{{namespace}}::with_fake")(lambda a, b, t, s, c: a.new_empty(*a.shape[:-1], b.shape[0 if t else 1]))
"""
    facts, _ = probe(tmp_path_factory.mktemp("siblings"), module)
    return by_name(facts)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_op_without_a_fake_is_reported_with_the_error_of_dynamo(siblings: dict[str, OpFact], namespace: str) -> None:
    op = siblings[f"{namespace}::fp8_gemm_w8a16.xpu"]
    assert (op.tracing, op.traces, op.returns_tensor, op.functional, op.mode) == ("none", "fail", True, True, "live")
    assert op.error is not None
    assert op.error.startswith(NO_FAKE)
    assert f"unsupported operator: {namespace}.fp8_gemm_w8a16.xpu" in op.error
    assert op.dispatch_keys == ["CPU"]
    assert op.schema == f"{namespace}::fp8_gemm_w8a16.xpu(Tensor _0, Tensor _1, bool _2, Tensor? _3, Tensor? _4) -> Tensor _0"


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_with_a_fake_it_is_not(siblings: dict[str, OpFact], namespace: str) -> None:
    op = siblings[f"{namespace}::with_fake"]
    assert (op.tracing, op.traces, op.error) == ("fake", "pass", None)


def test_the_error_is_what_a_compiled_model_would_raise(siblings: dict[str, OpFact]) -> None:
    """Dynamo itself, on a model that calls the op, says the same thing word for word up to the user's own code."""
    code = (
        HEADER
        + """
define("torch_ipex", "fp8_gemm_w8a16.xpu(Tensor _0, Tensor _1, bool _2, Tensor? _3, Tensor? _4) -> Tensor _0", CPU=lambda *a: a[0])


class Layer(torch.nn.Module):
    def forward(self, x):
        return torch.ops.torch_ipex.fp8_gemm_w8a16(x, x, True, None, None)


try:
    torch.compile(Layer(), fullgraph=True, backend="eager")(torch.ones(4, 4))
except Exception as error:
    print(str(error).partition("from user code")[0])
"""
    )
    message = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    error = siblings["torch_ipex::fp8_gemm_w8a16.xpu"].error or ""
    assert message.startswith(NO_FAKE)
    assert error.partition("from user code")[0].strip() == message


KINDS = """
define("k", "composite(Tensor a) -> Tensor", CompositeImplicitAutograd=lambda a: a + 1)
define("k", "explicit(Tensor a) -> Tensor", CompositeExplicitAutograd=lambda a: a + 1)
define("k", "composite_over_untraceable(Tensor a) -> Tensor", CompositeImplicitAutograd=lambda a: torch.ops.k.plain(a) + 1)
define("k", "plain(Tensor a) -> Tensor", CPU=lambda a: a + 1)
define("k", "meta(Tensor a) -> Tensor", CPU=lambda a: a + 1, Meta=lambda a: torch.empty_like(a))
define("k", "meta_only(Tensor a) -> Tensor", Meta=lambda a: torch.empty_like(a))
define("k", "no_kernel(Tensor a) -> Tensor")
define("k", "mutates(Tensor! a) -> ()", CPU=lambda a: None)
define("k", "mutates_and_returns(Tensor! a) -> Tensor", CPU=lambda a: a + 1)
define("k", "reads_only(Tensor a) -> ()", CPU=lambda a: None)
define("k", "overloaded(Tensor a) -> Tensor", CPU=lambda a: a + 1)
define("k", "overloaded.scaled(Tensor a, float b) -> Tensor", CPU=lambda a, b: a * b)
define("k", "overloaded.out(Tensor a, *, Tensor(a!) out) -> Tensor(a!)", CPU=lambda a, out: out)
define("k", "list(Tensor[] a, int[2] b, ScalarType? c, (int, int)? d, str e) -> Tensor[]", CPU=lambda *a: a[0])
define("k", "answers(int device) -> bool", CompositeExplicitAutograd=lambda d: True)
define("k", "wrong_fake(Tensor a) -> Tensor", CPU=lambda a: a + 1)
torch.library.register_fake("k::overloaded.scaled")(lambda a, b: torch.empty_like(a))
torch.library.register_fake("k::wrong_fake")(lambda a: a.new_empty(7))


@torch.library.custom_op("k::by_decorator", mutates_args=())
def by_decorator(a: torch.Tensor) -> torch.Tensor:
    return a + 1


@torch.library.custom_op("k::by_decorator_with_fake", mutates_args=())
def by_decorator_with_fake(a: torch.Tensor) -> torch.Tensor:
    return a + 1


by_decorator_with_fake.register_fake(lambda a: torch.empty_like(a))
LIBRARIES["k"].impl("never_defined", lambda a: a, "CPU")
"""

EXPECTED = {
    # op: tracing, traces, returns a tensor, functional, words of the error
    "composite": ("composite", "pass", True, True, None),
    "explicit": ("composite", "pass", True, True, None),
    "composite_over_untraceable": ("composite", "fail", True, True, "k.plain.default"),
    "plain": ("none", "fail", True, True, "k.plain.default"),
    "meta": ("meta", "pass", True, True, None),
    "meta_only": ("meta", "pass", True, True, None),
    "no_kernel": ("none", "fail", True, True, "k.no_kernel.default"),
    "mutates": ("trivial", "pass", False, False, None),
    "mutates_and_returns": ("none", "fail", True, False, "k.mutates_and_returns.default"),
    "reads_only": ("none", "fail", False, True, "k.reads_only.default"),
    "overloaded": ("none", "fail", True, True, "k.overloaded.default"),
    "overloaded.scaled": ("fake", "pass", True, True, None),
    "overloaded.out": ("none", "fail", True, False, "k.overloaded.out"),
    "list": ("none", "fail", True, True, "k.list.default"),
    "answers": ("composite", "unknown", False, True, None),
    "wrong_fake": ("fake", "pass", True, True, None),
    "by_decorator": ("none", "fail", True, True, "There was no fake impl registered for <CustomOpDef(k::by_decorator)>"),
    "by_decorator_with_fake": ("fake", "pass", True, True, None),
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpFact]:
    return by_name(probe(tmp_path_factory.mktemp("kinds"), KINDS)[0])


def test_an_op_that_nobody_defined_is_no_op(kinds: dict[str, OpFact]) -> None:
    assert set(kinds) == {f"k::{name}" for name in EXPECTED}


@pytest.mark.parametrize("name", EXPECTED)
def test_kind(kinds: dict[str, OpFact], name: str) -> None:
    op = kinds[f"k::{name}"]
    *expected, words = EXPECTED[name]
    assert [op.tracing, op.traces, op.returns_tensor, op.functional] == expected
    assert (op.error is None) == (words is None), op.error
    if words is not None:
        assert words in (op.error or "")
    assert op.origin.startswith("registering.py:")


def test_the_verdicts_are_those_of_torch_itself(tmp_path: Path) -> None:
    """What the probe says of each kind is what ``FakeTensorMode`` does when the op is called under it."""
    code = (
        HEADER
        + KINDS
        + """
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from probes.op_tracing import arguments_for, op_names, overload

said = {}
for name in sorted(n for n in op_names() if n.startswith("k::") and n != "k::never_defined"):
    op = overload(name)
    args, kwargs = arguments_for(op)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else [fake(x) for x in v] if isinstance(v, list) else v
        try:
            op(*map(fake, args), **{k: fake(v) for k, v in kwargs.items()})
            said[name] = "pass"
        except UnsupportedOperatorException:
            said[name] = "fail"
        except RuntimeError as error:
            said[name] = "fail" if "no fake impl" in str(error) else str(error)
import json
print(json.dumps(said))
"""
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said) == len(EXPECTED)
    for name, (_, traces, *_rest) in EXPECTED.items():
        assert traces in {said[f"k::{name}"], "unknown"}, name


def test_a_repair_is_seen_by_the_same_probe(tmp_path: Path) -> None:
    module = """
define("_xpu_C", "fp8_gemm_w8a16(Tensor A, Tensor B, Tensor? B_scale_, Tensor? bias_) -> Tensor", CPU=lambda a, b, s, c: a)
"""
    op = "_xpu_C::fp8_gemm_w8a16"
    (tmp_path / "registering.py").write_text(HEADER + module)
    context = {"device": "cpu", "options": {"modules": ["registering"], "vllm": False}}
    assert by_name(run(tmp_path, context)[0])[op].traces == "fail"
    repaired = by_name(run(tmp_path, context, XPUFP8_APPLY=f"fake:{op}")[0])[op]
    assert (repaired.tracing, repaired.traces, repaired.error) == ("fake", "pass", None)
    refused, _ = run(tmp_path, context, XPUFP8_APPLY="fake:_xpu_C::nobody_knows")
    (library,) = [found for found in refused.libraries if found.name == "xpufp8.runtime.plugin"]
    assert library.error is not None
    assert "nobody_knows" in library.error.message


def test_an_op_that_kills_its_process_does_not_end_the_probe(tmp_path: Path) -> None:
    module = """
import os, signal

define("k", "a_deadly(Tensor a) -> Tensor", CompositeImplicitAutograd=lambda a: os.kill(os.getpid(), signal.SIGSEGV))
define("k", "b_after(Tensor a) -> Tensor", CPU=lambda a: a)
define("k", "c_with_address(Tensor a, int dst_ptr) -> Tensor", CompositeImplicitAutograd=lambda a, p: os.kill(os.getpid(), signal.SIGKILL))
"""
    ops = by_name(probe(tmp_path, module)[0])
    assert (ops["k::a_deadly"].tracing, ops["k::a_deadly"].traces) == ("composite", "unknown")
    assert (ops["k::b_after"].traces, "k.b_after.default" in (ops["k::b_after"].error or "")) == ("fail", True)
    assert ops["k::c_with_address"].traces == "unknown", "a kernel is never given a made-up address"


def test_attempts_end_at_the_time_limit(tmp_path: Path) -> None:
    module = """
import time

define("k", "a_first(Tensor a) -> Tensor", CPU=lambda a: a)
define("k", "b_slow(Tensor a) -> Tensor", CompositeImplicitAutograd=lambda a: time.sleep(3600))
define("k", "c_later(Tensor a) -> Tensor", CPU=lambda a: a)
"""
    facts, _ = probe(tmp_path, module, options={"modules": ["registering"], "vllm": False, "seconds": 5})
    ops = by_name(facts)
    assert ops["k::a_first"].error
    assert ops["k::b_slow"].traces == "unknown"
    assert (ops["k::c_later"].traces, ops["k::c_later"].error) == ("fail", None), "its registrations alone say so"


def test_a_module_that_does_not_import_is_a_fact(tmp_path: Path) -> None:
    facts, _ = probe(
        tmp_path, 'define("k", "f(Tensor a) -> Tensor")\nraise OSError("libsycl.so.9: cannot open shared object file")'
    )
    (library,) = [found for found in facts.libraries if found.name == "registering"]
    assert not library.loaded
    assert library.error is not None
    assert (library.error.type, library.error.message) == ("builtins.OSError", "libsycl.so.9: cannot open shared object file")


def test_extension_of_a_kernel_package_that_does_not_load(tmp_path: Path) -> None:
    """A file in the place of the kernels' shared object: the failure is the loader's, and the Python side fails in turn."""
    package = tmp_path / "vllm_xpu_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_C.abi3.so").write_bytes(b"\x7fELF not really")
    (tmp_path / "registering.py").write_text(
        "try:\n    import vllm_xpu_kernels._C\nexcept ImportError:\n    pass  # as vLLM does: a log line and on\n"
    )
    facts, _ = run(tmp_path, {"device": "cpu", "options": {"modules": ["registering"], "vllm": False}})
    (library,) = [found for found in facts.libraries if found.name == "vllm_xpu_kernels._C"]
    assert not library.loaded
    assert library.path == str(package / "_C.abi3.so")
    assert library.error is not None
    assert library.error.type == "builtins.ImportError"


def test_catalogue_where_nothing_is_installed(tmp_path: Path) -> None:
    facts, _ = probe(tmp_path, "", options={"vllm": False, "catalogue": "intel-extension-for-pytorch-2.10.10+xpu"})
    ops = by_name(facts)
    gemm = ops["torch_ipex::fp8_gemm_w8a16.xpu"]
    assert (gemm.mode, gemm.tracing, gemm.traces, gemm.dispatch_keys) == ("static", "none", "fail", ["XPU"])
    assert {op.mode for op in facts.ops} == {"static"}
    quantize = ops["torch_ipex::dynamic_scaled_fp8_quant.xpu"]
    assert (quantize.returns_tensor, quantize.tracing) == (False, "none"), "its inferred schema does not say that it mutates"


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> FakeTensorFacts:
    return run(tmp_path_factory.mktemp("cpu"), {"device": "cpu"})[0]


def test_vllm_on_cpu(on_cpu: FakeTensorFacts) -> None:
    ops = by_name(on_cpu)
    assert on_cpu.torch is not None
    assert len([name for name in ops if name.startswith("vllm::")]) > 60
    assert ops["vllm::unified_attention_with_output"].traces == "pass"
    assert ops["vllm::moe_forward"].tracing == "fake"
    assert ops["_C::silu_and_mul"].tracing == "trivial"
    assert not [name for name in ops if name.startswith(("aten::", "prims::", "inductor::", "c10d_functional::"))], "torch's own"
    assert {op.mode for op in on_cpu.ops} == {"live"}


def test_every_untraceable_op_of_vllm_on_cpu_has_the_word_of_dynamo(on_cpu: FakeTensorFacts) -> None:
    untraceable = [op for op in on_cpu.ops if op.tracing == "none"]
    assert untraceable
    for op in untraceable:
        assert op.traces == "fail"
        assert op.error is not None
        assert op.error.startswith(NO_FAKE), op.name
        assert f"unsupported operator: {op.namespace}.{op.name.split('.')[0]}" in op.error


def test_kernels_of_vllm_on_cpu_are_attributed_to_the_build_that_was_loaded(on_cpu: FakeTensorFacts) -> None:
    origins = {op.origin for op in on_cpu.ops if op.namespace == "_C"}
    assert len(origins) == 1
    (origin,) = origins
    (library,) = [found for found in on_cpu.libraries if found.name == origin]
    assert library.loaded
    assert library.path is not None
    assert library.path.endswith(".abi3.so")


def test_without_torch_the_files_still_answer(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('raise ImportError("libtorch_cpu.so: cannot open shared object file")')
    facts, _ = run(tmp_path, {"device": "xpu", "options": {"catalogue": "vllm-xpu-kernels-0.1.16.2"}})
    (library,) = facts.libraries
    assert (library.name, library.loaded, facts.torch) == ("torch", False, None)
    ops = by_name(facts)
    assert (ops["_xpu_C::fp8_gemm_w8a16"].tracing, ops["_xpu_C::fp8_bmm"].tracing) == ("fake", "none")
    assert (ops["_C::rms_norm"].tracing, ops["_xpu_C::is_bmg"].tracing) == ("trivial", "composite")
    assert ops["_xpu_C::compact_sampling_mask"].traces == "unknown", "its dispatch keys are not known"


WITHOUT_A_FAKE = {
    "_C::get_xpu_view_from_cpu_tensor", "_C::weak_ref_tensor", "_moe_C::reorder_mxfp_scales", "_vllm_fa2_C::varlen_fwd",
    "_xpu_C::causal_conv1d_non_spec", "_xpu_C::causal_conv1d_spec", "_xpu_C::compact_sampling_mask",
    "_xpu_C::cutlass_grouped_gemm_interface", "_xpu_C::deepseek_inv_rope_bf16", "_xpu_C::deepseek_inv_rope_fp8_quant",
    "_xpu_C::deepseek_scaling_rope", "_xpu_C::fp8_bmm", "_xpu_C::fp8_gemm_out", "_xpu_C::fp8_mqa_logits", "_xpu_C::fp8_paged_mqa_logits",
    "_xpu_C::mhc_fused_post_pre", "_xpu_C::mhc_post", "_xpu_C::mhc_pre",
}  # fmt: skip
"""Ops of vllm-xpu-kernels 0.1.16.2 that return tensors and have no fake once vLLM 0.32.0 has imported ``_xpu_ops`` and ``_custom_ops``
(the latter brings the one of ``_moe_C::grouped_topk``; without it there are nineteen)."""


@pytest.fixture(scope="module")
def on_simulated_xpu(tmp_path_factory: pytest.TempPathFactory) -> FakeTensorFacts:
    simulated = {"XPUFP8_SIMULATE": "arc-pro-b60", "XPUFP8_SIMULATE_KERNELS": "0.1.16.2"}
    return run(tmp_path_factory.mktemp("sim"), {"device": "sim:arc-pro-b60"}, **simulated)[0]


def test_the_release_on_a_simulated_xpu(on_simulated_xpu: FakeTensorFacts) -> None:
    untraceable = {name for name, op in by_name(on_simulated_xpu).items() if op.tracing == "none" and op.returns_tensor}
    assert untraceable == WITHOUT_A_FAKE
    assert {op.mode for op in on_simulated_xpu.ops} == {"simulated"}


def test_simulated_ops_come_from_the_library_that_they_stand_for(on_simulated_xpu: FakeTensorFacts) -> None:
    ops = by_name(on_simulated_xpu)
    assert ops["_C_cache_ops::reshape_and_cache_flash"].origin == "vllm_xpu_kernels/_C.abi3.so"
    assert (ops["_xpu_C::fp8_gemm_w8a16"].tracing, ops["_moe_C::grouped_topk"].tracing) == ("fake", "fake")
    assert (ops["_xpu_C::is_xe2_arch"].tracing, ops["_xpu_C::is_xe2_arch"].traces) == ("composite", "unknown")
    assert ops["_C::xpu_memcpy_sync"].tracing == "composite", "the library gives it a kernel without a key"
    assert not [
        found.name for found in on_simulated_xpu.libraries if found.name.startswith("vllm_xpu_kernels") and not found.loaded
    ]


@pytest.mark.releases
@pytest.mark.skipif(not os.environ.get("XPUFP8_KERNELS"), reason="XPUFP8_KERNELS names no unpacked wheel")
def test_wheel_that_does_not_load_is_read_from_its_files(tmp_path: Path) -> None:
    facts, _ = run(tmp_path, {"device": "xpu"}, PYTHONPATH=os.environ["XPUFP8_KERNELS"])
    failed = {found.name: found for found in facts.libraries if found.name.startswith("vllm_xpu_kernels._")}
    assert set(failed) == {f"vllm_xpu_kernels.{name}" for name in ("_C", "_moe_C", "_xpu_C", "_vllm_fa2_C")}
    assert all("cannot open shared object file" in (found.error.message if found.error else "") for found in failed.values())
    static = {name: op for name, op in by_name(facts).items() if op.mode == "static"}
    assert len(static) > 100
    assert (static["_xpu_C::fp8_gemm_w8a16"].tracing, static["_xpu_C::fp8_bmm"].tracing) == ("fake", "none")
    assert static["_C_cache_ops::reshape_and_cache"].tracing == "trivial"
