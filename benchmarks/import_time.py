"""CPU time of what a user waits for first: ``xpufp8 --help`` (250 ms), ``from xpufp8 import diagnose, Report`` (150 ms).

``python benchmarks/import_time.py``: seconds of CPU (user and system), minimum and median of several runs, the interpreter's own
start taken off the import. Wall time would measure what else the machine does.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys

RUNS = 9
CASES = {
    "python -c pass": ["-c", "pass"],
    "import xpufp8": ["-c", "import xpufp8"],
    "from xpufp8 import diagnose, Report": ["-c", "from xpufp8 import diagnose, Report"],
    "xpufp8 --help": ["-m", "xpufp8", "--help"],
    "xpufp8 rule KRN001": ["-m", "xpufp8", "rule", "KRN001"],
}


def cpu(arguments: list[str]) -> float:
    """Seconds of CPU of one child."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Print a table."""
    start = 0.0
    for name, arguments in CASES.items():
        cpu(arguments)
        runs = sorted(cpu(arguments) for _ in range(RUNS))
        start = start or runs[0]
        extra = f"   over the bare interpreter: {1000 * (runs[0] - start):.0f} ms" if name != "python -c pass" else ""
        print(f"{name:40} min {1000 * runs[0]:4.0f} ms  median {1000 * statistics.median(runs):4.0f} ms{extra}")


if __name__ == "__main__":
    main()
