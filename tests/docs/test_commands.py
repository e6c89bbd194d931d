"""Every command that the documentation shows is run, or it is named here with the reason why not and its options are checked."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shown import ROOT, all_commands, inline_commands

REPORTS = ROOT / "tests" / "data" / "reports"
QUICK = re.compile(r"--facts|xpufp8 (?:render|diff|rule|schema|explain|--version|--help)\b|--list-probes")
"""Commands that judge, show or read: seconds. Others probe the real stack and are for the slow lane (marker ``sim``)."""

ELSEWHERE = {
    r"^pip install": "installs a package into the reader's environment",
    r"^python3 -m venv": "makes an environment",
    r"^wheels/bin/pip": "downloads the reader's wheel set",
    r"^docker ": "needs a container engine and the reader's image",
    r"vllm serve|xpufp8 serve (?!.*--dry-run)": "starts a server; tests/e2e does",
    r"kernels --vllm": "needs an unpacked wheel; tests/releases reads four",
    r"--sysfs": "needs a recorded machine; tests/host replays eight",
    r"--host\b": "records this machine; tests/host_half/test_topology.py does",
    r"xpufp8 verify": "needs a running server; tests/e2e has one",
    r"--launch": "starts a server; tests/e2e does",
    r"^make ": "a target of the Makefile; CI runs them",
    r"^(journalctl|systemctl|kubectl|sudo|ls|lspci|dmesg|cat|sycl-ls|clinfo|xpu-smi|export) ": "the reader's own system",
}  # fmt: skip
"""Commands that cannot run in a test, by pattern, each with its reason."""

COMMANDS = list(dict.fromkeys(command for _, command in all_commands()))


def reason(command: str) -> str | None:
    return next((why for pattern, why in ELSEWHERE.items() if re.search(pattern, command)), None)


RUN = [c for c in COMMANDS if reason(c) is None and QUICK.search(c)]
SLOW = [c for c in COMMANDS if reason(c) is None and not QUICK.search(c)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with every file that the documentation speaks of."""
    base = tmp_path_factory.mktemp("docs")
    for name in ("sim-llama.facts.json", "sim-block-fp8.json", "cpu-block-fp8.json"):
        shutil.copy(REPORTS / name, base)
    shutil.copy(REPORTS / "sim-llama-fp8-eager.json", base / "before.json")
    shutil.copy(REPORTS / "sim-llama-fp8-eager.json", base / "after.json")
    shutil.copy(REPORTS / "cpu-block-fp8.json", base / "report.json")
    shutil.copy(REPORTS / "sim-llama.facts.json", base / "facts.json")
    (base / "xpufp8.toml").write_text('[[ignore]]\ncode = "MEM001"\nreason = "known"\nuntil = 2999-01-01\n')
    (base / "server.log").write_text("KeyError: <PlatformEnum.XPU: 4>\n")
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "tiny_models.py", "llama-fp8-block", base / "tiny-block-fp8", "--no-weights"],
        check=True,
    )
    models = ROOT / "tests" / "data" / "models"
    for model in models.iterdir():
        if model.is_dir():
            shutil.copytree(model, base / model.name)
    return base


def shell(command: str, folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    words = ["bash", "-o", "pipefail", "-c", command]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("command", RUN)
def test_a_quick_command_runs(command: str, folder: Path) -> None:
    done = shell(command, folder, 120)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.sim
@pytest.mark.parametrize("command", SLOW)
def test_a_command_that_probes_runs(command: str, folder: Path) -> None:
    wheels = folder / "wheels"
    if not wheels.exists():
        wheels.symlink_to(Path(sys.executable).parent.parent)
    done = shell(command, folder, 600)
    assert done.returncode in (0, 1, 3), done.stderr
    assert "Traceback" not in done.stderr


def test_no_reason_is_left_over_and_some_command_runs() -> None:
    assert len(RUN) >= 8
    assert SLOW
    first = [pattern for pattern in ELSEWHERE if not any(re.search(pattern, c) for c in COMMANDS)]
    assert len(first) < len(ELSEWHERE)


def options_of(command: str) -> set[str]:
    """Options that this program's own help lists for a sub-command."""
    out = subprocess.run([sys.executable, "-m", "xpufp8", command, "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", out))


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    listing = subprocess.run([sys.executable, "-m", "xpufp8", "--help"], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"(?m)^\s*│?\s{0,4}([a-z]+)  +\S", listing[listing.index("Commands") :])
    return {name: options_of(name) for name in names}


PASSED_ON = {"doctor", "serve", "collect"}
"""Sub-commands that pass options they do not know to vllm serve."""

EVERYTHING = [*all_commands(), *inline_commands()]


@pytest.mark.parametrize(("page", "text"), EVERYTHING, ids=[f"{page}:{text[:50]}" for page, text in EVERYTHING])
def test_commands_and_options_that_are_shown_exist(page: str, text: str, known: dict[str, set[str]]) -> None:
    """Also for what is not run: the sub-command is there, and so are the options of commands that pass nothing on."""
    from xpufp8 import options

    del page
    for part in re.split(r"\s*(?:\||&&|;)\s*", text):
        match = re.search(r"(?:^|/|\s)xpufp8 ([a-z]+)(.*)", part)
        if not match or match[1] not in known:
            assert not (match and part.startswith("xpufp8 ") and match[1] not in known), (
                f"no command is called {match[1] if match else part}"
            )
            continue
        try:
            words = shlex.split(re.sub(r"[\[\]…]", " ", match[2]))
        except ValueError:
            words = match[2].split()
        for word in words:
            name = word.split("=", 1)[0]
            if not name.startswith("--") or name == "--":
                continue
            # --no-x is the other half of a switch that help shows as --x / --no-x.
            passed = match[1] in PASSED_ON and options.grammar().canonical(name).startswith("--")
            assert name in known[match[1]] or passed, f"{name} is no option of xpufp8 {match[1]}"
