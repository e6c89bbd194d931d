"""JUnit XML: a test case a finding, a probe and the verdict. It has a failure or an error exactly when the exit code is not 0."""

from __future__ import annotations

from typing import Any

from xpufp8.exits import NO_VERDICT, OK
from xpufp8.output import wording
from xpufp8.output.text import clean
from xpufp8.report import ProbeReport, Report
from xpufp8.verdict import exit_code


def render(report: Report) -> str:
    """The report as JUnit XML (UTF-8).

    A finding that counts is a failure; one that a plan repairs, that a policy ignores or that is below ``--fail-on`` passes and
    says so in its output; what could not be told is skipped, never passed.
    """
    from junitparser import JUnitXml, TestSuite

    xml = JUnitXml("xpufp8")
    for name, cases in (
        ("verdict", [_verdict(report)]),
        ("findings", [_finding(entry) for entry in wording.entries(report)]),
        ("probes", [_probe(probe) for probe in report.probes]),
    ):
        suite = TestSuite(name)
        for label, value in wording.head(report) if name == "verdict" else ():
            suite.add_property(label, _xml(value))
        suite.add_testcases(cases)
        xml.add_testsuite(suite)
    xml.update_statistics()
    text: bytes = xml.tostring()
    return text.decode("utf-8") + "\n"


def _xml(text: str) -> str:
    """Text that XML 1.0 can hold."""
    return "".join(c for c in clean(text) if c not in "\ufffe\uffff")


def _case(name: str, classname: str, seconds: float = 0.0, *, result: Any = None, said: str = "") -> Any:
    from junitparser import TestCase

    case = TestCase(_xml(name), _xml(classname), round(seconds, 3))
    if result is not None:
        case.result = [result]
    if said:
        case.system_out = _xml(said)
    return case


def _verdict(report: Report) -> Any:
    from junitparser import Error, Failure

    code = report.outcome.exit_code if report.outcome else exit_code(report)
    kind = {OK: None, NO_VERDICT: Error}.get(code, Failure)
    text = _xml(wording.headline(report))
    said = text + (f"\n{report.plan.shell}" if report.plan.shell else "")
    return _case("verdict", "xpufp8", result=kind(text, report.verdict) if kind else None, said=said)


def _finding(entry: wording.Entry) -> Any:
    from junitparser import Failure, Skipped

    finding = entry.finding
    lines = [f"{finding.severity}: {finding.cause}", wording.standing(entry.finding)]
    lines += [f"seen {wording.seen(evidence)}" for evidence in finding.evidence]
    lines += [f"do   {wording.remedy(fix, finding)}" for fix in finding.fixes]
    text = _xml("\n".join(line for line in lines if line))
    result: Any = None
    if entry.state == "failing":
        result = Failure(_xml(finding.cause), finding.severity)
        result.text = text
    elif entry.state == "unknown":
        result = Skipped(_xml(f"could not be told: {finding.cause}"))
    name = f"{finding.code} {wording.title(finding)}"
    return _case(name, f"xpufp8.{finding.code[:3]}", result=result, said=f"{wording.HEADINGS[entry.state]}\n{text}")


def _probe(probe: ProbeReport) -> Any:
    from junitparser import Skipped

    result = None if probe.status == "ok" else Skipped(_xml(f"no answer ({probe.status}): {probe.detail}"))
    return _case(probe.name, "xpufp8.probes", probe.seconds, result=result, said="\n".join(probe.last_lines))
