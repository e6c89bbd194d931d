"""Which candidate computes a layer: each is checked against float64 and timed on the device, and the answer is kept.

The answer depends on the device, the software and the layer's shape, so it is looked up in a file of the user's cache folder
before anything runs. A folder that cannot be written or a file that cannot be read costs only the time to measure again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xpufp8.runtime import memory
from xpufp8.runtime.candidates import AT_LOAD, PER_CALL, Candidate, Prepared, candidates
from xpufp8.runtime.catalogue import RepairError
from xpufp8.runtime.problem import Problem, exact

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
CACHE_VARIABLE = "XPUFP8_CACHE_DIR"
FORCE_VARIABLE = "XPUFP8_KERNEL"
"""Name of the candidate to use whatever is measured, for those who compare."""
REVISION = 4
"""Raised when the arithmetic of a candidate changes, so that older answers are measured again."""

ROUNDING_LIMIT = 2.0**-6
"""Allowed error of a candidate that keeps activations in 16 bits: root mean square, relative to the expected size of the
product. bfloat16 has 8 bits, so rounding weights and output costs about 2^-8; a misread scale or layout costs far more."""
QUANTIZING_LIMIT = 2.0**-4
"""The same where activations are rounded to FP8: e4m3 has 4 bits (2^-5 on average of the largest), e5m2 one less."""
CHECKED_ROWS = 256
"""Rows of the weight that are compared, spread over all of them; the float64 product of a whole layer would not fit."""
TOKENS = (1, 17, 64, 256)
"""Activation rows that are timed: one token, an odd few, a full batch, and a prompt."""
LONG = 0.5
"""Seconds of timing one call again and again after which the best of them is taken."""

_logger = logging.getLogger("vllm.xpufp8")
_memo: dict[str, Choice] = {}


@dataclass(frozen=True)
class Trial:
    """One candidate, tried."""

    candidate: str
    error: float | None = None
    """Relative error against float64; None when it did not run."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Activation rows to seconds a call."""
    refused: str | None = None
    """Why it is out."""


@dataclass(frozen=True)
class Choice:
    """What was chosen for a problem, and what was seen on the way."""

    problem: str
    candidate: str
    trials: list[Trial] = field(default_factory=list)

    def describe(self) -> str:
        """One line for the log: the choice, and each trial with its error and time a token."""
        parts = []
        for trial in self.trials:
            said = trial.refused or f"error {trial.error:.1e}, {1e6 * trial.seconds.get('1', 0.0):.0f} us"
            parts.append(f"{trial.candidate}: {said}")
        return f"{self.candidate} for {self.problem}" + (f" ({'; '.join(parts)})" if parts else "")


def environment_key(device: torch.device) -> str:
    """Text that changes whenever a measured answer may no longer hold: device, driver-visible name, torch, vLLM, Triton."""
    import torch

    parts = [str(REVISION), device.type, torch.__version__, ",".join(candidate.name for candidate in candidates())]
    if device.type == "cpu":
        parts.append(f"{torch.backends.cpu.get_cpu_capability()} x{torch.get_num_threads()}")
    else:
        module = getattr(torch, device.type)
        parts.append(str(module.get_device_name(device)))
    return "|".join(parts)


def cache_file(device: torch.device) -> Path:
    """The file that holds the answers for this device and software."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME")
        folder = str(Path(base) / "xpufp8" if base else Path.home() / ".cache" / "xpufp8")
    digest = hashlib.sha256(environment_key(device).encode()).hexdigest()[:16]
    return Path(folder) / f"kernels-{digest}.json"


def _read_cache(path: Path) -> dict[str, Any]:
    """Return the cached answers; none where the file is missing, unreadable or not what was written."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _cached(path: Path, key: str) -> Choice | None:
    entry: Any = _read_cache(path).get(key)
    try:
        return Choice(entry["problem"], entry["candidate"], [Trial(**trial) for trial in entry["trials"]])
    except (TypeError, KeyError):
        return None


