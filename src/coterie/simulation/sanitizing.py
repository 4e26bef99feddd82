"""``LayerwiseLaplace.release`` and the client's gate around it, for many clients at once. Simulation only.

The numbers are the deployed mechanism's, given the same draws; the tests hold the two together. The noise comes from
a seeded generator, so nothing that leaves here would be protected.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.mechanisms.grid import BITS
from coterie.mechanisms.layerwise import FixedNeighbourhood, LayerwiseLaplace

Array = NDArray[np.float64]


class BatchSanitizer:
    """The mechanisms of the clients of a round: the same layers and kind of neighbourhood, their own ν and lengths."""

    def __init__(self, mechanisms: Sequence[LayerwiseLaplace]) -> None:
        """One mechanism a client, all with the same ``sizes``."""
        self.sizes = mechanisms[0].sizes
        self._fixed = isinstance(mechanisms[0].neighbourhood, FixedNeighbourhood)
        self._multipliers = np.array([mechanism.noise_multiplier for mechanism in mechanisms])
        self._lengths = np.array([_lengths(mechanism) for mechanism in mechanisms])  # (m, L)

    def __call__(self, updates: Array, normals: Array, gammas: Array) -> Array:
        """Sanitized copies of ``updates`` (m, n), from N(0, 1) draws (m, n) and Gamma(n_l, 1) draws (m, L).

        A layer whose normals are all zero has no direction (probability 0 in real numbers) and gets no noise.
        """
        noisy = np.empty_like(updates)
        for layer, (size, stop) in enumerate(zip(self.sizes, accumulate(self.sizes), strict=True)):
            own = slice(stop - size, stop)
            centre, direction = updates[:, own], normals[:, own]
            norms = _norms(centre)
            if self._fixed:
                radii = self._lengths[:, layer]
                # As ``neighbourhood.clip``, whose care for overflow updates made of float32 numbers do not need.
                margin = (size + 8) * 2.0**-53
                outside = norms * (1 + margin) > radii
                shrunk = np.divide(radii * (1 - 2 * margin), norms, out=np.ones_like(norms), where=outside)
                centre = centre * shrunk[:, None]
            else:
                radii = np.maximum(norms, self._lengths[:, layer])
            epsilons = size / (self._multipliers * radii)
            lengths = np.maximum(_norms(direction), np.finfo(np.float64).tiny)
            sums = noisy[:, own]
            np.multiply(direction, (gammas[:, layer] / epsilons / lengths)[:, None], out=sums)
            sums += centre
            # ``mechanisms.grid.power_of_two_grid`` of the standard deviation √(n + 1)/ε.
            exponents = np.frexp(np.sqrt(size + 1.0) / epsilons)[1] - 1 - BITS
            round_to_grids(sums, exponents[:, None], out=sums)
        return noisy


def round_to_grids(values: Array, exponents: NDArray[np.integer], out: Array | None = None) -> Array:
    """``values`` rounded to the nearest multiple of 2^exponent, ties to even multiples; in ``out``, if there is one."""
    grids = np.ldexp(1.0, exponents)
    rounded: Array = np.divide(values, grids, out=out)
    np.rint(rounded, out=rounded)
    rounded *= grids
    return rounded


def draw(sizes: Sequence[int], clients: int, *, rng: np.random.Generator) -> tuple[Array, Array]:
    """The N(0, 1) draws (clients, n) and Gamma(n_l, 1) draws (clients, L) of one round."""
    normals = rng.standard_normal((clients, sum(sizes)))
    # Layer by layer: three times as fast as one call with an array of shapes.
    return normals, np.stack([rng.standard_gamma(size, clients) for size in sizes], axis=1)


def draw_for_one(sizes: Sequence[int], seed: int) -> tuple[Array, Array]:
    """As ``draw`` for one client, (1, n) and (1, L), in a third of the time for a large model.

    Its normals are float32's, as the sums that they become part of leave in float32.
    """
    generator = torch.Generator().manual_seed(seed)
    normals = torch.empty(1, sum(sizes)).normal_(generator=generator).double().numpy()
    rng = np.random.default_rng(seed)
    return normals, np.array([[rng.standard_gamma(size) for size in sizes]])


def finite_updates(starts: NDArray[np.float32], trained: NDArray[np.float32]) -> Array:
    """trained − start in float64, (m, n); the zero update where training diverged, as the gate has it."""
    updates = trained.astype(np.float64) - starts
    if not np.isfinite(updates).all():
        updates[~np.isfinite(updates).all(axis=1)] = 0.0
    return updates


def sent_vectors(starts: NDArray[np.float32], updates: Array) -> NDArray[np.float32]:
    """start + sanitized update, held inside float32's range: what the gate hands out, (m, n)."""
    limit = float(np.finfo(np.float32).max)
    return np.clip(starts + updates, -limit, limit).astype(np.float32)


def _norms(vectors: Array) -> Array:
    norms: Array = np.sqrt(np.einsum("mn,mn->m", vectors, vectors))
    return norms


def _lengths(mechanism: LayerwiseLaplace) -> tuple[float, ...]:
    neighbourhood = mechanism.neighbourhood
    return neighbourhood.radii if isinstance(neighbourhood, FixedNeighbourhood) else neighbourhood.floors
