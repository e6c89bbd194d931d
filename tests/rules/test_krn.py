"""The KRN rules on facts: what fails, what is slow, what is unknown, and which evidence wins."""

from __future__ import annotations

from typing import Any

import pytest

from probes.facts import ConditionalRowFact, ErrorFact, KernelTableFacts, Mode, MoeOracleFact, SelectionFact, TableFact
from xpufp8.model import ModelSpec, SchemeUse
from xpufp8.report import Finding
from xpufp8.rules import krn
from xpufp8.rules.base import Case
from xpufp8.runtime import catalogue

FILE = "vllm/model_executor/kernels/linear/__init__.py"
AMX = "CPUFp8BlockScaledMMKernel requires AMX tile support (Sapphire Rapids or newer).."


def table(kind: str, lookup: str = "get", **rows: list[str]) -> TableFact:
    name = f"_POSSIBLE_{kind.upper()}_KERNELS"
    return TableFact(name, kind, FILE, 10, True, rows, lookup, FILE, 355)  # type: ignore[arg-type]  # a lookup by name


FP8 = table("fp8", XPU=["XPUW8A16FP8LinearKernel"], CPU=["PerTensorTorchFP8ScaledMMLinearKernel"])
BLOCK = table("fp8_block", XPU=["XPUFp8BlockScaledMMKernel"], CPU=["CPUFp8BlockScaledMMKernel"])
NO_BLOCK = table("fp8_block", "index", CUDA=["CutlassFp8BlockScaledMMKernel"], CPU=["CPUFp8BlockScaledMMKernel"])
ORACLE = MoeOracleFact("fp8", "vllm/model_executor/layers/fused_moe/oracle/fp8.py", 48, ["TRITON", "XPU"], {"XPU": ["XPU"]})


def answer(
    scheme: str = "fp8-block", table: str = "fp8_block", kernel: str | None = None, *reasons: str,
    dtype: str = "bfloat16", mode: Mode = "live", error: ErrorFact | None = None, shape: tuple[int, int] = (4096, 4096),
) -> SelectionFact:  # fmt: skip
    return SelectionFact(scheme, dtype, table, mode, kernel, list(reasons), error, list(shape))


def facts(*tables: TableFact, platform: str | None = "XPU", **extra: Any) -> KernelTableFacts:
    layout = extra.pop("layout", "kernels/linear")
    return KernelTableFacts(extra.pop("vllm", "0.32.0"), "/site/vllm", layout, platform, list(tables), **extra)


def model(*schemes: str, moe: tuple[str, ...] = (), dtype: str = "bfloat16", online: bool = False) -> ModelSpec:
    uses = [SchemeUse(scheme, "every linear layer but lm_head") for scheme in schemes]
    uses += [SchemeUse(scheme, "the experts of every MoE layer", moe=True) for scheme in moe]
    return ModelSpec("m", "m", dtype=dtype, quant_method="fp8", online=online, uses=tuple(uses))


def judge(what: KernelTableFacts, spec: ModelSpec | None = None, device: str = "xpu") -> list[Finding]:
    case = Case(device=device, model=spec, facts={"kernel_table": what})
    return [finding for rule in krn.RULES for finding in rule.check(rule, case)]


def codes(findings: list[Finding]) -> list[tuple[str, str, str, str]]:
    return [(f.code, f.severity, f.status, f.subject) for f in findings]


KEY_ERROR = ErrorFact("builtins.KeyError", "<PlatformEnum.XPU: 4>")


# -- KRN001 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lookup", "says"),
    [("index", "KeyError: <PlatformEnum.XPU>"), ("get", "ValueError"), ("unknown", "not recognised")],
)
def test_a_missing_row_names_its_consequence(lookup: str, says: str) -> None:
    source = table("fp8_block", lookup, CPU=["K"], CUDA=["L"])
    (finding,) = judge(facts(source, platform=None), model("fp8-block"))
    assert codes([finding]) == [("KRN001", "error", "fail", "fp8_block")]
    assert says in finding.cause
    assert finding.affects == ["every linear layer but lm_head"]
    row = finding.evidence[0]
    assert (row.mode, row.where) == ("static", f"{FILE}:10")
    assert row.observed == "_POSSIBLE_FP8_BLOCK_KERNELS has rows for CPU, CUDA; none for XPU"
    if lookup != "unknown":
        assert finding.evidence[1].where == f"{FILE}:355"


