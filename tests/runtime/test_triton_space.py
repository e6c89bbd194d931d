"""What of the Triton kernels needs no kernel: refusals, spaces, the kept answers, sorting by expert."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from xpufp8.runtime import triton_kernels  # noqa: E402 - after the skip
from xpufp8.runtime.problem import Problem  # noqa: E402 - after the skip
from xpufp8.runtime.triton_kernels import experts, linear, space, tuning  # noqa: E402 - after the skip


def problem(**changes: object) -> Problem:
    facts: dict[str, object] = {
        "layout": "block", "activation": "dynamic-group", "n": 256, "k": 256, "dtype": torch.bfloat16,
        "weight_dtype": torch.float8_e4m3fn, "block": (128, 128),
    }  # fmt: skip
    return Problem(**{**facts, **changes})  # type: ignore[arg-type]  # facts of the right types by name


def test_importing_the_package_imports_neither_triton_nor_torch() -> None:
    code = "import sys, xpufp8.runtime.triton_kernels as t; assert not {'torch', 'triton'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert all(candidate.refuses(problem(), "cpu") for candidate in triton_kernels.linear_candidates())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_dtype": torch.int8}, "e4m3fn and e5m2"),
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"block": (128, 96)}, "along K"),
        ({"block": None}, "along K"),
    ],
)
def test_a_layer_that_no_kernel_takes_is_refused_with_its_reason(changes: dict[str, object], said: str) -> None:
    assert said in str(triton_kernels.layer_refuses(problem(**changes), "cpu"))


def test_the_interpreter_takes_cpu_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_kernels.layer_refuses(problem(), "cpu") is None
    assert triton_kernels.layer_refuses(problem(), "cuda")
    by_name = {candidate.name: candidate for candidate in triton_kernels.linear_candidates()}
    assert by_name["triton-w8a8"].refuses(problem(activation="none"), "cpu") == "the scheme keeps activations in 16 bits"
    assert by_name["triton-columns"].refuses(problem(n=250), "cpu")
    assert by_name["triton-rows"].refuses(problem(n=250), "cpu") is None


def test_buckets_cover_every_number_of_rows_and_tiles_hold_their_bucket() -> None:
    for rows in range(1, 5000, 7):
        assert space.bucket(rows) >= min(rows, space.BUCKETS[-1])
    for backend in ("cuda", "xpu", "hip", "interpreter"):
        for bucket in space.BUCKETS[:4]:
            assert bucket <= space.SMALL
            assert all(tile.m >= bucket for tile in space.small(backend, bucket, "fp16"))


def test_bit_widening_is_never_given_weights_with_a_nan_or_e5m2() -> None:
    for backend in ("cuda", "xpu", "hip"):
        for activation in ("bfloat16", "float16"):
            for weight, careful in (("float8_e4m3fn", True), ("float8_e5m2", False)):
                assert not any("bits" in how for how in space.ways(backend, activation, weight, careful=careful))
    assert all(how.startswith("fp16") for how in space.ways("xpu", "float16", "float8_e4m3fn", careful=False))


def test_shares_give_every_part_a_tile() -> None:
    for units in (4, 20, 132):
        for tiles in (1, 3, 80, 448, 5000):
            for depth in (1, 2, 64, 136):
                assert all(1 <= share <= depth for share in space.shares(units, tiles, depth, stream=False))
                streamed = space.shares(units, tiles, depth, stream=True)
                assert streamed == [0] or all(share * units <= tiles * depth for share in streamed)


def test_answers_are_kept_beside_each_other_and_a_broken_file_costs_only_the_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("XPUFP8_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_known", {})
    device = torch.device("cpu")
    runs: list[str] = []

    def trial(name: str, value: float) -> tuning.Trial:
        def run() -> torch.Tensor:
            runs.append(name)
            if value < 0:
                raise RuntimeError("does not compile")
            return torch.tensor(value)

        return tuning.Trial({"kernel": name}, run)

    trials = [trial("raises", -1.0), trial("wrong", 1.0), trial("right", 0.0), trial("later", 0.0)]
    assert tuning.best(device, "a", trials, float) == {"kernel": "right"}
    assert runs == ["raises", "wrong", "right", "later"]
    tuning.best(device, "b", trials[3:], float)
    path = tuning.cache_file(device)
    assert json.loads(path.read_text()) == {"a": {"kernel": "right"}, "b": {"kernel": "later"}}
    monkeypatch.setattr(tuning, "_known", {})
    runs.clear()
    assert tuning.best(device, "a", trials, float) == {"kernel": "right"}
    assert runs == []
    # An answer that is no longer in the space is measured again.
    assert tuning.best(device, "a", trials[3:], float) == {"kernel": "later"}
    path.write_text("{broken")
    monkeypatch.setattr(tuning, "_known", {})
    assert tuning.best(device, "a", trials, float) == {"kernel": "right"}
    with pytest.raises(RuntimeError, match="does not compile"):
        tuning.best(device, "c", trials[:1], float)


@pytest.mark.parametrize("seed", range(6))
def test_sorting_gives_each_slot_one_place_in_a_tile_of_its_expert(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, number, rows = (1, 5, 64, 3, 100, 17)[seed], (4, 4, 8, 1, 128, 3)[seed], (16, 16, 16, 8, 16, 4)[seed]
    ids = torch.randint(-1, number + (seed % 2), (count,), generator=generator)
    slots, owner = experts.sort_by_expert(ids, number, rows)
    assert slots.numel() == owner.numel() * rows
    placed = [int(slot) for slot in slots if slot < count]
    assert sorted(placed) == [place for place in range(count) if 0 <= int(ids[place]) < number]
    for tile, expert in enumerate(owner.tolist()):
        inside = [int(slot) for slot in slots[tile * rows : (tile + 1) * rows] if slot < count]
        assert all(int(ids[slot]) == expert for slot in inside)
        assert inside == sorted(inside)
        assert bool(inside) == (expert >= 0)


def test_what_the_op_chooses_from_is_listed_once_and_by_the_order_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "backend", lambda: "cuda")
    layer = linear.Layer("block", 128, 128, quantize=True, careful=False)
    weight = torch.empty(256, 512, dtype=torch.float8_e4m3fn)
    columns = torch.empty(512, 256, dtype=torch.float8_e4m3fn).t()
    one, many = torch.empty(1, 512, dtype=torch.bfloat16), torch.empty(600, 512, dtype=torch.bfloat16)
    found = linear.candidates_for(layer, one, weight)
    assert linear.candidates_for(layer, one[:, :], weight) is found
    assert {name["how"] for name, _ in found} == {"fp16"}
    some = torch.empty(40, 512, dtype=torch.bfloat16)
    assert {name["how"] for name, _ in linear.candidates_for(layer, some, weight) if "how" in name} == {"fp16", "pair"}
    assert {name["how"] for name, _ in linear.candidates_for(layer, some, columns) if "how" in name} == {"fp16"}
    assert [name["kernel"] for name, _ in linear.candidates_for(layer, many, weight)][-2:] == ["vendor-fp8", "widen-then-matmul"]
