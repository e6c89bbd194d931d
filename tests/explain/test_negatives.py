"""Real logs of vLLM that are no XPU failures: healthy starts, and failures that are named for what they are (scripts/record_logs.py)."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from xpufp8.explain import Explanation, exit_code, explain_stream, to_report

DATA = Path(__file__).parent / "data"
HEALTHY = sorted((DATA / "healthy").glob("*.log"))
UNRELATED = {
    "bad-choice": ["CFG002"], "unknown-option": ["CFG001"], "port-in-use": ["ENV923"], "missing-folder": ["ENV925"],
    "hub-unreachable": ["ENV926"], "hub-offline": ["ENV926"], "hub-gated": ["ENV924"], "hub-unauthorized": ["ENV924"],
    "bad-tokenizer": ["ENV927"], "bad-config": ["ENV932"], "cut-weights": ["ENV930"], "no-weights": ["ENV931"],
    "unknown-architecture": ["MDL001"], "unknown-model-type": ["MDL001"], "too-long-context": ["CFG902"],
    "heads-not-divisible": ["CFG903"], "unknown-quantization": ["CFG901"], "other-quantization": ["CFG004"],
    "block-fp8-without-amx": ["KRN002"], "disk-full": ["ENV928"], "engine-killed": [], "two-workers-one-numa-node": [],
}  # fmt: skip
"""Recorded failure to the codes that it must have; none where no signature can know the cause."""

LINES = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.88 GiB. GPU 3 has a total capacity of 21.96 GiB": "ENV921",
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 12.95 GiB. GPU 0 has a total capacity of 127.00 GiB": "ENV921",
    "RuntimeError: CUDA error: an illegal memory access was encountered": "ENV922",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1554, unhandled cuda error": "ENV922",
    "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use": "ENV923",
    "OSError: [Errno 28] No space left on device": "ENV928",
    "OSError: [Errno 24] Too many open files": "ENV933",
    "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory": "ENV010",
    "Error response from daemon: No such container: vllm": "ENV935",
    "Error: no such container: vllm-1": "ENV935",
    'Error from server (NotFound): pods "vllm-0" not found': "ENV935",
    'Error: no container with name or ID "vllm" found: no such container': "ENV935",
    "INFO 11-30 10:00:00 [api_server.py:1] vLLM API server version 0.21.0\nKilled": "MEM905",
    "The quantization method fp8 is not supported for the current GPU. Minimum capability: 89. Current capability: 75.": "KRN901",
}
"""Errors of other stacks that no CPU server can provoke, in the words of public reports."""


def explain(data: bytes) -> Explanation:
    return explain_stream(io.BytesIO(data), name="test")


def test_there_are_recordings() -> None:
    assert len(HEALTHY) >= 8
    assert {path.stem for path in (DATA / "unrelated").glob("*.log")} == UNRELATED.keys()


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_start_is_no_failure(path: Path) -> None:
    explanation = explain(path.read_bytes())
    report = to_report(explanation)
    assert (report.findings, report.verdict, exit_code(explanation)) == ([], "servable", 0)


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_start_is_none_whatever_writes_it_down(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for prefix in ("vllm-1  | ", "Jul 30 12:49:30 box vllm[4711]: ", "2026-07-30T12:49:30.204696793Z "):
        assert explain("".join(prefix + line + "\r\n" for line in text.splitlines()).encode()).outcome == "healthy"


@pytest.mark.parametrize("name", UNRELATED)
def test_an_unrelated_failure_is_named_for_what_it_is(name: str) -> None:
    explanation = explain((DATA / "unrelated" / f"{name}.log").read_bytes())
    assert [cause.code for cause in explanation.conclusion.causes] == UNRELATED[name]
    assert exit_code(explanation) == (1 if UNRELATED[name] else 3)


@pytest.mark.parametrize("line", LINES)
def test_an_error_of_another_stack_is_not_taken_for_xpu(line: str) -> None:
    findings = to_report(explain(f"Traceback (most recent call last):\n{line}\n".encode())).findings
    assert [finding.code for finding in findings] == [LINES[line]]
    assert "XPU" not in findings[0].title
    shown = findings[0].cause.replace("not an XPU fault", "").replace("not about XPU", "").replace("not from an Intel GPU", "")
    assert "XPU fault" not in shown


def test_a_failure_that_no_signature_knows_is_not_guessed_at() -> None:
    log = (
        "(EngineCore pid=7) ERROR 07-30 12:49:30 [core.py:1] EngineCore failed to start.\n"
        "(EngineCore pid=7) ERROR 07-30 12:49:30 [core.py:1] Traceback (most recent call last):\n"
        '(EngineCore pid=7) ERROR 07-30 12:49:30 [core.py:1]   File "/x/vllm/zeppelin.py", line 5, in fly\n'
        "(EngineCore pid=7) ERROR 07-30 12:49:30 [core.py:1]     self.rise()\n"
        "(EngineCore pid=7) ERROR 07-30 12:49:30 [core.py:1] ZeppelinError: the gas is out\n"
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    )
    explanation = explain(log.encode())
    finding = to_report(explanation).findings[0]
    assert exit_code(explanation) == 3
    assert (finding.code, finding.status) == ("ENV990", "unknown")
    assert "ZeppelinError: the gas is out" in finding.cause
    assert any("zeppelin.py" in evidence.observed and "line 5" in evidence.observed for evidence in finding.evidence)
    assert any("dmesg" in fix.action for fix in finding.fixes)


def test_a_wrapper_alone_is_an_unknown_failure() -> None:
    log = "(APIServer pid=1125) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    explanation = explain(log.encode())
    assert explanation.outcome == "unknown"
    assert "no traceback" in to_report(explanation).findings[0].cause


def test_a_server_that_was_asked_to_stop_did_not_fail() -> None:
    log = (
        "(APIServer pid=1) INFO:     Application startup complete.\n"
        "(EngineCore pid=2) INFO 11-30 22:43:47 [core.py:1454] [shutdown] EngineCore: trigger received signal=SIGTERM\n"
        "(APIServer pid=1) ERROR 11-30 22:43:47 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered"
        " an issue. See stack trace (above) for the root cause.\n"
    )
    assert explain(log.encode()).outcome == "healthy"
    assert explain(log.replace("signal=SIGTERM", "nothing").encode()).outcome == "unknown"


def test_an_error_in_a_prompt_is_talk() -> None:
    log = (
        "INFO 07-30 12:49:30 [logger.py:41] Received request cmpl-1: prompt: 'why KeyError: <PlatformEnum.XPU: 4>?', params: None\n"
        "INFO:     Application startup complete.\n"
    )
    assert explain(log.encode()).outcome == "healthy"


def test_the_warnings_of_a_healthy_xpu_server_are_no_failure() -> None:
    log = """\
