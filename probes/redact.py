"""Keeps secrets out of facts and reports: values only, names stay. Standard library alone, since both halves use it.

A variable (or any name in capitals) is secret when its name contains ``TOKEN``, ``KEY``, ``SECRET``, ``PASSWORD`` and the like.
An option, a mapping key, an argument or a header is secret when its last word is one, so that ``--tokenizer``, ``max_tokens`` and
``num_key_value_heads`` keep their values. A bare ``key`` or ``token`` before a plain word is prose.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

REDACTED = "<redacted>"

_SECRET_NAME = re.compile(
    r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(?:^|_)(?:PASS|AUTH|AUTHORIZATION|CREDS?)$|_PWD$", re.IGNORECASE
)
_PUBLIC = frozenset({"NEOReadDebugKeys", "TOKENIZERS_PARALLELISM"})
"""Variables whose names only look secret and whose values explain what happens."""
_COUNT = re.compile(r"[A-Z0-9_]*TOKEN(?:S(?:_[A-Z0-9_]+)?|_[A-Z0-9_]+)", re.IGNORECASE)
"""Speaks of a number of tokens (``VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE``) where the value is a number."""


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_SECRET_WORDS = _set(
    "key keys apikey secret secrets password passwords passwd passphrase credential credentials creds authorization"
)
_BEARERS = _set(
    "access api auth bearer bot csrf deploy gh github gitlab hf hub huggingface id identity login oauth personal "
    "private refresh registry secret security service session vault wandb"
)
"""What stands before ``token`` when it is a credential; an ``eos_token`` or ``image_token`` is part of a vocabulary."""
_LOCKS = _set(
    "access account admin api auth client consumer encryption host license master openai private secret service "
    "shared signing ssh storage subscription wandb"
)
"""What stands before ``key`` when it is a credential; a ``cache_key`` or ``missing key`` is none."""
_HOLDERS = _set("admin db database http mysql pg postgres proxy redis root smtp user")
"""What stands before ``pass``, ``pwd`` or ``auth`` when it is a credential; a ``fusion_pass`` is none."""
_NOTHING = frozenset({"None", "null", "True", "False", "true", "false", "[]", "''", '""', "{}", "Ellipsis", "..."})
_TYPES = _set("str bytes int bool float dict list tuple set object string Any Optional Union SecretStr ClassVar")

_QUOTED = r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\""
_ESCAPED = r"(?P<esc>\\{1,8}['\"]).{0,4096}?(?<!\\)(?P=esc)"
_LIST = r"\[[^\]\n]{0,4096}\]"

_HINTS = r"(?:token|key|secret|pass|pwd|pat|cred|auth|bearer|basic|sig)"
"""One of these is in every text that names a secret; most texts hold none and are done at once."""

_URL = re.compile(
    r"\b([a-z][a-z0-9+.-]{0,30}://)(?:[^\s/'\"<>]{1,512}|[^\s/@:'\"<>]{0,128}:(?!\d{1,5}(?:[/?#]))[^\s'\"<>]{1,512})@",
    re.IGNORECASE,
)
_QUERY = re.compile(
    r"([?&#;](?:[a-z0-9]{1,32}[_-]){0,4}(?:[a-z]{0,16}(?:token|secret|password|passwd)|(?:aws)?access_?key_?id|(?:api)?key|signature|sig"
    r"|credential)=)[^&\s'\"<>]+",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"(?<![\w-])(--[A-Za-z][\w.-]{{0,64}})(?:(=)(?:{_QUOTED}|[^\s'\"]+)"
    rf"|([ \t]*\\?\r?\n[ \t]*|[ \t]+)(?:{_QUOTED}|(?!--)(?!-[A-Za-z]{{1,4}}\d?(?:[\s=]|$))[^\s'\"][^\s'\"]*)"
    rf"((?:[ \t]+[^\s'\"-][^\s'\"]*)*))"
)
_LISTED = re.compile(r"(\\*['\"])(--[A-Za-z][\w.-]{0,64})\1(\s*,\s*)\1(?!--)((?:(?!\1).){1,4096})\1")
_ENTRY = re.compile(
    rf"(?P<quote>\\{{0,8}}['\"])(?P<name>[A-Za-z][\w.-]{{0,64}})(?P=quote)(?P<between>\s*[:=]\s*)"
    rf"(?P<value>{_LIST}|{_ESCAPED}|{_QUOTED}|[^\s,}}\]'\"\\]+)"
)
_PAIR = re.compile(
    rf"(?<![\w-])(?P<name>(?i:(?=[\w.-]{{0,80}}?{_HINTS}))[A-Za-z_][\w.-]{{0,80}})(?P<between>[ \t]{{0,4}}(?:=(?!=)|:(?![:/]))[ \t]{{0,4}})"
    rf"(?P<value>{_LIST}|{_ESCAPED}|{_QUOTED}|\w{{0,32}}Secret\w{{0,32}}\((?:{_QUOTED})\)|['\"]?[^\s'\"\\]+)"
)
_AUTHORIZATION = re.compile(
    r"\b((?:proxy-)?authorization\\*['\"]?[ \t]*[:=][ \t]*\\*['\"]?)((?:bearer|basic|token|digest|negotiate|apikey|key)[ \t]+)?"
    r"[^\s'\",;\\]+",
    re.IGNORECASE,
)
_BEARER = re.compile(
    r"\b(?:(Bearer)(\s+|[ \t]*[:=][ \t]*)(?:[A-Za-z0-9._~+/=-]{8,}|(?=[A-Za-z._~+/=-]{0,8}\d)[A-Za-z0-9._~+/=-]{4,})"
    r"|(Basic)(\s+)(?=[a-z]{0,64}[A-Z0-9+/=]|[A-Z])(?![A-Z]?[a-z]{1,40}\b(?![0-9+/=]))[A-Za-z0-9+/=_-]{8,})",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|[rs]k_(?:live|test)_\w{10,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|gl[a-z]{2,6}-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|nvapi-[\w-]{16,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|eyJ[\w-]{6,}\.eyJ[\w-]{4,}(?:\.[\w-]*)?)"
    r"|(?<=PRIVATE KEY-----)[^-]{16,}"
)
_HINT = re.compile(_HINTS, re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SHORT_OPTION = re.compile(r"-[A-Za-z]{1,4}\d?(?:=.*)?")
_CODE = re.compile(
    r"(?:self|cls|args|kwargs|config|cfg|os|settings|envs?|opts?|options|params|parsed|request|req)\.|.*\($|[({].*|lambda\b|VALUE$"
    r"|k(?:Fp|Int|Uint|Nv|Mx)\w*$"
)
"""What stands after a name in source code rather than in its output; the last are vLLM's keys of quantizations."""


