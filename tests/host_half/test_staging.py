"""The staging folder: the target half alone, importable where nothing of the host half's is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from xpufp8.staging import ENTRY_POINTS, stage, stage_metadata

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def run_in_target(code: str, *path: Path) -> str:
    """Run in an interpreter that has the standard library and these folders, nothing else."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_of_the_target_half_imports_with_the_standard_library_alone() -> None:
    code = """
import importlib, pathlib
root = pathlib.Path(sys.path[0])
for file in sorted([*root.glob("probes/**/*.py"), *root.glob("xpufp8/**/*.py")]):
    name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    if not name.endswith("__main__") and "triton_kernels." not in name:
        importlib.import_module(name)
heavy = {"torch", "vllm", "typer", "rich", "pydantic", "psutil", "yaml"} & {n.split(".")[0] for n in sys.modules}
print(sorted(heavy), len(sys.modules) > 50)
"""
    assert run_in_target(code, stage()).strip() == "[] True"


def test_entry_points_are_those_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {g: {f"{k} = {v}" for k, v in points.items()} for g, points in declared.items()} == {
        g: set(v) for g, v in ENTRY_POINTS.items()
    }


def test_importlib_finds_the_plugins_through_the_path() -> None:
    groups = ("vllm.general_plugins", "vllm.platform_plugins")
    code = f"import importlib.metadata as m; print(sorted(p.name for g in {groups} for p in m.entry_points(group=g)))"
    assert run_in_target(code, stage()).strip() == "['xpufp8', 'xpufp8_sim', 'xpufp8_sim_general']"


@pytest.mark.parametrize("harm", ["emptied", "cut", "removed", "replaced by a folder"])
def test_a_torn_folder_is_made_again(harm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XPUFP8_CACHE_DIR", str(tmp_path / "cache"))
    whole = {p.relative_to(stage()): p.read_bytes() for p in stage().rglob("*.py")}
    victim = stage() / "probes" / "facts.py"
    if harm == "emptied":
        victim.write_bytes(b"")
    elif harm == "cut":
        victim.write_bytes(victim.read_bytes()[:-1])
    else:
        victim.unlink()
        if harm == "replaced by a folder":
            victim.mkdir()
    assert {p.relative_to(stage()): p.read_bytes() for p in stage().rglob("*.py")} == whole
    assert run_in_target("import probes.facts; print(1)", stage()).strip() == "1"
    assert [p.name for p in stage().parent.iterdir()] == [stage().name]


def test_a_relative_cache_folder_is_the_one_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XPUFP8_CACHE_DIR", "cache")
    assert stage().is_absolute()
    assert stage().is_relative_to(tmp_path)


def test_missing_metadata_is_supplied() -> None:
    folder = stage_metadata("vllm", "0.32.0+cpu")
    assert run_in_target("import importlib.metadata as m; print(m.version('vllm'))", folder).strip() == "0.32.0+cpu"


def test_a_cache_that_cannot_be_written_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XPUFP8_CACHE_DIR", str(blocked))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    assert stage().is_relative_to(tmp_path)
