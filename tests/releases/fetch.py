"""Fetch the vLLM releases that the release tests read: ``python tests/releases/fetch.py FOLDER [VERSION…]``.

Each wheel (0.4 GB or so) is downloaded with pip from whatever index pip is set up for, its Python files and metadata are
unpacked to ``FOLDER/VERSION``, and the wheel is thrown away. What is there already is left as it is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSIONS = ("0.10.2", "0.14.1", "0.21.0", "0.33.0")
GGUF = "gguf"
"""vLLM 0.14.1 and 0.21.0 import it; unpacked beside the releases so that nothing is installed."""
PLATFORMS = (
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)


def download(requirement: str, folder: Path, *, pure: bool = False) -> Path:
    """Download one wheel and return its path. The platform is named, so that any machine can read a Linux release.

    Raises:
        SystemExit: pip found no such wheel, or the network failed; pip has said so on stderr.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    if not pure:
        command += [*(f"--platform={name}" for name in PLATFORMS), "--python-version=3.11", "--implementation=cp", "--abi=abi3"]
    if subprocess.run([*command, f"--dest={folder}", requirement], check=False).returncode:
        sys.exit(f"pip could not download {requirement}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, target: Path) -> None:
    """Unpack the Python files and the metadata of a wheel; ``target`` appears whole or not at all."""
    part = target.with_name(target.name + ".part")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
        archive.extractall(part, names)
    part.rename(target)


def fetch(folder: Path, versions: tuple[str, ...]) -> None:
    """Bring every release that is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {**{version: f"vllm=={version}" for version in versions}, GGUF: GGUF}
    for name, requirement in wanted.items():
        target = folder / name
        if target.is_dir():
            continue
        print(f"fetching {requirement}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unpack(download(requirement, Path(scratch), pure=name == GGUF), target)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    fetch(Path(sys.argv[1]), tuple(sys.argv[2:]) or VERSIONS)
