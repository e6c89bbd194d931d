"""The runner: whatever a probe's process does is a result, and nothing of it stays behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from probes.protocol import Context
from xpufp8.children import TOKEN_VARIABLE, Launch, run_probe, run_probes

MISBEHAVIOUR = """
import ctypes, json, os, signal, subprocess, sys, time
name = sys.argv[1]
context = json.loads(sys.stdin.read())
result = os.environ["XPUFP8_RESULT"]
def answer(facts):
    with open(result, "w") as out:
        json.dump({"probe": name, "facts": facts, "error": None}, out)
print("about to", name, flush=True)
if name == "well":
    print('{"facts": {"stdout": "is not the answer"}}')
    answer({"cwd": os.listdir("."), "device": context["device"]})
elif name == "segfault":
    ctypes.string_at(0)
elif name == "abort":
    os.abort()
elif name == "hang":
    time.sleep(600)
elif name == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
elif name == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif name == "exits":
    sys.exit(7)
elif name == "garbage":
    open(result, "wb").write(b"\\xff\\x00{{{")
elif name == "wrong_shape":
    open(result, "w").write("[1, 2]")
elif name == "flood":
    line = b"x" * 1023 + b"\\n"
    for _ in range(200_000):
        os.write(1, line)
    os.write(1, b"the last line\\n")
    sys.exit(1)
elif name == "one_line":
    for _ in range(200):
        os.write(2, b"y" * 1_000_000)
    sys.exit(1)
elif name == "raises":
    with open(result, "w") as out:
        json.dump({"probe": name, "facts": None, "error": {"type": "builtins.ValueError", "message": "no"}}, out)
elif name == "late_crash":
    answer({"fine": True})
    os.abort()
elif name == "late_hang":
    answer({"fine": True})
    time.sleep(600)
elif name == "daemon":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    answer({"fine": True})
"""


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    package = tmp_path / "half" / "probes"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(MISBEHAVIOUR)
    return Launch(python=sys.executable, pythonpath=[tmp_path / "half"], timeout=30)


def test_an_answer_comes_back_from_an_empty_folder(launch: Launch) -> None:
    report = run_probe("well", Context(device="cpu"), launch)
    assert (report.status, report.facts) == ("ok", {"cwd": [], "device": "cpu"})


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("segfault", "died of SIGSEGV"),
        ("abort", "died of SIGABRT"),
        ("killed", "killed by SIGKILL, which xpufp8 did not send"),
        ("exits", "exited with code 7"),
        ("garbage", "not a readable answer"),
        ("wrong_shape", "not a readable answer"),
        ("flood", "exited with code 1"),
        ("one_line", "exited with code 1"),
    ],
)
def test_every_bad_end_is_a_crash_with_its_reason_and_last_lines(launch: Launch, name: str, detail: str) -> None:
    report = run_probe(name, Context(), launch)
    assert report.status == "crashed"
    assert detail in report.detail
    assert 0 < len(report.last_lines) <= 12
    assert all(len(line) <= 400 for line in report.last_lines)
    if name == "flood":
        assert report.last_lines[-1] == "the last line"
    if name == "segfault":
        assert any("Segmentation fault" in line for line in report.last_lines), "faulthandler shows where"


def test_an_exception_in_a_probe_is_a_failure_with_its_message(launch: Launch) -> None:
    report = run_probe("raises", Context(), launch)
    assert (report.status, report.detail) == ("failed", "builtins.ValueError: no")


@pytest.mark.parametrize("name", ["hang", "stubborn"])
def test_a_hang_ends_at_its_limit(launch: Launch, name: str) -> None:
    report = run_probe(name, Context(), Launch(launch.python, launch.pythonpath, timeout=1))
    assert (report.status, report.detail) == ("timeout", "gave no answer within 1 s")
    assert report.last_lines == [f"about to {name}"]


def test_an_answer_given_before_a_bad_end_counts(launch: Launch) -> None:
    assert run_probe("late_crash", Context(), launch).status == "ok"
    assert run_probe("late_hang", Context(), Launch(launch.python, launch.pythonpath, timeout=2)).status == "ok"


def test_nothing_that_a_probe_started_stays_behind(launch: Launch) -> None:
    assert run_probe("daemon", Context(), launch).status == "ok"
    time.sleep(0.2)
    left = []
    for process in psutil.process_iter():
        try:
            if TOKEN_VARIABLE in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process.cmdline())
        except psutil.Error:
            continue
    mine = os.environ.get(TOKEN_VARIABLE)
    assert mine is None
    assert not [line for line in left if "time.sleep(600)" in " ".join(line)]


def test_one_bad_probe_does_not_end_the_others_and_order_is_kept(launch: Launch) -> None:
    seen: list[str] = []
    reports = run_probes([(n, Context()) for n in ("segfault", "well", "abort", "well")], launch, lambda r: seen.append(r.name))
    assert [r.status for r in reports] == ["crashed", "ok", "crashed", "ok"]
    assert sorted(seen) == ["abort", "segfault", "well", "well"]


def test_a_missing_interpreter_is_a_crash_not_an_exception(launch: Launch, tmp_path: Path) -> None:
    report = run_probe("well", Context(), Launch(str(tmp_path / "python"), launch.pythonpath))
    assert report.status == "crashed"
    assert "could not start" in report.detail


def test_the_total_limit_stops_what_has_not_started(launch: Launch) -> None:
    over = Launch(launch.python, launch.pythonpath, deadline=time.monotonic() - 1)
    report = run_probe("well", Context(), over)
    assert (report.status, report.detail) == ("timeout", "not started: the total time limit was reached")
