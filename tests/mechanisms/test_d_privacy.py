"""d-privacy end to end: outputs of two inputs are binned, and P(bin) ≤ e^{loss}·Q(bin) must hold both ways.

For an output y of inputs x, x' the loss at claimed ε is l(y) = ε(‖y − x'‖ − ‖y − x‖), between −ε·d and ε·d, and is
what d-privacy allows for a small bin around y. So with narrow bins of l, each with upper edge u,

    Σ over bins with l ≥ 0 of e^{−u}·P(bin)  ≤  Q(l ≥ 0),

and the same with x and x' exchanged. Both sides are means of numbers in [0, 1], so their difference in units of its
standard error is compared with 6.1, the normal quantile of 1 − 5·10⁻¹⁰. For n = 1 the top bin is the sharp event
beyond x. Weighting by the bin's own loss, and not by e^{−ε·d} for all, is what makes an 11 % understatement visible in
many dimensions, where the largest loss is almost never reached.
"""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie import rng
from coterie.mechanisms.l2_laplace import L2Laplace
from coterie.mechanisms.randomness import NoiseSource

CRITICAL = 6.1
WIDTH = 0.005  # of a bin of l
UNDERSTATED = 1 / 1.11


def excess(ours: NDArray[np.float64], theirs: NDArray[np.float64], largest: float) -> float:
    """How far the left side above exceeds the right one, in standard errors.

    ``ours`` and ``theirs`` are the claimed losses l(y) of the outputs of x and of x'; ``largest`` is ε·d.
    """
    upper = np.minimum(np.floor(np.maximum(ours, 0) / WIDTH) * WIDTH + WIDTH, largest)
    left = np.where(ours >= 0, np.exp(-upper), 0.0)
    right = (theirs >= 0).astype(float)
    error = math.sqrt(left.var() / left.size + right.var() / right.size)
    return float((left.mean() - right.mean()) / error)


def outputs(dimension: int, distance: float, draws: int, source: NoiseSource) -> NDArray[np.float64]:
    """Distances of M(x) to x and to x', and of M(x') to x' and x, for x = 0 and x' = (distance, 0, …): (4, draws)."""
    mechanism = L2Laplace(dimension, 1.0)
    other = np.zeros(dimension)
    other[0] = distance
    kept = np.empty((4, draws))
    for draw in range(draws):
        one, two = mechanism(np.zeros(dimension), rng=source), mechanism(other, rng=source)
        kept[:, draw] = [np.linalg.norm(v) for v in (one, one - other, two - other, two)]
    return kept


def both_ways(distances: NDArray[np.float64], distance: float, claimed: float) -> tuple[float, float]:
    """The excess from x to x' and from x' to x when ε is claimed to be ``claimed``."""
    near_x, far_x, near_other, far_other = distances
    forward = excess(claimed * (far_x - near_x), claimed * (near_other - far_other), claimed * distance)
    backward = excess(claimed * (far_other - near_other), claimed * (near_x - far_x), claimed * distance)
    return forward, backward


@pytest.mark.parametrize(
    ("dimension", "distance"),
    [(1, 1.0), (1, 2.0), (2, 2.0), (3, 3.0), (11, 3.0), (11, 6.0), (1000, 50.0)],
)
def test_the_bound_holds_both_ways_and_an_understated_epsilon_is_rejected(dimension: int, distance: float) -> None:
    distances = outputs(dimension, distance, 50_000, rng.seeded(7, dimension, int(distance)))
    assert max(both_ways(distances, distance, 1.0)) < CRITICAL
    assert min(both_ways(distances, distance, UNDERSTATED)) > CRITICAL


def test_the_bound_holds_for_the_secure_generator(replayed: NoiseSource) -> None:
    distances = outputs(2, 2.0, 15_000, replayed)
    assert max(both_ways(distances, 2.0, 1.0)) < CRITICAL
    assert min(both_ways(distances, 2.0, 0.8)) > CRITICAL
