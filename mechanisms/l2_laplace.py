"""The n-dimensional Laplace mechanism for the Euclidean norm."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaincinv, gammaln

from coterie.mechanisms.arguments import (
    CHUNK,
    expect_count,
    expect_distance,
    expect_positive,
    expect_probability,
    expect_vector,
    sum_of_squares,
)
from coterie.mechanisms.events import Neighbourhood, Noise, UpdateRelease
from coterie.mechanisms.grid import MOST, power_of_two_grid, round_to_grid
from coterie.mechanisms.neighbourhood import euclidean_norm
from coterie.mechanisms.randomness import NoiseSource


@dataclass(frozen=True)
class L2Laplace:
    """Adds noise whose density falls with the Euclidean distance: x ↦ x + ρ, ρ ~ K·exp(−ε‖ρ‖₂) on Rⁿ.

    ``dimension`` is n and ``epsilon`` is ε, in units of 1/distance; K = εⁿ Γ(n/2) / (2 π^(n/2) Γ(n)).

    Guarantee: d-privacy for the Euclidean distance. For every two vectors x, x' and every set S of outputs,
    P(M(x) ∈ S) ≤ exp(ε‖x − x'‖₂)·P(M(x') ∈ S), by the triangle inequality on the exponents. There is no
    neighbouring relation inside: what two data sets may differ by is the distance of their vectors.

    Sampling: ρ = r·z/‖z‖₂ with r ~ Gamma(n, scale 1/ε) and z ~ N(0, Iₙ). Not independent per coordinate: the
    law of Laplace noise drawn per coordinate protects the L1 distance instead.

    Source: Galli, Biswas, Jung, Palamidessi, Cucinotta, "Group privacy for personalized federated learning"
    (arXiv 2206.03396), Lemma 1 and Section 4.2; the constants are re-derived (see ``docs/privacy.md``).

    Floating point: the noise is drawn and added in float64, and the *sum* is rounded to the nearest multiple
    of ``grid``, a power of two that depends on n and ε only. ``mechanisms/grid.py`` says what that promises
    and what it does not: no formal guarantee about floats is claimed.

    Raises ``ValueError`` for n < 1, and for ε ≤ 0, not finite, or so extreme that the noise or its grid would
    leave the range of float64.
    """

    dimension: int
    epsilon: float

    def __post_init__(self) -> None:
        expect_count("dimension", self.dimension)
        expect_positive("epsilon", self.epsilon)
        if not 1 / MOST <= self.component_standard_deviation <= MOST:
            raise ValueError(
                f"Expected epsilon to give noise of {1 / MOST} to {MOST} per coordinate, found {self.epsilon}"
            )

    def __call__(self, x: ArrayLike, *, rng: NoiseSource) -> NDArray[np.float64]:
        """One noisy copy of ``x``, a real array of any shape holding n numbers; float64, on the grid.

        Memory: the result, and chunks of half a megabyte. Raises ``ValueError`` for another number of
        elements, a non-finite element, or a sum that leaves the range of float64; nothing is returned then.
        """
        centre = expect_vector("x", x, self.dimension)
        noise = np.empty(self.dimension)
        squares = 0.0
        while squares == 0.0:  # z = 0 has no direction; in real numbers it has probability 0
            squares = math.fsum(_fill(noise[a : a + CHUNK], rng) for a in range(0, self.dimension, CHUNK))
        grid = self.grid
        scale = rng.standard_gamma(float(self.dimension)) / self.epsilon / math.sqrt(squares)
        for start in range(0, self.dimension, CHUNK):
            chunk = noise[start : start + CHUNK]
            chunk *= scale
            chunk += centre[start : start + CHUNK]
            round_to_grid(chunk, grid)
        return noise.reshape(np.shape(x))

    def privacy_loss(self, distance: float) -> float:
        """The largest |ln(density ratio)| of two inputs at Euclidean ``distance``: ε·distance, attained."""
        expect_distance("distance", distance)
        return self.epsilon * distance if distance else 0.0

    def log_density(self, x: ArrayLike, centre: ArrayLike) -> float:
        """ln of the density at ``x`` of the noisy copy of ``centre``, before rounding: ln K − ε‖x − centre‖₂.

        Stable for any n (at n = 1.2 million ln K is about −9·10⁶ and K itself is 0 in float64).
        """
        point = expect_vector("x", x, self.dimension)
        origin = expect_vector("centre", centre, self.dimension)
        n = self.dimension
        log_constant = (
            n * math.log(self.epsilon)
            + float(gammaln(n / 2))
            - math.log(2)
            - n / 2 * math.log(math.pi)
            - float(gammaln(n))
        )
        return log_constant - self.epsilon * euclidean_norm(np.subtract(point, origin, dtype=np.float64))

    def event(self, radius: float) -> UpdateRelease:
        """The record of one release that was meant to hide the input up to Euclidean distance ``radius``."""
        expect_positive("radius", radius)
        return UpdateRelease(Neighbourhood.FIXED, (Noise(self.dimension, self.epsilon, radius),))

    @property
    def component_variance(self) -> float:
        """Var ρ_i = (n + 1)/ε². Two coordinates are uncorrelated but not independent."""
        return self.component_standard_deviation**2

    @property
    def component_standard_deviation(self) -> float:
        """√(n + 1)/ε."""
        return math.sqrt(self.dimension + 1) / self.epsilon

    @property
    def mean_norm(self) -> float:
        """E‖ρ‖₂ = n/ε; the variance of the norm is n/ε²."""
        return self.dimension / self.epsilon

    def norm_quantile(self, probability: float) -> float:
        """What ‖ρ‖₂ ~ Gamma(n, scale 1/ε) stays below with ``probability`` (0 gives 0, 1 gives inf)."""
        expect_probability("probability", probability)
        return float(gammaincinv(self.dimension, probability)) / self.epsilon

    @property
    def grid(self) -> float:
        """The spacing of the outputs: the power of two 2^(⌊log₂(√(n + 1)/ε)⌋ − 20)."""
        return power_of_two_grid(self.component_standard_deviation)


def _fill(chunk: NDArray[np.float64], rng: NoiseSource) -> float:
    """Fill ``chunk`` with standard normals; their sum of squares."""
    rng.standard_normal(out=chunk)
    return sum_of_squares(chunk)
