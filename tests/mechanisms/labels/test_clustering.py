"""ClusterRR: golden vectors, the floor, laws by chi-square and Kolmogorov-Smirnov, and why ε has 2/σ and not 1/σ."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import optimize, stats

from coterie import rng
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels.clustering import ClusterResponse, project, resampling_for
from coterie.mechanisms.labels.randomized_response import RandomizedResponse
from coterie.mechanisms.randomness import NoiseSource

ALPHA = 1e-9
HISTOGRAM_ONLY = ClusterResponse(2, resampling=1.0, noise_scale=4.0, floor=0.0)


def test_golden_vectors() -> None:
    raw = [0.9, 0.4, 0.05]
    assert ClusterResponse(3, 0.6, 1.0, 0.1).renormalised(np.clip(raw, 0.1, 1)) == pytest.approx([0.7, 0.2, 0.1])
    divided = np.clip(raw, 0.1, 1) / np.clip(raw, 0.1, 1).sum()
    assert divided == pytest.approx([0.642857, 0.285714, 0.071429], abs=6e-7)  # negative control: below the floor
    assert divided.min() < 0.1
    assert ClusterResponse.uniform(1.0, classes=10).resampling == pytest.approx(0.8533674, abs=6e-8)
    assert ClusterResponse.uniform(1.0, classes=2).resampling == pytest.approx(0.5378828, abs=6e-8)
    assert resampling_for(1.0, 0.05) == pytest.approx(0.9208832, abs=6e-8)
    assert resampling_for(4.0, 0.01) == pytest.approx(0.6510495, abs=6e-8)


def test_the_other_renormalisation_of_papers_md_keeps_the_floor_too_but_moves_farther() -> None:
    """q = τ + (1 − Kτ)(r − τ)/Σ(r − τ): its golden vector, and the distance that made us take the projection."""
    clipped, floor = np.array([0.9, 0.4, 0.1]), 0.1
    scaled = floor + (1 - 3 * floor) * (clipped - floor) / (clipped - floor).sum()
    assert scaled == pytest.approx([0.609091, 0.290909, 0.1], abs=6e-7)
    assert np.linalg.norm(project(clipped, floor) - clipped) < np.linalg.norm(scaled - clipped)


@pytest.mark.parametrize(("classes", "keep"), [(10, 0.2319693), (2, 0.7310586)])
def test_uniform_is_randomized_response(classes: int, keep: float) -> None:
    mechanism = ClusterResponse.uniform(1.0, classes=classes)
    law = mechanism.law(np.full(classes, 1 / classes))
    assert law[0, 0] == pytest.approx(keep, abs=6e-8)
    assert law == pytest.approx(RandomizedResponse(classes, 1.0).law(), rel=1e-12)
    assert mechanism.privacy_loss() == pytest.approx(1.0, rel=1e-12)
    assert mechanism.distributions([[9] + [0] * (classes - 1)], rng=rng.secure()).tolist() == [[1 / classes] * classes]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=7), st.floats(0, 1))
def test_projection_is_the_nearest_distribution_above_the_floor(shares: list[float], part: float) -> None:
    row, floor = np.array(shares), part / len(shares)
    found = project(row, floor)
    assert (found >= floor).all()
    assert found.sum() == pytest.approx(1.0, abs=1e-12)
    # The optimum's own condition: row − found is largest, and equal, where found is above the floor.
    pull = row - found
    assert pull[found > floor + 1e-12] == pytest.approx(np.full((found > floor + 1e-12).sum(), pull.max()), abs=1e-12)
    other = np.full(len(shares), 1 / len(shares))
    assert np.linalg.norm(found - other) <= np.linalg.norm(row - other) + 1e-12  # never farther from any other


def test_projection_is_that_of_a_general_solver() -> None:
    row, floor = np.array([0.8, 0.35, 0.3, 0.02]), 0.05
    solved = optimize.minimize(
        lambda q: np.sum((q - row) ** 2),
        np.full(4, 0.25),
        bounds=[(floor, 1)] * 4,
        constraints={"type": "eq", "fun": lambda q: q.sum() - 1},
        tol=1e-14,
    )
    assert project(row, floor) == pytest.approx(solved.x, abs=1e-6)
    assert project(row, 0.25).tolist() == [0.25] * 4


def test_epsilon() -> None:
    mechanism = ClusterResponse(10, 0.9, 8.0, 0.05)
    assert mechanism.privacy_loss() == pytest.approx(2 / 8 + math.log(1 + 0.1 / (0.9 * 0.05)), rel=1e-12)
    assert ClusterResponse(10, 1.0, 8.0, 0.0).privacy_loss() == 2 / 8
    assert ClusterResponse(10, 0.5, 8.0, 0.1).privacy_loss() == pytest.approx(math.log(11), rel=1e-12)
    halves = ClusterResponse.for_epsilon(1.5, classes=10, floor=0.02)
    assert halves.histogram_epsilon == pytest.approx(0.75, rel=1e-12)
    assert halves.response_epsilon == pytest.approx(0.75, rel=1e-12)
    assert mechanism.event(9) == LabelRelease("cluster-response", 9, mechanism.privacy_loss())


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.floats(0.01, 1), st.floats(0.01, 1))
def test_no_two_labels_give_a_ratio_above_the_response_s_epsilon(shares: list[float], part: float, lam: float) -> None:
    classes = len(shares)
    mechanism = ClusterResponse(classes, lam, 1.0, part / classes)
    law = mechanism.law(mechanism.renormalised(shares))
    assert law.sum(axis=1) == pytest.approx(np.ones(classes), rel=1e-12)
    ratios = np.log(law.max(axis=0) / law.min(axis=0))
    assert ratios.max() <= mechanism.response_epsilon * (1 + 1e-9) + 1e-9


def test_the_response_s_epsilon_and_delta_are_attained_at_the_floor() -> None:
    mechanism = ClusterResponse(3, 0.7, math.inf, 1 / 3)
    law = mechanism.law([1 / 3] * 3)
    assert math.log(law[0, 0] / law[1, 0]) == pytest.approx(mechanism.response_epsilon, rel=1e-12)
    for epsilon in (0.0, 0.3, 0.8, 5.0):
        assert mechanism.delta(epsilon) == pytest.approx(
            np.maximum(law[0] - math.exp(epsilon) * law[1], 0).sum(), abs=1e-15
        )
    with_histogram = ClusterResponse(3, 0.7, 4.0, 0.1)
    assert with_histogram.delta(0.4) == 1.0
    assert with_histogram.delta(0.5) == pytest.approx(0.3)
    assert with_histogram.delta(0.9) == pytest.approx(0.3 - 0.07 * math.expm1(0.4))
    assert with_histogram.delta(with_histogram.privacy_loss()) == 0.0


def noisy_shares(counts: tuple[int, int], clusters: int, seed: int) -> NDArray[np.float64]:
    return HISTOGRAM_ONLY.distributions(np.tile(counts, (clusters, 1)), rng=rng.seeded(seed))


def test_the_histogram_costs_two_over_sigma_and_not_one() -> None:
    """K = 2, σ = 4, n_c = 10, counts (10, 0) or (9, 1): the event q̃ = (1, 0) is {raw₁ ≤ 0, raw₀ ≥ 1}."""
    laplace = stats.laplace(scale=4 / 10)
    exact = [laplace.sf(1 - first) * laplace.cdf(0 - (1 - first)) for first in (1.0, 0.9)]
    assert math.log(exact[0] / exact[1]) == pytest.approx(2 / 4, rel=1e-12)
    assert HISTOGRAM_ONLY.privacy_loss() == 2 / 4
    count = 200_000
    shares = [np.sum(noisy_shares(counts, count, 1)[:, 0] == 1.0) for counts in ((10, 0), (9, 1))]
    for found, probability in zip(shares, exact, strict=True):
        assert stats.binomtest(int(found), count, probability).pvalue > ALPHA
        assert stats.binomtest(int(found), count, probability * 1.05).pvalue < ALPHA
    assert math.log(shares[0] / shares[1]) > 1.5 * (1 / 4)


def test_the_labels_alone_cost_more_than_one_over_sigma() -> None:
    """λ = 1, τ = 0, σ = 4, n_c = 10, the first label once or not at all, and all ten outputs equal to it.

    papers.md (b): log-ratio .492 with projection (Monte Carlo; .495 by this quadrature), .454 for dividing by the sum.
    """
    noise = stats.laplace(scale=4 / 10).ppf((np.arange(1000) + 0.5) / 1000)

    def chance(counts: tuple[int, int], *, projected: bool) -> float:
        shares = np.stack(np.meshgrid(*(np.clip(count / 10 + noise, 0, 1) for count in counts)), axis=-1)
        if projected:
            return float(np.mean(HISTOGRAM_ONLY.renormalised(shares)[..., 0] ** 10))
        sums = shares.sum(axis=-1)
        return float(np.mean(np.where(sums > 0, shares[..., 0] / np.where(sums > 0, sums, 1), 0.5) ** 10))

    ratios = {
        form: math.log(chance((1, 9), projected=form) / chance((0, 10), projected=form)) for form in (True, False)
    }
    assert ratios[True] == pytest.approx(0.492, abs=0.005)
    assert ratios[False] == pytest.approx(0.454, abs=0.002)
    assert 1 / 4 < ratios[False] < ratios[True] < HISTOGRAM_ONLY.privacy_loss()


def test_the_noise_on_the_histogram_has_its_law(source: NoiseSource) -> None:
    mechanism = ClusterResponse(2, 1.0, 30.0, 0.0)
    noisy = mechanism.distributions(np.tile([5000, 5000], (40_000, 1)), rng=source)
    assert noisy.sum(axis=1) == pytest.approx(np.ones(40_000), abs=1e-12)
    difference = (2 * noisy[:, 0] - 1) * 10_000  # in counts: of two Laplace numbers, as nothing is clipped

    def cdf(x: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
        tail = (2 + np.abs(x) / scale) * np.exp(-np.abs(x) / scale) / 4
        return np.where(x < 0, tail, 1 - tail)

    assert stats.kstest(difference, lambda x: cdf(x, 30.0)).pvalue > ALPHA
    for wrong in (27.0, 33.0):
        assert stats.kstest(difference, lambda x, w=wrong: cdf(x, w)).pvalue < ALPHA
    # Before dividing by the cluster's size, noisy counts are on the public grid: half a grid in this difference.
    steps = difference / math.ldexp(1, math.floor(math.log2(math.sqrt(2) * 30)) - 20)
    assert np.abs(steps - np.rint(steps)).max() < 1e-4


def test_outputs_have_their_law(source: NoiseSource) -> None:
    mechanism = ClusterResponse(3, 0.6, 2.0, 0.05)
    labels, clusters = np.repeat([0, 2, 1, 0], 8_000), np.repeat([1, 1, 3, 3], 8_000)
    found = mechanism(labels, clusters, cluster_count=5, rng=source)
    assert found.distributions.shape == (5, 3)
    assert found.distributions[[0, 2, 4]].tolist() == [[1 / 3] * 3] * 3  # without examples
    assert (found.distributions >= 0.05).all()
    assert found.distributions[1] == pytest.approx([0.475, 0.05, 0.475], abs=0.01)
    for start, cluster in ((0, 1), (8_000, 1), (16_000, 3)):
        label = labels[start]
        counts = np.bincount(found.labels[start : start + 8_000], minlength=3)
        law = mechanism.law(found.distributions[cluster])[label]
        assert stats.chisquare(counts, 8_000 * law).pvalue > ALPHA
        for wrong in (0.8, 0.3):
            other = ClusterResponse(3, wrong, 2.0, 0.05).law(found.distributions[cluster])[label]
            assert stats.chisquare(counts, 8_000 * other).pvalue < ALPHA
        elsewhere = mechanism.law(found.distributions[4 - cluster])[label]
        assert stats.chisquare(counts, 8_000 * elsewhere).pvalue < ALPHA


def test_a_class_without_probability_is_never_drawn() -> None:
    mechanism = ClusterResponse(3, 1.0, 1e-6, 0.0)
    found = mechanism(np.repeat([0, 1], 500), np.zeros(1000, int), cluster_count=1, rng=rng.seeded(4))
    assert set(found.labels[found.distributions[0][found.labels] == 0]) == set()
    assert set(found.labels) <= {0, 1, 2}


def test_no_labels_give_no_outputs() -> None:
    found = ClusterResponse.uniform(1.0, classes=3)([], [], cluster_count=2, rng=rng.secure())
    assert found.labels.size == 0


G = rng.seeded(1)
CR = ClusterResponse(3, 0.6, 2.0, 0.05)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: ClusterResponse(1, 0.5, 1.0, 0.1), "classes .* found 1"),
        (lambda: ClusterResponse(3, 0.0, 1.0, 0.1), "resampling above 0 and at most 1, found 0.0"),
        (lambda: ClusterResponse(3, 1.1, 1.0, 0.1), "resampling above 0 and at most 1, found 1.1"),
        (lambda: ClusterResponse(3, 0.5, 0.0, 0.1), "noise_scale > 0 and finite, found 0.0"),
        (lambda: ClusterResponse(3, 0.5, math.inf, 0.1), "noise_scale > 0 and finite, found inf"),
        (lambda: ClusterResponse(3, 0.5, 1.0, 0.34), "floor from 0 to 1/3, found 0.34"),
        (lambda: ClusterResponse(3, 0.5, 1.0, -0.1), "floor from 0 to 1/3, found -0.1"),
        (lambda: ClusterResponse(3, 0.5, 1.0, math.nan), "floor from 0 to 1/3, found nan"),
        (lambda: ClusterResponse(3, 0.5, 1.0, 0.0), "floor > 0 as resampling is 0.5 < 1, found 0.0"),
        (lambda: ClusterResponse.for_epsilon(0.0, classes=3, floor=0.1), "epsilon > 0 and finite, found 0.0"),
        (lambda: ClusterResponse.for_epsilon(1.0, classes=3, floor=0.0), "floor > 0 and finite, found 0.0"),
        (lambda: ClusterResponse.for_epsilon(1.0, classes=3, floor=0.5), "floor from 0 to 1/3, found 0.5"),
        (lambda: ClusterResponse.uniform(-1.0, classes=3), "epsilon > 0 and finite, found -1.0"),
        (lambda: CR([0, 3], [0, 0], cluster_count=1, rng=G), "labels from 0 to 2, found 3"),
        (
            lambda: CR([0, 1], [0, 1], cluster_count=2, rng=G),
            "every cluster to hold 2 examples or more, found one of 1",
        ),
        (lambda: CR([0, 1], [1, 1], cluster_count=1, rng=G), "clusters from 0 to 0, found 1"),
        (lambda: CR([0, 1], [0], cluster_count=1, rng=G), "each of 2 examples, found 1"),
        (lambda: CR.delta(-0.1), "epsilon >= 0, found -0.1"),
    ],
)
def test_bad_input_is_one_error_that_names_argument_and_value(act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
