"""Public failure reports: each case, and each as other people's logs would show it, comes to the right cause and fix."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from log_mutations import MUTATIONS, wrapped

from xpufp8.explain import Explanation, exit_code, explain_stream, to_report

DATA = Path(__file__).parent / "data"
CASES = {case["id"]: case for case in map(json.loads, (DATA / "cases.jsonl").read_text(encoding="utf-8").splitlines())}
SYMPTOMS = [json.loads(line) for line in (DATA / "symptoms.jsonl").read_text(encoding="utf-8").splitlines()]

# What people found: the rule's code, a word of the cause, and a word of the fix that they confirmed.
EXPECTED = {
    "ipex-fp8-gemm-w8a16-no-fake": ("OPS001", "fake", "--enforce-eager"),
    "fp8-block-table-keyerror-xpu": ("KRN001", "no XPU row", "--quantization fp8"),
    "qwen36-fp8-no-attribute-weight": ("MDL001", "did not register", "DISABLE_ESIMD_FUSED_INPUT=1"),
    "gdn-dt-bias-bf16-vs-half": ("DTY901", "float16 whatever the model's dtype", "--dtype float16"),
    "zememopenipc-tp2-b70-root-ports": ("P2P002", "open the other's memory", "Linux 7.1"),
    "xe-no-p2pdma-no-shared-bridge": ("P2P001", "root ports or host bridges", "CCL_TOPO_P2P_ACCESS=0"),
    "triton-make-llir-passmanager-lts2": ("CMP901", "LTS2", "rolling driver"),
    "libsycl-so-9-missing": ("ENV011", "another generation of oneAPI", "same oneAPI generation as torch"),
    "no-xpu-devices-render-group": ("DEV004", "/dev/dri is not passed", "--device /dev/dri --group-add"),
    "fp8-llama-compile-wrapper-fail": ("OPS901", "breaks off before its exception", "--enforce-eager"),
    "xpu-graph-oneccl-not-recordable": ("CMP008", "cannot be recorded into a SYCL graph", "VLLM_XPU_ENABLE_XPU_GRAPH=0"),
    "triton-make-ttgir-passmanager": ("CMP901", "block-pointer kernels", "intel-xpu-backend-for-triton#5746"),
    "triton-init-devices-no-device": ("DEV009", "OpenCL device of the same name", "Do not set ONEAPI_DEVICE_SELECTOR"),
    "triton-arch-unknown-spawn": ("CMP905", "empty device name", "TRITON_INTEL_DEVICE_ARCH=bmg"),
    "ngram-spec-device-lost-load": ("DEV901", "while requests were served", "n-gram"),
    "autoround-int8-xmx-device-lost": ("DEV901", "INT8 XMX", "Keep the FP16 fallback"),
    "mem-get-info-unsupported": ("DEV913", "how much memory is free", "ZES_ENABLE_SYSMAN=1"),
    "igpu-b390-awq-moe-device-lost": ("DEV901", "does not stand in this line", "dmesg"),
    "fa-query-key-dtype-mismatch": ("DTY902", "in the same dtype or in FP8", "--kv-cache-dtype auto"),
    "oneapi-env-not-sourced-zero-devices": ("DEV004", "does not load the oneAPI environment", "setvars.sh --force"),
    "vllm-xpu-kernels-c-missing": ("ENV001", "vllm-xpu-kernels is not installed", "requirements/xpu.txt"),
    "awq-dequantize-missing": ("KRN903", "registers no such op", "INT4 AutoRound"),
    "dense-fp8-keyerror-cookbook": ("KRN001", "no XPU row", "GPTQ-INT4"),
    "torch-scaled-mm-block-unsupported": ("KRN904", "not 128x128 blocks", "per-channel or dynamic FP8 checkpoint"),
    "kv-cache-10mib-short": ("MEM001", "4.26 GiB of KV cache", "--max-model-len"),
    "level-zero-oor-layer-forward": ("MEM901", "Memory on the card ran out", "smaller or a quantized checkpoint"),
    "vision-qkv-out-of-resources": ("MEM901", "many images", "smaller batches"),
    "sampler-out-of-resources-gptoss": ("MEM901", "sampler", "--gpu-memory-utilization"),
    "internvl3-awq-qkv-keyerror": ("MDL902", "vision towers of AWQ", "16-bit checkpoint"),
    "qwen3vl-moe-tie-word-embeddings": ("MDL001", "transformers does not define it", "transformers release that the image"),
    "moe-wna16-awq-capability-minus-one": ("KRN901", "written for CUDA", "GPTQ or AutoRound INT4"),
    "int8-moe-triton-unsupported-scheme": ("KRN003", "No fused-MoE backend", "FP8 or INT4"),
    "request-typo-16-tokens": ("CFG906", "max_tokens did not arrive", "spelling of max_tokens"),
    "gdn-spec-sequence-masks": ("KRN907", "Speculative decoding", "Remove --speculative-config"),
    "b50-1.4-device-lost-tp2": ("P2P010", "first collectives", "Stay on the image that worked"),
    "oneccl-sockets-overridden": ("P2P004", "sockets is silently replaced", "--cap-add SYS_PTRACE"),
    "ccl-sycl-thresholds-device-lost": ("P2P010", "first collectives", "CCL_SYCL_ALLREDUCE_SIMPLE_THRESHOLD=4294967296"),
    "shm-broadcast-hang-kv-profiling": ("P2P905", "only the symptom", "0.26.0-b2"),
}


def explain(text: str) -> Explanation:
    return explain_stream(io.BytesIO(text.encode()), name="test")


def test_every_case_has_an_expectation() -> None:
    assert EXPECTED.keys() == CASES.keys()
    assert len(CASES) == 38


@pytest.mark.parametrize("case", CASES)
def test_cause_and_confirmed_fix(case: str) -> None:
    code, cause, fix = EXPECTED[case]
    explanation = explain(CASES[case]["log"])
    findings = to_report(explanation).findings
    assert [finding.code for finding in findings] == [code]
    assert cause in findings[0].cause
    assert any(fix in f"{one.action} {one.cost}" for one in findings[0].fixes)
    assert exit_code(explanation) == 1


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_the_same_from_other_logs(case: str, mutation: str) -> None:
    findings = to_report(explain(MUTATIONS[mutation](CASES[case]["log"]))).findings
    assert [finding.code for finding in findings] == [EXPECTED[case][0]]
    assert any(EXPECTED[case][2] in f"{one.action} {one.cost}" for one in findings[0].fixes) or mutation in {
        "renamed",
        "all at once",
    }


@pytest.mark.parametrize("width", [61, 79, 88, 119])
@pytest.mark.parametrize("case", CASES)
def test_the_same_when_wrapped(case: str, width: int) -> None:
    assert [finding.code for finding in to_report(explain(wrapped(width)(CASES[case]["log"]))).findings] == [EXPECTED[case][0]]


@pytest.mark.parametrize("case", CASES)
def test_the_serve_command_changes_no_cause(case: str) -> None:
    command = CASES[case]["serve_command"] or "vllm serve MODEL"
    findings = to_report(explain(f"$ {command}\n{CASES[case]['log']}")).findings
    assert [finding.code for finding in findings] == [EXPECTED[case][0]]


@pytest.mark.parametrize("case", CASES)
def test_evidence_is_the_lines_of_the_log(case: str) -> None:
    log = CASES[case]["log"]
    lines = log.split("\n")
    for evidence in to_report(explain(log)).findings[0].evidence:
        number = int(evidence.where.removeprefix("line "))
        assert evidence.observed.strip("…") in lines[number - 1]


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: symptom["id"])
def test_a_symptom_is_not_taken_for_a_cause(symptom: dict[str, str]) -> None:
    explanation = explain(symptom["log"])
    assert explanation.conclusion.causes == []
    assert exit_code(explanation) == 0


def test_one_log_of_all_cases_names_each_cause_once() -> None:
    """Crash after crash in one file: every cause is found, none is claimed that no case has."""
    filler = "INFO 07-30 12:49:30 [config.py:1] Using max model len 512\n" * 500
    log = filler.join(case["log"] + "\n" for case in CASES.values())
    codes = {finding.code for finding in to_report(explain(log)).findings}
    hints = {"CFG906", "P2P905", "P2P004"}
    assert codes <= {code for code, _, _ in EXPECTED.values()}
    assert {code for code, _, _ in EXPECTED.values()} - codes <= hints | {"OPS901"}
