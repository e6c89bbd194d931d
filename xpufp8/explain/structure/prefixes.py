"""Taking a log line apart: who wrote it, how serious it is, and what it says.

Loggers stack their prefixes: journald before docker before vLLM. Each is one alternative of a single anchored expression
that is applied until nothing more comes off. All quantifiers are bounded and none are nested.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_LEVEL = r"DEBUG|INFO|WARNING|ERROR|CRITICAL"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"

_PIECES = "|".join((
    r"(?P<quoted>(?:>\s?){1,4})",
    # docker compose, `vllm-1  | `; the bar is followed by one blank, and table rows of markdown start with one.
    r"(?P<service>[A-Za-z0-9][\w.-]{0,60} {0,24})\| ",
    r"\[(?P<pod>pod/[^\]\s]{1,200})\] ",
    rf"(?P<iso>\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?)\s{{1,2}}(?:(?:stdout|stderr)\s[FP]\s)?",
    # journald in its ISO form has host and unit after the time; syslog has month, day, time, host and unit.
    r"(?P<unit>[\w.-]{1,64} [\w./@:-]{1,64}\[\d{1,8}\]): ",
    rf"(?:<\d{{1,3}}>)?[A-Z][a-z]{{2}} {{1,2}}\d{{1,2}} {_CLOCK} (?P<syslog>[\w.-]{{1,64}} [\w./@:-]{{1,64}}(?:\[\d{{1,8}}\])?): ?",
    r"(?P<dmesg>(?:<\d{1,3}>)?\[ {0,8}\d{1,8}\.\d{3,6}\]|\[[A-Z][a-z]{2} [A-Z][a-z]{2} {1,2}\d{1,2} \d\d:\d\d:\d\d \d{4}\]) ",
    rf"(?P<kernel>(?:{_CLOCK} )?(?:[\w.-]{{1,64}} )?kernel: )",
    # vLLM: (EngineCore_DP0 pid=653), (VllmWorker rank=0 pid=85), (Worker_TP0 pid=224), (RayWorkerWrapper pid=7, ip=10.0.0.1)
    r"\((?P<process>(?:[A-Za-z][\w.:-]{0,60} )?(?:[\w=]{1,30} )?pid=\d{1,10})(?:, ip=[\d.]{7,15})?\) ?",
    r"\[(?P<rank>rank\d{1,4})\]: ?",
    # vLLM's own: LEVEL month-day time [file.py:line]; to 0.7 without the first bracket; a pasted one may have lost the time.
    rf"(?P<vllm>{_LEVEL}) (?:\d\d-\d\d {_CLOCK}|\.\.\.)(?: \[?(?P<source>[\w./-]{{1,120}}\.py:\d{{1,6}})\])? ?",
    # glog and torch's C++: E0212 18:07:09.123000 653 torch/x.py:1] and [W212 18:07:09.123 x.cpp:1] Warning:
    rf"\[?(?P<glog>[IWEF])\d{{3,4}} {_CLOCK} (?:\d{{1,10}} )?(?:[^\s\]]{{1,200}}:\d{{1,6}})?\] ?(?:\[\d{{1,4}}/\d{{1,4}}\] ?)?",
    r"(?P<ccl>\d{4}:\d\d:\d\d-\d\d:\d\d:\d\d:\( {0,8}\d{1,10}\)) ",
    rf"(?P<logging>\[?(?:{_LEVEL}|WARN|FATAL)\]?)(?:\s{{1,6}}|:\s{{0,8}}(?=\S))(?:[-|]\s)?",
    rf"(?P<named>- [\w.-]{{1,60}} - (?:{_LEVEL}) - )",
    rf"(?P<clock>\[?{_CLOCK}\]?) ",
))  # fmt: skip
PREFIX = re.compile(_PIECES)
_STARTS = frozenset("(>[<-") | frozenset("0123456789") | frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_GLOG = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_CCL_LEVEL = re.compile(r"\|CCL_(ERROR|WARN|INFO|DEBUG)\|")
_ANY_LEVEL = re.compile(rf"{_LEVEL}|WARN|FATAL")
_SAME = {"WARN": "WARNING", "FATAL": "CRITICAL"}
_JSON_TEXT = ("log", "message", "msg", "MESSAGE", "body", "text")
LEVELS = ("", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class Line:
    """One line, or one piece of a very long one."""

    number: int
    text: str
    """What is left without prefixes; indentation kept."""
    process: str = ""
    """Who wrote it, as far as prefixes tell; empty for a bare line."""
    level: str = ""
    """DEBUG, INFO, WARNING, ERROR, CRITICAL, or empty."""
    source: str = ""
    """vLLM's ``file.py:line`` tag."""
    logged: bool = False
    """True when a logger or the kernel wrote it: a prefix was there."""
    raw: str = ""
    """The line as it stood, cleaned."""


def unwrap_json(text: str) -> str:
    """The message inside a JSON line (docker's json-file, Kubernetes and cloud collectors), else the text itself."""
    if not (text.startswith("{") and text.rstrip().endswith("}")):
        return text
    try:
        data = json.loads(text)
    except ValueError:
        return text
    if isinstance(data, dict):
        for name in _JSON_TEXT:
            if isinstance(data.get(name), str):
                return str(data[name])
    return text


def parse(number: int, text: str) -> Line:
    """Take the prefixes off one cleaned line."""
    position = len(text) - len(text.lstrip(" \t"))
    indented = position > 0
    process: list[str] = []
    level = source = ""
    logged = False
    for _ in range(8):
        if position >= len(text) or text[position] not in _STARTS:
            break
        match = PREFIX.match(text, position)
        if match is None or match.end() == position:
            break
        group = match.lastgroup or ""
        # Words of a message may read like a weak prefix; after vLLM's own tag, or in an indented line, only a strong one counts.
        if (source or indented) and not (match["process"] or match["vllm"] or (match["iso"] and not source)):
            break
        indented = False
        if match["process"] or match["rank"] or match["service"] or match["unit"] or match["syslog"] or match["pod"]:
            who = match["process"] or match["rank"] or match["service"] or match["unit"] or match["syslog"] or match["pod"]
            process.append(who.strip())
        if match["vllm"]:
            level, source = match["vllm"], match["source"] or ""
        elif match["glog"]:
            level = _GLOG[match["glog"]]
        elif match["logging"] or match["named"]:
            found = _ANY_LEVEL.search(match[0])
            level = _SAME.get(found[0], found[0]) if found else level
        logged = logged or group not in {"quoted", "logging", "clock"}
        position = match.end()
    rest = text if indented else text[position:]
    ccl = _CCL_LEVEL.match(rest)
    if ccl:
        level, logged = _SAME.get(ccl[1], ccl[1]), True
    return Line(number, rest.rstrip(), "|".join(process), level, source, logged, text.rstrip())