def _write_cache(path: Path, choice: Choice) -> None:
    """Add an answer; written beside and renamed, because ranks of one server write at the same time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {**_read_cache(path), choice.problem: asdict(choice)}
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(content, out)
        Path(part).replace(path)
    except OSError as error:
        _logger.debug("xpufp8 could not keep a kernel choice in %s: %s", path, error)


def relative_error(got: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> float:
    """Return the root of the mean squared difference in units of ``size``; inf where ``got`` is NaN or Inf.

    Args:
        got: ``[tokens, rows]``.
        wanted: float64, the same shape, finite.
        size: float64 ``[tokens, rows]``, how large the product of such operands is expected to be. Dividing by it and not by
            ``wanted`` keeps one huge row from hiding the errors of the others, and a cancellation from inventing one.
    """
    import torch

    got = got.to(torch.float64).cpu()
    if not torch.isfinite(got).all():
        return math.inf
    return float(((got - wanted) / size).square().mean().sqrt())


def probe_input(problem: Problem, rows: int, device: torch.device) -> torch.Tensor:
    """Random activations ``[rows, K]``, drawn on the CPU whatever vLLM's default device is while it loads a model."""
    import torch

    generator = torch.Generator(device="cpu").manual_seed(rows)
    return torch.randn(rows, problem.k, generator=generator, device="cpu").to(problem.dtype).to(device)


def check(problem: Problem, candidate: Candidate, prepared: Prepared, weight: torch.Tensor, scale: torch.Tensor) -> float:
    """Return a candidate's relative error on the layer's real weight, with 1 and 17 rows of activations and a bias."""
    import torch

    count = min(problem.n, CHECKED_ROWS)
    rows = torch.linspace(0, problem.n - 1, count, dtype=torch.float64, device="cpu").round().to(torch.int64)
    reference = exact(problem, weight, scale, rows)
    # Columns of a weight with a NaN or an Inf tell nothing of the arithmetic, and dummy weights have them.
    usable = torch.isfinite(reference).all(dim=1)
    if not usable.any():
        return 0.0
    rows, reference = rows[usable], reference[usable]
    norms = reference.norm(dim=1)
    # A row that is next to nothing beside the others may round to nothing; it decides no token.
    norms = norms.clamp_min(float(norms.square().mean().sqrt()) * 2.0**-10).clamp_min(torch.finfo(torch.float64).tiny)
    bias = torch.zeros(problem.n, dtype=torch.float64, device="cpu")
    bias[rows] = norms * torch.linspace(-1, 1, len(rows), dtype=torch.float64, device="cpu")
    bias = bias.to(problem.dtype)
    worst = 0.0
    for tokens in (1, 17):
        x = probe_input(problem, tokens, weight.device)
        exact_x = x.cpu().to(torch.float64)
        wanted = exact_x @ reference.t()
        # What such operands give on average, or what these ones gave where that is more: rounding is relative to the output.
        size = torch.hypot(exact_x.norm(dim=1, keepdim=True) * norms / math.sqrt(problem.k), wanted)
        for given in (None, bias):
            run_bias = None if given is None else given.to(weight.device)
            got = prepared.run(x, prepared.weight, prepared.scale, run_bias).cpu()[:, rows]
            expected = wanted if given is None else wanted + given.to(torch.float64)[rows]
            worst = max(worst, relative_error(got, expected, size))
    return worst


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def best_of(run: Callable[[], Any], device: torch.device) -> float:
    """Return seconds a call: the best of a few after a first, so that a busy machine matters less; of fewer where they take long."""
    run()
    _synchronize(device)
    best, spent = math.inf, 0.0
    for _ in range(3):
        start = time.perf_counter()
        run()
        _synchronize(device)
        taken = time.perf_counter() - start
        best, spent = min(best, taken), spent + taken
        if spent > LONG:
            break
    return best


def measure(problem: Problem, prepared: Prepared, device: torch.device) -> dict[str, float]:
    """Return seconds a call for each number of activation rows."""
    seconds = {}
    for tokens in TOKENS:
        x = probe_input(problem, tokens, device)
        seconds[str(tokens)] = best_of(partial(prepared.run, x, prepared.weight, prepared.scale, None), device)
    return seconds


def wrong(name: str, error: float, limit: float) -> Trial:
    """A candidate that does not agree with float64."""
    return Trial(name, error, refused=f"wrong: relative error {error:.2e}, allowed {limit:.2e}")


def raised(name: str, error: Exception) -> Trial:
    """A candidate that did not run."""
    return Trial(name, refused=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])


