"""Progress on stderr while probes run."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status
    from typing_extensions import Self

    from xpufp8.report import ProbeReport
    from xpufp8.target import Target


class Progress:
    """A spinner on a terminal; one line a probe elsewhere (a CI log shows where time went)."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._status: Status | None = None

    def __enter__(self) -> Self:
        chosen = f" ({self._target.chosen})" if self._target.chosen else ""
        said = f"device {self._target.device}{chosen}"
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status(f"probing · {said}")
            self._status.start()
        else:
            print(f"xpufp8: {said}", file=sys.stderr)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def trying(self, fixes: str) -> None:
        """Probes run again, with these fixes in place."""
        from probes.redact import redact
        from xpufp8.output.text import clean

        line = f"trying {clean(redact(fixes))}"
        if self._status is not None:
            self._status.update(f"probing · {line}")
        else:
            print(f"xpufp8: {line}", file=sys.stderr)

    def done(self, report: ProbeReport) -> None:
        """A probe has ended."""
        line = f"{report.name}: {report.status} in {report.seconds:.1f} s"
        if report.status != "ok" and report.detail:
            from xpufp8.output.text import clean

            line += f": {clean(report.detail.splitlines()[0])}"
        if self._status is not None:
            self._status.update(f"probing · {line}")
        else:
            print(f"xpufp8: {line}", file=sys.stderr)
