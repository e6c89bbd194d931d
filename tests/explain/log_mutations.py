"""The same failure as other people's logs would show it: other names and numbers, other loggers in front, pasted and wrapped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

Mutation = Callable[[str], str]


def _each(function: Callable[[int, str], str]) -> Mutation:
    return lambda log: "\n".join(function(number, line) for number, line in enumerate(log.split("\n"), 1))


_RENAMED = (
    (r"fp8_gemm_w8a16", "int4_gemm_w4a8"), (r"torch_ipex\.", "_moe_C."), (r"MergedColumnParallelLinear", "QKVParallelLinear"),
    (r"'weight'", "'weight_scale_inv'"), (r"Qwen3_5\w+|Qwen3MoeLLMForCausalLM", "OtherForCausalLM"),
    (r"qwen3_vl_moe|qwen3_moe|qwen3_5|llama", "other_model"), (r"PlatformEnum\.XPU: 4", "PlatformEnum.XPU: 7"),
    (r"libsycl\.so\.9", "libsycl.so.11"), (r"renderD128", "renderD131"), (r"\[0x7d51\]", "[0xe20b]"),
    (r"layers\.0\.", "layers.41."), (r"Int8 MoE backend TRITON", "NvFp4 MoE backend 'EMULATION'"), (r"awq_dequantize", "gptq_gemm"),
    (r"moe_wna16 \+ awq", "awq_marlin"), (r"capability: 75", "capability: 80"), (r"100000", "65536"), (r"4\.26 GiB", "9.5 GiB"),
    (r"make_llir", "make_llir"), (r"ze_call\.cpp:28 do_call", "ze_calls.cpp:143 call"), (r"VllmWorker-1", "VllmWorker-3"),
    (r"BFloat16", "Float"), (r"query and key", "key and value"), (r"dt_bias", "A_log_bias"), (r"1\.6\.33276\+21", "1.6.31907+7"),
)  # fmt: skip


def renamed(log: str) -> str:
    """Other op, layer, model, table, library, dtype, sizes."""
    for pattern, replacement in _RENAMED:
        log = re.sub(pattern, replacement, log)
    return log


def renumbered(log: str) -> str:
    """Other process ids, line numbers, dates."""
    log = re.sub(r"pid=(\d+)", lambda match: f"pid={int(match[1]) + 70001}", log)
    log = re.sub(r"line (\d+)", lambda match: f"line {int(match[1]) * 3 + 1}", log)
    log = re.sub(r"\.py:(\d+)", lambda match: f".py:{int(match[1]) + 17}", log)
    return re.sub(r"\b\d\d-\d\d \d\d:\d\d:\d\d", "11-30 23:59:59", log)


MUTATIONS: dict[str, Mutation] = {
    "as it stands": lambda log: log,
    "renamed": renamed,
    "renumbered": renumbered,
    "docker timestamps": _each(lambda number, line: f"2026-07-30T12:49:{number % 60:02}.204696793Z {line}"),
    "kubectl": _each(lambda number, line: f"[pod/vllm-0/server] 2026-07-30T12:49:{number % 60:02}.2Z {line}"),
    "cri": _each(lambda number, line: f"2026-07-30T12:49:{number % 60:02}.204696793+02:00 stderr F {line}"),
    "compose": _each(lambda _, line: f"vllm-server-1  | {line}"),
    "journald": _each(lambda number, line: f"Jul 30 12:49:{number % 60:02} box vllm[4711]: {line}"),
    "journald iso": _each(lambda number, line: f"2026-07-30T12:49:{number % 60:02}+0200 box python3[4711]: {line}"),
    "worker": _each(lambda _, line: f"(Worker_TP3 pid=90210) ERROR 07-30 12:49:30 [multiproc_executor.py:901] {line}"),
    "old worker": _each(
        lambda _, line: f"(VllmWorkerProcess pid=90210) ERROR 07-30 12:49:30 multiproc_worker_utils.py:229] {line}"
    ),
    "rank": _each(lambda _, line: f"[rank3]: {line}"),
    "coloured": _each(
        lambda _, line: f"\x1b[1;36m(EngineCore_DP0 pid=653)\x1b[0;0m \x1b[31mERROR 07-30 12:49:30 [core.py:1108]\x1b[0m {line}"
    ),
    "colours without escapes": _each(
        lambda _, line: f"[1;36m(EngineCore_DP0 pid=653)[0;0m ERROR 07-30 12:49:30 [core.py:1108] {line}"
    ),
    "windows": lambda log: log.replace("\n", "\r\n"),
    "no indentation": _each(lambda _, line: line.strip()),
    "deep indentation": _each(lambda _, line: f"        {line}"),
    "quoted": _each(lambda _, line: f"> {line}"),
    "code block": lambda log: f"Hi all,\n\nit dies with this:\n\n```\n{log}\n```\n\nAny idea?\n",
    "blank lines between": lambda log: log.replace("\n", "\n\n"),
    "json file": _each(lambda _, line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-07-30T12:49:30Z"})),
    "after a long start": lambda log: "INFO 07-30 12:49:30 [config.py:1] Using max model len 512\n" * 300 + log,
}


def wrapped(width: int) -> Mutation:
    """Every line cut at a width, as a terminal's copy has it."""
    return lambda log: "\n".join(
        piece for line in log.split("\n") for piece in ([line[at : at + width] for at in range(0, len(line), width)] or [""])
    )


def interleaved(log: str) -> str:
    """The lines of the failing worker between those of one that goes on."""
    lines = []
    for number, line in enumerate(log.split("\n")):
        lines.append(f"(Worker_TP1 pid=225) ERROR 07-30 12:49:30 [multiproc_executor.py:654] {line}")
        lines.append(
            f"(Worker_TP0 pid=224) INFO 07-30 12:49:30 [gpu_model_runner.py:{number}] Loading weights took {number} seconds"
        )
    return "\n".join(lines)


MUTATIONS["wrapped at 100"] = wrapped(100)
MUTATIONS["wrapped at 72"] = wrapped(72)
MUTATIONS["interleaved"] = interleaved
MUTATIONS["all at once"] = lambda log: MUTATIONS["journald"](interleaved(renumbered(renamed(log)))).replace("\n", "\r\n")
