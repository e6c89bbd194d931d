"""What ``probes.model_trace`` observes: one model, one rank, from its configuration to the end of its forward pass.

Everything here is seen without weights, under fake tensors. On a simulated device it is true of the software only: kernels
chosen, ops reached, bytes held. Numerics, speed, peer access and real output dtypes are never part of these facts (see
``unknown``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from probes.facts import ErrorFact, Mode

StageStatus = Literal["done", "failed", "unknown", "skipped"]

Region = Literal["compiled", "outside"]
"""``compiled``: Dynamo sees the op, so it must be traceable. ``outside``: only eager code or the body of an opaque
op calls it."""

StandInKind = Literal["row", "fake", "wrong-fake", "module", "attribute", "eager", "answer"]
"""What the trace put in the place of something missing or wrong, so that it could go on to the next fault.

``row``: a placeholder kernel for an absent or exhausted table row. ``fake``: an inferred fake for an op without one.
``wrong-fake``: a right fake instead of a registered one that gives another shape than the kernel. ``module``: a placeholder
for a Python module or kernel package. ``attribute``: a missing attribute of a layer. ``eager``: a region that Dynamo could
not trace was run without it. ``answer``: a value that only real weights hold (a scale read with ``.item()``)."""


@dataclass(frozen=True)
class StageFact:
    """One stage of bringing the model up: configure, distribute, construct, process, trace, logits, vision, pooler, bodies."""

    name: str
    status: StageStatus
    seconds: float = 0.0
    error: ErrorFact | None = None
    reason: str = ""
    """Why it is unknown or skipped; for a failed stage the one line that says what vLLM said."""
    passed_after_stand_in: bool = False
    """True when it reached its end only because of one or more stand-ins."""


@dataclass(frozen=True)
class StandInFact:
    """One fault that was met and stood in for. The list is in the order in which the faults would strike."""

    kind: StandInKind
    subject: str
    """The op (``_xpu_C::fp8_gemm_w8a16``), table (``_POSSIBLE_FP8_BLOCK_KERNELS[XPU]``), module or attribute."""
    stage: str
    detail: str = ""
    """What was put there, in one sentence."""
    error: ErrorFact | None = None
    """The exception that the serving process would have died of, with vLLM's frames."""
    layers: list[str] = field(default_factory=list)
    """Layers that reach it, by name; repeated layers are given as a pattern (``model.layers.*.mlp.down_proj``)."""
    region: Region | None = None
    breaks_compile: bool = False
    """True when Dynamo cannot trace the compiled region because of it."""
    mutates: bool = False


@dataclass(frozen=True)
class LayerKindFact:
    """One kind of linear layer (same class, quantization method, kernel, dtypes and shape) and how many of it the rank holds."""

    layer: str
    """Class of the layer: ``QKVParallelLinear``."""
    example: str
    """Name of the first one."""
    pattern: str
    """Names with layer numbers replaced by ``*``."""
    count: int
    method: str
    """vLLM's quantization method class: ``Fp8LinearMethod``."""
    kernel: str | None
    """Kernel class that vLLM selected; None when the method has no kernel object."""
    weight_dtype: str | None
    weight_shape: list[int] = field(default_factory=list)
    """As stored after weight processing."""
    scheme: str | None = None
    """Scheme of ``probes.schemes`` where it could be told."""


@dataclass(frozen=True)
class AttentionKindFact:
    """One kind of attention or state-space layer."""

    kind: str
    """decoder, encoder, encoder_only, encoder_decoder, mla, gdn_attention, mamba2, …, or ``vision``."""
    backend: str
    """Backend class."""
    implementation: str | None
    count: int
    head_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    kv_cache_dtype: str | None = None
    sliding_window: int | None = None
    example: str = ""


@dataclass(frozen=True)
class MoeKindFact:
    """One kind of mixture-of-experts layer."""

    method: str
    backend: str | None
    experts_class: str | None
    count: int
    experts: int
    local_experts: int
    top_k: int
    example: str = ""


@dataclass(frozen=True)
class MixedDtypeFact:
    """float16 beside bfloat16 where one of them is meant.

    Only these two: float32 is what vLLM's models make norms, scales and recurrent decay in on purpose, and where one is there by accident,
    the first product that it meets ends the trace. Quantized layers keep what their method put there and are left out, but for a bias.
    """

    where: Literal["layer", "op"]
    """``layer``: parameters and buffers of one module and those inside it. ``op``: tensors that met in one call of a custom op,
    with the parameters of the layer whose name the op was given."""
    subject: str
    """Class of the layer, or the op."""
    pattern: str
    """Names of the layers."""
    count: int
    """How many such layers (or calls) the rank has."""
    tensors: list[str] = field(default_factory=list)
    """``dt_bias float16``: every 16-bit tensor, those of the other dtype than the model's first; of the rest at most four."""


