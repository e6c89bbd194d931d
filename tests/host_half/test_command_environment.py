"""Variables of a plan beside those that a person has set."""

from __future__ import annotations

import pytest

from xpufp8.command import Items, assignments, environment_for, shell_line
from xpufp8.target import Target

NAME = "VLLM_DISABLED_KERNELS"


@pytest.mark.parametrize(
    ("typed", "items", "wanted"),
    [
        (None, [f"{NAME}=A"], "A"),
        ("Mine", [f"{NAME}=A"], "Mine,A"),
        ("Mine, Other,", [f"{NAME}=A"], "Mine,Other,A"),
        ("Mine,A", [f"{NAME}=A"], "Mine,A"),
        ("Mine", [f"{NAME}=A", f"{NAME}=B"], "Mine,A,B"),
        ("Mine", [f"{NAME}="], ""),
        ("Mine", [f"{NAME}=", f"{NAME}=B"], "B"),
        ("", [f"{NAME}=A"], "A"),
    ],
)
def test_kernels_that_a_person_disabled_stay_disabled(
    monkeypatch: pytest.MonkeyPatch, typed: str | None, items: list[str], wanted: str
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if typed is not None:
        monkeypatch.setenv(NAME, typed)
    env = environment_for(Target("python", "cpu"), Items((), tuple(items)), None)
    assert env == {NAME: wanted}
    assert shell_line(["vllm"], env).startswith(f"{NAME}=")


def test_other_variables_are_set_and_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCL_SEND", "topo")
    monkeypatch.setenv(NAME, "Mine")
    assert Items((), ("CCL_SEND=direct CCL_RECV=direct",)).variables == {"CCL_SEND": "direct", "CCL_RECV": "direct"}
    assert assignments([f"{NAME}=A"]) == {NAME: "A"}