@pytest.mark.parametrize(("device", "mode"), [("xpu", "live"), ("sim:arc-pro-b60", "simulated")])
def test_vllm_s_own_key_error_stands_in_the_cause(device: str, mode: Mode) -> None:
    asked = answer(error=KEY_ERROR, mode=mode)
    (finding,) = judge(facts(NO_BLOCK, selections=[asked]), model("fp8-block"), device)
    assert finding.code == "KRN001"
    assert "KeyError: <PlatformEnum.XPU: 4>" in finding.cause
    assert [evidence.mode for evidence in finding.evidence] == ["static", "static", mode]
    assert finding.evidence[-1].observed == "KeyError: <PlatformEnum.XPU: 4>"


def test_an_empty_row_is_no_row() -> None:
    source = table("wfp8a16", CPU=[], XPU=["K"])
    (finding,) = judge(
        facts(source, platform="CPU", selections=[answer("fp8-w8a16-channel", "wfp8a16")]), model("fp8-w8a16-channel"), "cpu"
    )
    assert codes([finding]) == [("KRN001", "error", "fail", "wfp8a16")]
    assert "is empty" in finding.cause
    assert "ValueError" in finding.cause


def test_a_kernel_that_vllm_chose_beats_a_row_that_the_source_lacks() -> None:
    assert judge(facts(NO_BLOCK, selections=[answer(kernel="AddedByPlugin")]), model("fp8-block")) == []


def test_answers_for_another_platform_do_not_count() -> None:
    """vLLM saw a CPU where an XPU was asked about: its choice for the CPU says nothing, the source still does."""
    what = facts(NO_BLOCK, platform="CPU", selections=[answer(kernel="CPUFp8BlockScaledMMKernel")])
    assert codes(judge(what, model("fp8-block"))) == [("KRN001", "error", "fail", "fp8_block")]


def test_a_row_under_a_condition_is_unknown() -> None:
    maybe = TableFact(
        NO_BLOCK.name,
        "fp8_block",
        FILE,
        10,
        True,
        {"CPU": ["K"]},
        conditional=[ConditionalRowFact("XPU", ["K"], "has_kernels()", 12)],
    )
    (finding,) = judge(facts(maybe, platform=None), model("fp8-block"))
    assert codes([finding]) == [("KRN005", "error", "unknown", "fp8_block")]
    assert "K if has_kernels() (line 12)" in finding.cause


def test_fixes_of_a_missing_row() -> None:
    (finding,) = judge(facts(FP8, NO_BLOCK, vllm="0.21.0", platform=None), model("fp8-block"))
    assert [(fix.kind, fix.verified) for fix in finding.fixes] == [("runtime", False), ("host", False), ("host", False)]
    assert finding.fixes[0].action == "kernel:fp8_block"
    assert "--quantization fp8" in finding.fixes[1].action
    assert "0.32.0 or 0.33.0" in finding.fixes[2].action
    assert all(fix.cost for fix in finding.fixes[:2])


def test_online_quantization_is_a_flag_where_the_weights_are_16_bit_already() -> None:
    (finding,) = judge(facts(FP8, NO_BLOCK, vllm="0.21.0", platform=None), model("fp8-block", online=True))
    assert ("flag", "--quantization fp8") in [(fix.kind, fix.action) for fix in finding.fixes]


def test_no_release_is_recommended_that_is_there_already_or_that_nobody_read() -> None:
    (installed,) = judge(facts(NO_BLOCK, vllm="0.32.0", platform=None), model("fp8-block"))
    assert [fix.kind for fix in installed.fixes] == ["runtime"]
    nvfp4 = table("nvfp4", CUDA=["K"])
    (unread,) = judge(facts(nvfp4, vllm="0.21.0", platform=None), model("nvfp4"))
    assert unread.fixes == []


def test_per_tensor_fp8_is_only_recommended_where_it_has_a_kernel() -> None:
    refused = answer("fp8-tensor-dynamic", "fp8", None, "XPUW8A16FP8LinearKernel no")
    (finding,) = judge(facts(FP8, NO_BLOCK, selections=[refused]), model("fp8-block"))
    assert not any("--quantization" in fix.action for fix in finding.fixes)
    table_without = table("fp8", CPU=["K"])
    (finding,) = judge(facts(table_without, NO_BLOCK, platform=None), model("fp8-block"))
    assert not any("--quantization" in fix.action for fix in finding.fixes)


def test_without_a_model_missing_fp8_rows_are_warned_of_and_others_are_not() -> None:
    tables = [table(kind, CUDA=["K"]) for kind in ("fp8", "fp8_block", "wfp8a16", "mxfp8", "nvfp4", "int8")]
    assert codes(judge(facts(*tables, platform=None))) == [
        ("KRN001", "warning", "fail", "fp8"), ("KRN001", "warning", "fail", "fp8_block"),
        ("KRN001", "info", "fail", "wfp8a16"), ("KRN001", "info", "fail", "mxfp8"),
    ]  # fmt: skip


