"""What a launch showed (``--validate launch``): facts come from ``xpufp8.launch``, not from a probe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from xpufp8.report import Evidence, Finding
from xpufp8.rules.base import Case, Rule, rule


@dataclass(frozen=True)
class LaunchFacts:
    """What came of starting the plan once."""

    ok: bool
    detail: str
    log: str
    """Path of the server's log."""
    last_lines: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    """``--option: asked A, vLLM runs with B``."""
    explained: bool = False
    """True when the log named a known cause, which then has a finding of its own."""


@rule("CFG009", "The plan was launched and did not serve", "error", ("launch",))
def did_not_serve(self: Rule, case: Case) -> Iterator[Finding]:
    """The plan was started once with dummy weights, and the server ended, hung or gave a wrong answer.

    ## What it means
    Every probe passed, and still the server did not come up or its completion was not sound (no tokens, log-probabilities
    that are not finite or flat, nothing but token 0).

    ## Why it matters
    The same would have happened after the real weights had been loaded.

    ## How it looks
    `the server ended with exit code 1 before it answered`

    ## How it is fixed
    The log is kept; `xpufp8 explain LOG` reads it. Where it names a known cause, that cause is a finding of its own and its fix
    is tried. Please report a log that names none.
    """
    facts = case.get("launch", LaunchFacts)
    if facts is None or facts.ok or facts.explained:
        return
    evidence = [Evidence(probe="launch", mode="live", observed=facts.detail, where=facts.log)]
    evidence += [Evidence(probe="launch", mode="live", observed=line) for line in facts.last_lines]
    yield self.finding(
        "launch", f"{facts.detail[:1].upper()}{facts.detail[1:]}. The log says no known cause; it is kept.", evidence
    )


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
