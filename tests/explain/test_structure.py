"""Lines taken apart, tracebacks put together: prefixes of every logger, chains, interleaved processes, lost indentation."""

from __future__ import annotations

import io

import pytest

from xpufp8.explain import explain_stream
from xpufp8.explain.engine import lines_of
from xpufp8.explain.reader import Source
from xpufp8.explain.structure.prefixes import parse
from xpufp8.explain.structure.tracebacks import Chain, TracebackReader

PREFIXED = [
    ("(EngineCore_DP0 pid=653) ERROR 02-12 18:07:09 [core.py:842] boom", "boom", "EngineCore_DP0 pid=653", "ERROR", "core.py:842"),
    ("(Worker_TP0 pid=224) ERROR ... [multiproc_executor.py:654] boom", "boom", "Worker_TP0 pid=224", "ERROR", "multiproc_executor.py:654"),
    ("(VllmWorker rank=0 pid=85) INFO 03-20 23:26:06 [a.py:1] boom", "boom", "VllmWorker rank=0 pid=85", "INFO", "a.py:1"),
    ("(VllmWorkerProcess pid=35734) ERROR 11-06 17:51:07 multiproc_worker_utils.py:229] boom", "boom", "VllmWorkerProcess pid=35734",
     "ERROR", "multiproc_worker_utils.py:229"),
    ("(RayWorkerWrapper pid=7, ip=10.0.0.1) boom", "boom", "RayWorkerWrapper pid=7", "", ""),
    ('(EngineCore_DP0 pid=686)   File "x"', '  File "x"', "EngineCore_DP0 pid=686", "", ""),
    ("WARNING 04-15 18:34:48 fp8.py:20] boom", "boom", "", "WARNING", "fp8.py:20"),
    ('INFO:     127.0.0.1:48802 - "GET /health HTTP/1.1" 200 OK', '127.0.0.1:48802 - "GET /health HTTP/1.1" 200 OK', "", "INFO", ""),
    ("eap-llm-server-on-arc  | ERROR 11-08 11:01:29 [x.py:135] boom", "boom", "eap-llm-server-on-arc", "ERROR", "x.py:135"),
    ("[pod/vllm-0/server] 2026-07-30T12:49:30Z boom", "boom", "pod/vllm-0/server", "", ""),
    ("2026-06-05T03:00:47.945961799Z (EngineCore_DP0 pid=528) ERROR 06-05 03:00:47 [core.py:936] boom", "boom",
     "EngineCore_DP0 pid=528", "ERROR", "core.py:936"),
    ("Jul 30 12:49:30 box vllm[4711]: (Worker pid=9) boom", "boom", "box vllm[4711]|Worker pid=9", "", ""),
    ("2026-07-30T12:49:30+0200 box python3[4711]: boom", "boom", "box python3[4711]", "", ""),
    ("[  812.123456] xe 0000:03:00.0: boom", "xe 0000:03:00.0: boom", "", "", ""),
    ("[rank0]: boom", "boom", "rank0", "", ""),
    ("E0716 07:25:08.857000 3132999 torch/_inductor/runtime/triton_heuristics.py:714] boom", "boom", "", "ERROR", ""),
    ("[rank0]:[W508 11:47:03.157708266 ProcessGroupNCCL.cpp:1554] Warning: boom", "Warning: boom", "rank0", "WARNING", ""),
    ("2026:07:17-12:29:00:(  532) |CCL_WARN| boom", "|CCL_WARN| boom", "", "WARNING", ""),
    ("> quoted boom", "quoted boom", "", "", ""),
    ("| Image | boom |", "| Image | boom |", "", "", ""),
    ("plain words, no prefix", "plain words, no prefix", "", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "rest", "process", "level", "source"), PREFIXED)
def test_a_line_is_taken_apart(text: str, rest: str, process: str, level: str, source: str) -> None:
    line = parse(1, text)
    assert (line.text, line.process, line.level, line.source) == (rest, process, level, source)


def chains(log: str) -> list[Chain]:
    reader = TracebackReader()
    for block in Source(io.BytesIO(log.encode())).blocks():
        for line in lines_of(block):
            reader.feed(line)
    reader.finish()
    return reader.chains


def traceback(error: str, *frames: str) -> str:
    body = "".join(f'  File "/x/{frame}.py", line 3, in {frame}\n    {frame}()\n    ^^^^^^^\n' for frame in frames)
    return f"Traceback (most recent call last):\n{body}{error}\n"


CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


def test_a_chain_is_followed_to_its_first_cause() -> None:
    log = (
        traceback("KeyError: 'a'", "one", "two")
        + CAUSED
        + traceback("ValueError: b", "three")
        + CONTEXT
        + traceback("OSError: c", "four")
    )
    (chain,) = chains(log)
    assert [member.type for member in chain.members] == ["KeyError", "ValueError", "OSError"]
    assert [member.relation for member in chain.members] == ["", "cause", "context"]
    assert (chain.root.frames[-1].function, chain.root.frames[-1].code) == ("two", "two()")


