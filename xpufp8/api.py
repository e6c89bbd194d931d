"""What other programs call. Importing this costs next to nothing: the diagnosis itself is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xpufp8.doctor import Request
    from xpufp8.report import Report


def diagnose(
    *tokens: str,
    device: str | None = None,
    python: str | None = None,
    vllm_path: str | None = None,
    sysfs: str | None = None,
    request: Request | None = None,
) -> Report:
    """Diagnose a target and return the report.

    Args:
        tokens: MODEL and options of ``vllm serve``, as on its command line; none at all checks the installation alone.
        device: xpu, cpu, cuda or sim:<profile>; None looks at the PCI bus.
        python: Interpreter that has torch and vLLM; None takes the running one.
        vllm_path: Folder of an unpacked vLLM to read instead of the installed one.
        sysfs: Root folder of recorded host facts.
        request: Limits and selections (``xpufp8.doctor.Request``).

    Raises:
        xpufp8.errors.UsageError: wrong usage or unreadable input.
    """
    from xpufp8.doctor import Request, diagnose_target
    from xpufp8.target import resolve

    target = resolve(tokens, device=device, python=python, vllm_path=vllm_path, sysfs=sysfs)
    return diagnose_target(target, request or Request())