@dataclass(frozen=True)
class ReachedOpFact:
    """One custom op that the model's forward pass reaches."""

    op: str
    """``namespace::name`` (with ``.overload`` unless default)."""
    calls: int
    """Over the whole model: calls of one layer of each kind times the number of such layers."""
    layers: list[str] = field(default_factory=list)
    """Patterns of the layers that call it."""
    tracing: str = "undetermined"
    """``probes.facts.Tracing`` when the trace began, before any stand-in of ours."""
    via: str = ""
    """For an op outside: the opaque op whose body calls it (``vllm::moe_forward``), or empty for eager code."""
    mode: Mode = "simulated"


@dataclass(frozen=True)
class KindOfLayerFact:
    """One kind of repeating decoder layer."""

    name: str
    """Class of the layer."""
    example: str
    count: int
    traced: int
    """How many of this kind were traced."""
    ops: list[str] = field(default_factory=list)
    """Custom ops that one such layer calls in the compiled region."""
    parameter_bytes: int = 0


@dataclass(frozen=True)
class MemoryFact:
    """What one rank holds and what the KV cache takes. Bytes; exact sums over parameters and buffers after weight processing."""

    parameter_bytes: dict[str, int] = field(default_factory=dict)
    """By dtype (``bfloat16``)."""
    buffer_bytes: dict[str, int] = field(default_factory=dict)
    other_bytes: dict[str, int] = field(default_factory=dict)
    """Tensors that modules hold as plain attributes (MLA's absorbed matrices), which no parameter list counts."""
    weight_bytes: int = 0
    """Parameters and buffers, each storage once."""
    loading_bytes: int | None = None
    """Parameters and buffers before weight processing: what a loader that fills the whole model first needs."""
    device_bytes: int = 0
    """Memory of one device, from its profile or from the device."""
    utilization: float = 0.9
    """``--gpu-memory-utilization`` as vLLM resolved it."""
    kv_bytes_per_token: int = 0
    """Over all layers of the rank whose cache grows with the sequence."""
    kv_fixed_bytes: int = 0
    """Per sequence, over layers whose cache does not grow (state-space layers; sliding windows at their full width)."""
    max_model_len: int = 0
    """As vLLM resolved it for this command."""
    kv_needed_bytes: int | None = None
    """vLLM's own figure for one sequence of ``max_model_len``."""
    fits_max_model_len: int | None = None
    """vLLM's own estimate of the longest sequence in what is left; None where it could not be asked, 0 if none fits."""
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    note: str = ""


@dataclass(frozen=True)
class ParallelFact:
    """The rank that was traced."""

    rank: int = 0
    world_size: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False


@dataclass(frozen=True)
class ModelTraceFacts:
    """A model traced for one rank."""

    device: str
    mode: Mode
    profile: str | None
    """Device profile of a simulated run."""
    model: str
    vllm: str | None
    torch: str | None
    kernels: str | None
    """Version of the kernel package whose schemas were used."""
    kernels_origin: Literal["installed", "catalogue", "none"] = "none"
    repairs: str = ""
    """Value of XPUFP8_APPLY during the run."""
    architecture: str | None = None
    runner: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    enforce_eager: bool = False
    parallel: ParallelFact = field(default_factory=ParallelFact)
    stages: list[StageFact] = field(default_factory=list)
    stand_ins: list[StandInFact] = field(default_factory=list)
    linear: list[LayerKindFact] = field(default_factory=list)
    attention: list[AttentionKindFact] = field(default_factory=list)
    moe: list[MoeKindFact] = field(default_factory=list)
    repeating: list[KindOfLayerFact] = field(default_factory=list)
    ops_compiled: list[ReachedOpFact] = field(default_factory=list)
    """Custom ops inside a region that torch.compile traces: these must have a fake."""
    ops_outside: list[ReachedOpFact] = field(default_factory=list)
    """Custom ops reached only outside; a missing fake does no harm there."""
    mixed: list[MixedDtypeFact] = field(default_factory=list)
    """Layers and calls with float16 and bfloat16 side by side."""
    memory: MemoryFact | None = None
    messages: list[str] = field(default_factory=list)
    """Lines of vLLM's own log that say what it chose (backends, kernels, fallbacks)."""
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    unknown: list[str] = field(default_factory=lambda: ["numerics", "speed", "peer access", "real output dtypes"])
    """What this run cannot know."""
