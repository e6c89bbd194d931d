"""How fast and in how much memory a log is read: CPU seconds, MB/s of CPU time, peak resident memory, for several kinds of logs.

``python benchmarks/explain.py [MEGABYTES]`` makes the logs on the fly (nothing is written), reads each in a process of its own
and prints a table. Limits: 1 GB in at most 150 MB of memory at 100 MB/s or more, and time linear in size.
"""

from __future__ import annotations

import io
import multiprocessing
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "explain" / "data"
CRASH = (
    b"(EngineCore_DP0 pid=653) ERROR 02-12 18:07:09 [core.py:842] Traceback (most recent call last):\n"
    + b"".join(
        b'(EngineCore_DP0 pid=653) ERROR 02-12 18:07:09 [core.py:842]   File "/usr/lib/vllm/v1/engine/core.py", line %d, in run_%d\n'
        b"(EngineCore_DP0 pid=653) ERROR 02-12 18:07:09 [core.py:842]     return self.step_%d(*args, **kwargs)\n" % (n, n, n)
        for n in range(60)
    )
    + b"(EngineCore_DP0 pid=653) ERROR 02-12 18:07:09 [core.py:842] RuntimeError: level_zero backend failed with error: 40 "
    b"(UR_RESULT_ERROR_OUT_OF_RESOURCES)\n"
    b"(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
)


def healthy() -> bytes:
    """A real healthy start, followed by an hour of a real server's small talk."""
    start = b"".join(path.read_bytes() for path in sorted((DATA / "healthy").glob("*.log"))[:2])
    talk = b"".join(
        b"(APIServer pid=1) INFO 02-12 18:%02d:%02d [loggers.py:257] Engine 000: Avg prompt throughput: %d.3 tokens/s, Avg generation "
        b"throughput: %d.6 tokens/s, Running: %d reqs, Waiting: 0 reqs, GPU KV cache usage: 3.1%%, Prefix cache hit rate: 0.0%%\n"
        b'(APIServer pid=1) INFO:     127.0.0.1:48802 - "GET /health HTTP/1.1" 200 OK\n' % (n // 60, n % 60, n, n * 3, n % 9)
        for n in range(3600)
    )
    return start + talk


def unique() -> bytes:
    """Lines that are all different, as logged requests are."""
    chance = random.Random(1)  # noqa: S311 - a benchmark
    words = [bytes(chance.choices(b"abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(4000)]
    return b"".join(
        b"(APIServer pid=1) INFO 02-12 18:07:09 [logger.py:41] Received request cmpl-%032x: prompt: '%s', params\n"
        % (chance.getrandbits(128), b" ".join(chance.choices(words, k=12)))
        for _ in range(20_000)
    )


def noisy() -> bytes:
    """Lines that are all different and all speak of errors: the worst that a log can hold."""
    return unique().replace(b"Received request", b"Error in request")


def one_line() -> bytes:
    """Text without a line end."""
    return healthy().replace(b"\n", b" ")


KINDS: dict[str, Callable[[], bytes]] = {
    "healthy server": healthy,
    "crash loop": lambda: healthy()[:200_000] + CRASH,
    "unique lines": unique,
    "unique lines, all with errors": noisy,
    "one line": one_line,
}


class Repeated(io.RawIOBase):
    """A stream that repeats a text up to a size and ends with a crash, without holding it."""

    def __init__(self, text: bytes, size: int) -> None:
        self.text, self.left, self.at, self.tail = text, size, 0, CRASH

    def readable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        if self.left <= 0:
            part, self.tail = self.tail, b""
            return part
        part = self.text[self.at : self.at + min(count, self.left)]
        self.at = (self.at + len(part)) % len(self.text)
        self.left -= len(part)
        return part


def measure(kind: str, size: int, answer: multiprocessing.SimpleQueue[tuple[float, int, str]]) -> None:
    sys.path.insert(0, str(ROOT))
    from xpufp8.explain import explain_stream

    stream = Repeated(KINDS[kind](), size)
    explain_stream(io.BytesIO(b""), name="warm-up")
    start = time.process_time()
    explanation = explain_stream(stream, name=kind)  # type: ignore[arg-type]  # a raw stream reads like any other
    used = time.process_time() - start
    codes = ",".join(cause.code for cause in explanation.conclusion.causes) or explanation.outcome
    answer.put((used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, codes))


def run(kind: str, size: int) -> Iterator[tuple[float, int, str]]:
    answer: multiprocessing.SimpleQueue[tuple[float, int, str]] = multiprocessing.get_context("spawn").SimpleQueue()
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(kind, size, answer))
    process.start()
    process.join()
    if not answer.empty():
        yield answer.get()


def main(argv: list[str]) -> int:
    megabytes = int(argv[0]) if argv else 1000
    print(f"{'log':32}{'MB':>7}{'CPU s':>9}{'MB/s':>8}{'peak MB':>9}  found")
    for kind in [k for k in KINDS if len(argv) < 2 or argv[1] in k]:
        for size in (megabytes // 4, megabytes):
            for used, peak, codes in run(kind, size * 1_000_000):
                print(f"{kind:32}{size:>7}{used:>9.2f}{size / used:>8.0f}{peak / 1024:>9.0f}  {codes}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
