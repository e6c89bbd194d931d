"""Builds small Python environments with real shared objects, and runs the real probe in an interpreter that sees nothing else."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
from pydantic import TypeAdapter

from probes.facts import EnvironmentFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

CC = shutil.which("gcc") or shutil.which("cc")
needs_compiler = pytest.mark.skipif(CC is None, reason="builds shared objects with a C compiler")
REPOSITORY = Path(__file__).resolve().parents[2]
NEVER = "raise RuntimeError('imported by a probe that must only read files')\n"


@functools.cache
def _workshop() -> Path:
    """Folder of this test run for stubs and finished objects: tests build the same ones over and over."""
    folder = Path(tempfile.mkdtemp(prefix="made-environment-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compile(goal: Path, source: Path | str, *options: str) -> None:
    assert CC is not None
    command = [
        CC,
        "-shared",
        "-fPIC",
        "-nostdlib",
        "-Wl,--hash-style=gnu",
        "-Wl,--no-as-needed",
        "-o",
        goal,
        "-x",
        "c",
        source,
        "-x",
        "none",
    ]
    subprocess.run([*map(str, command), *options], check=True, capture_output=True)


@functools.cache
def _stub(name: str) -> str:
    path = _workshop() / "stubs" / name
    path.parent.mkdir(exist_ok=True)
    _compile(path, "/dev/null", f"-Wl,-soname,{name}")
    return f"-l:{name}"


@functools.cache
def _object(needed: tuple[str, ...], soname: str | None, runpath: str, rpath: str, code: str) -> Path:
    folder = Path(tempfile.mkdtemp(dir=_workshop()))
    source, goal = folder / "source.c", folder / "made.so"
    source.write_text(code or "int nothing_here;\n")
    options = [f"-L{_workshop() / 'stubs'}", *map(_stub, needed)]
    options += [f"-Wl,-soname,{soname}"] if soname else []
    options += [f"-Wl,--enable-new-dtags,-rpath,{runpath}"] if runpath else []
    options += [f"-Wl,--disable-new-dtags,-rpath,{rpath}"] if rpath else []
    _compile(goal, source, *options)
    return goal


def build(
    path: Path, needed: Sequence[str] = (), *, soname: str | None = None, runpath: str = "", rpath: str = "", code: str = "",
) -> Path:  # fmt: skip
    """Make a real shared object with NEEDED entries for libraries that need not exist anywhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(_object(tuple(needed), soname, runpath, rpath, code), path))


@functools.cache
def _elftools() -> Path:
    spec = importlib.util.find_spec("elftools")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


