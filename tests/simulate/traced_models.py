"""Runs model traces for the tests: one process imports vLLM on the simulated XPU and forks for each job (scripts/model_table.py).

usage: python traced_models.py JOBS.json RESULTS.json, where JOBS is {name: {"model": folder, "args": […], "options": {…}}}
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    jobs, results = Path(sys.argv[1]), Path(sys.argv[2])
    spec = importlib.util.spec_from_file_location("model_table", ROOT / "scripts" / "model_table.py")
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    table.warm("sim:arc-pro-b60")
    answers = {}
    for name, job in json.loads(jobs.read_text()).items():
        log = results.parent / f"{name}.log"
        answers[name] = table.trace(Path(job["model"]), job["args"], "sim:arc-pro-b60", log, job.get("options"))
    results.write_text(json.dumps(answers))
