"""What verify concludes from answers, and how it asks: against a real HTTP server that answers as it is told."""

from __future__ import annotations

import json
import math
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from xpufp8.errors import UsageError
from xpufp8.verify import Verification, verify
from xpufp8.verify_client import Completion
from xpufp8.verify_judge import answered, collapse, compare, differ, divergence, finite, flat
from xpufp8.verify_reference import check_url

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


def test_answers_that_are_too_short_to_judge_are_no_answers() -> None:
    empty, short, full = Completion([], []), answer(["a"] * 3), answer()
    assert answered([full] * 6).observation == "pass"
    assert answered([full, full, full, short, short, short]).observation == "pass"
    for found in ([empty] * 6, [short] * 6, [full] * 5 + [empty], [full, full, short, short, short, short]):
        assert answered(found).observation == "unknown"
    assert collapse([short] * 6).observation == "unknown"


def test_an_answer_that_ends_before_the_other_is_another_answer() -> None:
    assert differ(Completion(["a", "b"], []), Completion(["a"], [])) == "1 tokens instead of 2"
    assert differ(Completion(["a"], []), Completion([], [])) == "0 tokens instead of 1"


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
    assert compare([[clear] * 20], [[clear] * 19]).observation == "unknown"
    assert compare([[clear] * 20], [[{"a": math.nan, "b": math.nan}] * 20]).observation == "fail"


@pytest.mark.parametrize(
    ("typed", "base"),
    [("http://h:8000/v1/", "http://h:8000"), ("h:8000", "http://h:8000"), ("https://h/proxy/v1", "https://h/proxy")],
)
def test_addresses_as_people_type_them(typed: str, base: str) -> None:
    assert check_url(typed) == base


