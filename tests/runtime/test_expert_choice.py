"""Which way computes an FP8 expert layer: checked against float64, timed, kept, and held to the memory that there is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.sim
torch = pytest.importorskip("torch")

from expert_layers import FP8, HIDDEN, PLAIN, afresh, native_kernel, whole  # noqa: E402

from xpufp8.runtime import choice, expert_choice, experts, memory  # noqa: E402
from xpufp8.runtime.catalogue import RepairError  # noqa: E402


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with afresh(monkeypatch, tmp_path):
        yield


@pytest.fixture
def native() -> Iterator[Any]:
    with native_kernel() as candidate:
        yield candidate


@pytest.mark.parametrize("weight_dtype", FP8)
@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
def test_right_candidates_pass_the_check(layout: str, weight_dtype: Any) -> None:
    problem, call = whole(layout, weight_dtype)
    made = expert_choice.choose(problem, call)
    tried = {trial.candidate: trial for trial in made.trials}
    assert [*tried] == [candidate.name for candidate in experts.candidates()]
    for candidate in PLAIN:
        trial = tried[candidate.name]
        assert trial.refused is None, trial
        assert trial.error is not None
        assert trial.error < choice.ROUNDING_LIMIT / 2
        assert set(trial.seconds) == {str(tokens) for tokens in choice.TOKENS}
    assert made.candidate in {candidate.name for candidate in PLAIN}


def sabotaged(change: Any) -> experts.ExpertCandidate:
    """Per-call dequantization with its scales changed: what a misread scale looks like."""

    def prepare(problem: Any, weights: Any, scales: Any) -> Any:
        return experts.PER_CALL.prepare(problem, weights, change(scales))

    return experts.ExpertCandidate("liar", lambda problem, device: None, prepare)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: (s[0] * 2, s[1]),
        lambda s: (s[0], s[1] * 1.05),
        lambda s: (s[0].flip(1), s[1]),
        lambda s: (s[0], s[1].flip(0)),
        lambda s: (s[0].roll(1, 0), s[1]),
        lambda s: (torch.ones_like(s[0]), s[1]),
    ],
    ids=["doubled", "5 % off", "gate for up", "experts reversed", "experts shifted", "ignored"],
)
def test_misread_scale_is_refused(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    monkeypatch.setattr(experts, "candidates", lambda: [sabotaged(change), experts.PER_CALL])
    made = expert_choice.choose(*whole())
    assert made.candidate == "dequantize-per-call"
    assert "wrong" in (made.trials[0].refused or "")


def test_native_kernel_is_chosen_where_right_and_refused_where_wrong(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "candidates", lambda: [native, *PLAIN])
    monkeypatch.setattr(choice, "_score", lambda trial: 0 if trial.candidate == native.name else 1)
    problem, call = whole("tensor")
    made, prepared = expert_choice.prepare(problem, call)
    assert made.candidate == "native-grouped"
    assert prepared.weights[0].transpose(1, 2).is_contiguous()
    assert torch.equal(prepared.weights[0].float(), call.weights[0].float())
    monkeypatch.setattr(choice, "_memo", {})
    choice.cache_file(call.weights[0].device).unlink()
    honest = experts.native_forward
    wrong = replace(native, prepare=lambda p, w, s: replace(native.prepare(p, w, s), forward=lambda x, c: honest(x, c) * 1.1))
    monkeypatch.setattr(experts, "candidates", lambda: [wrong, *PLAIN])
    made = expert_choice.choose(problem, call)
    assert made.candidate != "native-grouped"
    assert "wrong" in (made.trials[0].refused or "")


def test_choice_is_kept_for_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, call = whole()
    first = expert_choice.choose(problem, call)
    kept = json.loads(choice.cache_file(call.weights[0].device).read_text())
    assert kept[problem.key()]["candidate"] == first.candidate
    monkeypatch.setattr(choice, "_memo", {})
    monkeypatch.setattr(expert_choice, "_try", None)  # would raise
    assert expert_choice.choose(problem, call) == first
    other, call = whole(hidden=HIDDEN + 64)
    with pytest.raises(TypeError):
        expert_choice.choose(other, call)


def test_widening_stays_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, call = whole()
    monkeypatch.setattr(choice, "_score", lambda trial: 0 if trial.candidate == "dequantize-at-load" else 1)
    monkeypatch.setenv(memory.BUDGET_VARIABLE, str(2 * problem.numel + 1))
    taken = [expert_choice.prepare(problem, call)[0].candidate for _ in range(3)]
    assert taken == ["dequantize-at-load", "dequantize-at-load", "dequantize-per-call"]
    memory.reset()
    assert expert_choice.choose(problem, call, may_widen=False).candidate == "dequantize-per-call"


def test_forced_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, wanted in (("dequantize-at-load", "dequantize-at-load"), ("dequantize-per-call", "dequantize-per-call")):
        monkeypatch.setenv(choice.FORCE_VARIABLE, name)
        assert expert_choice.choose(*whole()).candidate == wanted
    # A candidate for linear layers says nothing of experts.
    monkeypatch.setenv(choice.FORCE_VARIABLE, "torch-scaled-mm")
    assert expert_choice.choose(*whole()).trials
    monkeypatch.setenv(choice.FORCE_VARIABLE, "nonsense")
    with pytest.raises(RepairError, match=r"nonsense.*triton-experts"):
        expert_choice.choose(*whole())


def test_float16_overflow_is_refused_and_not_served() -> None:
    problem, call = whole(dtype=torch.float16)
    with pytest.raises(RepairError, match="agrees with float64"):
        expert_choice.choose(problem, replace(call, scales=(call.scales[0] * 2**14, call.scales[1])))


def test_weights_of_nan_choose_still() -> None:
    problem, call = whole()
    call.weights[0].view(torch.uint8)[:] = 0x7F
    assert expert_choice.choose(problem, call).candidate


def test_fake_weights_choose_without_measuring() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    problem, call = whole()
    with FakeTensorMode() as mode:
        pretend = replace(
            call, weights=tuple(map(mode.from_tensor, call.weights)), scales=tuple(map(mode.from_tensor, call.scales))
        )
        made, _ = expert_choice.prepare(problem, pretend)
    assert (made.candidate, made.trials) == ("dequantize-per-call", [])


def test_default_device_of_vllm_does_not_matter() -> None:
    """vLLM loads models with its device as torch's default; ``meta`` stands for one on which numbers cannot be drawn here."""
    problem, call = whole()
    with torch.device("meta"):
        made, prepared = expert_choice.prepare(problem, call)
    assert all(trial.refused is None for trial in made.trials[2:])
    assert not math.isnan(made.trials[2].error or math.nan)
    assert prepared.weights[0].device.type == "cpu"