def _words(name: str) -> list[str]:
    """The words of a name, of the last part of one with dots: ``--hf-overrides.apiKey`` is api, key."""
    return re.split(r"[-_]", _CAMEL.sub("-", name.strip("-_.").rpartition(".")[2]).lower())


def _is_secret_word(name: str) -> bool:
    """True for an option or mapping key that names a secret by its last word: ``api_key``, not ``num_key_value_heads``."""
    words = _words(name)
    if words[-1] == "token":
        return len(words) == 1 or words[-2] in _BEARERS
    return words[-1] in _SECRET_WORDS or (words[-1] in ("pass", "pwd", "auth") and len(words) > 1 and words[-2] in _HOLDERS)


def _is_sure(name: str) -> bool:
    """True for a name without quotes round it, as ``name=value`` or ``name: value``, that is a secret whatever stands after it."""
    words = _words(name)
    if words[-1] in ("key", "keys"):
        return len(words) > 1 and words[-2] in _LOCKS
    return _is_secret_word(name) and words != ["token"]


def _may_be(name: str) -> bool:
    """True for a name that is a secret when what stands after it looks like one: ``key: …``, ``auth=…``."""
    words = _words(name)
    return _is_secret_word(name) or words[-1] in ("pass", "auth", "pat")


def _looks_opaque(word: str) -> bool:
    """True for a word that may be a second key of ``--api-key A B`` rather than the sentence that follows in a log line."""
    return len(word) >= 16 or any(character.isdigit() for character in word)


