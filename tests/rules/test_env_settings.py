"""Rules about environment variables, and the catalogue that they read."""

from __future__ import annotations

import pytest

from probes.facts import EnvironmentFacts, PackageFact, SettingFact
from xpufp8.report import Finding
from xpufp8.rules import env_settings
from xpufp8.rules.base import Case
from xpufp8.settings import Catalogue, catalogue, parse

TRITON = PackageFact("triton", "3.6.0+git225cdbde", "/site", distribution="triton-xpu")
VLLM = PackageFact("vllm", "0.32.0+xpu", "/site", distribution="vllm")


def facts(
    environ: dict[str, str], packages: tuple[PackageFact, ...] = (TRITON, VLLM), unknown: tuple[str, ...] = ()
) -> EnvironmentFacts:
    return EnvironmentFacts(
        python="3.12.0", executable="/opt/venv/bin/python", system="Ubuntu", kernel="Linux 7.1", machine="x86_64", libc="glibc 2.41",
        container=None, cpu="x", cpu_flags=[], cores=8, memory_bytes=1, packages=list(packages),
        settings=[SettingFact(*pair) for pair in environ.items()], unknown_settings=list(unknown),
    )  # fmt: skip


def judge(environ: dict[str, str], device: str = "xpu", *args: str, **more: object) -> list[Finding]:
    unknown = more.pop("unknown", ())
    case = Case(device, tuple(args), None, {"environment": facts(environ, unknown=unknown), **more})  # type: ignore[arg-type] # a test's own tuple
    return [finding for one in env_settings.RULES for finding in one.check(one, case)]


ONE: tuple[str, ...] = ()
TWO = ("-tp", "2")

SET = [
    ("VLLM_WORKER_MULTIPROC_METHOD", "fork", ONE, "ENV020", "warning", "VLLM_WORKER_MULTIPROC_METHOD=spawn"),
    ("VLLM_WORKER_MULTIPROC_METHOD", "FORK", TWO, "ENV020", "warning", "VLLM_WORKER_MULTIPROC_METHOD=spawn"),
    ("VLLM_TARGET_DEVICE", "cpu", ONE, "ENV020", "error", "unset VLLM_TARGET_DEVICE"),
    ("VLLM_PLUGINS", "mine", ONE, "ENV020", "warning", "VLLM_PLUGINS=mine,xpufp8"),
    ("VLLM_PLUGINS", "not_xpufp8_sim", ONE, "ENV020", "warning", "VLLM_PLUGINS=not_xpufp8_sim,xpufp8"),
    ("ONEAPI_DEVICE_SELECTOR", "level_zero:*", ONE, "ENV020", "warning", "ONEAPI_DEVICE_SELECTOR=level_zero:*;opencl:gpu"),
    ("ONEAPI_DEVICE_SELECTOR", "level_zero:0,1", TWO, "ENV020", "warning", "ONEAPI_DEVICE_SELECTOR=level_zero:0,1;opencl:gpu"),
    ("ONEAPI_DEVICE_SELECTOR", "opencl:gpu", ONE, "ENV020", "error", "unset ONEAPI_DEVICE_SELECTOR"),
    ("ONEAPI_DEVICE_SELECTOR", "!level_zero:*", ONE, "ENV020", "error", "unset ONEAPI_DEVICE_SELECTOR"),
    ("SYCL_CACHE_PERSISTENT", "1", ONE, "ENV020", "warning", "SYCL_CACHE_PERSISTENT=0"),
    ("CCL_ENABLE_SYCL_KERNELS", "0", TWO, "ENV020", "warning", "unset CCL_ENABLE_SYCL_KERNELS"),
    ("CCL_ZE_IPC_EXCHANGE", "sockets", ("-pp", "2"), "ENV020", "info", "unset CCL_ZE_IPC_EXCHANGE"),
    ("CCL_TOPO_P2P_ACCESS", "0", ONE, "ENV022", "info", "unset CCL_TOPO_P2P_ACCESS"),
    ("FI_PROVIDER", "tcp", ("-tp", "1"), "ENV022", "info", "unset FI_PROVIDER"),
]


