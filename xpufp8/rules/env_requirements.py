"""Requirements of installed packages against what is installed, judged with ``packaging`` for the target's own markers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from probes.facts import EnvironmentFacts, PackageFact

ELSEWHERE = frozenset({
    "torch", "vllm", "transformers", "torchvision", "torchaudio", "torchcodec", "triton", "triton-xpu", "pytorch-triton-xpu",
    "vllm-xpu-kernels", "intel-extension-for-pytorch", "numpy",
})  # fmt: skip
"""Not reported as missing here: ENV001, ENV007, ENV009 and ENV014 say what their absence means, and numpy's shows at once."""

PAIRED = frozenset({"torch", "vllm", "vllm-xpu-kernels", "transformers", "compressed-tensors", "tokenizers"})
"""Pairings that are true of the software alone, on a simulated device too."""


@dataclass(frozen=True)
class Unmet:
    """A requirement that is not met."""

    name: str
    text: str
    """As it stands in the metadata, without its marker."""
    installed: str | None
    """``torch 2.13.0+cpu``, None when it is not installed."""


def _parse(text: str, markers: dict[str, str]) -> Requirement | None:
    """A requirement that applies to this interpreter, None for one that does not or that cannot be read."""
    try:
        one = Requirement(text)
        environment: dict[str, str] = dict(markers) | {"extra": ""}
        return one if one.marker is None or one.marker.evaluate(environment) else None
    except (InvalidRequirement, UndefinedEnvironmentName):
        return None


def _installed(name: str, facts: EnvironmentFacts) -> PackageFact | None:
    """The installed package that a requirement's name stands for: by its distribution, else by the package itself."""
    wanted = canonicalize_name(name)
    there = [p for p in facts.packages if p.location is not None]
    named = [p for p in there if p.distribution and canonicalize_name(p.distribution) == wanted]
    return next(iter(named or [p for p in there if not p.distribution and canonicalize_name(p.name) == wanted]), None)


def _url_version(url: str) -> Version | None:
    """Version in the file name of a wheel that a requirement names by address."""
    try:
        return parse_wheel_filename(url.partition("#")[0].partition("?")[0].rpartition("/")[2].replace("%2B", "+"))[1]
    except (InvalidWheelFilename, InvalidVersion):
        return None


def _agrees(one: Requirement, version: Version, *, software_only: bool) -> bool:
    if one.url:
        asked = _url_version(one.url)
        return asked is None or asked == version or (asked.local is None and asked.public == version.public)
    specifier = one.specifier
    if software_only:  # flavours of this machine say nothing about the real one
        specifier = type(specifier)(re.sub(r"\+[\w.]+", "", str(specifier)))
        version = Version(version.public)
    return specifier.contains(version, prereleases=True)


def met_by(package: PackageFact, facts: EnvironmentFacts, *, software_only: bool) -> Iterator[Unmet]:
    """The requirements of a package that what is installed does not meet.

    Args:
        package: the package that requires.
        facts: what is installed, and the markers of the interpreter.
        software_only: judge only pairings that hold whatever machine serves, without build flavours.
    """
    if software_only and canonicalize_name(package.name) not in PAIRED:
        return
    for raw in package.requires:
        one = _parse(raw, facts.markers)
        if one is None or (software_only and canonicalize_name(one.name) not in PAIRED):
            continue
        text = raw.partition(";")[0].strip()
        found = _installed(one.name, facts)
        if found is None:
            if not software_only and canonicalize_name(one.name) not in ELSEWHERE:
                yield Unmet(canonicalize_name(one.name), text, None)
            continue
        try:
            version = Version(found.version or "")
        except InvalidVersion:
            continue  # a source tree that calls itself "dev" meets and breaks nothing that can be said
        if not _agrees(one, version, software_only=software_only):
            yield Unmet(canonicalize_name(one.name), text, f"{one.name} {found.version}")
