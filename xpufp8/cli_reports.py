"""Commands that judge what is there already: a log, a report, a running server, a rule. They probe nothing of their own accord."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from xpufp8.cli_options import (
    Baseline,
    Device,
    FailOnOption,
    FormatOption,
    Output,
    PolicyOption,
    Python,
    Timeout,
    emit,
    fail_on_value,
    finish,
    write,
)
from xpufp8.errors import UsageError
from xpufp8.output import Format


def explain(
    log: Annotated[str, typer.Argument(metavar="[LOG|-]", help="A log file (also gzip), or - for stdin.")] = "-",
    format_: FormatOption = Format.RICH,
    output: Output = None,
    follow_up: Annotated[
        bool, typer.Option("--follow-up", help="Run the probes that would confirm the cause on this machine.")
    ] = False,
    device: Device = None,
    python: Python = None,
    timeout: Timeout = 180.0,
) -> None:
    """Name the cause and the fix of a crash log.

    Exit codes: 0 no failure found, 1 a cause found, 2 no log, 3 a failure whose cause is unknown, or a log that is empty or cut.
    """
    from xpufp8 import explain as work
    from xpufp8.follow_up import confirm

    explanation = _explain(log)
    report = work.to_report(explanation)
    if follow_up:
        report = confirm(report, work.confirming_probes(explanation), device=device, python=python, timeout=timeout)
    emit(report, format_, output)
    raise typer.Exit(work.exit_code(explanation))


def _explain(log: str) -> Any:
    from xpufp8.explain import explain_stream

    if log == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("explain reads a log: give a file, or pipe one in (docker logs vllm 2>&1 | xpufp8 explain -).")
        return explain_stream(sys.stdin.buffer, name="stdin")
    try:
        with Path(log).open("rb") as stream:
            return explain_stream(stream, name=log)
    except OSError as error:
        raise UsageError(f"LOG {log}: cannot be read ({error.strerror or error}).") from error


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A JSON report, or a file that collect wrote.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The later one.")],
    format_: Annotated[Format, typer.Option("--format", help="rich, json or markdown.")] = Format.RICH,
    output: Output = None,
) -> None:
    """What changed from A to B: findings, ops, kernel tables, selected kernels, speeds, versions.

    Exit codes: 0 nothing got worse, 1 something did, 2 a file cannot be read.
    """
    from xpufp8.diff import compare
    from xpufp8.output.diff_view import renderer
    from xpufp8.reading import read_any

    show = renderer(format_)
    if show is None:
        raise UsageError(f"--format {format_.value}: a comparison is rich, json or markdown.")
    comparison = compare(read_any(before, "A"), read_any(after, "B"), str(before), str(after))
    write(show(comparison), output)
    raise typer.Exit(int(comparison.regressed))


def render(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="A report that doctor --format json wrote.")],
    format_: FormatOption = Format.RICH,
    output: Output = None,
    fail_on: FailOnOption = None,
    policy: PolicyOption = None,
    baseline: Baseline = None,
) -> None:
    """Show a saved report in another format, without diagnosing again; ends with the exit code of the diagnosis."""
    from xpufp8.judgement import prepare
    from xpufp8.reading import read_report

    judgement = prepare(policy, baseline, fail_on_value(fail_on))
    finish(judgement.apply(read_report(report, "REPORT")), format_, output)


def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="A running server, such as http://127.0.0.1:8000.")],
    reference: Annotated[
        str | None,
        typer.Option(metavar="URL|FILE", help="A server of the same checkpoint that is right, or what --save wrote of one."),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep this server's answers, to judge another by.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Of the server.", envvar="VLLM_API_KEY")] = None,
    reference_api_key: Annotated[
        str | None,
        typer.Option("--reference-api-key", metavar="KEY", help="Of the reference server.", envvar="XPUFP8_REFERENCE_API_KEY"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of lines.")] = False,
    output: Output = None,
) -> None:
    """Ask a running server and judge its answers: the same again and in a batch, finite, not flat, not one token for ever.

    With --reference: the same tokens, and nearly the same probabilities, as a server that is known to be right.

    Exit codes: 0 right, 1 wrong, 3 no verdict, because answers are missing or too short.
    """
    from xpufp8.output.text import clean
    from xpufp8.verify import verify as work

    found = work(url, reference=reference, save=save, key=api_key, reference_key=reference_api_key)
    write(found.model_dump_json(indent=2) + "\n" if as_json else clean(found.text()), output)
    raise typer.Exit(found.exit_code())


def rule(code: Annotated[str | None, typer.Argument(metavar="[CODE]", help="A rule's code, such as KRN001.")] = None) -> None:
    """A rule's page, or the list of all rules."""
    from xpufp8.pages import listing, page

    write(listing() if code is None else page(code), None)


def schema() -> None:
    """The JSON Schema of the report."""
    from xpufp8.output.json_report import schema as text

    write(text(), None)
