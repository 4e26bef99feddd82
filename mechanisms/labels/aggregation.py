"""Labels shown as randomly weighted sums over bags: wtd-LBA and noisy-wtd-LLP. Their δ is in ``aggregation_loss``."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from coterie.mechanisms.arguments import expect_count, expect_distance, expect_positive
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels.aggregation_loss import (
    RegressionBags,
    gaussian_delta,
    noisy_bag_delta,
    regression_delta,
)
from coterie.mechanisms.labels.arguments import Array, Integers
from coterie.mechanisms.randomness import NoiseSource

_ROUNDING = 1e-8  # relative: quadrature, and binomial coefficients of large numbers


@dataclass(frozen=True)
class AggregatedBags:
    """What wtd-LBA shows: weighted sums of the features (m, d) and of the labels (m,), bag by bag."""

    features: Array
    labels: Array


@dataclass(frozen=True)
class WeightedBags:
    """What noisy-wtd-LLP shows: who is in each bag (m, k), with which weight (m, k), and the sums of labels (m,).

    A learner minimizes Σ_j (``labels``_j − Σ_i w_ji f(x_i))².
    """

    members: Integers
    weights: Array
    labels: Array


@dataclass(frozen=True)
class InstanceReport:
    """δ at ``epsilon`` for these very labels and bags: a data-dependent report, NOT a differential privacy release.

    ``deltas`` (m, k) belong to a change of one label by ± ``change``, in the worse of both directions, with the bags
    taken as known. The numbers depend on the private labels: showing them, or dropping bags on their account, is a
    release of its own that no guarantee here covers. For other labels they may be anything, up to 1.
    """

    epsilon: float
    change: float
    deltas: Array

    data_dependent: ClassVar[bool] = True

    @property
    def worst(self) -> float:
        """The largest δ of any member of any bag."""
        return float(self.deltas.max())


@dataclass(frozen=True)
class AggregateFeaturesAndLabels:
    """wtd-LBA: m disjoint random bags of k examples, and of each the sums Σ w_i x_i and Σ w_i y_i with w_i ~ N(0, 1).

    Bags and weights stay hidden. A linear learner minimizes Σ_j (ȳ_j − rᵀx̄_j)².

    NO GUARANTEE: how well a label is hidden depends on all labels of its bag. If the labels are a linear function of
    the features, δ = 1: the sums of features give the sum of labels, and a changed label shows. ``report`` computes δ
    for given labels, which is for the data holder's eyes only, and ``event`` records an infinite ε. A guarantee would
    need a public lower bound on the residual ‖(I − P)y‖² of every bag, over all label vectors within one change.

    Source: Brahmbhatt, Saket, Havaldar, Nasery, Raghuveer, "Label differential privacy via aggregation" (arXiv
    2310.10092), Section 1.3 (whose Theorem 1.2 assumes such a bound). Raises ``ValueError`` for k or m below 1.
    """

    bag_size: int
    bags: int

    def __post_init__(self) -> None:
        expect_count("bag_size", self.bag_size)
        expect_count("bags", self.bags)

    def __call__(self, features: ArrayLike, labels: ArrayLike, *, rng: NoiseSource) -> AggregatedBags:
        """Bags of ``features`` (n, d), one column of which should be constant, and ``labels`` (n,).

        Raises ``ValueError`` for shapes that do not fit, numbers that are not finite, m·k > n, and k ≤ d: a bag whose
        features span all its labels hides nothing.
        """
        rows, values = self._expect_rows(features, labels)
        members = draw_bags(values.size, self.bag_size, self.bags, rng=rng)
        weights = _normals(members.shape, rng)
        return AggregatedBags(
            np.einsum("mk,mkd->md", weights, rows[members]), np.einsum("mk,mk->m", weights, values[members])
        )

    def report(
        self, features: ArrayLike, labels: ArrayLike, members: Integers, *, epsilon: float, change: float
    ) -> InstanceReport:
        """δ(ε) of every member of the bags ``members`` (m, k), if its label changes by ± ``change``.

        Exact up to quadrature (relative 1e-4). The report is data-dependent and no differential privacy: see
        ``InstanceReport``. For labels in [−B, B] no change exceeds 2B, but a smaller one can be worse: ask for several.
        """
        rows, values = self._expect_rows(features, labels)
        expect_distance("epsilon", epsilon)
        expect_positive("change", change)
        deltas = [self._worst(rows, values, bag, epsilon, change) for bag in np.asarray(members)]
        return InstanceReport(epsilon, change, np.stack(deltas))

    def event(self, examples: int, *, partition: str = "", part: int = 0) -> LabelRelease:
        """The record of one use on ``examples`` labels: a release without a guarantee, ε = ∞."""
        expect_count("examples", examples, least=0)
        return LabelRelease("wtd-lba", examples, math.inf, 0.0, partition, part)

    @staticmethod
    def _worst(rows: Array, values: Array, bag: Integers, epsilon: float, change: float) -> Array:
        instance = RegressionBags.of(rows[bag], values[bag])
        both = [regression_delta(instance, sign * change, epsilon) for sign in (1, -1)]
        return np.asarray(np.max([delta for pair in both for delta in pair], axis=0))

    def _expect_rows(self, features: ArrayLike, labels: ArrayLike) -> tuple[Array, Array]:
        rows = np.asarray(features, dtype=np.float64)
        values = _expect_reals(labels, math.inf)
        if rows.ndim != 2 or len(rows) != values.size or not np.isfinite(rows).all():
            raise ValueError(f"Expected finite features (n, d) for {values.size} labels, found shape {rows.shape}")
        if self.bag_size <= rows.shape[1]:
            raise ValueError(f"Expected bag_size above the {rows.shape[1]} features, found {self.bag_size}")
        return rows, values


@dataclass(frozen=True)
class AggregateNoisyLabels:
    """noisy-wtd-LLP: N(0, 1) noise on some labels, then m disjoint random bags of k and Σ w_i y_i with w_i ~ N(0, 1).

    ``examples`` n, of which ``noisy`` = |N| random ones get noise, and |y| ≤ ``label_bound`` B. The noise has standard
    deviation 1, so B says how large labels are against it. Bags, weights and features are shown; N may be.

    Guarantee: (ε, δ)-label differential privacy for labels in [−B, B], with ``delta`` exact for a label that changes
    by 2B. Given everything but labels and noise, a bag's sum is a Gaussian mechanism with
    μ = 2B|w_i|/√(Σ_{l ∈ N ∩ bag} w_l²) for the changed label i, so δ(ε) = (mk/n)·E[δ_G(ε; μ)]. For i not in N,
    μ² = 4B²·χ²₁/χ²_r with r ~ Hypergeometric(n − 1, |N|, k − 1) noisy members, where r = 0 counts as δ = 1; for i in
    N, μ² = 4B²·Beta(1/2, (r − 1)/2) with r − 1 ~ Hypergeometric(n − 1, |N| − 1, k − 1). The larger of the two counts.
    It does not depend on any label. Once the bags are drawn, δ is better or worse for who is in them:
    ``realised_deltas``.

    Source: arXiv 2310.10092, Section 1.3; the accounting is derived (its Theorem 1.3 has no constants in the text we
    have). Raises ``ValueError`` for numbers that are not positive, |N| > n, and m·k > n.
    """

    examples: int
    bag_size: int
    bags: int
    noisy: int
    label_bound: float

    def __post_init__(self) -> None:
        for name in ("examples", "bag_size", "bags", "noisy"):
            expect_count(name, getattr(self, name))
        expect_positive("label_bound", self.label_bound)
        if self.noisy > self.examples:
            raise ValueError(f"Expected noisy up to the {self.examples} examples, found {self.noisy}")
        _expect_room(self.examples, self.bag_size, self.bags)

    def __call__(self, labels: ArrayLike, *, rng: NoiseSource) -> WeightedBags:
        """Bags of ``labels`` (n,). Raises ``ValueError`` for another number of labels, and one outside [−B, B]."""
        bags, _ = self.draw(labels, rng=rng)
        return bags

    def draw(self, labels: ArrayLike, *, rng: NoiseSource) -> tuple[WeightedBags, Integers]:
        """Bags as from a call, and the examples that are noisy (|N|,), which ``realised_deltas`` needs."""
        values = _expect_reals(labels, self.label_bound)
        if values.size != self.examples:
            raise ValueError(f"Expected {self.examples} labels, found {values.size}")
        noisy = draw_bags(self.examples, self.noisy, 1, rng=rng)[0]
        values = values.copy()
        values[noisy] += _normals(noisy.shape, rng)
        members = draw_bags(self.examples, self.bag_size, self.bags, rng=rng)
        weights = _normals(members.shape, rng)
        return WeightedBags(members, weights, np.einsum("mk,mk->m", weights, values[members])), noisy

    def delta(self, epsilon: float) -> float:
        """The δ at ``epsilon``, of all randomness: before bags are drawn, for any label of any example."""
        expect_distance("epsilon", epsilon)
        chance = self.bags * self.bag_size / self.examples
        cases = [True] if self.noisy == self.examples else [True, False]
        return min(1.0, chance * max(self._delta_in_bag(epsilon, own) for own in cases) * (1 + _ROUNDING))

    def _delta_in_bag(self, epsilon: float, own: bool) -> float:
        """δ(ε) of an example that is in a bag, noisy itself or not, over the other members and all weights."""
        counts, masses = _hypergeometric(self.examples - 1, self.noisy - own, self.bag_size - 1)
        change = 2 * self.label_bound
        return float(masses @ [noisy_bag_delta(int(count) + own, change, epsilon, own=own) for count in counts])

    def realised_deltas(self, bags: WeightedBags, noisy: Integers, *, epsilon: float) -> Array:
        """δ(ε) of every member (m, k), given the drawn bags, weights and noisy examples. No label is looked at."""
        expect_distance("epsilon", epsilon)
        mask = np.zeros(self.examples, bool)
        mask[noisy] = True
        noise = np.sqrt(np.sum(bags.weights**2 * mask[bags.members], axis=1, keepdims=True))
        with np.errstate(divide="ignore", invalid="ignore"):  # no noisy member: μ is infinite
            return gaussian_delta(epsilon, 2 * self.label_bound * np.abs(bags.weights) / noise)

    def event(self, epsilon: float, *, partition: str = "", part: int = 0) -> LabelRelease:
        """The record of one use at ``epsilon``, with its δ."""
        return LabelRelease("noisy-wtd-llp", self.examples, epsilon, self.delta(epsilon), partition, part)


def draw_bags(examples: int, bag_size: int, bags: int, *, rng: NoiseSource) -> Integers:
    """``bags`` disjoint uniformly random subsets of 0 … n − 1, of ``bag_size`` each: (m, k). No label is looked at."""
    _expect_room(examples, bag_size, bags)
    return np.argsort(rng.random(examples), kind="stable")[: bags * bag_size].reshape(bags, bag_size)


def _hypergeometric(population: int, marked: int, drawn: int) -> tuple[Integers, Array]:
    """The possible numbers of marked among ``drawn`` of a ``population``, and their probabilities."""
    counts = np.arange(max(0, drawn - (population - marked)), min(drawn, marked) + 1)
    logs = _log_choose(marked, counts) + _log_choose(population - marked, drawn - counts)
    return counts, np.exp(logs - _log_choose(population, np.array(drawn)))


def _log_choose(total: int, chosen: Integers) -> Array:
    """ln of the binomial coefficient, by the beta function: differences of factorials would cancel."""
    return np.asarray(-math.log1p(total) - special.betaln(total - chosen + 1.0, chosen + 1.0))


def _normals(shape: tuple[int, ...], rng: NoiseSource) -> Array:
    return rng.standard_normal(out=np.empty(shape))


def _expect_room(examples: int, bag_size: int, bags: int) -> None:
    if bags * bag_size > examples:
        raise ValueError(f"Expected bags * bag_size up to the {examples} examples, found {bags * bag_size}")


def _expect_reals(labels: ArrayLike, bound: float) -> Array:
    values = np.asarray(labels, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"Expected labels to be one finite number per example, found shape {values.shape}")
    if (outside := np.abs(values) > bound).any():
        raise ValueError(f"Expected labels from {-bound} to {bound}, found {values[outside][0]}: clip or scale them")
    return values
