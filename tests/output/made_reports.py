"""Reports for the tests of formats: recorded ones, and ones made to show every state at once."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from xpufp8.report import Evidence, Finding, Fix, Ignored, Plan, ProbeReport, Reason, Report, TargetInfo, Tool

DATA = Path(__file__).resolve().parents[1] / "data" / "reports"
RECORDED = ("cpu-block-fp8", "sim-block-fp8", "sim-llama-fp8-eager")


def recorded(name: str) -> Report:
    """A report of a real run, with neutral paths."""
    return Report.model_validate_json((DATA / f"{name}.json").read_bytes())


def facts_file() -> dict[str, Any]:
    """What ``xpufp8 collect`` wrote for a model on the simulated XPU."""
    data: dict[str, Any] = json.loads((DATA / "sim-llama.facts.json").read_bytes())
    return data


def peers(cards: int = 2) -> dict[str, Any]:
    """Facts of peer access; with more than two cards the recorded pair is repeated under a second host bridge."""
    facts: dict[str, Any] = json.loads((DATA / "peer-one-switch-acs.facts.json").read_bytes())
    for at in range(2, cards):
        card = copy.deepcopy(facts["cards"][0])
        card["address"] = f"0000:{0x40 + at:02x}:00.0"
        card["path"] = [f"0000:40:{at:02x}.0", card["address"]]
        facts["cards"].append(card)
        facts["bridges"].append(
            {"address": f"0000:40:{at:02x}.0", "device": "8086:1111", "kind": "root-port", "redirects": "unknown"}
        )
    facts["host_bridges"]["pci0000:40"] = "8086:09a2"
    names = [card["address"] for card in facts["cards"]]
    known = {(pair["source"], pair["target"]) for pair in facts["pairs"]}
    for one in names:
        for other in names:
            if one != other and (one, other) not in known:
                rate = {
                    "source": 0,
                    "target": 1,
                    "exchange": "pidfd",
                    "stage": "done",
                    "status": "pass",
                    "bytes_per_second": 11.2e9,
                }
                rate = rate if "0000:4" in one + other else None
                status = "pass" if rate else "unknown"
                pair = {
                    "source": one,
                    "target": other,
                    "status": status,
                    "reason": "OK" if rate else "U",
                    "link": "SYS",
                    "transfer": rate,
                }
                facts["pairs"].append(pair)
    return facts


def everything() -> Report:
    """Every state of a finding, every section of the HTML report, a plan with reasons, text that wants to be markup."""
    base = recorded("cpu-block-fp8")
    llama = recorded("sim-llama-fp8-eager")
    swap = {"model_trace": next(p for p in llama.probes if p.name == "model_trace")}
    swap["peer_access"] = ProbeReport(name="peer_access", status="ok", seconds=1.5, facts=peers(4))
    timing = {
        "layer": "qkv_proj",
        "scheme": "fp8-block",
        "shape": [1, 6144, 4096],
        "kernel": "K",
        "seconds": 8e-5,
        "plain_seconds": 1e-4,
    }
    speed = ProbeReport(
        name="speed", status="ok", seconds=4.0, facts={"timings": [timing], "tokens_per_second": {"measured": 41.0}}
    )
    dead = ProbeReport(name="compile", status="crashed", seconds=3.2, detail="died of SIGSEGV", last_lines=["Fatal Python error"])
    probes = [swap.get(p.name, p) for p in base.probes] + [speed, dead]
    option = Finding(
        code="CFG005", severity="warning", status="fail", title="--enforce-eager is not needed and costs speed", subject="--enforce-eager",
        cause="Nothing that was traced needs it.", evidence=[Evidence(probe="command line", mode="static", observed="--enforce-eager")],
        fixes=[Fix(kind="flag", action="without --enforce-eager")],
    )  # fmt: skip
    config = Finding(
        code="CFG006", severity="info", status="fail", title="--trust-remote-code is not needed", cause="The checkpoint brings no code.",
        evidence=[Evidence(probe="config.json", mode="static", observed="no auto_map", where="config.json")],
    )  # fmt: skip
    unknown = Finding(
        code="ENV000", severity="warning", status="unknown", title="A probe gave no answer", subject="compile",
        cause="What the probe compile looks at could not be told.", evidence=[Evidence(probe="compile", mode="live", observed="SIGSEGV")],
    )  # fmt: skip
    ignored = Finding(
        code="OPS001", severity="error", status="fail", title="An op cannot be traced", subject="_C::odd<b>&@team #1 |`x`",
        cause="</details><script>alert(1)</script> ::error::x ]]> \x1b[31mred\x1b[0m\u202e", affects=["model.layers.*.mlp"],
        evidence=[Evidence(probe="fake_tensor", mode="live", observed="```\nx\n::warning::y\r\nz", where="a/b.py:12")],
        ignored=Ignored(by="policy", reason="known, fixed upstream", until="2030-01-01"), references=["https://example.invalid/x"],
    )  # fmt: skip
    plan = base.plan.model_copy(update={"host_actions": ["Load the xe driver."], "validated": "probe"})
    target = base.target.model_copy(update={"vllm_args": ["--enforce-eager", "--trust-remote-code"]})
    findings = [*base.findings, option, config, unknown, ignored]
    return base.model_copy(update={"probes": probes, "findings": findings, "plan": plan, "target": target})


def small(**fields: Any) -> Report:
    """A report that says nothing, with some fields set."""
    probes = [ProbeReport(name=name, status="ok") for name in ("environment", "kernel_table", "model_trace")]
    base: dict[str, Any] = {"tool": Tool(version="1"), "verdict": "servable", "probes": probes}
    base["target"] = TargetInfo(python="python", device="cpu", simulated=False, model="models/m", vllm_args=[])
    return Report(**(base | fields))


def plan(shell: str = "vllm serve m") -> Plan:
    """A plan with one reason."""
    return Plan(
        argv=["vllm", "serve", "m"], shell=shell, because=[Reason(item="--dtype float16", codes=["DTY001"], without_it="x")]
    )