[W515 11:18:35.162983151 OperatorEntry.cpp:208] Warning: Warning only once for all operators,  other operators may also be overridden.
(APIServer pid=1) INFO 07-17 12:28:06 [api_server.py:1272] vLLM API server version 0.21.1.dev0
(APIServer pid=1) WARNING 07-17 12:28:07 [_logger.py:68] Failed to import from vllm._C with ModuleNotFoundError("No module named 'vllm._C'")
(EngineCore pid=501) WARNING 07-17 12:28:49 [xpu.py:365] XPU Graph is not supported in the current PyTorch version, disabling it.
(Worker pid=533) INFO 07-17 12:28:59 [parallel_state.py:1615] world_size=2 rank=1 local_rank=1 backend=xccl
2026:07:17-12:29:00:(  532) |CCL_WARN| pidfd is not supported, fallbacks to drmfd exchange mode
2026:07:17-12:29:00:(  532) |CCL_WARN| topology recognition shows PCIe connection between devices. If not correct, disable it
(Worker_TP0 pid=532) WARNING 07-17 12:29:12 [topk_topp_sampler.py:259] xpu kernel topk_topp_sampler does not support per-request generators.
(Worker_TP0 pid=532) INFO 07-17 12:30:12 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds.
XMX int8 is not supported on B70 with oneAPI < 2026. Falling back to fp16.
(APIServer pid=1) INFO:     Application startup complete.
(APIServer pid=1) INFO:     127.0.0.1:48802 - "POST /v1/completions HTTP/1.1" 200 OK
"""
    assert explain(log.encode()).outcome == "healthy"
    # The same without the sign of life: the hints are all there is, and are named as such.
    stuck = explain(log.split("XMX")[0].encode())
    assert {cause.code for cause in stuck.conclusion.causes} == {"P2P004", "P2P905"}
    assert all(cause.hint for cause in stuck.conclusion.causes)


def test_a_crash_before_a_good_start_is_still_told() -> None:
    log = (
        "(EngineCore pid=1) ERROR 07-30 12:49:30 [core.py:1] KeyError: <PlatformEnum.XPU: 4>\n"
        "(APIServer pid=9) INFO:     Application startup complete.\n"
    )
    assert [cause.code for cause in explain(log.encode()).conclusion.causes] == ["KRN001"]
