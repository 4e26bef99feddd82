"""The statement's figures and warnings follow from the settings, and say no more than the mechanisms do."""

from pathlib import Path

import pytest

from coterie.client.policy import policy_for
from coterie.client.statement import statement
from coterie.config import ClientSettings
from coterie.parameters import Entry, Layer, Layout

LAYOUT = Layout(entries=(Entry("a", (7,), 0, 7), Entry("b", (4,), 7, 11)), layers=(Layer("a", 0, 7), Layer("b", 7, 11)))


def told(**changes: object) -> str:
    values = {"task": "t", "state": Path("s"), "noise_multiplier": 3.0, "budget": 22.0, **changes}
    settings = ClientSettings.model_validate(values)
    lines = statement(settings, policy_for(settings, LAYOUT, {"a": 0.5, "b": 2.0}))
    assert all("\n" not in line for line in lines)
    return "\n".join(lines)


def test_a_fixed_release_is_stated_with_its_cost_and_radii() -> None:
    text = told()
    for part in ("ν = 3", "a (7 numbers, C = 0.5)", "b (4 numbers, C = 2)", "11/3 = 3.667", "within C"):
        assert part in text
    assert "same hypothesis" in text  # without it the sentence is false: the update starts from another vector
    assert "twice" in text  # 2n/ν for any two data sets
    assert "RELATIVE" not in text


def test_a_relative_release_is_called_no_guarantee() -> None:
    text = told(neighbourhood="relative")
    assert "RELATIVE" in text
    assert "NOT a formal guarantee" in text
    assert "shorter than 0.001 of the clipping norm" in text  # the floor that a zero update is noised by
    assert "within C" not in text  # the fixed mode's promise


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 6),  # 22 / (11/3) exactly
        ({"budget": 21.999}, 5),
        ({"budget": 3.6}, 0),
        ({"selection": "randomized", "selection_epsilon": 1.0}, 4),  # 22 / 4.667
        ({"noise_multiplier": 0.1, "budget": 330.0}, 3),
    ],
)
def test_the_number_of_releases_in_the_budget(changes: dict[str, object], count: int) -> None:
    assert f"at least {count} releases" in told(**changes)


def test_what_is_not_covered_is_said() -> None:
    text = told()
    assert "NOT covered: which hypothesis was chosen" in text
    assert "its loss and score leave as they are" in text
    assert "number of rows" not in text
    assert "floating-point" in text
    assert "takes part" in text


def test_what_was_switched_off_is_not_warned_of() -> None:
    text = told(validation=False, selection="randomized", selection_epsilon=0.5, share_sample_count=True)
    assert "its loss and score" not in text
    assert "which hypothesis was chosen" not in text
    assert "randomized, ε = 0.5 a round" in text
    assert "NOT covered: the number of rows" in text


def test_a_budget_beyond_every_use_is_no_crash() -> None:
    assert "releases" in told(budget=1e308, noise_multiplier=1e6)
