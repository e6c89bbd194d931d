"""A whole model for one rank, without weights and, on a simulated device, without the device.

Stages: configure → distribute → construct → process → trace (text) → logits → vision → bodies of opaque ops → memory. A fault
that has a stand-in is noted, stood in for, and the stage tried again, so that one run finds everything between the command and
a served token.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from probes.model_facts import (
    MemoryFact,
    ModelTraceFacts,
    ParallelFact,
    ReachedOpFact,
    StageFact,
    StageStatus,
    StandInFact,
)
from probes.protocol import Context, describe_error

if TYPE_CHECKING:
    from probes.facts import Mode

TRIES = 12
"""How many faults one stage may be stood in for before it is given up."""

_TELLING = re.compile(r"[Ss]elect|[Uu]sing .*(backend|kernel|attention|MoE)|[Ff]all.*back|not supported|disabl", re.ASCII)
_REMOTE_CODE = ("trust_remote_code", "trust-remote-code", "custom code", "does not appear to have a file named")
"""Words of a failure that asks for a checkpoint's own Python files."""
_ARTEFACTS = (
    "FakeTensor",
    "fake tensor",
    "DataDependent",
    "data-dependent",
    "DynamicOutputShape",
    "SimulationError",
    "aten._local_scalar_dense",
)
"""Words of a failure that come from tracing without data and say nothing of a real run."""


class Run:
    """One trace under way: what is known so far. Only :func:`observe` and this module's stages touch it."""

    def __init__(self, context: Context) -> None:
        from probes.trace_ops import Recorder

        self.context = context
        self.recorder = Recorder()
        self.stages: list[StageFact] = []
        self.stand_ins: list[StandInFact] = []
        self.messages: list[str] = []
        self.config: Any = None
        self.model: Any = None
        self.fake_mode: Any = None
        self.repeated: list[Any] = []
        """Lists of repeating layers."""
        self.parallel = ParallelFact()
        self.memory: MemoryFact | None = None
        self.facts: dict[str, Any] = {}
        self.logged: BaseException | None = None
        """The last exception that vLLM logged instead of raising it."""

    def stage(self, name: str, work: Callable[[], Any], *, quiet: bool = False) -> Any:
        """Run one stage, standing in for faults until it ends or no stand-in helps. Returns its result, None when it failed."""
        from probes import trace_stand_ins
        from probes.trace_build import timed

        seconds = 0.0
        before = len(self.stand_ins)
        for _ in range(TRIES):
            result, error, took = timed(work)
            seconds += took
            if error is None:
                self.stages.append(StageFact(name, "done", round(seconds, 3), passed_after_stand_in=len(self.stand_ins) > before))
                return result
            if "failed to be inspected" in str(error):
                error.__cause__ = self.logged
                if trace_stand_ins.inspect_here():
                    continue
            fact = None if quiet else trace_stand_ins.stand_in(error, name, self.recorder)
            if fact is None:
                break
            self.stand_ins.append(fact)
            _forget_compilation(self.model)
        assert error is not None
        status, reason = judge(error, quiet)
        self.stages.append(StageFact(name, status, round(seconds, 3), describe_error(error), reason))
        return None

    @property
    def last(self) -> StageFact:
        """The stage that ended last."""
        return self.stages[-1]

    @property
    def passed(self) -> bool:
        """True when the stage that ended last reached its end."""
        return self.stages[-1].status == "done"

    def skip(self, name: str, reason: str, status: StageStatus = "skipped") -> None:
        """Note a stage that was not run."""
        self.stages.append(StageFact(name, status, reason=reason))


def judge(error: BaseException, quiet: bool = False) -> tuple[StageStatus, str]:
    """Whether an exception is a failure of the stack, or one of tracing without data (then it is unknown), and its telling
    line.
    """
    from probes.trace_stand_ins import chain

    steps = list(chain(error))
    text = "\n".join(f"{type(step).__name__}: {step}" for step in steps)
    root = next((step for step in steps if str(step).strip()), steps[0])
    line = telling_line(str(root)) or type(root).__name__
    if any(word in text for word in _REMOTE_CODE):
        return "unknown", f"the checkpoint brings its own code, which was not run: {line}"
    if quiet or any(word in text for word in _ARTEFACTS):
        return "unknown", f"could not be traced without data: {type(root).__name__}: {line}"
    return "failed", f"{type(root).__name__}: {line}"


