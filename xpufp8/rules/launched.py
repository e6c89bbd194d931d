"""What launches showed (``--validate launch``): facts come from ``xpufp8.validate``, not from a probe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from xpufp8.report import Evidence, Finding
from xpufp8.rules.base import Case, Rule, rule


@dataclass(frozen=True)
class Attempt:
    """One plan that was started and did not serve."""

    added: list[str]
    """What the plan adds to the typed command."""
    detail: str
    log: str
    """Path of the server's log, which is kept."""
    causes: list[str] = field(default_factory=list)
    """Known causes that the log names, each as ``CODE title``."""
    last_lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LaunchFacts:
    """What came of starting plans, in the order in which they were started."""

    ok: bool
    """True when the last one served."""
    failed: list[Attempt] = field(default_factory=list)
    log: str = ""
    """Log of the one that served."""
    differences: list[str] = field(default_factory=list)
    """``--option: asked A, vLLM runs with B``."""


@rule("CFG009", "The plan was launched and did not serve", "error", ("launch",))
def did_not_serve(self: Rule, case: Case) -> Iterator[Finding]:
    """The plan was started with dummy weights, and the server ended, hung or gave a wrong answer.

    ## What it means
    Every probe passed, and still the server did not come up or its completion was not sound (no tokens, log-probabilities
    that are not finite or flat, nothing but token 0). Where the log named a cause with another fix, that was launched too: three
    different plans at most.

    ## Why it matters
    The same would have happened after the real weights had been loaded.

    ## How it looks
    `the server ended with exit code 1 before it answered`, once for each plan, with what the plan adds to the typed command
    and the cause that its log names.

    ## How it is fixed
    A cause that the log names is a finding of its own, with what is left to do about it. The logs are kept; `xpufp8 explain LOG`
    reads one. Please report a log that names no cause.
    """
    facts = case.get("launch", LaunchFacts)
    if facts is None or facts.ok or not facts.failed:
        return
    last, evidence = facts.failed[-1], []
    for number, one in enumerate(facts.failed, 1):
        added = " ".join(one.added) or "nothing added"
        said = "; ".join(one.causes) or "the log names no known cause"
        evidence.append(
            Evidence(probe="launch", mode="live", observed=f"plan {number} ({added}): {one.detail}: {said}", where=one.log)
        )
    if not last.causes:
        evidence += [Evidence(probe="launch", mode="live", observed=line) for line in last.last_lines]
    several = f"{len(facts.failed)} different plans were launched and none served. " if len(facts.failed) > 1 else ""
    cause = f"{several}{last.detail[:1].upper()}{last.detail[1:]}. "
    cause += (
        "Its log names the cause, and nothing else is left to try."
        if last.causes
        else "The log names no known cause; it is kept."
    )
    yield self.finding("launch", cause, evidence)


@rule("CFG008", "vLLM runs with another value than was asked", "warning", ("launch",))
def other_value(self: Rule, case: Case) -> Iterator[Finding]:
    """VLLM's own line of non-default arguments differs from the command.

    ## What it means
    At start vLLM logs every argument that is not at its default. One of them is not what the command says: a later option,
    a config file or a platform's own adjustment has changed it.

    ## Why it matters
    What was diagnosed and what runs are not the same.

    ## How it looks
    `--block-size: asked 16, vLLM runs with 64`

    ## How it is fixed
    Ask for the value that vLLM takes, or find out what overrides it (`--config`, an option given twice).
    """
    facts = case.get("launch", LaunchFacts)
    for text in facts.differences if facts else []:
        evidence = Evidence(probe="launch", mode="live", observed=text, where=facts.log if facts else "")
        yield self.finding(text.split(":", 1)[0], "The server's own log says so.", [evidence])


RULES = (did_not_serve, other_value)
