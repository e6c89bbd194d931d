"""Stages of torch.compile told apart by real failures made here, each in a real child."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device_children import ROOT, ask, judge, plugin

from probes.compile import observe
from probes.device_facts import CompileFacts
from probes.protocol import Context

CONTEXT: dict[str, Any] = {"device": "cpu", "options": {"dtype": "bfloat16", "schemes": ["fp8-channel-token"]}}
SCHEME = "fp8-channel-token"
LLAMA = {
    **CONTEXT,
    "model": str(ROOT / "tests" / "data" / "models" / "Llama-3.1-8B-Instruct"),
    "vllm_args": ["--max-model-len", "512"],
}


def stages(facts: CompileFacts, subject: int = 0) -> dict[str, str]:
    return {stage.stage: stage.observation for stage in facts.subjects[subject].stages}


def test_simulated_device_is_unknown_without_torch() -> None:
    facts = observe(Context(device="sim:arc-pro-b60"))
    assert (facts.run.mode, facts.subjects, facts.compiler) == ("simulated", [], None)
    assert "graph capture" in facts.run.unknown
    assert judge("compile", facts, SCHEME, device="sim:arc-pro-b60") == []


@pytest.mark.sim
def test_what_compiles_has_no_finding_and_no_graph_on_the_cpu(tmp_path: Path) -> None:
    (answer,) = ask(tmp_path, [("compile", "none", LLAMA)], VLLM_CACHE_ROOT=str(tmp_path / "vllm"))
    facts: CompileFacts = answer[3]
    assert stages(facts) == {"trace": "pass", "aot": "pass", "codegen": "pass", "run": "pass", "capture": "unknown"}
    assert (facts.cache_error, facts.compiler_error) == (None, None)
    assert judge("compile", facts, SCHEME) == []
    # vLLM's own attention layer ran, with a cache and metadata of its own: its op is in the graph, and no note says otherwise.
    assert "vllm::unified_attention_with_output" in facts.subjects[0].ops
    assert (facts.subjects[0].kernel or "").endswith(", CPU_ATTN")
    assert not [note for note in facts.run.notes if "attention" in note]
    assert not list((tmp_path / "vllm" / "torch_compile_cache").iterdir()), "the probe leaves nothing behind"


@pytest.mark.sim
def test_no_compiler_and_an_unwritable_cache_are_two_things(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a cache cannot be below a file", encoding="utf-8")
    environment = {"PATH": str(tmp_path), "VLLM_CACHE_ROOT": str(tmp_path / "file" / "vllm")}
    (answer,) = ask(tmp_path, [("compile", "none", CONTEXT)], **environment)
    facts: CompileFacts = answer[3]
    assert facts.compiler is None
    assert stages(facts)["trace"] == stages(facts)["aot"] == "pass"
    assert stages(facts)["codegen"] == "fail"
    findings = {f.code: f for f in judge("compile", facts, SCHEME)}
    assert set(findings) == {"CMP004", "CMP005"}
    assert "No working C++ compiler" in findings["CMP004"].cause
    # Dynamo's graph without generated code was tried and works, so eager is not proposed.
    assert [x.action for x in findings["CMP004"].fixes if x.kind == "flag"] == ['--compilation-config {"backend":"eager"}']
    assert "NotADirectoryError" in findings["CMP005"].cause
    assert findings["CMP005"].fixes[0].action.startswith("VLLM_CACHE_ROOT=")


@pytest.mark.sim
def test_an_op_that_breaks_in_codegen_and_one_that_breaks_the_graph(tmp_path: Path) -> None:
    path = plugin(tmp_path)
    asked = [("compile", fault, CONTEXT) for fault in ("breaks-codegen", "breaks-graph", "none")]
    asked.append(("compile", "breaks-attention", LLAMA))
    answers = {fault: facts for _, fault, _, facts in ask(tmp_path, asked, path=path, VLLM_CACHE_ROOT=str(tmp_path / "vllm"))}

    broken: CompileFacts = answers["breaks-codegen"]
    assert [s.name for s in broken.subjects] == [f"linear {SCHEME}"]
    assert stages(broken)["trace"] == stages(broken)["aot"] == "pass"
    assert stages(broken)["codegen"] == "fail"
    (finding,) = judge("compile", broken, SCHEME)
    assert (finding.code, finding.subject) == ("CMP003", f"linear {SCHEME}")
    assert "PassManager::run failed" in finding.cause
    assert finding.fixes[0].action == '--compilation-config {"backend":"eager"}'

    graph: CompileFacts = answers["breaks-graph"]
    assert stages(graph)["trace"] == "fail"
    assert stages(graph)["codegen"] == "unknown"
    (finding,) = judge("compile", graph, SCHEME)
    assert (finding.code, [x.action for x in finding.fixes]) == ("CMP001", ["--enforce-eager"])

    right: CompileFacts = answers["none"]
    assert judge("compile", right, SCHEME) == []
    assert "faulty::gemm" in right.subjects[0].ops
    # Without a model vLLM's layer cannot be made: torch's attention stands for it, and a note says so.
    assert right.subjects[0].name.endswith(" + attention")
    assert any("attention is torch's own" in note and "no model was given" in note for note in right.run.notes)

    broken = answers["breaks-attention"]
    assert [(s.name, s.kernel) for s in broken.subjects] == [("attention", "CPU_ATTN")]
    (finding,) = judge("compile", broken, SCHEME)
    assert (finding.code, finding.subject) == ("CMP001", "attention")


def test_eager_as_typed_makes_compilation_nobodys_matter() -> None:
    from probes.device_facts import DeviceRunFact
    from xpufp8.rules import BY_CODE
    from xpufp8.rules.base import Case

    facts = CompileFacts(DeviceRunFact("cpu", "live"), cache_folder="/x", cache_error="PermissionError: /x")
    code = BY_CODE["CMP005"]
    assert [f.code for f in code.check(code, Case("cpu", (), None, {"compile": facts}))] == ["CMP005"]
    assert list(code.check(code, Case("cpu", ("--enforce-eager",), None, {"compile": facts}))) == []
