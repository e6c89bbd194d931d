"""What the device probes observe: ``dtype_agreement``, ``numerics``, ``compile`` and ``speed``.

Everything here was seen by running real ops on the real device. On a simulated device nothing runs: mode ``simulated``, empty
lists, and ``unknown`` says what this run cannot know.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from probes.facts import ErrorFact, Mode, Observation


@dataclass(frozen=True)
class LayerShapeFact:
    """One linear layer of the model, and what of it was run."""

    name: str
    """qkv_proj, o_proj, gate_up_proj, down_proj; ``layer`` where no model was given."""
    n: int
    """Outputs of one rank."""
    k: int
    """Inputs of one rank."""
    count: int
    """How many such layers the rank holds; 0 where no model was given."""
    run_n: int
    """Outputs of the layer that was run: ``n``, or less where N*K is larger than the probe's limit."""
    run_k: int


@dataclass(frozen=True)
class DeviceRunFact:
    """Where a probe ran."""

    device: str
    mode: Mode
    name: str = ""
    """The device's own name, as torch gives it."""
    torch: str | None = None
    vllm: str | None = None
    repairs: str = ""
    """Value of XPUFP8_APPLY during the run."""
    kernels_from: str = ""
    """``vllm``: what its choosers select. ``candidates``: the project's own kernels, where there is no vLLM."""
    notes: list[str] = field(default_factory=list)
    """What was left out or made smaller, one sentence each."""
    unknown: list[str] = field(default_factory=list)
    """What this run cannot know."""


@dataclass(frozen=True)
class SelectedFact:
    """The kernel that answers for a scheme in one dtype, or why there is none."""

    scheme: str
    dtype: str
    """Of the activations: bfloat16, float16, float32."""
    layer: str
    kernel: str | None
    weight_dtype: str = "float8_e4m3fn"
    stage: str = ""
    """Where it ended without a kernel that runs: choose, construct, process."""
    reasons: list[str] = field(default_factory=list)
    """Refusals in vLLM's words, for ``choose``."""
    error: ErrorFact | None = None


# -- dtype_agreement ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpOutputFact:
    """One custom op that a kernel called, its output, and what its own fake says of it."""

    op: str
    """``namespace::name``."""
    outputs: list[str] = field(default_factory=list)
    """``dtype[shape] stride device`` of each."""
    dtypes: list[str] = field(default_factory=list)
    fake: Observation = "unknown"
    """Whether the fake agrees with the kernel. ``unknown``: there is none, or it was not run."""
    differences: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class KernelDtypeFact:
    """One call of a selected kernel: what it returned, beside what the model takes on."""

    scheme: str
    kernel: str
    dtype: str
    """Of the activations; the output must have it too."""
    weight_dtype: str
    scale_layout: str
    """tensor, channel or block."""
    shape: list[int]
    """[M, N, K]."""
    output_dtype: str | None
    output_shape: list[int] = field(default_factory=list)
    output_device: str = ""
    observation: Observation = "unknown"
    """``pass`` when dtype, shape and device are those expected."""
    ops: list[OpOutputFact] = field(default_factory=list)
    error: ErrorFact | None = None
    """The exception of the call."""


@dataclass(frozen=True)
class DtypeSupportFact:
    """Whether the device does a dtype at all, by a plain matrix product."""

    dtype: str
    runs: Observation
    seconds: float | None = None
    """Of one product of two [size, size] matrices, the best of a few."""
    size: int = 0
    error: ErrorFact | None = None
    device_says: bool | None = None
    """What the device reports of itself (``torch.xpu.is_bf16_supported``), None where it is not asked."""


@dataclass(frozen=True)
class CacheDtypeFact:
    """What vLLM's attention layer, made and run, says to a KV-cache dtype."""

    cache_dtype: str
    dtype: str
    head_size: int
    backend: str | None
    error: ErrorFact | None = None


@dataclass(frozen=True)
class DtypeAgreementFacts:
    """Output dtypes of the kernels that vLLM selects."""

    run: DeviceRunFact
    model_dtype: str | None = None
    selected: list[SelectedFact] = field(default_factory=list)
    kernels: list[KernelDtypeFact] = field(default_factory=list)
    support: list[DtypeSupportFact] = field(default_factory=list)
    cache: list[CacheDtypeFact] = field(default_factory=list)


# -- numerics ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfusionFact:
    """A wrong way to read the operands that gives what the kernel gave."""

    kind: str
    """scale, format, activation, layout, bias, factor."""
    name: str
    """In words: ``weights read as e5m2``."""
    error: float
    """Relative error of the kernel's output against that reading."""