def test_int8_asks_the_nameless_table_of_old_releases() -> None:
    old = TableFact("_POSSIBLE_KERNELS", "scaled_mm", FILE, 5, True, {"CUDA": ["K"]}, "index", FILE, 9)
    what = facts(old, platform=None, layout="quantization/kernels", vllm="0.14.1")
    (finding,) = judge(what, model("int8-channel-token"))
    assert codes([finding]) == [("KRN001", "error", "fail", "scaled_mm")]
    assert [fix.action for fix in finding.fixes if fix.kind == "runtime"] == ["kernel:scaled_mm"]
    live = facts(old, layout="quantization/kernels", selections=[answer("int8-channel-token", "scaled_mm", "Added")])
    assert judge(live, model("int8-channel-token")) == []


# -- KRN002 ------------------------------------------------------------------------------------------------------------


def test_refusals_are_quoted_word_for_word() -> None:
    asked = answer("fp8-block", "fp8_block", None, AMX)
    (finding,) = judge(facts(FP8, BLOCK, platform="CPU", selections=[asked]), model("fp8-block"), "cpu")
    assert codes([finding]) == [("KRN002", "error", "fail", "fp8_block")]
    assert (finding.evidence[0].observed, finding.evidence[0].mode) == (AMX, "live")
    assert finding.evidence[1].observed == "_POSSIBLE_FP8_BLOCK_KERNELS lists for CPU: CPUFp8BlockScaledMMKernel"
    assert [fix.action for fix in finding.fixes if fix.kind == "runtime"] == ["kernel:fp8_block"]


def test_only_the_model_s_dtype_counts_and_another_that_is_taken_is_a_fix() -> None:
    asked = [answer("fp8-block", "fp8_block", None, "K only takes fp16."), answer(kernel="K", dtype="float16")]
    (finding,) = judge(facts(BLOCK, selections=asked), model("fp8-block"))
    assert ("flag", "--dtype float16") in [(fix.kind, fix.action) for fix in finding.fixes]
    assert judge(facts(BLOCK, selections=asked), model("fp8-block", dtype="float16")) == []


def test_a_dtype_that_does_not_take_every_shape_is_no_fix() -> None:
    asked = [
        answer("fp8-block", "fp8_block", None, "no", shape=shape) for shape in ((64, 64), (33, 64))
    ] + [answer(kernel="K", dtype="float16", shape=(64, 64))]  # fmt: skip
    (finding,) = judge(facts(BLOCK, selections=asked), model("fp8-block"))
    assert not any(fix.action.startswith("--dtype") for fix in finding.fixes)
    assert "33x64" in finding.evidence[0].where


def test_one_shape_that_is_refused_is_enough() -> None:
    asked = [answer(kernel="K", shape=(64, 64)), answer("fp8-block", "fp8_block", None, "N is odd", shape=(33, 64))]
    (finding,) = judge(facts(BLOCK, selections=asked), model("fp8-block"))
    assert finding.code == "KRN002"
    assert "[N, K] 33x64" in finding.evidence[0].where
    assert "64x64" not in finding.evidence[0].where


@pytest.mark.parametrize(
    "reason", [" K is disabled by environment variable", "K: disabled by VLLM_DISABLED_KERNELS", "K: disabled by env var"]
)
def test_a_kernel_that_the_environment_disables_can_be_enabled(reason: str) -> None:
    (finding,) = judge(facts(BLOCK, selections=[answer("fp8-block", "fp8_block", None, reason)]), model("fp8-block"))
    assert ("env", "VLLM_DISABLED_KERNELS=") in [(fix.kind, fix.action) for fix in finding.fixes]


def test_schemes_of_one_table_share_a_finding_and_a_scheme_that_has_a_kernel_is_not_named() -> None:
    asked = [
        answer("fp8-tensor-static", "fp8", "K"),
        answer("fp8-channel-token", "fp8", None, "no"),
        answer("fp8-channel-static", "fp8", None, "no"),
    ]
    (finding,) = judge(facts(FP8, selections=asked), model("fp8-tensor-static", "fp8-channel-token", "fp8-channel-static"))
    assert finding.code == "KRN002"
    assert "fp8-tensor-static" not in finding.cause
    assert "fp8-channel-token, fp8-channel-static" in finding.cause or "fp8-channel-static, fp8-channel-token" in finding.cause


