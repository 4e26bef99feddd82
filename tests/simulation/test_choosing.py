"""Choosing k by the one-standard-error rule."""

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from coterie.rng import seeded
from coterie.simulation.choosing import standard_error, suggest


def records(losses: Mapping[int, Sequence[float | None]], **at: float) -> list[dict[str, object]]:
    return [
        {**at, "k": k, "seed": seed, "honest_loss": loss} for k, own in losses.items() for seed, loss in enumerate(own)
    ]


BEST = [1.0, 1.1, 0.9, 1.2, 0.8]  # median 1.0; its deviations 0, 0.1, 0.1, 0.2, 0.2 have the median 0.1
ERROR = math.sqrt(math.pi / 2) * 0.14826 / math.sqrt(5)  # 0.0831


@pytest.mark.parametrize(("shift", "expected"), [(0.99 * ERROR, 3), (1.01 * ERROR, 5)])
def test_the_smallest_k_within_one_standard_error_of_the_best(shift: float, expected: int) -> None:
    middling = [1.0 + shift, 5.0, 0.0, 1.0 + shift, 1.0 + shift]
    runs = records({7: BEST, 5: BEST, 3: middling, 1: [9.0] * 5})
    (found,) = suggest(runs, ["k"])
    assert (found.k, found.best, found.seeds, found.at) == (expected, 5, 5, {})
    assert found.standard_error == pytest.approx(ERROR, rel=1e-12)
    assert found.medians == pytest.approx({1: 9.0, 3: 1.0 + shift, 5: 1.0, 7: 1.0})
    said = str(found)
    assert said.startswith(f"take k = {expected}: ")
    assert "0.083" in said
    assert "1 (k = 5, 5 seeds)" in said
    assert ("1.08227" in said) == (expected == 3)


def test_one_run_that_diverged_does_not_choose() -> None:
    # By means and their standard errors, k = 1 would be within one of everything.
    runs = records({3: [*BEST[:4], 3.4e38], 1: [2.0] * 5})
    (found,) = suggest(runs, ["k"])
    assert found.k == 3


def test_each_combination_of_other_letters_has_its_own() -> None:
    runs = [
        *records({1: BEST, 3: [2.0] * 5}, nu=5.0, C=0.1),
        *records({1: [9.0] * 5, 3: BEST}, nu=0.0, C=0.1),
    ]
    found = suggest(runs, ["nu", "k", "C"])
    assert [(one.k, one.at) for one in found] == [(1, {"nu": 5.0, "C": 0.1}), (3, {"nu": 0.0, "C": 0.1})]
    assert str(found[0]).startswith("at nu = 5, C = 0.1: take k = 1")


def test_nothing_is_suggested_from_a_single_seed_a_single_k_or_no_losses() -> None:
    assert suggest(records({1: [1.0], 3: [0.5]}), ["k"]) == []
    assert suggest(records({3: BEST}), ["k"]) == []
    assert suggest(records({1: [1.0, None, None], 3: BEST}), ["k"]) == []
    assert suggest(records({1: [None] * 5, 3: [None] * 5}), ["k"]) == []
    assert suggest([{"nu": 1.0, "honest_loss": 1.0}] * 4, ["nu"]) == []
    (found,) = suggest(records({1: [1.0, None, None], 3: BEST, 5: [2.0, 2.0, None]}), ["k"])
    assert list(found.medians) == [3, 5]


def test_a_k_that_is_passed_over_is_named() -> None:
    runs = records({7: [None] * 5, 1: [1.0, None, None], 3: BEST, 5: [2.0, 2.0, None]})
    (found,) = suggest(runs, ["k"])
    assert found.passed_over == (1, 7)
    assert str(found).endswith("; k = 1, k = 7: passed over, of fewer than 2 runs with an honest loss")
    (whole,) = suggest(records({3: BEST, 5: BEST}), ["k"])
    assert whole.passed_over == ()
    assert "passed over" not in str(whole)


def test_the_standard_error_is_that_of_medians_of_normal_losses() -> None:
    drawn = seeded(3).normal(10.0, 2.0, (4000, 41))
    spread = float(np.std(np.median(drawn, axis=1)))
    # √(π/2) is for many seeds; without it the answer would be 20 % too small.
    assert statistics.median(standard_error(own) for own in drawn.tolist()) == pytest.approx(spread, rel=0.06)
    assert standard_error([1.0, 1.0, 1.0]) == 0.0
