"""A whole model for one rank, without weights and, on a simulated device, without the device.

Stages: configure → distribute → construct → process → trace (text) → logits → vision → bodies of opaque ops → memory. A fault
that has a stand-in is noted, stood in for, and the stage tried again, so that one run finds everything between the command and
a served token.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from typing import Any

from probes.model_facts import ModelTraceFacts
from probes.protocol import Context
from probes.trace_run import Run

_TELLING = re.compile(r"[Ss]elect|[Uu]sing .*(backend|kernel|attention|MoE)|[Ff]all.*back|not supported|disabl", re.ASCII)


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
    from probes import trace_build, trace_ops, trace_results, trace_stages

    trace_build.prepare_environment()
    run = Run(context)
    _take_fakes_away(context)
    trace_ops.record_bodies()
    _listen(run)
    _check_platform(context)
    _build(run)
    if run.model is not None:
        trace_stages.forward(run)
        trace_results.sizes(run, profile)
    return trace_results.facts(run, profile, start)


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
    from probes import trace_build, trace_layers, trace_memory, trace_ops, trace_results

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
    run.recorder.layers = run.config.compilation_config.static_forward_context
    run.repeated = [] if context.options.get("whole") else trace_layers.repetitions(built)
    for repetition in run.repeated:
        repetition.shorten()
    run.stage("process", lambda: trace_build.process(run.config, built, run.fake_mode))
    run.memory = trace_memory.measure(built, run.repeated, loading)
    run.facts.update(trace_results.kinds(run))
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
