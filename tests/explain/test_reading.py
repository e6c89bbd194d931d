"""Logs of any shape and size: compressed, wide, broken, endless, hostile. Memory stays bounded and nothing reaches the terminal."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpufp8.explain import Explanation, exit_code, explain_stream, sieve, to_report
from xpufp8.explain.reader import CHUNK, LONGEST, Source
from xpufp8.output import json_report, terminal

ROOT = Path(__file__).resolve().parents[2]
CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "cases.jsonl").read_text(encoding="utf-8").splitlines()]
CRASH = "RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)\n"
TALK = "INFO 07-30 12:49:30 [loggers.py:257] Avg prompt throughput: 1.0 tokens/s, Running: 1 reqs\n"
UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def explain(data: bytes) -> Explanation:
    return explain_stream(io.BytesIO(data), name="test")


def codes(explanation: Explanation) -> list[str]:
    return [cause.code for cause in explanation.conclusion.causes]


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(CRASH.encode()),
        gzip.compress(TALK.encode() * 1000) + gzip.compress(CRASH.encode()),
        codecs.BOM_UTF16_LE + CRASH.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + CRASH.encode("utf-16-be"),
        codecs.BOM_UTF8 + CRASH.encode(),
        CRASH.encode().replace(b" ", b"\0 "),
        b"\xfa\xfe\x00\xc3\x28 not text \n" + CRASH.encode(),
        CRASH.replace("level_zero", "level\u200b_zero").replace("\u200b", "").encode(),
        b"Loading:  10%\rLoading: 100%\r" + CRASH.encode(),
    ],
    ids=["gzip", "gzip members", "utf-16 le", "utf-16 be", "utf-8 bom", "nul bytes", "invalid utf-8", "plain", "progress bar"],
)  # fmt: skip
def test_any_encoding(data: bytes) -> None:
    assert codes(explain(data)) == ["MEM901"]


def test_a_gzip_file_that_ends_early_is_read_as_far_as_it_goes() -> None:
    whole = gzip.compress((CRASH + "x" * 100_000).encode())
    explanation = explain(whole[:-20])
    assert codes(explanation) == ["MEM901"]
    assert "ends early" in explanation.notes[0]
    damaged = explain(whole[:60] + b"\x00" * 30)
    assert damaged.notes


def test_an_empty_log_is_no_failure() -> None:
    explanation = explain(b"")
    assert (explanation.outcome, exit_code(explanation), explanation.notes) == ("healthy", 0, ("The log is empty.",))


def test_line_numbers_are_those_of_an_editor() -> None:
    log = "first\r\n\r\nProgress 1\rProgress 2\r\n" + CRASH
    assert explain(log.encode()).conclusion.causes[0].evidence[0][0] == 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_what_stands_deep_in_a_large_log_is_found(case: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the part that is read whole, only new and suspicious lines are: none of the known failures may be lost there."""
    shallow = codes(explain(case["log"].encode()))
    monkeypatch.setattr(sieve, "WHOLE", 1000)
    monkeypatch.setattr(sieve, "SHARE", 1)
    log = TALK * 4000 + case["log"] + "\n" + "INFO 07-30 12:49:31 [x.py:1] waiting\n" * 4000
    assert codes(explain(log.encode())) == shallow


def test_tracebacks_deep_in_a_large_log_keep_their_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sieve, "WHOLE", 1000)
    monkeypatch.setattr(sieve, "SHARE", 1)
    frames = "".join(f'  File "/x/f{number}.py", line {number}, in f{number}\n    call()\n' for number in range(40))
    log = TALK * 9000 + f"Traceback (most recent call last):\n{frames}ZeppelinError: the gas is out\n" + "end\n" * 10
    root = explain(log.encode()).conclusion.root
    assert root is not None
    assert (root.root.type, len(root.root.frames)) == ("ZeppelinError", 40)
    assert root.root.line == 9000 + 82


