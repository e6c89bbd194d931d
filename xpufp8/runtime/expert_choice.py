"""Which candidate computes an expert layer: each is checked against float64 and timed on the device, and the answer is kept.

The file of answers, its limits and the rules for memory are those of ``xpufp8.runtime.choice``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from xpufp8.runtime import choice, experts, memory
from xpufp8.runtime.experts import ExpertCall, ExpertCandidate, ExpertProblem, Pair, PreparedExperts, activate
from xpufp8.runtime.problem import Problem, exact

if TYPE_CHECKING:
    import torch

CHECKED_EXPERTS = 4
"""Experts that are compared, spread over all of them: each costs a float64 product of its whole weights."""
PIECE = 2048
"""Rows of a weight that are held in float64 at once."""


def _routing(problem: ExpertProblem, tokens: int, chosen: list[int], device: torch.device) -> Pair:
    """Send each token to as many of some experts as it takes; the weights differ."""
    import torch

    top_k = min(problem.top_k, len(chosen))
    places = torch.arange(tokens, device="cpu").unsqueeze(1) * top_k + torch.arange(top_k, device="cpu")
    ids = torch.tensor(chosen, dtype=torch.int32, device="cpu")[places % len(chosen)]
    shares = torch.linspace(0.25, 1.0, tokens * top_k, device="cpu").reshape(tokens, top_k)
    return shares.to(device), ids.to(device)


def _exact_product(
    problem: Problem, weight: torch.Tensor, scale: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x @ dequantized(weight).T`` in float64, and the norms of the weight's rows."""
    import torch

    products, norms = [], []
    for start in range(0, problem.n, PIECE):
        rows = torch.arange(start, min(start + PIECE, problem.n), device="cpu")
        wide = exact(problem, weight, scale, rows)
        products.append(x @ wide.t())
        norms.append(wide.norm(dim=1))
    return torch.cat(products, dim=1), torch.cat(norms)


