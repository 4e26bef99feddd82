"""Exact privacy-loss distributions: how often a release says how much about which of two true values it came from.

For two neighbouring true values with output laws P and Q, the loss of an output x is L(x) = ln P(x)/Q(x). The release
is (ε, δ) indistinguishable exactly when δ ≥ δ(ε) = E_P[(1 − e^(ε−L))₊]. Losses of independent or adaptively chosen
releases add (``composition``). Every pair here is symmetric: exchanging P and Q leaves the law of L unchanged, so one
distribution covers both directions.

Everything errs on the safe side; docs/privacy.md derives the formulas and bounds the numerical errors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from coterie.mechanisms.arguments import expect_count, expect_distance, expect_positive, expect_probability

Array = NDArray[np.float64]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_PANELS = 128
# 1 − e^(−u) varies over u of order one, however wide a panel is: panels end here too, counted from where u = 0.
_STEPS: Array = np.array([2.0, 4.0, 8.0, 16.0, 32.0])
_LOG_NEGLIGIBLE = -75.0  # ln of the density, relative to its maximum, below which the window ends
_RECURRENCE_STEPS = 1000
_QUADRATURE_ERROR = 1e-10  # relative; every computed probability is raised by this much
_UNIT_ROUNDOFF = 2.0**-53


@dataclass(frozen=True, slots=True)
class Atoms:
    """A privacy loss as probabilities ``masses`` at ``losses``, and ``infinite`` for what lies above them all.

    An expectation over the loss of a function that is smooth inside the panels is not above the sum over the atoms.
    """

    losses: Array
    masses: Array
    infinite: float


@dataclass(frozen=True, slots=True)
class L2LaplaceLoss:
    """The privacy loss of n-dimensional L2 Laplace noise between two points at distance r.

    The noise density is ∝ exp(−ε‖x‖₂) on Rⁿ. Only n (``dimension``) and D = ε·r (``distance``, the distance in
    units of the noise scale 1/ε) matter. The loss is L = ‖y − De₁‖ − ‖y‖ with ‖y‖ ~ Gamma(n, 1) and a uniform
    direction: L = √(ρ² − 2ρDt + D²) − ρ, within [−D, D].

    For n ≥ 2 and L = D·sin θ, θ in [−π/2, π/2] has the density (prolate spheroidal coordinates about both points)

        g(θ) ∝ e^(z sin θ) cosⁿ⁻²θ (κ + cos²θ),   z = D/2,   κ = ((n−1)/z)·K_{n/2}(z)/K_{n/2−1}(z),

    with K the modified Bessel function of the second kind. It is smooth, with one maximum, so that Gauss-Legendre
    quadrature is exact to ``relative_error`` at any n, in the tails too. For n = 1 (ordinary Laplace) L has atoms at
    ±D of mass 1/2 and e^(−D)/2, and the density e^((L−D)/2)/4 between them.

    The pair at distance exactly r dominates every pair that is nearer: δ(ε) grows with D (docs/privacy.md), so a
    price at D holds for all data sets within r. Raises ``ValueError`` for n < 1, and for D ≤ 0 or not finite.
    """

    dimension: int
    distance: float

    def __post_init__(self) -> None:
        expect_count("dimension", self.dimension)
        expect_positive("distance", self.distance)

    @property
    def relative_error(self) -> float:
        """Bound on the relative error of a probability: quadrature, the Bessel ratio, and rounding of ln g."""
        return _QUADRATURE_ERROR + 16 * _UNIT_ROUNDOFF * _law(self).magnitude

    @property
    def mean(self) -> float:
        """E[L] under P, the Kullback-Leibler divergence of the pair."""
        losses, masses = self.quadrature()
        return float(losses @ masses)

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of L under P; tends to D/√n as n grows."""
        losses, masses = self.quadrature()
        return math.sqrt(float((losses - losses @ masses) ** 2 @ masses))

    @property
    def window(self) -> tuple[float, float]:
        """Losses outside of which the probability is below e^(−75)·π of the density's maximum."""
        law = _law(self)
        return float(_loss_at(self, np.array(law.low))), float(_loss_at(self, np.array(law.high)))

    def tail(self, loss: float) -> float:
        """P(L > loss) under P, not below the true value and at most 1."""
        if loss >= self.distance:
            return 0.0
        _, masses = self.quadrature(above=loss)
        return min(1.0, float(masses.sum()) + _law(self).beyond)

    def delta(self, epsilon: float) -> float:
        """δ(ε) = E[(1 − e^(ε−L))₊] for ε ≥ 0, not below the true value. Zero from ε = D on."""
        expect_distance("epsilon", epsilon)
        if epsilon >= self.distance:
            return 0.0
        losses, masses = self.quadrature(above=epsilon, edges=epsilon + _STEPS)
        return min(1.0, float(-np.expm1(epsilon - losses) @ masses) + _law(self).beyond)

    def epsilon(self, delta: float) -> float:
        """The smallest ε ≥ 0 with δ(ε) ≤ ``delta``, from above to a relative 1e-12. δ = 0 gives D."""
        expect_probability("delta", delta)
        return _smallest_epsilon(self.delta, delta, self.distance)

    def atoms(self, interval: float) -> Atoms:
        """The loss as atoms, with panels that end at the multiples of ``interval``."""
        losses, masses = self.quadrature(edges=_cell_edges(self.window, interval))
        return Atoms(losses, masses, _law(self).beyond)

    def quadrature(self, above: float = -math.inf, edges: Array | None = None) -> tuple[Array, Array]:
        """Losses above ``above`` and their probabilities under P, as Gauss-Legendre nodes within panels.

        A function that is smooth between the ``edges`` (losses) has the sum of its values at the nodes, weighted by
        the probabilities, as its expectation.
        """
        law = _law(self)
        if above >= float(_loss_at(self, np.array(law.high))) and self.dimension > 1:
            return np.empty(0), np.empty(0)
        start = law.low if above <= -self.distance else max(law.low, float(_position_of(self, np.array(above))))
        bounds = np.linspace(min(start, law.high), law.high, _PANELS + 1)
        if edges is not None:
            inner = _position_of(self, edges)
            bounds = np.union1d(bounds, inner[(inner > start) & (inner < law.high)])
        positions, weights = _gauss_legendre(bounds)
        masses = weights * np.exp(_log_density(self, positions) - law.log_total) * (1 + self.relative_error)
        losses = _loss_at(self, positions)
        if self.dimension > 1:
            return losses, masses
        atoms = np.array([-self.distance, self.distance])
        weights = np.array([0.5 * math.exp(-self.distance), 0.5])
        kept = atoms > above
        return np.append(losses, atoms[kept]), np.append(masses, weights[kept])


