"""The command line: parse, call, print, exit. Nothing is decided here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from xpufp8 import __version__
from xpufp8.errors import UsageError
from xpufp8.exits import INTERRUPTED, NO_VERDICT, USAGE, FailOn
from xpufp8.output import Format

PASS_THROUGH = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
EPILOG = "Exit codes: 0 can be served as planned · 1 cannot, or a finding remains · 2 wrong usage · 3 no verdict."

app = typer.Typer(
    name="xpufp8",
    help="Will this FP8 model serve with vLLM on this Intel GPU? Says so before a weight is loaded, and repairs what it can.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Tokens = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] [VLLM OPTIONS]…", help="A folder with config.json or a hub id, and any options of vllm serve."
    ),
]
Device = Annotated[
    str | None, typer.Option(help="xpu, cpu, cuda, or sim:<profile> such as sim:arc-pro-b60. Default: what the PCI bus shows.")
]
Python = Annotated[str | None, typer.Option(metavar="PATH", help="The interpreter that has torch and vLLM. Default: this one.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How the report is written.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there instead of stdout.")]
FailOnOption = Annotated[
    str | None,
    typer.Option(
        "--fail-on", metavar="error|warning|never", help="From which severity on a finding fails the run. Default: error."
    ),
]
PolicyOption = Annotated[
    Path | None,
    typer.Option("--policy", metavar="FILE", help="Findings to ignore. Default: xpufp8.toml or pyproject.toml of this folder."),
]
Baseline = Annotated[Path | None, typer.Option(metavar="FILE", help="Ignore findings that this earlier JSON report has.")]
Only = Annotated[list[str] | None, typer.Option(metavar="PROBE", help="Run just this probe (again for more).")]
Skip = Annotated[list[str] | None, typer.Option(metavar="PROBE", help="Leave this probe out (again for more).")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of one probe.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Probe again even if nothing changed.")]
Vllm = Annotated[str | None, typer.Option("--vllm", metavar="PATH", help="Read an unpacked vLLM instead of the installed one.")]


def stop(message: str, code: int = USAGE) -> NoReturn:
    """End with one clear line on stderr."""
    from xpufp8.output.text import clean

    print(f"xpufp8: {clean(message)}", file=sys.stderr)
    raise typer.Exit(code)


def fail_on_value(text: str | None) -> FailOn | None:
    """The value of --fail-on, None when it was not typed.

    Raises:
        UsageError: none of the three.
    """
    if text is None:
        return None
    for known in ("error", "warning", "never"):
        if text == known:
            return known
    raise UsageError(f"--fail-on {text}: use error, warning or never.")


def validate_value(text: str) -> Any:
    """The value of --validate.

    Raises:
        UsageError: none of the three.
    """
    if text not in ("none", "probe", "launch"):
        raise UsageError(f"--validate {text}: use none, probe or launch.")
    return text


def write(text: str, output: Path | None) -> None:
    """Write a finished document to the file or stdout. The file is opened only now, so a failed run leaves none.

    Raises:
        UsageError: the file cannot be written.
    """
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {output}: cannot be written ({error.strerror or error})") from error


def emit(report: Any, chosen: Format, output: Path | None) -> None:
    """Print or write a report in a format; in a GitHub workflow the job summary too."""
    from xpufp8.output import renderer, terminal

    if chosen is Format.GITHUB and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(renderer(Format.MARKDOWN)(report))
    if chosen is Format.RICH and output is None:
        terminal.show(report, terminal.console_for())
    else:
        write(renderer(chosen)(report), output)


def finish(report: Any, chosen: Format, output: Path | None) -> NoReturn:
    """Emit a judged report and end with its exit code."""
    emit(report, chosen, output)
    raise typer.Exit(report.outcome.exit_code)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Options of xpufp8 itself."""
    if version:
        print(f"xpufp8 {__version__}")
        raise typer.Exit


