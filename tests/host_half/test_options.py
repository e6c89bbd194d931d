"""vLLM's command line: tokens pass through unchanged, in any spelling."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpufp8 import options

LINES = [
    # Commands of public reports and READMEs, and every spelling that vLLM's parser takes.
    ("M -tp 2", "M", (2, 1, 1)),
    ("M -tp2 -pp2", "M", (2, 2, 1)),
    ("M --tensor-parallel-size=2", "M", (2, 1, 1)),
    ("M --tensor_parallel_size 4 -dp 2", "M", (4, 1, 2)),
    ("-tp 2 M", "M", (2, 1, 1)),
    ("--enforce-eager M", "M", (1, 1, 1)),
    ("--trust-remote-code --quantization fp8 M", "M", (1, 1, 1)),
    ("--served-model-name a b --port 80 M", "M", (1, 1, 1)),
    ("--model M -pp=2", "M", (1, 2, 1)),
    ("--model=M", "M", (1, 1, 1)),
    ("M -tp 2 -tp 4", "M", (4, 1, 1)),
    ("M -O.mode=3 -O3", "M", (1, 1, 1)),
    ("""M --compilation-config '{"mode": 3, "x": [1]}' -tp 2""", "M", (2, 1, 1)),
    ("M --max-logprobs -1 -tp 2", "M", (2, 1, 1)),
    ("M --lora-modules a=b c=d -tp 2", "M", (2, 1, 1)),
    ("-- M", "M", (1, 1, 1)),
    ("M -tp two", "M", (1, 1, 1)),
    ("--tensor-parallel-size 2", None, (2, 1, 1)),
    ("", None, (1, 1, 1)),
]


@pytest.mark.parametrize(("line", "model", "sizes"), LINES)
def test_model_and_sizes_are_found_in_every_spelling(line: str, model: str | None, sizes: tuple[int, int, int]) -> None:
    tokens = shlex.split(line)
    found, rest = options.split_model(tokens)
    assert found == model
    size = options.parallel_sizes(rest)
    assert (size.tensor, size.pipeline, size.data) == sizes


@given(
    st.lists(
        st.sampled_from(
            ["M", "-tp", "2", "--enforce-eager", "--served-model-name", "a", "-O3", "--x=1", "-tp2", "-1", "-", "", "é"]
        )
    )
)
def test_tokens_survive_parsing_in_order(tokens: list[str]) -> None:
    assert [t for o in options.parse(tokens) for t in o.raw] == tokens


def test_a_flag_can_be_switched_off_again() -> None:
    assert options.flag(["--enforce-eager"], "--enforce-eager")
    assert options.flag(["--enforce_eager"], "--enforce-eager")
    assert not options.flag(["--enforce-eager", "--no-enforce-eager"], "--enforce-eager")
    assert not options.flag([], "--enforce-eager")


def test_the_last_value_counts() -> None:
    assert options.value(["--dtype", "half", "--dtype=bfloat16"], "--dtype") == "bfloat16"
    assert options.value(["-q", "fp8"], "--quantization") == "fp8"
    assert options.value(["--dtype"], "--dtype", "auto") == "auto"


def test_without_drops_every_spelling_and_nothing_else() -> None:
    tokens = ["M", "--tensor-parallel-size", "2", "-tp=4", "--dtype", "half", "-tp2"]
    assert options.without(tokens, ["-tp"]) == ["M", "--dtype", "half"]
