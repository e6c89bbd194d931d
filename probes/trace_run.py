"""One model trace under way: its stages, the faults that were stood in for, and what counts as a failure of the stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from probes.model_facts import MemoryFact, ParallelFact, StageFact, StageStatus, StandInFact
from probes.protocol import Context, describe_error

TRIES = 12
"""How many faults one stage may be stood in for before it is given up."""

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
            forget_compilation(self.model)
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


def forget_compilation(model: Any) -> None:
    """Have compiled modules traced again, because something that they reached is another now."""
    import torch

    if model is None:
        return
    torch._dynamo.reset()
    for module in model.modules():
        if getattr(module, "compiled", False):
            module.compiled = False
