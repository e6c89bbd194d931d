"""Kernels with known faults, selected by vLLM's chooser and run in a real child: each fault is named by its code and cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device_children import ask, judge, plugin

from probes.device_facts import NumericsFacts
from probes.numerics import observe
from probes.protocol import Context

EXPECTED = {
    ("none", "fp8-block"): None,
    ("none", "fp8-channel-token"): None,
    ("fp16", "fp8-block"): None,
    ("scale-neighbour", "fp8-block"): ("NUM002", "the block to its left"),
    ("scale-neighbour", "fp8-channel-token"): ("NUM002", "neighbour's scale"),
    ("scale-transposed", "fp8-block"): ("NUM002", "block scales transposed"),
    ("scale-missing", "fp8-channel-token"): ("NUM002", "weight scales left out"),
    ("doubled", "fp8-block"): ("NUM002", "2 times what it should be"),
    ("e5m2", "fp8-block"): ("NUM003", "read as e5m2 instead of e4m3fn"),
    ("e5m2", "fp8-channel-token"): ("NUM003", "read as e5m2 instead of e4m3fn"),
    ("nan-on-zero-block", "fp8-block"): ("NUM004", "a block or a channel of zeros"),
    ("one-column", "fp8-block"): ("NUM005", "1 of 512 columns (worst: 77)"),
    ("one-column", "fp8-channel-token"): ("NUM005", "1 of 512 columns (worst: 77)"),
    ("wrong-at-257", "fp8-block"): ("NUM006", "wrong at M=257 and right at M=1, M=16"),
    ("bias-missing", "fp8-block"): ("NUM001", "the bias left out"),
    ("raises", "fp8-block"): ("NUM007", "c10::Half != c10::BFloat16"),
}
"""(fault, scheme) to the code and a part of the cause. A kernel that returns float16 computes the right numbers: DTY001's matter."""


DISABLED = "CPUFp8W8A8BlockScaledMMKernel,CPUFp8BlockScaledMMKernel"
"""What vLLM has for processors with AMX."""
BLOCKS = ([64, 128], [128, 64], [32, 32])


def test_simulated_device_is_unknown_without_torch() -> None:
    facts = observe(Context(device="sim:arc-pro-b60"))
    assert (facts.run.mode, facts.cases, facts.run.unknown) == ("simulated", [], ["numerics"])
    assert judge("numerics", facts, "fp8-block", device="sim:arc-pro-b60") == []


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], NumericsFacts]:
    folder = tmp_path_factory.mktemp("faulty")
    asked = [
        ("numerics", fault, {"device": "cpu", "options": {"dtype": "bfloat16", "schemes": [scheme]}})
        for fault, scheme in EXPECTED
    ]
    asked += [
        ("numerics", "none", {"device": "cpu", "options": {"dtype": "bfloat16", "schemes": ["fp8-block"], "block": block}})
        for block in BLOCKS
    ]
    found = ask(folder, asked, path=plugin(folder))
    return {
        (fault, str(context["options"].get("block", context["options"]["schemes"][0]))): facts
        for _, fault, context, facts in found
    }


@pytest.mark.sim
@pytest.mark.parametrize(("fault", "scheme"), EXPECTED)
def test_each_fault_is_named_and_the_right_kernel_is_not(answers: dict[Any, NumericsFacts], fault: str, scheme: str) -> None:
    facts = answers[fault, scheme]
    assert {case.kernel for case in facts.cases} <= {"FaultyBlockKernel", "FaultyScaledKernel"}
    assert {case.shape[0] for case in facts.cases} == {1, 16, 17, 257}
    findings = judge("numerics", facts, scheme)
    expected = EXPECTED[fault, scheme]
    if expected is None:
        assert findings == []
        return
    assert [(f.code, f.severity, f.status) for f in findings] == [(expected[0], "error", "fail")]
    assert expected[1] in findings[0].cause
    assert all(case.kernel in findings[0].cause for case in facts.cases)
    assert [fix.action for fix in findings[0].fixes] == [f"VLLM_DISABLED_KERNELS={facts.cases[0].kernel}"]


