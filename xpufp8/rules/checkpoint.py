"""MDL: whether the folder holds what vLLM will load."""

from __future__ import annotations

from collections.abc import Iterator

from probes.model_config_facts import ModelConfigFacts
from xpufp8 import options
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.rules.base import Case, Rule, rule

PROBE = "model_config"
READS_FILES = frozenset({None, "auto", "safetensors", "pt", "hf", "mistral", "npcache", "fastsafetensors"})
"""Values of ``--load-format`` under which vLLM reads weights from the folder itself."""
SHOWN = 3


@rule("MDL008", "The weights are not all here", "warning", needs=(PROBE,))
def no_weights(self: Rule, case: Case) -> Iterator[Finding]:
    """The model's folder has a config.json but no weights, or not all that its index names.

    ## What it means
    Everything else is judged from config.json, which is enough to say whether the model would be served. To serve it, vLLM needs the
    weights: `*.safetensors` (or `*.bin`, `*.pt`) beside it, every file that `model.safetensors.index.json` names.

    ## Why it matters
    vLLM builds the whole model before it looks for them, and then ends with
    `RuntimeError: Cannot find any model weights with …`.

    ## How it looks
    How many files of weights there are, and the names of those that the index has and the folder has not. Nothing is said on a
    simulated device, where nothing will be started, or with a `--load-format` that reads no files of the folder (`dummy`,
    `runai_streamer`, …).

    ## How it is fixed
    Finish the download. To see the server come up without them, give `--load-format dummy`: its answers are noise.
    """
    facts = case.get(PROBE, ModelConfigFacts)
    if facts is None or facts.weight_files is None or case.device.startswith("sim"):
        return
    if options.value(case.vllm_args, "--load-format") not in READS_FILES:
        return
    gone = facts.weights_missing
    if facts.weight_files and not gone:
        return
    if gone:
        names = ", ".join(gone[:SHOWN]) + (f" and {len(gone) - SHOWN} more" if len(gone) > SHOWN else "")
        cause = f"The index names files that are not there: {names}."
    else:
        cause = "There is a config.json and no file of weights beside it: vllm serve ends when it comes to load them."
    seen = Evidence(probe=PROBE, mode="static", observed=f"{facts.weight_files} files of weights, {len(gone)} missing")
    fix = Fix(kind="host", action="Finish the download, or add --load-format dummy to start without weights (answers are noise).")
    yield self.finding("", cause, [seen], fixes=[fix])


RULES = (no_weights,)