@pytest.mark.parametrize(("name", "value", "args", "code", "severity", "fix"), SET)
def test_a_setting_that_hurts_or_does_nothing(
    name: str, value: str, args: tuple[str, ...], code: str, severity: str, fix: str
) -> None:
    (found,) = judge({name: value}, "xpu", *args)
    assert (found.code, found.severity, found.status) == (code, severity, "fail")
    assert [f.action for f in found.fixes] == [fix]
    assert f"{name}={value}" in found.evidence[0].observed
    assert judge({name: value}, "sim:arc-pro-b60", *args) == []


FINE = [
    ({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, ONE),
    ({"VLLM_PLUGINS": "a, xpufp8"}, ONE),
    ({"VLLM_PLUGINS": "xpufp8"}, ONE),
    ({"ONEAPI_DEVICE_SELECTOR": "*:gpu"}, ONE),
    ({"ONEAPI_DEVICE_SELECTOR": "level_zero:0;opencl:0"}, ONE),
    ({"ONEAPI_DEVICE_SELECTOR": "!opencl:cpu"}, ONE),
    ({"SYCL_CACHE_PERSISTENT": "0"}, ONE),
    ({"CCL_ENABLE_SYCL_KERNELS": "1", "CCL_TOPO_P2P_ACCESS": "0", "FI_PROVIDER": "tcp"}, TWO),
    ({"CCL_SEND": "direct", "CCL_RECV": "direct"}, ("-pp", "2")),
    ({"CCL_ROOT": "/opt/intel/oneapi/ccl/2022.2", "I_MPI_ROOT": "/x", "FI_PROVIDER_PATH": "/y"}, ONE),
    ({"NEOReadDebugKeys": "1", "RenderCompressedBuffersEnabled": "0"}, ONE),
    ({"ZE_AFFINITY_MASK": "0,1"}, TWO),
    ({"ZE_AFFINITY_MASK": ""}, TWO),
    ({"ZE_AFFINITY_MASK": "0"}, ("-tp", "2", "--distributed-executor-backend", "ray")),
    ({"ZE_AFFINITY_MASK": "0", "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, TWO),
    ({"CCL_ENABLE_SYCL_KERNELS": "1", "CCL_ALLREDUCE": "topo", "CCL_WORKER_COUNT": "1"}, TWO),
]


@pytest.mark.parametrize(("environ", "args"), FINE)
def test_settings_that_are_fine_are_not_spoken_of(environ: dict[str, str], args: tuple[str, ...]) -> None:
    assert judge(environ, "xpu", *args) == []


CONFLICTS = [
    ({"CCL_ENABLE_SYCL_KERNELS": "1", "CCL_ALLREDUCE": "ring"}, TWO, "unset CCL_ALLREDUCE"),
    ({"CCL_ENABLE_SYCL_KERNELS": "1", "CCL_WORKER_COUNT": "4"}, TWO, "unset CCL_WORKER_COUNT"),
    ({"CCL_ENABLE_SYCL_KERNELS": "1", "CCL_ZE_CACHE": "0"}, TWO, "unset CCL_ZE_CACHE"),
    ({"CCL_SEND": "direct"}, ("-pp", "2"), "CCL_RECV=direct"),
    ({"CCL_RECV": "direct", "CCL_SEND": "topo"}, ("-pp", "2"), "CCL_SEND=direct"),
    ({"RenderCompressedBuffersEnabled": "0"}, ONE, "NEOReadDebugKeys=1"),
    ({"EnableHostUsmAllocationPool": "0", "NEOReadDebugKeys": "0"}, ONE, "NEOReadDebugKeys=1"),
]


@pytest.mark.parametrize(("environ", "args", "fix"), CONFLICTS)
def test_contradictions_and_that_the_fix_ends_them(environ: dict[str, str], args: tuple[str, ...], fix: str) -> None:
    (found,) = [f for f in judge(environ, "xpu", *args) if f.code == "ENV021"]
    assert [f.action for f in found.fixes] == [fix]
    assert found.severity == "warning"
    after = dict(environ)
    if "=" in fix:
        name, _, value = fix.partition("=")
        after[name] = value
    else:
        del after[fix.removeprefix("unset ")]
    assert [f for f in judge(after, "xpu", *args) if f.code == "ENV021"] == []
    assert [f for f in judge(environ, "cpu", *args) if f.code == "ENV021"] == []


@pytest.mark.parametrize(
    ("mask", "args", "needed"),
    [
        ("0", TWO, 2),
        ("0,1", ("-tp", "4"), 4),
        ("2", ("-pp", "2"), 2),
        ("0", ("-tp2", "-pp=2"), 4),
        ("0.0", ("--tensor-parallel-size=2",), 2),
    ],
)
def test_a_mask_that_shows_too_few_devices_stops_the_start(mask: str, args: tuple[str, ...], needed: int) -> None:
    (found,) = judge({"ZE_AFFINITY_MASK": mask}, "xpu", *args)
    assert (found.code, found.severity) == ("ENV021", "error")
    assert f"ask for {needed}" in found.cause
    name, _, value = found.fixes[0].action.partition("=")
    assert judge({name: value}, "xpu", *args) == []


def test_multi_device_variables_are_one_finding() -> None:
    (found,) = judge({"CCL_SEND": "direct", "CCL_RECV": "direct", "FI_PROVIDER": "tcp", "FI_LOG_LEVEL": "warn"})
    assert found.code == "ENV022"
    assert found.fixes[0].action == "unset CCL_SEND CCL_RECV FI_PROVIDER"
    assert len(found.evidence) == 3


def test_rows_that_hold_for_a_release_look_at_the_installed_one() -> None:
    case_of = {
        "3.6.0": ["ENV020"], "3.6.1+gitabc": ["ENV020"], "3.7.0": [], "3.5.0": [], None: [], "nightly": [],
    }  # fmt: skip
    for version, codes in case_of.items():
        package = PackageFact("triton", version, "/site", distribution="triton-xpu")
        case = Case("xpu", (), None, {"environment": facts({"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, (package,))})
        assert [f.code for one in env_settings.RULES for f in one.check(one, case)] == codes, version


def test_what_the_rules_for_several_devices_say_is_not_said_twice() -> None:
    environ = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    assert [f.code for f in judge(environ, "xpu", *TWO, host_ipc=object())] == []
    assert [f.code for f in judge(environ, "xpu", host_ipc=object())] == ["ENV020"]


def test_variables_that_vllm_does_not_read_name_what_is_known_of_them() -> None:
    names = ("VLLM_OFFLOAD_WEIGHTS_BEFORE_QUANT", "VLLM_MISSPELT")
    known, other = judge(dict.fromkeys(names, "1"), "cpu", unknown=names)
    assert (known.code, known.severity) == ("ENV023", "info")
    assert "quantises on the CPU first" in known.cause
    assert "It is known" not in other.cause
    assert "vLLM 0.32.0+xpu does not read VLLM_MISSPELT" in other.cause


# -- the catalogue -----------------------------------------------------------------------------------------------------


def test_rows_of_the_catalogue_are_whole() -> None:
    rows = catalogue()
    assert len(rows.settings) > 30
    for row in rows.settings:
        assert row.kind in {"hurts", "helps"}
        assert row.where.parallel in {"any", "one", "many"}
        assert set(row.where.devices) <= {"xpu", "cpu", "cuda"}
        assert row.status in env_settings.STATUS
        assert row.effect
        assert row.source
        assert row.kind == "helps" or row.fix
    for conflict in rows.conflicts:
        assert len(conflict.terms) == 2
        assert not conflict.terms[0].negated
        assert conflict.fix
        assert conflict.source


def test_no_value_both_hurts_and_helps() -> None:
    values = ["0", "1", "fork", "spawn", "direct", "sockets", "tcp", "ofi", "level_zero:*", "opencl:gpu", "cpu", "a,xpufp8"]
    for row in catalogue().settings:
        if row.kind == "hurts":
            for other in catalogue().named(row.name):
                assert other is row or not any(row.matches(v) and other.matches(v) for v in values if other.kind == "helps")


@pytest.mark.parametrize(
    "text",
    [
        "[[setting]]\nname = 'X'\n",
        "not toml = = 1",
        "[[setting]]\nname='X'\nvalue='('\nkind='hurts'\ndevices=[]\nparallel='any'\n",
    ],
)
def test_a_broken_catalogue_is_refused(text: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        parse(text)


def test_an_empty_catalogue_says_nothing() -> None:
    assert parse("") == Catalogue((), ())


def test_patterns_answer_in_linear_time() -> None:
    # Were one of them to backtrack exponentially, this test would not end.
    for row in catalogue().settings:
        row.matches(",".join(["xpufp", "level_zero:", "!"] * 5_000))
    for conflict in catalogue().conflicts:
        for term in conflict.terms:
            term.holds("1" * 50_000 + "x")
