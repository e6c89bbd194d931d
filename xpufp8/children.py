"""Runs probes in child processes of the target interpreter.

A probe that segfaults, aborts, hangs, is killed for memory, prints garbage or floods its output is a result: ``crashed`` or
``timeout`` with the signal and its last lines. Each child has its own session and empty working folder, answers through a
file, and is ended with everything it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from probes.protocol import RESULT_VARIABLE, Context
from xpufp8.report import ProbeReport

TOKEN_VARIABLE = "XPUFP8_RUN"
"""Marks our children, so that those which left the process group are found in /proc."""
LAST_LINES = 12
TAIL_BYTES = 16_384
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
"""No probe downloads anything, reports home or colours its output."""


@dataclass(frozen=True)
class Launch:
    """How children are started: interpreter, environment, limits."""

    python: str
    pythonpath: Sequence[Path]
    environment: dict[str, str] = field(default_factory=dict)
    """Variables added to the inherited ones."""
    timeout: float = 180.0
    """Seconds for one probe."""
    deadline: float | None = None
    """``time.monotonic()`` at which everything ends, or None."""
    parallel: int = 2


def child_environment(launch: Launch) -> dict[str, str]:
    """The inherited environment with what every child needs."""
    env = dict(os.environ)
    env.update(QUIET)
    env.update(launch.environment)
    inherited = env.get("PYTHONPATH")
    env["PYTHONPATH"] = os.pathsep.join([*map(str, launch.pythonpath), *([inherited] if inherited else [])])
    return env


_alive: dict[str, int] = {}
"""Children that run now: token to process group."""


class _Tail:
    """Keeps the end of a stream, however long it is."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        while chunk := os.read(stream.fileno(), 65_536):
            self._chunks.append(chunk[-TAIL_BYTES:])
            self._size += len(self._chunks[-1])
            while self._size - len(self._chunks[0]) > TAIL_BYTES:
                self._size -= len(self._chunks.popleft())

    def lines(self) -> list[str]:
        """The last non-empty lines."""
        self._thread.join(timeout=2)
        text = b"".join(list(self._chunks))[-TAIL_BYTES:].decode("utf-8", "replace")
        return [line.rstrip()[:400] for line in text.splitlines() if line.strip()][-LAST_LINES:]


def end_all(token: str, group: int, *, grace: float = 0.0) -> None:
    """End a child's whole family: its process group, and whatever left the group but still carries our token."""
    family = []
    for process in psutil.process_iter(["pid"]):
        try:
            if process.environ().get(TOKEN_VARIABLE) == token:
                family.append(process)
        except (psutil.Error, OSError):
            continue
    if grace:
        for process in family:
            _quietly(process.terminate)
        psutil.wait_procs(family, timeout=grace)
    _quietly(lambda: os.killpg(group, signal.SIGKILL))
    for process in family:
        _quietly(process.kill)


def _quietly(act: Callable[[], object]) -> None:
    with contextlib.suppress(OSError, psutil.Error):  # it is gone already, which is what was wanted
        act()


def _died(code: int, oom_before: int, oom_after: int) -> str:
    """In words: how a child ended without an answer."""
    if code >= 0:
        return f"exited with code {code} without an answer"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        ran = "ran meanwhile" if oom_after > oom_before else "is the usual sender"
        return f"killed by SIGKILL, which xpufp8 did not send (the kernel's out-of-memory killer {ran})"
    return f"died of {name}"


def _oom_kills() -> int:
    """The kernel's count of out-of-memory kills, 0 where it cannot be read."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def run_probe(name: str, context: Context, launch: Launch) -> ProbeReport:
    """Run one probe in a child and return what came of it. Never raises for anything the child does."""
    start = time.monotonic()
    limit = launch.timeout
    if launch.deadline is not None:
        limit = min(limit, launch.deadline - start)
        if limit <= 0:
            return ProbeReport(name=name, status="timeout", detail="not started: the total time limit was reached")
    folder = Path(tempfile.mkdtemp(prefix="xpufp8-probe-"))
    try:
        return _run_in(folder, name, context, launch, limit, start)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(folder: Path, name: str, context: Context, launch: Launch, limit: float, start: float) -> ProbeReport:
    result, token, oom = folder / "result.json", uuid.uuid4().hex, _oom_kills()
    work = folder / "cwd"
    work.mkdir()
    env = child_environment(launch) | {RESULT_VARIABLE: str(result), TOKEN_VARIABLE: token}
    command = [launch.python, "-X", "faulthandler", "-m", "probes", name]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=work,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        return ProbeReport(name=name, status="crashed", detail=f"could not start {launch.python}: {error.strerror or error}")
    assert child.stdout is not None
    assert child.stdin is not None
    _alive[token] = child.pid
    tail = _Tail(child.stdout)
    stdin = child.stdin
    _quietly(lambda: (stdin.write(json.dumps(asdict(context)).encode()), stdin.close()))
    timed_out = False
    try:
        child.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        timed_out = True
    end_all(token, child.pid)
    child.wait()
    _alive.pop(token, None)
    seconds = time.monotonic() - start
    # An answer that was written before the child hung or died in its shutdown is still an answer.
    envelope = _read_envelope(result)
    if envelope is None:
        detail = f"gave no answer within {limit:.0f} s" if timed_out else _died(child.returncode, oom, _oom_kills())
        if result.exists():
            detail += "; what it wrote is not a readable answer"
        return ProbeReport(
            name=name, status="timeout" if timed_out else "crashed", seconds=seconds, detail=detail, last_lines=tail.lines()
        )
    raised = envelope.get("error")
    if raised:
        detail = f"{raised.get('type')}: {raised.get('message')}"
        return ProbeReport(name=name, status="failed", seconds=seconds, detail=detail, last_lines=tail.lines())
    return ProbeReport(name=name, status="ok", seconds=seconds, facts=envelope["facts"])


def _read_envelope(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    ok = isinstance(data, dict) and (isinstance(data.get("facts"), dict) or isinstance(data.get("error"), dict))
    return data if ok else None


def run_probes(
    requests: Sequence[tuple[str, Context]], launch: Launch, on_done: Callable[[ProbeReport], None] | None = None,
) -> list[ProbeReport]:  # fmt: skip
    """Run probes side by side and return their reports in the order asked for.

    Whatever interrupts it (Ctrl-C, a signal that became an exception) ends the children first and then goes on its way.
    """
    ended = threading.Event()

    def one(request: tuple[str, Context]) -> ProbeReport:
        report = run_probe(request[0], request[1], launch)
        if on_done is not None and not ended.is_set():
            on_done(report)
        return report

    with ThreadPoolExecutor(max_workers=max(1, launch.parallel)) as pool:
        runs = [pool.submit(one, request) for request in requests]
        try:
            return [run.result() for run in runs]
        except BaseException:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            # Again and again, because a thread may just be starting one.
            while not all(run.done() for run in runs):
                for token, group in list(_alive.items()):
                    end_all(token, group)
                time.sleep(0.05)
            raise
