"""DEV: what a visible card is worth: its memory window, its link, and the OpenCL twin that Triton may want."""

from __future__ import annotations

import re
from collections.abc import Iterator

from probes.facts import EnvironmentFacts
from probes.pci_tables import SMALL_BAR
from xpufp8.report import Finding
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.dev import MASK, SELECTOR, card_name, device_facts, discrete
from xpufp8.rules.ranks import host_action, seen, short


@rule("DEV007", "Resizable BAR is off", "warning", needs=("devices",))
def small_bar(self: Rule, case: Case) -> Iterator[Finding]:
    """The CPU reaches only 256 MiB of the card's memory.

    ## What it means
    A card with gigabytes of memory shows a BAR of 256 MiB: the firmware did not resize it.

    ## Why it matters
    Loading weights is slow, and another card cannot reach this one's memory.

    ## How it looks
    `Region 2: Memory at … [size=256M]` in lspci.

    ## How it is fixed
    Above 4G Decoding and Resizable BAR in the firmware set-up, CSM off.
    """
    facts = device_facts(case)
    if facts is None:
        return
    for card in discrete(facts):
        if 0 < card.bar <= SMALL_BAR and (card.memory is None or card.memory > SMALL_BAR):
            observed = f"largest BAR {card.bar >> 20} MiB; memory {f'{card.memory >> 20} MiB' if card.memory else 'unknown'}"
            fixes = [host_action("Switch on Above 4G Decoding and Resizable BAR in the firmware set-up")]
            cause = f"{card_name(card)} shows {card.bar >> 20} MiB of its memory to the rest of the machine."
            yield self.finding(
                short(card.address),
                cause,
                [seen(facts, "devices", observed, "a BAR as large as the memory", card.address)],
                fixes=fixes,
            )


@rule("DEV008", "A card's link is narrower than it could be", "info", needs=("devices",))
def narrow_link(self: Rule, case: Case) -> Iterator[Finding]:
    """The PCIe link of a card runs on fewer lanes than the card has.

    ## What it means
    The width is read at the card's own upstream port; the GPU function behind it always shows x1. A slot wired with fewer lanes, a riser
    or a shared slot narrows it.

    ## Why it matters
    Loading and, without peer access, every collective go over this link.

    ## How it looks
    `LnkSta: Width x4 (downgraded)` of the port.

    ## How it is fixed
    Another slot; the firmware's bifurcation setting.
    """
    facts = device_facts(case)
    if facts is None:
        return
    for card in discrete(facts):
        link = card.link
        if link is None or not link.width or not link.max_width or link.width >= link.max_width or link.where == card.address:
            continue
        cause = f"{card_name(card)} runs on {link.width} of {link.max_width} lanes."
        observed = f"x{link.width} at {link.speed or '?'} GT/s, could be x{link.max_width}"
        yield self.finding(short(card.address), cause, [seen(facts, "devices", observed, where=link.where)])


def _needs_opencl(case: Case) -> str | None:
    """Version of triton-xpu 3.6, whose driver wants an OpenCL twin of each Level Zero GPU; None for any other."""
    environment = case.get("environment", EnvironmentFacts)
    for package in environment.packages if environment else []:
        if package.name in {"triton", "triton-xpu", "pytorch-triton-xpu"} and re.match(r"3\.6(\.|$|\+)", package.version or ""):
            xpu = "xpu" in f"{package.distribution} {package.flavour} {package.version}".lower()
            return package.version if xpu else None
    return None


@rule("DEV009", "Triton finds no OpenCL twin of the GPU", "error", needs=("devices", "environment"), references=(
    "intel/llm-scaler#435", "intel/intel-xpu-backend-for-triton#5745",
))  # fmt: skip
def no_opencl(self: Rule, case: Case) -> Iterator[Finding]:
    """triton-xpu 3.6 opens an OpenCL device for each Level Zero GPU, and none can be found here.

    ## What it means
    Its init_devices throws an uncaught exception when OpenCL shows no GPU of that name: because ONEAPI_DEVICE_SELECTOR restricts SYCL to
    Level Zero, or because no Intel OpenCL driver is installed.

    ## Why it matters
    The child in which vLLM inspects model classes aborts, and the server says that the architecture is unknown.

    ## How it looks
    `terminate called after throwing an instance of 'sycl::_V1::exception' what(): No device of requested type available.`

    ## How it is fixed
    Unset the selector and pick cards with ZE_AFFINITY_MASK; install intel-opencl-icd; or triton-xpu 3.7.
    """
    facts = device_facts(case)
    version = _needs_opencl(case)
    if facts is None or version is None:
        return
    selector = facts.settings.get(SELECTOR, "")
    if selector and "opencl" not in selector and "*:" not in selector:
        cause = f"triton {version} needs OpenCL beside Level Zero, and {SELECTOR}={selector} hides it."
        fixes = [host_action(f"Unset {SELECTOR} and pick cards with {MASK}"), host_action("Install triton-xpu 3.7 or newer")]
        yield self.finding(SELECTOR, cause, [seen(facts, "devices", f"{SELECTOR}={selector}")], fixes=fixes)
    elif discrete(facts) and not any("igdrcl" in path or ("intelocl" not in path and "intel" in path) for path in facts.opencl):
        cause = f"triton {version} needs OpenCL beside Level Zero, and no Intel GPU driver for it is registered."
        fixes = [host_action("Install intel-opencl-icd"), host_action("Install triton-xpu 3.7 or newer")]
        yield self.finding(
            "OpenCL", cause, [seen(facts, "devices", f"ICD files name: {', '.join(facts.opencl) or 'nothing'}")], fixes=fixes
        )


RULES = (small_bar, narrow_link, no_opencl)
