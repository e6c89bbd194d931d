"""Comparing a fake with the op itself: shape, dtype, stride and device of every output, on calls that really run.

A fake that disagrees is refused. Where no kernel can run, nothing was compared, and that is said too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from xpufp8.runtime.catalogue import RepairError


@dataclass(frozen=True)
class Comparison:
    """What came of comparing a fake with its op."""

    op: str
    outcome: Literal["agrees", "differs", "not compared"]
    calls: int = 0
    """Calls that ran and were compared."""
    differences: list[str] = field(default_factory=list)
    """In words, one an output that differs; for ``not compared``, why no call ran."""


def _outputs(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _to_fake(value: Any, mode: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_to_fake(item, mode) for item in value)
    return value


def differences(fake: Any, real: Any) -> list[str]:
    """Name each output of ``fake`` that is not like that of ``real``; strides count only where a dimension has more than one element."""
    import torch

    left, right = _outputs(fake), _outputs(real)
    if len(left) != len(right):
        return [f"{len(left)} outputs, the kernel returns {len(right)}"]
    found = []
    for index, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        if not isinstance(theirs, torch.Tensor) or not isinstance(ours, torch.Tensor):
            if isinstance(ours, torch.Tensor) != isinstance(theirs, torch.Tensor):
                found.append(f"output {index}: {type(ours).__name__}, the kernel returns {type(theirs).__name__}")
            continue
        pairs = {
            "shape": (tuple(ours.shape), tuple(theirs.shape)),
            "dtype": (ours.dtype, theirs.dtype),
            "stride": tuple(tuple(s for s, size in zip(t.stride(), t.shape, strict=True) if size != 1) for t in (ours, theirs)),
            "device": (ours.device.type, theirs.device.type),
        }
        found += [f"output {index}: {what} {a}, the kernel returns {b}" for what, (a, b) in pairs.items() if a != b]
    return found


def compare(op: str, call: Callable[..., Any], fake: Callable[..., Any], samples: Sequence[tuple[Any, ...]]) -> Comparison:
    """Run an op and a fake of it on the same arguments and compare what they return.

    Args:
        op: its name, for the answer.
        call: the op, run on real tensors.
        fake: run on fake copies of them.
        samples: argument lists.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    refused, found, ran = [], [], 0
    for sample in samples:
        # Taken first: the op may change an argument in place.
        mode = FakeTensorMode(allow_non_fake_inputs=False)
        pretend = [_to_fake(value, mode) for value in sample]
        try:
            real = call(*sample)
        except Exception as error:  # noqa: BLE001 - a kernel that cannot run here leaves the fake unverified, whatever it raised
            refused.append(f"{type(error).__name__}: {error}")
            continue
        ran += 1
        with mode:
            found += differences(fake(*pretend), real)
    if not ran:
        return Comparison(op, "not compared", 0, refused or ["no call to compare with"])
    return Comparison(op, "differs" if found else "agrees", ran, found)


def require(comparison: Comparison) -> Comparison:
    """Return a comparison that did not find the fake wrong.

    Raises:
        RepairError: the fake differs from the kernel.
    """
    if comparison.outcome == "differs":
        raise RepairError(
            f"fake:{comparison.op}: refused, it is not what the kernel returns: {'; '.join(comparison.differences)}"
        )
    return comparison


def check_registered(op: str, samples: Sequence[tuple[Any, ...]]) -> Comparison:
    """Compare the fake of the catalogue for a registered op with its kernel.

    Raises:
        RepairError: the op is not registered, is not in the catalogue, or its fake is wrong.
    """
    from xpufp8.runtime import fakes

    overload = fakes.find_op(op)
    known = fakes.known_fake(overload) if overload is not None else None
    if known is None:
        raise RepairError(f"fake:{op}: nothing to verify, the op is not registered or what it returns is not known")
    return require(compare(op, overload, fakes.implementation(overload, known), samples))


def opcheck(op: str, sample: tuple[Any, ...], tests: Sequence[str] = ("test_schema", "test_faketensor")) -> dict[str, str]:
    """Run ``torch.library.opcheck`` on a registered op and return each test's verdict, ``SUCCESS`` or what failed."""
    import torch

    from xpufp8.runtime import fakes

    overload = fakes.find_op(op)
    verdicts = torch.library.opcheck(overload, sample, test_utils=tuple(tests), raise_exception=False)
    return {name: str(verdict) for name, verdict in verdicts.items()}
