"""The loader's search over files, against the dynamic loader itself."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from made_environment import build, needs_compiler

from probes.elf import ElfError, Loader, generation, mapped_libraries, read, read_cache
from probes.symbols import gnu_hash, undefined

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs_compiler


@dataclass
class Scene:
    """One object to load, what is loaded before it, and the process's LD_LIBRARY_PATH."""

    entry: Path
    before: list[Path] = field(default_factory=list)
    library_path: str = ""


def origin(root: Path) -> Scene:
    build(root / "lib" / "libb.so.1", soname="libb.so.1")
    return Scene(build(root / "a.so", ["libb.so.1"], runpath="$ORIGIN/lib"))


def braces(root: Path) -> Scene:
    build(root / "lib" / "libb.so.1", soname="libb.so.1")
    return Scene(build(root / "sub" / "a.so", ["libb.so.1"], rpath="${ORIGIN}/../lib"))


def nowhere(root: Path) -> Scene:
    return Scene(build(root / "a.so", ["libnowhere_at_all.so.7"], runpath="$ORIGIN"))


def rpath_is_inherited(root: Path) -> Scene:
    build(root / "lib" / "libc1.so", soname="libc1.so")
    build(root / "lib" / "libb.so.1", ["libc1.so"], soname="libb.so.1")
    return Scene(build(root / "a.so", ["libb.so.1"], rpath="$ORIGIN/lib"))


def runpath_is_not(root: Path) -> Scene:
    build(root / "lib" / "libc1.so", soname="libc1.so")
    build(root / "lib" / "libb.so.1", ["libc1.so"], soname="libb.so.1")
    return Scene(build(root / "a.so", ["libb.so.1"], runpath="$ORIGIN/lib"))


def runpath_hides_the_inherited(root: Path) -> Scene:
    build(root / "lib" / "libc1.so", soname="libc1.so")
    build(root / "lib" / "libb.so.1", ["libc1.so"], soname="libb.so.1", runpath="$ORIGIN/other")
    return Scene(build(root / "a.so", ["libb.so.1"], rpath="$ORIGIN/lib"))


def library_path(root: Path) -> Scene:
    build(root / "far" / "libb.so.1", soname="libb.so.1")
    return Scene(build(root / "a.so", ["libb.so.1"]), library_path=f"/nonexistent:{root / 'far'}")


def loaded_before(root: Path) -> Scene:
    """By soname, whatever the file is called."""
    first = build(root / "hidden" / "anything.so", soname="libb.so.1")
    return Scene(build(root / "a.so", ["libb.so.1"]), [first])


def sibling_brings_it(root: Path) -> Scene:
    """The second library finds loaded what the first one's RUNPATH found: breadth first, in order."""
    build(root / "lib" / "libc1.so", soname="libc1.so")
    build(root / "libb.so.1", ["libc1.so"], soname="libb.so.1", runpath="$ORIGIN/lib")
    build(root / "libd.so.1", ["libc1.so"], soname="libd.so.1")
    return Scene(build(root / "a.so", ["libb.so.1", "libd.so.1"], runpath="$ORIGIN"))


def other_word_size_first(root: Path) -> Scene:
    """A 32-bit library of the name is passed over."""
    build(root / "good" / "libb.so.1", soname="libb.so.1")
    small = build(root / "small" / "libb.so.1", soname="libb.so.1")
    data = bytearray(small.read_bytes())
    data[4] = 1
    small.write_bytes(data)
    return Scene(build(root / "a.so", ["libb.so.1"], runpath="$ORIGIN/small:$ORIGIN/good"))


def text_file_first(root: Path) -> Scene:
    """A file that is no ELF file ends the search: Git LFS pointers are found before the real one."""
    build(root / "good" / "libb.so.1", soname="libb.so.1")
    (root / "text").mkdir()
    (root / "text" / "libb.so.1").write_text("version https://git-lfs.github.com/spec/v1\n")
    return Scene(build(root / "a.so", ["libb.so.1"], runpath="$ORIGIN/text:$ORIGIN/good"))


def deep_and_missing(root: Path) -> Scene:
    build(root / "lib" / "libb.so.1", ["libnowhere_deep.so.3"], soname="libb.so.1", runpath="$ORIGIN")
    return Scene(build(root / "a.so", ["libb.so.1"], runpath="$ORIGIN/lib"))


def system_libraries(root: Path) -> Scene:
    return Scene(build(root / "a.so", ["libm.so.6", "libdl.so.2"]))


SCENES = (
    origin, braces, nowhere, rpath_is_inherited, runpath_is_not, runpath_hides_the_inherited, library_path, loaded_before,
    sibling_brings_it, other_word_size_first, text_file_first, deep_and_missing, system_libraries,
)  # fmt: skip


def really_loads(scene: Scene) -> tuple[bool, str]:
    """What the dynamic loader itself says, in a process of its own."""
    code = "import ctypes, sys\nfor path in sys.argv[1:]: ctypes.CDLL(path)"
    child = subprocess.run(
        [sys.executable, "-S", "-c", code, *map(str, [*scene.before, scene.entry])], capture_output=True, text=True, check=False,
        env={"LD_LIBRARY_PATH": scene.library_path} if scene.library_path else {},
    )  # fmt: skip
    return child.returncode == 0, child.stderr


