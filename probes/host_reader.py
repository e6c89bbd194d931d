"""The one way in which the host probes read a machine: live, from a recorded tree, or live while recording.

Nothing here writes, and what could carry somebody's secrets is cut down while it is read (``probes.host_filters``).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from probes.host_filters import FILTERS, settings
from probes.protocol import Context

MAX_TEXT = 4 * 1024 * 1024
MAX_TREE = 64 * 1024 * 1024
COMMAND_SECONDS = 3.0


def errno_name(error: OSError) -> str:
    """EACCES, EPERM, … of an exception."""
    return errno.errorcode.get(error.errno or 0, f"errno {error.errno}")


def run_command(argv: list[str]) -> str | None:
    """Standard output of a short command, None when it is missing, fails or takes longer than three seconds."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout[:MAX_TEXT] if done.returncode == 0 else None


class Host:
    """The machine that runs this. ``runner`` replaces the way commands are run, ``environment`` the process's variables."""

    live = True

    def __init__(
        self, environment: dict[str, str] | None = None, runner: Callable[[list[str]], str | None] = run_command,
    ) -> None:  # fmt: skip
        self.environment = dict(os.environ) if environment is None else {**os.environ, **environment}
        self._runner = runner

    # what a kind of host overrides ------------------------------------------------------------------------------------

    def _bytes(self, path: str, most: int) -> bytes | None:
        try:
            with open(path, "rb") as file:
                return file.read(most)
        except OSError:
            return None

    def listing(self, path: str) -> list[str] | None:
        """Names in a folder, sorted; None where it is not there or cannot be read."""
        try:
            return sorted(entry.name for entry in Path(path).iterdir())
        except OSError:
            return None

    def link(self, path: str) -> str | None:
        """Where a symbolic link points, as written; None for anything else."""
        try:
            return os.readlink(path)  # noqa: PTH115 - the target as written, not as a resolved Path
        except OSError:
            return None

    def observed(self, key: str, look: Callable[[], Any]) -> Any:
        """What was tried rather than read (a JSON value). On a recorded machine: what was seen there, None if nothing was."""
        return look()

    # the rest follows from those --------------------------------------------------------------------------------------

    def read(self, path: str) -> str | None:
        """Text of a small file, filtered (:data:`FILTERS`); None where there is none."""
        data = self._bytes(path, MAX_TEXT * 4 if path in FILTERS else MAX_TEXT)
        if data is None:
            return None
        text = data.decode("utf-8", "replace")
        return FILTERS[path](text) if path in FILTERS else text

    def number(self, path: str, base: int = 10) -> int | None:
        """Integer that a file holds, None where it holds none."""
        try:
            return int((self.read(path) or "").strip(), base)
        except ValueError:
            return None

    def read_bytes(self, path: str, most: int = 4096) -> bytes | None:
        """Beginning of a binary file."""
        return self._bytes(path, most)

    def exists(self, path: str) -> bool:
        """True for a file, folder or link that can be seen."""
        return self.link(path) is not None or self.listing(path) is not None or self._bytes(path, 1) is not None

    def follow(self, path: str) -> str:
        """The path a link points to (one step), absolute; the path itself when it is no link."""
        target = self.link(path)
        return path if target is None else posixpath.normpath(posixpath.join(posixpath.dirname(path), target))

    def command(self, argv: list[str]) -> str | None:
        """Output of a command, through the injected runner."""
        return self._runner(argv)

    def settings(self) -> dict[str, str]:
        """Environment variables that bear on several cards."""
        return settings(self.environment)

    @property
    def changed(self) -> frozenset[str]:
        """Variables that were changed on a recorded machine since: what was tried there says little of what they bear on."""
        return frozenset()


def replayed(recorded: dict[str, str], environment: dict[str, str] | None) -> dict[str, str]:
    """Variables of a recorded machine: its own, then those of this process that bear on several cards (a plan that is tried), then
    what the caller adds.
    """
    return {**recorded, **settings(dict(os.environ)), **(environment or {})}


