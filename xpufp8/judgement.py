"""From what was typed (``--fail-on``, ``--policy``, ``--baseline``) to what counts: read before a probe starts, applied after."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from xpufp8.exits import FailOn
from xpufp8.policy import Loaded, find, judge, load
from xpufp8.reading import read_report
from xpufp8.report import Report


@dataclass(frozen=True)
class Judgement:
    """What counts in this run."""

    loaded: Loaded | None = None
    fail_on: FailOn | None = None
    baseline: tuple[str, Report] | None = None

    def apply(self, report: Report) -> Report:
        """The report with its exit code (``outcome``) and with what does not count marked as such.

        A saved report that was judged keeps its judgement when nothing here says otherwise, so that showing it again somewhere
        else ends as the diagnosis did.
        """
        if report.outcome is not None and self == Judgement():
            return report
        today = datetime.now(timezone.utc).date()
        return judge(report, self.loaded, fail_on=self.fail_on, baseline=self.baseline, today=today)


def prepare(policy: Path | None, baseline: Path | None, fail_on: FailOn | None) -> Judgement:
    """Read what the options name. Without ``--policy`` the policy of the working folder holds, if there is one.

    Raises:
        xpufp8.errors.UsageError: a file that cannot be used.
    """
    path = policy or find(Path())
    loaded = load(path) if path is not None else None
    earlier = baseline or (loaded.baseline if loaded else None)
    return Judgement(loaded, fail_on, (str(earlier), read_report(earlier, "--baseline")) if earlier else None)
