"""What the log tells of the deployment: command, versions, image, GPU, model, parallel sizes. First mention wins."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from probes.redact import redact, redact_argv

if TYPE_CHECKING:
    from xpufp8.explain.structure.prefixes import Line

_VERSION = r"\d{1,4}\.\d{1,5}(?:\.\d{1,5}){0,2}(?:\.?(?:dev|post|rc|a|b)\d{0,8}){0,3}(?:\+[\w.]{1,60})?"
_WORDS = {
    "vllm": re.compile(
        r"(?:vLLM API server version|LLM engine \(v?|vLLM [Vv]ersion\s{0,40}:|^\s{0,4}version|\bvllm(?:==|[ -]v?)|vLLM v?)"
        rf"\s?v?(?P<v>{_VERSION})"
    ),
    "torch": re.compile(rf"(?:PyTorch version\s{{0,40}}:|\b(?:py)?torch(?:==| )v?)\s?(?P<v>{_VERSION})", re.IGNORECASE),
    "vllm-xpu-kernels": re.compile(
        rf"(?:vllm[-_]xpu[-_]kernels(?: version)?|vLLM XPU kernels version)\s{{0,40}}[:= ]{{1,2}}\s?v?(?P<v>{_VERSION})",
        re.IGNORECASE,
    ),
    "triton": re.compile(rf"\b(?:pytorch[-_])?triton(?:[-_]xpu)?\s{{0,30}}(?:==|:| )\s?v?(?P<v>{_VERSION})", re.IGNORECASE),
    "intel-extension-for-pytorch": re.compile(
        rf"(?:\bIPEX|intel[-_]extension[-_]for[-_]pytorch|Intel Extension for PyTorch)\W{{0,30}}(?P<v>{_VERSION})", re.IGNORECASE
    ),
    "transformers": re.compile(rf"\btransformers(?:==|: | )v?(?P<v>{_VERSION})"),
    "oneccl": re.compile(rf"\boneCCL(?: version)?\s{{0,30}}[:= ]\s?v?(?P<v>20\d\d\.{_VERSION}|{_VERSION})"),
}
_LITERALS = {
    "vllm": ("vllm", "vLLM", "version", "LLM engine"), "torch": ("orch",), "vllm-xpu-kernels": ("kernels",), "triton": ("riton",),
    "intel-extension-for-pytorch": ("IPEX", "xtension"), "transformers": ("transformers",), "oneccl": ("oneCCL",),
}  # fmt: skip
_IMAGE = re.compile(
    r"\b(?P<image>(?:[\w.-]{1,60}/)?(?:intel/(?:llm-scaler-)?vllm|vllm/vllm-openai(?:-xpu)?|llm-scaler-vllm)(?::[\w.-]{1,100})?)(?![\w/])"
)
_GPU = re.compile(
    r"(?P<gpu>(?:\d{1,2}\s?[x×]\s?)?(?:Intel(?:\(R\)|®)?\s)?(?:Arc(?:\(TM\)|™)?\s(?:Pro\s)?[AB]\d{2,3}M?"
    r"|Data Center GPU (?:Max|Flex)\s\d{3,4}|Arc(?:\(TM\)|™)?\s1[34]0[TV]|Graphics \[0x[0-9a-f]{4}\]))"
)
_SERVE = re.compile(r"(?:vllm serve|python3? -m vllm\.entrypoints\.[\w.]{1,60})\s")
_ASSIGNED = re.compile(r"[A-Z][A-Z0-9_]{2,60}=\S{0,200}")
_NO_DIGITS = str.maketrans("", "", "0123456789")
SHAPES = 20_000
LONGEST = 4000
"""Characters of a line that is read, unless it is vLLM's list of settings."""
COMMAND = 2000
"""Characters of a serve command that are kept."""
_MODEL = re.compile(
    r"(?:model='(?P<a>[^']{1,300})'|'model(?:_tag)?': '(?P<b>[^']{1,300})'|--model[= ]\s?(?P<c>[^\s'\"\\]{1,300})"
    r"|vllm serve (?P<d>[^\s'\"\\-][^\s'\"\\]{0,300}))"
)
_SIZES = {
    name: re.compile(
        rf"(?:{name}_parallel_size(?:=|': )|--{name}[-_]parallel[-_]size[= ]|(?<!\S){short}[= ]|\b{short[1:].upper()}\s?=\s?)"
        r"\s?(?P<n>\d{1,3})\b"
    )
    for name, short in (("tensor", "-tp"), ("pipeline", "-pp"), ("data", "-dp"))
}
_WORLD = re.compile(r"(?:world_size=|world size )(?P<n>\d{1,4})")
_WORKER = re.compile(r"Worker_?(?:PP\d{1,3}_)?TP(\d{1,3})|VllmWorker(?: rank=|-)(\d{1,3})")
_OPTIONS = {
    "quantization": re.compile(r"(?:\bquantization=|'quantization': '?|--quantization[= ]\s?)(?P<v>[\w-]{2,40})"),
    "dtype": re.compile(r"(?:\bdtype=(?:torch\.)?|'dtype': '|--dtype[= ]\s?)(?P<v>[a-z]{4,12}\d{0,2})"),
    "kv_cache_dtype": re.compile(r"(?:\bkv_cache_dtype=|'kv_cache_dtype': '|--kv-cache-dtype[= ]\s?)(?P<v>\w{2,20})"),
    "enforce_eager": re.compile(r"(?:\benforce_eager=|'enforce_eager': )(?P<v>True|False)|(?P<flag>--enforce-eager)\b"),
}
_PLATFORM = re.compile(
    r"(?:device_config=|detected platform |Platform:? ?)(?P<p>xpu|cuda|cpu|rocm)\b|PlatformEnum\.(?P<e>XPU|CUDA|CPU|ROCM)"
)
_HINTS = (
    "vllm", "vLLM", "orch", "LLM", "riton", "IPEX", "xtension", "oneCCL", "Arc", "GPU", "Graphics", "parallel", "-tp", "-pp", "-dp",
    "world", "Worker", "intel/", "model", "TP=", "TP =", "latform", "dtype", "quantization", "eager", "kernels", "transformers",
)  # fmt: skip