def _try(problem: Problem, candidate: Candidate, weight: torch.Tensor, scale: torch.Tensor) -> Trial:
    """Check and time one candidate; whatever it raises is a refusal."""
    reason = candidate.refuses(problem, weight.device.type)
    if reason:
        return Trial(candidate.name, refused=reason)
    try:
        prepared = candidate.prepare(problem, weight, scale)
        error = check(problem, candidate, prepared, weight, scale)
        limit = QUANTIZING_LIMIT if candidate.quantizes else ROUNDING_LIMIT
        if not error <= limit:
            return wrong(candidate.name, error, limit)
        return Trial(candidate.name, error, measure(problem, prepared, weight.device))
    except Exception as exc:  # noqa: BLE001 - a kernel that raises is out, the next one is tried
        return raised(candidate.name, exc)


def is_fake(tensor: torch.Tensor) -> bool:
    """True for tensors without data: nothing can be checked or timed on them."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def _score(trial: Trial) -> float:
    """Geometric mean of the times, so that a token and a prompt weigh alike."""
    return math.exp(sum(math.log(max(s, 1e-9)) for s in trial.seconds.values()) / max(len(trial.seconds), 1))


def forced(known: Mapping[str, Any]) -> str | None:
    """The candidate that a person asked for, where it is one of these; None where it is one for other layers.

    Raises:
        RepairError: no candidate has that name.
    """
    name = os.environ.get(FORCE_VARIABLE)
    if name is None or name in known:
        return name
    from xpufp8.runtime import experts

    every = [c.name for c in candidates()] + [c.name for c in experts.candidates() if c.name not in {AT_LOAD.name, PER_CALL.name}]
    if name not in every:
        raise RepairError(f"{FORCE_VARIABLE} names {name!r}; there are {', '.join(every)}")
    return None


def choose(problem: Problem, weight: torch.Tensor, scale: torch.Tensor) -> Choice:
    """Choose how to compute a layer.

    Raises:
        RepairError: no candidate reproduces the float64 product.
    """
    known = {candidate.name: candidate for candidate in candidates()}
    asked = forced(known)
    if asked is not None:
        return Choice(problem.key(), asked)
    if is_fake(weight):
        able = [
            c for c in known.values() if c is not AT_LOAD and not c.quantizes and c.refuses(problem, weight.device.type) is None
        ]
        return Choice(problem.key(), able[0].name)
    roomy = memory.may_take((AT_LOAD.bytes_per_weight - 1) * weight.numel(), weight.device)
    return decide(problem.key(), known, lambda candidate: _try(problem, candidate, weight, scale), weight.device, roomy=roomy)


def decide(key: str, known: Mapping[str, T], attempt: Callable[[T], Trial], device: torch.device, *, roomy: bool) -> Choice:
    """Take the fastest candidate that is right: the one known from before, or by trying each.

    Args:
        key: the problem's.
        known: candidates by name, most preferred first.
        attempt: checks and times one.
        device: where.
        roomy: whether memory allows weights that are widened at load.

    Raises:
        RepairError: none is right.
    """
    memo = f"{key}|{roomy}"
    if memo in _memo:
        return _memo[memo]
    path = cache_file(device)
    choice = _cached(path, key)
    if choice is None or choice.candidate not in known:
        trials = [attempt(candidate) for candidate in known.values()]
        choice = Choice(key, "", trials)
        fit = [trial for trial in trials if trial.refused is None]
        if not fit:
            raise RepairError(f"no way to compute this layer agrees with float64: {choice.describe()}")
        choice = Choice(key, min(fit, key=_score).candidate, trials)
        _write_cache(path, choice)
        _logger.info("xpufp8 chose %s", choice.describe())
    if not roomy:
        choice = _without(choice, AT_LOAD.name)
    _memo[memo] = choice
    return choice


def _without(choice: Choice, name: str) -> Choice:
    """The next best choice when memory forbids one."""
    rest = [trial for trial in choice.trials if trial.refused is None and trial.candidate != name]
    if choice.candidate != name:
        return choice
    best = min(rest, key=_score).candidate if rest else PER_CALL.name
    return Choice(choice.problem, best, choice.trials)


def prepare(problem: Problem, weight: torch.Tensor, scale: torch.Tensor) -> tuple[Choice, Prepared]:
    """Choose, and bring the layer into the chosen form; what it takes is booked against the memory budget."""
    choice = choose(problem, weight, scale)
    candidate = next(c for c in candidates() if c.name == choice.candidate)
    prepared = candidate.prepare(problem, weight, scale)
    memory.take((candidate.bytes_per_weight - 1) * weight.numel(), weight.device)
    return choice, prepared
