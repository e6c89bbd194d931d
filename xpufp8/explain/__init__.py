"""From a crash log to a cause and a fix: ``explain_stream`` reads, ``to_report`` says it as the doctor would."""

from __future__ import annotations

from xpufp8.explain.engine import Explanation, explain_stream
from xpufp8.explain.findings import confirming_probes, exit_code, to_report

__all__ = ["Explanation", "confirming_probes", "exit_code", "explain_stream", "to_report"]