@dataclass
class Deployment:
    """Read from the log; empty where it says nothing."""

    versions: dict[str, str] = field(default_factory=dict)
    image: str = ""
    gpu: str = ""
    model: str = ""
    command: str = ""
    platform: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    """tensor, pipeline, data: the largest parallel size seen."""
    options: dict[str, str] = field(default_factory=dict)
    _continues: bool = False
    _seen: set[str] = field(default_factory=set)
    """Shapes of lines that were looked at: a server's small talk is read once."""

    @property
    def parallel(self) -> bool | None:
        """True with more than one card, False with one, None where the log does not say."""
        if not self.sizes:
            return None
        return any(size > 1 for size in self.sizes.values())

    @property
    def argv(self) -> list[str]:
        """Words of the serve command after MODEL's verb, secrets hidden."""
        try:
            words = shlex.split(self.command)
        except ValueError:
            words = self.command.split()
        for verb in ("serve", "vllm.entrypoints.openai.api_server"):
            if verb in words:
                return redact_argv(words[words.index(verb) + 1 :])
        return []

    def read(self, line: Line) -> None:
        """Take what one line tells."""
        text = line.text
        if self._continues:
            self._extend(text)
        shape = text.translate(_NO_DIGITS)
        if shape in self._seen:
            return
        if len(self._seen) < SHAPES and len(text) < COMMAND:
            self._seen.add(shape)
        if (len(text) > LONGEST and "LLM engine" not in text) or not any(hint in text for hint in _HINTS):
            self._workers(line)
            return
        self._command(text)
        for name, pattern in _WORDS.items():
            if name not in self.versions and any(literal in text for literal in _LITERALS[name]):
                match = pattern.search(text)
                if match:
                    self.versions[name] = match["v"]
        if not self.image and (match := _IMAGE.search(text)):
            self.image = match["image"]
        if not self.gpu and (match := _GPU.search(text)):
            self.gpu = " ".join(match["gpu"].split())
        if not self.model and (match := _MODEL.search(text)):
            self.model = redact(next(group for group in match.groups() if group))
        for name, pattern in _SIZES.items():
            if match := pattern.search(text):
                self.sizes[name] = max(int(match["n"]), self.sizes.get(name, 0))
        if match := _WORLD.search(text):
            self.sizes["world"] = max(int(match["n"]), self.sizes.get("world", 0))
        for name, pattern in _OPTIONS.items():
            if name not in self.options and (match := pattern.search(text)):
                self.options[name] = match["v"] or "True"
        if not self.platform and (match := _PLATFORM.search(text)):
            self.platform = (match["p"] or match["e"]).lower()
        self._workers(line)

    def _workers(self, line: Line) -> None:
        for match in (_WORKER.search(line.process), _WORKER.search(line.text[:200]) if "Worker" in line.text[:200] else None):
            if match:
                rank = int(match[1] or match[2])
                if rank > 0:
                    self.sizes["tensor"] = max(rank + 1, self.sizes.get("tensor", 0))

    def _command(self, text: str) -> None:
        if self.command or not (match := _SERVE.search(text)):
            return
        before = text[: match.start()].split(" ")
        start = len(before) - 1
        while start > 0 and _ASSIGNED.fullmatch(before[start - 1]):
            start -= 1
        command = " ".join(before[start:]) + text[match.start() :]
        self.command = redact(command.strip()[:COMMAND])
        self._continues = self.command.endswith("\\")

    def _extend(self, text: str) -> None:
        """A shell command goes on after a backslash at the end of the line."""
        part = text.strip().rstrip("'\"")
        self.command = redact(f"{self.command.rstrip(chr(92)).rstrip()} {part}")
        self._continues = part.endswith("\\") and len(self.command) < 4000
        if match := _MODEL.search(part):
            self.model = self.model or next(group for group in match.groups() if group)

    def version(self, package: str) -> Version | None:
        """A version as one can compare it, None if the log does not show it or shows no version."""
        text = self.versions.get(package)
        try:
            return Version(text) if text else None
        except InvalidVersion:
            return None

    def as_facts(self) -> dict[str, object]:
        """What the report shows of it."""
        facts: dict[str, object] = {
            "versions": self.versions, "image": self.image, "gpu": self.gpu, "model": self.model, "command": self.command,
            "platform": self.platform, "sizes": self.sizes, "options": self.options,
        }  # fmt: skip
        return {name: value for name, value in facts.items() if value}
