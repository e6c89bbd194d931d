"""CPU seconds to read each release's kernel tables: ``python benchmarks/kernel_table_static.py FOLDER`` (tests/releases/fetch.py).

Every release is read in a fresh process, so that nothing is parsed already. Exit status 1 if one takes more than a second.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.0
CODE = """
import json, sys, time
from probes.kernel_table import observe
from probes.protocol import Context
start = time.process_time()
facts = observe(Context(vllm_path=sys.argv[1]))
print(json.dumps([facts.vllm, len(facts.tables), len(facts.moe), time.process_time() - start]))
"""


def main(folder: Path) -> int:
    """Measure every release below a folder and print a line each."""
    slow = 0
    for package in sorted(folder.glob("*/vllm")):
        done = subprocess.run([sys.executable, "-c", CODE, package], cwd=ROOT, capture_output=True, text=True, check=True)
        version, tables, oracles, seconds = json.loads(done.stdout)
        slow += seconds > LIMIT
        print(f"vllm {version:<8} {tables:>2} tables {oracles:>2} oracles {seconds:6.2f} s of CPU time")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