class Made:
    """A made environment: a folder of packages, observed by the real probe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.site = root / "site"
        self.site.mkdir()
        self.stage = root / "stage"
        self.stage.mkdir()
        (self.stage / "probes").symlink_to(REPOSITORY / "probes")
        (self.stage / "elftools").symlink_to(_elftools())
        self.python = root / "bin" / "python"
        self.python.parent.mkdir()
        self.python.symlink_to(os.path.realpath(sys.executable))

    def write(self, name: str, text: str = "") -> Path:
        """A file below the folder of packages."""
        path = self.site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
        return path

    def package(self, name: str, version: str | None = None) -> Path:
        """An import package that refuses to be imported."""
        self.write(f"{name}/__init__.py", NEVER)
        if version:
            self.write(f"{name}/_version.py", f"__version__ = version = {version!r}\n")
        return self.site / name

    def distribution(
        self, name: str, version: str, *, owns: Sequence[str] = (), requires: Sequence[str] = (), record: bool = True, **files: str,
    ) -> Path:  # fmt: skip
        """Metadata of a distribution, with a file list that names what it owns."""
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        self.write(f"{folder}/METADATA", "\n".join(lines) + "\n\nA description: with colons.\n")
        self.write(f"{folder}/INSTALLER", "pip\n")
        if record:
            self.write(f"{folder}/RECORD", "".join(f"{top}/__init__.py,sha256=x,1\n" for top in owns))
        for key, text in files.items():
            self.write(f"{folder}/{key.replace('__', '.')}", text)
        return self.site / folder

    def install(self, name: str, version: str, *, distribution: str | None = None, requires: Sequence[str] = ()) -> Path:
        """A package and the distribution that owns it."""
        self.distribution(distribution or name.replace("_", "-"), version, owns=[name], requires=requires)
        return self.package(name)

    def torch(self, version: str, backends: Sequence[str], needed: Sequence[str] = (), requires: Sequence[str] = ()) -> Path:
        """A torch whose extension module brings in one library for each backend; the last of them needs ``needed``."""
        folder = self.install("torch", version, requires=requires)
        self.write("torch/version.py", f"__version__ = {version!r}\ncuda: Optional[str] = None\nxpu: Optional[str] = None\n")
        build(folder / "lib" / "libc10.so", soname="libc10.so", code="int c10_here(void) { return 0; }\n")
        for backend in backends:
            wants = ["libc10.so", *(needed if backend == backends[-1] else ())]
            name = f"libtorch_{backend}.so"
            exported = f'void f(void) __asm__("_ZN2at4here{len(backend)}{backend}Ev"); void f(void) {{}}\n'
            build(folder / "lib" / name, wants, soname=name, runpath="$ORIGIN", code=exported)
        build(folder / "_C.abi3.so", [f"libtorch_{b}.so" for b in backends], runpath="$ORIGIN/lib")
        return folder

    def vllm(
        self, version: str, *, distribution: str | None = "vllm", requires: Sequence[str] = (), kernels: bool = True
    ) -> Path:
        """A vLLM as far as its surroundings are concerned: its command, its XPU platform, its list of variables."""
        folder = self.package("vllm", version)
        self.command(f"#!{self.python}\n")
        if distribution:
            self.distribution(distribution, version, owns=["vllm"], requires=requires)
        self.write(
            "vllm/entrypoints/cli/main.py",
            """
            import importlib.metadata


            def main():
                return importlib.metadata.version("vllm")
            """,
        )
        imports = ("vllm_xpu_kernels._C", "vllm_xpu_kernels._moe_C", "vllm_xpu_kernels._xpu_C") if kernels else ()
        self.write("vllm/platforms/xpu.py", "import torch\n" + "".join(f"import {name}  # noqa\n" for name in imports))
        self.write("vllm/envs.py", 'environment_variables = {"VLLM_PLUGINS": None, "VLLM_WORKER_MULTIPROC_METHOD": None}\n')
        return folder

    def command(self, first_lines: str) -> Path:
        """The ``vllm`` command beside the interpreter."""
        path = self.python.parent / "vllm"
        path.write_text(first_lines + "import sys\n")
        path.chmod(0o755)
        return path

    def kernels(self, version: str, needed: Sequence[str] = (), modules: Sequence[str] = ("_C", "_moe_C", "_xpu_C")) -> Path:
        """vllm-xpu-kernels with compiled modules."""
        folder = self.install("vllm_xpu_kernels", version)
        for name in modules:
            build(folder / f"{name}.abi3.so", ["libtorch_xpu.so", *needed], runpath="$ORIGIN")
        return folder

    def observe(self, *, elftools: bool = True, extra: Sequence[Path] = (), **environment: str) -> EnvironmentFacts:
        """Run the probe in a child that has just these packages, and validate its facts as the host does."""
        if not elftools:
            (self.stage / "elftools").unlink()
        empty = self.root / "cwd"
        empty.mkdir(exist_ok=True)
        path = os.pathsep.join(map(str, [self.stage, *extra, self.site]))
        child = subprocess.run(
            [self.python, "-S", "-m", "probes", "environment"], input="{}", capture_output=True, text=True, cwd=empty, check=True,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.root / "home"), "PYTHONPATH": path, **environment},
        )  # fmt: skip
        envelope = json.loads(child.stdout)
        assert envelope["error"] is None, envelope["error"]
        return TypeAdapter(EnvironmentFacts).validate_python(envelope["facts"])
