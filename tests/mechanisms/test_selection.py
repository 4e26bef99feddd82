"""Private selection: the law of the index by chi-square, and ε by the ratio of probabilities."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from coterie import rng
from coterie.mechanisms.events import SelectionRelease
from coterie.mechanisms.randomness import NoiseSource
from coterie.mechanisms.selection import ExponentialSelection, RandomizedArgmin

ALPHA = 1e-9
LOSS = st.floats(0, 20) | st.sampled_from([math.nan, math.inf, -math.inf])
EPSILONS = st.floats(0.01, 20)


@st.composite
def two_loss_vectors(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    k = draw(st.integers(1, 8))
    losses = st.lists(LOSS, min_size=k, max_size=k)
    return draw(losses), draw(losses)


def p_value(mechanism: RandomizedArgmin | ExponentialSelection, losses: list[float], law: list[float], rng) -> float:
    """Chi-square of 10,000 draws against ``law``."""
    counts = np.bincount([mechanism(losses, rng=rng) for _ in range(10_000)], minlength=len(law))
    return float(stats.chisquare(counts, 10_000 * np.array(law)).pvalue)


def test_randomized_response_has_its_law(source: NoiseSource) -> None:
    losses = [3.0, 1.0, 2.0, 9.0]

    def law(epsilon: float) -> list[float]:
        keep = math.exp(epsilon) / (math.exp(epsilon) + 3)
        return [(1 - keep) / 3, keep, (1 - keep) / 3, (1 - keep) / 3]

    mechanism = RandomizedArgmin(1.5)
    assert mechanism.probabilities(losses) == pytest.approx(law(1.5), rel=1e-14)
    assert p_value(mechanism, losses, law(1.5), source) > ALPHA
    for wrong in (1.5 * 1.2, 1.5 / 1.2):
        assert p_value(mechanism, losses, law(wrong), source) < ALPHA


def test_the_exponential_mechanism_has_its_law(source: NoiseSource) -> None:
    losses = [3.0, 1.0, 2.0, 9.0]  # 9 is clipped to the bound 4

    def law(epsilon: float) -> list[float]:
        weights = [math.exp(-epsilon * loss / (2 * 4.0)) for loss in (3.0, 1.0, 2.0, 4.0)]
        return [weight / sum(weights) for weight in weights]

    mechanism = ExponentialSelection(4.0, loss_bound=4.0)
    assert mechanism.probabilities(losses) == pytest.approx(law(4.0), rel=1e-14)
    assert p_value(mechanism, losses, law(4.0), source) > ALPHA
    for wrong in (4.0 * 1.2, 4.0 / 1.2):
        assert p_value(mechanism, losses, law(wrong), source) < ALPHA


@given(two_loss_vectors(), EPSILONS)
def test_no_two_data_sets_give_a_ratio_above_epsilon(pair: tuple[list[float], list[float]], epsilon: float) -> None:
    for mechanism in (RandomizedArgmin(epsilon), ExponentialSelection(epsilon, loss_bound=5.0)):
        one, other = (mechanism.probabilities(losses) for losses in pair)
        assert one.sum() == pytest.approx(1.0, rel=1e-12)
        assert np.abs(np.log(one) - np.log(other)).max() <= epsilon * (1 + 1e-12) + 1e-12


def test_randomized_response_attains_epsilon() -> None:
    mechanism = RandomizedArgmin(0.7)
    one, other = mechanism.probabilities([0.0, 1.0, 1.0]), mechanism.probabilities([1.0, 0.0, 1.0])
    assert math.log(one[0] / other[0]) == pytest.approx(0.7, rel=1e-14)


def test_the_exponential_mechanism_comes_near_epsilon() -> None:
    # One loss goes from 0 to B and all the others from B to 0: with k large the normaliser moves by e^{ε/2} too.
    mechanism = ExponentialSelection(0.7, loss_bound=2.0)
    one = mechanism.probabilities([0.0] + [2.0] * 10_000)
    other = mechanism.probabilities([2.0] + [0.0] * 10_000)
    assert math.log(one[0] / other[0]) == pytest.approx(0.7, rel=1e-3)


def test_the_keep_probability_is_that_of_papers_md() -> None:
    # (K = 2, ε = 1) and (K = 10, ε = 1), part (b), Corollary 1.
    assert RandomizedArgmin(1.0).probabilities([0.0, 1.0])[0] == pytest.approx(0.7310586, abs=5e-8)
    assert RandomizedArgmin(1.0).probabilities([0.0] + [1.0] * 9)[0] == pytest.approx(0.2319693, abs=5e-8)


def test_non_finite_losses_are_the_worst_and_ties_go_to_the_lowest_index() -> None:
    argmin = RandomizedArgmin(50.0)
    assert argmin([math.nan, -math.inf, 3.0, 3.0], rng=rng.seeded(1)) == 2
    assert argmin([math.nan, math.nan], rng=rng.seeded(1)) == 0
    exponential = ExponentialSelection(2.0, loss_bound=4.0)
    assert exponential.probabilities([math.nan, -math.inf, math.inf, 4.0]) == pytest.approx([0.25] * 4)
    assert exponential.probabilities([-3.0, 0.0]) == pytest.approx([0.5] * 2)


def test_one_hypothesis_is_always_chosen_and_large_epsilon_does_not_overflow() -> None:
    for mechanism in (RandomizedArgmin(1e5), ExponentialSelection(1e5, loss_bound=1.0)):
        assert mechanism([5.0], rng=rng.secure()) == 0
        assert mechanism([0.9, 0.1, 0.5], rng=rng.secure()) == 1


def test_the_losses_are_not_written_to() -> None:
    losses = np.array([math.nan, 1.0])
    RandomizedArgmin(1.0)(losses, rng=rng.seeded(1))
    assert np.isnan(losses[0])


def test_the_record_of_a_choice() -> None:
    assert RandomizedArgmin(0.5).event(3) == SelectionRelease("randomized-argmin", 3, 0.5)
    assert ExponentialSelection(0.5, loss_bound=1.0).event(3) == SelectionRelease("exponential", 3, 0.5)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: RandomizedArgmin(0.0), "epsilon > 0 and finite, found 0.0"),
        (lambda: RandomizedArgmin(math.inf), "epsilon > 0 and finite, found inf"),
        (lambda: ExponentialSelection(-1.0, 1.0), "epsilon > 0 and finite, found -1.0"),
        (lambda: ExponentialSelection(1.0, 0.0), "loss_bound > 0 and finite, found 0.0"),
        (lambda: RandomizedArgmin(1.0).probabilities([]), r"losses .* found shape \(0,\)"),
        (lambda: RandomizedArgmin(1.0).probabilities([[1.0]]), r"losses .* found shape \(1, 1\)"),
        (lambda: RandomizedArgmin(1.0).event(0), "hypotheses .* found 0"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
