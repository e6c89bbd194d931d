"""The command line: parse, call, print, exit. Nothing is decided here."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from xpufp8 import __version__, cli_reports
from xpufp8.cli_options import (
    EPILOG,
    Baseline,
    Device,
    FailOnOption,
    FormatOption,
    NoCache,
    Only,
    Output,
    PolicyOption,
    Python,
    Skip,
    Timeout,
    Tokens,
    Vllm,
    fail_on_value,
    finish,
    validate_value,
    write,
)
from xpufp8.errors import UsageError
from xpufp8.exits import INTERRUPTED, NO_VERDICT, USAGE
from xpufp8.output import Format

PASS_THROUGH = {"ignore_unknown_options": True, "help_option_names": ["--help"]}

app = typer.Typer(
    name="xpufp8",
    help="Will this FP8 model serve with vLLM on this Intel GPU? Says so before a weight is loaded, and repairs what it can.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Options of xpufp8 itself."""
    if version:
        print(f"xpufp8 {__version__}")
        raise typer.Exit


@app.command(context_settings=PASS_THROUGH, epilog=EPILOG, short_help="Will MODEL serve here, what is in the way, what to do?")
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
    triton_xpu: Annotated[
        Path | None,
        typer.Option(metavar="PYTHON", help="Interpreter with triton-xpu: compile the plan's Triton kernels for the profile."),
    ] = None,
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

        told = {"--device": device, "--python": python, "--only": only, "--skip": skip, "--vllm": vllm, "--sysfs": sysfs,
                "--launch": launch, "MODEL and vLLM options": tokens}  # fmt: skip
        if given := [name for name, value in told.items() if value]:
            raise UsageError(f"--facts brings its own model, options and machine; leave out {', '.join(given)}.")
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
            on_try=progress.trying,
            options={"triton_xpu": str(triton_xpu.absolute())} if triton_xpu else {},
        )
        report = work.diagnose_target(target, request)
        if launch:
            report = work.launch_plan(target, request, report)
    finish(judgement.apply(report), format_, output)


@app.command(context_settings=PASS_THROUGH, epilog=EPILOG, short_help="Diagnose, plan, and become vllm serve with the plan.")
def serve(
    tokens: Tokens = None,
    device: Device = None,
    python: Python = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command instead of running it.")] = False,
    validate: Annotated[str, typer.Option(metavar="none|probe|launch", help="How the plan is proven before it runs.")] = "probe",
    anyway: Annotated[bool, typer.Option("--anyway", help="Start even if the verdict is not servable or unknown.")] = False,
    runtime_fixes: Annotated[bool, typer.Option(help="Let the plan repair vLLM at run time.")] = True,
    refuse_with: Annotated[
        int | None,
        typer.Option(
            min=1, max=255, metavar="CODE", help="Exit code when nothing is started. Default: 1, or 3 without a verdict."
        ),
    ] = None,
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
            skip=tuple(skip or ()),
            timeout=timeout,
            runtime_fixes=runtime_fixes,
            cache=not no_cache,
            on_done=progress.done,
            on_try=progress.trying,
        )
        decision = work.decide(target, request, level, anyway=anyway)
    if not decision.start:
        _refuse(decision.report)
        raise typer.Exit(refuse_with or work.refusal_code(decision.report))
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


@app.command(context_settings=PASS_THROUGH, short_help="Write what the probes see, to judge it elsewhere.")
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


@app.command(short_help="Every custom op, and whether torch.compile can trace it.")
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


@app.command(short_help="vLLM's kernel tables, and what it selects here.")
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


app.command(short_help="The cause and the fix of a crash log.")(cli_reports.explain)
app.command(short_help="What changed between two reports.")(cli_reports.diff)
app.command(epilog=EPILOG, short_help="A saved report in another format.")(cli_reports.render)
app.command(
    epilog="Exit codes: 0 right · 1 wrong · 2 wrong usage · 3 the server gave no answers to judge.",
    short_help="Ask a running server, and judge its answers.",
)(cli_reports.verify)
app.command(short_help="A rule's page, or the list of all rules.")(cli_reports.rule)
app.command(short_help="The JSON Schema of the report.")(cli_reports.schema)


class Ended(BaseException):
    """A signal asked this process to end; what it started is ended on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended(number)


def main() -> NoReturn:
    """Entry point: the exit codes of DESIGN section 5, and never a traceback that nobody asked for."""
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup's choice, or a shell's for a job in the background, stays
            signal.signal(ending, _end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a sign shows a question mark; a diagnosis is never lost to it.
            stream.reconfigure(errors="replace")
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
    except Ended as end:
        code = _say(f"ended by {signal.Signals(end.number).name}", 128 + end.number)
    except Exception as error:
        if os.environ.get("XPUFP8_TRACEBACK"):
            raise
        import traceback

        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        code = _say(f"a fault of xpufp8 itself: {said}. Please report it with XPUFP8_TRACEBACK=1 set.", NO_VERDICT)
    sys.exit(code or 0)


def _say(message: str, code: int) -> int:
    from probes.redact import redact
    from xpufp8.output.text import clean

    # What was typed may be quoted here, a URL with its password among it.
    print(f"xpufp8: {clean(redact(message))}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
