"""Priors over labels: from a model's outputs, from public labels, and from private labels of groups, at a price."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from coterie.mechanisms.arguments import expect_count, expect_positive
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels.arguments import Array, Integers, expect_groups, expect_labels
from coterie.mechanisms.randomness import NoiseSource


@dataclass(frozen=True)
class HistogramPrior:
    """One prior for each group of examples: its label counts plus discrete Laplace noise, negative ones set to 0.

    The groups must be formed without labels, such as k-means clusters of features. Counts H_c(y) become
    H̃_c(y) = H_c(y) + Z with P(Z = z) = tanh(a/2)·e^(−a|z|), a = ε_p/2, and the prior is max(H̃_c, 0) over its sum. A
    group that has nothing left gets the uniform prior (our choice; the paper does not say).

    Guarantee: ε_p-label differential privacy (``epsilon``). Another label of one example moves two counts of one group
    by 1 each, and everything after the noise is post-processing. It is to be added to what the randomizer costs that
    uses the prior on the same labels: for a total of ε, randomize with ε − ε_p.

    Source: arXiv 2102.06062, Algorithm 4. The noise is the difference of two geometric numbers ⌊−ln(u)/a⌋ from uniform
    u with 53 bits, so |z| cannot pass 37/a. Raises ``ValueError`` for K < 2, no group, and ε_p ≤ 0 or not finite.
    """

    classes: int
    groups: int
    epsilon: float

    def __post_init__(self) -> None:
        expect_count("classes", self.classes, least=2)
        expect_count("groups", self.groups)
        expect_positive("epsilon", self.epsilon)

    def __call__(self, labels: ArrayLike, groups: ArrayLike, *, rng: NoiseSource) -> Array:
        """Priors (G, K), rows summing to 1, from ``labels`` (n,) and the group of each example (n,).

        Raises ``ValueError`` for a label outside 0 … K − 1 and a group outside 0 … G − 1.
        """
        return normalised(self.noisy_counts(labels, groups, rng=rng))

    def noisy_counts(self, labels: ArrayLike, groups: ArrayLike, *, rng: NoiseSource) -> Array:
        """H̃ (G, K), whole numbers: the release itself, of which the prior is a function."""
        counts = label_counts(labels, groups, classes=self.classes, group_count=self.groups)
        noise = _geometric(self.rate, counts.size, rng) - _geometric(self.rate, counts.size, rng)
        return np.asarray(counts + noise.reshape(counts.shape), dtype=np.float64)

    @property
    def rate(self) -> float:
        """a = ε_p/2: the noise falls by e^(−a) per count."""
        return self.epsilon / 2

    def noise_probability(self, count: ArrayLike) -> Array:
        """The law of the noise: tanh(a/2)·e^(−a|z|) for whole numbers z."""
        return np.asarray(math.tanh(self.rate / 2) * np.exp(-self.rate * np.abs(np.asarray(count, np.float64))))

    @property
    def noise_standard_deviation(self) -> float:
        """1/(√2·sinh(a/2)), in counts."""
        return math.sqrt(2) * math.exp(-self.rate / 2) / -math.expm1(-self.rate)

    def privacy_loss(self) -> float:
        """The largest |ln(ratio of two probabilities of one output)|: ε_p."""
        return self.epsilon

    def event(self, examples: int, *, partition: str = "", part: int = 0) -> LabelRelease:
        """The record of one use on ``examples`` labels, all of them or a part of a label-independent partition."""
        expect_count("examples", examples, least=0)
        return LabelRelease("histogram-prior", examples, self.epsilon, 0.0, partition, part)


def public_label_prior(labels: ArrayLike, groups: ArrayLike, *, classes: int, group_count: int) -> Array:
    """Priors (G, K) from labels that anybody may see: the shares of the labels in each group, uniform for none.

    Free of charge because the labels are public, and for no other reason: shares of private labels are no release
    under any privacy (``HistogramPrior`` is for them).
    """
    return normalised(label_counts(labels, groups, classes=classes, group_count=group_count).astype(np.float64))


def temperature_softmax(logits: ArrayLike, temperature: float = 1.0) -> Array:
    """softmax(logits/T) along the last axis: a model's outputs as priors (…, K).

    T < 1 sharpens, T > 1 flattens. The model must not have seen the labels that are randomized with the prior, other
    than through releases that are accounted for. Raises ``ValueError`` for T ≤ 0 and logits that are not finite.
    """
    expect_positive("temperature", temperature)
    values = np.asarray(logits, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"Expected logits to be finite, found {values[~np.isfinite(values)][0]}")
    weights: Array = np.exp((values - values.max(axis=-1, keepdims=True)) / temperature)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def normalised(weights: Array) -> Array:
    """Rows (…, K) with negative weights as 0, over their sums; a row with the sum 0 becomes uniform."""
    kept = np.maximum(weights, 0.0)
    sums = kept.sum(axis=-1, keepdims=True)
    shares: Array = np.divide(kept, sums, out=np.full(kept.shape, 1 / kept.shape[-1]), where=sums > 0)
    return shares


def label_counts(labels: ArrayLike, groups: ArrayLike, *, classes: int, group_count: int) -> Integers:
    """How often each label occurs in each group: (G, K). Not a release: counts of private labels need noise."""
    values = expect_labels("labels", labels, classes)
    members = expect_groups("groups", groups, values.size, group_count)
    counts = np.bincount(members * classes + values, minlength=group_count * classes)
    return counts.reshape(group_count, classes).astype(np.int64, copy=False)


def _geometric(rate: float, size: int, rng: NoiseSource) -> Array:
    """Whole numbers g ≥ 0 with P(g) ∝ e^(−rate·g), shape (size,)."""
    return np.asarray(np.floor(-np.log(1 - rng.random(size)) / rate))
