"""Exact δ of weighted label sums: two Gaussians of different mean and variance, averaged over what is known."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from coterie.mechanisms.arguments import expect_count, expect_distance, expect_positive
from coterie.mechanisms.labels.arguments import Array

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_FARTHEST = 12.0  # standard deviations of a normal that are integrated over: 4e-33 lies beyond
# Panels shrink towards 0, as a sum without much noise gives a mean shift away within a tiny g.
_EDGES = np.union1d(np.append(0.0, np.geomspace(1e-12, 1.0, 50)), np.linspace(0.0, _FARTHEST, 121))
_LOG_RANGE = 40.0  # e to this power times the usual tan θ: beyond it lies less than 1e-17 of its law
_LOG_PANEL = 0.25
_NULL = 1e-10  # of the squared norm of the labels: a residual below it is rounding, and hides nothing


@dataclass(frozen=True)
class RegressionBags:
    """What δ of a wtd-LBA bag depends on: ‖(I − P)y‖² and, per member i, ((I − P)y)_i and P_ii.

    P projects on the columns of the bag's features. All of it but P depends on the private labels.
    """

    residual: float
    residuals: Array
    leverages: Array

    @classmethod
    def of(cls, features: ArrayLike, labels: ArrayLike) -> Self:
        """From the ``features`` (k, d) and ``labels`` (k,) of one bag; linearly dependent columns are allowed."""
        rows, values = np.asarray(features, np.float64), np.asarray(labels, np.float64)
        left, singular, _ = np.linalg.svd(rows, full_matrices=False)
        basis = left[:, singular > singular[0] * max(rows.shape) * 2.0**-52]
        residuals = values - basis @ (basis.T @ values)
        squared = float(residuals @ residuals)
        if squared <= _NULL * float(values @ values):
            return cls(0.0, np.zeros(len(values)), np.clip(np.sum(basis**2, axis=1), 0, 1))
        return cls(squared, residuals, np.clip(np.sum(basis**2, axis=1), 0, 1))


def regression_delta(bag: RegressionBags, change: float, epsilon: float) -> tuple[Array, Array]:
    """δ(ε) of each member of a wtd-LBA bag whose label changes by D: from the labels to the changed ones, and back.

    Given the sum of features, the sum of labels is N(·, s²) before and N(· + D√h·g, s² + 2Dr + D²(1 − h)) after, with
    s² = ‖(I − P)y‖², r = ((I − P)y)_i, h = P_ii, and a g ~ N(0, 1) that who sees the sums knows; so δ is the average
    over g of the hockey stick of the two. No noise in a sum, before or after, gives 1. Data-dependent: no DP release.
    """
    expect_distance("epsilon", epsilon)
    before = np.full(bag.residuals.shape, bag.residual)
    after = bag.residual + 2 * change * bag.residuals + change**2 * (1 - bag.leverages)
    points, weights = _panels(_EDGES)
    weights = weights * np.sqrt(2 / math.pi) * np.exp(-(points**2) / 2)  # both signs of g
    shifts = abs(change) * np.sqrt(bag.leverages)[:, None] * points
    forth = gaussian_pair_delta(epsilon, shifts, before[:, None], after[:, None])
    back = gaussian_pair_delta(epsilon, shifts, after[:, None], before[:, None])
    return np.minimum(forth @ weights, 1.0), np.minimum(back @ weights, 1.0)


def gaussian_pair_delta(epsilon: float, shift: ArrayLike, variance: ArrayLike, other: ArrayLike) -> Array:
    """δ(ε) from N(0, ``variance``) to N(``shift``, ``other``), in closed form; arguments broadcast.

    The log-ratio of the densities exceeds ε where a x² + b x + c > 0, a = (1/v' − 1/v)/2, b = −t/v',
    c = t²/(2v') + ln(v'/v)/2 − ε: between two roots if v' ≥ v, outside of them if v' < v. A variance of 0 gives 1.
    """
    t, v, w = np.broadcast_arrays(*(np.asarray(array, np.float64) for array in (shift, variance, other)))
    proper = (v > 0) & (w > 0)
    v, w = np.where(proper, v, 1.0), np.where(proper, w, 1.0)
    a = (v - w) / (2 * v * w)
    b = -t / w
    c = t**2 / (2 * w) + np.log(w / v) / 2 - epsilon
    discriminant = b**2 - 4 * a * c
    half = -(b + np.copysign(np.sqrt(np.maximum(discriminant, 0.0)), b)) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        one = np.where(a == 0, -np.copysign(np.inf, half), half / a)
        two = np.where(half == 0, 0.0, c / half)
    low, high = np.minimum(one, two), np.maximum(one, two)
    outside = a > 0
    p = _interval(low, high, 0.0, np.sqrt(v), outside)
    q = _interval(low, high, t, np.sqrt(w), outside)
    none = np.where(outside, 1.0, 0.0)  # no root: everywhere or nowhere
    rootless = (discriminant < 0) | ((a == 0) & (b == 0))
    p, q = np.where(rootless, none, p), np.where(rootless, none, q)
    return np.where(proper, np.maximum(p - math.exp(epsilon) * q, 0.0), 1.0)


def gaussian_delta(epsilon: float, mu: ArrayLike) -> Array:
    """δ_G(ε; μ) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ), elementwise; 0 at μ = 0 and 1 at infinity."""
    expect_distance("epsilon", epsilon)
    values = np.asarray(mu, dtype=np.float64)
    usual = (values > 0) & np.isfinite(values)
    m = np.where(usual, values, 1.0)
    upper = special.log_ndtr(m / 2 - epsilon / m)
    lower = epsilon + special.log_ndtr(-m / 2 - epsilon / m)
    delta = -np.exp(upper) * np.expm1(np.minimum(lower - upper, 0.0))
    return np.where(usual, delta, np.where(values == 0, 0.0, 1.0))


def noisy_bag_delta(noisy: int, change: float, epsilon: float, *, own: bool) -> float:
    """δ(ε) of one label in a noisy-wtd-LLP bag with r = ``noisy`` noisy labels that changes by D, over the weights.

    μ = D·tan θ with density ∝ cos^(r−1) θ on [0, π/2] if the label is not noisy itself; μ = D·sin θ with density
    ∝ cos^(r−2) θ if it is (``own``): μ²/D² is χ²₁/χ²_r, or Beta(1/2, (r − 1)/2). For r = 0 it is 1.
    """
    expect_count("noisy", noisy, least=int(own))
    expect_positive("change", change)
    expect_distance("epsilon", epsilon)
    if noisy == 0:
        return 1.0
    power = noisy - 1 - own
    if power < 0:  # the only noise is the label's own, at its own weight
        return float(gaussian_delta(epsilon, change))
    # In u = ln tan θ the law of θ and δ_G both vary over lengths of order one, whatever r, D and ε.
    first = -_LOG_RANGE - math.log(power + 1) / 2
    logs, weights = _panels(np.linspace(first, _LOG_RANGE, round((_LOG_RANGE - first) / _LOG_PANEL) + 1))
    log_cosine = -np.logaddexp(0.0, 2 * logs) / 2
    densities = np.exp((power + 2) * log_cosine + logs - _log_cosine_power(power))  # dθ = cos²θ·tan θ du
    mu = change * np.exp(logs + log_cosine if own else logs)
    return min(1.0, float(weights @ (densities * gaussian_delta(epsilon, mu))))


def _log_cosine_power(power: int) -> float:
    """ln ∫₀^(π/2) cosᵖ θ dθ = ln(√π·Γ((p + 1)/2)/(2Γ(p/2 + 1)))."""
    return float(
        math.log(math.pi) / 2 - math.log(2) + special.gammaln((power + 1) / 2) - special.gammaln(power / 2 + 1)
    )


def _panels(edges: Array) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights of 8 points on each panel between neighbouring ``edges``."""
    half = np.diff(edges)[:, None] / 2
    return (edges[:-1, None] + half + half * _NODES).reshape(-1), (half * _WEIGHTS).reshape(-1)


def _interval(low: Array, high: Array, mean: Array | float, deviation: Array, outside: Array) -> Array:
    """P(low < x < high) for x ~ N(mean, deviation²), or of the rest where ``outside``; accurate in both tails."""
    left, right = (low - mean) / deviation, (high - mean) / deviation
    flip = left > 0
    inner = special.ndtr(np.where(flip, -left, right)) - special.ndtr(np.where(flip, -right, left))
    return np.asarray(np.where(outside, special.ndtr(left) + special.ndtr(-right), inner))