@dataclass(frozen=True, slots=True)
class _Law:
    """The density of a position (θ, or L itself for n = 1), its window and what is left out of it."""

    kappa: float
    mode: float  # sin θ at the maximum
    log_total: float  # ln of the integral of exp(log density)
    low: float
    high: float
    beyond: float  # at least the probability above the window
    magnitude: float  # bounds the terms of the log density, whose rounding is relative to them


@lru_cache(maxsize=4096)
def _law(loss: L2LaplaceLoss) -> _Law:
    if loss.dimension == 1:
        return _Law(0.0, 1.0, 0.0, max(-loss.distance, loss.distance - 160.0), loss.distance, 0.0, 0.0)
    n, z = loss.dimension, loss.distance / 2
    kappa = (n - 1) / z * bessel_ratio(n / 2 - 1, z)
    # The derivative of ln g has the sign of a function that falls where sin θ > 0 and is positive elsewhere.
    low, high = 0.0, 1.0
    for _ in range(200):
        s = (low + high) / 2
        rising = z - (n - 2) * s / (1 - s * s) - 2 * s / (kappa + 1 - s * s) if s < 1 else -math.inf
        low, high = (s, high) if rising > 0 else (low, s)
    mode = high if n > 2 else low
    cosine_squared = (1 - mode) * (1 + mode)
    peak_term = (n - 2) * abs(math.log(cosine_squared)) / 2 if n > 2 else 0.0
    unscaled = _Law(kappa, mode, 0.0, 0.0, 0.0, 0.0, z * mode + peak_term + 100)
    peak = math.asin(mode)
    left = _window_end(loss, unscaled, peak, -math.pi / 2)
    right = _window_end(loss, unscaled, peak, math.pi / 2)
    bounds = np.linspace(left, right, _PANELS + 1)
    positions, weights = _gauss_legendre(bounds)
    total = float(weights @ np.exp(_log_density(loss, positions, unscaled)))
    # Beyond the window the density falls, so its value at the end bounds it.
    edge = math.exp(float(_log_density(loss, np.array(right), unscaled)))
    beyond = edge * (math.pi / 2 - right) / total
    return _Law(kappa, mode, math.log(total), left, right, beyond, unscaled.magnitude)


def _window_end(loss: L2LaplaceLoss, law: _Law, peak: float, end: float) -> float:
    """Where the density has fallen to a negligible part of its maximum, between the maximum and ``end``."""
    inside, outside = peak, end
    for _ in range(100):
        middle = (inside + outside) / 2
        if float(_log_density(loss, np.array(middle), law)) > _LOG_NEGLIGIBLE:
            inside = middle
        else:
            outside = middle
    return outside


