"""The isotropic Gaussian mechanism, behind the same interface as ``L2Laplace``, for comparison."""

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
)
from coterie.mechanisms.events import GaussianRelease
from coterie.mechanisms.grid import MOST, power_of_two_grid, round_to_grid
from coterie.mechanisms.neighbourhood import euclidean_norm
from coterie.mechanisms.randomness import NoiseSource


@dataclass(frozen=True)
class GaussianMechanism:
    """Adds x ↦ x + ρ, ρ ~ N(0, σ²Iₙ).

    ``dimension`` is n; ``sigma`` is σ, in units of distance.

    Guarantee: for two inputs at Euclidean distance d, μ-Gaussian differential privacy with μ = d/σ, that is
    δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ); Balle and Wang, "Improving the Gaussian mechanism for
    differential privacy" (ICML 2018), Theorem 8. There is no finite pure loss, hence no d-privacy, at any d >
    0.

    Sampling, rounding to ``grid``, memory and errors are those of ``L2Laplace``, with σ in place of √(n +
    1)/ε.
    """

    dimension: int
    sigma: float

    def __post_init__(self) -> None:
        expect_count("dimension", self.dimension)
        expect_positive("sigma", self.sigma)
        if not 1 / MOST <= self.sigma <= MOST:
            raise ValueError(f"Expected sigma between {1 / MOST} and {MOST}, found {self.sigma}")

    def __call__(self, x: ArrayLike, *, rng: NoiseSource) -> NDArray[np.float64]:
        """One noisy copy of ``x``, a real array of any shape holding n numbers; float64, on the grid."""
        centre = expect_vector("x", x, self.dimension)
        noise = np.empty(self.dimension)
        for start in range(0, self.dimension, CHUNK):
            chunk = noise[start : start + CHUNK]
            rng.standard_normal(out=chunk)
            chunk *= self.sigma
            chunk += centre[start : start + CHUNK]
            round_to_grid(chunk, self.grid)
        return noise.reshape(np.shape(x))

    def privacy_loss(self, distance: float) -> float:
        """The largest |ln(density ratio)| of two inputs at ``distance``: infinity, but 0 at distance 0."""
        expect_distance("distance", distance)
        return math.inf if distance else 0.0

    def log_density(self, x: ArrayLike, centre: ArrayLike) -> float:
        """ln of the density of the output at ``x`` for input ``centre``: −(n/2)ln(2πσ²) − ‖x − centre‖₂²/(2σ²)."""
        point = expect_vector("x", x, self.dimension)
        origin = expect_vector("centre", centre, self.dimension)
        distance = euclidean_norm(np.subtract(point, origin, dtype=np.float64)) / self.sigma
        return -self.dimension * (math.log(2 * math.pi) / 2 + math.log(self.sigma)) - distance * distance / 2

    def event(self, radius: float) -> GaussianRelease:
        """The record of one release that was meant to hide the input up to Euclidean distance ``radius``."""
        expect_positive("radius", radius)
        return GaussianRelease(self.dimension, self.sigma, radius)

    @property
    def component_variance(self) -> float:
        """Var ρ_i = σ²; coordinates are independent."""
        return self.sigma**2

    @property
    def mean_norm(self) -> float:
        """E‖ρ‖₂ = σ·√2·Γ((n + 1)/2)/Γ(n/2), close to σ·√n."""
        n = self.dimension
        return self.sigma * math.sqrt(2) * math.exp(float(gammaln((n + 1) / 2) - gammaln(n / 2)))

    def norm_quantile(self, probability: float) -> float:
        """The length that ‖ρ‖₂ ~ σ·χ(n) stays below with ``probability`` (0 gives 0, 1 gives inf)."""
        expect_probability("probability", probability)
        return self.sigma * math.sqrt(2 * float(gammaincinv(self.dimension / 2, probability)))

    @property
    def grid(self) -> float:
        """The spacing of the outputs: 2^(⌊log₂ σ⌋ − 20)."""
        return power_of_two_grid(self.sigma)