@pytest.mark.parametrize(
    "typed",
    ["ftp://h", "http://", "http://user:secret@h", "ftp://user:secret@h", "http://[::1", "http://localhost:abc", "http://local host/",
     "http://h:99999", "http://h:0", "", "http://h\n/", "http://user:secret@[::1"],
)  # fmt: skip
def test_what_is_no_address_is_refused_without_repeating_a_secret(typed: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_url(typed)
    assert "secret" not in str(caught.value)


@contextmanager
def serving(reply: Callable[[dict[str, Any]], Any], accepts: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server whose completions are what ``reply`` makes of a request: a choice, or an ``Odd`` answer.

    Yields its address and the keys it was given; with ``accepts`` it wants that one.
    """
    keys: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def send(self, data: Any) -> None:
            odd = data if isinstance(data, Odd) else Odd(json.dumps(data).encode())
            if odd.raw:
                self.wfile.write(odd.body)
                self.close_connection = True
                return
            self.send_response(odd.status)
            for name, value in {"Content-Length": str(len(odd.body)), **odd.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(odd.body)
            self.close_connection = "Content-Length" in odd.headers

        def allowed(self) -> bool:
            keys.append(self.headers.get("Authorization", ""))
            return accepts is None or keys[-1] == f"Bearer {accepts}"

        def do_GET(self) -> None:
            if not self.allowed():
                self.send(Odd(b'{"error": "no"}', 401))
                return
            odd = reply({}) if self.path.startswith("/odd") else None
            self.send(odd if odd is not None else {"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            allowed = self.allowed()
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions" or not allowed:
                self.send(Odd(b"{}", 404 if allowed else 401))
                return
            count = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
            made = [reply(body) for _ in range(count)]
            self.send(
                made[0]
                if isinstance(made[0], Odd)
                else {
                    "choices": [{"index": i, **made[i]} if isinstance(made[i], dict) else made[i] for i in reversed(range(count))]
                }
            )

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", keys
    finally:
        server.shutdown()
        server.server_close()


@dataclass
class Odd:
    """An answer that is no completion."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bool = False
    """The body is all that is sent: no status line."""


def choice(tokens: list[str]) -> dict[str, Any]:
    top = [{t: -0.2, "token_id:900": -4.0} for t in tokens]
    return {"text": "", "logprobs": {"tokens": tokens, "token_logprobs": [-0.2] * len(tokens), "top_logprobs": top}}


def observed(found: Verification) -> dict[str, str]:
    return {c.name: c.observation for c in found.checks}


REFERENCE = {"model": "m", "tokens": [[1, 2]], "scored": [[{"1": -0.1, "2": -3.0}]]}


def test_a_server_that_knows_no_token_ids_is_judged_alone_and_not_by_a_reference(xpufp8: Any, tmp_path: Path) -> None:
    (tmp_path / "ref.json").write_text(json.dumps(REFERENCE))
    with serving(lambda body: choice(VARIED)) as (url, keys):
        done: subprocess.CompletedProcess[str] = xpufp8("verify", url, "--reference", tmp_path / "ref.json", "--api-key", "k3y")
        assert verify(url).verdict == "right"
    assert done.returncode == 3, done.stdout + done.stderr
    assert "unknown  agrees with the reference: cannot be compared" in done.stdout
    assert "ok       same answer again" in done.stdout
    assert done.stdout.endswith("Verdict: unknown\n")
    assert keys[0] == "Bearer k3y"
    assert "k3y" not in done.stdout


@pytest.mark.parametrize(("token", "says"), [("token_id:0", "over and over")])
def test_exclamation_marks_for_ever_are_wrong(xpufp8: Any, token: str, says: str) -> None:
    with serving(lambda body: choice([token] * 32)) as (url, _):
        done = xpufp8("verify", url, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["verdict"] == "wrong"
    assert {c["name"]: c["observation"] for c in found["checks"]}["no collapse"] == "fail"
    assert says in next(c["detail"] for c in found["checks"] if c["name"] == "no collapse")


def test_a_server_without_log_probabilities_is_judged_by_its_texts() -> None:
    with serving(lambda body: {"text": "!" * 32}) as (url, _):
        found = verify(url)
    assert (observed(found)["no collapse"], found.verdict) == ("fail", "wrong")
    with serving(lambda body: {"text": " ".join(map(str, range(32)))}) as (url, _):
        found = verify(url)
    assert (observed(found)["log-probabilities"], found.verdict) == ("unknown", "right")


def test_an_answer_that_changes_from_call_to_call_is_wrong(xpufp8: Any) -> None:
    calls = iter(range(10_000))
    with serving(lambda body: choice([f"token_id:{next(calls)}", *VARIED])) as (url, _):
        done = xpufp8("verify", url)
    assert done.returncode == 1
    assert "FAIL     same answer again: prompt 1: token 1 is" in done.stdout
    assert "FAIL     same answer in a batch" in done.stdout


def test_numbers_that_json_does_not_know_are_wrong() -> None:
    nan = choice(VARIED)
    nan["logprobs"]["token_logprobs"] = [math.nan] * 32
    with serving(lambda body: nan) as (url, _):
        found = verify(url)
    assert (observed(found)["log-probabilities"], found.exit_code()) == ("fail", 1)


PYTHON = re.compile(r"NoneType|'str'|'int'|'list'|'dict'|' object|object is|Error\b|Errno|attribute|subscript|iterable")
NO_COMPLETION: dict[str, Any] = {
    "empty": {"text": ""}, "no text": {}, "null text": {"text": None}, "number as text": {"text": 5}, "a text": "x", "nothing": None,
    "logprobs text": {"text": "a", "logprobs": "x"}, "logprobs list": {"text": "a", "logprobs": [1]},
    "tokens number": {"text": "a", "logprobs": {"tokens": 5}}, "tokens numbers": {"text": "a", "logprobs": {"tokens": [5]}},
    "logprob text": {"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": ["x"]}},
    "top text": {"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": ["x"]}},
    "top null": {"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"a": None}]}},
    "one token": choice(["token_id:1"]),
    "401": Odd(b'{"error": "no key"}', 401), "403": Odd(b"", 403), "404": Odd(b"not here", 404), "503": Odd(b"overloaded", 503),
    "deep": Odd(b"[" * 200_000), "html": Odd(b"<html>"), "no unicode": Odd(b"\xff\xfe"), "no choices": Odd(b'{"choices": []}'),
    "choices null": Odd(b'{"choices": null}'), "a list": Odd(b"[1]"), "null": Odd(b"null"), "no bytes": Odd(b""),
    "no http": Odd(b"garbage\r\n\r\n", raw=True), "hung up": Odd(b"", raw=True), "cut": Odd(b'{"ch', 200, {"Content-Length": "999"}),
    "redirected in a circle": Odd(b"", 302, {"Location": "/odd/v1/models", "Content-Length": "0"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(NO_COMPLETION))
def test_what_is_no_completion_gives_no_verdict_in_plain_words(kind: str) -> None:
    with serving(lambda body: NO_COMPLETION[kind]) as (url, _):
        found = verify(url)
        assert found.checks[0].name == "answers"
        assert (found.checks[0].observation, found.verdict, found.exit_code()) == ("unknown", "unknown", 3)
        if isinstance(NO_COMPLETION[kind], Odd):  # the same in place of the list of models
            early = verify(f"{url}/odd")
            assert (observed(early), early.exit_code()) == ({"reachable": "unknown"}, 3)
            found = found.model_copy(update={"checks": [*found.checks, *early.checks]})
    assert not PYTHON.search(found.text())
    if kind in ("401", "403"):
        assert all("give --api-key" in c.detail for c in found.checks)


@pytest.mark.parametrize("models", [{}, {"data": None}, {"data": "abc"}, {"data": []}, {"data": [1]}, {"data": [{"id": None}]}])
def test_a_list_of_models_without_one(models: dict[str, Any]) -> None:
    with serving(lambda body: models) as (url, _):
        found = verify(f"{url}/odd")
    assert "names no model" in found.checks[0].detail
    assert found.exit_code() == 3


def test_a_server_that_stops_answering_is_not_called_right() -> None:
    calls = iter(range(10_000))
    with serving(lambda body: choice(VARIED) if next(calls) < 6 else Odd(b"", 500)) as (url, _):
        found = verify(url)
    assert (observed(found)["answers"], observed(found)["same answer again"], found.exit_code()) == ("pass", "unknown", 3)


def test_the_key_goes_to_the_named_server_alone() -> None:
    with serving(lambda body: choice(VARIED)) as (other, seen):
        onward = Odd(b"", 302, {"Location": f"{other}/v1/models", "Content-Length": "0"})
        with serving(lambda body: onward) as (url, _):
            found = verify(f"{url}/odd", key="k3y-of-one")
            assert other in found.checks[0].detail
            assert found.exit_code() == 3
        assert seen == []
        with serving(lambda body: choice(VARIED)) as (url, own):
            verify(url, reference=other, key="k3y-of-one")
            assert set(own) == {"Bearer k3y-of-one"}
            assert set(seen) == {""}
            verify(url, reference=other, key="k3y-of-one", reference_key="another")
            assert set(seen) == {"", "Bearer another"}
            verify(url, reference=f"{url}/v1", key="k3y-of-one")
            assert set(own) == {"Bearer k3y-of-one"}


def test_a_reference_that_wants_a_key_says_which_option() -> None:
    with serving(lambda body: choice(VARIED)) as (url, _), serving(lambda body: choice(VARIED), accepts="x") as (other, _):
        found = verify(url, reference=other, key="k3y-of-one")
    assert "give --reference-api-key" in found.checks[-1].detail
    assert found.exit_code() == 3


@pytest.mark.parametrize("key", ["k3y\nX: y", "k3y\r", "k3y\0", "k3y\u2026"])
def test_a_key_that_no_header_takes_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        verify("http://127.0.0.1:9", key=key)
    assert "--api-key" in str(caught.value)
    assert "k3y" not in str(caught.value)
    with pytest.raises(UsageError, match="--reference-api-key"):
        verify("http://127.0.0.1:9", reference="http://127.0.0.1:10", reference_key=key)


NO_REFERENCE = [
    "[]", "{}", "null", "{", '{"tokens": 5, "scored": "x"}', '{"tokens": [[1]], "scored": [["x"]]}', '{"tokens": [], "scored": []}',
    '{"tokens": [[1, 2]], "scored": [[]]}', '{"tokens": [[1, 2]], "scored": [[{"1": "x", "2": -1}]]}',
    '{"tokens": [[1, 2]], "scored": [[{}]]}',
    '{"tokens": [["a", "b"]], "scored": [[{"1": -0.1, "2": -3.0}]]}', '{"tokens": [[1, 2], [3, 4]], "scored": [[{"1": -0.1, "2": -3.0}]]}',
    '{"tokens": [[1, 2]], "scored": [[{"1": NaN, "2": -3.0}]]}', "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("text", NO_REFERENCE, ids=range(len(NO_REFERENCE)))
def test_a_file_that_save_did_not_write_is_refused_before_anything_is_asked(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with serving(lambda body: choice(VARIED)) as (url, keys), pytest.raises(UsageError, match="verify --save wrote"):
        verify(url, reference=str(tmp_path / "bad.json"))
    assert keys == []


def test_a_missing_reference_file_is_no_host_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "./ref.json",
        "ref.json",
        "ref",
        str(tmp_path / "ref.json"),
        "a/b:c.json",
        str(tmp_path),
        "http://[::1",
        "http://h:abc",
    ):
        with pytest.raises(UsageError, match="--reference "):
            verify("http://127.0.0.1:9", reference=name)
    for address in ("http://127.0.0.1:9", "127.0.0.1:9", "localhost:9/v1"):
        with serving(lambda body: choice(VARIED)) as (url, _):
            found = verify(url, reference=address)
        assert "the reference cannot be asked: no answer: Connection refused" in found.checks[-1].detail
        assert found.exit_code() == 3


def test_a_path_that_cannot_be_saved_to_is_known_before_anything_is_asked(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "x.json"):
        with serving(lambda body: choice(VARIED)) as (url, keys), pytest.raises(UsageError, match="--save"):
            verify(url, save=path)
        assert keys == []


def test_a_verdict_is_not_lost_when_nothing_can_be_saved(xpufp8: Any, tmp_path: Path) -> None:
    with serving(lambda body: choice(VARIED)) as (url, _):
        done = xpufp8("verify", url, "--save", tmp_path / "x.json", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["verdict"]) == (3, "right")
    assert "nothing was written" in found["checks"][-1]["detail"]
    assert not (tmp_path / "x.json").exists()


def test_no_server_and_no_reference_file(xpufp8: Any, tmp_path: Path) -> None:
    assert xpufp8("verify", "http://127.0.0.1:9").returncode == 3
    (tmp_path / "bad.json").write_text("[]")
    with serving(lambda body: choice(VARIED)) as (url, _):
        done = xpufp8("verify", url, "--reference", tmp_path / "bad.json")
    assert done.returncode == 2
    assert "is no file that xpufp8 verify --save wrote" in done.stderr
