"""The planner's search: cheapest fixes first, replaced when they do not help, each left out once at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from xpufp8.children import Launch
from xpufp8.command import Items, assignments, vllm_args
from xpufp8.doctor import Request
from xpufp8.planner import Bench, Trial, because, choose, key, mark, rank, seen_by, shorten
from xpufp8.progress import Progress
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.target import Target

FAKE = Fix(kind="runtime", action="fake:ns::op")
KERNEL = Fix(kind="runtime", action="kernel:fp8_block", cost="slow")
EAGER = Fix(kind="flag", action="--enforce-eager", cost="speed")
HALF = Fix(kind="flag", action="--dtype float16", cost="numbers")
DIRECT = Fix(kind="env", action="CCL_SEND=direct")
TEXT = Fix(kind="flag", action="--language-model-only", cost="no image or video input")
MOVE = Fix(kind="host", action="move the card")


def finding(code: str, *fixes: Fix, subject: str = "") -> Finding:
    return Finding(code=code, severity="error", status="fail", title=code, cause="", subject=subject, fixes=list(fixes))


def bench(base: list[Finding], world: Callable[[set[str]], list[Finding]], **request: bool) -> Bench:
    """A bench whose probes are a function of the actions in place."""

    class World(Bench):
        def _probe(self, fixes: frozenset[Fix]) -> Trial:
            self.runs += 1
            return Trial(world({f.action for f in fixes}), frozenset())

    return World(Target("python", "cpu"), Request(**request), {}, {}, base)


OPS = finding("OPS001", EAGER, FAKE)
KRN = finding("KRN001", KERNEL)
CCL = finding("P2P003", DIRECT)


def cured_by(pairs: list[tuple[Finding, set[str]]]) -> Callable[[set[str]], list[Finding]]:
    return lambda have: [f for f, cures in pairs if not have & cures]


def test_fixes_are_preferred_in_the_designs_order() -> None:
    assert sorted([MOVE, TEXT, HALF, EAGER, KERNEL, DIRECT, FAKE], key=rank) == [FAKE, DIRECT, KERNEL, EAGER, HALF, TEXT, MOVE]


def test_a_fix_that_loses_a_function_is_the_last_one_and_its_loss_is_said() -> None:
    vision = finding("ENV010", MOVE, TEXT, HALF)
    b = bench([vision], cured_by([(vision, {"--language-model-only", "--dtype float16"})]))
    assert shorten(b, choose(b)) == {HALF}, "another number format before no images at all"
    b = bench([vision], cured_by([(vision, {"--language-model-only"})]))
    fixes = shorten(b, choose(b))
    assert fixes == {TEXT}
    (reason,) = because(b, fixes)
    assert reason.cost == "no image or video input"
    assert reason.sentence == "--language-model-only; without it: ENV010; its price: no image or video input"


def test_a_function_is_not_given_up_where_another_fix_does() -> None:
    """The loss goes with the finding that proposed it alone: what another fix cures needs none."""
    vision, op = finding("ENV010", TEXT, FAKE), finding("OPS001", FAKE)
    b = bench([vision, op], lambda have: [] if "fake:ns::op" in have else [vision, op])
    assert shorten(b, choose(b)) == {FAKE}


def test_code_of_a_checkpoint_is_never_allowed_by_the_plan() -> None:
    trust = Fix(kind="flag", action="--trust-remote-code")
    stuck = finding("CFG905", trust)
    b = bench([stuck], cured_by([(stuck, {"--trust-remote-code"})]))
    assert shorten(b, choose(b)) == frozenset()


def test_leaving_out_an_option_that_does_something_is_no_free_fix() -> None:
    cache, eager = Fix(kind="flag", action="without --kv-cache-dtype", cost="twice the memory"), EAGER
    assert rank(Fix(kind="flag", action="without --sparkle")) < rank(eager) == rank(cache) < rank(HALF)


def test_a_free_repair_is_taken_before_a_flag_that_costs_speed() -> None:
    b = bench([OPS], cured_by([(OPS, {"fake:ns::op", "--enforce-eager"})]))
    assert shorten(b, choose(b)) == {FAKE}


def test_without_runtime_fixes_the_flag_stands() -> None:
    b = bench([OPS], cured_by([(OPS, {"fake:ns::op", "--enforce-eager"})]), runtime_fixes=False)
    assert shorten(b, choose(b)) == {EAGER}


def test_a_fix_that_does_not_help_gives_way_to_the_next() -> None:
    b = bench([OPS], cured_by([(OPS, {"--enforce-eager"})]))
    assert shorten(b, choose(b)) == {EAGER}


def test_a_fault_behind_a_fault_is_met_and_fixed() -> None:
    def world(have: set[str]) -> list[Finding]:
        if "kernel:fp8_block" not in have:
            return [KRN]
        return [] if "fake:ns::op" in have else [OPS]

    b = bench([KRN], world)
    assert shorten(b, choose(b)) == {KERNEL, FAKE}


def test_the_report_holds_the_fault_behind_the_fault_with_what_removes_it() -> None:
    def world(have: set[str]) -> list[Finding]:
        if "kernel:fp8_block" not in have:
            return [KRN]
        return [] if "fake:ns::op" in have else [OPS]

    b = bench([KRN], world)
    marked = mark(b, frozenset({FAKE, KERNEL}))
    assert [(f.code, [(x.action, x.verified) for x in f.fixes]) for f in marked] == [
        ("KRN001", [("kernel:fp8_block", True)]),
        ("OPS001", [("--enforce-eager", False), ("fake:ns::op", True)]),
    ]


def test_a_fix_that_another_makes_needless_is_dropped() -> None:
    both = finding("OPS001", FAKE)
    b = bench([both, KRN], cured_by([(both, {"fake:ns::op", "kernel:fp8_block"}), (KRN, {"kernel:fp8_block"})]))
    assert shorten(b, choose(b)) == {KERNEL}


def test_every_kept_item_is_needed() -> None:
    b = bench([OPS, KRN, CCL], cured_by([(OPS, {"fake:ns::op"}), (KRN, {"kernel:fp8_block"}), (CCL, {"CCL_SEND=direct"})]))
    fixes = shorten(b, choose(b))
    assert fixes == {FAKE, KERNEL, DIRECT}
    for fix in fixes:
        assert b.trial(fixes - {fix}).failures(), f"{fix.action} stands and nothing fails without it"


def test_what_nothing_cures_leaves_the_best_that_is_known_and_ends() -> None:
    stuck = finding("DEV001", MOVE)
    b = bench([OPS, stuck], lambda have: [stuck] if "fake:ns::op" in have else [OPS, stuck])
    assert shorten(b, choose(b)) == {FAKE}
    assert b.runs < 10


def test_a_fix_that_brings_a_new_failure_is_not_called_a_success() -> None:
    new = finding("MDL001")
    b = bench([KRN], lambda have: [new] if have else [KRN])
    assert choose(b) == frozenset()


def test_a_set_is_probed_once() -> None:
    b = bench([OPS], cured_by([(OPS, {"fake:ns::op"})]))
    for _ in range(3):
        b.trial(frozenset({FAKE}))
    b.trial(frozenset({FAKE.model_copy(update={"verified": True, "cost": "x"})}))
    assert b.runs == 1


@pytest.mark.parametrize(
    ("typed", "flags", "result"),
    [
        (["M", "-tp", "2"], ["--enforce-eager"], ["M", "-tp", "2", "--enforce-eager"]),
        (["M", "--x", "1", "-tp", "2"], ["without --x 1"], ["M", "-tp", "2"]),
        (["M", "--disable-log-requests", "-tp", "2"], ["without --disable-log-requests"], ["M", "-tp", "2"]),
        (["M", "--enforce_eager"], ["without --enforce-eager"], ["M"]),
        (["--sparkle", "M"], ["without --sparkle"], ["M"]),
        (["M", "--kv-cache-dtype", "fp8", "-tp", "2"], ["without --kv-cache-dtype fp8"], ["M", "-tp", "2"]),
        (["M", "--kv_cache_dtype=fp8"], ["without --kv_cache_dtype=fp8"], ["M"]),
        (["M", "--kv_cache_dtype=fp8"], ["without --kv-cache-dtype"], ["M"]),
        (["M", "--dtype", "auto"], ["--dtype float16"], ["M", "--dtype", "auto", "--dtype", "float16"]),
    ],
)
def test_flags_are_added_and_taken_away_and_nothing_else_moves(typed: list[str], flags: list[str], result: list[str]) -> None:
    assert vllm_args(typed, flags) == result


def test_items_keep_the_plugin_repairs_apart_from_what_the_path_supplies() -> None:
    assert Items(("fake:a::b", "metadata:vllm")).apply == ("fake:a::b",)
    assert key(OPS) == ("OPS001", "")


def test_an_env_fix_may_hold_several_variables() -> None:
    assert assignments(["CCL_SEND=direct CCL_RECV=direct", "A='x y=z'"]) == {
        "CCL_SEND": "direct",
        "CCL_RECV": "direct",
        "A": "x y=z",
    }


@pytest.mark.parametrize(
    ("action", "kind", "sees", "not_seen"),
    [
        ("metadata:vllm", "runtime", "environment", "kernel_table"),
        ("kernel:fp8_block", "runtime", "kernel_table", "fake_tensor"),
        ("fake:a::b", "runtime", "model_trace", "kernel_table"),
        ("CCL_SEND=direct CCL_RECV=direct", "env", "peer_access", "kernel_table"),
        ("--dtype float16", "flag", "model_trace", "environment"),
        ("without --sparkle", "flag", "vllm_options", "model_trace"),
    ],
)
def test_only_probes_that_can_see_a_fix_are_asked_again(action: str, kind: str, sees: str, not_seen: str) -> None:
    fix = Fix.model_validate({"kind": kind, "action": action})
    evidence = [Evidence(probe="vllm_options", mode="live", observed="x")] if action.startswith("without") else []
    probes = seen_by(fix, [finding("X", fix).model_copy(update={"evidence": evidence})])
    assert probes is not None
    assert sees in probes
    assert not_seen not in probes


def test_a_variable_that_may_reach_any_library_asks_everything_again() -> None:
    assert seen_by(Fix(kind="env", action="LD_LIBRARY_PATH=/opt/intel"), []) is None


def test_a_list_of_plugins_that_leaves_ours_out_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    from xpufp8.command import environment_for

    target = Target("python", "cpu")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert environment_for(target, Items(("kernel:fp8_block",)), None)["VLLM_PLUGINS"] == "other,xpufp8"
    monkeypatch.setenv("VLLM_PLUGINS", "xpufp8,other")
    assert "VLLM_PLUGINS" not in environment_for(target, Items(("kernel:fp8_block",)), None)
    monkeypatch.delenv("VLLM_PLUGINS")
    assert "VLLM_PLUGINS" not in environment_for(target, Items(("kernel:fp8_block",)), None)


def test_what_only_the_plan_could_tell_is_unknown_no_more() -> None:
    """An op that a model may reach, when the model could not even be configured: with the plan it was traced to its end."""
    reached = finding("OPS002").model_copy(update={"status": "unknown"})
    peers = finding("P2P013").model_copy(update={"status": "unknown"})
    stopped = finding("MDL001", HALF)
    b = bench([stopped, reached, peers], lambda have: [peers] if "--dtype float16" in have else [stopped, reached, peers])
    fixes = shorten(b, choose(b))
    assert [(f.code, [x.verified for x in f.fixes]) for f in mark(b, fixes)] == [("MDL001", [True]), ("P2P013", [])]


def test_what_is_tried_is_said_before_its_probes_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it a reader sees the same probe again and again and does not know why."""
    target = Target("python", "cpu", typed=("m",))
    progress = Progress(target)
    said = []
    monkeypatch.setattr("xpufp8.doctor.observe", lambda t, names, r, launch: said.append("probes") or [])
    monkeypatch.setattr("xpufp8.doctor.launch_for", lambda *a: Launch("python", []))
    request = Request(on_try=lambda fixes: (said.append(fixes), progress.trying(fixes)))
    Bench(target, request, {"model_trace": None}, {}, [OPS])._run(target, frozenset({FAKE, HALF}), ["model_trace"], {})
    assert said == ["--dtype float16, fake:ns::op", "probes"]
    assert capsys.readouterr().err == "xpufp8: trying --dtype float16, fake:ns::op\n"
