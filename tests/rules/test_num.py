"""The NUM rules on facts: one finding a kernel, and which cause wins."""

from __future__ import annotations

from typing import Any

import pytest
from device_cases import RUN, findings

from probes.device_facts import ConfusionFact, NumericsCaseFact, NumericsFacts
from probes.facts import ErrorFact, Observation

SCALE = ConfusionFact("scale", "block scales transposed", 0.001)
FORMAT = ConfusionFact("format", "weights read as e5m2 instead of e4m3fn", 0.002)
BIAS = ConfusionFact("bias", "the bias left out", 0.001)


def case(m: int, seen: Observation = "fail", operands: str = "ordinary", **more: Any) -> NumericsCaseFact:
    values = {"error": 1.0 if seen == "fail" else 0.001, "limit": 0.0156, "wrong_columns": 512 if seen == "fail" else 0}
    return NumericsCaseFact("fp8-block", "K", "down_proj", "bfloat16", [m, 512, 384], operands, seen, **{**values, **more})


def judge(*cases: NumericsCaseFact) -> list[tuple[str, str]]:
    found = findings("numerics", NumericsFacts(RUN, "bfloat16", cases=list(cases)))
    assert all(f.fixes[0].action == "VLLM_DISABLED_KERNELS=K" and f.subject == "fp8-block/K" for f in found)
    return [(f.code, f.cause) for f in found]


@pytest.mark.parametrize(
    ("cases", "code", "says"),
    [
        ((case(1), case(16)), "NUM001", "no known confusion"),
        ((case(1, confusions=[SCALE]), case(16, confusions=[SCALE, FORMAT])), "NUM002", "block scales transposed"),
        ((case(1, confusions=[FORMAT]), case(16, confusions=[FORMAT])), "NUM003", "e5m2"),
        ((case(1, "pass"), case(17, operands="edges", nonfinite=9, nonfinite_at=["columns 1, 2"])), "NUM004", "columns 1, 2"),
        ((case(1, wrong_columns=1, worst_column=77), case(16, wrong_columns=1, worst_column=77)), "NUM005", "worst: 77"),
        ((case(1, "pass"), case(16, "pass"), case(257, confusions=[SCALE])), "NUM006", "wrong at M=257 and right at M=1, M=16"),
        ((case(1, "pass"), case(16, raised=ErrorFact("E", "boom"))), "NUM007", "raises in 1 of 2 calls: E: boom"),
        ((case(1, "pass"), case(17, operands="bias", confusions=[BIAS])), "NUM001", "the bias left out"),
    ],
)
def test_the_most_telling_cause_is_the_one_finding(cases: tuple[NumericsCaseFact, ...], code: str, says: str) -> None:
    ((found, cause),) = judge(*cases)
    assert found == code
    assert says in cause


def test_what_agrees_has_no_finding() -> None:
    assert judge(case(1, "pass"), case(257, "pass")) == []


def test_two_schemes_of_which_the_model_has_one() -> None:
    facts = NumericsFacts(RUN, "bfloat16", cases=[case(1)])
    assert findings("numerics", facts, scheme="fp8-channel-token") == []