def telling_line(message: str) -> str:
    """The line of a message that says what is wrong: its first, or what pydantic put below a count of its errors."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith(("Value error, ", "Assertion failed, "))), None)
    if told is not None:
        return told.split(", ", 1)[1].split(" [type=", 1)[0]
    return lines[0] if lines else ""


def _forget_compilation(model: Any) -> None:
    import torch

    if model is None:
        return
    torch._dynamo.reset()
    for module in model.modules():
        if getattr(module, "compiled", False):
            module.compiled = False


def observe(context: Context) -> ModelTraceFacts:
    """Trace the context's model.

    Options: ``rank`` (which rank of the command's world, 0 by default), ``whole`` (process and trace every layer instead of a few
    of each kind), ``without_fakes`` (ops, ``namespace::name``, whose fakes are kept from being registered).

    Raises:
        ValueError: no model was named, or no such device profile.
    """
    start = time.monotonic()
    if not context.model:
        raise ValueError("model_trace needs a model")
    profile = enter_simulation(context)
    from probes import trace_build, trace_ops

    trace_build.prepare_environment()
    run = Run(context)
    _take_fakes_away(context)
    trace_ops.record_bodies()
    _listen(run)
    _check_platform(context)
    _build(run)
    if run.model is not None:
        _forward(run)
        _sizes(run, profile)
    return _facts(run, profile, start)


# -- before the model ------------------------------------------------------------------------------------------------------


def enter_simulation(context: Context) -> str | None:
    """Make this process and its children see the simulated device that the context (or the environment) names.

    Returns the profile's key, None for a real device.
    """
    from xpufp8.simulate import VARIABLE, entry_points, profiles

    if context.simulated and not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = profiles.find(context.device).key
    name = os.environ.get(VARIABLE)
    if name:
        entry_points.ensure()
        return profiles.find(name).key
    return None


def _check_platform(context: Context) -> None:
    from vllm.platforms import current_platform

    wanted = "XPU" if context.simulated else context.device.split(":")[0].upper()
    found = current_platform._enum.name
    if found != wanted:
        raise RuntimeError(f"vLLM runs on platform {found} here, not {wanted}")


def _take_fakes_away(context: Context) -> None:
    """Keep the fakes of the ops in ``options["without_fakes"]`` from being registered."""
    import torch

    names = set(context.options.get("without_fakes", ()))
    if not names:
        return
    register = torch.library.Library._register_fake

    def refuse(self: Any, op_name: str, fn: Any, *args: Any, **kwargs: Any) -> Any:
        qualified = op_name if "::" in op_name else f"{self.ns}::{op_name}"
        if qualified in names and not str(getattr(fn, "__module__", "")).startswith(("probes.", "xpufp8.")):
            return None
        return register(self, op_name, fn, *args, **kwargs)

    torch.library.Library._register_fake = refuse


def _listen(run: Run) -> None:
    """Keep those lines of vLLM's log that say what it chose."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                run.logged = record.exc_info[1]
            if len(run.messages) < 60 and _TELLING.search(line) and line not in run.messages:
                run.messages.append(line)

    logging.getLogger("vllm").addHandler(Keep())


# -- building --------------------------------------------------------------------------------------------------------------


