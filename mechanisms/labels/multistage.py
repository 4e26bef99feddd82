"""LP-MST's bookkeeping: which labels are queried at which stage, once each, with which prior. No model is in here."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from coterie.mechanisms.arguments import expect_count
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels.arguments import Array, Integers, expect_labels
from coterie.mechanisms.labels.losses import filtered_weights
from coterie.mechanisms.labels.randomized_response import RandomizedResponseWithPrior
from coterie.mechanisms.randomness import NoiseSource

UNQUERIED = -1
"""In place of the output for a label that no stage has queried yet."""


@dataclass(frozen=True)
class MultiStage:
    """Where a multi-stage training (LP-MST) stands; ``query`` gives the next state, and nothing changes in place.

    ``response`` is RRWithPrior with K and ε. ``stages`` (n,) is the stage of each example, 0 … T − 1: a partition that
    must be made without looking at labels, as ``random_stages`` does. ``labels`` (n,) are the outputs so far and
    ``subset_sizes`` (n,) their k*, ``UNQUERIED`` where there are none. ``stage`` is the next to query, T at the end.

    The cycle: query stage t with the newest model's outputs as priors (uniform before the first model: plain
    randomized response), train on ``training_set``, and so on. The true labels are an argument of ``query`` and are not
    kept.

    Guarantee: ε-label differential privacy for all stages together, ε once, not T times. Each label is used by the
    randomizer of its own stage only, whose prior depends on other stages' outputs: adaptive parallel composition. The
    same state must not be queried twice: its outputs are to be stored before they are used, and a stage whose outputs
    are lost is a second release if it is queried again.

    Source: arXiv 2102.06062, Algorithm 3, and Section 5 for filter and warm start.
    """

    response: RandomizedResponseWithPrior
    stages: Integers
    labels: Integers
    subset_sizes: Integers
    stage: int = 0

    @classmethod
    def start(cls, response: RandomizedResponseWithPrior, stages: ArrayLike) -> Self:
        """Nothing queried yet. Raises ``ValueError`` unless ``stages`` (n,) holds 0 … T − 1, each at least once."""
        values = np.asarray(stages)
        division = expect_labels("stages", values, max(values.size, 1))
        if division.size == 0 or not np.bincount(division).all():
            raise ValueError("Expected stages 0 … T − 1 with an example in each, found an empty one")
        empty = np.full(division.size, UNQUERIED, np.int64)
        return cls(response, division, empty, empty)

    @property
    def stage_count(self) -> int:
        """T."""
        return int(self.stages.max()) + 1

    @property
    def next_examples(self) -> Integers:
        """The examples whose labels the next ``query`` uses, in order; none at the end."""
        return np.flatnonzero(self.stages == self.stage)

    def query(self, labels: ArrayLike, priors: ArrayLike | None, *, rng: NoiseSource) -> Self:
        """The state after the next stage: its ``labels`` (those of ``next_examples``, in order) randomized.

        ``priors`` is (K,), or (examples of the stage, K) in the same order; None is the uniform prior. They must come
        from outputs of earlier stages, from public data or from releases that are charged on their own. Raises
        ``ValueError`` after the last stage, and for labels or priors that do not fit.
        """
        examples = self.next_examples
        if not examples.size:
            raise ValueError(f"Expected a stage that is not queried yet, found all {self.stage_count} done")
        if np.size(labels) != examples.size:
            raise ValueError(f"Expected the {examples.size} labels of stage {self.stage}, found {np.size(labels)}")
        weights = np.ones(self.response.classes) if priors is None else priors
        found = self.response(labels, weights, rng=rng)
        outputs, sizes = self.labels.copy(), self.subset_sizes.copy()
        outputs[examples], sizes[examples] = found.labels, found.subset_sizes
        return replace(self, labels=outputs, subset_sizes=sizes, stage=self.stage + 1)

    @property
    def queried(self) -> Integers:
        """The examples that have an output, in order."""
        return np.flatnonzero(self.stages < self.stage)

    @property
    def filter_size(self) -> int:
        """k for the filter: the mean k* of the newest stage, rounded down, at least 1."""
        if self.stage == 0:
            raise ValueError("Expected a stage that is queried, found none yet")
        return max(1, math.floor(float(np.mean(self.subset_sizes[self.stages == self.stage - 1]))))

    def training_set(self, predictions: ArrayLike | None = None) -> tuple[Integers, Integers]:
        """The examples to train the next model on, and their outputs: all that are queried, or the likely ones.

        With ``predictions`` (q, K) of the model that gave the newest stage its prior, for the examples of ``queried``
        in order, an example of an *earlier* stage is left out if its output is not among the ``filter_size`` classes
        that it finds likeliest; the newest stage is kept whole, as its outputs follow that prior already.
        """
        examples = self.queried
        outputs = self.labels[examples]
        if predictions is None or not examples.size:
            return examples, outputs
        likely = filtered_weights(outputs, predictions, self.filter_size).any(axis=1)
        kept = likely | (self.stages[examples] == self.stage - 1)
        return examples[kept], outputs[kept]

    def privacy_loss(self) -> float:
        """A bound on |ln(ratio of two probabilities of all outputs)| if one label differs: ε, however many stages."""
        return self.response.epsilon

    @property
    def partition(self) -> str:
        """A name for this division into stages: equal divisions have equal names, others other ones."""
        return hashlib.sha256(self.stages.astype("<i8").tobytes()).hexdigest()

    def event(self, stage: int) -> LabelRelease:
        """The record of the query of ``stage``; the records of all stages together cost ε once."""
        expect_count("stage", stage, least=0)
        if stage >= self.stage_count:
            raise ValueError(f"Expected stage from 0 to {self.stage_count - 1}, found {stage}")
        examples = int(np.sum(self.stages == stage))
        return self.response.event(examples, partition=self.partition, part=stage)


def random_stages(examples: int, shares: Sequence[float], *, rng: NoiseSource) -> Integers:
    """The stage of each of n examples (n,), uniformly random with the given ``shares`` of the examples.

    Sizes are rounded so that they add up to n. No label is looked at. Raises ``ValueError`` for shares that are not
    positive or do not sum to 1, and for a stage that would be empty.
    """
    expect_count("examples", examples)
    parts: Array = np.asarray(shares, dtype=np.float64)
    if parts.ndim != 1 or not parts.size or not (parts > 0).all() or not abs(parts.sum() - 1) < 1e-9:
        raise ValueError(f"Expected shares above 0 that sum to 1, found {list(shares)}")
    ends = np.rint(np.cumsum(parts) / parts.sum() * examples).astype(np.int64)
    sizes = np.diff(ends, prepend=0)
    if not sizes.all():
        raise ValueError(f"Expected an example or more in every stage, found sizes {sizes.tolist()}")
    stages = np.empty(examples, np.int64)
    stages[np.argsort(rng.random(examples), kind="stable")] = np.repeat(np.arange(parts.size), sizes)
    return stages
