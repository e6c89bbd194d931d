"""Trace every model of a folder on a simulated XPU and write docs/models.md: stages, kernels, GiB, seconds.

usage: python scripts/model_table.py [--models DIR] [--device sim:NAME] [--out FILE] [--json FILE] [--only PART] [--variants bf16,fp8]

Run with an interpreter that has torch, vLLM (CPU) and pyelftools. One process imports vLLM once and forks for each model, so a
model costs its own seconds only; architectures are inspected in the fork for the same reason (``xpufp8 doctor`` leaves that to vLLM).
DIR/runs.json names what to add to the command of a model: ranks, runner, options.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

VARIANTS = {"bf16": [], "fp8": ["--quantization", "fp8"]}
"""Name of a run to the options that make it."""


def warm(device: str) -> None:
    """Import vLLM on the simulated device, once, with everything that the probe puts up before it."""
    from probes import model_trace, trace_build, trace_ops
    from probes.protocol import Context

    model_trace.enter_simulation(Context(device=device))
    trace_build.prepare_environment()
    trace_ops.record_bodies()
    from vllm.platforms import current_platform

    assert current_platform.is_xpu(), "the stand-in platform was not chosen"
    import vllm._xpu_ops
    import vllm.model_executor.layers.fused_moe
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.registry as registry
    import vllm.v1.core.kv_cache_utils  # noqa: F401
    from vllm.engine.arg_utils import AsyncEngineArgs

    AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    registry._run_in_subprocess = lambda fn: fn()


def trace(folder: Path, args: list[str], device: str, log: Path, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """The probe's envelope for one model, made in a fork. A fork that dies gives an envelope that says so."""
    result = log.with_suffix(".json")
    child = os.fork()
    if child == 0:
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            from probes.protocol import Context, run

            before = resource.getrusage(resource.RUSAGE_SELF)
            envelope = run("model_trace", Context(device, str(folder), args, options=settings or {}))
            after = resource.getrusage(resource.RUSAGE_SELF)
            envelope["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            result.write_text(json.dumps(envelope, default=str))
            os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != 0 or not result.exists():
        return {"facts": None, "error": {"type": "died", "message": f"wait status {status}, see {log}"}}
    envelope: dict[str, Any] = json.loads(result.read_text())
    return envelope


def row(name: str, variant: str, args: list[str], envelope: dict[str, Any]) -> list[str]:
    """One line of the table."""
    facts = envelope.get("facts")
    command = " ".join(args) or "—"
    if facts is None:
        error = envelope.get("error") or {}
        return [name, variant, command, f"probe error: {error.get('type')}", "", "", "", "", ""]
    stages = {stage["name"]: stage for stage in facts["stages"]}
    told = []
    for stage in facts["stages"]:
        if stage["status"] != "done" and not (stage["status"] == "skipped" and stage["name"] in {"logits", "vision"}):
            told.append(f"{stage['name']}: {stage['status']} ({stage['reason'].replace(facts['model'], name)[:160]})")
        elif stage["passed_after_stand_in"]:
            told.append(f"{stage['name']}: done after a stand-in")
    reached = "end" if not told and stages.get("trace", {}).get("status") == "done" else "; ".join(told) or "not traced"
    kernels = sorted({kind["kernel"] or kind["method"] for kind in facts["linear"]})
    attention = sorted({kind["backend"] for kind in facts["attention"]})
    moe = sorted({kind["experts_class"] or kind["method"] for kind in facts["moe"]})
    memory = facts["memory"] or {}
    weights = memory.get("weight_bytes", 0)
    gib = f"{weights / 2**30:.4f}" if weights else ""
    per_token = str(memory.get("kv_bytes_per_token", "")) if memory else ""
    wrong = ", ".join(f"{s['kind']} {s['subject']}" for s in facts["stand_ins"])
    seconds = f"{envelope.get('cpu_seconds', 0):.1f}"
    return [
        name,
        variant,
        command,
        reached,
        ", ".join(kernels),
        ", ".join(attention + moe),
        wrong or "—",
        f"{gib} / {per_token}",
        seconds,
    ]


HEAD = [
    "model",
    "run",
    "options",
    "reached",
    "linear kernels",
    "attention, experts",
    "stand-ins",
    "GiB a rank / KV bytes a token",
    "CPU s",
]


def page(rows: list[list[str]], first: dict[str, Any], device: str) -> str:
    """The Markdown page."""
    lines = [
        "# Models on the simulated XPU",
        "",
        f"Made by `make models` ({time.strftime('%Y-%m-%d')}) on `{device}`: vLLM {first.get('vllm')}, torch {first.get('torch')}, "
        f"op schemas of vllm-xpu-kernels {first.get('kernels')}. Every line is simulated: it says that vLLM's code configures, constructs, "
        "processes and traces the model for this platform, which kernels it selects and what a rank holds. It says nothing of numerics, "
        "speed, peer access or real output dtypes, and `config.json` files were written from published dimensions, without weights.",
        "",
        "`reached: end` means every stage was done. CPU seconds leave out the import of torch and vLLM.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + " --- |" * len(HEAD),
    ]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |" for cells in rows]
    return "\n".join(lines) + "\n"


def ops_reached(envelopes: list[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Op to region to the models that reach it."""
    found: dict[str, dict[str, list[str]]] = {}
    for envelope in envelopes:
        facts = envelope.get("facts") or {}
        for region in ("ops_compiled", "ops_outside"):
            for op in facts.get(region, []):
                models = found.setdefault(op["op"], {}).setdefault(region, [])
                if envelope["name"] not in models:
                    models.append(envelope["name"])
    return found


def main() -> int:
    """Trace, print a line a model, write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "tests" / "data" / "models")
    parser.add_argument("--device", default="sim:arc-pro-b60")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--json", type=Path, default=None, help="keep every envelope here; a run that is in it already is not made again"
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--variants", default="bf16,fp8")
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")) / "xpufp8-models")  # noqa: S108 - logs of a developer's run
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    runs = json.loads((options.models / "runs.json").read_text())
    done: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    warmed = False
    rows: list[list[str]] = []
    envelopes: list[dict[str, Any]] = []
    for folder in sorted(path.parent for path in options.models.glob("*/config.json")):
        plan = runs.get(folder.name, {})
        for variant in plan.get("variants", options.variants.split(",")):
            if options.only and options.only not in f"{folder.name} {variant}":
                continue
            args = [*plan.get("args", []), *VARIANTS.get(variant, [])]
            key = f"{folder.name} {variant} {' '.join(args)}"
            if key not in done:
                if not warmed:
                    warm(options.device)
                    warmed = True
                done[key] = trace(folder, args, options.device, options.logs / f"{folder.name}-{variant}.log")
                if options.json:
                    options.json.write_text(json.dumps(done, default=str))
            envelope = {**done[key], "name": folder.name}
            envelopes.append(envelope)
            rows.append(row(folder.name, variant, args, envelope))
            print(" | ".join(rows[-1]), flush=True)
    if options.out:
        first = next((e["facts"] for e in envelopes if e.get("facts")), {})
        options.out.write_text(page(rows, {key: first.get(key) for key in ("vllm", "torch", "kernels")}, options.device))
    if options.json:
        options.json.with_suffix(".ops.json").write_text(json.dumps(ops_reached(envelopes), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
