"""The command line: exit codes, clear lines, clean pipes, a light host process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., subprocess.CompletedProcess[str]]

FACTS = str(Path(__file__).resolve().parents[1] / "data" / "reports" / "sim-llama.facts.json")
HEAVY = ("torch", "vllm", "transformers", "numpy", "intel_extension_for_pytorch")


def test_the_host_process_never_imports_the_serving_stack() -> None:
    code = "import sys, xpufp8.cli, xpufp8.doctor, xpufp8.planner, xpufp8.tables, xpufp8.rules, xpufp8.output.terminal; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in loaded if name.split(".")[0] in HEAVY]


def test_help_imports_neither_pydantic_nor_the_doctor() -> None:
    code = "import sys, xpufp8.cli; print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & {"pydantic", "xpufp8.doctor", "psutil", "yaml", "asyncio"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["doctor", "--device", "tpu"], "--device tpu: unknown. Use xpu, cpu, cuda, or sim:<profile>"),
        (["doctor", "--device", "sim:gtx"], "no such profile"),
        (["doctor", "/nowhere/model", "--device", "cpu"], "no such folder or file"),
        (["doctor", "--python", "/nowhere/python"], "no such program"),
        (["doctor", "--fail-on", "sometimes", "--device", "cpu"], "use error, warning or never"),
        (["doctor", "--device", "cpu", "--only", "sparkle"], "no probe is called 'sparkle'"),
        (["doctor", "--device", "sim", "--triton-xpu", "python"], "give MODEL and --device sim:<profile>"),
        (["doctor", "--format", "sparkle"], "sparkle"),
        (["kernels", "--vllm", "/nowhere"], "no such folder"),
        (["kernels", "--vllm", "/proc"], "no vLLM in it"),
        (["kernels", "--vllm", "~nobody-of-that-name/x"], "no such home folder"),
        (["doctor", "~nobody-of-that-name/model", "--device", "cpu"], "no such home folder"),
        (["ops", "--python", "~nobody-of-that-name/python"], "no such home folder"),
        (["doctor", "--sysfs", "/proc/self/fdinfo", "--device", "xpu"], "no folder sys in it"),
        (["doctor", "--sysfs", "/nowhere", "--device", "xpu"], "no such folder or file"),
        (["doctor", "--sysfs", FACTS, "--device", "xpu"], "It is a facts file: judge it with --facts"),
        (["doctor", "--facts", FACTS, "--device", "cpu", "--launch"], "leave out --device, --launch"),
        (["doctor", "--device", "cpu", "--timeout", "0"], "give seconds above zero"),
        (["ops", "--timeout", "-1"], "give seconds above zero"),
        (["explain", "--follow-up", "--timeout", "nan"], "give seconds above zero"),
        (["diff", "/dev/zero", "/dev/zero"], "larger than any report"),
        (["doctor", "https://somebody:S3kretOfAUrl@example.invalid/a/b", "--device", "cpu"], "<redacted>@example.invalid"),
        (["rule", "XYZ999"], "no rule is called"),
        (["sparkle"], "No such command"),
    ],
)
def test_wrong_usage_is_exit_two_and_says_so(xpufp8: Run, args: list[str], says: str) -> None:
    done = xpufp8(*args)
    assert done.returncode == 2
    assert says in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_failed_run_leaves_no_output_file(xpufp8: Run, tmp_path: Path) -> None:
    goal = tmp_path / "report.json"
    assert xpufp8("doctor", tmp_path, "--device", "cpu", "--format", "json", "--output", goal).returncode == 2
    assert not goal.exists()


def test_version_and_schema(xpufp8: Run) -> None:
    assert xpufp8("--version").stdout.startswith("xpufp8 0.")
    schema = json.loads(xpufp8("schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert {"schema_version", "tool", "verdict", "target", "probes", "findings", "plan"} <= set(schema["properties"])


def test_every_rule_has_a_page_with_the_same_four_parts(xpufp8: Run) -> None:
    codes = [line.split()[0] for line in xpufp8("rule").stdout.splitlines()]
    assert len(codes) == len(set(codes)) > 0
    from xpufp8.pages import page

    for code in codes:
        text = page(code)
        for heading in ("What it means", "Why it matters", "How it looks", "How it is fixed"):
            assert f"## {heading}" in text, f"{code} lacks {heading}"


def test_a_closed_pipe_is_no_error() -> None:
    line = f"{sys.executable} -m xpufp8 schema | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout == "{\n"
    assert done.stderr == ""


@pytest.mark.parametrize(("options", "code"), [([], 3), (["--refuse-with", "78"], 78)])
def test_a_refused_start_has_the_exit_code_that_was_asked_for(xpufp8: Run, tmp_path: Path, options: list[str], code: int) -> None:
    """An interpreter that answers nothing: no verdict, nothing is started."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    done = xpufp8("serve", *options, tmp_path, "--device", "cpu", "--python", python)
    assert done.returncode == code
    assert "No verdict: no answer from environment and kernel_table and model_trace" in " ".join(done.stderr.split())
