"""What a trial launch is judged by, and what it changes of the command."""

from __future__ import annotations

import math
from typing import Any

import pytest

from xpufp8.command import Items
from xpufp8.doctor import Request, judge
from xpufp8.launch import compare_args, judge_completion, non_default_args, trial_argv
from xpufp8.model import from_config
from xpufp8.report import Finding, Fix
from xpufp8.rules.launched import Attempt, LaunchFacts
from xpufp8.target import Target
from xpufp8.validate import Search


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


def cause(code: str, *fixes: Fix) -> Finding:
    return Finding(code=code, severity="error", status="fail", title=code, cause="c", fixes=list(fixes))


def search(*, config: dict[str, Any] | None = None, **request: bool) -> Search:
    model = from_config("m", "m", config, ()) if config is not None else None
    return Search(Target("python", "cpu", model=model), Request(**request), Items(runtime=("kernel:fp8_block",)))


EAGER, ENV = Fix(kind="flag", action="--enforce-eager"), Fix(kind="env", action="A=1")
FAKE, HOST = Fix(kind="runtime", action="fake:all"), Fix(kind="host", action="buy a card")


def test_a_cause_that_is_there_again_takes_its_next_fix() -> None:
    one, bad = search(), cause("CMP901", HOST, EAGER, ENV)
    assert one.step([bad])
    assert one.items == Items(("kernel:fp8_block",), (), ("--enforce-eager",)), "what the probes have proven stays"
    assert one.step([bad])
    assert one.items == Items(("kernel:fp8_block",), ("A=1",)), "what did not help is no longer in the plan"
    assert not one.step([bad])


def test_a_new_cause_gets_its_fix_beside_the_one_that_helped() -> None:
    one = search()
    assert one.step([cause("CMP901", EAGER)])
    assert one.step([cause("MEM001", ENV)])
    assert one.items == Items(("kernel:fp8_block",), ("A=1",), ("--enforce-eager",))
    assert [(r.item, r.codes) for r in one.reasons()] == [("--enforce-eager", ["CMP901"]), ("A=1", ["MEM001"])]
    assert [[(f.action, f.verified) for f in c.fixes] for c in one.causes()] == [[("--enforce-eager", True)], [("A=1", True)]]


@pytest.mark.parametrize("after", [[], [cause("ENV999", HOST)]])
def test_a_fix_that_brings_another_failure_gives_way(after: list[Finding]) -> None:
    one = search()
    assert one.step([cause("CMP901", EAGER, ENV)])
    assert one.step(after)
    assert one.items == Items(("kernel:fp8_block",), ("A=1",))
    assert {c.code for c in one.causes()} == {"CMP901"}, "what only the abandoned fix brought is no cause of this plan's"


def test_a_failure_without_a_known_cause_leaves_nothing_to_try() -> None:
    assert not search().step([])
    assert not search().step([cause("X", HOST)])


@pytest.mark.parametrize(
    "fix",
    [
        Fix(kind="runtime", action="kernel:fp8_block"),
        Fix(kind="env", action="ONEDNN_VERBOSE=all"),
        Fix(kind="flag", action="--port 8001"),
        Fix(kind="flag", action="--trust-remote-code"),
        Fix(kind="flag", action="--quantization fp8", cost="with the 16-bit checkpoint"),
    ],
)
def test_what_cures_no_launch_or_is_not_ours_to_add_is_not_tried(fix: Fix) -> None:
    quantized = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert not search(config=quantized).step([cause("X", fix)])


def test_repairs_are_not_tried_where_they_are_switched_off() -> None:
    one = search(runtime_fixes=False)
    assert one.step([cause("OPS001", FAKE, EAGER)])
    assert one.items.flags == ("--enforce-eager",)
    other = search()
    assert other.step([cause("OPS001", FAKE, EAGER)])
    assert other.items.runtime == ("kernel:fp8_block", "fake:all")


def test_a_fix_that_loses_a_function_is_tried_last() -> None:
    one = search()
    assert one.step([cause("P2P907", Fix(kind="flag", action="--tensor-parallel-size 1"), ENV)])
    assert one.items.env == ("A=1",)


@pytest.mark.parametrize("known", [True, False])
def test_launches_that_failed_are_told_with_their_plans_logs_and_causes(known: bool) -> None:
    failed = [
        Attempt([], "the server ended with exit code 1 before it answered", "/tmp/a.log", ["MEM001 No room"]),
        Attempt(
            ["--enforce-eager", "A=1"], "the server did not answer", "/tmp/b.log", ["MEM001 No room"] if known else [], ["boom"]
        ),
    ]
    (told,) = judge(Target("python", "cpu"), {"launch": LaunchFacts(False, failed)}, {}, partial=True)
    assert (told.code, told.severity, told.status) == ("CFG009", "error", "fail")
    assert told.cause.startswith("2 different plans were launched and none served. The server did not answer.")
    assert [e.where for e in told.evidence][:2] == ["/tmp/a.log", "/tmp/b.log"]
    assert told.evidence[0].observed == (
        "plan 1 (nothing added): the server ended with exit code 1 before it answered: MEM001 No room"
    )
    assert told.evidence[1].observed.startswith("plan 2 (--enforce-eager A=1): ")
    assert ("boom" in [e.observed for e in told.evidence]) is not known, (
        "lines of the log stand in for a cause that it does not name"
    )
    assert judge(Target("python", "cpu"), {"launch": LaunchFacts(True, failed)}, {}, partial=True) == []


def test_a_value_that_vllm_changed_is_told() -> None:
    (told,) = judge(
        Target("python", "cpu"),
        {"launch": LaunchFacts(True, log="/tmp/a", differences=["--x: asked 1, vLLM runs with 2"])},
        {},
        partial=True,
    )
    assert (told.code, told.subject) == ("CFG008", "--x")
