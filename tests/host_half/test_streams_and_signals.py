"""What surrounds a run: signals, closed and full streams, narrow terminals, poor encodings, output files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., subprocess.CompletedProcess[str]]

REPORTS = Path(__file__).resolve().parents[1] / "data" / "reports"
FAILS, SERVES = REPORTS / "cpu-block-fp8.json", REPORTS / "sim-block-fp8.json"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_every_child_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 300\n")
    hanging.chmod(0o755)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "xpufp8", "doctor", "--device", "cpu", "--python", str(hanging)]
    doctor = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)},
        # Under nohup or as a job in the background the tests themselves were started with these ignored, and children inherit that.
        preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)],  # noqa: PLW1509
    )  # fmt: skip
    process = psutil.Process(doctor.pid)
    limit = time.monotonic() + 60
    while len(children := process.children(recursive=True)) < 2 and time.monotonic() < limit:
        time.sleep(0.05)
    doctor.send_signal(number)
    _, said = doctor.communicate(timeout=60)
    assert doctor.returncode == 128 + number
    assert f"ended by {number.name}" in said
    assert "crashed" not in said, "a probe that we ended is no result"
    assert len(children) == 2
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert list(temporary.glob("xpufp8-probe-*")) == []


@pytest.mark.parametrize(("report", "code"), [(FAILS, 1), (SERVES, 0)])
@pytest.mark.parametrize("shape", ["rich", "json", "markdown"])
def test_a_reader_that_goes_away_does_not_change_the_exit_code(report: Path, code: int, shape: str) -> None:
    line = f"{sys.executable} -m xpufp8 render {report} --format {shape} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    "command", [["rule", "KRN001"], ["schema"], ["render", str(FAILS)], ["render", str(FAILS), "--format", "json"]]
)
@pytest.mark.parametrize(("stdout", "says"), [(">&-", "stdout is closed"), (">/dev/full", "No space left on device")])
def test_a_stdout_that_cannot_be_written_is_wrong_usage(command: list[str], stdout: str, says: str) -> None:
    line = f"{sys.executable} -m xpufp8 {' '.join(command)} {stdout}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert "--output FILE" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("shape", ["rich", "markdown", "github"])
def test_no_encoding_loses_a_diagnosis(xpufp8: Run, encoding: str, shape: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "xpufp8", "render", str(FAILS), "--format", shape],
        capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"MDL001" in done.stdout


@pytest.mark.parametrize("columns", ["0", "1", "19", "rubbish", "-5"])
def test_no_width_loses_a_diagnosis(xpufp8: Run, columns: str) -> None:
    done = xpufp8("render", FAILS, COLUMNS=columns)
    assert done.returncode == 1
    assert "MDL001" in done.stdout


def test_a_job_summary_that_cannot_be_written_costs_nothing_else(xpufp8: Run, tmp_path: Path) -> None:
    done = xpufp8("render", FAILS, "--format", "github", GITHUB_STEP_SUMMARY=str(tmp_path / "none" / "summary"))
    assert done.returncode == 1
    assert done.stdout.startswith("::")
    assert "no job summary" in done.stderr


def test_a_failed_write_leaves_the_old_file(xpufp8: Run, tmp_path: Path) -> None:
    goal = tmp_path / "report.json"
    goal.write_text("old")
    limit = f"ulimit -f 4; {sys.executable} -m xpufp8 render {FAILS} --format json --output {goal}"
    done = subprocess.run(["bash", "-c", f"trap '' XFSZ; {limit}"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert goal.read_text() == "old"
    assert list(tmp_path.iterdir()) == [goal]
    assert xpufp8("render", FAILS, "--format", "json", "--output", goal).returncode == 1
    assert json.loads(goal.read_text())["verdict"] == "not-servable"


def test_an_output_that_is_no_plain_file_is_written_through(tmp_path: Path) -> None:
    line = f"{sys.executable} -m xpufp8 render {FAILS} --format json --output /dev/stdout | head -c 1"
    assert subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False).stdout == "{"
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real.json")
    (tmp_path / "real.json").write_text("old")
    subprocess.run([sys.executable, "-m", "xpufp8", "render", str(FAILS), "--format", "json", "--output", str(link)], check=False)
    assert link.is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["schema_version"] == "1"


def test_what_a_probe_printed_is_no_command_to_a_workflow_runner(xpufp8: Run, tmp_path: Path) -> None:
    data = json.loads(FAILS.read_text())
    data["findings"][0]["evidence"][0]["observed"] = "x\n::stop-commands::token\n   ::add-mask::y"
    (tmp_path / "r.json").write_text(json.dumps(data))
    plain, runner = xpufp8("render", tmp_path / "r.json"), xpufp8("render", tmp_path / "r.json", GITHUB_ACTIONS="true")
    assert "::stop-commands::" in plain.stdout
    assert [line for line in runner.stdout.splitlines() if line.lstrip().startswith("::")] == []
    assert ": :stop-commands::token" in runner.stdout
    assert len(plain.stdout.splitlines()) == len(runner.stdout.splitlines())
