"""List the ops of vllm-xpu-kernels that return tensors and have no fake after vLLM's `_xpu_ops` is imported: docs/missing-fakes.md.

usage: python scripts/missing_fakes.py [--ops OPS.json] [--out FILE]

OPS.json is what scripts/model_table.py writes beside its envelopes: which op which model reaches, inside and outside the compiled
region. Run with an interpreter that has torch, vLLM (CPU) and pyelftools.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def missing() -> tuple[list[str], dict[str, str]]:
    """Ops without a fake (``namespace::name``, sorted), and the versions they were found with."""
    from probes import model_trace, trace_build
    from probes.protocol import Context
    from probes.trace_ops import op_name, tracing_of

    model_trace.enter_simulation(Context(device="sim:arc-pro-b60"))
    trace_build.prepare_environment()
    from vllm.platforms import current_platform

    assert current_platform.is_xpu(), "the stand-in platform was not chosen"
    import torch
    import vllm
    import vllm._xpu_ops

    from xpufp8.simulate import kernels

    catalogue = kernels.State.catalogue
    assert catalogue is not None
    found = []
    for op in catalogue.ops:
        schema = op.parsed
        packet = getattr(getattr(torch.ops, op.namespace), schema.name)
        overload = getattr(packet, schema.overload or "default")
        if schema.returns_tensor and tracing_of(overload, set()) == "none":
            found.append(op_name(overload))
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "kernels": catalogue.version}
    return sorted(set(found)), versions


def page(names: list[str], versions: dict[str, str], reached: dict[str, Any]) -> str:
    """The Markdown page."""
    lines = [
        "# Ops of vllm-xpu-kernels without a fake",
        "",
        f"vllm-xpu-kernels {versions['kernels']} defines {len(names)} ops that return tensors and have neither a fake nor a Meta "
        f"kernel after vLLM {versions['vllm']} has imported `vllm._xpu_ops` (torch {versions['torch']}, simulated XPU). "
        "torch.compile stops at such an op with "
        "`Operator does not support running with fake tensors`, but only where Dynamo sees it: an op that is called in eager code, or in "
        "the body of an opaque op such as `vllm::moe_forward`, needs no fake.",
        "",
        "The columns say which of the models of [models.md](models.md) reach the op, inside a region that is compiled and outside. "
        "An empty cell means that none of those models does, not that no model can.",
        "",
        "| op | reached in a compiled region by | reached outside only by |",
        "| --- | --- | --- |",
    ]
    for name in names:
        regions = reached.get(name, {})
        cells = [", ".join(regions.get(key, [])) for key in ("ops_compiled", "ops_outside")]
        lines.append(f"| `{name}` | {cells[0]} | {cells[1]} |")
    inside = [name for name in names if reached.get(name, {}).get("ops_compiled")]
    lines += ["", f"Reached in a compiled region by a model of that table: {', '.join(f'`{n}`' for n in inside) or 'none'}."]
    return "\n".join(lines + unstated()) + "\n"


def unstated() -> list[str]:
    """The ops for which the repairs have no fake, and why; the others of the first table have one."""
    from xpufp8.runtime.fakes_xpu import UNSTATED

    return [
        "",
        "## Ops that get no fake from the repairs",
        "",
        "The repairs ([repairs.md](repairs.md)) give each of those ops a fake, but for these. A guess would compile to wrong code, so "
        "the repair stops, and the plan serves with `--enforce-eager` where one of them is reached.",
        "",
        "| op | why |",
        "| --- | --- |",
        *(f"| `{op}` | {why} |" for op, why in UNSTATED.items()),
    ]


def main() -> int:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    reached = json.loads(options.ops.read_text()) if options.ops else {}
    text = page(*missing(), reached)
    if options.out:
        options.out.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
