"""Options that are not xpufp8's reach vLLM byte for byte, wherever xpufp8's own stand among them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from xpufp8.cli import app
from xpufp8.command import Items, build
from xpufp8.target import Target, effective_args

LINES = json.loads((Path(__file__).parent.parent / "data" / "command_lines.json").read_text(encoding="utf-8"))
OWN = ["--device", "cpu", "--no-cache", "--timeout=60", "--format", "json"]


def tokens_of(command: str, argv: list[str]) -> list[str]:
    """What the command line hands on, by the very parser that the program uses."""
    root: Any = typer.main.get_command(app)
    context = root.commands[command].make_context(command, list(argv))
    return list(context.params["tokens"] or [])


def test_there_are_forty_lines_and_most_are_public() -> None:
    assert len(LINES) >= 40
    assert sum("#" in line["source"] or "/" in line["source"] for line in LINES) >= 25


@pytest.mark.parametrize("command", ["serve", "doctor"])
@pytest.mark.parametrize("line", [line["line"] for line in LINES])
def test_a_command_line_passes_through_unchanged(command: str, line: str) -> None:
    typed = shlex.split(line)
    assert tokens_of(command, typed) == typed
    assert tokens_of(command, [*OWN, *typed]) == typed
    assert tokens_of(command, [*typed, *OWN]) == typed
    plan = build(Target("python", "cpu", typed=tuple(typed)), Items(), {})
    assert plan.argv[plan.argv.index("serve") + 1 :] == typed
    assert shlex.split(plan.shell)[-len(typed) :] == typed, "the shell line reads back as the same words"


def test_two_dashes_end_our_own_options() -> None:
    assert tokens_of("serve", ["M", "--device", "cpu", "--", "--format", "json", "--", "x"]) == [
        "M",
        "--format",
        "json",
        "--",
        "x",
    ]


def test_options_of_a_config_file_count_and_typed_ones_win(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: org/name\ntensor-parallel-size: 2\nenforce-eager: true\ndtype: half\nserved-model-name: [a, b]\n")
    model, args = effective_args(["--config", str(file), "--dtype", "bfloat16"])
    from xpufp8 import options

    assert model == "org/name"
    assert options.parallel_sizes(args).tensor == 2
    assert options.flag(args, "--enforce-eager")
    assert options.value(args, "--dtype") == "bfloat16"
    assert options.find(args, "--served-model-name").values == ("a", "b")  # type: ignore[union-attr]  # it is there
