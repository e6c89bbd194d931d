"""What a rule cannot say: a probe, or a rule itself, gave no answer."""

from __future__ import annotations

from collections.abc import Iterator

from xpufp8.report import Evidence, Finding
from xpufp8.rules.base import Case, Rule, rule


@rule("ENV000", "A probe gave no answer", "warning")
def no_answer(self: Rule, case: Case) -> Iterator[Finding]:
    """A probe crashed, hung, raised or was skipped, so what it looks at is unknown.

    ## What it means
    Probes run in child processes of the target interpreter. One that dies of a signal, is killed for memory, exceeds its time
    limit or raises has told something: the same import or call is likely to end the server too.

    ## Why it matters
    Whatever only that probe could have seen is reported as unknown, never as good. If the verdict needs it, there is no
    verdict (exit code 3).

    ## How it looks
    `crashed: died of SIGSEGV`, `timeout: gave no answer within 180 s`, `failed: ImportError: …`, with the last lines that the
    process printed.

    ## How it is fixed
    Read the last lines: they are the program's own. Run the one probe by itself with `xpufp8 doctor --only NAME`, give a slow
    machine more time with `--timeout`, and see the other findings first, since a broken installation is often the cause.
    """
    for probe, detail in sorted(case.missing.items()):
        if detail.startswith("skipped"):
            continue
        evidence = Evidence(probe=probe, mode="live", observed=detail)
        yield self.finding(probe, f"What the probe {probe} looks at could not be told.", [evidence], unknown=True)


RULES = (no_answer,)
