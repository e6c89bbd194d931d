"""How a chooser reads its table decides how a missing row strikes: the read is found, and the line that does it."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from probes.kernel_table_lookup import Lookup, find_lookup
from probes.kernel_table_rows import read_tables
from probes.vllm_source import Module, SourceTree

TABLE = "_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [A]}\n"


def lookup(source: str, root: Path = Path("/nowhere/vllm")) -> Lookup | None:
    module = Module("vllm.m", "vllm/m.py", ast.parse(TABLE + dedent(source)))
    (table,) = read_tables(module)
    return find_lookup(table, [module], SourceTree(root))


def line_of(source: str, text: str) -> int:
    """Line of a text in the module that ``lookup`` builds."""
    return next(n for n, line in enumerate((TABLE + dedent(source)).splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("for kernel in _POSSIBLE_FP8_KERNELS[current_platform._enum]:", "index"),
        ("for kernel in _POSSIBLE_FP8_KERNELS.get(current_platform._enum, []):", "get"),
        ("for kernel in list(_POSSIBLE_FP8_KERNELS.get(platform, [])):", "get"),
        ("for kernel in _POSSIBLE_FP8_KERNELS:", "iterate"),
        ("for kernel in list(_POSSIBLE_FP8_KERNELS) + extra:", "iterate"),
        ("possible = _POSSIBLE_FP8_KERNELS\n    for kernel in possible[platform]:", "index"),
        ("copied = list(_POSSIBLE_FP8_KERNELS)\n    for kernel in copied:", "iterate"),
        ("row = _POSSIBLE_FP8_KERNELS[platform]\n    for kernel in row:", "index"),
        ("kernels = [k for k in _POSSIBLE_FP8_KERNELS[platform]]\n    for kernel in kernels:", "index"),
    ],
)  # fmt: skip
def test_the_read_in_the_chooser_itself(body: str, how: str) -> None:
    source = f"def choose_kernel(config):\n    {body}\n        return kernel\n"
    found = lookup(source)
    assert found is not None
    line = 4 if body.startswith(("possible =", "copied =")) else 3
    assert (found.how, found.line, found.file) == (how, line, "vllm/m.py")


@pytest.mark.parametrize(
    "body",
    [
        """
        if platform not in _POSSIBLE_FP8_KERNELS:
            raise ValueError("none")
        return _POSSIBLE_FP8_KERNELS[platform][0]
        """,
        """
        try:
            return _POSSIBLE_FP8_KERNELS[platform][0]
        except KeyError:
            raise ValueError("none") from None
        """,
    ],
)
def test_an_index_that_is_guarded_does_not_end_in_a_key_error(body: str) -> None:
    source = "def choose_kernel(platform):\n" + "\n".join("    " + line for line in dedent(body).splitlines())
    found = lookup(source)
    assert found is not None
    assert found.how == "get"


@pytest.mark.parametrize(
    "call", ["choose(config, _POSSIBLE_FP8_KERNELS)", "choose(config=config, possible_kernels=_POSSIBLE_FP8_KERNELS)"]
)
@pytest.mark.parametrize(
    ("read", "how"), [("possible_kernels[platform]", "index"), ("possible_kernels.get(platform, [])", "get")]
)
def test_a_table_that_is_handed_on_is_followed_to_the_line_that_reads_it(call: str, read: str, how: str) -> None:
    source = f"""
        def choose(config, possible_kernels, force=None):
            for kernel in {read}:
                return kernel

        def init_fp8_linear_kernel(config):
            return {call}
    """
    found = lookup(source)
    assert found is not None
    assert (found.how, found.line) == (how, line_of(source, "for kernel"))


def test_a_method_takes_itself_first() -> None:
    source = """
        class Chooser:
            def pick(self, table, platform):
                return table[platform]

        def choose_kernel(chooser):
            return chooser.pick(_POSSIBLE_FP8_KERNELS, XPU)
    """
    found = lookup(source)
    assert found is not None
    assert (found.how, found.line) == ("index", line_of(source, "return table"))


def test_registering_a_kernel_is_no_read() -> None:
    source = """
        def register_linear_kernel(kernel, platform):
            if platform not in _POSSIBLE_FP8_KERNELS:
                _POSSIBLE_FP8_KERNELS[platform] = []
            _POSSIBLE_FP8_KERNELS[platform].append(kernel)
    """
    assert lookup(source) is None


def test_the_chooser_counts_before_helpers_and_an_index_before_get() -> None:
    source = """
        def print_kernels():
            for kernel in _POSSIBLE_FP8_KERNELS:
                print(kernel)

        def choose_safely(platform):
            return _POSSIBLE_FP8_KERNELS.get(platform)

        def choose_kernel(platform):
            return _POSSIBLE_FP8_KERNELS[platform]
    """
    found = lookup(source)
    assert found is not None
    assert (found.how, found.chooser) == ("index", "choose_kernel")


def test_functions_that_call_each_other_do_not_loop() -> None:
    source = """
        def choose_a(table, platform):
            return choose_b(table, platform)

        def choose_b(table, platform):
            return choose_a(table, platform)

        def choose_kernel(platform):
            return choose_a(_POSSIBLE_FP8_KERNELS, platform)
    """
    assert lookup(source) is None


def test_a_chooser_in_another_file_is_followed_through_imports(tmp_path: Path) -> None:
    root = tmp_path / "vllm"
    folder = root / "model_executor" / "kernels" / "linear"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(TABLE)
    (folder / "common.py").write_text("def pick(config, table):\n    return table[config.platform]\n")
    (folder / "choose.py").write_text(
        "from . import _POSSIBLE_FP8_KERNELS as TABLE\nfrom .common import pick as pick_one\n\n\n"
        "def init_fp8_linear_kernel(config):\n    return pick_one(config, TABLE)\n"
    )
    tree = SourceTree(root)
    modules = list(tree.containing("model_executor", (b"POSSIBLE_",)))
    (table,) = [table for module in modules for table in read_tables(module)]
    found = find_lookup(table, modules, tree)
    assert found == Lookup("index", "vllm/model_executor/kernels/linear/common.py", 2, "init_fp8_linear_kernel")
