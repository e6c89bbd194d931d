"""Whether a oneAPI environment is there and sourced, and the environment variables that bear on serving."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from probes.facts import SettingFact
from probes.redact import redact_env

ROOTS = ("/opt/intel/oneapi", "~/intel/oneapi")
"""Where the installers put oneAPI when nobody says otherwise."""

SOURCED = ("ONEAPI_ROOT", "SETVARS_COMPLETED", "CMPLR_ROOT", "MKLROOT", "CCL_ROOT", "I_MPI_ROOT", "DPL_ROOT", "TBBROOT")
"""Variables that setvars.sh leaves behind."""

PATTERNS = (
    "VLLM_*", "CCL_*", "ZE_*", "ZES_*", "ZET_*", "SYCL_*", "UR_*", "ONEAPI_*", "FI_*", "I_MPI_*", "TRITON_*", "TORCH*", "PYTORCH_*",
    "IPEX_*", "IGC_*", "XPU_*", "OCL_ICD_*", "NEO*", "DISABLE_ESIMD_*", "SGLANG_XPU_*", "OMP_*", "KMP_*", "MKL_*", "RAY_*",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "RenderCompressedBuffersEnabled",
    "EnableHostUsmAllocationPool", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "HF_TOKEN", "HF_HUB_OFFLINE", "HF_HOME", "PYTHONNOUSERSITE", "XPUFP8_APPLY",
)  # fmt: skip
"""Variables that are reported, as shell patterns."""

OURS = frozenset({"VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE", "XPUFP8_APPLY"})
"""Set by xpufp8 itself for its probes; reporting them would blame the person for them."""


def settings(environ: Mapping[str, str]) -> list[SettingFact]:
    """The variables of PATTERNS that are set, by name, secret values redacted."""
    names = sorted(n for n in environ if n not in OURS and any(fnmatch.fnmatchcase(n, pattern) for pattern in PATTERNS))
    return [SettingFact(name, redact_env(name, environ[name])) for name in names]


def roots(environ: Mapping[str, str], candidates: Sequence[str] = ROOTS) -> list[Path]:
    """Folders of oneAPI installations that exist, the one of ONEAPI_ROOT first."""
    named = [environ["ONEAPI_ROOT"]] if environ.get("ONEAPI_ROOT") else []
    folders = [Path(text).expanduser() for text in (*named, *candidates)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def library_folders(folders: Sequence[Path]) -> Iterator[Path]:
    """Library folders below oneAPI folders: ``compiler/2026.1/lib`` and, in the unified layout, ``2026.1/lib``; newest first."""
    for root in folders:
        for pattern in ("*/*/lib", "*/lib"):
            found = sorted(root.glob(pattern), reverse=True)
            yield from (folder for folder in found if folder.is_dir() and "latest" not in folder.parts[len(root.parts) :])


def observe_oneapi(environ: Mapping[str, str], candidates: Sequence[str] = ROOTS) -> dict[str, str]:
    """What shows a oneAPI environment.

    Returns:
        The variables that setvars.sh sets; ``folder``: an installation on disk; ``compilers``: its compiler releases; ``sourced``:
        ``yes`` or ``no``, by SETVARS_COMPLETED or by its folders on LD_LIBRARY_PATH.
    """
    seen = {name: redact_env(name, environ[name]) for name in SOURCED if environ.get(name)}
    there = roots(environ, candidates)
    if there:
        seen["folder"] = str(there[0])
        releases = sorted(p.name for p in there[0].glob("compiler/*") if p.is_dir() and p.name != "latest")
        if releases:
            seen["compilers"] = ", ".join(releases)
    library_path = environ.get("LD_LIBRARY_PATH", "").split(":")
    on_path = any(entry.startswith(f"{root}/") for entry in library_path for root in there)
    seen["sourced"] = "yes" if environ.get("SETVARS_COMPLETED") == "1" or on_path else "no"
    return seen