def differing(one: dict[str, str], other: dict[str, str]) -> frozenset[str]:
    """Names whose values differ or that one of the two lacks."""
    return frozenset(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


class RootHost(Host):
    """A folder that looks like the root of another machine. ``xpufp8-host.json`` in it may hold what was tried there."""

    live = False

    def __init__(self, root: str, environment: dict[str, str] | None = None) -> None:
        self.root = Path(root)
        extra: dict[str, Any] = {}
        note = self.root / "xpufp8-host.json"
        if note.is_file():
            extra = _load(note)
        super().__init__({}, lambda argv: (extra.get("commands") or {}).get(" ".join(argv)))
        self._recorded: dict[str, str] = extra.get("environment") or {}
        self.environment = replayed(self._recorded, environment)
        self._observations: dict[str, Any] = extra.get("observations") or {}

    @property
    def changed(self) -> frozenset[str]:
        """Variables that differ from the recording."""
        return differing(settings(self._recorded), settings(self.environment))

    def _inside(self, path: str, *, last: bool = True) -> str:
        """The place in the folder, with every link on the way followed as if the folder were the root: none leads out of it."""
        done, rest, steps = "/", [part for part in path.split("/") if part], 0
        while rest:
            done = posixpath.normpath(posixpath.join(done, rest.pop(0)))
            target = None
            if rest or last:
                with contextlib.suppress(OSError):
                    target = os.readlink(f"{self.root}{done}")  # noqa: PTH115
            if target is not None and steps < 40:
                steps += 1
                full = posixpath.normpath(posixpath.join(posixpath.dirname(done), target))
                done, rest = "/", [*(part for part in full.split("/") if part), *rest]
        return f"{self.root}{done}"

    def _bytes(self, path: str, most: int) -> bytes | None:
        return super()._bytes(self._inside(path), most)

    def listing(self, path: str) -> list[str] | None:
        """Names in a folder of the tree."""
        return super().listing(self._inside(path))

    def link(self, path: str) -> str | None:
        """A link of the tree, as written."""
        return super().link(self._inside(path, last=False))

    def observed(self, key: str, look: Callable[[], Any]) -> Any:
        """What the folder's note says was seen there."""
        return self._observations.get(key)


class TreeHost(Host):
    """A machine recorded with ``xpufp8 collect --host`` (:class:`probes.host_facts.HostTreeFacts` as JSON)."""

    live = False

    def __init__(self, tree: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        super().__init__({}, lambda argv: (tree.get("commands") or {}).get(" ".join(argv)))
        self._recorded: dict[str, str] = tree.get("environment") or {}
        self.environment = replayed(self._recorded, environment)
        self._tree = tree

    @property
    def changed(self) -> frozenset[str]:
        """Variables that differ from the recording."""
        return differing(settings(self._recorded), settings(self.environment))

    def _part(self, name: str) -> dict[str, Any]:
        part = self._tree.get(name)
        return part if isinstance(part, dict) else {}

    def _bytes(self, path: str, most: int) -> bytes | None:
        if path in self._part("binary"):
            return bytes.fromhex(str(self._part("binary")[path]))[:most]
        text = self._part("files").get(path)
        return None if text is None else str(text).encode()[:most]

    def read(self, path: str) -> str | None:
        """Text as it was recorded, which is after filtering."""
        data = self._bytes(path, MAX_TEXT)
        return None if data is None else data.decode("utf-8", "replace")

    def listing(self, path: str) -> list[str] | None:
        """Names as recorded."""
        names = self._part("folders").get(path)
        return None if names is None else [str(name) for name in names]

    def link(self, path: str) -> str | None:
        """Link as recorded."""
        target = self._part("links").get(path)
        return None if target is None else str(target)

    def observed(self, key: str, look: Callable[[], Any]) -> Any:
        """What was seen there."""
        return self._part("observations").get(key)


class RecordingHost(Host):
    """Another host, keeping what is read of it."""

    def __init__(self, of: Host) -> None:
        super().__init__({}, of.command)
        self.environment = of.environment
        self.live = of.live
        self._of = of
        self.tree: dict[str, Any] = {
            "version": 1, "files": {}, "binary": {}, "links": {}, "folders": {}, "commands": {}, "observations": {},
            "environment": settings(of.environment),
        }  # fmt: skip

    def _keep(self, part: str, path: str, value: Any) -> Any:
        if value is not None:
            self.tree[part][path] = value
        return value

    def read(self, path: str) -> str | None:
        """Text, kept as filtered."""
        text: str | None = self._keep("files", path, self._of.read(path))
        return text

    def read_bytes(self, path: str, most: int = 4096) -> bytes | None:
        """Bytes, kept without a PCI device's serial number."""
        data = self._of.read_bytes(path, most)
        kept = without_serial(data) if data is not None and path.endswith("/config") else data
        self._keep("binary", path, None if kept is None else kept.hex())
        return kept

    def listing(self, path: str) -> list[str] | None:
        """Names, kept."""
        names: list[str] | None = self._keep("folders", path, self._of.listing(path))
        return names

    def link(self, path: str) -> str | None:
        """Link, kept."""
        target: str | None = self._keep("links", path, self._of.link(path))
        return target

    def exists(self, path: str) -> bool:
        """True for what can be seen; the fact is kept, the content is not."""
        there = self._of.exists(path)
        if there and path not in self.tree["files"] and path not in self.tree["folders"] and path not in self.tree["links"]:
            self.tree["files"][path] = ""
        return there

    def command(self, argv: list[str]) -> str | None:
        """Output, kept."""
        output: str | None = self._keep("commands", " ".join(argv), self._of.command(argv))
        return output

    def observed(self, key: str, look: Callable[[], Any]) -> Any:
        """What was tried, kept."""
        return self._keep("observations", key, self._of.observed(key, look))


def extended_capabilities(config: bytes) -> dict[int, int]:
    """PCIe extended capabilities of a config space: id to offset. Empty when only its first 256 bytes can be read."""
    found: dict[int, int] = {}
    at = 0x100
    while 0x100 <= at <= len(config) - 4 and at not in found.values():
        head = int.from_bytes(config[at : at + 4], "little")
        if head in {0, 0xFFFFFFFF}:
            break
        found.setdefault(head & 0xFFFF, at)
        at = (head >> 20) & 0xFFC
    return found


def without_serial(config: bytes) -> bytes:
    """Config space with all zero but what the probes use: the extended capability heads and the ACS capability."""
    kept = bytearray(len(config))
    for number, at in extended_capabilities(config).items():
        size = 8 if number == 0x000D else 4
        kept[at : at + size] = config[at : at + size]
    return bytes(kept)


def _load(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_TREE:
        raise ValueError(f"{path} is larger than a recorded machine can be ({MAX_TREE >> 20} MiB)")
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no recorded machine: a JSON object was expected")  # noqa: TRY004 - unreadable input, no bug
    return data


def open_host(context: Context, runner: Callable[[list[str]], str | None] = run_command) -> Host:
    """The machine that a probe is asked about.

    ``options.sysfs_root`` (or ``root``) names a folder with a root file system, or a JSON file from ``xpufp8 collect --host``;
    without it the machine is this one. ``options.environment`` adds variables, ``options.record`` makes it a RecordingHost.

    Raises:
        ValueError: the recorded machine cannot be read.
    """
    root = context.options.get("sysfs_root") or context.options.get("root")
    environment = context.options.get("environment")
    if not root:
        host = Host(environment, runner)
    elif Path(root).is_dir():
        host = RootHost(str(root), environment)
    elif Path(root).is_file():
        tree = _load(Path(root))
        # A report of `xpufp8 collect` holds the tree among its facts; both shapes replay.
        facts = tree.get("facts")
        host = TreeHost(facts if isinstance(facts, dict) else tree, environment)
    else:
        raise ValueError(f"no folder and no file: {root}")
    return host


def applies(context: Context, host: Host) -> bool:
    """False for a simulated device on this machine: the cards of this host are then not the ones asked about."""
    return not (context.simulated and host.live)