def _is_opaque(value: str) -> bool:
    """True for a value that reads as random: long, without a space or a dot, with letters and digits."""
    text = value.strip("'\"\\")
    return bool(re.fullmatch(r"[A-Za-z0-9+/=-]{16,}|[A-Za-z0-9+/=_-]{32,}", text)) and bool(
        re.search(r"\d", text) and re.search(r"[A-Za-z]", text)
    )


def _is_secret_variable(name: str, value: str) -> bool:
    """True for an environment variable that is a secret by its name; a number of tokens is none."""
    if name in _PUBLIC or not _SECRET_NAME.search(name):
        return False
    return not (_COUNT.fullmatch(name) and re.fullmatch(r"-?\d{1,9}", value.strip("'\"`")))


def _is_code(name: str, value: str) -> bool:
    """True for a type, a variable or an expression: ``api_key: str``, ``api_key=args.api_key``, ``token=get_token(``."""
    own = value == name or value.endswith(f".{name.rpartition('.')[2]}")
    return own or re.split(r"[\[|]", value)[0] in _TYPES or _CODE.match(value) is not None


def _option(match: re.Match[str]) -> str:
    name, equals, gap, more = match.groups()
    if not _is_secret_word(name):
        return match.group(0)
    if equals:
        return f"{name}={REDACTED}"
    rest = re.sub(r"\S+", lambda word: REDACTED if _looks_opaque(word.group(0)) else word.group(0), more)
    return f"{name}{gap}{REDACTED}{rest}"


def _listed(match: re.Match[str]) -> str:
    quote, name, comma, _ = match.groups()
    return f"{quote}{name}{quote}{comma}{quote}{REDACTED}{quote}" if _is_secret_word(name) else match.group(0)


def _entry(match: re.Match[str]) -> str:
    quote, name = match["quote"], match["name"]
    upper = name.isupper() and _is_secret_variable(name, match["value"])
    count = _words(name) in (["key"], ["keys"], ["token"]) and re.fullmatch(r"-?[\d.]+", match["value"])
    code = match["value"][0] not in "'\"[\\" and _is_code(name, match["value"])
    if not (upper or _is_secret_word(name)) or match["value"] in _NOTHING or count or code:
        return match.group(0)
    return f"{quote}{name}{quote}{match['between']}{quote}{REDACTED}{quote}"


def _pair(name: str, between: str, value: str) -> str | None:
    """What stands for the value of ``name=value`` or ``name: value``; None where it is no secret."""
    if _words(name)[-1] == "authorization":  # its own pattern keeps the scheme
        return None
    rest = ""
    if value[0] not in "[\\" and value[-1] not in "'\")":
        # After "=" the next argument may follow without a space; after ":" only the punctuation of the sentence may.
        kept = re.match(r"['\"]?[^,;&|)\]}]*" if "=" in between else r"['\"]?.*[^,;)\]}.]|", value)
        rest = value[kept.end() :] if kept else ""
        value = value[: len(value) - len(rest)]
    bare = value.strip("'\"")
    if not bare or bare in _NOTHING or value in _NOTHING or bare.startswith(REDACTED):
        return None
    sure = _is_secret_variable(name, value) if name.isupper() else _is_sure(name)
    if not sure and not (_may_be(name) and _is_opaque(value)):
        return None
    if value[0] not in "'\"[" and _is_code(name, bare):
        return None
    return _like(value) + rest


