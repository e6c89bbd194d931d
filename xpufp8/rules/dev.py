"""DEV: is every card visible to what serves, and if not, who stands in the way: kernel, permissions, container, runtime, variables."""

from __future__ import annotations

from collections.abc import Iterator

from probes.host_facts import CardFact, DevicesFacts, NodeFact
from xpufp8.report import Evidence, Finding, Fix
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.ranks import host_action, on_xpu, ranks, seen, short

SELECTOR = "ONEAPI_DEVICE_SELECTOR"
MASK = "ZE_AFFINITY_MASK"


def discrete(facts: DevicesFacts) -> list[CardFact]:
    """Cards, without the CPU's own graphics."""
    return [card for card in facts.cards if card.family != "integrated"]


def device_facts(case: Case) -> DevicesFacts | None:
    """Facts of the probe, None where they do not apply: another platform, or a simulated device without a recorded machine."""
    facts = case.get("devices", DevicesFacts)
    return facts if facts is not None and facts.applies and on_xpu(case) else None


def card_name(card: CardFact) -> str:
    """``03:00.0 (Arc Pro B60)``."""
    return f"{short(card.address)} ({card.name or card.device})"


def _cards_evidence(facts: DevicesFacts) -> list[Evidence]:
    found = []
    for card in discrete(facts):
        words = (
            f"{card.device} {card.name or card.family}, driver {card.driver or 'none'}, nodes {', '.join(card.nodes) or 'none'}"
        )
        found.append(seen(facts, "devices", words, where=short(card.address)))
    return found or [
        seen(facts, "devices", "sysfs lists no Intel GPU", "a PCI display device of vendor 8086", "/sys/bus/pci/devices")
    ]


@rule("DEV001", "No Intel GPU is in this machine", "error", needs=("devices",))
def no_card(self: Rule, case: Case) -> Iterator[Finding]:
    """The device asked for is an XPU, and the kernel lists no Intel GPU on the PCI bus.

    ## What it means
    Neither a display device of vendor 8086 in /sys/bus/pci/devices nor a device from Level Zero.

    ## Why it matters
    vLLM ends in `No XPU devices are available`.

    ## How it looks
    `lspci -nn | grep 8086` shows bridges and no VGA or display controller.

    ## How it is fixed
    Check the card's seat, power and the slot's lanes; in a virtual machine pass the card in; on a machine without one, ask about a
    simulated device (`--device sim:arc-pro-b60`).
    """
    facts = device_facts(case)
    if facts is None or facts.cards or facts.level_zero.devices:
        return
    fixes = [host_action("Seat and power the card, or pass it into this guest; without one, use --device sim:<profile>")]
    yield self.finding("PCI", "The kernel lists no Intel GPU here.", _cards_evidence(facts), fixes=fixes)


@rule("DEV002", "A card has no kernel driver for it", "error", needs=("devices",), references=("intel/compute-runtime#921",))
def no_driver(self: Rule, case: Case) -> Iterator[Finding]:
    """A card is on the bus and no driver, or one that does not serve it, is bound to it.

    ## What it means
    Battlemage needs the xe driver (Linux 6.12 or newer knows it without force_probe). i915 binds to Arc A-series by default and knows
    nothing of Battlemage. vfio-pci keeps a card for a virtual machine. Device ids that a kernel holds back need force_probe.

    ## Why it matters
    Without a driver there is no render node and no device for anything above it.

    ## How it looks
    `/dev/dri` without a node for the card; `Your graphics device … is not properly supported by xe … use xe.force_probe`.

    ## How it is fixed
    A kernel whose xe knows the card; or its force_probe parameter; or taking the card back from vfio-pci.
    """
    facts = device_facts(case)
    if facts is None:
        return
    for card in discrete(facts):
        if card.driver in {"xe", "i915"} and not (card.driver == "i915" and card.family == "battlemage"):
            continue
        device = card.device.partition(":")[2]
        words = f"driver {card.driver or 'none'}; modules loaded: {', '.join(sorted(facts.modules)) or 'none'}; {facts.kernel}"
        if card.driver == "vfio-pci":
            cause, fixes = f"{card_name(card)} is kept for a virtual machine.", [host_action("Unbind the card from vfio-pci")]
        else:
            cause = f"{card_name(card)} is bound to {card.driver or 'no driver'}."
            fixes = [
                host_action(
                    f"Boot a kernel whose xe driver knows the card, or add xe.force_probe={device} i915.force_probe=!{device}",
                    "a reboot",
                )
            ]
            if "xe" not in facts.modules:
                fixes.insert(0, host_action("Load the xe driver (modprobe xe)"))
        yield self.finding(short(card.address), cause, [seen(facts, "devices", words, "xe", short(card.address))], fixes=fixes)


