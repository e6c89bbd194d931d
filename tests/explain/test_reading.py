"""Logs of any shape and size: compressed, wide, broken, endless, hostile. Memory stays bounded and nothing reaches the terminal."""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpufp8.errors import UsageError
from xpufp8.explain import Explanation, exit_code, explain_stream, reader, sieve, to_report
from xpufp8.explain.reader import CHUNK, LONGEST, Source
from xpufp8.output import Format, json_report, renderer, terminal

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


NOISE = "".join(f"INFO step {number} {number * 7919 % 1009:x}\n" for number in range(4000))


def damaged(text: str, kind: str) -> bytes:
    """A gzip file of the text that lost its end, or has a wrong byte in or after its last quarter."""
    whole = bytearray(gzip.compress(text.encode()))
    if kind == "cut":
        return bytes(whole[: len(whole) * 3 // 4])
    if kind == "trailing":
        return bytes(whole) + b"not gzip"
    at = {"middle": len(whole) * 3 // 4, "checksum": len(whole) - 6}[kind]
    whole[at : at + 4] = b"\xff" * 4
    return bytes(whole)


@pytest.mark.parametrize("kind", ["cut", "middle", "checksum", "trailing"])
def test_a_damaged_gzip_file_is_read_as_far_as_it_goes_and_is_never_healthy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK", 4096)  # several pieces of input
    found = explain(damaged(CRASH + NOISE, kind))
    assert codes(found) == ["MEM901"]
    assert found.lines > 1000
    quiet = explain(damaged(NOISE, kind))
    assert (quiet.outcome, exit_code(quiet), to_report(quiet).verdict) == ("unknown", 3, "unknown")
    for explanation in (found, quiet):
        assert "gzip stream" in explanation.damage
        for chosen in Format:
            assert "gzip stream" in renderer(chosen)(to_report(explanation)).replace("\n", " ")


def test_a_small_damaged_gzip_file_is_not_lost_whole() -> None:
    """All of it is one piece for the unpacker, which keeps what came before the damage to itself."""
    lines = CRASH + "".join(f"{number * 7919 % 100_003:x}\n" for number in range(3000))
    packed = bytearray(gzip.compress(lines.encode()))
    packed[-600:-590] = b"\xff" * 10
    assert codes(explain(bytes(packed))) == ["MEM901"]


# Named, because gzip writes the time: two workers of one run would collect different tests.
@pytest.mark.parametrize(
    "data",
    [b"", gzip.compress(b""), b"\x1f\x8b", b"\x1f\x8bplain text after two odd bytes\n"],
    ids=["empty", "empty-gzip", "magic", "magic-and-text"],
)
def test_nothing_read_is_never_healthy(data: bytes) -> None:
    explanation = explain(data)
    assert (explanation.outcome, exit_code(explanation), explanation.size) == ("unknown", 3, 0)
    assert explanation.damage
    for chosen in Format:
        text = renderer(chosen)(to_report(explanation))
        assert '"servable"' not in text
        assert ("empty" in text) or ("gzip stream" in text)


def tar(text: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("server.log")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    return buffer.getvalue()


def zipped(text: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("server.log", text)
    return buffer.getvalue()


NO_LOG = {
    "xz": lzma.compress(CRASH.encode()), "bz2": bz2.compress(CRASH.encode()), "zip": zipped(CRASH.encode()), "tar": tar(CRASH.encode()),
    "zstd": b"\x28\xb5\x2f\xfd" + bytes(range(256)), "tar.gz": gzip.compress(tar(CRASH.encode())),
    "xz.gz": gzip.compress(lzma.compress(b"x")),
    "gz.gz": gzip.compress(gzip.compress(CRASH.encode())), "elf": Path("/bin/ls").read_bytes()[:50_000],
    "random": hashlib.shake_256(b"x").digest(5000), "random.gz": gzip.compress(hashlib.shake_256(b"y").digest(500_000)),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(NO_LOG))
def test_what_is_no_log_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="not a log") as caught:
        explain(NO_LOG[kind])
    assert str(caught.value).startswith("LOG test: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8", "gbk", "shift-jis", "utf-16-le", "utf-32-le", "utf-32"])
def test_text_of_any_encoding_is_a_log(encoding: str) -> None:
    words = {"latin-1": "Größe überschritten ", "utf-8": "模型 ", "gbk": "模型加载失败 ", "shift-jis": "失敗しました "}.get(
        encoding, ""
    )
    assert codes(explain((words + CRASH + TALK * 5).encode(encoding))) == ["MEM901"]


def test_the_command_says_it_in_one_line_or_with_code_3(xpufp8: Any, tmp_path: Path) -> None:
    for name, code in (("xz", 2), ("random", 2), ("empty", 3)):
        (tmp_path / name).write_bytes(NO_LOG.get(name, b""))
        done = xpufp8("explain", tmp_path / name)
        assert done.returncode == code, done.stdout + done.stderr
        assert code == 3 or (done.stdout == "" and len(done.stderr.splitlines()) == 1)


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


@pytest.mark.parametrize("known", [True, False], ids=["known failure", "unknown failure"])
def test_secrets_of_the_lines_that_are_quoted_are_not_repeated(known: bool) -> None:
    """As vLLM and its surroundings print them, in the line that the report quotes as evidence, in every format."""
    said = (
        "Namespace(model='m', api_key='S3kretNS2', hf_token='S3kretNS3', max_tokens=32) header x-api-key: S3kretHDR "
        "aws_secret_access_key = S3kretAWS glpat-S3kretGITLAB1234567890"
    )
    error = f"{CRASH.strip() if known else 'ValueError: bad args'} {said}\n"
    report = to_report(explain(f'Traceback (most recent call last):\n  File "/x.py", line 1, in f\n    run()\n{error}'.encode()))
    assert (report.verdict == "not-servable") == known
    for chosen in Format:
        text = renderer(chosen)(report)
        assert "S3kret" not in text
    assert "max_tokens=32" in report.model_dump_json()


PARTS = [
    CRASH.encode(), b"Traceback (most recent call last):\n", b'  File "x", line 1, in y\n', b"\x1f\x8b", b"\r", b"\n\n", b'{"log": "',
    b"(Worker pid=1) ERROR 01-01 00:00:00 [a.py:1] ",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=200), st.sampled_from(PARTS)), max_size=30))
def test_no_bytes_break_the_reading(parts: list[bytes]) -> None:
    try:
        report = to_report(explain(b"".join(parts)))
    except UsageError as refused:
        if "not a log" not in str(refused):
            raise
        return
    for finding in report.findings:
        for evidence in finding.evidence:
            assert not UNSAFE.search(evidence.observed)
            assert re.fullmatch(r"line \d+", evidence.where)
