"""What the commands share: their options, and how a report is written out."""

from __future__ import annotations

import math
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from xpufp8.errors import UsageError
from xpufp8.exits import USAGE, FailOn
from xpufp8.output import Format

EPILOG = "Exit codes: 0 can be served as planned · 1 cannot, or a finding remains · 2 wrong usage · 3 no verdict."

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


def seconds(text: str | float) -> float:
    """A time limit.

    Raises:
        typer.BadParameter: not a number above zero.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise typer.BadParameter(f"{text}: give seconds above zero.")
    return value


Timeout = Annotated[float, typer.Option(parser=seconds, metavar="SECONDS", help="Time limit of one probe.")]
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


def to_stdout(show: Callable[[], object]) -> None:
    """Print, and outlive a reader that goes away (``| head``): what it read is what it wanted, and the exit code is still ours.

    Raises:
        UsageError: stdout is closed or full.
    """
    if sys.stdout is None:
        raise UsageError("stdout is closed: give --output FILE.")
    try:
        show()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(f"stdout cannot be written ({error.strerror or error}): give --output FILE.") from error


def write(text: str, output: Path | None) -> None:
    """Write a finished document to the file or stdout. The file is replaced only when all is written, so a failed run leaves
    the old one as it was.

    Raises:
        UsageError: the file or stdout cannot be written.
    """
    if output is None:
        to_stdout(lambda: sys.stdout.write(text))
        return
    data = text.encode("utf-8", "replace")
    try:
        if output.exists() and not output.is_file():  # a device or a pipe takes what it is given
            output.write_bytes(data)
            return
        goal = output.resolve()
        handle, part = tempfile.mkstemp(dir=goal.parent, prefix=f".{goal.name[:100]}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(part).chmod(stat.S_IMODE(goal.stat().st_mode) if goal.exists() else 0o666 & ~umask())
            Path(part).replace(goal)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"--output {output}: cannot be written ({error.strerror or error})") from error


def umask() -> int:
    """The process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def emit(report: Any, chosen: Format, output: Path | None) -> None:
    """Print or write a report in a format; in a GitHub workflow the job summary too."""
    from xpufp8.output import renderer, terminal

    if chosen is Format.GITHUB and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
        try:
            with Path(summary).open("a", encoding="utf-8", errors="replace") as file:
                file.write(renderer(Format.MARKDOWN)(report))
        except OSError as error:
            print(f"xpufp8: no job summary: {summary} cannot be written ({error.strerror or error})", file=sys.stderr)
    if chosen is Format.RICH and output is None:
        to_stdout(lambda: terminal.show(report, terminal.console_for()))
    else:
        write(renderer(chosen)(report), output)


def finish(report: Any, chosen: Format, output: Path | None) -> NoReturn:
    """Emit a judged report and end with its exit code."""
    emit(report, chosen, output)
    raise typer.Exit(report.outcome.exit_code)
