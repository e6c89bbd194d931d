"""Tables as vLLM has written them, and as it may write them: rows in order, and conditions kept apart."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from probes.kernel_table_rows import Table, guarded_platform, read_tables
from probes.vllm_source import Module

IMPORT = "from vllm.platforms import PlatformEnum, current_platform\n"


def tables(source: str) -> list[Table]:
    text = IMPORT + dedent(source)
    return read_tables(Module("vllm.m", "vllm/m.py", ast.parse(text)))


def rows(source: str) -> dict[str, list[str]]:
    """Unconditional rows of the only table."""
    (table,) = tables(source)
    return {p: [k.name for k in ks if not k.condition] for p, ks in table.rows.items() if p in table.certain}


def conditional(source: str) -> list[tuple[str, str, str]]:
    """(platform, kernel, condition) of everything that depends on a condition in the only table."""
    (table,) = tables(source)
    return [(p, k.name, k.condition) for p, ks in table.rows.items() for k in ks if k.condition]


@pytest.mark.parametrize(
    "source",
    [
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [A, B], PlatformEnum.CPU: []}",
        "_POSSIBLE_FP8_KERNELS: dict[PlatformEnum, list[type[K]]] = {PlatformEnum.XPU: [A, B], PlatformEnum.CPU: []}",
        "_POSSIBLE_FP8_KERNELS = dict({PlatformEnum.XPU: (A, B), PlatformEnum.CPU: list()})",
        "_POSSIBLE_FP8_KERNELS = defaultdict(list, {PlatformEnum.XPU: [A] + [B], PlatformEnum.CPU: []})",
        "_NATIVE = [A]\n_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: _NATIVE + [B], PlatformEnum.CPU: []}",
        "_NATIVE = [A]\n_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [*_NATIVE, B], PlatformEnum.CPU: []}",
        "_NATIVE = [A]\n_NATIVE.append(B)\n_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: list(_NATIVE), PlatformEnum.CPU: []}",
        "_NATIVE = [A]\n_NATIVE += [B]\n_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: _NATIVE.copy(), PlatformEnum.CPU: []}",
        "_POSSIBLE_FP8_KERNELS = {}\n_POSSIBLE_FP8_KERNELS[PlatformEnum.XPU] = [A, B]\n_POSSIBLE_FP8_KERNELS[PlatformEnum.CPU] = []",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: []}\n_POSSIBLE_FP8_KERNELS.update({PlatformEnum.XPU: [A, B]})",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: []}\n_POSSIBLE_FP8_KERNELS |= {PlatformEnum.XPU: [A, B]}",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: []} | {PlatformEnum.XPU: [A, B]}",
        "_BASE = {PlatformEnum.CPU: [], PlatformEnum.XPU: [C]}\n_POSSIBLE_FP8_KERNELS = {**_BASE, PlatformEnum.XPU: [A, B]}",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: [], PlatformEnum.XPU: [A]}\n_POSSIBLE_FP8_KERNELS[PlatformEnum.XPU].append(B)",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: [], PlatformEnum.XPU: [A]}\n_POSSIBLE_FP8_KERNELS[PlatformEnum.XPU].extend([B])",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: [], PlatformEnum.XPU: [B]}\n_POSSIBLE_FP8_KERNELS[PlatformEnum.XPU].insert(0, A)",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: [], PlatformEnum.XPU: [A]}\n_POSSIBLE_FP8_KERNELS[PlatformEnum.XPU] += [B]",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: []}\n_POSSIBLE_FP8_KERNELS.setdefault(PlatformEnum.XPU, [A]).append(B)",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: [], PlatformEnum.XPU: [A, C, B]}\n_POSSIBLE_FP8_KERNELS[PlatformEnum.XPU].remove(C)",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: [], PlatformEnum.XPU: [A, B], PlatformEnum.TPU: [C]}\n"
        "del _POSSIBLE_FP8_KERNELS[PlatformEnum.TPU]",
        "from vllm.platforms import PlatformEnum as P\n_POSSIBLE_FP8_KERNELS = {P.XPU: [A, B], P.CPU: []}",
        "P = PlatformEnum\n_POSSIBLE_FP8_KERNELS = {P.XPU: [A, B], P.CPU: []}",
        "XPU = PlatformEnum.XPU\n_POSSIBLE_FP8_KERNELS = {XPU: [A, B], PlatformEnum.CPU: []}",
        "import vllm.platforms as platforms\n_POSSIBLE_FP8_KERNELS = {platforms.PlatformEnum.XPU: [A, B], PlatformEnum.CPU: []}",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [kernels.A, kernels.sub.B], PlatformEnum.CPU: []}",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: ['vllm.kernels.A', 'vllm.kernels:B'], PlatformEnum.CPU: []}",
        "if TYPE_CHECKING:\n    from x import A\n_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [A, B], PlatformEnum.CPU: []}",
        "_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [Z]}\n_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [A, B], PlatformEnum.CPU: []}",
    ],
)  # fmt: skip
def test_every_way_to_write_a_table_gives_the_same_rows(source: str) -> None:
    assert rows(source) == {"XPU": ["A", "B"], "CPU": []}


def test_rows_of_one_expression_may_share_a_comprehension() -> None:
    source = "_POSSIBLE_FP8_KERNELS = {p: [A, B] for p in (PlatformEnum.XPU, PlatformEnum.ROCM)}"
    assert rows(source) == {"XPU": ["A", "B"], "ROCM": ["A", "B"]}


@pytest.mark.parametrize("grow", ["_POSSIBLE_KERNELS.append(C)", "_POSSIBLE_KERNELS += [C]", "_POSSIBLE_KERNELS.extend((C,))"])
def test_a_plain_list_is_one_row_for_every_platform(grow: str) -> None:
    source = f"_POSSIBLE_KERNELS: list[type[MPLinearKernel]] = [A, B]\n{grow}"
    (table,) = tables(source)
    assert not table.by_platform
    assert rows(source) == {"*": ["A", "B", "C"]}


@pytest.mark.parametrize(
    "grow",
    [
        "_POSSIBLE_FP8_KERNELS[PlatformEnum.XPU] = [A]",
        "_POSSIBLE_FP8_KERNELS.update({PlatformEnum.XPU: [A]})",
        "_POSSIBLE_FP8_KERNELS.setdefault(PlatformEnum.XPU, []).append(A)",
    ],
)
def test_a_row_added_under_a_condition_is_not_certain(grow: str) -> None:
    source = f"_POSSIBLE_FP8_KERNELS = {{PlatformEnum.CPU: [C]}}\nif has_xpu_kernels():\n    {grow}\n"
    assert rows(source) == {"CPU": ["C"]}
    assert conditional(source) == [("XPU", "A", "has_xpu_kernels()")]


def test_kernels_added_to_a_certain_row_under_a_condition_stand_apart() -> None:
    source = """
        _POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [A]}
        if envs.FAST:
            _POSSIBLE_FP8_KERNELS[PlatformEnum.XPU].insert(0, B)
        else:
            _POSSIBLE_FP8_KERNELS[PlatformEnum.XPU].append(C)
    """
    assert rows(source) == {"XPU": ["A"]}
    assert conditional(source) == [("XPU", "B", "envs.FAST"), ("XPU", "C", "not (envs.FAST)")]


def test_nested_conditions_and_imports_that_may_fail_are_told() -> None:
    source = """
        _POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: [C]}
        try:
            from elsewhere import A
            _POSSIBLE_FP8_KERNELS[PlatformEnum.XPU] = [A]
        except ImportError:
            if fallback:
                _POSSIBLE_FP8_KERNELS[PlatformEnum.XPU] = [B]
    """
    assert rows(source) == {"CPU": ["C"]}
    (first, second) = conditional(source)
    assert first[:2] == ("XPU", "A")
    assert "from elsewhere import A" in first[2]
    assert second == ("XPU", "B", "from elsewhere import A raises and fallback")


def test_a_condition_that_only_asks_for_the_row_s_own_platform_always_holds_there() -> None:
    source = """
        _POSSIBLE_FP8_KERNELS = {PlatformEnum.CPU: [C]}
        if current_platform.is_xpu():
            _POSSIBLE_FP8_KERNELS[PlatformEnum.XPU] = [A, B]
    """
    assert rows(source) == {"CPU": ["C"], "XPU": ["A", "B"]}


def test_conditional_expressions_inside_a_row() -> None:
    source = "_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [A] + ([B] if fast else [C]), PlatformEnum.CPU: [D if fast else E]}"
    assert rows(source) == {"XPU": ["A"], "CPU": []}
    assert conditional(source) == [
        ("XPU", "B", "fast"), ("XPU", "C", "not (fast)"), ("CPU", "D", "fast"), ("CPU", "E", "not (fast)"),
    ]  # fmt: skip


def test_what_cannot_be_read_is_said_and_not_guessed() -> None:
    source = "_POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: _discover(), PlatformEnum.CPU: [C]}"
    assert rows(source) == {"XPU": [], "CPU": ["C"]}
    ((platform, kernel, why),) = conditional(source)
    assert (platform, kernel) == ("XPU", "<_discover()>")
    assert "computed" in why


def test_a_table_that_is_wholly_computed_is_still_a_table() -> None:
    (table,) = tables("_POSSIBLE_FP8_KERNELS = build_table()")
    assert [k.name for k in table.rows["*"]] == ["<build_table()>"]


@pytest.mark.parametrize(
    "source",
    [
        "BACKENDS = {PlatformEnum.XPU: [FlashAttentionBackend]}",
        "NAMES = {'cutlass': {CutlassLinearKernel}}",
        "_POSSIBLE = [A]",
        "def f():\n    _POSSIBLE_FP8_KERNELS = {PlatformEnum.XPU: [A]}",
        "_LINEAR_BACKEND_KERNEL_MAP: dict[str, set[type]] = {'torch': {A}}",
    ],
)
def test_other_things_are_not_tables(source: str) -> None:
    assert tables(source) == []


def test_a_dict_by_platform_under_another_name_counts_if_kernels_stand_in_it() -> None:
    (table,) = tables("FP8_BY_PLATFORM = {PlatformEnum.XPU: [XPUFp8LinearKernel]}")
    assert table.name == "FP8_BY_PLATFORM"


def test_the_line_is_that_of_the_definition_even_if_rows_come_later() -> None:
    (table,) = tables("\n\n_POSSIBLE_FP8_KERNELS = {}\n_POSSIBLE_FP8_KERNELS[PlatformEnum.XPU] = [A]\n")
    assert table.line == 4  # the import line stands before


@pytest.mark.parametrize(
    ("condition", "platform"),
    [
        ("current_platform.is_xpu()", "XPU"),
        ("platforms.current_platform.is_rocm()", "ROCM"),
        ("current_platform.is_out_of_tree()", "OOT"),
        ("not (current_platform.is_xpu())", None),
        ("current_platform.is_xpu() and fast", None),
        ("is_cuda_alike()", None),
        ("", None),
    ],
)
def test_platform_guards(condition: str, platform: str | None) -> None:
    assert guarded_platform(condition) == platform
