"""Composed privacy losses: golden brackets, independent computations, and the safe side of every approximation."""

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from coterie.mechanisms import privacy_loss
from coterie.mechanisms.composition import Loss, composed_epsilon, connect_the_dots
from coterie.mechanisms.privacy_loss import Atoms, GaussianLoss, L2LaplaceLoss, ResponseLoss


@pytest.mark.parametrize(
    ("dimension", "multiplier", "rounds", "low", "high"),
    [
        (11, 5, 1, 1.9305, 1.9310),
        (11, 5, 6, 7.106, 7.110),
        (11, 5, 10, 9.965, 9.971),
        (11, 3, 100, 103.217, 103.237),
        (100, 10, 10, 17.658, 17.678),
        (1000, 30, 100, 99.618, 99.638),
    ],
)
def test_composed_epsilon_is_never_below_the_golden_bracket_and_hardly_above(
    dimension: int, multiplier: float, rounds: int, low: float, high: float
) -> None:
    found = composed_epsilon({L2LaplaceLoss(dimension, dimension / multiplier): rounds}, 1e-5)
    assert low <= found <= 1.005 * high


@pytest.mark.parametrize("mu", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("rounds", [2, 50, 5000])
def test_composed_gaussians_are_one_gaussian_from_the_safe_side(mu: float, rounds: int) -> None:
    """μ² adds up exactly: this sees every error of the grid, the tails and the transforms together."""
    exact = GaussianLoss(mu * math.sqrt(rounds))
    for delta in (1e-3, 1e-6):
        found = composed_epsilon({GaussianLoss(mu): rounds}, delta)
        assert exact.epsilon(delta) <= found <= 1.002 * exact.epsilon(delta) + 1e-9


def test_losses_beyond_the_range_of_exponentials_are_priced_from_the_safe_side() -> None:
    for mu in (40.0, 1000.0):
        exact = GaussianLoss(mu * math.sqrt(3)).epsilon(1e-5)
        assert exact > 2000
        assert exact <= composed_epsilon({GaussianLoss(mu): 3}, 1e-5) <= 1.002 * exact


def test_one_dimension_agrees_with_the_laplace_mechanism_of_dp_accounting() -> None:
    peer = privacy_loss_distribution.from_laplace_mechanism(1 / 0.7, value_discretization_interval=1e-3)
    for rounds in (2, 30):
        expected = peer.self_compose(rounds).get_epsilon_for_delta(1e-5)
        assert composed_epsilon({L2LaplaceLoss(1, 0.7): rounds}, 1e-5) == pytest.approx(expected, rel=1e-3)


def test_randomized_response_agrees_with_dp_accounting() -> None:
    hypotheses, epsilon = 4, 0.9
    noise = hypotheses / (math.exp(epsilon) + hypotheses - 1)  # theirs: the chance of a fresh uniform answer
    peer = privacy_loss_distribution.from_randomized_response(noise, hypotheses, value_discretization_interval=1e-4)
    expected = peer.self_compose(20).get_epsilon_for_delta(1e-5)
    assert composed_epsilon({ResponseLoss(hypotheses, epsilon): 20}, 1e-5) == pytest.approx(expected, rel=2e-3)


def simulated_delta(losses: Mapping[Loss, int], epsilon: float, rng: np.random.Generator) -> tuple[float, float]:
    """A 1 − 1e-9 confidence interval of δ(ε) = E[(1 − e^(ε−ΣL))₊] from simulated losses (Hoeffding)."""
    count = 200_000
    total = np.zeros(count)
    for loss, times in losses.items():
        assert isinstance(loss, L2LaplaceLoss)
        shape = (loss.dimension - 1) / 2
        for _ in range(times):
            radius, cosine = rng.standard_gamma(loss.dimension, count), 2 * rng.beta(shape, shape, count) - 1
            total += np.sqrt(radius**2 - 2 * radius * loss.distance * cosine + loss.distance**2) - radius
    gain = -np.expm1(np.minimum(0.0, epsilon - total))
    margin = math.sqrt(math.log(2 / 1e-9) / (2 * count))
    return float(gain.mean()) - margin, float(gain.mean()) + margin


def test_composition_of_unequal_releases_agrees_with_simulation() -> None:
    losses: dict[Loss, int] = {L2LaplaceLoss(11, 2.2): 4, L2LaplaceLoss(3, 1.5): 3, L2LaplaceLoss(200, 9.0): 2}
    for epsilon in (1.0, 3.0, 6.0):
        low, high = simulated_delta(losses, epsilon, np.random.default_rng(30))
        assert composed_epsilon(losses, high) <= epsilon <= composed_epsilon(losses, max(low, 1e-6)) * 1.001
    low, high = simulated_delta(losses, 3.0, np.random.default_rng(31))
    nearer = {L2LaplaceLoss(loss.dimension, loss.distance / 1.05): n for loss, n in losses.items()}  # type: ignore[attr-defined]
    assert composed_epsilon(nearer, low) < 3.0  # a 5 % understatement is seen


@pytest.mark.parametrize("multiplier", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("interval", [0.03125, 1.0, 50.0])
def test_the_split_of_a_wide_loss_is_the_same_with_finer_panels(
    monkeypatch: pytest.MonkeyPatch, multiplier: float, interval: float
) -> None:
    loss = L2LaplaceLoss(20_000, 20_000 / multiplier)
    first, before = connect_the_dots(loss.atoms(interval), interval)
    monkeypatch.setattr(privacy_loss, "_PANELS", 16_384)
    again, after = connect_the_dots(loss.atoms(interval), interval)
    assert again == first
    assert after == pytest.approx(before, rel=1e-9, abs=1e-16)


@settings(deadline=None, max_examples=50)
@given(
    losses=st.lists(st.floats(-3, 3), min_size=1, max_size=8),
    weights=st.lists(st.floats(0.01, 1), min_size=8, max_size=8),
    interval=st.floats(0.01, 1),
)
def test_connected_dots_dominate_and_are_exact_at_the_grid(
    losses: list[float], weights: list[float], interval: float
) -> None:
    masses = np.array(weights[: len(losses)]) / sum(weights[: len(losses)])
    values = np.array(losses)
    first, probabilities = connect_the_dots(Atoms(values, masses, 0.0), interval)
    grid = interval * (first + np.arange(probabilities.size))

    def delta(at: np.ndarray, probability: np.ndarray, epsilon: float) -> float:
        return float(np.maximum(-np.expm1(epsilon - at), 0) @ probability)

    assert probabilities.min() >= 0
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert probabilities @ np.exp(-grid) == pytest.approx(masses @ np.exp(-values), rel=1e-9)
    for epsilon in grid:
        assert delta(grid, probabilities, epsilon) == pytest.approx(delta(values, masses, epsilon), abs=1e-9)
    for epsilon in np.linspace(-3.5, 3.5, 41):
        assert delta(grid, probabilities, epsilon) >= delta(values, masses, epsilon) - 1e-9


def test_a_wide_release_among_narrow_ones_costs_at_most_a_little_extra() -> None:
    """The grid follows the mean square: 1,000 releases far finer than it must not add up to an error."""
    wide = L2LaplaceLoss(1000, 300.0)
    together = composed_epsilon({wide: 1, L2LaplaceLoss(1000, 0.3): 1000}, 1e-5)
    expected = composed_epsilon({wide: 1, GaussianLoss(0.3): 1}, 1e-5)  # what a thousand small ones tend to
    assert together == pytest.approx(expected, rel=2e-3)
    assert together > wide.epsilon(1e-5)


def test_a_delta_below_the_rounding_errors_has_no_price() -> None:
    assert composed_epsilon({L2LaplaceLoss(11, 2.2): 10}, 1e-15) == math.inf
    assert composed_epsilon({L2LaplaceLoss(11, 2.2): 10}, 1e-11) < 22
    assert composed_epsilon({L2LaplaceLoss(11, 2.2): 10_000}, 1e-9) == math.inf
    assert composed_epsilon({L2LaplaceLoss(11, 2.2): 10_000}, 1e-7) < 22_000


def test_the_reserve_for_rounding_covers_what_rounding_did() -> None:
    """At δ close to the reserve the price must still be on the safe side of the exact one."""
    exact = GaussianLoss(0.05 * 100)
    for delta in (1e-7, 3e-8, 1e-8):
        assert composed_epsilon({GaussianLoss(0.05): 10_000}, delta) >= exact.epsilon(delta)


def test_the_order_of_the_releases_does_not_matter() -> None:
    losses: list[tuple[Loss, int]] = [
        (L2LaplaceLoss(11, 2.2), 3),
        (GaussianLoss(0.5), 2),
        (ResponseLoss(3, 0.5), 4),
        (L2LaplaceLoss(8, 1.0), 1),
    ]
    assert len({composed_epsilon(dict(order), 1e-5) for order in itertools.permutations(losses)}) == 1


def test_nothing_released_costs_nothing() -> None:
    assert composed_epsilon({}, 1e-5) == 0
    assert composed_epsilon({L2LaplaceLoss(3, 1.0): 0}, 1e-5) == 0


def test_releases_that_together_hide_within_delta_cost_nothing() -> None:
    total_variation = 3 * L2LaplaceLoss(2, 1e-6).delta(0.0)
    assert composed_epsilon({L2LaplaceLoss(2, 1e-6): 3}, 1.1 * total_variation) == 0


def test_two_releases_agree_with_a_direct_convolution() -> None:
    """P(L₁ + L₂ > ε) style double integral for n = 3, where L has a density in closed form on a fine grid."""
    loss = L2LaplaceLoss(3, 2.0)
    losses, masses = loss.quadrature()
    sums = losses[:, None] + losses[None, :]
    weights = masses[:, None] * masses[None, :]
    for epsilon in (0.5, 1.5, 2.5):
        delta = float((np.maximum(-np.expm1(epsilon - sums), 0) * weights).sum())
        found = composed_epsilon({loss: 2}, delta)
        assert epsilon * (1 - 1e-6) <= found <= epsilon * 1.002


def test_tail_bound_of_a_window_is_negligible() -> None:
    for loss in (L2LaplaceLoss(1000, 33.0), GaussianLoss(1.0)):
        atoms = loss.atoms(0.03125)
        assert 0 < atoms.infinite < 1e-25
        assert atoms.losses.max() <= loss.window[1] + 1e-9
    assert stats.norm.sf(12) < 1e-25