# -- KRN003 ------------------------------------------------------------------------------------------------------------


def test_experts_without_a_backend() -> None:
    reasons = [f"Experts{n}: kernel does not support current device xpu" for n in range(20)]
    reasons.append("XPUExpertsFp8: kernel does not support quantization scheme AxB")
    asked = answer("fp8-channel-static", "moe:fp8", None, *reasons)
    (finding,) = judge(facts(FP8, moe=[ORACLE], selections=[asked]), model(moe=("fp8-channel-static",)))
    assert codes([finding]) == [("KRN003", "error", "fail", "moe_fp8")]
    lines = finding.evidence[0].observed.splitlines()
    assert len(lines) == 2
    assert "Experts0, Experts1" in lines[0]
    assert lines[1] == "XPUExpertsFp8: kernel does not support quantization scheme AxB"
    assert "names for XPU: XPU; in all: TRITON, XPU" in finding.evidence[1].observed
    assert [(fix.kind, fix.action) for fix in finding.fixes] == [("runtime", "moe:fp8")]
    assert finding.affects == ["the experts of every MoE layer"]


def test_experts_of_another_format_have_no_repair() -> None:
    asked = answer("nvfp4", "moe:nvfp4", None, "NvExperts: no")
    (finding,) = judge(facts(FP8, moe=[MoeOracleFact("nvfp4", "f", 1)], selections=[asked]), model(moe=("nvfp4",)))
    assert (finding.code, finding.fixes) == ("KRN003", [])


def test_linear_layers_and_experts_are_judged_apart() -> None:
    asked = [answer(kernel="K"), answer("fp8-block", "moe:fp8", None, "no")]
    findings = judge(facts(BLOCK, moe=[ORACLE], selections=asked), model("fp8-block", moe=("fp8-block",)))
    assert codes(findings) == [("KRN003", "error", "fail", "moe_fp8")]


# -- KRN004 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "kind", "kernel", "device", "slow"),
    [
        ("mxfp8", "mxfp8", "EmulationMxfp8LinearKernel", "xpu", True),
        ("mxfp8", "mxfp8", "XPUMxFp8LinearKernel", "xpu", False),
        ("nvfp4", "nvfp4", "EmulationNvFp4LinearKernel", "cuda", True),
        ("fp8-block", "fp8_block", "TritonFp8BlockScaledMMKernel", "xpu", True),
        ("fp8-block", "fp8_block", "TritonFp8BlockScaledMMKernel", "cuda", False),
        ("fp8-block", "fp8_block", "XPUFp8BlockScaledMMKernel", "xpu", False),
        ("nvfp4", "moe:nvfp4", "Nvfp4QuantizationEmulationTritonExperts", "xpu", True),
        ("fp8-block", "moe:fp8", "TritonExperts", "xpu", False),
    ],
)
def test_known_fallbacks(scheme: str, kind: str, kernel: str, device: str, slow: bool) -> None:
    platform = device.upper()
    spec = model(moe=(scheme,)) if kind.startswith("moe:") else model(scheme)
    tables = [table("mxfp8", **{platform: ["K"]}), table("nvfp4", **{platform: ["K"]}), table("fp8_block", **{platform: ["K"]})]
    asked = answer(scheme, kind, kernel, "Faster: no device")
    findings = judge(facts(*tables, platform=platform, selections=[asked]), spec, device)
    expected = [("KRN004", "warning", "fail", kind.replace("moe:", "moe_"))] if slow else []
    assert codes(findings) == expected
    for finding in findings:
        assert finding.evidence[0].observed == f"selected {kernel}, after\nFaster: no device"
        assert "Source:" in finding.cause
        # The repair's kernel stands last in its row: without the variable vLLM would still take the slow one.
        wanted = {"fp8_block": [f"VLLM_DISABLED_KERNELS={kernel}", "kernel:fp8_block"]}
        assert [fix.action for fix in finding.fixes] == wanted.get(kind, [])


# -- KRN005 ------------------------------------------------------------------------------------------------------------

IMPORT_ERROR = ErrorFact("builtins.ImportError", "libsycl.so.8: cannot open shared object file")


def test_an_import_that_fails_leaves_it_unknown() -> None:
    (finding,) = judge(facts(BLOCK, platform=None, live_error=IMPORT_ERROR), model("fp8-block"))
    assert codes([finding]) == [("KRN005", "error", "unknown", "fp8_block")]
    assert "ImportError: libsycl.so.8" in finding.cause
    assert finding.evidence[0].mode == "live"


