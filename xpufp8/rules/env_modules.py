"""ENV014, ENV016 to ENV018: modules and commands that are not where they are looked for, or not whole."""

from __future__ import annotations

from collections.abc import Iterator

from xpufp8 import options
from xpufp8.report import Finding, Fix
from xpufp8.rules.base import Case, Rule, rule
from xpufp8.rules.env_common import PROBE, called, command_of, facts_of, find, label, seen, weight


@rule(
    "ENV014",
    "A module that vLLM's XPU platform imports is not there",
    "error",
    needs=(PROBE,),
    references=("intel/intel-xpu-backend-for-triton#6056",),
)
def platform_module_missing(self: Rule, case: Case) -> Iterator[Finding]:
    """VLLM's code for XPU imports a package, or a compiled module of one, that is not installed.

    ## What it means
    Up to 0.14 vLLM's XPU platform imports Intel's extension for PyTorch, since then `vllm_xpu_kernels._C`, `._moe_C` and
    `._xpu_C`. What this release imports was read from its source. The package is missing, or is there without the module: a source
    tree that was not built, or a wheel for another Python.

    ## Why it matters
    vLLM catches the `ModuleNotFoundError` while it looks for a platform and goes on without one: what a person sees is
    `RuntimeError: Failed to infer device type`.

    ## How it looks
    `vllm/platforms/xpu.py:11 imports vllm_xpu_kernels._C; there is no package vllm_xpu_kernels`

    ## How it is fixed
    Install the wheel that vLLM's requirements for XPU pin, built for the same torch and Python.
    """
    facts = facts_of(case)
    if facts is None or case.device != "xpu":
        return
    several = options.parallel_sizes(case.vllm_args).world > 1
    absent = [i for i in facts.imports if not i.found and (several or not i.conditional)]
    for top in dict.fromkeys(i.module.partition(".")[0] for i in absent):
        package, imports = find(facts, top), [i for i in absent if i.module.partition(".")[0] == top]
        sure = any(not i.conditional for i in imports)
        state = (
            f"there is no package {top}"
            if package is None
            else f"{called(package)} has {', '.join(package.extensions) or 'no compiled module'}"
        )
        missing = imports[0].module if package else top
        yield self.finding(
            top,
            f"This vLLM imports {', '.join(i.module for i in imports[:3])} on XPU and {state}, which ends in ModuleNotFoundError: "
            f"No module named {missing!r}."
            + ("" if sure else " It does so only where torch has no xccl backend, which files do not show."),
            [seen(f"imports {i.module}", where=f"{i.file}:{i.line}") for i in imports[:3]]
            + [seen(state, where=package.location or "" if package else "")],
            unknown=not sure,
            severity="error" if sure else "warning",
            fixes=[Fix(kind="host", action=f"Install the {top.replace('_', '-')} that this vLLM's requirements for XPU pin.")],
            title=f"{top} is not installed" if package is None else f"{missing} is not there",
        )


@rule("ENV016", "The vllm command is not this interpreter's", "warning", needs=(PROBE,))
def other_command(self: Rule, case: Case) -> Iterator[Finding]:
    """The `vllm` command that a shell finds runs in another interpreter, or there is none.

    ## What it means
    The first line of the script names its interpreter, and that is not the one that was looked at. Everything else in this report
    is about the one that was looked at.

    ## Why it matters
    `vllm serve` would run with other packages: a finding here may not concern it, and a fault there is not seen here.

    ## How it looks
    `/usr/local/bin/vllm runs /usr/bin/python3; /opt/venv/bin/python was looked at`

    ## How it is fixed
    Point `--python` at the interpreter of the command, or start vLLM as `python -m vllm.entrypoints.cli.main serve …`.
    """
    facts = facts_of(case)
    command = command_of(facts) if facts else None
    if facts is None or command is None or find(facts, "vllm") is None or command.same_interpreter:
        return
    if command.path is None:
        observed, cause = "no command vllm beside the interpreter or on PATH", "There is a package vllm and no command vllm."
    elif command.interpreter is None:
        observed = f"{command.path} does not say which interpreter runs it"
        evidence = [seen(observed, where=command.path)]
        yield self.finding("vllm", "Which interpreter the vllm command runs in could not be seen.", evidence, unknown=True)
        return
    else:
        observed = f"{command.path} runs {command.interpreter}; {facts.executable} was looked at"
        cause = f"The vllm command belongs to another interpreter: {observed}."
    fixes = [Fix(kind="host", action=f"Start vLLM as {facts.executable} -m vllm.entrypoints.cli.main serve …")]
    if command.interpreter:
        fixes.append(Fix(kind="host", action=f"Look at the interpreter of the command: --python {command.interpreter}"))
    yield self.finding("vllm", cause, [seen(observed, where=command.path or "")], fixes=fixes)


@rule("ENV017", "Shared objects could not be read", "warning", needs=(PROBE,))
def not_read(self: Rule, case: Case) -> Iterator[Finding]:
    """Whether compiled modules would load is unknown, because their files were not read.

    ## What it means
    Shared objects are read with pyelftools, which travels with the probes. It could not be imported in the target interpreter.

    ## Why it matters
    Missing libraries, other generations and undefined symbols (ENV010 to ENV015) are unknown, which is neither good nor bad.

    ## How it looks
    `pyelftools is not importable in this interpreter`

    ## How it is fixed
    `pip install pyelftools` in the interpreter of xpufp8, which carries it to the target.
    """
    facts = facts_of(case)
    if facts is not None and facts.elf_error:
        yield self.finding(
            "pyelftools", "Whether compiled modules find their libraries could not be told.", [seen(facts.elf_error)], unknown=True,
            fixes=[Fix(kind="host", action="pip install pyelftools")],
        )  # fmt: skip


@rule("ENV018", "A shared object is damaged", "error", needs=(PROBE,))
def damaged(self: Rule, case: Case) -> Iterator[Finding]:
    """A compiled module or a library that it needs is no readable ELF file.

    ## What it means
    The file is empty, cut off, or a Git LFS pointer: a full disk while installing, an interrupted copy, a checkout without LFS.

    ## Why it matters
    Importing it ends in `ImportError: …: invalid ELF header` or `file too short`.

    ## How it looks
    `vllm_xpu_kernels/_C.abi3.so is a Git LFS pointer, not the file itself`

    ## How it is fixed
    Install the package again, with room on the disk; in a checkout, `git lfs pull`.
    """
    facts = facts_of(case)
    for one in facts.libraries if facts else ():
        severity = weight(case, facts, one.package, one.loaded_by) if facts and one.error else None
        if severity is None:
            continue
        yield self.finding(
            label(one), f"{label(one)} {one.error}, so {', '.join(one.loaded_by)} cannot be imported.",
            [seen(f"{label(one)} {one.error}", where=one.path)], severity=severity,
            fixes=[Fix(kind="host", action=f"Install {one.package} again (pip install --force-reinstall --no-deps).")],
        )  # fmt: skip


RULES = (platform_module_missing, other_command, not_read, damaged)
