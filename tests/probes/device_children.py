"""Children that run device probes on the CPU with a faulty kernel in vLLM's tables: one child for all faults of a probe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from xpufp8 import doctor, staging
from xpufp8.model import ModelSpec, SchemeUse
from xpufp8.report import Finding
from xpufp8.rules import ALL
from xpufp8.rules.base import Case

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import json, os, sys
from probes.protocol import Context, run
for line in sys.stdin:
    name, fault, context = json.loads(line)
    os.environ["FAULT"] = fault
    print("ANSWER " + json.dumps([name, fault, context, run(name, Context(**context))], default=str), flush=True)
"""


def plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH that holds the faulty kernels as a plugin."""
    (folder / "faulty_fp8.py").write_text((Path(__file__).parent / "faulty_fp8.py").read_text(encoding="utf-8"), encoding="utf-8")
    staging.write_distribution(folder, "faulty", "1", "[vllm.general_plugins]\nfaulty = faulty_fp8:register\n")
    return folder


def ask(
    folder: Path, questions: list[tuple[str, str, dict[str, Any]]], *, path: Path | None = None, **environment: str
) -> list[tuple[str, str, dict[str, Any], Any]]:
    """Put questions (probe, fault, context) to one child, and read the facts back as the host does."""
    extra = [str(path)] if path else []
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XPUFP8", "PYTHON", "VLLM"))}
    env |= {"PYTHONPATH": os.pathsep.join([*extra, str(ROOT)]), "XPUFP8_CACHE_DIR": str(folder / "cache"), **environment}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input="\n".join(map(json.dumps, questions)), env=env, cwd=folder,
        capture_output=True, text=True, check=False, timeout=550,
    )  # fmt: skip
    lines = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(lines) == len(questions), done.stderr[-3000:]
    answers = []
    for name, fault, context, envelope in map(json.loads, lines):
        assert envelope["error"] is None, (name, fault, envelope["error"])
        facts = TypeAdapter(doctor.facts_class(name)).validate_python(envelope["facts"])
        answers.append((name, fault, context, facts))
    return answers


def judge(name: str, facts: Any, scheme: str, dtype: str = "bfloat16", device: str = "cpu") -> list[Finding]:
    """What all rules say of one probe's facts about a model of one scheme."""
    spec = ModelSpec("m", "m", dtype=dtype, quant_method="fp8", uses=(SchemeUse(scheme, "every linear layer"),))
    case = Case(device=device, model=spec, facts={name: facts})
    return [finding for rule in ALL if name in rule.needs for finding in rule.check(rule, case)]