@app.command(context_settings=PASS_THROUGH, epilog=EPILOG)
def doctor(
    tokens: Tokens = None,
    device: Device = None,
    python: Python = None,
    format_: FormatOption = Format.RICH,
    output: Output = None,
    fail_on: FailOnOption = None,
    policy: PolicyOption = None,
    baseline: Baseline = None,
    only: Only = None,
    skip: Skip = None,
    timeout: Timeout = 180.0,
    no_cache: NoCache = False,
    vllm: Vllm = None,
    runtime_fixes: Annotated[bool, typer.Option(help="Let the plan repair vLLM at run time.")] = True,
    sysfs: Annotated[str | None, typer.Option(metavar="ROOT", help="Judge a recorded machine (collect --host).")] = None,
    facts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Judge facts that xpufp8 collect saved, probing nothing.")
    ] = None,
    launch: Annotated[bool, typer.Option("--launch", help="Also start the plan once with dummy weights, and ask it.")] = False,
    list_probes: Annotated[bool, typer.Option("--list-probes", help="Name the probes and stop.")] = False,
) -> None:
    """Say whether MODEL will serve here, what is in the way, and what to do.

    Options that xpufp8 does not know are vllm serve's and are passed on unchanged; -- ends xpufp8's own. Without MODEL the
    installation alone is checked.
    """
    from xpufp8 import doctor as work
    from xpufp8.judgement import prepare
    from xpufp8.progress import Progress
    from xpufp8.target import resolve

    if list_probes:
        from probes.protocol import PROBES

        print("\n".join(PROBES))
        raise typer.Exit
    judgement = prepare(policy, baseline, fail_on_value(fail_on))
    if facts is not None:
        from xpufp8.saved import diagnose_saved, read

        if tokens:
            raise UsageError("--facts brings its own model and options; leave MODEL and vLLM options out.")
        finish(judgement.apply(diagnose_saved(read(facts))), format_, output)
    target = resolve(tokens or [], device=device, python=python, vllm_path=vllm, sysfs=sysfs)
    with Progress(target) as progress:
        request = work.Request(
            only=tuple(only or ()),
            skip=tuple(skip or ()),
            timeout=timeout,
            runtime_fixes=runtime_fixes,
            cache=not no_cache,
            on_done=progress.done,
        )
        report = work.diagnose_target(target, request)
        if launch:
            report = work.launch_plan(target, request, report)
    finish(judgement.apply(report), format_, output)


@app.command(context_settings=PASS_THROUGH, epilog=EPILOG)
def serve(
    tokens: Tokens = None,
    device: Device = None,
    python: Python = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command instead of running it.")] = False,
    validate: Annotated[str, typer.Option(metavar="none|probe|launch", help="How the plan is proven before it runs.")] = "probe",
    anyway: Annotated[bool, typer.Option("--anyway", help="Start even if the verdict is not servable or unknown.")] = False,
    runtime_fixes: Annotated[bool, typer.Option(help="Let the plan repair vLLM at run time.")] = True,
    format_: FormatOption = Format.RICH,
    skip: Skip = None,
    timeout: Timeout = 180.0,
    no_cache: NoCache = False,
) -> None:
    """Diagnose, plan, and become vllm serve with the plan.

    Signals, exit codes and logs are vLLM's own. When nothing changed since the last start, vLLM starts at once.
    """
    from xpufp8 import serve as work
    from xpufp8.command import rebuild
    from xpufp8.doctor import Request
    from xpufp8.progress import Progress
    from xpufp8.target import resolve

    level = validate_value(validate)
    if format_ not in (Format.RICH, Format.JSON):
        raise UsageError(f"--format {format_.value}: a plan is rich or json; doctor writes the other formats.")
    target = resolve(tokens or [], device=device, python=python)
    if target.simulated and not dry_run:
        raise UsageError(
            f"--device {target.device}: a simulated device cannot serve. Use --dry-run to see the command, or doctor."
        )
    with Progress(target) as progress:
        request = Request(
            skip=tuple(skip or ()), timeout=timeout, runtime_fixes=runtime_fixes, cache=not no_cache, on_done=progress.done
        )
        decision = work.decide(target, request, level, anyway=anyway)
    if not decision.start:
        _refuse(decision.report)
        raise typer.Exit(work.refusal_code(decision.report))
    command = rebuild(target, decision.report)
    if dry_run:
        text = command.shell + "\n" if format_ is Format.RICH else decision.report.plan.model_dump_json(indent=2) + "\n"
        write(text, None)
        raise typer.Exit(work.exit_for(decision))
    work.say(decision.report.plan, cached=decision.cached)
    work.become_vllm(command)


def _refuse(report: Any) -> None:
    """The whole report on stderr, where the logs of a service go."""
    from xpufp8.output import terminal

    terminal.show(report, terminal.console_for(stderr=True))


@app.command(context_settings=PASS_THROUGH)
def collect(
    tokens: Tokens = None,
    device: Device = None,
    python: Python = None,
    output: Output = None,
    only: Only = None,
    skip: Skip = None,
    timeout: Timeout = 180.0,
    host: Annotated[bool, typer.Option("--host", help="Record just this machine: cards, links, permissions, limits.")] = False,
) -> None:
    """Observe here, to judge elsewhere: write what the probes see as JSON (doctor --facts reads it).

    With --host: write what they read of the machine itself, redacted; doctor --sysfs FILE judges any command on it.
    """
    from xpufp8.doctor import Request, launch_for
    from xpufp8.progress import Progress
    from xpufp8.saved import collect as observe
    from xpufp8.saved import dump
    from xpufp8.target import resolve

    target = resolve(tokens or [], device=device, python=python)
    if host:
        from xpufp8.record import host_json, record_host

        write(host_json(record_host(target.context(), launch_for(target, Request(timeout=timeout)))), output)
        return
    with Progress(target) as progress:
        saved = observe(target, Request(only=tuple(only or ()), skip=tuple(skip or ()), timeout=timeout, on_done=progress.done))
    write(dump(saved), output)


