"""Binary labels exchanged among peers: flip, ask a random peer of the own cluster, pass the answer on."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from coterie.mechanisms.arguments import expect_count, expect_distance
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels.arguments import Array, Integers, expect_labels
from coterie.mechanisms.labels.clustering import expect_clusters
from coterie.mechanisms.randomness import NoiseSource

_UNIT_ROUNDOFF = 2.0**-53
_LOG_TINY = -700.0  # e to this power is still a normal float64
_BISECTION = 1e-6  # relative, of a flip probability


@dataclass(frozen=True)
class PeerToPeer:
    """Each peer flips its label with probability p, and reports the flipped label of a peer drawn from its cluster.

    z_i = y_i, flipped with probability p (``flip_probability``); each i draws j uniformly from its own cluster, itself
    included, and outputs z_j. Clusters must be formed without labels.

    Guarantee, in a cluster of s peers: (ε, δ)-label differential privacy towards who sees all outputs, exactly as
    ``delta`` computes it. Given M = Σz the outputs are independent Bernoulli(M/s), so their number of ones N is
    sufficient: N ~ Bin(s, M/s), with M = z_j + Bin(a, 1 − p) + Bin(s − 1 − a, p) if a of the other labels are 1. δ(ε)
    is the largest hockey stick between the laws for y_j = 0 and 1, in both directions and over all a.

    Two assumptions: nobody who sees the outputs learns who asked whom, and peers do not collude with them. What a peer
    that is asked gives away is protected by its flip only: ``local_loss``.

    Source: arXiv 2110.02159, Algorithm 2 (Theorem 3 gives (ε, 1/s²) under conditions that are not in the text we have;
    p and the accounting are ours). Raises ``ValueError`` for p outside (0, 1/2].
    """

    flip_probability: float

    def __post_init__(self) -> None:
        if not 0 < self.flip_probability <= 0.5:
            raise ValueError(f"Expected flip_probability above 0 and at most 1/2, found {self.flip_probability}")

    def __call__(self, labels: ArrayLike, clusters: ArrayLike, *, cluster_count: int, rng: NoiseSource) -> Integers:
        """The outputs (n,) for ``labels`` 0 or 1 (n,) and the cluster of each peer (n,).

        Raises ``ValueError`` for other labels, a cluster outside 0 … ``cluster_count`` − 1, and a cluster of one: it
        would report its own flipped label.
        """
        values = expect_labels("labels", labels, 2)
        members = expect_clusters(clusters, values.size, cluster_count)
        flipped = values ^ (rng.random(values.size) < self.flip_probability)
        sizes = np.bincount(members, minlength=cluster_count)
        starts = np.cumsum(sizes) - sizes
        order = np.argsort(members, kind="stable")
        asked = starts[members] + (rng.random(values.size) * sizes[members]).astype(np.int64)
        return np.asarray(flipped[order[asked]], dtype=np.int64)

    def law(self, label: int, *, size: int, ones: int) -> Array:
        """P(N = 0 … s) for a peer with ``label`` in a cluster of ``size`` s, ``ones`` (a) of the others having a 1."""
        _expect_size(size)
        expect_labels("label", [label], 2)
        expect_count("ones", ones, least=0)
        if ones >= size:
            raise ValueError(f"Expected ones from 0 to {size - 1}, found {ones}")
        return np.asarray(_laws(self.flip_probability, size)[label][ones])

    def delta(self, epsilon: float, *, size: int) -> float:
        """The smallest δ, rounded up, at which a cluster of ``size`` peers has (ε, δ)-label differential privacy.

        Time and memory grow as s³ and s²: half a second and 100 MB for s = 1000.
        """
        expect_distance("epsilon", epsilon)
        _expect_size(size)
        zero, one = _laws(self.flip_probability, size)
        error = _relative_error(self.flip_probability, size)
        factor = math.exp(epsilon) * (1 - 2 * error)
        # One direction is enough: exchanging the labels 0 and 1 turns it round, and a into s − 1 − a.
        return min(1.0, float(np.maximum(zero - factor * one, 0.0).sum(axis=1).max()) * (1 + 2 * error))

    def pure_loss(self, *, size: int) -> float:
        """The largest |ln(ratio)| of the probabilities of one N over all a, rounded up: ε at δ = 0.

        Raises ``ValueError`` where probabilities leave float64, near s·ln(1/p) = 700: ``local_loss`` bounds it there.
        """
        _expect_size(size)
        if size * math.log(self.flip_probability) < _LOG_TINY:
            raise ValueError(f"Expected size * ln(1/p) <= {-_LOG_TINY}, found size {size}: use local_loss there")
        zero, one = _laws(self.flip_probability, size)
        return float(np.abs(np.log(zero) - np.log(one)).max()) + 2 * _relative_error(self.flip_probability, size)

    @property
    def local_loss(self) -> float:
        """ln((1 − p)/p): what one flipped label shows, and a bound on everything, whoever colludes."""
        return math.log1p(-self.flip_probability) - math.log(self.flip_probability)

    def event(self, epsilon: float, sizes: ArrayLike, *, partition: str = "", part: int = 0) -> LabelRelease:
        """The record of one exchange in clusters of ``sizes`` at ``epsilon``; δ is that of the worst cluster."""
        array = np.asarray(sizes, dtype=np.int64)
        delta = max(self.delta(epsilon, size=int(size)) for size in np.unique(array[array > 0]))
        return LabelRelease("peer-to-peer", int(array.sum()), epsilon, delta, partition, part)


def smallest_flip_probability(*, epsilon: float, delta: float, size: int) -> float:
    """The smallest p, to a relative 1e-6 and from above, with (ε, δ)-label differential privacy in a cluster of s.

    By bisection between 0 and 1/2, where δ is 0; ``PeerToPeer(p).delta(epsilon)`` at the returned p is at most δ. The
    paper's target is δ = 1/s². Raises ``ValueError`` for ε < 0, δ outside (0, 1) and s < 2.
    """
    expect_distance("epsilon", epsilon)
    _expect_size(size)
    if not 0 < delta < 1:
        raise ValueError(f"Expected delta above 0 and below 1, found {delta}")
    low, high = 0.0, 0.5
    while high - low > _BISECTION * high:
        middle = (low + high) / 2
        if PeerToPeer(middle).delta(epsilon, size=size) <= delta:
            high = middle
        else:
            low = middle
    return high


def _laws(flip: float, size: int) -> tuple[Array, Array]:
    """P(N) for y_j = 0 and for y_j = 1, each (s, s + 1): a row for every a from 0 to s − 1."""
    flips = [_binomial(count, flip, 1 - flip) for count in range(size)]  # from the back: how many are not flipped
    others = np.stack([np.convolve(flips[a][::-1], flips[size - 1 - a]) for a in range(size)])
    none, one = np.pad(others, ((0, 0), (0, 1))), np.pad(others, ((0, 0), (1, 0)))  # z_j = 0 and z_j = 1
    reported = np.stack([_binomial(size, ones / size, (size - ones) / size) for ones in range(size + 1)])
    return ((1 - flip) * none + flip * one) @ reported, (flip * none + (1 - flip) * one) @ reported


def _binomial(count: int, success: float, failure: float) -> Array:
    """P(0 … count) of Bin(count, ``success``), accurate far into the tails; ``failure`` is 1 − ``success``."""
    successes = np.arange(count + 1.0)
    failures = count - successes
    choices = special.gammaln(count + 1) - special.gammaln(successes + 1) - special.gammaln(failures + 1)
    return np.asarray(np.exp(choices + special.xlogy(successes, success) + special.xlogy(failures, failure)))


def _relative_error(flip: float, size: int) -> float:
    """Bound on the relative error of a probability from ``_laws``: exponents to 4 roundoffs of their terms, and sums.

    Each factor has three logarithms of factorials and powers of p, 1 − p or of numbers from 1/s on; all terms are
    positive, so that sums keep relative errors.
    """
    exponent = 3 * math.lgamma(size + 1) + size * max(-math.log(flip), math.log(size))
    return 2 * (4 * exponent + size) * _UNIT_ROUNDOFF


def _expect_size(size: int) -> None:
    expect_count("size", size, least=2)
