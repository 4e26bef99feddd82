"""Randomized response on labels: over all of them, over the k likeliest, and over as many as a prior makes best."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.mechanisms.arguments import expect_count, expect_positive
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels.arguments import Array, Integers, expect_groups, expect_labels, expect_priors
from coterie.mechanisms.randomness import NoiseSource

CELLS = 1 << 19  # of a prior that are worked on at a time: four megabytes of float64
_TIE = 8 * 2.0**-53  # times K: what rounding can do to two equal chances of a correct answer, relative


@dataclass(frozen=True)
class Responses:
    """Randomized labels (n,), and the k of each one's subset (n,), which depends on the prior only."""

    labels: Integers
    subset_sizes: Integers


@dataclass(frozen=True)
class RandomizedResponse:
    """K-ary randomized response, RR: keeps a label with probability e^ε/(e^ε + K − 1), else draws another one.

    Each other label has probability 1/(e^ε + K − 1). Guarantee: ε-label differential privacy, attained: the ratio of
    the probabilities of one output under two labels is e^ε or 1. The randomized labels may be used and shown any
    number of times, but a second randomization of the same labels is a second release.

    Source: Ghazi, Golowich, Kumar, Manurangsi, Zhang, "Deep learning with label differential privacy"
    (arXiv 2102.06062), Section 2. Raises ``ValueError`` for K < 2, and for ε ≤ 0 or not finite.
    """

    classes: int
    epsilon: float

    def __post_init__(self) -> None:
        expect_count("classes", self.classes, least=2)
        expect_positive("epsilon", self.epsilon)

    def __call__(self, labels: ArrayLike, *, rng: NoiseSource) -> Integers:
        """Randomized ``labels`` (n,). Raises ``ValueError`` for a label that is not one of 0 … K − 1."""
        values = expect_labels("labels", labels, self.classes)
        sizes = np.full(values.size, self.classes)
        return _respond(values, sizes, self.epsilon, rng)

    def law(self) -> Array:
        """Probabilities (K, K): of each output (column) for each label (row)."""
        return response_law(np.ones(self.classes, bool), self.epsilon)

    @property
    def keep_probability(self) -> float:
        """e^ε/(e^ε + K − 1)."""
        return 1 / (1 + (self.classes - 1) * math.exp(-self.epsilon))

    def privacy_loss(self) -> float:
        """The largest |ln(ratio of two probabilities of one output)|: ε."""
        return self.epsilon

    def event(self, examples: int, *, partition: str = "", part: int = 0) -> LabelRelease:
        """The record of one use on ``examples`` labels, all of them or a part of a label-independent partition."""
        expect_count("examples", examples, least=0)
        return LabelRelease("randomized-response", examples, self.epsilon, 0.0, partition, part)


