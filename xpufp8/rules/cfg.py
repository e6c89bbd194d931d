"""CFG: options that vLLM does not know, refuses or does not need, and options that contradict each other or the model."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from functools import cache

from probes.model_facts import ModelTraceFacts
from probes.vllm_options_facts import VllmOptionsFacts
from xpufp8 import options
from xpufp8.quantization import ONLINE
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.rules.base import Case, Rule, rule

WITHOUT = "without "
INSTEAD = " instead of "
SURE = 0.85
"""Likeness of spelling (difflib's ratio) from which a known option is taken for what was meant."""
"""A flag fix that takes an option away starts with this word."""

COMPILED_TRACE = "model_trace without --enforce-eager"
"""Name under which the planner hands over the facts of a trace in which torch.compile was left on."""

AGREE: dict[str, frozenset[str]] = {
    "gptq": frozenset({"gptq", "auto_gptq", "gptq_marlin", "moe_wna16", "inc", "humming"}),
    "awq": frozenset({"awq", "auto_awq", "awq_marlin", "moe_wna16", "inc", "humming"}),
    "mxfp4": frozenset({"mxfp4", "gpt_oss_mxfp4"}),
    "modelopt": frozenset({"modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"}),
    "auto-round": frozenset({"auto-round", "inc"}),
    "fp8": frozenset({"fp8", "deepseek_v4_fp8", "humming"}),
    "compressed-tensors": frozenset({"compressed-tensors", "humming"}),
}
"""Checkpoint's method to the values of --quantization that vLLM accepts beside it (the ``override_quantization_method`` of each
class; vLLM 0.32.0)."""


@cache
def renamed() -> dict[str, dict[str, str | None]]:
    """Options that a release removed, with what takes their place (data/renamed_options.json)."""
    data: dict[str, dict[str, str | None]] = json.loads((options.DATA / "renamed_options.json").read_text(encoding="utf-8"))[
        "options"
    ]
    return data


def _typed(case: Case, token: str) -> str:
    """The option as typed, its value included."""
    name = options.grammar().canonical(token.split("=", 1)[0])
    found = next((o for o in options.parse(case.vllm_args) if o.name == name), None)
    return found.text if found else token


@rule("CFG001", "vLLM does not know an option", "error", ("vllm_options",))
def unknown_option(self: Rule, case: Case) -> Iterator[Finding]:
    """An option of the command line is not one of this vLLM.

    ## What it means
    The argument parser of the installed vLLM was built and asked. It does not know the option: a typing error, or one that
    another release had.

    ## Why it matters
    `vllm serve` prints its usage and exits with code 2 before anything starts; under a service manager that is a crash loop.

    ## How it looks
    `vllm serve: error: unrecognized arguments: --disable-log-requests`

    ## How it is fixed
    By the option that took its place, where a release dropped it and the finding knows it. One that is misspelt by a letter or two is
    put right in the plan. Anything else is yours to correct: an option is left out only where this release is known to do without it,
    because the server would otherwise do something else than was asked for.
    """
    facts = case.get("vllm_options", VllmOptionsFacts)
    for token in facts.unknown if facts else []:
        if not options.is_option(token):
            continue
        name = token.split("=", 1)[0]
        known = renamed().get(options.grammar().canonical(name))
        near = difflib.get_close_matches(name, facts.known if facts else [], n=1, cutoff=0.75)
        evidence = Evidence(probe="vllm_options", mode="live", observed=f"unrecognized arguments: {token}", where="command line")
        typed = _typed(case, token)
        fixes = [Fix(kind="flag", action=WITHOUT + typed)]
        cause = f"The parser of vLLM {(facts.vllm if facts else None) or ''} has no {name}.".replace("  ", " ")
        if known is not None:
            cause += f" This release dropped it: {known['why']}."
            if known["use"]:
                fixes = [Fix(kind="host", action=f"use {known['use']} in place of {name}")]
        elif near:
            cause += f" Did you mean {near[0]}?"
        if known is None and near and difflib.SequenceMatcher(None, name, near[0]).ratio() >= SURE:
            # What was meant is put in its place. Leaving it out would serve something else than was asked for.
            fixes = [Fix(kind="flag", action=near[0] + typed.removeprefix(name) + INSTEAD + typed)]
        elif known is None:
            fixes = [Fix(kind="host", action=f"leave {name} out, or write it as this release does (vllm serve --help=all)")]
        yield self.finding(name, cause, [evidence], fixes=fixes)


@rule("CFG002", "vLLM refuses the value of an option", "error", ("vllm_options",))
def refused_value(self: Rule, case: Case) -> Iterator[Finding]:
    """A value on the command line is not one that this vLLM takes.

    ## What it means
    vLLM's own parser read the command line and refused it; its message is quoted.

    ## Why it matters
    `vllm serve` exits with code 2 before anything starts.

    ## How it looks
    `argument --kv-cache-dtype: invalid choice: 'fp9' (choose from 'auto', 'fp8', …)`

    ## How it is fixed
    Use one of the values that the message lists.
    """
    facts = case.get("vllm_options", VllmOptionsFacts)
    if facts is None or facts.rejected is None:
        return
    subject = facts.rejected.split(":", 1)[0].removeprefix("argument ").split("/")[0]
    evidence = Evidence(probe="vllm_options", mode="live", observed=facts.rejected, where="command line")
    yield self.finding(subject, "vLLM's own parser refuses the command line.", [evidence])


@rule("CFG003", "An option is given twice with different values", "warning")
def given_twice(self: Rule, case: Case) -> Iterator[Finding]:
    """The same option stands on the command line more than once, and the values differ.

    ## What it means
    vLLM takes the last one. Spellings that mean the same (`-tp`, `--tensor-parallel-size`) count as one option.

    ## Why it matters
    The server runs with another setting than a reader of the command expects.

    ## How it looks
    `-tp 2 … --tensor-parallel-size 4`

    ## How it is fixed
    Keep one.
    """
    seen: dict[str, list[options.Option]] = {}
    for option in options.parse(case.vllm_args):
        if option.name and "." not in option.name and option.name not in options.grammar().multi:
            seen.setdefault(option.name, []).append(option)
    for name, several in seen.items():
        if len({o.values for o in several}) > 1:
            evidence = Evidence(probe="command line", mode="static", observed="  ".join(o.text for o in several))
            yield self.finding(name, f"vLLM uses the last one: {several[-1].text}.", [evidence])


@rule("CFG004", "--quantization contradicts the checkpoint", "error")
def contradicts_checkpoint(self: Rule, case: Case) -> Iterator[Finding]:
    """The checkpoint is quantized by one method and the command line asks for another.

    ## What it means
    `--quantization` chooses the method for a 16-bit checkpoint. One that is quantized already names its own in config.json.

    ## Why it matters
    vLLM stops with `Quantization method specified in the model config (awq) does not match the quantization method specified
    in the quantization argument (fp8)`.

    ## How it looks
    `quantization_config.quant_method: awq` in config.json beside `--quantization fp8`.

    ## How it is fixed
    Leave `--quantization` out, or serve the 16-bit checkpoint of the model with it.
    """
    asked = options.find(case.vllm_args, "--quantization")
    model = case.model
    if asked is None or asked.value is None or model is None or model.online or model.quant_method is None:
        return
    method = asked.value.lower()
    if method in AGREE.get(model.quant_method, frozenset({model.quant_method})) or method == model.quant_method:
        return
    also = " (it quantizes 16-bit checkpoints while loading)" if method in ONLINE else ""
    evidence = [
        Evidence(
            probe="config.json",
            mode="static",
            observed=f"quantization_config.quant_method: {model.quant_method}",
            where="config.json",
        ),
        Evidence(probe="command line", mode="static", observed=asked.text),
    ]
    cause = f"The checkpoint is stored as {model.quant_method}, and --quantization asks for {method}{also}."
    yield self.finding("--quantization", cause, evidence, fixes=[Fix(kind="flag", action=WITHOUT + asked.text)])


@rule("CFG005", "--enforce-eager is not needed and costs speed", "warning", (COMPILED_TRACE,))
def needless_eager(self: Rule, case: Case) -> Iterator[Finding]:
    """torch.compile takes this model, and the command line switches it off.

    ## What it means
    The model was traced once more without the option, with torch.compile on, and every region reached its end without a
    stand-in.

    ## Why it matters
    `--enforce-eager` gives up compilation and graph capture. Public reports guess a loss of 10-20 % of throughput; it was not
    measured here. Tracing says nothing of code generation, which only the device's own compiler can refuse.

    ## How it looks
    `--enforce-eager` (or `-O0`) in the command, copied from a thread about another model or release.

    ## How it is fixed
    Leave it out; put it back if code generation fails on the device.
    """
    facts = case.get(COMPILED_TRACE, ModelTraceFacts)
    if facts is None or not options.flag(case.vllm_args, "--enforce-eager"):
        return
    trace = next((s for s in facts.stages if s.name == "trace"), None)
    broken = any(s.breaks_compile for s in facts.stand_ins)
    if trace is None or trace.status != "done" or broken or facts.enforce_eager:
        return
    evidence = Evidence(
        probe="model_trace", mode=facts.mode, observed="every compiled region was traced to its end without a stand-in"
    )
    cause = "Nothing that was traced needs it."
    yield self.finding("--enforce-eager", cause, [evidence], fixes=[Fix(kind="flag", action=WITHOUT + "--enforce-eager")])


@rule("CFG006", "--trust-remote-code is not needed", "info")
def needless_trust(self: Rule, case: Case) -> Iterator[Finding]:
    """The command line allows a checkpoint's own Python code to run, and the checkpoint has none.

    ## What it means
    config.json names no code (`auto_map`), so the option does nothing today.

    ## Why it matters
    It would let code that a later revision of the checkpoint brings run without a question.

    ## How it looks
    `--trust-remote-code` beside a config.json without `auto_map`.

    ## How it is fixed
    Leave it out.
    """
    if case.model is None or not options.flag(case.vllm_args, "--trust-remote-code") or case.model.config.get("auto_map"):
        return
    evidence = Evidence(probe="config.json", mode="static", observed="no auto_map", where="config.json")
    cause = "The checkpoint brings no code of its own."
    yield self.finding("--trust-remote-code", cause, [evidence], fixes=[Fix(kind="flag", action=WITHOUT + "--trust-remote-code")])


@rule("CFG007", "An option is deprecated", "info", ("vllm_options",))
def deprecated(self: Rule, case: Case) -> Iterator[Finding]:
    """An option that this vLLM still takes, and of which it says that a later one will not.

    ## What it means
    The parser's own help marks it as deprecated; its words are quoted.

    ## Why it matters
    The next image may refuse the command (CFG001).

    ## How it looks
    `DEPRECATED: …` in the help text of the option.

    ## How it is fixed
    Use what the text names.
    """
    facts = case.get("vllm_options", VllmOptionsFacts)
    for name, words in sorted(facts.deprecated.items()) if facts else []:
        yield self.finding(name, "vLLM marks it as deprecated.", [Evidence(probe="vllm_options", mode="live", observed=words)])


RULES = (unknown_option, refused_value, given_twice, contradicts_checkpoint, needless_eager, needless_trust, deprecated)