def _log_density(loss: L2LaplaceLoss, positions: Array, law: _Law | None = None) -> Array:
    """ln g(θ) less its value at the maximum (n ≥ 2), or the log density of L (n = 1)."""
    if loss.dimension == 1:
        return (positions - loss.distance) / 2 - math.log(4)
    law = law or _law(loss)
    sine, cosine = np.sin(positions), np.abs(np.cos(positions))
    result = loss.distance / 2 * (sine - law.mode) + np.log(law.kappa + cosine**2)
    mode_squared = (1 - law.mode) * (1 + law.mode)
    if loss.dimension > 2:
        with np.errstate(divide="ignore"):  # cos θ = 0 at an end: the density is 0
            log_cosine = np.where(np.abs(sine) < 0.5, np.log1p(-(sine**2)) / 2, np.log(cosine))
        result = result + (loss.dimension - 2) * (log_cosine - math.log(mode_squared) / 2)
    return np.asarray(result - math.log(law.kappa + mode_squared), dtype=np.float64)


def _gauss_legendre(bounds: Array) -> tuple[Array, Array]:
    """Nodes and weights of 8-point quadrature on each panel between neighbouring ``bounds``: shape (8·panels,)."""
    half = np.diff(bounds)[:, None] / 2  # (panels, 1)
    return (bounds[:-1, None] + half + half * _NODES).reshape(-1), (half * _WEIGHTS).reshape(-1)


def _cell_edges(window: tuple[float, float], interval: float) -> Array:
    """The multiples of ``interval`` inside the window, and losses above each one between which e^(−loss) is smooth."""
    low, high = window
    grid = interval * np.arange(math.floor(low / interval), math.ceil(high / interval), dtype=np.float64)
    return np.asarray(grid[:, None] + np.append(0.0, _STEPS[interval > _STEPS]), dtype=np.float64).reshape(-1)


def _loss_at(loss: L2LaplaceLoss, positions: Array) -> Array:
    return positions if loss.dimension == 1 else np.asarray(loss.distance * np.sin(positions), dtype=np.float64)


def _position_of(loss: L2LaplaceLoss, losses: Array) -> Array:
    if loss.dimension == 1:
        return losses
    return np.asarray(np.arcsin(np.clip(losses / loss.distance, -1.0, 1.0)), dtype=np.float64)


def bessel_ratio(order: float, z: float) -> float:
    """K_{order+1}(z)/K_order(z) for orders 0, 1/2, 1, 3/2, … and z > 0, without under- or overflow.

    By the recurrence R_{μ+1} = 2(μ+1)/z + 1/R_μ, upwards, where it is stable: each step divides a relative error by
    R² > 1. Orders above 1000 start 1000 steps below, from the upper bound R_μ < (μ + 1/2 + √((μ + 1/2)² + z²))/z
    (Segura 2011), whose own relative error is below 1/√(μ² + z²).
    """
    start = order % 1 if order <= _RECURRENCE_STEPS else order - _RECURRENCE_STEPS
    if start == 0:
        ratio = float(special.kve(1, z) / special.kve(0, z))
    elif start == 0.5:
        ratio = 1 + 1 / z
    else:
        ratio = (start + 0.5 + math.hypot(start + 0.5, z)) / z
    for step in range(round(order - start)):
        ratio = 2 * (start + step + 1) / z + 1 / ratio
    return ratio