@app.command()
def ops(
    device: Device = None,
    python: Python = None,
    format_: FormatOption = Format.RICH,
    output: Output = None,
    timeout: Timeout = 180.0,
    every: Annotated[bool, typer.Option("--all", help="Every op, not just those that cannot be traced.")] = False,
) -> None:
    """The op table: registered, fake, device kernel, and whether torch.compile can trace it."""
    from xpufp8.tables import run_table

    raise typer.Exit(
        run_table("fake_tensor", device=device, python=python, chosen=format_, output=output, timeout=timeout, every=every)
    )


@app.command()
def kernels(
    device: Device = None,
    python: Python = None,
    format_: FormatOption = Format.RICH,
    output: Output = None,
    timeout: Timeout = 180.0,
    vllm: Vllm = None,
) -> None:
    """The kernel-table matrix: which platform has a row in which of vLLM's tables, and what its choosers select here."""
    from xpufp8.tables import run_table

    raise typer.Exit(
        run_table("kernel_table", device=device, python=python, chosen=format_, output=output, timeout=timeout, vllm_path=vllm)
    )


@app.command()
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

    Exit codes: 0 no failure found, 1 a cause found, 3 a failure whose cause is unknown.
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
        if sys.stdin.isatty():
            raise UsageError("explain reads a log: give a file, or pipe one in (docker logs vllm 2>&1 | xpufp8 explain -).")
        return explain_stream(sys.stdin.buffer, name="stdin")
    try:
        with Path(log).open("rb") as stream:
            return explain_stream(stream, name=log)
    except OSError as error:
        raise UsageError(f"LOG {log}: cannot be read ({error.strerror or error}).") from error


@app.command()
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


@app.command(epilog=EPILOG)
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


@app.command(epilog="Exit codes: 0 right · 1 wrong · 2 wrong usage · 3 the server gave no answers to judge.")
def verify(
    url: Annotated[str, typer.Argument(metavar="URL", help="A running server, such as http://127.0.0.1:8000.")],
    reference: Annotated[
        str | None,
        typer.Option(metavar="URL|FILE", help="A server of the same checkpoint that is right, or what --save wrote of one."),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep this server's answers, to judge another by.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Of the server.", envvar="VLLM_API_KEY")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of lines.")] = False,
    output: Output = None,
) -> None:
    """Ask a running server and judge its answers: the same again and in a batch, finite, not flat, not one token for ever.

    With --reference: the same tokens, and nearly the same probabilities, as a server that is known to be right.
    """
    from xpufp8.output.text import clean
    from xpufp8.verify import verify as work

    found = work(url, reference=reference, save=save, key=api_key)
    write(found.model_dump_json(indent=2) + "\n" if as_json else clean(found.text()), output)
    raise typer.Exit(found.exit_code())


@app.command()
def rule(code: Annotated[str | None, typer.Argument(metavar="[CODE]", help="A rule's code, such as KRN001.")] = None) -> None:
    """A rule's page, or the list of all rules."""
    from xpufp8.pages import listing, page

    sys.stdout.write(listing() if code is None else page(code))


@app.command()
def schema() -> None:
    """The JSON Schema of the report."""
    from xpufp8.output.json_report import schema as text

    sys.stdout.write(text())


def main() -> NoReturn:
    """Entry point: the exit codes of DESIGN section 5, and never a traceback that nobody asked for."""
    # Typer carries its own copy of Click in some releases and the real one in others; its exceptions are found through Typer.
    parse_error: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        code = _say(str(error), USAGE)
    except typer.Exit as error:
        code = error.exit_code
    except parse_error as error:
        error.show()
        code = USAGE
    except (typer.Abort, KeyboardInterrupt):
        code = _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our pipe has gone (| head); what it read is complete, and Python must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        if os.environ.get("XPUFP8_TRACEBACK"):
            raise
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        code = _say(f"a fault of xpufp8 itself: {said}. Please report it with XPUFP8_TRACEBACK=1 set.", NO_VERDICT)
    sys.exit(code or 0)


def _say(message: str, code: int) -> int:
    from xpufp8.output.text import clean

    print(f"xpufp8: {clean(message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
