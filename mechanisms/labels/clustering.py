"""Labels resampled from their cluster's noisy histogram: ClusterRR, with UniformRR as its corollary."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from coterie.mechanisms.arguments import expect_count, expect_distance, expect_positive
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.grid import power_of_two_grid, round_to_grid
from coterie.mechanisms.labels.arguments import Array, Integers, expect_groups, expect_labels
from coterie.mechanisms.labels.prior import label_counts
from coterie.mechanisms.randomness import NoiseSource


@dataclass(frozen=True)
class ClusterRelease:
    """Randomized labels (n,), and the distributions q̃ (C, K) that replaced labels were drawn from; both may be seen."""

    labels: Integers
    distributions: Array


@dataclass(frozen=True)
class ClusterResponse:
    """ClusterRR: with probability λ a label is replaced by a draw from its cluster's noisy label distribution q̃.

    The clusters must be formed without labels. For each of them: the shares of its labels, plus Laplace noise of scale
    σ/n_c per class (n_c examples), clipped to [τ, 1] and renormalised so that no class falls below τ, give q̃(·|c).

    Fields: ``classes`` K, ``resampling`` λ in (0, 1], ``noise_scale`` σ in counts, ``floor`` τ in [0, 1/K]. At τ = 1/K
    q̃ is uniform whatever the labels, and σ is not used; infinity is allowed for σ there, and nowhere else. τ = 0 needs
    λ = 1, as otherwise a label that its cluster gives no probability shows itself.

    Guarantee for labels and q̃ together: ε-label differential privacy with ε = 2/σ + ln(1 + (1 − λ)/(λτ)), without the
    first term at τ = 1/K and without the second at λ = 1. Another label of one example moves *two* counts by 1 each,
    so the histogram costs 2/σ. The published form, 1/σ, is too small under this neighbourhood: see
    ``tests/mechanisms/labels/test_clustering.py`` for an event that exceeds it. Clusters and their sizes are public.

    Renormalisation is the Euclidean projection on {q ≥ τ, Σq = 1}. The paper asks that every q̃ ≥ τ, which dividing by
    the sum breaks, and its procedure is not in the text we have. Projection never moves farther from any distribution
    that keeps the floor, so it adds no error to the noise; the other candidate, scaling what exceeds the floor,
    q = τ + (1 − Kτ)(r − τ)/Σ(r − τ), enlarges the noise when little exceeds it, and is undefined when nothing does.

    Source: Esfandiari, Mirrokni, Syed, Vassilvitskii, "Label differential privacy via clustering" (arXiv 2110.02159),
    Algorithm 1; ε is derived. Raises ``ValueError`` for numbers outside these ranges.
    """

    classes: int
    resampling: float
    noise_scale: float
    floor: float

    def __post_init__(self) -> None:
        expect_count("classes", self.classes, least=2)
        if not 0 < self.resampling <= 1:
            raise ValueError(f"Expected resampling above 0 and at most 1, found {self.resampling}")
        _expect_floor(self.floor, self.classes)
        if self.floor == 0 and self.resampling < 1:
            raise ValueError(f"Expected floor > 0 as resampling is {self.resampling} < 1, found {self.floor}")
        if not (self._uniform and self.noise_scale == math.inf):
            expect_positive("noise_scale", self.noise_scale)

    @classmethod
    def for_epsilon(cls, epsilon: float, *, classes: int, floor: float) -> Self:
        """Half of ε to the histogram, σ = 4/ε, and half to the labels, λ = 1/(1 + τ(e^(ε/2) − 1)).

        ``floor`` τ > 0 is a public choice, best near the heterogeneity within clusters (Corollary 2, whose constants
        we do not have: the halves are our choice). Raises ``ValueError`` for ε ≤ 0 and τ outside (0, 1/K].
        """
        expect_positive("epsilon", epsilon)
        expect_count("classes", classes, least=2)
        expect_positive("floor", floor)
        _expect_floor(floor, classes)
        return cls(classes, resampling_for(epsilon / 2, floor), 4 / epsilon, floor)

    @classmethod
    def uniform(cls, epsilon: float, *, classes: int) -> Self:
        """UniformRR (Corollary 1): τ = 1/K, λ = K/(K + e^ε − 1). It is K-ary randomized response, without clusters.

        A label keeps with probability 1 − λ + λ/K = e^ε/(e^ε + K − 1). β = λ debiases its loss.
        """
        expect_positive("epsilon", epsilon)
        expect_count("classes", classes, least=2)
        return cls(classes, resampling_for(epsilon, 1 / classes), math.inf, 1 / classes)

    def __call__(
        self, labels: ArrayLike, clusters: ArrayLike, *, cluster_count: int, rng: NoiseSource
    ) -> ClusterRelease:
        """Randomized ``labels`` (n,); ``clusters`` (n,) says which of ``cluster_count`` (C) clusters each is in.

        A cluster without examples gets the uniform distribution. Raises ``ValueError`` for a label outside 0 … K − 1,
        a cluster outside 0 … C − 1, and a cluster of one example: its histogram is that one label, which the noise
        must hide all but completely.
        """
        values = expect_labels("labels", labels, self.classes)
        members = expect_clusters(clusters, values.size, cluster_count)
        counts = label_counts(values, members, classes=self.classes, group_count=cluster_count)
        noisy = self.distributions(counts, rng=rng)
        replaced = rng.random(values.size) < self.resampling
        place = rng.random(values.size)
        drawn = np.empty_like(values)
        order = np.argsort(members, kind="stable")
        ends = np.cumsum(np.bincount(members, minlength=cluster_count))
        for cluster, rows in enumerate(np.split(order, ends[:-1])):
            cumulative = np.cumsum(noisy[cluster])
            drawn[rows] = np.searchsorted(cumulative, place[rows] * cumulative[-1], side="right")
        return ClusterRelease(np.where(replaced, drawn, values), noisy)

    def distributions(self, counts: ArrayLike, *, rng: NoiseSource) -> Array:
        """q̃ (C, K) from label ``counts`` (C, K): the release that costs ``histogram_epsilon``.

        The noisy counts are rounded to a public grid (``mechanisms/grid.py``) before anything else is done.
        """
        table = np.asarray(counts, dtype=np.float64)
        if self._uniform:
            return np.full(table.shape, 1 / self.classes)
        noisy = np.log((1 - rng.random(table.size)) / (1 - rng.random(table.size))).reshape(table.shape)
        noisy *= self.noise_scale
        sizes = table.sum(axis=1, keepdims=True)
        noisy += table
        round_to_grid(noisy, power_of_two_grid(math.sqrt(2) * self.noise_scale))
        noisy /= np.maximum(sizes, 1.0)
        shares = self.renormalised(np.clip(noisy, self.floor, 1.0))
        return np.where(sizes > 0, shares, 1 / self.classes)

    def renormalised(self, shares: ArrayLike) -> Array:
        """The Euclidean projection of each row (…, K) on the distributions with no class below the floor."""
        return project(np.asarray(shares, dtype=np.float64), self.floor)

    def law(self, distribution: ArrayLike) -> Array:
        """Probabilities (K, K) of each output (column) for each label (row), given q̃ (K,): (1 − λ)I + λ·1q̃ᵀ."""
        row = np.asarray(distribution, dtype=np.float64)
        return np.asarray((1 - self.resampling) * np.eye(self.classes) + self.resampling * row)

    @property
    def histogram_epsilon(self) -> float:
        """2/σ; 0 at τ = 1/K, where q̃ does not depend on labels."""
        return 0.0 if self._uniform else 2 / self.noise_scale

    @property
    def response_epsilon(self) -> float:
        """ln(1 + (1 − λ)/(λτ)); 0 at λ = 1."""
        return 0.0 if self.resampling == 1 else math.log1p((1 - self.resampling) / (self.resampling * self.floor))

    def privacy_loss(self) -> float:
        """A bound on |ln(ratio of two densities of one output)| for labels and q̃ together."""
        return self.histogram_epsilon + self.response_epsilon

    def delta(self, epsilon: float) -> float:
        """A δ with (ε, δ)-label differential privacy: max(0, 1 − λ − λτ(e^(ε − 2/σ) − 1)), and 1 for ε < 2/σ."""
        expect_distance("epsilon", epsilon)
        rest = epsilon - self.histogram_epsilon
        if rest < 0:
            return 1.0
        if rest >= self.response_epsilon:
            return 0.0
        return max(0.0, 1 - self.resampling - self.resampling * self.floor * math.expm1(rest))

    def event(self, examples: int, *, partition: str = "", part: int = 0) -> LabelRelease:
        """The record of one use on ``examples`` labels, all of them or a part of a label-independent partition."""
        expect_count("examples", examples, least=0)
        return LabelRelease("cluster-response", examples, self.privacy_loss(), 0.0, partition, part)

    @property
    def _uniform(self) -> bool:
        return self.floor == 1 / self.classes


def resampling_for(epsilon: float, floor: float) -> float:
    """λ = 1/(1 + τ(e^ε − 1)): the least resampling with ln(1 + (1 − λ)/(λτ)) = ε."""
    expect_positive("epsilon", epsilon)
    expect_positive("floor", floor)
    shrunk = math.exp(-epsilon)
    return shrunk / (shrunk - floor * math.expm1(-epsilon))


def project(rows: Array, floor: float) -> Array:
    """The nearest q (…, K) to each row, in Euclidean distance, with q ≥ ``floor`` and Σq = 1: max(r − θ, τ).

    Needs τ ≤ 1/K. By sorting, O(K log K) a row (Held, Wolfe, Crowder 1974, for τ = 0; a floor is a shift).
    """
    classes = rows.shape[-1]
    mass = max(0.0, 1 - classes * floor)
    above = rows - floor
    falling = -np.sort(-above, axis=-1)
    thresholds = (np.cumsum(falling, axis=-1) - mass) / np.arange(1, classes + 1)
    used = np.maximum((falling > thresholds).sum(axis=-1, keepdims=True), 1)
    threshold = np.take_along_axis(thresholds, used - 1, axis=-1)
    return np.asarray(floor + np.maximum(above - threshold, 0.0), dtype=np.float64)


def expect_clusters(clusters: ArrayLike, examples: int, cluster_count: int) -> Integers:
    """The cluster of each example, from 0 on, none with a single member; ``ValueError`` otherwise."""
    expect_count("cluster_count", cluster_count)
    members = expect_groups("clusters", clusters, examples, cluster_count)
    if (np.bincount(members) == 1).any():
        raise ValueError("Expected every cluster to hold 2 examples or more, found one of 1: merge it with another")
    return members


def _expect_floor(floor: float, classes: int) -> None:
    if not 0 <= floor <= 1 / classes:
        raise ValueError(f"Expected floor from 0 to 1/{classes}, found {floor}")