@dataclass(frozen=True)
class NumericsCaseFact:
    """One call of a kernel against the float64 product of the same operands."""

    scheme: str
    kernel: str
    layer: str
    dtype: str
    shape: list[int]
    """[M, N, K]."""
    operands: str
    """``ordinary``; ``bias`` (the same with a bias); ``edges`` (every FP8 code, denormals, ±448, a zero block, channel, row)."""
    observation: Observation
    error: float | None = None
    """Root mean square over the finite outputs, in units of the expected size of each; None where none is finite."""
    limit: float = 0.0
    worst_column: int | None = None
    worst_column_error: float | None = None
    wrong_columns: int = 0
    wrong_rows: int = 0
    nonfinite: int = 0
    """Outputs that are NaN or infinite (the reference never is)."""
    nonfinite_at: list[str] = field(default_factory=list)
    """Where all of them lie, in words: ``columns of the zero block``."""
    confusions: list[ConfusionFact] = field(default_factory=list)
    """Readings that explain the output, best first."""
    raised: ErrorFact | None = None


@dataclass(frozen=True)
class NumericsFacts:
    """Selected FP8 kernels against float64."""

    run: DeviceRunFact
    model_dtype: str | None = None
    layers: list[LayerShapeFact] = field(default_factory=list)
    selected: list[SelectedFact] = field(default_factory=list)
    cases: list[NumericsCaseFact] = field(default_factory=list)


# -- compile -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompileStageFact:
    """One stage of torch.compile."""

    stage: str
    """trace, aot, codegen, run, capture."""
    observation: Observation
    seconds: float = 0.0
    error: ErrorFact | None = None
    last_line: str = ""
    """The compiler's own last word."""
    reason: str = ""
    """Why it is unknown."""


@dataclass(frozen=True)
class AvoidanceFact:
    """A setting that was tried after a failure, and whether the failure was gone with it."""

    setting: str
    """As a ``vllm serve`` option or ``K=V``; empty for a hint that no option carries."""
    what: str
    kind: str
    """flag or env."""
    observation: Observation
    detail: str = ""


@dataclass(frozen=True)
class CompileSubjectFact:
    """One module taken through the stages."""

    name: str
    """``linear fp8-block``, ``norm``, ``activation``, ``attention``, ``bare`` (nothing but torch's own ops)."""
    kernel: str | None = None
    ops: list[str] = field(default_factory=list)
    """Custom ops of the graph."""
    stages: list[CompileStageFact] = field(default_factory=list)
    avoided: list[AvoidanceFact] = field(default_factory=list)


@dataclass(frozen=True)
class LoweredKernelFact:
    """A Triton kernel in one configuration, compiled ahead of time for an Intel architecture. It was not run."""

    kernel: str
    """The Triton function."""
    config: str
    """Tile, warps, dtypes."""
    lowers: Observation
    matrix_engine: Observation
    """Whether all its products are laid out for the matrix engine; unknown without products, or where it does not lower."""
    compiler: str
    """Version of triton-xpu."""
    detail: str = ""
    """The compiler's last line, or counts."""
    source: str = ""
    """``xpufp8``, or the vLLM release that the kernel is from."""
    architecture: str = ""
    scheme: str = ""
    selected: str = ""
    """Kernel class that vLLM selects for the scheme, which launches it."""


@dataclass(frozen=True)
class CompileFacts:
    """What torch.compile does on the device."""

    run: DeviceRunFact
    model_dtype: str | None = None
    cache_folder: str | None = None
    cache_error: str | None = None
    """Why the compiler's cache folder cannot be written."""
    compiler: str | None = None
    """The C++ compiler that Inductor finds, or None."""
    compiler_error: str | None = None
    """What Inductor says where it finds none."""
    triton: str | None = None
    triton_backends: list[str] = field(default_factory=list)
    subjects: list[CompileSubjectFact] = field(default_factory=list)
    lowered: list[LoweredKernelFact] = field(default_factory=list)
    """On a simulated device, where an interpreter with Intel's Triton compiler was named."""
    lowering_error: str | None = None
    """Why that interpreter compiled nothing."""


# -- speed -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimingFact:
    """Seconds a call of one kernel."""

    scheme: str
    kernel: str
    layer: str
    shape: list[int]
    """[M, N, K]."""
    seconds: float
    plain_seconds: float
    """The same product with weights in the activation dtype, by torch's own matmul."""
    bytes: int
    """Weights, scales, activations and outputs: what a call must move."""
    timed: str = "calls"
    """``graph``: replays of captured calls, without the host's time of launching. ``calls``: calls from Python; on a device that
    is faster than the host launches, that is the host's time."""


@dataclass(frozen=True)
class SpeedFacts:
    """Speed of the model's linear layers on the device."""

    run: DeviceRunFact
    model_dtype: str | None = None
    copy_bytes_per_second: float | None = None
    """Read and written, of the device's own memory."""
    matmul_flops: float | None = None
    """Of a large product in the model's dtype."""
    layers: list[LayerShapeFact] = field(default_factory=list)
    selected: list[SelectedFact] = field(default_factory=list)
    timings: list[TimingFact] = field(default_factory=list)
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    """Decoding of one sequence by the linear layers of one rank alone: ``measured`` (selected kernels), ``plain`` (16-bit
    weights), ``bound`` (FP8 weights at the measured copy bandwidth). The truth is below all of them."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """Activation rows to seconds of all linear layers of one rank: ``1``, ``8``, ``32``, ``2048``."""
    compile_gain: float | None = None
    """Eager time over compiled time of one decoder block at one token; None where compile was not tried or failed."""