@pytest.mark.parametrize("scene_of", SCENES, ids=lambda f: f.__name__)
def test_same_answer_as_the_dynamic_loader(scene_of: Callable[[Path], Scene], tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    loader = Loader(scene.library_path, read_cache(), mapped_libraries())
    for path in scene.before:
        assert not loader.load(str(path)).missing
    seen = loader.load(str(scene.entry))
    loads, said = really_loads(scene)
    assert loads == (not seen.missing and not seen.errors), (seen.missing, seen.errors, said)
    for names in seen.missing.values():
        assert any(name in said for name in names)
    for path in seen.errors:
        assert path in said


def test_what_is_not_kept_does_not_count_as_loaded(tmp_path: Path) -> None:
    provider = build(tmp_path / "lib" / "libb.so.1", soname="libb.so.1")
    user = build(tmp_path / "a.so", ["libb.so.1"])
    loader = Loader()
    loader.load(str(provider), keep=False)
    assert loader.load(str(user), keep=False).missing == {str(user): ["libb.so.1"]}
    loader.load(str(provider))
    assert not loader.load(str(user)).missing


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer, not the file itself"),
        (b"<html>404</html>", "is not an ELF file"),
        (b"\x7fELF", "is cut off or damaged: its ELF structures cannot be read"),
    ],
)
def test_a_file_that_is_no_shared_object_says_why(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(content)
    with pytest.raises(ElfError, match=why):
        read(path)


def test_every_cut_of_a_real_object_is_read_or_refused(tmp_path: Path) -> None:
    data = build(tmp_path / "whole.so", ["libb.so.1"], soname="liba.so.1").read_bytes()
    path = tmp_path / "cut.so"
    for size in range(1, len(data), max(1, len(data) // 120)):
        path.write_bytes(data[:size])
        with contextlib.suppress(ElfError):
            assert read(path).needed in {("libb.so.1",), ()}


def test_a_missing_file_is_an_elf_error(tmp_path: Path) -> None:
    with pytest.raises(ElfError, match="No such file"):
        read(tmp_path / "absent.so")


def test_the_cache_holds_what_the_linker_put_there() -> None:
    cache = read_cache()
    if not cache:
        pytest.skip("this system has no loader cache")
    assert any(Path(path).is_file() for path in cache["libc.so.6"])


@pytest.mark.parametrize(
    "data",
    [b"", b"no cache", b"glibc-ld.so.cache1.1", b"glibc-ld.so.cache1.1" + b"\xff" * 40, b"glibc-ld.so.cache1.1" + b"\xff" * 400],
)
def test_a_broken_cache_is_an_empty_one_or_harmless(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ld.so.cache"
    path.write_bytes(data)
    assert not any(name.startswith("lib") for name in read_cache(path))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("libsycl.so.8", ("libsycl.so", "8")),
        ("libsycl.so.9.0.0", ("libsycl.so", "9")),
        ("libmkl_sycl_blas.so.5", ("libmkl_sycl_blas.so", "5")),
        ("libstdc++.so.6", ("libstdc++.so", "6")),
        ("libtorch_cpu.so", None),
        ("libnuma.so.1-gdb.py", None),
        ("ld-linux-x86-64.so.2", None),
    ],
)
def test_generation(name: str, parts: tuple[str, str] | None) -> None:
    assert generation(name) == parts


def symbol(name: str, *, defined: bool) -> str:
    """C source that defines or calls a function under a mangled name."""
    declared = f'void f_{abs(hash(name))}(void) __asm__("{name}");\n'
    if defined:
        return declared + f"void f_{abs(hash(name))}(void) {{}}\n"
    return declared + f"void call_{abs(hash(name))}(void) {{ f_{abs(hash(name))}(); }}\n"


def test_undefined_symbols_of_torch_are_those_that_the_loader_refuses(tmp_path: Path) -> None:
    there = [f"_ZN3c104kept{n}Ev" for n in range(200)] + ["_ZNK2at6Tensor4kindEv", "aoti_torch_new_thing", "_ZN5torch3jit4keepEv"]
    gone = ["_ZN3c104goneEv", "_ZNK2at6Tensor4lostEv", "aoti_torch_old_thing", "_ZN5torch3jit4dropEv"]
    other = "_ZN4mine4goneEv"
    provider = build(tmp_path / "libc10.so", soname="libc10.so", code="".join(symbol(n, defined=True) for n in there))
    user = build(
        tmp_path / "ext.so",
        ["libc10.so"],
        runpath="$ORIGIN",
        code="".join(symbol(n, defined=False) for n in [*there, *gone, other]),
    )
    assert undefined(read(user), [read(provider)]) == sorted(gone)
    code = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)"
    refused = subprocess.run([sys.executable, "-S", "-c", code, str(user)], capture_output=True, text=True, check=False)
    assert "undefined symbol" in refused.stderr
    assert any(name in refused.stderr for name in [*gone, other])


def test_weak_and_exported_symbols_are_not_asked_for(tmp_path: Path) -> None:
    weak = 'void g(void) __asm__("_ZN3c104weakEv"); void g(void) __attribute__((weak));\nvoid call(void) { if (g) g(); }\n'
    path = build(tmp_path / "ext.so", code=weak + symbol("_ZN3c103ownEv", defined=True))
    assert undefined(read(path), []) == []


def test_the_hash_is_the_loaders() -> None:
    # From the definition of DT_GNU_HASH: h = 5381, then h * 33 + c for each character, in 32 bits.
    assert gnu_hash(b"") == 0x1505
    assert gnu_hash(b"printf") == 0x156B2BB8
    assert gnu_hash(b"syscall") == 0xBAC212A0
