"""The exact privacy loss of one release: golden numbers, independent computations of the same law, and its symmetry."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from coterie.mechanisms import privacy_loss
from coterie.mechanisms.privacy_loss import (
    GaussianLoss,
    L2LaplaceLoss,
    ResponseLoss,
    bessel_ratio,
    relative_noise_leak,
)

# (n, D, ε, δ) from the exact formula, computed elsewhere by quadrature over the radius; to one in the last digit.
GOLDEN_DELTAS = [
    (2, 0.4, 0.1, 0.083448, 1e-6),
    (2, 0.4, 0.25, 0.030768, 1e-6),
    (2, 0.4, 0.5, 0.0, 0.0),
    (11, 2.2, 0.5, 0.109000, 1e-6),
    (11, 2.2, 1.0, 0.025493, 1e-6),
    (11, 2.2, 2.0, 1.820e-6, 1e-9),
    (11, 11.0, 0.5, 0.859686, 1e-6),
    (11, 11.0, 1.0, 0.823430, 1e-6),
    (11, 11.0, 2.0, 0.731563, 1e-6),
    (10_000, 100.0, 0.5, 0.238427, 1e-6),
    (10_000, 100.0, 1.0, 0.126935, 1e-6),
    (10_000, 100.0, 2.0, 0.020913, 1e-6),
    (10_000, 200.0, 0.5, 0.599185, 1e-6),
    (10_000, 200.0, 1.0, 0.509857, 1e-6),
    (10_000, 200.0, 2.0, 0.331878, 1e-6),
]


@pytest.mark.parametrize(("dimension", "distance", "epsilon", "delta", "digits"), GOLDEN_DELTAS)
def test_delta_is_the_golden_number(
    dimension: int, distance: float, epsilon: float, delta: float, digits: float
) -> None:
    assert L2LaplaceLoss(dimension, distance).delta(epsilon) == pytest.approx(delta, abs=digits + 1e-15)


@pytest.mark.parametrize(
    ("dimension", "distance", "low", "high"), [(11, 2.2, 1.9305, 1.9310), (10_000, 100.0, 4.3745, 4.3755)]
)
def test_epsilon_of_one_release_is_the_golden_number(dimension: int, distance: float, low: float, high: float) -> None:
    assert low <= L2LaplaceLoss(dimension, distance).epsilon(1e-5) <= high


@pytest.mark.parametrize(
    ("dimension", "distance", "mean", "deviation"),
    [
        (2, 0.4, 0.0388, 0.2783),
        (11, 2.2, 0.2205, 0.6542),
        (11, 11.0, 4.543, 2.578),
        (10_000, 100.0, 0.502, 0.997),
        (10_000, 200.0, 2.002, 1.997),
    ],
)
def test_moments_agree_with_the_golden_simulation(
    dimension: int, distance: float, mean: float, deviation: float
) -> None:
    loss = L2LaplaceLoss(dimension, distance)
    assert loss.mean == pytest.approx(mean, rel=0.015)  # a simulation's figures: good to about a percent
    assert loss.standard_deviation == pytest.approx(deviation, rel=0.006)


def tail_by_radius(dimension: int, distance: float, epsilon: float) -> float:
    """P(L > ε) as an expectation over the radius ρ ~ Gamma(n, 1) of the incomplete beta function of the angle."""

    def given_radius(radius: float) -> float:
        if radius + epsilon < 0:
            return 1.0
        cosine = (distance**2 - 2 * radius * epsilon - epsilon**2) / (2 * radius * distance)
        shape = (dimension - 1) / 2
        return float(special.betainc(shape, shape, min(1.0, max(0.0, (1 + cosine) / 2))))

    density = stats.gamma(dimension).pdf
    # The integrand has kinks where the cosine passes 1 and −1.
    kinks = sorted({max(0.0, abs(distance - epsilon) / 2), (distance + epsilon) / 2})
    ends = [0.0, *kinks, dimension + 12 * math.sqrt(dimension) + 40]
    pieces = [
        integrate.quad(lambda r: density(r) * given_radius(r), low, high, epsabs=1e-14, epsrel=1e-12, limit=400)[0]
        for low, high in itertools.pairwise(ends)
        if low < high
    ]
    return math.fsum(pieces)


@pytest.mark.parametrize("dimension", [2, 3, 4, 11, 60])
@pytest.mark.parametrize("multiplier", [0.7, 3.0])
@pytest.mark.parametrize("share", [-0.6, 0.05, 0.5])
def test_tail_agrees_with_quadrature_over_the_radius(dimension: int, multiplier: float, share: float) -> None:
    distance = dimension / multiplier
    loss = L2LaplaceLoss(dimension, distance)
    epsilon = share * min(distance, 3 * loss.standard_deviation)
    assert loss.tail(epsilon) == pytest.approx(tail_by_radius(dimension, distance, epsilon), rel=1e-7)


@pytest.mark.parametrize(("dimension", "distance"), [(1, 1.5), (2, 0.4), (3, 5.0), (11, 2.2), (1000, 60.0)])
def test_delta_is_the_difference_of_the_two_tails(dimension: int, distance: float) -> None:
    loss = L2LaplaceLoss(dimension, distance)
    for epsilon in (0.0, 0.2 * distance / math.sqrt(dimension), 0.9 * distance / math.sqrt(dimension)):
        below = 1 - loss.tail(-epsilon)  # P(L <= -ε); the law has no atom there
        expected = loss.tail(epsilon) - math.exp(epsilon) * below
        assert loss.delta(epsilon) == pytest.approx(expected, abs=2e-9)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.3])
def test_delta_in_the_plane_agrees_with_brute_force_on_densities(epsilon: float) -> None:
    distance, step = 0.4, 0.02
    axis = np.arange(-16, 16, step) + step / 2
    x, y = np.meshgrid(axis, axis)
    here = np.exp(-np.hypot(x, y)) / (2 * math.pi)
    there = np.exp(-np.hypot(x - distance, y)) / (2 * math.pi)
    brute = np.maximum(here - math.exp(epsilon) * there, 0.0).sum() * step**2
    assert L2LaplaceLoss(2, distance).delta(epsilon) == pytest.approx(brute, abs=2e-5)


def test_delta_in_space_agrees_with_brute_force_on_densities() -> None:
    """n = 3 in cylinder coordinates about the line through both points: K = 1/(8π)."""
    distance, step = 2.0, 0.02
    along, away = np.meshgrid(np.arange(-20, 20, step) + step / 2, np.arange(0, 20, step) + step / 2)
    here = np.exp(-np.hypot(along, away)) / (8 * math.pi)
    there = np.exp(-np.hypot(along - distance, away)) / (8 * math.pi)
    for epsilon in (0.0, 0.5, 1.5):
        brute = (np.maximum(here - math.exp(epsilon) * there, 0.0) * 2 * math.pi * away).sum() * step**2
        assert L2LaplaceLoss(3, distance).delta(epsilon) == pytest.approx(brute, abs=5e-5)


@pytest.mark.parametrize("distance", [0.3, 1.0, 7.0, 500.0])
def test_one_dimension_is_the_ordinary_laplace_mechanism(distance: float) -> None:
    loss = L2LaplaceLoss(1, distance)
    for share in (0.0, 0.25, 0.8, 0.999):
        epsilon = share * distance
        assert loss.delta(epsilon) == pytest.approx(-math.expm1((epsilon - distance) / 2), rel=3e-10)
    assert loss.epsilon(1e-5) == pytest.approx(distance + 2 * math.log1p(-1e-5), rel=1e-9)
    assert loss.epsilon(1e-5) >= distance + 2 * math.log1p(-1e-5)


def simulated_losses(dimension: int, distance: float, count: int, rng: np.random.Generator) -> np.ndarray:
    radius = rng.standard_gamma(dimension, count)
    shape = (dimension - 1) / 2
    cosine = 2 * rng.beta(shape, shape, count) - 1 if dimension > 1 else rng.choice([-1.0, 1.0], count)
    return np.sqrt(radius**2 - 2 * radius * distance * cosine + distance**2) - radius


def least_p_value(loss: L2LaplaceLoss, sample: np.ndarray) -> float:
    """The smallest exact binomial p-value over thresholds across the law, times their number (Bonferroni)."""
    thresholds = [loss.mean + z * loss.standard_deviation for z in (-1.5, -0.7, 0.1, 0.8, 1.4)]
    inside = [t for t in thresholds if abs(t) < loss.distance]
    p_values = [stats.binomtest(int((sample > t).sum()), sample.size, loss.tail(t)).pvalue for t in inside]
    return len(inside) * min(p_values)


@pytest.mark.parametrize("dimension", [1, 2, 3, 11, 1000, 1_200_000])
@pytest.mark.parametrize("multiplier", [0.3, 1.0])
def test_simulated_losses_follow_the_law_and_not_its_neighbours(dimension: int, multiplier: float) -> None:
    distance = math.sqrt(dimension) / multiplier
    sample = simulated_losses(dimension, distance, 400_000, np.random.default_rng(20))
    assert least_p_value(L2LaplaceLoss(dimension, distance), sample) > 1e-9
    assert least_p_value(L2LaplaceLoss(dimension, 1.03 * distance), sample) < 1e-9
    assert least_p_value(L2LaplaceLoss(dimension, distance / 1.03), sample) < 1e-9


@pytest.mark.parametrize("dimension", [1, 2])
def test_simulated_losses_reject_the_next_dimension(dimension: int) -> None:
    sample = simulated_losses(dimension, 1.5, 400_000, np.random.default_rng(21))
    assert least_p_value(L2LaplaceLoss(dimension + 1, 1.5), sample) < 1e-9


@pytest.mark.parametrize("dimension", [1, 2, 3, 4, 11, 1000, 1_206_590, 100_000_000])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 30.0, 1e4])
def test_both_laws_have_total_mass_one(dimension: int, multiplier: float) -> None:
    """E_P[1] = 1 and E_P[e^(−L)] = 1: the second holds only if the density has the exact likelihood ratio."""
    loss = L2LaplaceLoss(dimension, dimension / multiplier)
    losses, masses = loss.quadrature()
    assert 1 - 1e-14 <= masses.sum() <= 1 + 2 * loss.relative_error
    if loss.mean < 30:  # else e^(−L) has its mass where P has none
        assert masses @ np.exp(-losses) == pytest.approx(1, abs=3 * loss.relative_error + 1e-9)


@settings(deadline=None, max_examples=60)
@given(
    dimension=st.integers(1, 3000),
    multiplier=st.floats(0.3, 300),
    nearer=st.floats(0.01, 1),
    share=st.floats(0, 1),
)
def test_a_pair_that_is_nearer_is_dominated(dimension: int, multiplier: float, nearer: float, share: float) -> None:
    far = L2LaplaceLoss(dimension, dimension / multiplier)
    near = L2LaplaceLoss(dimension, nearer * far.distance)
    epsilon = share * min(far.distance, far.mean + 5 * far.standard_deviation)
    assert near.delta(epsilon) <= far.delta(epsilon) * (1 + 1e-8) + 1e-30


def test_delta_falls_from_the_total_variation_to_zero_at_the_pure_loss() -> None:
    loss = L2LaplaceLoss(11, 2.2)
    deltas = [loss.delta(epsilon) for epsilon in np.linspace(0, 2.2, 50)]
    assert all(after < before for before, after in itertools.pairwise(deltas))
    assert deltas[-1] == 0.0
    assert loss.epsilon(0.0) == pytest.approx(2.2, rel=1e-9)
    assert loss.epsilon(1.0) == 0.0


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9, 1e-20])
def test_epsilon_is_the_inverse_of_delta_from_above(delta: float) -> None:
    loss = L2LaplaceLoss(1000, 1000 / 30)
    epsilon = loss.epsilon(delta)
    assert loss.delta(epsilon) <= delta < loss.delta(epsilon * (1 - 1e-9))


def test_many_dimensions_approach_the_gaussian_limit() -> None:
    for n, digits in ((100, 2e-3), (10_000, 2e-5), (1_000_000, 2e-7)):
        exact, limit = L2LaplaceLoss(n, math.sqrt(n)), GaussianLoss(1.0)
        for epsilon in (0.5, 1.0, 2.0, 3.0):
            assert exact.delta(epsilon) == pytest.approx(limit.delta(epsilon), abs=digits)


def test_the_gaussian_limit_is_no_bound_in_few_dimensions() -> None:
    exact, limit = L2LaplaceLoss(11, 2.2), GaussianLoss(2.2 / math.sqrt(11))
    assert limit.delta(0.5) == pytest.approx(0.107524, abs=1e-6)
    assert limit.delta(1.0) == pytest.approx(0.030274, abs=1e-6)
    assert limit.delta(2.0) == pytest.approx(6.228e-4, abs=5e-8)
    assert limit.epsilon(1e-5) == pytest.approx(2.738, abs=5e-4)
    assert exact.delta(0.5) > limit.delta(0.5)
    assert exact.delta(2.0) < limit.delta(2.0)


@pytest.mark.parametrize(
    ("mu", "epsilon", "delta"),
    [(math.sqrt(11), 0.5, 0.876098), (math.sqrt(11), 2.0, 0.766651), (1.0, 0.5, 0.238422), (2.0, 2.0, 0.331898)],
)
def test_gaussian_delta_is_the_golden_number(mu: float, epsilon: float, delta: float) -> None:
    assert GaussianLoss(mu).delta(epsilon) == pytest.approx(delta, abs=1e-6)


@pytest.mark.parametrize("order", [0.0, 0.5, 1.0, 4.5, 30.0, 2000.5, 5000.0])
@pytest.mark.parametrize("z", [1e-3, 0.2, 5.0, 1000.0])
def test_bessel_ratio_agrees_with_high_precision(order: float, z: float) -> None:
    with mpmath.workdps(40):
        exact = float(mpmath.besselk(order + 1, z) / mpmath.besselk(order, z))
    assert bessel_ratio(order, z) == pytest.approx(exact, rel=1e-11)


@pytest.mark.parametrize("hypotheses", [2, 3, 10])
def test_response_delta_is_the_best_event_of_the_pair(hypotheses: int) -> None:
    keep = math.exp(0.8) / (math.exp(0.8) + hypotheses - 1)
    here = np.full(hypotheses, (1 - keep) / (hypotheses - 1))
    there = here.copy()
    here[0], there[1] = keep, keep
    for epsilon in (0.0, 0.3, 0.79, 0.9):
        brute = np.maximum(here - math.exp(epsilon) * there, 0).sum()
        assert ResponseLoss(hypotheses, 0.8).delta(epsilon) == pytest.approx(brute, abs=1e-14)


@pytest.mark.parametrize(
    ("dimension", "ratio", "distance"),
    [(2, 1.5, 0.2165), (11, 1.5, 0.4949), (11, 2.0, 0.7445), (1_206_590, 1.001, 0.4170), (1_206_590, 1.005, 0.9938)],
)
def test_noise_scaled_by_the_update_gives_its_norm_away(dimension: int, ratio: float, distance: float) -> None:
    assert relative_noise_leak(dimension, ratio) == pytest.approx(distance, abs=5e-5)
    assert relative_noise_leak(dimension, 1 / ratio) == pytest.approx(distance, abs=5e-5)
    assert relative_noise_leak(dimension, 1.0) == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: L2LaplaceLoss(0, 1.0), "dimension to be a whole number >= 1, found 0"),
        (lambda: L2LaplaceLoss(3, 0.0), "distance > 0 and finite, found 0.0"),
        (lambda: L2LaplaceLoss(3, math.nan), "distance > 0 and finite, found nan"),
        (lambda: L2LaplaceLoss(3, 1.0).delta(-0.1), "epsilon >= 0, found -0.1"),
        (lambda: L2LaplaceLoss(3, 1.0).epsilon(1.5), "delta between 0 and 1, found 1.5"),
        (lambda: GaussianLoss(-1.0), "distance > 0 and finite, found -1.0"),
        (lambda: ResponseLoss(1, 1.0), "hypotheses to be a whole number >= 2, found 1"),
        (lambda: relative_noise_leak(3, 0.0), "ratio > 0 and finite, found 0.0"),
    ],
)
def test_impossible_arguments_are_named_with_their_value(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("dimension", [1, 2, 3, 11, 1000, 1_206_590])
@pytest.mark.parametrize("multiplier", [0.01, 0.3, 3.0, 300.0])
def test_twice_the_nodes_change_probabilities_by_far_less_than_the_margin(
    monkeypatch: pytest.MonkeyPatch, dimension: int, multiplier: float
) -> None:
    loss = L2LaplaceLoss(dimension, dimension / multiplier)
    epsilons = [max(0.0, loss.mean + z * loss.standard_deviation) for z in (-1.0, 0.0, 1.0, 3.0, 6.0)]
    before = [loss.delta(epsilon) for epsilon in epsilons]
    nodes, weights = np.polynomial.legendre.leggauss(16)
    monkeypatch.setattr(privacy_loss, "_NODES", nodes)
    monkeypatch.setattr(privacy_loss, "_WEIGHTS", weights)
    privacy_loss._law.cache_clear()
    after = [loss.delta(epsilon) for epsilon in epsilons]
    privacy_loss._law.cache_clear()
    # A loss near D is computed to a few unit roundoffs of D, and δ is as steep as e^(−loss).
    assert after == pytest.approx(before, rel=1e-12 + 1e-15 * loss.distance, abs=1e-30)