def test_two_processes_that_write_at_once_are_told_apart() -> None:
    first, second = (
        traceback(error, *frames).splitlines() for error, frames in (("KeyError: 1", ("a", "b")), ("OSError: 2", ("c", "d")))
    )
    log = "".join(
        f"(Worker_TP0 pid=1) ERROR 07-30 12:49:30 [x.py:1] {one}\n(Worker_TP1 pid=2) ERROR 07-30 12:49:30 [x.py:1] {two}\n"
        for one, two in zip(first, second, strict=True)
    )
    found = {chain.root.type: [frame.function for frame in chain.root.frames] for chain in chains(log)}
    assert found == {"KeyError": ["a", "b"], "OSError": ["c", "d"]}


def test_the_same_traceback_of_each_worker_counts_as_one() -> None:
    lines = traceback("KeyError: 'layers.0'", "a", "b").splitlines()
    log = "".join(f"(Worker_TP{rank} pid={rank}) ERROR 07-30 12:49:30 [x.py:1] {line}\n" for rank in range(4) for line in lines)
    (chain,) = chains(log)
    assert chain.count == 4


@pytest.mark.parametrize("spoil", [lambda line: line.strip(), lambda line: "> " + line, lambda line: f"    {line}"])
def test_indentation_is_not_needed(spoil: object) -> None:
    log = "\n".join(map(spoil, traceback("torch._dynamo.exc.Unsupported: no", "a", "b").splitlines()))  # type: ignore[call-overload]
    (chain,) = chains(log)
    assert (chain.root.type, [frame.function for frame in chain.root.frames]) == ("torch._dynamo.exc.Unsupported", ["a", "b"])


@pytest.mark.parametrize("width", [24, 40, 61, 100])
def test_a_wrapped_frame_is_put_together(width: int) -> None:
    log = traceback("KeyError: 'a'", "some_function_with_a_long_name")
    wrapped = "\n".join(line[at : at + width] for line in log.splitlines() for at in range(0, len(line), width))
    (chain,) = chains(wrapped)
    assert chain.root.frames[0].file == "/x/some_function_with_a_long_name.py"
    assert chain.root.type == "KeyError"


def test_frames_of_dynamos_user_code_are_kept_apart() -> None:
    prefix = "(EngineCore_DP0 pid=653) ERROR 02-12 18:07:09 [core.py:842] "
    log = "".join(
        prefix + line + "\n"
        for line in (
            *traceback("torch._dynamo.exc.Unsupported: Operator does not support", "wrapper").splitlines(),
            "  Explanation:", "", "from user code:", '   File "/x/llama.py", line 456, in forward', "    layer(positions)",
        )
    )  # fmt: skip
    (chain,) = chains(log)
    assert [frame.function for frame in chain.root.user_frames] == ["forward"]
    assert [frame.function for frame in chain.root.frames] == ["wrapper"]


def test_the_root_of_a_chain_is_named_and_what_followed_is_not() -> None:
    log = (
        traceback("RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::Half != c10::BFloat16", "a")
        + CAUSED
        + traceback("KeyError: 'layers.0.mlp.gate.weight'", "b")
    )
    explanation = explain_stream(io.BytesIO(log.encode()), name="test")
    assert [cause.code for cause in explanation.conclusion.causes] == ["DTY901"]


def test_the_deployment_is_read() -> None:
    log = (
        "ZE_AFFINITY_MASK=0,1 HF_TOKEN=hf_abcdefghijklmnopqrst vllm serve Qwen/Q-FP8 -tp 2 --api-key intel123 --enforce-eager\n"
        "(APIServer pid=1) INFO 07-17 12:28:06 [api_server.py:1] vLLM API server version 0.21.1.dev18+g8df6feb7d\n"
        "PyTorch version                  : 2.13.0+xpu\n"
        "vLLM XPU kernels version         : 0.1.14.1\n"
        "GPU 0: Intel(R) Arc(TM) Pro B70 Graphics\n"
        "docker image intel/llm-scaler-vllm:0.21.0-b2\n"
    )
    deployment = explain_stream(io.BytesIO(log.encode()), name="test").deployment
    assert deployment.versions == {"vllm": "0.21.1.dev18+g8df6feb7d", "torch": "2.13.0+xpu", "vllm-xpu-kernels": "0.1.14.1"}
    assert (deployment.model, deployment.image) == ("Qwen/Q-FP8", "intel/llm-scaler-vllm:0.21.0-b2")
    assert deployment.gpu == "Intel(R) Arc(TM) Pro B70"
    assert deployment.parallel is True
    shown = " ".join(deployment.argv) + deployment.command
    assert "intel123" not in shown
    assert "hf_abc" not in shown
    assert deployment.argv[:3] == ["Qwen/Q-FP8", "-tp", "2"]