def test_a_row_in_the_source_alone_is_no_proof() -> None:
    (finding,) = judge(facts(BLOCK, platform=None), model("fp8-block"))
    assert codes([finding]) == [("KRN005", "error", "unknown", "fp8_block")]
    assert "only vLLM's source was read" in finding.cause


def test_an_exception_of_the_chooser_is_no_refusal() -> None:
    error = ErrorFact("probes.kernel_table_ask.UnknownSignatureError", "choose_x of this vLLM asks for 'y'")
    (finding,) = judge(facts(BLOCK, selections=[answer(error=error)]), model("fp8-block"))
    assert codes([finding]) == [("KRN005", "error", "unknown", "fp8_block")]
    assert "asks for 'y'" in finding.evidence[0].observed


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (model("fp8-block"), facts(table("scaled_mm", CPU=["K"]), layout="quantization/kernels", vllm="0.14.1", platform="XPU")),
        (model(moe=("fp8-block",)), facts(table("scaled_mm", CPU=["K"]), layout="quantization/kernels", vllm="0.10.2", platform="XPU")),
        (model("mxfp6"), facts(FP8, BLOCK)),
    ],
)  # fmt: skip
def test_a_release_that_does_not_choose_by_table_is_no_error(spec: ModelSpec, what: KernelTableFacts) -> None:
    ((_, severity, status, _),) = codes(judge(what, spec))
    assert (severity, status) == ("info", "unknown")


def test_an_fp8_table_that_was_not_found_in_the_new_layout_is_an_error() -> None:
    assert codes(judge(facts(BLOCK), model("fp8-tensor-dynamic"))) == [("KRN005", "error", "unknown", "fp8")]


def test_no_source_at_all() -> None:
    nothing = facts(platform=None, layout="unknown", vllm=None, problems=["no vLLM is installed in this interpreter"])
    assert codes(judge(nothing, model("fp8-block"))) == [("KRN005", "error", "unknown", "fp8_block")]
    (finding,) = judge(nothing)
    assert codes([finding]) == [("KRN005", "warning", "unknown", "vllm")]
    assert finding.evidence[0].observed == "no vLLM is installed in this interpreter"


# -- all ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, model("fp8-block", "fp8-tensor-dynamic")])
def test_a_stack_that_covers_the_model_gives_nothing(spec: ModelSpec | None) -> None:
    kinds = {"fp8": "fp8-tensor-dynamic", "fp8_block": "fp8-block", "wfp8a16": "fp8-w8a16-channel", "mxfp8": "mxfp8"}
    tables = [table(kind, XPU=["XPUKernel"]) for kind in kinds]
    asked = [answer(scheme, kind, "XPUKernel") for kind, scheme in kinds.items()]
    assert judge(facts(*tables, selections=asked), spec) == []


def test_an_unquantized_model_asks_no_table() -> None:
    assert judge(facts(NO_BLOCK, platform=None), model("unquantized")) == []


def test_no_facts_no_findings() -> None:
    assert [f for rule in krn.RULES for f in rule.check(rule, Case(device="xpu", model=model("fp8-block")))] == []


@pytest.mark.parametrize("rule", krn.RULES, ids=lambda rule: str(rule.code))
def test_every_rule_has_its_page(rule: Any) -> None:
    for heading in ("## What it means", "## Why it matters", "## How it looks", "## How it is fixed"):
        assert heading in rule.page
    assert rule.needs == ("kernel_table",)


def test_runtime_fixes_are_repairs_that_name_the_finding() -> None:
    """What a rule proposes exists in the runtime half, says that it removes this code, and takes this subject."""
    missing = [table(kind, CUDA=["K"]) for kind in ("fp8", "fp8_block", "wfp8a16")]
    asked = [answer("fp8-block", "moe:fp8", None, "no")]
    schemes = ("fp8-tensor-dynamic", "fp8-block", "fp8-w8a16-channel")
    findings = judge(facts(*missing, moe=[ORACLE], selections=asked), model(*schemes, moe=("fp8-block",)))
    assert sorted(f.code for f in findings) == ["KRN001", "KRN001", "KRN001", "KRN003"]
    for finding in findings:
        (fix,) = (fix for fix in finding.fixes if fix.kind == "runtime")
        repair = catalogue.find(fix.action)
        assert finding.code in repair.codes
        assert repair.item(finding.subject) == fix.action


def test_codes_keep_their_meaning() -> None:
    assert {rule.code: rule.check.__name__ for rule in krn.RULES} == {
        "KRN001": "no_row", "KRN002": "all_refuse", "KRN003": "no_moe_backend", "KRN004": "slow_fallback", "KRN005": "not_told",
    }  # fmt: skip