def _build(run: Run) -> None:
    from probes import trace_build, trace_layers, trace_memory, trace_ops

    context = run.context
    assert context.model is not None
    model = context.model
    run.config = run.stage("configure", lambda: trace_build.engine_config(model, context.vllm_args))
    if run.config is None:
        return
    rank = int(context.options.get("rank", 0))
    parallel = run.stage("distribute", lambda: trace_build.start_ranks(run.config, rank))
    if parallel is None:
        return
    run.parallel = parallel
    _record_compilation(run)
    run.fake_mode = trace_ops.make_fake_mode(run.recorder, _infer_quietly(run))

    def construct() -> Any:
        run.config.compilation_config.static_forward_context.clear()
        return trace_build.construct(run.config, run.fake_mode)

    built = run.stage("construct", construct)
    if built is None:
        return
    loading = trace_memory.held(built)
    run.model = built
    run.repeated = [] if context.options.get("whole") else trace_layers.repetitions(built)
    for repetition in run.repeated:
        repetition.shorten()
    run.stage("process", lambda: trace_build.process(run.config, built, run.fake_mode))
    run.memory = trace_memory.measure(built, run.repeated, loading)
    run.facts.update(_kinds(run))
    if run.last.status == "failed":
        run.skip("trace", "weights could not be processed")
        run.model = None


def _record_compilation(run: Run) -> None:
    """Let compiled modules hand their graphs to the recorder instead of vLLM's backend."""
    import sys

    from vllm.config import compilation

    def init_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        owner = sys._getframe(1).f_locals.get("self")
        return run.recorder.backend_of(owner)

    compilation.CompilationConfig.init_backend = init_backend
    # Functions that vLLM compiles on their own ask for inductor by name; their graphs are run as they are.
    import torch

    wrapper = getattr(torch, "_TorchCompileInductorWrapper", None)
    if wrapper is not None:
        wrapper.__call__ = lambda self, graph, inputs: graph.forward


def _infer_quietly(run: Run) -> Callable[..., bool]:
    """For eager code: an op without a fake is no fault there, only in the way of the trace."""

    def infer(op: Any, error: BaseException, args: Any, kwargs: Any) -> bool:
        from probes import trace_fakes

        name = str(op._schema.name)
        if name in run.recorder.inferred:
            return False
        run.recorder.inferred.add(name)
        trace_fakes.register(op, trace_fakes.infer(op))
        return True

    return infer


# -- forward ---------------------------------------------------------------------------------------------------------------


def _forward(run: Run) -> None:
    from probes import trace_layers

    _right_fakes(run)
    for repetition in run.repeated:
        (repetition.shorten if repetition.compiled else repetition.spread)()
    short = [r for r in run.repeated if r.compiled]
    run.recorder.watch(run.model)
    hidden = run.stage("trace", lambda: _text(run))
    if not run.passed and short:
        hidden = _unreduced(run, short)
        short = [] if run.passed else short
    if not run.passed and hidden is None:
        hidden = _without_dynamo(run)
    _after_text(run, hidden)
    _tower(run)
    _bodies(run)
    trace_layers.scale(run.recorder, short)
    for repetition in run.repeated:
        repetition.undo()
    run.facts["repeating"] = trace_layers.repeating(run.recorder, run.repeated)


def _after_text(run: Run, hidden: Any) -> None:
    from probes import trace_forward

    if hidden is None:
        return
    if not hasattr(run.model, "compute_logits") or getattr(run.config.model_config, "runner_type", "") == "pooling":
        run.skip("logits", "the model gives embeddings or scores; its pooler is plain torch code and was not traced")
    elif _is_last_stage(run):
        run.stage("logits", lambda: trace_forward.run_logits(run.model, run.config, run.fake_mode, hidden))
    else:
        run.skip("logits", "no logits on this rank")


def _text(run: Run) -> Any:
    from probes import trace_forward

    run.recorder.reset()
    return trace_forward.run_text(run.model, run.config, run.fake_mode)


def _unreduced(run: Run, short: list[Any]) -> Any:
    """The shortened model failed; ask one of full length, lest the shortening be what failed."""
    failed = run.stages.pop()
    for repetition in short:
        repetition.spread()
    _forget_compilation(run.model)
    hidden = run.stage("trace", lambda: _text(run))
    if run.passed:
        return hidden
    run.stages[-1] = failed
    for repetition in short:
        repetition.shorten()
    _forget_compilation(run.model)
    return None


