"""What a trial launch is judged by, and what it changes of the command."""

from __future__ import annotations

import math
from typing import Any

import pytest

from xpufp8.command import Items
from xpufp8.launch import compare_args, judge_completion, non_default_args, trial_argv
from xpufp8.report import Finding, Fix
from xpufp8.validate import next_fix, with_fix


def answer(tokens: list[str], chosen: list[Any], top: list[dict[str, float]]) -> dict[str, Any]:
    return {"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top}}]}


STEP = {"token_id:7": -1.2, "token_id:9": -2.0}


def test_a_sound_completion_is_taken() -> None:
    assert judge_completion(answer(["token_id:7", "token_id:7"], [-1.2, -1.0], [STEP, STEP])) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "no tokens with log-probabilities"),
        ({"choices": []}, "no tokens with log-probabilities"),
        ({"choices": [{"logprobs": None}]}, "no tokens with log-probabilities"),
        (answer([], [], []), "no token"),
        (answer(["token_id:7"], [None], [STEP]), "not finite"),
        (answer(["token_id:7"], [math.nan], [STEP]), "not finite"),
        (answer(["token_id:7"], [-math.inf], [STEP]), "not finite"),
        (answer(["token_id:7"], [3.0], [STEP]), "not finite"),
        (answer(["token_id:0"] * 4, [-1.0] * 4, [STEP] * 4), "token 0"),
        (answer(["!"] * 4, [-1.0] * 4, [STEP] * 4), "token 0"),
        (answer(["token_id:7"] * 2, [-5.5] * 2, [{"a": -5.5, "b": -5.5}] * 2), "flat"),
    ],
)
def test_a_broken_completion_is_named(given: dict[str, Any], says: str) -> None:
    assert says in (judge_completion(given) or "")


def test_the_trial_replaces_address_and_weights_and_nothing_else() -> None:
    typed = [
        "M",
        "--port",
        "80",
        "-tp=2",
        "--host=0.0.0.0",
        "--api-key",
        "k",
        "--load-format",
        "auto",
        "--served-model-name",
        "a",
        "b",
    ]
    argv = trial_argv(["vllm", "serve", *typed], 4321)
    kept = ["M", "-tp=2", "--api-key", "k", "--served-model-name", "a", "b"]
    assert argv == ["vllm", "serve", *kept, "--load-format", "dummy", "--host", "127.0.0.1", "--port", "4321"]


def test_vllms_own_line_is_read_and_compared() -> None:
    line = "(APIServer pid=1) INFO 11-30 [api_utils.py:1] non-default args: {'model_tag': 'M', 'max_model_len': 4096, 'dtype': 'float16'}"
    logged = non_default_args(f"x\n{line}\ny\n")
    assert logged == {"model_tag": "M", "max_model_len": 4096, "dtype": "float16"}
    assert compare_args(["M", "--max_model_len=4096", "--dtype", "float16"], logged) == []
    assert compare_args(["M", "--dtype", "bfloat16"], logged) == ["--dtype: asked bfloat16, vLLM runs with float16"]
    assert non_default_args("non-default args: {'a': __import__('os')}") is None
    assert non_default_args("nothing of the kind") is None


def test_the_next_plan_is_a_fix_that_was_not_tried() -> None:
    eager, env = Fix(kind="flag", action="--enforce-eager"), Fix(kind="env", action="A=1")
    cause = Finding(
        code="CMP901", severity="error", status="fail", title="t", cause="c", fixes=[Fix(kind="host", action="x"), eager, env]
    )
    first = next_fix(Items(), [cause])
    assert first is not None
    assert first[0] == eager
    second = next_fix(with_fix(Items(), eager), [cause])
    assert second is not None
    assert second[0] == env
    assert next_fix(with_fix(with_fix(Items(), eager), env), [cause]) is None