def _reference(problem: ExpertProblem, call: ExpertCall, x: torch.Tensor, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's output in float64, ``[T, H]``, and how large a sum of such parts is expected to be."""
    import torch

    shares, ids = (part.cpu() for part in call.routing)
    x = x.cpu().to(torch.float64)
    wanted = torch.zeros(x.shape[0], problem.second.n, dtype=torch.float64, device="cpu")
    squares = torch.zeros_like(wanted)
    for expert in chosen:
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        hidden, _ = _exact_product(problem.first, call.weights[0][expert], call.scales[0][expert], x[tokens])
        if call.biases[0] is not None:
            hidden = hidden + call.biases[0][expert].cpu().to(torch.float64)
        hidden = activate(problem.activation, hidden)
        out, norms = _exact_product(problem.second, call.weights[1][expert], call.scales[1][expert], hidden)
        if call.biases[1] is not None:
            out = out + call.biases[1][expert].cpu().to(torch.float64)
        share = shares[tokens, slots].to(torch.float64).unsqueeze(1)
        wanted.index_add_(0, tokens, out * share)
        expected = hidden.norm(dim=1, keepdim=True) * norms / problem.second.k**0.5 * share
        squares.index_add_(0, tokens, expected.square())
    return wanted, torch.hypot(squares.sqrt(), wanted)


def check(problem: ExpertProblem, prepared: PreparedExperts, call: ExpertCall) -> float:
    """Return a candidate's relative error on the layer's real weights, with 1 and 17 tokens over a few experts.

    Args:
        problem: the layer.
        prepared: it in the candidate's form.
        call: its weights, scales, biases and block; the routing is made here.
    """
    import torch

    count = min(problem.experts, CHECKED_EXPERTS)
    chosen = torch.linspace(0, problem.experts - 1, count, dtype=torch.float64, device="cpu").round().to(torch.int64).tolist()
    worst = 0.0
    for tokens in (1, 17):
        x = choice.probe_input(problem.first, tokens, call.weights[0].device)
        routed = _with(call, call.weights, call.scales, _routing(problem, tokens, chosen, x.device))
        wanted, size = _reference(problem, routed, x, chosen)
        # Tokens that meet a NaN or an Inf tell nothing of the arithmetic, and dummy weights have them.
        usable = torch.isfinite(wanted).all(dim=1) & torch.isfinite(size).all(dim=1)
        if not usable.any():
            continue
        got = prepared.forward(x, _with(routed, prepared.weights, prepared.scales, routed.routing)).cpu()[usable]
        # An output that is next to nothing beside the others may round to nothing.
        size = size[usable]
        size = size.clamp_min(float(size.square().mean().sqrt()) * 2.0**-10).clamp_min(torch.finfo(torch.float64).tiny)
        worst = max(worst, choice.relative_error(got, wanted[usable], size))
    return worst


def _with(call: ExpertCall, weights: Pair, scales: Pair, routing: Pair) -> ExpertCall:
    return ExpertCall(weights, scales, routing, call.block, call.activation, None, call.biases)


def measure(problem: ExpertProblem, prepared: PreparedExperts, call: ExpertCall) -> dict[str, float]:
    """Return seconds a call for each number of tokens, which are spread over all experts."""
    seconds, device = {}, call.weights[0].device
    for tokens in choice.TOKENS:
        x = choice.probe_input(problem.first, tokens, device)
        routed = _with(call, prepared.weights, prepared.scales, _routing(problem, tokens, list(range(problem.experts)), device))
        seconds[str(tokens)] = choice.best_of(partial(prepared.forward, x, routed), device)
    return seconds


def _try(problem: ExpertProblem, candidate: ExpertCandidate, call: ExpertCall) -> choice.Trial:
    """Check and time one candidate; whatever it raises is a refusal."""
    reason = candidate.refuses(problem, call.weights[0].device.type)
    if reason:
        return choice.Trial(candidate.name, refused=reason)
    try:
        prepared = candidate.prepare(problem, call.weights, call.scales)
        error = check(problem, prepared, call)
        if not error <= choice.ROUNDING_LIMIT:
            return choice.wrong(candidate.name, error, choice.ROUNDING_LIMIT)
        return choice.Trial(candidate.name, error, measure(problem, prepared, call))
    except Exception as exc:  # noqa: BLE001 - a kernel that raises is out, the next one is tried
        return choice.raised(candidate.name, exc)


def choose(problem: ExpertProblem, call: ExpertCall, *, may_widen: bool = True) -> choice.Choice:
    """Choose how to compute an expert layer.

    Args:
        problem: the layer.
        call: its weights, scales, biases and block.
        may_widen: False where the FP8 weights cannot be let go, so that widened ones would come on top.

    Raises:
        RepairError: no candidate reproduces the float64 result.
    """
    weight = call.weights[0]
    known = {candidate.name: candidate for candidate in experts.candidates()}
    forced = choice.forced(known)
    if forced is not None:
        return choice.Choice(problem.key(), forced)
    if choice.is_fake(weight):
        return choice.Choice(problem.key(), experts.PER_CALL.name)
    roomy = may_widen and memory.may_take(problem.numel * weight.element_size(), weight.device)
    return choice.decide(problem.key(), known, lambda candidate: _try(problem, candidate, call), weight.device, roomy=roomy)


def prepare(problem: ExpertProblem, call: ExpertCall, *, may_widen: bool = True) -> tuple[choice.Choice, PreparedExperts]:
    """Choose, and bring the layer into the chosen form; what it takes is booked against the memory budget."""
    made = choose(problem, call, may_widen=may_widen)
    candidate = next(c for c in experts.candidates() if c.name == made.candidate)
    prepared = candidate.prepare(problem, call.weights, call.scales)
    memory.take((candidate.bytes_per_weight - 1) * problem.numel, call.weights[0].device)
    return made, prepared
