"""LP-MST: train, query the next part of the labels with the model as prior, train again. Each label is used once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor, nn

from coterie.labels.learners import ClassLosses, Recipe, cross_entropy, fit_weighted, outputs_of
from coterie.mechanisms.labels.arguments import Array, Integers
from coterie.mechanisms.labels.multistage import MultiStage, random_stages
from coterie.mechanisms.labels.prior import temperature_softmax
from coterie.mechanisms.labels.randomized_response import RandomizedResponseWithPrior
from coterie.mechanisms.randomness import NoiseSource

Model = TypeVar("Model")


class StageLearner(Protocol[Model]):
    """A model as LP-MST needs it; examples are positions in the learner's own features."""

    def fit(self, stage: int, examples: Integers, outputs: Integers, start: Model | None) -> Model:
        """A model trained on the ``outputs`` (q,) of ``examples`` (q,), from ``start`` or anew."""

    def logits(self, model: Model, examples: Integers) -> Array:
        """The model's logits (q, K), higher for likelier classes."""


@dataclass(frozen=True)
class StagedTraining(Generic[Model]):
    """The final ``state``, with every output and stage, and the ``models`` of all stages; the last is the result."""

    state: MultiStage
    models: tuple[Model, ...]

    @property
    def model(self) -> Model:
        """The model trained after the last stage."""
        return self.models[-1]


def train_in_stages(
    learner: StageLearner[Model],
    labels: ArrayLike,
    *,
    classes: int,
    epsilon: float,
    shares: Sequence[float],
    temperature: float = 1.0,
    filtered: bool = True,
    warm_start: bool = True,
    rng: NoiseSource,
) -> StagedTraining[Model]:
    """LP-MST on ``labels`` (n,) in 0 … K − 1: one stage for each of ``shares``, which sum to 1 (one share is LP-1ST).

    Stage 1 is plain randomized response, stage t RRWithPrior with softmax(logits/T) of the model of stage t − 1 as
    prior. ``filtered`` leaves out earlier outputs that this model finds unlikely, and ``warm_start`` trains on from it.

    Guarantee: everything returned is ε-label differentially private, as a label is used by one stage only. The stages
    are drawn from ``rng``, which is also the noise; the learner must get at the labels in no other way. Settings that
    were chosen by looking at results on these labels are not covered. Source: arXiv 2102.06062, Algorithm 3.
    """
    truth = np.asarray(labels)
    stages = random_stages(truth.size, shares, rng=rng)
    state = MultiStage.start(RandomizedResponseWithPrior(classes, epsilon), stages)
    models: list[Model] = []
    while (examples := state.next_examples).size:
        newest = models[-1] if models else None
        prior = None if newest is None else temperature_softmax(learner.logits(newest, examples), temperature)
        state = state.query(truth[examples], prior, rng=rng)
        judged = None if newest is None or not filtered else learner.logits(newest, state.queried)
        kept, outputs = state.training_set(judged)
        models.append(learner.fit(state.stage - 1, kept, outputs, newest if warm_start else None))
    return StagedTraining(state, tuple(models))


@dataclass(frozen=True)
class NetworkLearner:
    """A torch network on ``inputs`` (n, …) as a ``StageLearner``; ``recipes`` has one for each stage.

    ``build`` makes an untrained network on the device to use. The loss is on the outputs as they are, ``losses`` of the
    class ỹ: RRWithPrior's outputs need no debiasing to rank classes, and LP-MST uses none.
    """

    build: Callable[[], nn.Module]
    inputs: Tensor
    classes: int
    recipes: Sequence[Recipe]
    rng: np.random.Generator
    losses: ClassLosses = cross_entropy

    def fit(self, stage: int, examples: Integers, outputs: Integers, start: nn.Module | None) -> nn.Module:
        """See ``StageLearner``. The optimiser starts afresh in every stage."""
        weights = np.eye(self.classes, dtype=np.float32)[outputs]
        model = self.build() if start is None else start
        return fit_weighted(
            model, self.inputs[examples], weights, self.recipes[stage], rng=self.rng, losses=self.losses
        )

    def logits(self, model: nn.Module, examples: Integers) -> Array:
        """See ``StageLearner``."""
        return outputs_of(model, self.inputs[examples])
