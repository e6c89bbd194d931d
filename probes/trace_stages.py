"""The forward pass of a model trace, stage by stage: text, logits, vision or audio tower, bodies of opaque ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from probes.model_facts import StandInFact
from probes.trace_run import Run, forget_compilation


def forward(run: Run) -> None:
    """Call the model part by part and leave in ``run`` what it reached."""
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
    forget_compilation(run.model)
    hidden = run.stage("trace", lambda: _text(run))
    if run.passed:
        return hidden
    run.stages[-1] = failed
    for repetition in short:
        repetition.shorten()
    forget_compilation(run.model)
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