@rule("DEV003", "A card's device node cannot be opened", "error", needs=("devices",), references=(
    "intel/llm-scaler#370", "open-edge-platform/geti-instant-learn#583",
))  # fmt: skip
def closed_node(self: Rule, case: Case) -> Iterator[Finding]:
    """The kernel has a render node for the card, and this process may not open it, or it is not in this container.

    ## What it means
    EACCES is about permissions: the user is not in the node's group. EPERM is the container's device list: the node is visible and not
    granted. A node missing from /dev/dri was not mapped in.

    ## Why it matters
    Level Zero reports no device instead of a refused one, so tools show nothing at all.

    ## How it looks
    `XPU device count is zero!`, `No XPU devices are available.`, `xpu-smi discovery` empty without sudo.

    ## How it is fixed
    The group for the user (`usermod -aG render`), `--group-add` and `--device /dev/dri` for a container.
    """
    facts = device_facts(case)
    if facts is None:
        return
    by_name = {node.path.rsplit("/", 1)[-1]: node for node in facts.nodes}
    for card in discrete(facts):
        for name in card.nodes:
            if not name.startswith("renderD"):
                continue
            node = by_name.get(name)
            if node is None and (facts.nodes or facts.container):
                cause = f"{card_name(card)} has the node {name}, which is not in /dev/dri here."
                fixes = (
                    [host_action("Map the devices into the container: --device /dev/dri")]
                    if facts.container
                    else [host_action("Start udev")]
                )
                observed = f"/dev/dri holds {', '.join(sorted(by_name)) or 'nothing'}"
                yield self.finding(name, cause, [seen(facts, "devices", observed, name)], fixes=fixes)
            elif node is not None and node.opens == "fail":
                yield _refused(self, name, card, node, facts)


def _refused(self: Rule, name: str, card: CardFact, node: NodeFact, facts: DevicesFacts) -> Finding:
    observed = f"open of {node.path}: {node.error}; mode {node.mode}, group {node.gid}; this process: user {facts.uid}, groups {facts.gids}"
    evidence = [seen(facts, "devices", observed, "it opens for reading and writing", node.path)]
    if node.error == "EPERM":
        cause = f"{card_name(card)}: the container sees {name} and its device list does not grant it."
        fixes = [host_action("Start the container with --device /dev/dri")]
    elif node.error in {"ENXIO", "ENODEV"}:
        cause = f"{card_name(card)}: {name} is there and no driver answers behind it."
        fixes = [host_action("Read the kernel log of the driver's start, and reboot")]
    else:
        gid = node.gid if node.gid is not None else facts.groups.get("render")
        cause = f"{card_name(card)}: this user is not in the group ({gid}) that may open {name}."
        fixes = [host_action("Add the user to the group and log in again: sudo usermod -aG render $USER")]
        if facts.container:
            fixes = [
                host_action(
                    f"Start the container with --group-add {gid if gid is not None else '$(getent group render | cut -d: -f3)'}"
                )
            ]
    return self.finding(name, cause, evidence, fixes=fixes)


@rule("DEV004", "Level Zero does not show the cards that the kernel has", "error", needs=("devices",), references=(
    "vllm-project/vllm#47578", "ggml-org/llama.cpp#27168",
))  # fmt: skip
def not_in_level_zero(self: Rule, case: Case) -> Iterator[Finding]:
    """The kernel drives a card that Level Zero does not show to this process.

    ## What it means
    Either the loader is missing, or it finds no driver (zeInit answers UNINITIALIZED), or the driver crashed, or a variable hides cards,
    or the node cannot be opened (DEV003).

    ## Why it matters
    torch.xpu and oneCCL see only what Level Zero shows.

    ## How it looks
    `XPU device count is zero!`; sycl-ls without a level_zero line while /dev/dri has nodes.

    ## How it is fixed
    The compute runtime (libze-intel-gpu1) in the image that serves, the oneAPI environment sourced, the mask taken away.
    """
    facts = device_facts(case)
    if facts is None:
        return
    ze = facts.level_zero
    driven = [card for card in discrete(facts) if card.driver in {"xe", "i915"}]
    if not driven or ze.status == "unknown":
        return
    shown = [device for device in ze.devices if not device.integrated]
    if len(shown) >= len(driven):
        return
    evidence = [
        seen(
            facts,
            "devices",
            f"Level Zero: {ze.status}; zeInit {ze.init or 'not called'}; {len(shown)} of {len(driven)} cards; {ze.detail}",
        )
    ]
    evidence += _cards_evidence(facts)
    cause, fixes = _hidden_by(facts, len(shown), len(driven))
    yield self.finding("Level Zero", cause, evidence, fixes=fixes, severity="warning" if shown else "error")


