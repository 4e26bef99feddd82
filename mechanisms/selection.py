"""Choosing a hypothesis by its loss without showing the losses: two mechanisms with pure local guarantees."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.mechanisms.arguments import expect_count, expect_positive
from coterie.mechanisms.events import SelectionRelease
from coterie.mechanisms.randomness import NoiseSource


@dataclass(frozen=True)
class RandomizedArgmin:
    """k-ary randomized response on the index of the smallest loss.

    P(j) = e^ε/(e^ε + k − 1) for the argmin and 1/(e^ε + k − 1) for every other index. Guarantee: ε-local
    differential privacy for any two data sets of the client, as every ratio of two probabilities of one index
    is at most e^ε. How far the losses are apart plays no part. Source: Kairouz, Oh, Viswanath, "Extremal
    mechanisms for local differential privacy" (JMLR 2016), Section 3.

    A loss that is not finite counts as the worst; of equal losses the lowest index counts as the smallest.
    For k = 1 the result is 0. Raises ``ValueError`` for ε ≤ 0 or not finite, and for no losses.
    """

    epsilon: float

    def __post_init__(self) -> None:
        expect_positive("epsilon", self.epsilon)

    def __call__(self, losses: ArrayLike, *, rng: NoiseSource) -> int:
        """A random index."""
        return _draw(self.probabilities(losses), rng)

    def probabilities(self, losses: ArrayLike) -> NDArray[np.float64]:
        """The law of the index, shape (k,)."""
        values = _losses(losses)
        other = math.exp(-self.epsilon)
        weights = np.full(values.size, other)
        weights[np.argmin(values)] = 1.0
        return weights / (1 + other * (values.size - 1))

    def event(self, hypotheses: int) -> SelectionRelease:
        """The record of one choice among ``hypotheses``."""
        expect_count("hypotheses", hypotheses)
        return SelectionRelease("randomized-argmin", hypotheses, self.epsilon)


@dataclass(frozen=True)
class ExponentialSelection:
    """The exponential mechanism on losses clipped to [0, B]: P(j) ∝ exp(−ε·loss_j/(2B)).

    ``loss_bound`` is B > 0, public. Guarantee: ε-local differential privacy for any two data sets of the
    client: each clipped loss moves by at most B, which changes a weight and the normaliser by at most e^(ε/2)
    each. Near ties are chosen nearly equally, where ``RandomizedArgmin`` favours the argmin whatever the gap.
    Source: McSherry, Talwar, "Mechanism design via differential privacy" (FOCS 2007), Theorem 6, with
    sensitivity B.

    A loss that is not finite counts as B, a negative one as 0. For k = 1 the result is 0. Raises
    ``ValueError`` for ε or B that is not positive and finite, and for no losses.
    """

    epsilon: float
    loss_bound: float

    def __post_init__(self) -> None:
        expect_positive("epsilon", self.epsilon)
        expect_positive("loss_bound", self.loss_bound)

    def __call__(self, losses: ArrayLike, *, rng: NoiseSource) -> int:
        """A random index."""
        return _draw(self.probabilities(losses), rng)

    def probabilities(self, losses: ArrayLike) -> NDArray[np.float64]:
        """The law of the index, shape (k,)."""
        fractions = np.clip(_losses(losses) / self.loss_bound, 0.0, 1.0)
        weights: NDArray[np.float64] = np.exp(-self.epsilon / 2 * (fractions - fractions.min()))
        weights /= weights.sum()
        return weights

    def event(self, hypotheses: int) -> SelectionRelease:
        """The record of one choice among ``hypotheses``."""
        expect_count("hypotheses", hypotheses)
        return SelectionRelease("exponential", hypotheses, self.epsilon)


def _losses(losses: ArrayLike) -> NDArray[np.float64]:
    """The losses as float64 (k,), with infinity in place of what is not finite."""
    values = np.array(losses, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"Expected losses to be one number per hypothesis, found shape {values.shape}")
    values[~np.isfinite(values)] = np.inf
    return values


def _draw(probabilities: NDArray[np.float64], rng: NoiseSource) -> int:
    """An index by inversion of the cumulative law; the draw has 53 bits."""
    cumulative = np.cumsum(probabilities)
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
