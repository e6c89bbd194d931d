"""Asking choosers of any release: arguments by name, refusals as they fall, and nothing left changed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from probes.kernel_table_ask import Refusals, UnknownSignatureError, fill, raised_in, refusal_lines, replaced, unbuilt
from probes.kernel_table_live import option_value


def choose_old(config, compute_capability=None): ...  # type: ignore[no-untyped-def]  # a chooser as vLLM writes it


def choose_new(config, possible_kernels, force_kernel=None, *, quantization, **extra): ...  # type: ignore[no-untyped-def]


@dataclass
class Config:
    weight_shape: tuple[int, int]
    out_dtype: str
    input_dtype: str = "bf16"


FAILED = "Failed to find a kernel that can implement the"
POOL = {"config": 1, "possible_kernels": 2, "quantization": 3, "weight_shape": (4, 5), "out_dtype": "fp16"}


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (choose_old, {"config": 1}),
        (choose_new, {"config": 1, "possible_kernels": 2, "quantization": 3}),
        (Config, {"weight_shape": (4, 5), "out_dtype": "fp16"}),
        (lambda: None, {}),
    ],
)
def test_only_what_a_signature_asks_for_is_passed(function: object, arguments: dict[str, object]) -> None:
    assert fill(function, POOL) == arguments  # type: ignore[arg-type]  # parametrized over callables


def test_a_parameter_that_is_not_known_is_named() -> None:
    with pytest.raises(UnknownSignatureError, match=r"choose_new .*'quantization'"):
        fill(choose_new, {"config": 1, "possible_kernels": 2})


class Base:
    @classmethod
    def is_supported(cls, capability: int | None = None) -> tuple[bool, str | None]:
        return cls.__name__ != "NoDevice", "needs a device"

    @classmethod
    def can_implement(cls, config: object) -> tuple[bool, str | None]:
        return True, None

    @staticmethod
    def is_supported_config(cls: type, config: object) -> tuple[bool, str | None]:  # noqa: PLW0211 - as vLLM's experts declare it
        return False, f"{cls.__name__} was asked"


class NoDevice(Base):
    def __init__(self, config: object) -> None:
        raise AssertionError("constructed")


class Asks(Base):
    @classmethod
    def can_implement(cls, config: object) -> tuple[bool, str | None]:
        ok, _ = Base.can_implement(config)
        NoDevice.is_supported()
        return not ok, "asked others first"


class Takes(Base):
    @classmethod
    def is_supported(cls, capability: int | None = None) -> tuple[bool, str | None]:
        return super().is_supported(capability)


def test_refusals_are_heard_in_order_and_once_with_the_name_of_the_class_that_was_asked() -> None:
    with Refusals(("is_supported", "can_implement", "is_supported_config")) as refusals:
        refusals.listen([NoDevice, Asks, Takes])
        for _ in range(2):
            for cls in (NoDevice, Asks, Takes):
                _ = cls.is_supported()[0] and cls.can_implement(None)[0]
        Takes.is_supported_config(Takes, None)
    assert refusals.told() == ["NoDevice: needs a device", "Asks: asked others first", "Takes: Takes was asked"]
    assert refusals.asked == {"NoDevice", "Asks", "Takes"}


def test_listening_leaves_the_classes_as_they_were() -> None:
    before = {cls: dict(vars(cls)) for cls in (Base, NoDevice, Asks, Takes)}
    with pytest.raises(RuntimeError), Refusals(("is_supported", "can_implement")) as refusals:  # noqa: PT012 - both ways out
        refusals.listen([NoDevice, Asks, Takes])
        raise RuntimeError
    with unbuilt([NoDevice, Takes]):
        assert isinstance(NoDevice(None), NoDevice)
    assert {cls: dict(vars(cls)) for cls in before} == before
    with pytest.raises(AssertionError):
        NoDevice(None)


def test_a_replaced_attribute_comes_back() -> None:
    class Thing:
        kept = 1

    thing = Thing()
    with replaced(thing, "kept", 2):
        assert thing.kept == 2
    assert thing.kept == 1
    assert vars(thing) == {}


@pytest.mark.parametrize(
    ("message", "lines"),
    [
        (f"{FAILED} ScaledMM linear layer. Reasons: \nA needs X.\nB needs Y.", ["A needs X.", "B needs Y."]),
        (f"{FAILED} MXFP8 linear layer. Reasons: \n", []),
        ("Forced NVFP4 kernel K is not supported: no", ["Forced NVFP4 kernel K is not supported: no"]),
    ],
)
def test_reasons_are_taken_from_the_message_word_for_word(message: str, lines: list[str]) -> None:
    assert refusal_lines(message) == lines


def test_an_exception_belongs_to_the_module_whose_function_raised_it() -> None:
    import json.decoder

    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert raised_in(caught.value, json.decoder)
    assert not raised_in(caught.value, json)


@pytest.mark.parametrize(
    ("args", "value"),
    [
        (["--linear-backend", "torch"], "torch"),
        (["--linear-backend=torch"], "torch"),
        (["--linear_backend=triton", "--linear-backend", "torch"], "torch"),
        (["--linear-backend"], None),
        (["--model", "linear-backend"], None),
        ([], None),
    ],
)
def test_the_backend_that_was_typed(args: list[str], value: str | None) -> None:
    assert option_value(args, "linear_backend") == value