def _without_dynamo(run: Run) -> Any:
    """The compiled region could not be traced; run it as eager code to see what comes after."""
    from probes import trace_build

    failed = run.last
    compiled = [m for m in run.model.modules() if getattr(m, "do_not_compile", True) is False]
    if not compiled:
        return None
    for module in compiled:
        module.do_not_compile = True
    hidden, error, _ = trace_build.timed(lambda: _text(run))
    if error is None:
        run.stand_ins.append(
            StandInFact(
                "eager",
                type(compiled[0]).__name__,
                "trace",
                "the region was run without torch.compile",
                failed.error,
                region="compiled",
                breaks_compile=True,
            )
        )
    return hidden


def _is_last_stage(run: Run) -> bool:
    from vllm.distributed import get_pp_group

    return bool(get_pp_group().is_last_rank)


def _right_fakes(run: Run) -> None:
    """Replace registered fakes that lose a dimension; whichever the model reaches becomes a finding afterwards."""
    from probes import trace_fakes

    with run.fake_mode:
        for op, kernel, given, right in trace_fakes.wrong_fakes():
            trace_fakes.register(op, trace_fakes.gemm(op))
            run.facts.setdefault("wrong", []).append((op, kernel.source, given, right))


def _tower(run: Run) -> None:
    """Trace the vision or audio tower, if the model has one on this rank."""
    from probes import trace_forward, trace_vision

    model = run.model
    if not getattr(model, "supports_multimodal", False) or not getattr(run.config.model_config, "is_multimodal_model", False):
        return
    embed = getattr(model, "embed_multimodal", None) or getattr(model, "get_multimodal_embeddings", None)
    if embed is None or (run.parallel.pipeline_parallel > 1 and run.parallel.rank > 0):
        run.skip("vision", "no tower on this rank")
        return

    def call() -> Any:
        with trace_forward.calling(run.config, run.fake_mode):
            inputs = trace_vision.tower_inputs(model, run.config)
            if inputs is None:
                raise LookupError(trace_vision.CANNOT_TELL)
            run.fake_mode.islands = True
            try:
                return embed(**inputs)
            finally:
                run.fake_mode.islands = False

    run.stage("vision", call)
    if run.last.status == "failed" and run.last.error is not None and run.last.error.type.endswith("LookupError"):
        run.stages[-1] = replace(run.last, status="unknown", reason=trace_vision.CANNOT_TELL, error=None)
    elif run.last.status == "failed":
        run.stages[-1] = replace(run.last, status="unknown", reason="with inputs made by hand: " + run.last.reason)


def _bodies(run: Run) -> None:
    """Run the bodies of the opaque ops that the model called, with the arguments of a first call."""
    from probes import trace_forward

    skipped = {"vllm::all_reduce", "vllm::all_gather", "vllm::reduce_scatter", "vllm::all_to_all"}
    pending = {key: value for key, value in run.recorder.pending.items() if key[0] not in skipped}
    if not pending:
        return

    def call() -> None:
        problems = []
        for (name, _), (_, args, kwargs) in pending.items():
            with trace_forward.calling(run.config, run.fake_mode):
                run.recorder.via = name
                try:
                    run.recorder.bodies[name](*args, **kwargs)
                except Exception as exc:  # noqa: BLE001 - one body that needs data does not hide the others
                    problems.append(f"{name}: {type(exc).__name__}: {exc}".splitlines()[0])
                finally:
                    run.recorder.via = ""
        if problems:
            raise LookupError("; ".join(problems))

    run.stage("bodies", call, quiet=True)


# -- results ---------------------------------------------------------------------------------------------------------------


def _kinds(run: Run) -> dict[str, Any]:
    from probes import trace_build, trace_layers

    found: dict[str, Any] = {}
    for name, ask in (
        ("linear", lambda: trace_layers.linear_kinds(run.model, run.repeated)),
        ("attention", lambda: trace_layers.attention_kinds(run.model, run.config, run.repeated)),
        ("moe", lambda: trace_layers.moe_kinds(run.model, run.repeated)),
    ):
        result, error, _ = trace_build.timed(ask)
        found[name] = result or []
        if error is not None:
            run.messages.append(f"xpufp8: {name} layers could not be described: {type(error).__name__}: {error}")
    return found


