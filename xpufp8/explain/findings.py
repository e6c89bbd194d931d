"""An explanation as a report: the same model and formats that the doctor has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from probes.protocol import PROBES
from xpufp8 import __version__
from xpufp8.exits import NO_VERDICT, OK, REMAINS
from xpufp8.explain.text import quote
from xpufp8.report import Evidence, Finding, Fix, ProbeReport, Report, TargetInfo, Tool, Verdict
from xpufp8.rules import BY_CODE

if TYPE_CHECKING:
    from xpufp8.explain.conclude import Cause
    from xpufp8.explain.engine import Explanation
    from xpufp8.explain.structure.tracebacks import Chain, Traceback

PROBE = "log"
UNKNOWN = "ENV990"
COLLECT = (
    "Keep the whole log from the start of the server (docker logs CONTAINER 2>&1 | gzip > log.gz), not the last screen of it.",
    "Add `dmesg -T | grep -i -e xe -e i915 -e drm` of that time, and the output of `xpufp8 collect`.",
    "Run `xpufp8 doctor MODEL OPTIONS…` with the same command: it looks at the machine itself.",
)
_CONFIRM = {
    "ENV": ("environment",), "DEV": ("devices", "environment"), "OPS": ("fake_tensor", "model_trace"),
    "KRN": ("kernel_table",), "DTY": ("dtype_agreement", "model_trace"), "NUM": ("numerics",), "CMP": ("compile", "environment"),
    "MDL": ("model_trace", "environment"), "MEM": ("model_trace",), "P2P": ("peer_access", "host_ipc", "devices"),
    "PRF": ("speed",), "CFG": (),
}  # fmt: skip
"""Probes that look at what an area is about."""
_VERDICTS: dict[str, Verdict] = {"cause": "not-servable", "unknown": "unknown", "healthy": "servable"}
_EXITS = {"cause": REMAINS, "unknown": NO_VERDICT, "healthy": OK}
_SURE = {
    "confirmed": "This reading is confirmed: from the source, or by several users or a maintainer.",
    "reported": "This reading was reported by users; it need not be the only one.",
    "inferred": "This reading is inferred from the line and its surroundings, not confirmed.",
}
FRAMES = 6
"""Frames of an unknown failure that the report shows."""


def exit_code(explanation: Explanation) -> int:
    """0 no failure found, 1 a cause found, 3 a failure whose cause is unknown or a log that could not be read whole."""
    return _EXITS[explanation.outcome]


def confirming_probes(explanation: Explanation) -> list[str]:
    """Probes that would confirm the causes on this machine, in the order of the causes; all static ones for an unknown failure."""
    if explanation.outcome == "healthy":
        return []
    areas = [cause.code[:3] for cause in explanation.conclusion.causes] or ["ENV", "DEV"]
    wanted = dict.fromkeys(probe for area in areas for probe in _CONFIRM.get(area, ()))
    return [probe for probe in wanted if probe in PROBES]


def to_report(explanation: Explanation) -> Report:
    """The explanation as a report with findings, ranked, each with the log's own lines as evidence."""
    deployment = explanation.deployment
    findings = [_finding(cause) for cause in explanation.conclusion.causes]
    if explanation.conclusion.outcome == "unknown":
        findings.append(_unknown(explanation))
    if explanation.damage:
        findings.append(_damaged(explanation))
    return Report(
        tool=Tool(version=__version__),
        verdict=_VERDICTS[explanation.outcome],
        target=TargetInfo(
            python="",
            device=deployment.platform or "unknown",
            simulated=False,
            model=deployment.model or None,
            vllm_args=deployment.argv,
        ),
        probes=[
            ProbeReport(
                name=PROBE,
                status="ok",
                facts={"name": explanation.name, "lines": explanation.lines, "bytes": explanation.size, **deployment.as_facts()},
                detail=" ".join(explanation.notes),
            )
        ],
        findings=findings,
    )


def _finding(cause: Cause) -> Finding:
    rule = BY_CODE.get(cause.code)
    return Finding(
        code=cause.code,
        severity="warning" if cause.hint else "error",
        status="fail",
        title=cause.text.title or (rule.title if rule else cause.code),
        cause=f"{cause.cause} {_SURE[cause.certainty]}",
        subject=cause.subject,
        evidence=[_evidence(number, text) for number, text in cause.evidence],
        fixes=[Fix(kind=fix.kind, action=fix.action, cost=fix.cost) for fix in cause.fixes],
        references=list(cause.text.references),
    )


def _evidence(number: int, text: str) -> Evidence:
    return Evidence(probe=PROBE, mode="live", observed=text, where=f"line {number}")


def _damaged(explanation: Explanation) -> Finding:
    """A log that is empty or breaks off, said beside what was found in it."""
    packed = "Check the file (gzip -t FILE) and send it again, or read the log where it was written."
    empty = "Give the log that the server wrote: stderr too (docker logs CONTAINER 2>&1 | xpufp8 explain -)."
    return Finding(
        code=UNKNOWN,
        severity="warning",
        status="unknown",
        title="The log could not be read to its end" if explanation.size else "There is nothing to read",
        cause=f"{explanation.damage} A failure may stand in what was not read.",
        subject="the log itself",
        evidence=[_evidence(explanation.lines, explanation.damage)] if explanation.size else [],
        fixes=[Fix(kind="host", action=empty if explanation.damage == "The log is empty." else packed)],
    )


def _unknown(explanation: Explanation) -> Finding:
    """The unknown failure: what is the root of it, what shows it, and what to collect. No guess."""
    conclusion = explanation.conclusion
    evidence = _root_evidence(conclusion.root) if conclusion.root else []
    known = {one.where for one in evidence}
    evidence += [one for one in (_evidence(number, text) for number, text in conclusion.signs) if one.where not in known]
    rule = BY_CODE[UNKNOWN]
    return Finding(
        code=UNKNOWN,
        severity="error",
        status="unknown",
        title=rule.title,
        cause=_unknown_cause(conclusion.root),
        subject=conclusion.root.root.type if conclusion.root else "",
        evidence=evidence[:12],
        fixes=[Fix(kind="host", action=action) for action in COLLECT],
    )


def _unknown_cause(chain: Chain | None) -> str:
    if chain is None:
        return "Something failed, and the log holds no traceback of it: the process that failed first printed none, or another log has it."
    root = chain.root
    if not root.complete:
        return "A traceback in the log breaks off before its exception, so the cause is not in it."
    message = quote(root.message[0] if root.message else "", limit=300)
    sentence = f"The first exception is {root.type}{f': {message}' if message else ''}, and no signature knows it."
    if len(chain.members) > 1:
        sentence += f" {len(chain.members) - 1} more followed from it, the last one {chain.end.type or 'cut off'}."
    if chain.count > 1:
        sentence += f" It stands in the log {chain.count} times."
    return sentence


def _root_evidence(chain: Chain) -> list[Evidence]:
    """The root's exception, and the innermost frames of its rebuilt traceback."""
    root = chain.root
    frames = list(zip(root.frames, root.frame_lines, strict=True))
    shown = [
        _evidence(
            number,
            quote(f'File "{frame.file}", line {frame.line}, in {frame.function}' + (f": {frame.code}" if frame.code else "")),
        )
        for frame, number in frames[-FRAMES:]
    ]
    if root.complete:
        shown.insert(0, _evidence(root.line, quote(_exception_line(root))))
    return shown


def _exception_line(traceback: Traceback) -> str:
    message = " ".join(part for part in traceback.message[:3] if part)
    return f"{traceback.type}: {message}" if message else traceback.type
