"""Child processes of a probe, with limits: whatever they do, the probe answers.

A child gets its own session, no stdin but what is given, and is ended with everything in its session at the deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

OUT = 1 << 20
TAIL = 4096
"""Bytes kept of a child's stdout and stderr."""


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    code: int | None
    """Exit code, negative for a signal, None when it was ended at the deadline."""
    out: str
    """What it wrote to stdout."""
    err: str
    """End of what it wrote to stderr."""
    seconds: float

    @property
    def fate(self) -> str:
        """In words."""
        if self.code is None:
            return f"no answer within {self.seconds:.1f} s"
        if self.code < 0:
            try:
                return f"died of {signal.Signals(-self.code).name}"
            except ValueError:
                return f"died of signal {-self.code}"
        return f"exit code {self.code}"

    def json(self) -> dict[str, Any] | None:
        """The JSON object in its last line that is one, or None."""
        for line in reversed(self.out.splitlines()):
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    data = json.loads(line)
                    return data if isinstance(data, dict) else None
        return None


def module_command(module: str, *arguments: str) -> list[str]:
    """Command that runs one of our own modules in this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def child_environment(environment: dict[str, str] | None = None) -> dict[str, str]:
    """Variables for a child: ours, with the folder that holds this package on its path."""
    env = dict(os.environ if environment is None else environment)
    here = str(Path(__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [env.get("PYTHONPATH")])])
    env.pop("XPUFP8_RESULT", None)  # the answer of a grandchild is not the probe's answer
    return env


class _Tail:
    """Reads a stream to its end and keeps the last part, so that a flood neither blocks the child nor fills memory."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._most = stream, most
        self._chunks: deque[bytes] = deque()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        size = 0
        while chunk := os.read(self._stream.fileno(), 65_536):
            self._chunks.append(chunk)
            size += len(chunk)
            while size - len(self._chunks[0]) > self._most:
                size -= len(self._chunks.popleft())

    def text(self) -> str:
        """The end of it, once the child has been ended."""
        self._thread.join(timeout=1)
        return b"".join(list(self._chunks))[-self._most :].decode("utf-8", "replace")


class Child:
    """A running child in a session of its own."""

    def __init__(self, argv: Sequence[str], environment: dict[str, str], **extra: Any) -> None:
        self.start = time.monotonic()
        self.process = subprocess.Popen(
            list(argv), stdin=extra.pop("stdin", subprocess.DEVNULL), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment, start_new_session=True, **extra,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._out, self._err = _Tail(self.process.stdout, OUT), _Tail(self.process.stderr, TAIL)

    def running(self) -> bool:
        """True while it runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End it and all of its session."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self.process.kill()

    def wait(self, limit: float) -> Ended:
        """Wait at most ``limit`` seconds, then end it."""
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout=max(0.0, limit))
        self.kill()
        self.process.wait()
        return Ended(code, self._out.text(), self._err.text(), time.monotonic() - self.start)


def run_bounded(argv: Sequence[str], limit: float, environment: dict[str, str] | None = None) -> Ended:
    """Run a command to its end or to the limit."""
    try:
        child = Child(argv, child_environment(environment))
    except OSError as error:
        return Ended(127, "", str(error), 0.0)
    return child.wait(limit)
