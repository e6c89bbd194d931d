"""What verify concludes from answers, and how it asks: against a real HTTP server that answers as it is told."""

from __future__ import annotations

import json
import math
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from xpufp8.errors import UsageError
from xpufp8.verify import check_url, collapse, compare, differ, divergence, finite, flat
from xpufp8.verify_client import Completion

VARIED = [f"token_id:{i}" for i in range(32)]


def answer(tokens: list[str] | None = None, logprob: float | None = -0.5, spread: float = 3.0) -> Completion:
    tokens = tokens or VARIED
    return Completion(tokens, [logprob] * len(tokens), [{t: -0.5, "token_id:900": -0.5 - spread} for t in tokens])


@pytest.mark.parametrize(
    ("value", "expected"), [(-0.5, "pass"), (math.nan, "fail"), (-math.inf, "fail"), (None, "fail"), (0.7, "fail")]
)
def test_log_probabilities_are_numbers_up_to_zero(value: float | None, expected: str) -> None:
    assert finite([answer(logprob=value)]).observation == expected


def test_flat_logits() -> None:
    assert flat([answer(spread=0.0)]).observation == "fail"
    assert flat([answer()]).observation == "pass"
    assert flat([Completion(["a"], [-1.0])]).observation == "unknown"


def test_one_token_for_ever_is_a_collapse_and_a_single_loop_is_none() -> None:
    loop = answer(["token_id:0"] * 32)
    assert collapse([loop] * 6).observation == "fail"
    assert collapse([loop, loop, loop, answer(), answer(), answer()]).observation == "fail"
    assert collapse([loop, *[answer()] * 5]).observation == "pass"
    # Different tokens repeated by different prompts are a weak model, not a broken one.
    assert collapse([answer([f"token_id:{i}"] * 32) for i in range(6)]).observation == "pass"


def test_answers_may_part_at_a_tie_and_nowhere_else() -> None:
    first = Completion(["a", "b"], [-0.1, -0.7], [{"a": -0.1, "x": -3.0}, {"b": -0.7, "c": -0.8}])
    assert differ(first, Completion(["a", "c"], [-0.1, -0.7])) is None
    assert differ(first, Completion(["x", "c"], [-0.1, -0.7])) == "token 1 is 'x' instead of 'a'"
    assert differ(first, Completion(["a", "z"], [-0.1, -0.7])) == "token 2 is 'z' instead of 'b'"


def test_divergence_against_the_formula() -> None:
    p, q = [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]
    ours = {str(i): math.log(v) for i, v in enumerate(p)}
    theirs = {str(i): math.log(v) for i, v in enumerate(q)}
    assert divergence(ours, theirs) == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    assert divergence(ours, ours) == pytest.approx(0, abs=1e-6)
    # What only one side lists counts with the rest: 0.3 against 0.5.
    assert divergence(ours, {"0": math.log(0.5)}) == pytest.approx(0.7 * math.log(1.4) + 0.3 * math.log(0.6))


def test_a_reference_is_agreed_with_where_its_choice_is_clear() -> None:
    clear, tie = {"a": -0.1, "b": -3.0}, {"a": -0.7, "b": -0.75}
    assert compare([[clear] * 20], [[clear] * 20]).observation == "pass"
    assert compare([[clear] * 20], [[{"a": -3.0, "b": -0.1}] * 20]).observation == "fail"
    assert compare([[tie] * 4, [clear] * 4], [[{"a": -0.75, "b": -0.7}] * 4, [clear] * 4]).observation == "pass"
    assert compare([[tie]], [[tie]]).observation == "unknown"


@pytest.mark.parametrize(
    ("typed", "base"),
    [("http://h:8000/v1/", "http://h:8000"), ("h:8000", "http://h:8000"), ("https://h/proxy/v1", "https://h/proxy")],
)
def test_addresses_as_people_type_them(typed: str, base: str) -> None:
    assert check_url(typed) == base


@pytest.mark.parametrize("typed", ["ftp://h", "http://", "http://user:secret@h"])
def test_what_is_no_address_is_refused_without_repeating_a_secret(typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_url(typed)
    assert "secret" not in str(caught.value)


@contextmanager
def serving(reply: Callable[[dict[str, Any]], Any]) -> Iterator[tuple[str, list[str]]]:
    """A server whose completions are what ``reply`` makes of the request; yields its address and the keys it was given."""
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def send(self, data: Any) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(data).encode())

        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization", ""))
            self.send({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                self.send_error(404)
                return
            count = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
            self.send({"choices": [{"index": i, **reply(body)} for i in reversed(range(count))]})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", keys
    finally:
        server.shutdown()


def choice(tokens: list[str]) -> dict[str, Any]:
    top = [{t: -0.2, "token_id:900": -4.0} for t in tokens]
    return {"text": "", "logprobs": {"tokens": tokens, "token_logprobs": [-0.2] * len(tokens), "top_logprobs": top}}


def test_a_server_that_answers_and_knows_no_token_ids_is_right_and_not_compared(xpufp8: Any, tmp_path: Path) -> None:
    (tmp_path / "ref.json").write_text(json.dumps({"model": "m", "tokens": [[1, 2]], "scored": [[{"1": -0.1, "2": -3.0}]]}))
    with serving(lambda body: choice(VARIED)) as (url, keys):
        done: subprocess.CompletedProcess[str] = xpufp8("verify", url, "--reference", tmp_path / "ref.json", "--api-key", "k3y")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unknown  agrees with the reference" in done.stdout
    assert done.stdout.endswith("Verdict: right\n")
    assert keys == ["Bearer k3y"]
    assert "k3y" not in done.stdout


@pytest.mark.parametrize(("token", "says"), [("token_id:0", "over and over")])
def test_exclamation_marks_for_ever_are_wrong(xpufp8: Any, token: str, says: str) -> None:
    with serving(lambda body: choice([token] * 32)) as (url, _):
        done = xpufp8("verify", url, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert {c["name"]: c["observation"] for c in found["checks"]}["no collapse"] == "fail"
    assert says in next(c["detail"] for c in found["checks"] if c["name"] == "no collapse")


def test_an_answer_that_changes_from_call_to_call_is_wrong(xpufp8: Any) -> None:
    calls = iter(range(10_000))
    with serving(lambda body: choice([f"token_id:{next(calls)}", *VARIED])) as (url, _):
        done = xpufp8("verify", url)
    assert done.returncode == 1
    assert "FAIL     same answer again: prompt 1: token 1 is" in done.stdout
    assert "FAIL     same answer in a batch" in done.stdout


def test_no_server_and_no_reference_file(xpufp8: Any, tmp_path: Path) -> None:
    assert xpufp8("verify", "http://127.0.0.1:9").returncode == 3
    (tmp_path / "bad.json").write_text("[]")
    with serving(lambda body: choice(VARIED)) as (url, _):
        done = xpufp8("verify", url, "--reference", tmp_path / "bad.json")
    assert done.returncode == 2
    assert "is no file that xpufp8 verify --save wrote" in done.stderr
