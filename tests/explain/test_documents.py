"""Whole documents pasted in, prose and all: every fault of theirs is found, and nothing else is claimed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from xpufp8.explain import Explanation, exit_code, explain_stream, to_report

REPORTS = Path(__file__).resolve().parents[2].parent / "shared" / "reports"
DOCUMENTS = {
    "block-fp8-qwen3.6-27b.txt": {"P2P001": "peer-to-peer DMA", "KRN001": "XPU", "CMP901": "Intel Triton",
                                  "MDL001": "MergedColumnParallelLinear.weight", "DTY901": "c10::Half / c10::BFloat16"},
    "fp8-gemm-w8a16-missing-fake.txt": {"OPS001": "torch_ipex.fp8_gemm_w8a16"},
    "fp8linear-w8a8-runtime-quantization.txt": {"KRN904": "torch._scaled_mm"},
    "llama-3.1-8b-fp8-fake-tensor.txt": {"OPS001": "torch_ipex.fp8_gemm_w8a16"},
}  # fmt: skip

FORUM_POST = """\
[vllm] Pre-quantized model X does not start on two cards (see also example-org/project#123: PassManager::run failed)

## Environment
* 2x Intel Arc Pro B60, image `intel/llm-scaler-vllm:0.21.0-b1`, kernel 7.0
* unlike example-org/project#99 this is not `RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)`
* I set CCL_SEND=direct CCL_RECV=direct, otherwise zeMemOpenIpcHandle fails

vllm serve /llm/models/X-FP8 -tp 2 --max-model-len 8192

It ends like this:

```
File ".../vllm/model_executor/kernels/linear/__init__.py", line 355, in choose_scaled_mm_linear_kernel
for kernel in possible_kernels[current_platform._enum]:
KeyError: <PlatformEnum.XPU: 4>
```

Adding `--enforce-eager` does not help. Is UR_RESULT_ERROR_DEVICE_LOST related? Would a fake implementation be needed?
"""


def explain(data: bytes) -> Explanation:
    return explain_stream(io.BytesIO(data), name="document")


@pytest.mark.skipif(not REPORTS.is_dir(), reason="the public reports lie beside the repository, not in it")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_all_faults_of_a_report_and_no_other(name: str) -> None:
    explanation = explain((REPORTS / name).read_bytes())
    assert {cause.code: cause.subject for cause in explanation.conclusion.causes} == DOCUMENTS[name]
    assert len(explanation.conclusion.causes) == len(DOCUMENTS[name])
    assert exit_code(explanation) == 1


@pytest.mark.skipif(not REPORTS.is_dir(), reason="the public reports lie beside the repository, not in it")
def test_the_deployment_is_read_from_a_report() -> None:
    deployment = explain((REPORTS / "fp8-gemm-w8a16-missing-fake.txt").read_bytes()).deployment
    assert deployment.image == "intel/llm-scaler-vllm:0.10.2-b6"
    assert deployment.model == "Qwen/Qwen3-VL-30B-A3B-Instruct"
    assert deployment.sizes["tensor"] == 2
    assert deployment.options["quantization"] == "fp8"
    assert "B70" in deployment.gpu


def test_prose_about_other_errors_is_not_taken_for_this_one() -> None:
    explanation = explain(FORUM_POST.encode())
    assert [cause.code for cause in explanation.conclusion.causes] == ["KRN001"]
    assert explanation.deployment.sizes["tensor"] == 2
    assert explanation.deployment.argv[:3] == ["/llm/models/X-FP8", "-tp", "2"]


def test_a_document_about_errors_without_one_claims_nothing() -> None:
    text = FORUM_POST.split("It ends like this")[0]
    assert explain(text.encode()).conclusion.causes == []


@pytest.mark.parametrize(
    ("shown", "dated"),
    [
        ("0.21.0", "the log shows 0.21.0."),
        ("0.33.0", "which has that already"),
        ("0.21.1.dev0+gad7125a43", "the log shows 0.21.1.dev0"),
    ],
)
def test_a_fix_that_came_with_a_release_is_dated(shown: str, dated: str) -> None:
    log = f"INFO 07-30 12:49:30 [api_server.py:1] vLLM API server version {shown}\nKeyError: <PlatformEnum.XPU: 4>\n"
    finding = to_report(explain(log.encode())).findings[0]
    assert "vllm 0.32.0" in finding.cause
    assert dated in finding.cause


@pytest.mark.parametrize(("tag", "has"), [("0.14.0-b8.2", False), ("0.21.0-b2", False), ("0.21.0-b3", True), ("0.26.0-b1", True)])
def test_image_tags_are_dated_too(tag: str, has: bool) -> None:
    log = f"docker run intel/llm-scaler-vllm:{tag}\nNotImplementedError: XPU gdn_attention does not yet support 'spec_sequence_masks'.\n"
    cause = to_report(explain(log.encode())).findings[0].cause
    assert ("which has that already" in cause) is has
