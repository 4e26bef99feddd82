"""Calibration meets its target from the safe side, and not by much more than it must."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.mechanisms.accounting import price, pure_loss
from coterie.mechanisms.calibration import (
    MOST_ROUNDS,
    compare_with_gaussian,
    largest_radius,
    mean_normal_norm,
    noise_multipliers,
    planned_ledger,
    planned_release,
    rounds_left,
)
from coterie.mechanisms.events import GaussianRelease, Neighbourhood, Noise, UpdateRelease
from coterie.mechanisms.privacy_loss import GaussianLoss


@settings(deadline=None, max_examples=12)
@given(
    epsilon=st.floats(0.05, 50),
    delta=st.floats(1e-8, 1e-2),
    rounds=st.integers(1, 200),
    layers=st.lists(st.integers(1, 2000), min_size=1, max_size=3),
)
def test_accounting_undoes_calibration_from_the_safe_side(
    epsilon: float, delta: float, rounds: int, layers: list[int]
) -> None:
    found = noise_multipliers(epsilon=epsilon, delta=delta, rounds=rounds, layers=layers)

    def at(multiplier: float) -> dict[str, float]:
        cost = planned_ledger(layers=layers, noise_multiplier=multiplier, rounds=rounds).price(delta=delta)
        return {name: getattr(cost, name) for name in ("pure", "tight", "local_pure", "local_tight")}

    for name in ("pure", "tight", "local_pure", "local_tight"):
        multiplier = getattr(found, name)
        assert at(multiplier)[name] <= epsilon
        assert at(multiplier * 0.99)[name] > epsilon
    assert found.tight <= found.pure


@settings(deadline=None, max_examples=12)
@given(
    multiplier=st.floats(0.5, 100),
    delta=st.floats(1e-8, 1e-2),
    rounds=st.integers(1, 100),
    dimension=st.integers(1, 2000),
)
def test_calibration_undoes_accounting(multiplier: float, delta: float, rounds: int, dimension: int) -> None:
    cost = planned_ledger(layers=[dimension], noise_multiplier=multiplier, rounds=rounds).price(delta=delta)
    if cost.tight < 1e-6:
        return  # δ alone hides everything: any larger ν costs as little
    found = noise_multipliers(epsilon=cost.tight, delta=delta, rounds=rounds, layers=[dimension])
    assert found.tight == pytest.approx(multiplier, rel=5e-3)
    again = planned_ledger(layers=[dimension], noise_multiplier=found.tight, rounds=rounds).price(delta=delta)
    assert again.tight <= cost.tight


def test_pure_calibration_is_the_closed_form() -> None:
    found = noise_multipliers(epsilon=2.4, delta=1e-5, rounds=6, layers=[2])
    assert found.pure == pytest.approx(5.0, rel=1e-12)
    assert found.local_pure == pytest.approx(10.0, rel=1e-12)


def test_a_planned_release_costs_n_over_the_multiplier() -> None:
    assert pure_loss([planned_release([8, 3], 3.0)]) == pytest.approx(11 / 3)


@pytest.mark.parametrize(
    ("budget", "layers", "multiplier", "left"),
    [(22.0, [11], 3.0, 6), (200.0, [11], 3.0, 54), (200.0, [8, 3], 3.0, 54), (2.4, [2], 5.0, 6), (3.6, [11], 3.0, 0)],
)
def test_rounds_within_a_pure_budget(budget: float, layers: list[int], multiplier: float, left: int) -> None:
    release = planned_release(layers, multiplier)
    assert rounds_left(budget=budget, release=[release]) == left
    assert pure_loss([release] * left) <= budget * (1 + 1e-12) < pure_loss([release] * (left + 1))


def test_rounds_left_after_some_are_spent() -> None:
    release = planned_release([11], 3.0)
    assert rounds_left(budget=200.0, release=[release], spent=[release] * 50) == 4
    assert rounds_left(budget=200.0, release=[release], spent=[release] * 55) == 0
    assert rounds_left(budget=200.0, release=[release], spent=[GaussianRelease(11, 1.0, 1.0)]) == 0


def test_rounds_within_a_tight_budget_are_as_many_as_fit() -> None:
    release, other = planned_release([11], 3.0), planned_release([11], 5.0)
    left = rounds_left(budget=30.0, release=[release], spent=[other] * 5, delta=1e-5)
    assert price([other] * 5 + [release] * left, delta=1e-5).tight <= 30.0
    assert price([other] * 5 + [release] * (left + 1), delta=1e-5).tight > 30.0
    assert left > rounds_left(budget=30.0, release=[release], spent=[other] * 5)
    assert rounds_left(budget=0.1, release=[release], delta=1e-5) == 0


def test_more_rounds_than_are_looked_for_are_reported_as_the_most() -> None:
    assert rounds_left(budget=5.0, release=[planned_release([11], 1e6)], delta=1e-5) == MOST_ROUNDS


def test_the_largest_radius_meets_the_target() -> None:
    radius = largest_radius(epsilon=8.0, delta=1e-5, rounds=20, dimension=11, noise_epsilon=3.0)

    def cost(at: float) -> float:
        return price([UpdateRelease(Neighbourhood.FIXED, (Noise(11, 3.0, at),))] * 20, delta=1e-5).tight

    assert cost(radius) <= 8.0 < cost(1.01 * radius)


@pytest.mark.parametrize(
    ("dimension", "norm"), [(1, math.sqrt(2 / math.pi)), (2, math.sqrt(math.pi / 2)), (3, 2 * math.sqrt(2 / math.pi))]
)
def test_mean_norm_of_a_normal_vector_is_the_closed_form(dimension: int, norm: float) -> None:
    assert mean_normal_norm(dimension) == pytest.approx(norm, rel=1e-12)


def test_mean_norm_of_a_long_normal_vector() -> None:
    sample = np.linalg.norm(np.random.default_rng(1).standard_normal((4000, 50)), axis=1)
    assert mean_normal_norm(50) == pytest.approx(sample.mean(), rel=5e-3)
    assert mean_normal_norm(1_206_590) == pytest.approx(math.sqrt(1_206_590), rel=1e-6)


def test_comparison_uses_gaussian_noise_of_the_same_mean_norm() -> None:
    found = compare_with_gaussian(noise_multiplier=5.0, delta=1e-5, rounds=10, layers=[8, 3])
    events = [GaussianRelease(size, 5.0 / mean_normal_norm(size), 1.0) for size in (8, 3)] * 10
    assert found.gaussian == pytest.approx(price(events, delta=1e-5).tight, rel=1e-9)
    assert found.laplace == price([planned_release([8, 3], 5.0)] * 10, delta=1e-5).tight
    norm = math.sqrt(10 * (mean_normal_norm(8) ** 2 + mean_normal_norm(3) ** 2))
    assert GaussianLoss(norm / found.gaussian_noise_multiplier).epsilon(1e-5) <= found.laplace
    assert GaussianLoss(norm / found.gaussian_noise_multiplier * 1.001).epsilon(1e-5) > found.laplace


def test_few_rounds_favour_laplace_and_many_favour_gaussian_noise_in_few_dimensions() -> None:
    few = compare_with_gaussian(noise_multiplier=5.0, delta=1e-5, rounds=1, layers=[11])
    many = compare_with_gaussian(noise_multiplier=16.5, delta=1e-5, rounds=100, layers=[11])
    assert few.laplace < few.gaussian
    assert many.laplace > many.gaussian


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, "epsilon > 0 and finite, found 0.0"),
        ({"epsilon": math.inf}, "epsilon > 0 and finite, found inf"),
        ({"delta": 0.0}, "delta above 0 and below 1, found 0.0"),
        ({"rounds": 0}, "rounds to be a whole number >= 1, found 0"),
        ({"layers": []}, "at least one size, found none"),
        ({"layers": [8, 0]}, "layer size to be a whole number >= 1, found 0"),
    ],
)
def test_impossible_targets_are_named_with_their_value(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"epsilon": 1.0, "delta": 1e-5, "rounds": 3, "layers": [11], **change}
    with pytest.raises(ValueError, match=message):
        noise_multipliers(**arguments)  # type: ignore[arg-type]


def test_impossible_budgets_and_radii_are_named_with_their_value() -> None:
    release = planned_release([11], 3.0)
    with pytest.raises(ValueError, match=r"budget > 0 and finite, found -1.0"):
        rounds_left(budget=-1.0, release=[release])
    with pytest.raises(ValueError, match="a release that costs something"):
        rounds_left(budget=1.0, release=[])
    with pytest.raises(ValueError, match=r"noise_epsilon > 0 and finite, found 0.0"):
        largest_radius(epsilon=1.0, delta=1e-5, rounds=1, dimension=3, noise_epsilon=0.0)
    with pytest.raises(ValueError, match=r"noise_multiplier > 0 and finite, found -3.0"):
        planned_release([11], -3.0)