@pytest.mark.parametrize("before", [1000, LONGEST - 40, 3 * LONGEST - 5000, 5_000_000])
def test_a_very_long_line(before: int) -> None:
    line = (
        "x" * before
        + " RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES) "
        + "y" * 200_000
    )
    explanation = explain(b"first\n" + line.encode() + b"\nlast\n")
    assert codes(explanation) == ["MEM901"]
    number, shown = explanation.conclusion.causes[0].evidence[0]
    assert number == 2
    assert "UR_RESULT_ERROR_OUT_OF_RESOURCES" in shown
    assert len(shown) <= 450


def test_a_line_without_an_end_is_read_in_pieces() -> None:
    source = Source(io.BytesIO(b"a" * (5 * LONGEST) + b"\nb\n"))
    blocks = list(source.blocks())
    assert source.lines == 2
    assert max(len(block.data) for block in blocks) <= LONGEST + CHUNK
    assert [block.first for block in blocks][-1] in {1, 2}


@pytest.mark.parametrize("kind", ["healthy server", "unique lines, all with errors", "one line"])
def test_memory_stays_bounded(kind: str) -> None:
    """120 MB of each kind in a process of its own stay far below the size of the log."""
    code = (
        "import sys, json; sys.path[:0] = [sys.argv[1], sys.argv[1] + '/benchmarks']\n"
        "import explain as benchmark\n"
        "from xpufp8.explain import explain_stream\n"
        "stream = benchmark.Repeated(benchmark.KINDS[sys.argv[2]](), int(sys.argv[3]) * 1_000_000)\n"
        "found = explain_stream(stream, name='x')\n"
        # Not ru_maxrss, which a child inherits from the process that forked it: a large test runner would count.
        "peak = next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM')) // 1024\n"
        "print(json.dumps([peak, found.size, [cause.code for cause in found.conclusion.causes]]))\n"
    )
    megabytes = 12 if kind == "one line" else 120
    child = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), kind, str(megabytes)], capture_output=True, text=True, check=True, timeout=300
    )
    peak, size, found = json.loads(child.stdout)
    assert size >= megabytes * 1_000_000
    assert peak <= 150
    assert found == ["MEM901"]


HOSTILE = (
    "\x1b[31mRuntimeError: level_zero backend failed with error: 40\x1b[0m (UR_RESULT_ERROR_OUT_OF_RESOURCES) [bold red]big[/bold red] [/]"
    " \x1b]0;title\x07\x1b[2J\x9b31m \u202egnirts \x00 [link=http://x]x[/link] :boom: <script>alert(1)</script>\n"
)


def test_nothing_in_a_log_acts_on_the_terminal() -> None:
    report = to_report(explain(HOSTILE.encode()))
    shown = report.findings[0].evidence[0].observed
    assert not UNSAFE.search(shown)
    assert "[bold red]big[/bold red] [/]" in shown
    for rendered in (terminal.render(report), json_report.render(report)):
        assert "\x1b" not in rendered
        assert "[bold red]big[/bold" in " ".join(rendered.split())


def test_secrets_of_a_log_are_not_repeated() -> None:
    log = (
        "HF_TOKEN=hf_abcdefghijklmnopqrstuvwx vllm serve m --api-key sk-verysecretkey123 --port 1\n"
        "RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES) https://user:hunter2@host/x "
        "HF_TOKEN=hf_abcdefghijklmnopqrstuvwx\n"
    )
    text = to_report(explain(log.encode())).model_dump_json()
    for secret in ("hf_abcdefghijklmnopqrstuvwx", "sk-verysecretkey123", "hunter2"):
        assert secret not in text


PARTS = [
    CRASH.encode(), b"Traceback (most recent call last):\n", b'  File "x", line 1, in y\n', b"\x1f\x8b", b"\r", b"\n\n", b'{"log": "',
    b"(Worker pid=1) ERROR 01-01 00:00:00 [a.py:1] ",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=200), st.sampled_from(PARTS)), max_size=30))
def test_no_bytes_break_the_reading(parts: list[bytes]) -> None:
    report = to_report(explain(b"".join(parts)))
    for finding in report.findings:
        for evidence in finding.evidence:
            assert not UNSAFE.search(evidence.observed)
            assert re.fullmatch(r"line \d+", evidence.where)
