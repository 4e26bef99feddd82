"""The client's private choice of a hypothesis, ``mechanisms.selection``, for many clients at once. Simulation only.

The numbers are the deployed mechanisms', given the same uniform draws; the tests hold the two together. The draws
come from a seeded generator, so no choice made here would be protected.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.mechanisms.selection import ExponentialSelection, RandomizedArgmin

Mechanism = RandomizedArgmin | ExponentialSelection


@dataclass(frozen=True)
class PrivateChoice:
    """A mechanism, and a uniform draw from [0, 1) for each client that chooses (…)."""

    mechanism: Mechanism
    uniforms: NDArray[np.float64]

    def __call__(self, losses: NDArray[np.float64]) -> NDArray[np.int64]:
        """Each client's hypothesis (…) from its losses (…, k): ``mechanism(losses, rng=…)`` of every one."""
        cumulative = np.cumsum(probabilities(self.mechanism, losses), axis=-1)
        found: NDArray[np.int64] = (cumulative <= (self.uniforms * cumulative[..., -1])[..., None]).sum(axis=-1)
        return found

    def of(self, place: int) -> "PrivateChoice":
        """The choice of one client of the first run."""
        return PrivateChoice(self.mechanism, self.uniforms[0, place])


def probabilities(mechanism: Mechanism, losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """``mechanism.probabilities`` over the last axis: (…, k) → (…, k)."""
    values = np.where(np.isfinite(losses), losses, np.inf)
    weights: NDArray[np.float64]
    if isinstance(mechanism, RandomizedArgmin):
        other = math.exp(-mechanism.epsilon)
        weights = np.full(values.shape, other)
        np.put_along_axis(weights, np.argmin(values, axis=-1)[..., None], 1.0, axis=-1)
        weights /= 1 + other * (values.shape[-1] - 1)
    else:
        with np.errstate(over="ignore"):  # an infinite quotient is clipped as any large one
            fractions = np.clip(values / mechanism.loss_bound, 0.0, 1.0)
        weights = np.exp(-mechanism.epsilon / 2 * (fractions - fractions.min(axis=-1, keepdims=True)))
        weights /= weights.sum(axis=-1, keepdims=True)
    return weights
