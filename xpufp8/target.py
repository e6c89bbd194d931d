"""What is diagnosed: the interpreter, the device, the model and the vLLM options."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from probes.protocol import Context
from probes.vllm_source import SourceError, find_package
from xpufp8.errors import UsageError, user_path
from xpufp8.json_file import read_data
from xpufp8.model import ModelSpec, load
from xpufp8.options import DATA, split_model
from xpufp8.report import TargetInfo

DEVICES = ("xpu", "cpu", "cuda")
DEFAULT_PROFILE = "arc-pro-b60"
INTEL = "0x8086"
DISPLAY_CLASS = "0x03"


@dataclass(frozen=True)
class Target:
    """A resolved target."""

    python: str
    device: str
    """xpu, cpu, cuda or sim:<profile>."""
    model: ModelSpec | None = None
    vllm_args: tuple[str, ...] = ()
    """Options that count, MODEL not among them, those of a ``--config`` file included."""
    typed: tuple[str, ...] = ()
    """MODEL and options exactly as typed."""
    vllm_path: str | None = None
    chosen: str = ""
    """Why this device, when nobody named one."""
    sysfs: str | None = None
    options: dict[str, object] = field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        """True for a simulated XPU."""
        return self.device.startswith("sim")

    @property
    def info(self) -> TargetInfo:
        """As it stands in the report."""
        return TargetInfo(
            python=self.python,
            device=self.device,
            simulated=self.simulated,
            model=self.model.source if self.model else None,
            vllm_args=list(self.vllm_args),
        )

    def context(self) -> Context:
        """As probes are asked."""
        return Context(
            device=self.device,
            model=self.model.folder if self.model else None,
            vllm_args=list(self.vllm_args),
            vllm_path=self.vllm_path,
            options=dict(self.options) | ({"root": self.sysfs} if self.sysfs else {}),
        )


@cache
def profiles() -> tuple[str, ...]:
    """Names of the simulated devices (``data/devices.json``)."""
    data = json.loads((DATA / "devices.json").read_text(encoding="utf-8"))
    return tuple(sorted(data["devices"]))


def resolve_device(asked: str | None) -> tuple[str, str]:
    """The device and, when nobody named one, why it was chosen.

    Raises:
        UsageError: no such device or profile.
    """
    if asked is None:
        return _detect()
    name = asked.strip().lower()
    if name in DEVICES:
        return name, ""
    if name == "sim":
        name = f"sim:{DEFAULT_PROFILE}"
    if name.startswith("sim:"):
        if name[4:] in profiles():
            return name, ""
        raise UsageError(f"--device {asked}: no such profile. Simulated devices: {', '.join('sim:' + p for p in profiles())}.")
    raise UsageError(f"--device {asked}: unknown. Use xpu, cpu, cuda, or sim:<profile> ({', '.join(profiles())}).")


def _detect(sysfs: Path = Path("/sys/bus/pci/devices"), nodes: Path = Path("/dev")) -> tuple[str, str]:
    """Look at the PCI bus, which shows a card even when its driver, its runtime or our permissions do not."""
    for device in sorted(sysfs.glob("*")):
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == INTEL and kind.startswith(DISPLAY_CLASS):
            return "xpu", f"Intel display device at PCI {device.name}"
    if (nodes / "nvidia0").exists():
        return "cuda", "NVIDIA device node, no Intel GPU on the PCI bus"
    return "cpu", "no GPU on the PCI bus"


def resolve_python(asked: str | None) -> str:
    """Path of the target interpreter: the asked one, else the running one.

    Raises:
        UsageError: there is no such program.
    """
    if asked is None:
        return sys.executable
    typed = user_path(asked, "--python")
    # A bare name is looked for on PATH, so "./" must not get lost on the way.
    path = shutil.which(str(typed) if asked.startswith("~") else asked)
    if path is None:
        folder = typed / "bin" / "python"
        with contextlib.suppress(OSError):
            if folder.is_file():
                return str(folder)
        raise UsageError(
            f"--python {asked}: no such program. Give the interpreter that has vLLM, for example /opt/venv/bin/python."
        )
    # Not resolved: a virtual environment is known by the path of its own python, which is a symbolic link.
    return str(Path(path).absolute())


def read_yaml_options(path: str) -> tuple[str | None, list[str]]:
    """MODEL (key ``model``) and the options of a vLLM ``--config`` file as tokens.

    Raises:
        UsageError: unreadable or no mapping.
    """
    import yaml

    try:
        data = yaml.safe_load(user_path(path, "--config").read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: cannot be read ({error.strerror or error})") from error
    except RecursionError as error:
        raise UsageError(f"--config {path}: broken YAML (nested too deep)") from error
    except (yaml.YAMLError, ValueError) as error:  # PyYAML lets ValueError through for a date that is none
        raise UsageError(f"--config {path}: broken YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(data, dict):
        raise UsageError(f"--config {path}: holds no mapping of options")
    model: str | None = None
    tokens: list[str] = []
    for key, entry in data.items():
        if key in ("model", "model_tag"):
            model = str(entry)
        elif isinstance(entry, bool):
            tokens += [f"--{key}"] if entry else []
        elif isinstance(entry, list):
            tokens += [f"--{key}", *map(str, entry)]
        elif isinstance(entry, dict):
            try:
                tokens += [f"--{key}", json.dumps(entry, default=str)]
            except (ValueError, TypeError, RecursionError) as error:
                raise UsageError(f"--config {path}: {key} is no mapping that can be written as JSON ({error})") from error
        elif entry is not None:
            tokens += [f"--{key}", str(entry)]
    return model, tokens


def effective_args(tokens: Sequence[str]) -> tuple[str | None, list[str]]:
    """MODEL and the options that count, with those of a ``--config`` file put before the typed ones (which win, as in vLLM).

    Raises:
        UsageError: the config file cannot be read.
    """
    from xpufp8 import options

    model, rest = split_model(tokens)
    config = options.find(rest, "--config")
    if config is None or config.value is None:
        return model, rest
    inner_model, inner = read_yaml_options(config.value)
    return model or inner_model, [*inner, *options.without(rest, ["--config"])]


def unpacked_vllm(typed: str) -> str:
    """Folder of ``--vllm``.

    Raises:
        UsageError: there is no vLLM in it.
    """
    folder = user_path(typed, "--vllm")
    try:
        find_package(str(folder))
    except (SourceError, OSError) as error:
        wrong = "no vLLM in it" if folder.is_dir() else "no such folder"
        raise UsageError(f"--vllm {typed}: {wrong}. Give an unpacked vLLM wheel (the folder that holds vllm/).") from error
    return str(folder.resolve())


def recorded_machine(typed: str) -> str:
    """File or folder of ``--sysfs``.

    Raises:
        UsageError: it holds no recorded machine.
    """
    path = user_path(typed, "--sysfs")
    give = "Give what `xpufp8 collect --host` wrote, or a folder that looks like the root of a machine (it holds sys/)."
    if path.is_dir():
        if not (path / "sys").is_dir():
            raise UsageError(f"--sysfs {typed}: no folder sys in it. {give}")
        return str(path.resolve())
    if not path.exists():
        raise UsageError(f"--sysfs {typed}: no such folder or file. {give}")
    data = read_data(path, "--sysfs", give)
    tree = data.get("facts") if isinstance(data.get("facts"), dict) else data
    if not isinstance(tree, dict) or not {"files", "folders", "links"} <= set(tree):
        told = " It is a facts file: judge it with --facts." if "facts_version" in data else ""
        raise UsageError(f"--sysfs {typed}: no recorded machine.{told} {give}")
    return str(path.resolve())


def resolve(
    tokens: Sequence[str],
    *,
    device: str | None = None,
    python: str | None = None,
    vllm_path: str | None = None,
    sysfs: str | None = None,
) -> Target:
    """Resolve what was typed into a target.

    Args:
        tokens: MODEL and vLLM options as typed, in order.
        device: ``--device``.
        python: ``--python``.
        vllm_path: ``--vllm``: folder of an unpacked vLLM to read instead of the installed one.
        sysfs: ``--sysfs``: a recorded machine for host facts, a root folder or a file.

    Raises:
        UsageError: any of them cannot be used; the message says what to do.
    """
    model_name, args = effective_args(tokens)
    name, why = resolve_device(device)
    return Target(
        python=resolve_python(python),
        device=name,
        model=load(model_name, args) if model_name is not None else None,
        vllm_args=tuple(args),
        typed=tuple(tokens),
        vllm_path=unpacked_vllm(vllm_path) if vllm_path is not None else None,
        chosen=why,
        sysfs=recorded_machine(sysfs) if sysfs is not None else None,
    )