def _sizes(run: Run, profile: str | None) -> None:
    from vllm.platforms import current_platform

    from probes import trace_memory

    if run.memory is None:
        return
    fact = run.memory
    device = int(current_platform.get_device_total_memory()) if profile or run.context.device != "cpu" else 0
    result = run.stage("memory", lambda: trace_memory.with_cache(fact, run.config, device), quiet=True)
    run.memory = result or fact


def _facts(run: Run, profile: str | None, start: float) -> ModelTraceFacts:
    import torch
    import vllm

    from xpufp8.simulate import kernels

    mode: Mode = "simulated" if profile else "live"
    model_config = getattr(run.config, "model_config", None)
    compiled, outside = _reached(run, mode)
    catalogue = kernels.State.catalogue
    return ModelTraceFacts(
        device=run.context.device,
        mode=mode,
        profile=profile,
        model=str(run.context.model),
        vllm=getattr(vllm, "__version__", None),
        torch=torch.__version__,
        kernels=catalogue.version if catalogue else None,
        kernels_origin=kernels.State.origin,
        repairs=os.environ.get("XPUFP8_APPLY", ""),
        architecture=getattr(model_config, "architecture", None),
        runner=getattr(model_config, "runner_type", None),
        dtype=str(getattr(model_config, "dtype", "")).removeprefix("torch.") or None,
        quantization=getattr(model_config, "quantization", None),
        enforce_eager=bool(getattr(model_config, "enforce_eager", False)),
        parallel=run.parallel,
        stages=run.stages,
        stand_ins=_with_layers(run),
        linear=run.facts.get("linear", []),
        attention=run.facts.get("attention", []),
        moe=run.facts.get("moe", []),
        repeating=run.facts.get("repeating", []),
        ops_compiled=compiled,
        ops_outside=outside,
        memory=run.memory,
        messages=run.messages,
        seconds=round(time.monotonic() - start, 3),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _reached(run: Run, mode: Mode) -> tuple[list[ReachedOpFact], list[ReachedOpFact]]:
    from probes.trace_ops import pattern

    compiled: list[ReachedOpFact] = []
    outside: list[ReachedOpFact] = []
    inside_names = {name for name, region, _ in run.recorder.calls if region == "compiled"}
    for (name, region, via), call in run.recorder.calls.items():
        layers = sorted({pattern(layer) for layer in call.calls if layer})
        fact = ReachedOpFact(name, sum(call.calls.values()), layers, call.tracing, via, mode)
        if region == "compiled":
            compiled.append(fact)
        elif name not in inside_names:
            outside.append(fact)
    return compiled, outside


def _with_layers(run: Run) -> list[StandInFact]:
    """Stand-ins with the layers that reach them, and the wrong fakes that the model met."""
    from probes.trace_ops import op_name, pattern

    reached: dict[str, list[str]] = {}
    for (name, _, _), call in run.recorder.calls.items():
        reached.setdefault(name, []).extend(sorted({pattern(layer) for layer in call.calls if layer}))
    facts = [replace(fact, layers=reached.get(fact.subject, [])) if fact.kind == "fake" else fact for fact in run.stand_ins]
    for op, source, given, right in run.facts.get("wrong", []):
        name = op_name(op)
        if any(n == name and call.dimensions > 2 for (n, _, _), call in run.recorder.calls.items()):
            facts.append(
                StandInFact(
                    "wrong-fake",
                    name,
                    "trace",
                    f"the fake at {source} gives {given} for an input of three dimensions; the kernel gives {right}",
                    layers=reached[name],
                    region="compiled" if any(n == name and r == "compiled" for n, r, _ in run.recorder.calls) else "outside",
                )
            )
    return facts