@pytest.mark.sim
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_kernel_that_knows_one_block_size_is_named_where_the_checkpoint_has_another(
    answers: dict[Any, NumericsFacts], block: list[int]
) -> None:
    """The same kernel that is right for 128x128 (``none`` above)."""
    (finding,) = judge("numerics", answers["none", str(block)], "fp8-block")
    assert finding.code == "NUM002"
    assert f"blocks of {block[0]}x{block[1]} taken for blocks of 128x128" in finding.cause


REPAIRED_BLOCKS = ([64, 128], [128, 64], [1, 128])


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NumericsFacts]:
    """Every scheme, and models with other block sizes, with the repairs applied: one child."""
    folder = tmp_path_factory.mktemp("repaired")
    asked: list[tuple[str, str, dict[str, Any]]] = [("numerics", "none", {"device": "cpu", "options": {"limit": 2**16}})]
    for block in REPAIRED_BLOCKS:
        model = folder / "x".join(map(str, block))
        model.mkdir()
        sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 384}
        (model / "config.json").write_text(json.dumps({**sizes, "quantization_config": {"weight_block_size": block}}))
        options = {"dtype": "bfloat16", "schemes": ["fp8-block"]}
        asked.append(("numerics", "none", {"device": "cpu", "model": str(model), "options": options}))
    found = ask(folder, asked, XPUFP8_APPLY="kernel:fp8_block,kernel:wfp8a16", VLLM_DISABLED_KERNELS=DISABLED)
    return dict(zip(("every scheme", *map(str, REPAIRED_BLOCKS)), (one[3] for one in found), strict=True))


@pytest.mark.sim
def test_other_block_sizes_are_run_as_the_checkpoint_has_them(repaired: dict[str, NumericsFacts]) -> None:
    """The repair's kernel takes blocks of any size of two dimensions, and says what it does not take."""
    facts = repaired
    for block in ("[64, 128]", "[128, 64]"):
        assert {(c.kernel, c.observation) for c in facts[block].cases} == {("Xpufp8BlockLinearKernel", "pass")}
    refused = facts["[1, 128]"]
    assert refused.cases == []
    assert all("GroupShape(row=1, col=128)" in one.reasons[-1] for one in refused.selected)


@pytest.mark.sim
def test_vllms_own_kernels_and_the_repairs_are_judged_truthfully(repaired: dict[str, NumericsFacts]) -> None:
    facts = repaired["every scheme"]
    by_scheme = {case.scheme: {c.observation for c in facts.cases if c.scheme == case.scheme} for case in facts.cases}
    # vLLM 0.32 selects a kernel for channel scales with a static activation scale that cannot take that scale's shape.
    assert by_scheme.pop("fp8-channel-static") == {"fail"}
    assert set(by_scheme) == {
        "fp8-tensor-static", "fp8-tensor-dynamic", "fp8-tensor-token", "fp8-channel-token", "fp8-block", "fp8-w8a16-tensor",
        "fp8-w8a16-channel",
    }  # fmt: skip
    assert set().union(*by_scheme.values()) == {"pass"}
    assert [f.code for f in judge("numerics", facts, "fp8-channel-static")] == ["NUM007"]
    assert all(judge("numerics", facts, scheme) == [] for scheme in by_scheme)
    assert {"Xpufp8BlockLinearKernel", "Xpufp8W8A16LinearKernel"} <= {case.kernel for case in facts.cases}


@pytest.mark.sim
def test_kernels_that_the_chooser_does_not_select_raise_no_alarm(tmp_path: Path) -> None:
    context = {"device": "cpu", "options": {"dtype": "bfloat16", "schemes": ["fp8-w8a16-channel"]}}
    (answer,) = ask(tmp_path, [("numerics", "none", context)])
    facts: NumericsFacts = answer[3]
    assert [(s.kernel, s.stage) for s in facts.selected] == [(None, "choose")]
    assert facts.cases == []
    assert judge("numerics", facts, "fp8-w8a16-channel") == []
