"""No secret leaves the probe, and nothing that is no secret is hidden."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.redact import REDACTED, redact, redact_argv, redact_env

SECRET = "s3cr3t-Value.42"


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve M --api-key {SECRET} --port 8000",
        f"vllm serve M --api-key={SECRET}",
        f"vllm serve M --api-key '{SECRET} and more'",
        f"vllm serve M --api-key first {SECRET} --port 8000",
        f"--hf-token {SECRET}",
        f"--hf_token={SECRET}",
        f"https://user:{SECRET}@host/path",
        f"pip install --index-url https://{SECRET}@host/simple torch",
        f"git+ssh://git:{SECRET}@host/x.git",
        f"HF_TOKEN={SECRET} vllm serve M",
        f"export MY_API_KEY='{SECRET}'",
        f"DB_PASSWORD={SECRET};next",
        f"non-default args: {{'api_key': ['{SECRET}', 'b'], 'port': 8000}}",
        f'{{"hf_token": "{SECRET}", "port": 1}}',
        f"Authorization: Bearer {SECRET}",
        f"http://host/v1?api_key={SECRET}&x=1",
        "token hf_AbCdEfGhIjKlMnOpQrSt was refused",
        "key sk-proj-0123456789abcdefghij was refused",
        "ghp_0123456789abcdefghijklmnop",
    ],
)
def test_secrets_of_every_form_are_hidden(text: str) -> None:
    shown = redact(text)
    assert REDACTED in shown
    assert not any(part in shown for part in (SECRET, "AbCdEfGhIjKlMnOpQrSt", "0123456789abcdefghij"))
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve M --tokenizer t --max-num-batched-tokens 8192 --tokenizer-mode auto",
        '{"num_key_value_heads": 8, "eos_token": "</s>", "image_token": "<image>", "hf_token": null}',
        "non-default args: {'api_key': None, 'kv_cache_dtype': 'fp8'}",
        "KeyError: <PlatformEnum.XPU: 4>",
        "torch==2.13.0 at /opt/venv/lib/python3.12/site-packages",
        "see https://github.com/vllm-project/vllm/issues/1 and user@host",
        "num_hidden_layers=32 head_dim=128",
        "",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "VLLM_API_KEY", "aws_secret_access_key", "MY_PASSWORD", "KEYRING", "OPENAI_API_KEY_2"]
)
def test_variables_that_are_secret_by_name(name: str) -> None:
    assert redact_env(name, SECRET) == REDACTED
    assert redact_env(name, "") == ""


def test_variables_that_are_not_keep_their_value() -> None:
    assert redact_env("CCL_ATL_TRANSPORT", "ofi") == "ofi"
    assert redact_env("HTTP_PROXY", f"http://me:{SECRET}@proxy:3128") == f"http://{REDACTED}@proxy:3128"


def test_a_command_line_keeps_its_form() -> None:
    argv = [
        "vllm",
        "serve",
        "M",
        "--api-key",
        SECRET,
        "second",
        "--port",
        "1",
        f"--hf-token={SECRET}",
        "--hf-token",
        "--seed",
        "3",
    ]
    argv += ["--kv-transfer-config", f'{{"password": "{SECRET}", "port": 1}}', "-tp", "2", "--api-key"]
    shown = redact_argv(argv)
    assert shown == [
        "vllm", "serve", "M", "--api-key", REDACTED, REDACTED, "--port", "1", f"--hf-token={REDACTED}", "--hf-token", "--seed", "3",
        "--kv-transfer-config", f'{{"password": "{REDACTED}", "port": 1}}', "-tp", "2", "--api-key",
    ]  # fmt: skip


@given(st.text(alphabet="abcXYZ-_=:/@'\"[]{}, \\?&\n<>0", max_size=120))
def test_redacting_twice_changes_nothing(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@given(st.lists(st.text(alphabet="abkey-=_ tokn", max_size=14), max_size=8))
def test_no_token_of_a_command_line_is_lost(argv: list[str]) -> None:
    assert len(redact_argv(argv)) == len(argv)


SECRETS = st.text(alphabet="ABCDEFGHJKLMNPQRSTUVWXYZ23456789", min_size=8, max_size=40)


@given(
    SECRETS,
    st.sampled_from(["--api-key {}", "--api-key={}", "'api_key': '{}'", "http://u:{}@h/", "X_TOKEN={}", "?token={}"]),
    st.text("xy z", max_size=9),
)
def test_whatever_the_secret_is(secret: str, form: str, around: str) -> None:
    assert secret not in redact(f"{around} {form.format(secret)} {around}")
