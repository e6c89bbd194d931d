"""Probe ``kernel_table``: which kernels vLLM lists for each platform, and which one its choosers select here.

Static: vLLM's source read with ``ast``, never imported (``kernel_table_static``). Live, unless an unpacked vLLM was given or
``options["live"]`` is false: vLLM's own choosers are asked (``kernel_table_live``).
"""

from __future__ import annotations

from probes.facts import KernelTableFacts
from probes.kernel_table_live import Live, ask_vllm
from probes.kernel_table_static import read_source
from probes.protocol import Context
from probes.vllm_source import SourceError, SourceTree, find_package, package_version


def observe(context: Context) -> KernelTableFacts:
    """Kernel tables and selections. A vLLM that cannot be read is a fact with layout ``unknown``, never an exception."""
    try:
        root = find_package(context.vllm_path)
    except SourceError as exc:
        return KernelTableFacts(vllm=None, root=context.vllm_path or "", layout="unknown", platform=None, problems=[str(exc)])
    tree = SourceTree(root)
    tables, oracles, layout = read_source(tree)
    wanted = context.vllm_path is None and context.options.get("live", True)
    live = ask_vllm(context, tables, oracles) if wanted else Live()
    return KernelTableFacts(
        vllm=package_version(root), root=str(root), layout=layout, platform=live.platform, tables=tables, moe=oracles,
        selections=live.selections, live_error=live.error, problems=tree.problems,
    )  # fmt: skip