@dataclass(frozen=True)
class TopKRandomizedResponse:
    """RRTop-k: randomized response within the k labels to which a prior gives the most; Y_k is their set.

    A label in Y_k is kept with probability e^ε/(e^ε + k − 1), else replaced by another one of Y_k; a label outside is
    replaced by a uniform draw from Y_k. For k = 1 the output is the prior's first choice whatever the label. Of labels
    with equal prior the lowest come first.

    Guarantee: ε-label differential privacy, whatever prior and k, as long as both are chosen without looking at the
    label (Lemma 1). A prior that was made from the same labels has its own cost, to be added.

    Source: arXiv 2102.06062, Algorithm 1. Raises ``ValueError`` for K < 2, and for ε ≤ 0 or not finite.
    """

    classes: int
    epsilon: float

    def __post_init__(self) -> None:
        expect_count("classes", self.classes, least=2)
        expect_positive("epsilon", self.epsilon)

    def __call__(
        self,
        labels: ArrayLike,
        priors: ArrayLike,
        subset_sizes: int | Integers,
        *,
        rng: NoiseSource,
        groups: ArrayLike | None = None,
    ) -> Responses:
        """Randomized ``labels`` (n,).

        ``priors`` is (K,) for all examples, (n, K) with one row each, or (G, K) with the row of each example in
        ``groups`` (n,). Rows need not sum to 1. ``subset_sizes`` is k, one number or one for each prior. Time is
        quasi-linear in K; beyond the arguments, memory is a few megabytes for (n, K) priors.

        Raises ``ValueError`` for a label outside 0 … K − 1, a prior that is negative, not finite or sums to 0, shapes
        that do not fit, and k outside 1 … K.
        """
        sizes = _expect_sizes(subset_sizes, self.classes)
        rows = max(1, np.size(priors) // self.classes)
        if sizes.shape not in {(), (rows,)}:
            raise ValueError(f"Expected subset_sizes to hold 1 number or {rows}, one per prior, found {sizes.size}")

        def chosen(_: Array, rows: slice) -> Integers:
            return sizes[rows] if sizes.ndim else np.broadcast_to(sizes, rows.stop - rows.start)

        return _respond_with(self.classes, self.epsilon, labels, priors, groups, chosen, rng)

    def law(self, prior: ArrayLike, k: int) -> Array:
        """Probabilities (K, K): of each output (column) for each label (row), under one ``prior`` (K,)."""
        subset = top_k(_expect_prior(prior, self.classes), _expect_sizes(k, self.classes))
        return response_law(subset, self.epsilon)

    def privacy_loss(self) -> float:
        """A bound on |ln(ratio of two probabilities of one output)|: ε, attained for k ≥ 2."""
        return self.epsilon

    def event(self, examples: int, *, partition: str = "", part: int = 0) -> LabelRelease:
        """The record of one use on ``examples`` labels, all of them or a part of a label-independent partition."""
        expect_count("examples", examples, least=0)
        return LabelRelease("top-k-randomized-response", examples, self.epsilon, 0.0, partition, part)


@dataclass(frozen=True)
class RandomizedResponseWithPrior:
    """RRWithPrior: RRTop-k with the k that makes a correct answer likeliest under the prior p.

    k* maximizes w_k = e^ε/(e^ε + k − 1) · Σ_{y ∈ Y_k} p(y), the probability that the output equals the label if the
    label follows p. No ε-DP randomizer has a larger one (Theorem 3). The largest k wins among those whose w_k are
    equal up to rounding, so that a uniform prior gives k* = K: plain randomized response.

    Guarantee: ε-label differential privacy whatever the prior, right or wrong, as long as it was made without the
    label. A prior that was made from the same labels has its own cost, to be added.

    Source: arXiv 2102.06062, Algorithm 2. Raises ``ValueError`` for K < 2, and for ε ≤ 0 or not finite.
    """

    classes: int
    epsilon: float

    def __post_init__(self) -> None:
        expect_count("classes", self.classes, least=2)
        expect_positive("epsilon", self.epsilon)

    def __call__(
        self, labels: ArrayLike, priors: ArrayLike, *, rng: NoiseSource, groups: ArrayLike | None = None
    ) -> Responses:
        """Randomized ``labels`` (n,) and their k*, for priors as in ``TopKRandomizedResponse``."""

        def best(descending: Array, _: slice) -> Integers:
            return best_subset_sizes(self.correct_probabilities(descending), self.classes)

        return _respond_with(self.classes, self.epsilon, labels, priors, groups, best, rng)

    def correct_probabilities(self, descending: Array) -> Array:
        """w_1 … w_K for each row of priors that are sorted in descending order: (…, K) to (…, K).

        A row is taken in proportion to its sum, so that the w are probabilities.
        """
        sums = np.cumsum(descending / descending[..., :1], axis=-1, dtype=np.float64)
        sums /= sums[..., -1:]
        sums /= 1 + math.exp(-self.epsilon) * np.arange(self.classes)
        return sums

    def subset_size(self, prior: ArrayLike) -> int:
        """k* of one ``prior`` (K,)."""
        descending = -np.sort(-_expect_prior(prior, self.classes).astype(np.float64))
        return int(best_subset_sizes(self.correct_probabilities(descending), self.classes))

    def law(self, prior: ArrayLike) -> Array:
        """Probabilities (K, K): of each output (column) for each label (row), under one ``prior`` (K,)."""
        weights = _expect_prior(prior, self.classes)
        return response_law(top_k(weights, self.subset_size(weights)), self.epsilon)

    def privacy_loss(self) -> float:
        """A bound on |ln(ratio of two probabilities of one output)|: ε, attained for k* ≥ 2."""
        return self.epsilon

    def event(self, examples: int, *, partition: str = "", part: int = 0) -> LabelRelease:
        """The record of one use on ``examples`` labels, all of them or a part of a label-independent partition."""
        expect_count("examples", examples, least=0)
        return LabelRelease("randomized-response-with-prior", examples, self.epsilon, 0.0, partition, part)


def best_subset_sizes(correct: Array, classes: int) -> Integers:
    """The largest k whose w_k (…, K) is the maximum, up to rounding: (…)."""
    best = correct >= correct.max(axis=-1, keepdims=True) * (1 - _TIE * classes)
    return np.asarray(classes - np.argmax(best[..., ::-1], axis=-1), dtype=np.int64)


def top_k(priors: NDArray[np.floating], k: int | Integers) -> NDArray[np.bool_]:
    """Membership in Y_k, the k labels with the largest prior and of equal ones the lowest: (…, K) to (…, K)."""
    return ranks(priors) < np.asarray(k)[..., None]


def ranks(priors: NDArray[np.floating]) -> Integers:
    """How many labels come before each one in the order of falling prior: (…, K) to (…, K)."""
    return _inverse(np.argsort(-priors, axis=-1, kind="stable"))


def response_law(subset: NDArray[np.bool_], epsilon: float) -> Array:
    """The law (K, K) of randomized response within a ``subset`` (K,) of the labels; rows are labels."""
    k = int(subset.sum())
    other = math.exp(-epsilon)
    inside = np.where(np.eye(subset.size, dtype=bool), 1.0, other) / (1 + (k - 1) * other)
    return np.asarray(np.where(subset[:, None], inside, 1 / k) * subset)


def _respond_with(
    classes: int,
    epsilon: float,
    labels: ArrayLike,
    priors: ArrayLike,
    groups: ArrayLike | None,
    choose: Callable[[Array, slice], Integers],
    rng: NoiseSource,
) -> Responses:
    """Randomize with one prior for all, for each group, or for each example; ``choose`` gives the k of some rows."""
    values = expect_labels("labels", labels, classes)
    weights = expect_priors("priors", priors, classes)
    if groups is not None or weights.ndim == 1:
        table = weights.reshape(-1, classes)
        own = np.zeros(values.size, np.int64)
        if groups is not None:
            own = expect_groups("groups", groups, values.size, len(table))
        order = np.empty(table.shape, np.int64)
        sizes = np.empty(len(table), np.int64)
        for rows in _chunks(table.shape):
            order[rows], sizes[rows] = _subsets(table[rows], rows, choose)
        rank = _inverse(order)[own, values]
        drawn = _respond(rank, sizes[own], epsilon, rng)
        return Responses(order[own, drawn], sizes[own])
    if len(weights) != values.size:
        raise ValueError(f"Expected priors to have a row for each of {values.size} examples, found {len(weights)}")
    released, used = np.empty_like(values), np.empty_like(values)
    for rows in _chunks(weights.shape):
        order, used[rows] = _subsets(weights[rows], rows, choose)
        each = np.arange(len(order))
        drawn = _respond(_inverse(order)[each, values[rows]], used[rows], epsilon, rng)
        released[rows] = order[each, drawn]
    return Responses(released, used)


def _subsets(
    priors: NDArray[np.floating], rows: slice, choose: Callable[[Array, slice], Integers]
) -> tuple[Integers, Integers]:
    """The labels in the order of falling prior (rows, K), and the k of each row."""
    order = np.argsort(-priors, axis=-1, kind="stable")
    return order, choose(np.take_along_axis(priors, order, axis=-1).astype(np.float64), rows)


def _respond(rank: Integers, sizes: Integers, epsilon: float, rng: NoiseSource) -> Integers:
    """Randomized response on places 0 … k − 1, with a uniform one for a place of k or more: shape (n,).

    A place is left if u < P(leave): the set of such u on the grid of 2⁻⁵³ is never smaller than P(leave), so rounding
    never brings the probability of leaving below it.
    """
    leave, where = rng.random(rank.size), rng.random(rank.size)
    others = (sizes - 1) * math.exp(-epsilon)
    outside = rank >= sizes
    moves = outside | (leave < others / (1 + others))
    drawn = (where * (sizes - ~outside)).astype(np.int64)
    drawn += ~outside & (drawn >= rank)
    return np.where(moves, drawn, rank)


def _expect_prior(prior: ArrayLike, classes: int) -> NDArray[np.floating]:
    weights = expect_priors("prior", prior, classes)
    if weights.ndim != 1:
        raise ValueError(f"Expected one prior of shape ({classes},), found {weights.shape}")
    return weights


def _expect_sizes(sizes: int | Integers, classes: int) -> Integers:
    array = np.asarray(sizes)
    if array.dtype.kind not in "iu" or array.size == 0:
        raise ValueError(f"Expected subset sizes to be whole numbers, found {sizes!r}")
    wrong = (array < 1) | (array > classes)
    if wrong.any():
        raise ValueError(f"Expected subset sizes from 1 to {classes}, found {array[wrong][0]}")
    return array


def _inverse(order: Integers) -> Integers:
    """The place of each label, for rows of labels in order."""
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), axis=-1)
    return places


def _chunks(shape: tuple[int, ...]) -> list[slice]:
    """Slices of rows of at most ``CELLS`` cells, or of one row."""
    step = max(1, CELLS // shape[1])
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