def _pairs(text: str) -> str:
    """The text without the values of ``_PAIR``; after a pair that is no secret the search goes on inside its value."""
    parts: list[str] = []
    at = done = 0
    while (match := _PAIR.search(text, at)) is not None:
        shown = _pair(match["name"], match["between"], match["value"])
        at = match.start("value")
        if shown is not None:
            parts += [text[done:at], shown]
            at = done = match.end()
    return "".join([*parts, text[done:]])


def _like(value: str) -> str:
    """The mark, in the quotes that the value had."""
    quotes = re.match(r"\\*['\"]", value)
    return (
        f"{quotes[0]}{REDACTED}{quotes[0]}" if quotes and value.endswith(quotes[0]) and len(value) > len(quotes[0]) else REDACTED
    )


def _bearer(match: re.Match[str]) -> str:
    return f"{match[1] or match[3]}{match[2] or match[4]}{REDACTED}"


def redact(text: str) -> str:
    """Text without the secrets it holds: URL credentials, ``--api-key X``, ``HF_TOKEN=X``, ``'api_key': 'X'``, bearer tokens.

    The same text comes back when there are none, and redacting twice changes nothing.
    """
    if "://" in text:
        text = _URL.sub(rf"\1{REDACTED}@", text)
    if _HINT.search(text):
        text = _QUERY.sub(rf"\1{REDACTED}", text)
        text = _LISTED.sub(_listed, text)
        text = _ENTRY.sub(_entry, text)
        text = _OPTION.sub(_option, text)
        text = _AUTHORIZATION.sub(lambda match: f"{match[1]}{match[2] or ''}{REDACTED}", text)
        text = _BEARER.sub(_bearer, text)
        text = _pairs(text)
    return _SHAPES.sub(REDACTED, text)


def redact_env(name: str, value: str) -> str:
    """Value of an environment variable as it may be shown: hidden whole when the name says that it is a secret."""
    return REDACTED if value and _is_secret_variable(name, value) else redact(value)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line as it may be shown: the values of secret options are hidden, all of ``--api-key A B``, and nothing else moves."""
    shown: list[str] = []
    hiding = first = False
    for token in argv:
        if (
            token.startswith("-")
            and len(token) > 1
            and not (first and not token.startswith("--") and not _SHORT_OPTION.fullmatch(token))
        ):
            name, equals, _ = token.partition("=")
            hiding = name.startswith("--") and _is_secret_word(name)
            shown.append(f"{name}={REDACTED}" if hiding and equals else redact(token))
            hiding = first = hiding and not equals
        else:
            shown.append(REDACTED if hiding else redact(token))
            first = False
    return shown


def redact_json(value: Any, *, name: str = "") -> Any:
    """JSON data, such as a ``config.json``, as it may be shown: every secret in it is hidden by its name or by its form.

    Args:
        value: what ``json.loads`` gives, of any depth.
        name: the key that it stands under, when there is one.

    Returns:
        The same structure. Names stay, and numbers and texts that are no secret (``eos_token``, ``max_tokens``) stay as they are.
    """
    if isinstance(value, dict):
        pair = value.get("name")
        named = isinstance(pair, str) and "value" in value and (_SECRET_NAME.search(pair) if pair.isupper() else _is_sure(pair))
        inside = name if _words(name)[-1] in ("credentials", "creds", "secrets") else ""
        return {
            redact(str(k)): redact_json(v, name="secret" if named and k == "value" else inside or str(k))
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [redact_json(v, name=name) for v in value]
    if isinstance(value, bool) or value is None or not name:
        return redact(value) if isinstance(value, str) else value
    if isinstance(value, str):
        upper = name.isupper() and _is_secret_variable(name, value)
        hidden = value and (upper or _is_secret_word(name) or (_may_be(name) and _is_opaque(value)))
        return REDACTED if hidden and not re.fullmatch(r"<[^<>]*>|\[[A-Z]+\]", value) else redact(value)
    return REDACTED if _is_sure(name) else value
