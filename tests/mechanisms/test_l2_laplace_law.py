"""The sampler against its exact law, with wrong laws through the same helpers.

Each helper returns a p-value; ALPHA is so small that the tests would be safe without a fixed seed.

The radius is Gamma(n, 1/ε). The direction u is uniform on the sphere, so (u₁ + 1)/2 is Beta((n−1)/2, (n−1)/2). A
Kolmogorov-Smirnov test sees wrong shapes; the sum of m radii, which is Gamma(mn, 1/ε), sees small errors of scale.
For large n one coordinate per draw is too few numbers, so the whole direction is used: with an independent
R ~ χ(n), R·u is exactly N(0, Iₙ), and all its coordinates are tested at once.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from coterie import rng
from coterie.mechanisms.l2_laplace import L2Laplace
from coterie.mechanisms.randomness import NoiseSource

ALPHA = 1e-9
EPSILON = 2.5
DRAWS = {1: 10_000, 2: 10_000, 3: 10_000, 11: 10_000, 1000: 4_000, 1_200_000: 60}


def radius_p_value(radii: NDArray[np.float64], dimension: int, epsilon: float) -> float:
    """Kolmogorov-Smirnov against Gamma(n, 1/ε)."""
    return float(stats.kstest(radii, stats.gamma(dimension, scale=1 / epsilon).cdf).pvalue)


def radius_sum_p_value(radii: NDArray[np.float64], dimension: int, epsilon: float) -> float:
    """Two-sided tail of the sum of m radii under Gamma(mn, 1/ε)."""
    law = stats.gamma(dimension * radii.size, scale=1 / epsilon)
    total = float(radii.sum())
    return 2 * min(float(law.cdf(total)), float(law.sf(total)))


def direction_p_value(first: NDArray[np.float64], dimension: int) -> float:
    """The first coordinates of unit vectors: Kolmogorov-Smirnov against Beta, for n = 1 a fair coin."""
    if dimension == 1:
        return float(stats.binomtest(int((first > 0).sum()), first.size).pvalue)
    half = (dimension - 1) / 2
    return float(stats.kstest((first + 1) / 2, stats.beta(half, half).cdf).pvalue)


def sphere_p_value(directions: NDArray[np.float64], chi: np.random.Generator) -> float:
    """Unit vectors, shape (m, n), times independent χ(n) lengths, against N(0, 1)."""
    lengths = np.sqrt(2 * chi.standard_gamma(directions.shape[1] / 2, directions.shape[0]))
    return float(stats.kstest((directions * lengths[:, None])[:, :20_000].ravel(), stats.norm.cdf).pvalue)


def per_coordinate_laplace(dimension: int, draws: int) -> NDArray[np.float64]:
    """The wrong mechanism: independent Laplace(1/ε) noise per coordinate, which hides the L1 distance; (m, n)."""
    return rng.seeded(5, "per coordinate").laplace(scale=1 / EPSILON, size=(draws, dimension))


@dataclass(frozen=True)
class Sample:
    """Draws of the noise: their radii, first direction coordinates, and the direction of a few."""

    dimension: int
    radii: NDArray[np.float64]
    first: NDArray[np.float64]
    directions: NDArray[np.float64]


@pytest.fixture(scope="module", params=DRAWS)
def sample(request: pytest.FixtureRequest, source: NoiseSource) -> Sample:
    dimension: int = request.param
    mechanism = L2Laplace(dimension, EPSILON)
    zero = np.zeros(dimension, np.float32)
    radii, first, directions = [], [], []
    for _ in range(DRAWS[dimension]):
        noise = mechanism(zero, rng=source)
        radii.append(math.sqrt(np.einsum("i,i->", noise, noise)))
        first.append(noise[0] / radii[-1])
        if len(directions) * dimension < 200_000:
            directions.append(noise / radii[-1])
    return Sample(dimension, np.array(radii), np.array(first), np.array(directions))


def test_radius_is_gamma(sample: Sample) -> None:
    assert radius_p_value(sample.radii, sample.dimension, EPSILON) > ALPHA
    assert radius_sum_p_value(sample.radii, sample.dimension, EPSILON) > ALPHA


def test_radius_does_not_depend_on_the_direction(sample: Sample) -> None:
    assert radius_p_value(sample.radii[sample.first > 0], sample.dimension, EPSILON) > ALPHA


def test_direction_is_uniform(sample: Sample) -> None:
    assert direction_p_value(sample.first, sample.dimension) > ALPHA
    if sample.dimension > 1:
        assert sphere_p_value(sample.directions, rng.seeded(1, "chi")) > ALPHA


def test_a_scale_off_by_a_quarter_is_seen_in_the_shape(sample: Sample) -> None:
    for wrong in (EPSILON * 1.25, EPSILON / 1.25):
        assert radius_p_value(sample.radii, sample.dimension, wrong) < ALPHA


def test_a_small_error_of_scale_is_seen_in_the_sum(sample: Sample) -> None:
    # The sum's relative standard deviation is 1/√(mn): 1 % for n = 1 here, so an error of 10 %; else 5 % or less.
    error = 1 + max(0.005, 10 / math.sqrt(sample.radii.size * sample.dimension))
    for wrong in (EPSILON * error, EPSILON / error):
        assert radius_sum_p_value(sample.radii, sample.dimension, wrong) < ALPHA


def test_another_dimension_is_seen(sample: Sample) -> None:
    # From m draws the sum tells n ± 1 apart only if √(m/n) is large; for large n it is n ± 10·√(n/m).
    step = max(1, math.ceil(10 * math.sqrt(sample.dimension / sample.radii.size)))
    for wrong in {sample.dimension - step, sample.dimension + step} - {0}:
        assert radius_sum_p_value(sample.radii, wrong, EPSILON) < ALPHA
        if sample.dimension <= 11:
            assert step == 1
            assert radius_p_value(sample.radii, wrong, EPSILON) < ALPHA
    if sample.dimension in (2, 3):
        assert direction_p_value(sample.first, sample.dimension + 1) < ALPHA


@pytest.mark.parametrize("dimension", [2, 3, 11, 1000])
def test_laplace_noise_per_coordinate_is_rejected(dimension: int) -> None:
    noise = per_coordinate_laplace(dimension, 40_000 if dimension < 1000 else 1_000)
    radii = np.linalg.norm(noise, axis=1)
    directions = noise / radii[:, None]
    assert radius_p_value(radii, dimension, EPSILON) < ALPHA
    assert sphere_p_value(directions, rng.seeded(1, "chi")) < ALPHA


def test_laplace_noise_per_coordinate_is_rejected_at_the_largest_dimension() -> None:
    noise = per_coordinate_laplace(1_200_000, 1)
    assert sphere_p_value(noise / np.linalg.norm(noise), rng.seeded(1, "chi")) < ALPHA


def test_a_biased_direction_is_rejected() -> None:
    # n = 1 has no per-coordinate control: a sign with P(+) = 0.55 takes its place.
    signs = np.where(rng.seeded(3).random(10_000) < 0.55, 1.0, -1.0)
    assert direction_p_value(signs, 1) < ALPHA
