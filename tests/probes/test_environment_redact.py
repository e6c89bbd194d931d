"""No secret leaves the probe, and nothing that is no secret is hidden."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.redact import REDACTED, redact, redact_argv, redact_env, redact_json

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


HIDDEN = [
    "args: Namespace(host=None, api_key='{}', hf_token='{}', ssl_keyfile=None)", "AsyncEngineArgs(model='m', api_key=['{}'])",
    "Config(hf_token=SecretStr('{}'))", "api_key={}", "api_key: {}", "engine.api_key = '{}'", "x-api-key: {}", "X-Api-Key: {}",
    "Authorization: token {}", "Authorization: {}", "'Authorization': 'Bearer {}'", "proxy-authorization: Basic {}",
    "password: {}", "password={}", "db_password='{}'", "passphrase={}", "  secret: '{}'", "userPassword={},port=1",
    "HF_TOKEN: {}", "export HF_TOKEN='{} x'", "HF_TOKEN = {}", "DB_PASS={}", "HF_AUTH={}", "-e HF_TOKEN={}", "vllm_api_key={}",
    "aws_secret_access_key = {}", "secret_access_key='{}'", "AccountName=x;AccountKey={};EndpointSuffix=y", "accessToken: {}",
    "https://user:pa/{}@host/x", "postgres://u:a@{}@host:5432/db", "redis://:{}@host", "?X-Amz-Signature={}", "#access_token={}",
    "http://h/x?AWSAccessKeyId=a&X-Amz-Security-Token={}&y=1", "https://h/x?sv=2020&sig={}",
    '{{\\"api_key\\": \\"{}\\"}}', '{{\\\\\\"hf_token\\\\\\":\\\\\\"{}\\\\\\", \\\\\\"x\\\\\\": 1}}', "{{'password': '{}'}}",
    '{{"token":"{}"}}',
    "--served-model-name x --api-key -{}", "--api-key\n{}", "--api-key \\\n  {}", "--hf-overrides.token={}", "--hf-overrides.api_key {}",
    "['vllm', 'serve', 'm', '--api-key', '{}', '--port', '1']", 'cmd=["--hf-token", "{}"]', "Bearer {}", "bearer: {}",
]  # fmt: skip
"""How secrets stand in logs, settings and addresses. The braces hold the secret."""


@pytest.mark.parametrize("form", HIDDEN)
@pytest.mark.parametrize("secret", ["S3kretNS2", "Zq8-xK_4tPa", "0123456789abcdef0123456789abcdef"])
def test_no_form_shows_the_secret(form: str, secret: str) -> None:
    text = form.replace("{{", "{").replace("}}", "}").replace("{}", secret)
    shown = redact(text)
    assert secret not in shown
    assert REDACTED in shown
    assert redact(shown) == shown
    # Nothing but the value goes: every other word of the text is still there.
    assert all(word in shown for word in ("Namespace", "host=None", "ssl_keyfile=None") if word in text)


@pytest.mark.parametrize(
    "secret",
    [
        "AIzaSyA-1234567890abcdefghijklmnopqrstu", "glpat-abcdefghijklmnopqrst", "ASIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcDEF", "nvapi-abcdefghijklmnopqrst", "sk_live_abcdefghijkl",
        "xoxb-0123456789-abc",
    ],
)  # fmt: skip
def test_secrets_that_are_known_by_their_own_form(secret: str) -> None:
    assert redact(f"refused: {secret} (try again)") == f"refused: {REDACTED} (try again)"


HEALTHY = [
    "max_tokens=32", "num_tokens: 5", "tokenizer='x'", "token_ids: [1, 2]", "--max-num-batched-tokens 8192", "bos_token: <s>",
    "SamplingParams(n=1, max_tokens=16, stop_token_ids=[2], logprobs=None, skip_special_tokens=True)",
    "Namespace(model='m', api_key=None, hf_token=None, tokenizer_mode='auto', ssl_keyfile='/etc/x.pem', max_num_batched_tokens=8192)",
    '  File "x.py", line 3, in f\n    client = Client(api_key=api_key, token=token, hf_token=args.hf_token, password=os.environ["X"])',
    "def serve(api_key: str | None = None, hf_token: Optional[str] = None, password: str = None) -> None:",
    "KeyError: 'model.layers.0.mlp.down_proj.weight_scale_inv'", "Unexpected key: model.layers.0.self_attn.k_norm.weight",
    "missing keys: ['lm_head.weight']", "cache_key=abc123 layer_key: model.layers.0", "key: Tensor, value: Tensor, query: Tensor",
    "aten::mm(Tensor key, Tensor value) -> Tensor", "num_key_value_heads: 8", "kv_cache_dtype='fp8', key_cache: torch.Size([1, 2])",
    "DispatchKey: XPU, AutogradXPU", "dispatch_key=XPU", "prompt tokens: 512, generated tokens: 32, tokens per second: 1.5",
    "Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 3.0 tokens/s", "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE=163840",
    "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD=256", "TOKENIZERS_PARALLELISM=false", "next token: 'Paris'", "eos_token_id=2",
    "pass: fuse_norm, post_grad_custom_post_pass=None", "fusion_pass=FuseNorm", "basic information, Basic operations, Basic checks",
    "VLLM_ENABLE_PREGRAD_PASSES=1", "PWD=/srv/vllm OLDPWD=/srv", "author: me, authority=x", "compass=1 bypass: yes",
    "vllm serve m -tp 2 --api-key -tp 2", "http://host:8000/path/x@v1", "see https://host:8443/x.git@abc123", "user@host: hello",
    "git+https://github.com/a/b.git@main", "pass --quantization fp8 (see the key: value pairs of config.json)", "signature: (x, y)",
    '{"added_tokens": {"key": 1}, "pad_token": "[PAD]", "vision_token": "<img>"}', "secretary: me", "monkey=banana turkey: 5",
    "activation_quant_key = kFp8StaticTokenSym, weight_quant_key=kFp8Static128BlockSym", "key = kFp8Dynamic128Sym",
    'storage_key = (base, kind), {"cache_key": cache_key}, s3_secret_access_key=config.s3_secret_access_key', "KEY=VALUE",
    "set `VLLM_USE_FASTOKENS=1` instead", "MAX_TOKENS: ClassVar[int] = 2048",
    "if token == 5: pass", "c10::DispatchKey::XPU", "password: None", "ValueError: token: too long",
]  # fmt: skip


@pytest.mark.parametrize("text", HEALTHY)
def test_healthy_text_stays_readable(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    ("name", "value"),
    [("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE", "163840"), ("PWD", "/srv"), ("VLLM_ENABLE_PREGRAD_PASSES", "1"), ("COMPASS", "x")],
)
def test_variables_whose_names_only_look_secret(name: str, value: str) -> None:
    assert redact_env(name, value) == value


@pytest.mark.parametrize(
    "name", ["DB_PASS", "PASSPHRASE", "HF_AUTH", "CREDS", "REGISTRY_CREDS", "hf_token", "DB_PWD", "SSH_PASSPHRASE", "PASS"]
)
def test_variables_that_are_secret_by_their_last_word(name: str) -> None:
    assert redact_env(name, SECRET) == REDACTED


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--api-key", "-S3kret"], ["--api-key", REDACTED]),
        (["--api-key", "-tp", "2"], ["--api-key", "-tp", "2"]),
        (["--hf-overrides.token=S3kret"], [f"--hf-overrides.token={REDACTED}"]),
        (["--hf-overrides.rope_token", "7"], ["--hf-overrides.rope_token", "7"]),
        (["--config", '{"a": {"hf_token": "S3kret"}}'], ["--config", f'{{"a": {{"hf_token": "{REDACTED}"}}}}']),
    ],
)
def test_odd_values_of_options(argv: list[str], shown: list[str]) -> None:
    assert redact_argv(argv) == shown


PARTS = st.sampled_from(
    ["api_key", "HF_TOKEN", "password", "token", "--api-key", "--hf-token", "Authorization", "Bearer ", "Basic ", "http://", "u:p@h", "=",
     ": ",
     "'", '"', '\\"', " ", ", ", "\n", "[", "]", "(", ")", "{", "}", "-x", "abc123def456ghi7", "None", "str", REDACTED, "key", "?sig=",
     "&", ";", "S"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(PARTS, max_size=12).map("".join))
def test_redacting_pieces_of_secrets_twice_changes_nothing(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


def test_a_long_text_is_read_in_linear_time() -> None:
    """Not a timing: catastrophic backtracking would not end at all."""
    for piece in (
        "api_key",
        "--api-key ",
        "a=",
        "key: '",
        '\\"key\\": \\"',
        "http://u:",
        "x-",
        "Bearer ",
        "?sig",
        "[",
        "password=[",
    ):
        assert isinstance(redact(piece * 20_000), str)


CONFIG = {
    "model_type": "llama", "num_key_value_heads": 8, "eos_token": "</s>", "eos_token_id": [1, 2], "max_tokens": 32, "token": "<image>",
    "pad_token": "[PAD]", "tokenizer_class": "LlamaTokenizer", "head_dim": 128, "key": None, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"], "weight_block_size": [128, 128]},
}  # fmt: skip


def test_a_healthy_config_stays_what_it_is() -> None:
    assert redact_json(CONFIG) == CONFIG


@pytest.mark.parametrize(
    "planted",
    [
        {"hf_token": SECRET}, {"api_key": [SECRET, SECRET]}, {"apiKey": SECRET}, {"DB_PASS": SECRET}, {"auth": "YWxhZGRpbjpvcGVuc2VzYW1l"},
        {"_name_or_path": f"https://user:{SECRET}@host/m"}, {f"https://user:{SECRET}@host": 1}, {"note": f"--api-key {SECRET}"},
        {"a": [{"b": [{"secret_key": SECRET}]}]}, {"env": [{"name": "HF_TOKEN", "value": SECRET}]}, {"password": 48151623},
        {"credentials": {"user": SECRET, "more": [SECRET]}}, {"text": json.dumps({"hf_token": SECRET})},
    ],
)  # fmt: skip
def test_secrets_in_json_are_hidden_at_any_depth(planted: dict[str, Any]) -> None:
    for value in (planted, CONFIG | planted, {"deep": [CONFIG, planted]}, [[planted]]):
        shown = redact_json(value)
        text = json.dumps(shown)
        assert not any(secret in text for secret in (SECRET, "YWxhZGRpbjpvcGVuc2VzYW1l", "48151623"))
        assert REDACTED in text
        assert redact_json(shown) == shown


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.sampled_from(["a", "hf_token", "key", "x y", "name", "value"]), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_any_json_keeps_its_structure_and_redacting_twice_changes_nothing(value: Any) -> None:
    once = redact_json(value)
    assert redact_json(once) == once
    assert _form(once) == _form(value)


def _form(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _form(inner) for key, inner in value.items()}
    return [_form(inner) for inner in value] if isinstance(value, list) else "leaf"
