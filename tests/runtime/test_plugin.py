"""The plugin: what XPUFP8_APPLY does, in a process of its own, from a folder on PYTHONPATH."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xpufp8.runtime import catalogue
from xpufp8.runtime.catalogue import RepairError

ROOT = Path(__file__).parents[2]


def run(code: str, apply: str | None, path: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter away from the repository, with only ``path`` added to what it can import."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XPUFP8", "PYTHON", "VLLM"))}
    environment |= {"PYTHONPATH": path}
    if apply is not None:
        environment["XPUFP8_APPLY"] = apply
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd="/",
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_known_items_are_ordered_and_each_once() -> None:
    items = catalogue.parse(" moe:fp8, kernel:fp8_block,fake:_xpu_C::fp8_gemm ,kernel:fp8_block,")
    assert items == ("fake:_xpu_C::fp8_gemm", "kernel:fp8_block", "moe:fp8")
    assert catalogue.parse(None) == catalogue.parse("") == ()


@pytest.mark.parametrize(
    "item", ["kernel:nvfp4", "fake:fp8_gemm", "kernels:fp8", "moe", "cast:", "fake:a::b; rm", "kernel:fp8 moe:fp8"]
)
def test_unknown_items_are_refused_with_what_there_is(item: str) -> None:
    with pytest.raises(RepairError, match=r"no repair that this version knows.*kernel:fp8_block"):
        catalogue.parse(item)


def test_every_repair_says_what_it_removes() -> None:
    for repair in catalogue.known_repairs():
        assert all(re.fullmatch(r"[A-Z]{3}\d{3}", code) for code in repair.codes), repair
        re.compile(repair.pattern)
        re.compile(repair.subject)
        assert repair.stage in {"process", "start"}
    block = next(r for r in catalogue.known_repairs() if r.name == "kernel:fp8_block")
    assert block.item("fp8_block") == "kernel:fp8_block"
    with pytest.raises(RepairError):
        block.item("fp8")
    fake = next(r for r in catalogue.known_repairs() if r.name == "fake:<ns>::<op>")
    assert fake.item("torch_ipex::fp8_gemm_w8a16.xpu") == "fake:torch_ipex::fp8_gemm_w8a16.xpu"


def test_catalogue_needs_the_standard_library_only() -> None:
    code = (
        "import sys; import xpufp8.runtime.catalogue, xpufp8.runtime.plugin as p; p.activate()\n"
        "heavy = {'torch', 'vllm', 'typer', 'rich', 'pydantic'} & set(sys.modules); assert not heavy, heavy"
    )
    assert run(code, None, str(ROOT)).returncode == 0


PROGRAM = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from xpufp8.runtime import plugin, tables
plugin.activate()
from vllm.platforms import current_platform
for kind in ("fp8", "fp8_block", "wfp8a16"):
    print(kind, [k.__name__ for k in tables.find(kind).rows[current_platform._enum]])
import xpufp8; print("from", xpufp8.__file__)
"""


@pytest.fixture(scope="module")
def staged() -> str:
    """The folder that is put on PYTHONPATH of a target interpreter."""
    from xpufp8 import staging

    return str(staging.stage())


@pytest.mark.sim
def test_rows_are_extended_at_their_end_and_only_once(staged: str) -> None:
    done = run(PROGRAM, "kernel:fp8,kernel:fp8_block,kernel:wfp8a16", staged)
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("fp8", "wfp8")))
    assert re.search(r"'CPUFp8BlockScaledMMKernel', 'Xpufp8BlockLinearKernel'\]$", rows["fp8_block"])
    assert re.search(r"'ChannelWiseTorchFP8ScaledMMLinearKernel', 'Xpufp8LinearKernel'\]$", rows["fp8"])
    assert rows["wfp8a16"] == "['Xpufp8W8A16LinearKernel']"
    assert f"from {staged}" in done.stdout
    for item in ("kernel:fp8", "kernel:fp8_block", "kernel:wfp8a16"):
        assert len(re.findall(rf"xpufp8 repair {item} \(pid \d+\)", done.stdout + done.stderr)) == 1


@pytest.mark.sim
def test_without_the_variable_nothing_changes(staged: str) -> None:
    done = run(PROGRAM, None, staged)
    assert done.returncode == 0, done.stderr
    assert "Xpufp8" not in done.stdout
    assert "xpufp8 repair" not in done.stderr


IMPOSSIBLE = {
    "kernel:nonsense": "no repair that this version knows",
    "kernel:scaled_mm": "this vLLM has no such table; looked for",
    "fake:_xpu_C::fp8_gemm_w8a16": "no such op is registered",
    "fake:all": "none of the ops is registered",
    "cast:nowhere::gemm": "no method of this vLLM calls",
    "metadata:vllm": "no distribution named vllm",
}
TRY_EACH = """
import os, sys
from xpufp8.runtime import plugin, tables
for item in sys.stdin.read().split():
    os.environ["XPUFP8_APPLY"] = item
    try:
        plugin.activate()
    except plugin.RepairError as error:
        print(item, "|", error)
print(plugin.applied())
"""


@pytest.mark.sim
def test_impossible_repair_stops_the_process(staged: str) -> None:
    done = run(
        "from vllm.plugins import load_general_plugins; load_general_plugins(); print('serving')", "kernel:nonsense", staged
    )
    assert done.returncode != 0
    assert "serving" not in done.stdout
    assert IMPOSSIBLE["kernel:nonsense"] in done.stderr


@pytest.mark.sim
def test_each_impossible_repair_says_what_was_looked_for(staged: str) -> None:
    done = run(TRY_EACH, None, staged, stdin="\n".join(IMPOSSIBLE))
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" | ", 1) for line in done.stdout.splitlines() if " | " in line)
    assert said.keys() == IMPOSSIBLE.keys()
    for item, message in IMPOSSIBLE.items():
        assert message in said[item]
    assert done.stdout.splitlines()[-1] == "{}"


CHILDREN = """
import multiprocessing
def child(queue):
    from vllm.plugins import load_general_plugins; load_general_plugins()
    from xpufp8.runtime import plugin, tables; from vllm.platforms import current_platform
    row = [k.__name__ for k in tables.find("fp8_block").rows[current_platform._enum]]
    queue.put((sorted(plugin.applied()), row.count("Xpufp8BlockLinearKernel")))
if __name__ == "__main__":
    from vllm.plugins import load_general_plugins; load_general_plugins()
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method); queue = context.Queue()
        process = context.Process(target=child, args=(queue,)); process.start()
        print(method, queue.get(timeout=180)); process.join()
"""


@pytest.mark.sim
def test_children_have_the_repair_whatever_starts_them(staged: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(CHILDREN)
    call = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, {str(program)!r}]))"
    done = run(call, "kernel:fp8_block", staged)
    assert done.returncode == 0, done.stderr
    for method in ("fork", "spawn"):
        assert f"{method} (['kernel:fp8_block'], 1)" in done.stdout
