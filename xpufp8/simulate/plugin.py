"""The general plugin: what must hold after vLLM's platform is chosen, in every process."""

from __future__ import annotations

from xpufp8.simulate import requested


def activate() -> None:
    """Entry point ``xpufp8_sim_general`` of group ``vllm.general_plugins``. Does nothing unless a profile is asked for.

    A process that loads general plugins before it asks for the platform (the architecture inspection child does) gets its
    stand-ins here; the platform plugin finds them up.
    """
    name = requested()
    if name is None:
        return
    from xpufp8.simulate import platform, profiles

    platform.put_up(profiles.find(name))