def _hidden_by(facts: DevicesFacts, shown: int, driven: int) -> tuple[str, list[Fix]]:
    """Why Level Zero shows too few cards, as far as it was seen."""
    ze = facts.level_zero
    source = host_action("Source the oneAPI environment: source /opt/intel/oneapi/setvars.sh --force")
    install = host_action("Install the compute runtime in the environment that serves: libze1 and libze-intel-gpu1")
    if ze.status == "no-loader":
        return "There is no Level Zero loader here (libze_loader.so.1).", [install, source]
    if ze.status in {"crashed", "timeout"}:
        return f"Asking Level Zero ended badly: {ze.detail}.", [
            host_action("Reboot: a card in a bad state makes the driver hang or crash"),
            install,
        ]
    if facts.unmasked is not None and facts.unmasked > shown:
        mask = facts.settings.get(MASK, "")
        return f"{MASK}={mask} hides {facts.unmasked - shown} of {facts.unmasked} cards.", [
            host_action(f"Unset {MASK}, or name the cards you want")
        ]
    refused = [node for node in facts.nodes if node.opens == "fail" and "renderD" in node.path]
    if refused:
        return f"{len(refused)} render nodes cannot be opened, and Level Zero leaves out what it cannot open (DEV003).", []
    if ze.init and ze.init.endswith("UNINITIALIZED"):
        if not any("gpu" in name or "igdrcl" in name for name in facts.runtime):
            return "The loader answers UNINITIALIZED and no Intel GPU driver for it was found: the compute runtime is missing.", [
                install,
                source,
            ]
        return "The loader answers UNINITIALIZED although an Intel GPU driver is installed.", [source, install]
    return f"Level Zero shows {shown} of {driven} cards, and nothing that was looked at says why.", [install, source]


@rule("DEV005", "torch shows fewer cards than Level Zero", "error", needs=("devices",), references=("intel/llm-scaler#435",))
def not_in_torch(self: Rule, case: Case) -> Iterator[Finding]:
    """Level Zero shows a card to this process and torch.xpu does not.

    ## What it means
    Between the two lie torch's build, SYCL's runtime and ONEAPI_DEVICE_SELECTOR.

    ## Why it matters
    vLLM uses what torch shows.

    ## How it looks
    `XPU device count is zero!`, or fewer devices than cards.

    ## How it is fixed
    A torch built for XPU, the selector taken away (ZE_AFFINITY_MASK picks cards as well), the oneAPI environment sourced.
    """
    facts = device_facts(case)
    if facts is None or not facts.level_zero.devices:
        return
    torch, have = facts.torch, len(facts.level_zero.devices)
    evidence = [
        seen(
            facts,
            "devices",
            f"torch {torch.version or '?'}: {torch.status}, {torch.count} devices; Level Zero: {have}; {torch.detail}",
        )
    ]
    if torch.status == "not-built":
        fixes = [host_action("Use an interpreter whose torch is built for XPU (--python)")]
        yield self.finding("torch", f"torch {torch.version} is not built for XPU.", evidence, fixes=fixes)
    elif torch.status in {"failed", "crashed"}:
        fixes = [host_action("Source the oneAPI environment: source /opt/intel/oneapi/setvars.sh --force")]
        yield self.finding("torch", f"torch.xpu does not start: {torch.detail}.", evidence, fixes=fixes)
    elif torch.count is not None and torch.count < have:
        selector = facts.settings.get(SELECTOR)
        cause = f"torch shows {torch.count} of {have} devices" + (f"; {SELECTOR}={selector} is set." if selector else ".")
        fixes = [host_action(f"Unset {SELECTOR} and pick cards with {MASK}")] if selector else []
        yield self.finding("torch", cause, evidence, fixes=fixes, severity="error" if torch.count == 0 else "warning")


@rule("DEV006", "Fewer cards than ranks", "error", needs=("devices",))
def too_few(self: Rule, case: Case) -> Iterator[Finding]:
    """The parallel sizes ask for more cards than this machine shows.

    ## What it means
    Tensor, pipeline and data parallel sizes multiply to the number of cards.

    ## Why it matters
    vLLM refuses at start, or a rank ends with an invalid device.

    ## How it looks
    `World size (4) is larger than the number of available GPUs (2)`

    ## How it is fixed
    Smaller sizes, or showing the hidden cards (DEV004).
    """
    facts = device_facts(case)
    wanted = ranks(case)
    if facts is None or not wanted.several or wanted.nodes > 1:
        return
    have = (
        len([d for d in facts.level_zero.devices if not d.integrated])
        if facts.level_zero.status == "answered"
        else len(discrete(facts))
    )
    if not 0 < have < wanted.sizes.world:
        return
    cause = f"{wanted.text} needs {wanted.sizes.world} cards, and {have} {'is' if have == 1 else 'are'} shown."
    fixes = [host_action(f"Ask for sizes whose product is at most {have}")]
    yield self.finding(wanted.text, cause, _cards_evidence(facts), fixes=fixes)


RULES = (no_card, no_driver, closed_node, not_in_level_zero, not_in_torch, too_few)