def _smallest_epsilon(delta_of: Callable[[float], float], delta: float, high: float) -> float:
    """The smallest ε in [0, ``high``] at which ``delta_of``, which falls, is at most ``delta``; from above."""
    low = 0.0
    if delta_of(low) <= delta:
        return low
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if delta_of(middle) <= delta else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class GaussianLoss:
    """The privacy loss of isotropic Gaussian noise N(0, σ²I) between two points at distance r; μ = r/σ.

    L ~ N(μ²/2, μ²) in every dimension, and δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) (Balle, Wang 2018, Theorem 5).
    Releases compose exactly: μ² adds (Dong, Roth, Su 2022, Corollary 3.3). L2 Laplace noise tends to this law with
    μ = D/√n as n grows; at small n that limit is no bound, neither from above nor from below.
    """

    distance: float  # μ

    def __post_init__(self) -> None:
        expect_positive("distance", self.distance)

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of L: μ."""
        return self.distance

    @property
    def window(self) -> tuple[float, float]:
        """Losses outside of which the probability is below 1e-30."""
        centre, width = self.distance**2 / 2, 12 * self.distance
        return centre - width, centre + width

    def delta(self, epsilon: float) -> float:
        """δ(ε) for ε ≥ 0."""
        expect_distance("epsilon", epsilon)
        mu = self.distance
        log_upper = special.log_ndtr(mu / 2 - epsilon / mu)
        log_lower = epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
        return float(-math.exp(log_upper) * np.expm1(min(0.0, log_lower - log_upper)))

    def epsilon(self, delta: float) -> float:
        """The smallest ε ≥ 0 with δ(ε) ≤ ``delta``, from above to a relative 1e-12; infinite for δ < 1e-30."""
        expect_probability("delta", delta)
        target = delta * (1 - _QUADRATURE_ERROR)
        limit = self.window[1]
        return _smallest_epsilon(self.delta, target, limit) if self.delta(limit) <= target else math.inf

    def atoms(self, interval: float) -> Atoms:
        """The loss as atoms, with panels that end at the multiples of ``interval``."""
        low, high = self.window
        edges = _cell_edges(self.window, interval)
        bounds = np.union1d(np.linspace(low, high, _PANELS + 1), edges[(edges > low) & (edges < high)])
        losses, weights = _gauss_legendre(bounds)
        scaled = losses / self.distance - self.distance / 2
        densities = np.exp(-(scaled**2) / 2) / (self.distance * math.sqrt(2 * math.pi))
        beyond = float(special.ndtr(-(high / self.distance - self.distance / 2)))
        return Atoms(losses, weights * densities * (1 + _QUADRATURE_ERROR), beyond)


@dataclass(frozen=True, slots=True)
class ResponseLoss:
    """The privacy loss of k-ary randomized response between two true answers; ``epsilon`` is its pure loss.

    L = ±ε with probability e^ε/(e^ε + k − 1) and 1/(e^ε + k − 1), else 0. For k = 2 this pair dominates every pair
    of output laws whose pure loss is at most ε (Kairouz, Oh, Viswanath 2015, Theorem 8 in its binary form).
    """

    hypotheses: int
    pure: float

    def __post_init__(self) -> None:
        expect_count("hypotheses", self.hypotheses, least=2)
        expect_positive("epsilon", self.pure)

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of L."""
        losses, masses = self._atoms()
        return math.sqrt(float((losses - losses @ masses) ** 2 @ masses))

    @property
    def window(self) -> tuple[float, float]:
        """The smallest and the largest loss."""
        return -self.pure, self.pure

    def delta(self, epsilon: float) -> float:
        """δ(ε) for ε ≥ 0."""
        expect_distance("epsilon", epsilon)
        losses, masses = self._atoms()
        above = losses > epsilon
        return float(-np.expm1(epsilon - losses[above]) @ masses[above])

    def epsilon(self, delta: float) -> float:
        """The smallest ε ≥ 0 with δ(ε) ≤ ``delta``, from above to a relative 1e-12. δ = 0 gives the pure loss."""
        expect_probability("delta", delta)
        return _smallest_epsilon(self.delta, delta, self.pure)

    def atoms(self, interval: float) -> Atoms:
        """The three atoms, whatever the ``interval``."""
        losses, masses = self._atoms()
        return Atoms(losses, masses * (1 + _QUADRATURE_ERROR), 0.0)

    def _atoms(self) -> tuple[Array, Array]:
        other = math.exp(-self.pure)
        weights = np.array([other, (self.hypotheses - 2) * other, 1.0]) / (1 + (self.hypotheses - 1) * other)
        return np.array([-self.pure, 0.0, self.pure]), weights


def relative_noise_leak(dimension: int, ratio: float) -> float:
    """How well the noise's norm alone tells two updates apart in relative mode: a total variation distance.

    Noise scaled by the private update (ε = n/(ν‖δ‖)) has the norm ‖δ‖·(ν/n)·Gamma(n, 1). For two updates whose norms
    have the ratio R ≠ 1 the laws of the norm are x* = n ln R/(1 − 1/R) apart at their crossing, and the distance is
    F_n(x*) − F_n(x*/R), with F_n the Gamma(n, 1) distribution function. It tends to 1 as n grows, and no ν changes
    it. 0 for R = 1.
    """
    expect_count("dimension", dimension)
    expect_positive("ratio", ratio)
    scale = max(ratio, 1 / ratio)
    if scale == 1:
        return 0.0
    crossing = dimension * math.log(scale) / (1 - 1 / scale)
    return float(special.gammainc(dimension, crossing) - special.gammainc(dimension, crossing / scale))
