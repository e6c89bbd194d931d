"""Make a report or facts file fit for tests/data/reports: no paths of this machine, and no more ops than a test needs.

``python scripts/neutral_report.py IN OUT --rename /home/me/model=./model --ops 40``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def replaced(value: Any, names: dict[str, str]) -> Any:
    """The value with every old text in it replaced, longest first."""
    if isinstance(value, str):
        for old in sorted(names, key=len, reverse=True):
            value = value.replace(old, names[old])
        return value
    if isinstance(value, dict):
        return {replaced(key, names): replaced(inner, names) for key, inner in value.items()}
    return [replaced(inner, names) for inner in value] if isinstance(value, list) else value


def trimmed(data: dict[str, Any], ops: int) -> dict[str, Any]:
    """Keep ``ops`` ops of each tracing outcome, and of the option list the first hundred."""
    for probe in data["probes"]:
        facts = probe["facts"]
        if probe["name"] == "fake_tensor" and "ops" in facts:
            outcomes = dict.fromkeys(op["traces"] for op in facts["ops"])
            facts["ops"] = [op for kind in outcomes for op in [o for o in facts["ops"] if o["traces"] == kind][:ops]]
        if probe["name"] == "vllm_options":
            facts["known"] = facts.get("known", [])[:100]
        probe["seconds"] = round(probe["seconds"], 1)
    return data


def main() -> None:
    """Read, replace, trim, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("goal", type=Path)
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--ops", type=int, default=40)
    typed = parser.parse_args()
    data = trimmed(json.loads(typed.source.read_text(encoding="utf-8")), typed.ops)
    names = dict(one.split("=", 1) for one in typed.rename)
    typed.goal.write_text(json.dumps(replaced(data, names), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
