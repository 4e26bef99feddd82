"""One L2 Laplace mechanism per layer of an update, and what the release costs in total."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.mechanisms.arguments import expect_count, expect_distance, expect_positive, expect_vector
from coterie.mechanisms.events import Neighbourhood, Noise, UpdateRelease
from coterie.mechanisms.l2_laplace import L2Laplace
from coterie.mechanisms.neighbourhood import clip, euclidean_norm
from coterie.mechanisms.randomness import NoiseSource


@dataclass(frozen=True)
class FixedNeighbourhood:
    """Each layer's update is clipped to a public radius C_l: the noise does not depend on the data.

    Formally d-private, hence also locally differentially private (see ``LayerwiseLaplace``).
    """

    radii: tuple[float, ...]

    def __post_init__(self) -> None:
        for layer, radius in enumerate(self.radii):
            expect_positive(f"radii[{layer}]", radius)


@dataclass(frozen=True)
class RelativeNeighbourhood:
    """The paper's heuristic: a layer's noise is scaled by the norm of its own update. **Not d-private.**

    ε_l = n_l/(ν·max(‖δ_l‖₂, floor_l)), arXiv 2206.03396, Algorithm SanitizeUpdate. The ``floors`` are ours: a
    zero update would otherwise get no noise at all and say so.

    Why it is not d-private: the noise's *scale* is a function of the private update. Two data sets with ‖δ‖ ≠
    ‖δ'‖ give densities exp(−ε‖y‖) and exp(−ε'‖y‖) whose log-ratio |ε − ε'|·‖y‖ grows without bound, and a
    single output shows the norm to about one part in √n. As training converges ‖δ‖ goes to zero, and the
    noise with it. For comparison with the paper only; the price n/ν that it charges is what the paper
    charges, not a guarantee.
    """

    floors: tuple[float, ...]

    def __post_init__(self) -> None:
        for layer, floor in enumerate(self.floors):
            expect_positive(f"floors[{layer}]", floor)


@dataclass(frozen=True)
class Sanitized:
    """A noisy update that may leave, float64 of shape (n,), and the record of its release.

    In the relative mode the event holds the private norms: it is for the data holder's own ledger.
    """

    update: NDArray[np.float64]
    event: UpdateRelease


@dataclass(frozen=True)
class LayerwiseLaplace:
    """Sanitizes an update vector layer by layer, each layer by its own ``L2Laplace``.

    ``sizes`` are the layers' n_l in order, with n = Σ n_l; ``noise_multiplier`` is ν, the mean norm of a
    layer's noise in units of its radius. A whole-vector release is one layer of size n.

    Fixed mode, layer l: δ_l is clipped to C_l, then ε_l = n_l/(ν·C_l). Guarantee, for two data sets whose
    *clipped* layer updates are d_l apart: |ln(density ratio)| ≤ Σ_l ε_l·d_l. So

    - within the radius, d_l ≤ C_l in every layer: at most Σ n_l/ν = n/ν (``planned_loss``);
    - for any two data sets, d_l ≤ 2·C_l: at most 2n/ν, which is local differential privacy.

    Clipping never moves two vectors apart (it is the projection on a ball), so d_l may be read as the
    distance before clipping too. The neighbourhood is the product of the layers' balls, and both data sets
    must start from the same hypothesis.

    Relative mode: see ``RelativeNeighbourhood``; no guarantee.

    Raises ``ValueError`` for no layers, a size below 1, ν ≤ 0, or another number of radii than of layers.
    """

    sizes: tuple[int, ...]
    noise_multiplier: float
    neighbourhood: FixedNeighbourhood | RelativeNeighbourhood

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("Expected sizes to hold at least one layer, found ()")
        for layer, size in enumerate(self.sizes):
            expect_count(f"sizes[{layer}]", size)
        expect_positive("noise_multiplier", self.noise_multiplier)
        if isinstance(self.neighbourhood, FixedNeighbourhood):
            name, lengths = "radii", self.neighbourhood.radii
        else:
            name, lengths = "floors", self.neighbourhood.floors
        if len(lengths) != len(self.sizes):
            raise ValueError(f"Expected one of {name} per layer ({len(self.sizes)}), found {len(lengths)}")
        for size, length in zip(self.sizes, lengths, strict=True):
            self._mechanism(size, length)  # so that a scale outside float64 is found before any update exists

    def release(self, update_vector: ArrayLike, *, rng: NoiseSource) -> Sanitized:
        """The sanitized update and the event to record.

        ``update_vector`` holds n finite numbers, the change of the parameters by local training; it is not
        written to. Raises ``ValueError`` for another length or a non-finite element, before anything is
        drawn.
        """
        flat = expect_vector("update_vector", update_vector, sum(self.sizes))
        noisy = np.empty(flat.size)
        records = []
        for layer, (size, stop) in enumerate(zip(self.sizes, accumulate(self.sizes), strict=True)):
            own = slice(stop - size, stop)
            if isinstance(self.neighbourhood, FixedNeighbourhood):
                radius = self.neighbourhood.radii[layer]
                centre: NDArray[Any] = clip(flat[own], radius)
            else:
                radius = max(euclidean_norm(flat[own]), self.neighbourhood.floors[layer])
                centre = flat[own]
            mechanism = self._mechanism(size, radius)
            noisy[own] = mechanism(centre, rng=rng)
            records.append(Noise(size, mechanism.epsilon, radius))
        return Sanitized(noisy, UpdateRelease(self._mode, tuple(records)))

    @property
    def planned_loss(self) -> float:
        """n/ν: what one release will cost within its radius (relative mode: what the paper charges)."""
        return sum(self.sizes) / self.noise_multiplier

    def privacy_loss(self, distances: Sequence[float]) -> float:
        """The largest |ln(density ratio)| of updates ``distances`` apart, layer by layer: Σ_l ε_l·min(d_l, 2C_l).

        Relative mode: 0 if every distance is 0, else infinity, as no smaller bound holds for all pairs.
        """
        if len(distances) != len(self.sizes):
            raise ValueError(f"Expected one of distances per layer ({len(self.sizes)}), found {len(distances)}")
        for layer, distance in enumerate(distances):
            expect_distance(f"distances[{layer}]", distance)
        if isinstance(self.neighbourhood, RelativeNeighbourhood):
            return math.inf if any(distances) else 0.0
        return math.fsum(
            self._mechanism(size, radius).privacy_loss(min(distance, 2 * radius))
            for size, radius, distance in zip(self.sizes, self.neighbourhood.radii, distances, strict=True)
        )

    @property
    def _mode(self) -> Neighbourhood:
        fixed = isinstance(self.neighbourhood, FixedNeighbourhood)
        return Neighbourhood.FIXED if fixed else Neighbourhood.RELATIVE

    def _mechanism(self, size: int, radius: float) -> L2Laplace:
        scale = self.noise_multiplier * radius
        if scale == 0:
            raise ValueError(
                "Expected noise multiplier times radius above 0 in float64, found "
                f"{self.noise_multiplier} times {radius}"
            )
        return L2Laplace(size, size / scale)


def split_radius(
    total: float,
    sizes: Sequence[int],
    rule: Literal["equal", "sqrt-dimension", "public-norms"] = "equal",
    public_norms: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Radii C_l with Σ C_l² = ``total``², so that the product of the layers' balls fits in the ball of ``total``.

    | rule | C_l proportional to | which gives |
    |---|---|---|
    | ``equal`` | 1 | the same mean noise norm ν·C_l for every layer |
    | ``sqrt-dimension`` | √n_l | about the same noise per coordinate in every layer |
    | ``public-norms`` | ``public_norms[l]`` | the same noise-to-signal ratio in every layer |

    The norms must be public, such as those of updates on public data: taken from private updates they would
    be a release. Raises ``ValueError`` for a radius, size or norm that is not positive, and for norms given
    to (or missing from) another rule.
    """
    expect_positive("total", total)
    if not sizes:
        raise ValueError("Expected sizes to hold at least one layer, found none")
    for layer, size in enumerate(sizes):
        expect_count(f"sizes[{layer}]", size)
    if (public_norms is not None) != (rule == "public-norms"):
        raise ValueError(f"Expected public_norms with rule 'public-norms' only, found {public_norms} with {rule!r}")
    match rule:
        case "equal":
            weights = [1.0] * len(sizes)
        case "sqrt-dimension":
            weights = [math.sqrt(size) for size in sizes]
        case "public-norms" if public_norms is not None:
            if len(public_norms) != len(sizes):
                raise ValueError(f"Expected one of public_norms per layer ({len(sizes)}), found {len(public_norms)}")
            for layer, norm in enumerate(public_norms):
                expect_positive(f"public_norms[{layer}]", norm)
            weights = list(public_norms)
        case _:
            raise ValueError(f"Expected rule equal, sqrt-dimension or public-norms, found {rule!r}")
    length = math.hypot(*weights)
    return tuple(total * (weight / length) for weight in weights)
