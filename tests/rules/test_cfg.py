"""CFG001: an option that vLLM does not know is put right, left out or left to its owner, never dropped on a guess."""

from __future__ import annotations

import shlex

import pytest

from probes.vllm_options_facts import VllmOptionsFacts
from xpufp8.command import vllm_args
from xpufp8.options import split_model
from xpufp8.report import Finding
from xpufp8.rules import cfg
from xpufp8.rules.base import Case

KNOWN = ["--quantization", "--max-model-len", "--enforce-eager", "--tensor-parallel-size", "--kv-cache-dtype", "--max-num-seqs"]


def judge(command: str) -> tuple[list[str], list[Finding]]:
    """The tokens of a command, and what CFG001 says of them under a parser that knows the options above."""
    _, tokens = split_model(["model", *shlex.split(command)])
    unknown = [t for t in tokens if t.startswith("--") and t.split("=")[0] not in KNOWN]
    case = Case("cpu", tuple(tokens), facts={"vllm_options": VllmOptionsFacts("0.32.0", KNOWN, unknown)})
    return tokens, list(cfg.unknown_option.check(cfg.unknown_option, case))


@pytest.mark.parametrize(
    ("typed", "planned"),
    [
        ("--quantisation fp8", "--quantization fp8"),
        ("--quantisation=fp8", "--quantization=fp8"),
        ("--max-modle-len 4096 --max-num-seqs 4", "--max-num-seqs 4 --max-model-len 4096"),
        ("--enforce-eagr", "--enforce-eager"),
        ("--kv-cache-dtyp 'fp8 e5m2'", "--kv-cache-dtype 'fp8 e5m2'"),
    ],
)
def test_a_misspelt_option_is_put_right_with_its_value(typed: str, planned: str) -> None:
    tokens, [finding] = judge(typed)
    assert [fix.kind for fix in finding.fixes] == ["flag"]
    assert vllm_args(tokens, [finding.fixes[0].action]) == shlex.split(planned)


@pytest.mark.parametrize("typed", ["--sparkle 3", "--speed", "--max-seqs 4", "--quant fp8"])
def test_an_option_that_may_mean_anything_is_left_to_its_owner(typed: str) -> None:
    _, [finding] = judge(typed)
    assert [fix.kind for fix in finding.fixes] == ["host"], "no plan may leave it out"
    assert (finding.severity, finding.status) == ("error", "fail")


def test_an_option_that_the_release_does_without_is_left_out() -> None:
    tokens, [finding] = judge("--disable-log-requests --quantization fp8")
    assert "dropped it" in finding.cause
    assert vllm_args(tokens, [fix.action for fix in finding.fixes if fix.kind == "flag"]) == ["--quantization", "fp8"]


def test_an_option_that_another_one_replaces_is_not_left_out() -> None:
    replaced = [name for name, known in cfg.renamed().items() if known["use"]]
    assert replaced
    for name in replaced:
        _, [finding] = judge(f"{name} 1")
        assert [fix.kind for fix in finding.fixes] == ["host"], name
        assert str(cfg.renamed()[name]["use"]) in finding.fixes[0].action
