"""Learners on noisy labels: in expectation over the noise they fit what they would fit on the true labels."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from coterie.errors import CoterieError
from coterie.labels.learners import (
    Recipe,
    class_losses,
    constant,
    cross_entropy,
    fit_bags,
    fit_weighted,
    outputs_of,
    ramp_then_linear,
    ramp_then_steps,
)
from coterie.labels.linear import fit_aggregates, fit_logistic
from coterie.labels.stages import NetworkLearner, train_in_stages
from coterie.mechanisms.labels.aggregation import AggregatedBags, AggregateFeaturesAndLabels, WeightedBags
from coterie.mechanisms.labels.arguments import Array, Integers
from coterie.mechanisms.labels.losses import debiased_weights
from coterie.mechanisms.labels.prior import temperature_softmax
from coterie.mechanisms.labels.randomized_response import RandomizedResponse, RandomizedResponseWithPrior
from coterie.rng import seeded

CLASSES = 3


def blobs(rows: int, *, spread: float = 1.0) -> tuple[Array, Integers]:
    rng = seeded(5, "blobs", rows)
    labels = rng.integers(CLASSES, size=rows)
    centres = np.array([[2.0, 0.0], [-1.0, 1.8], [-1.0, -1.8]])
    return centres[labels] + spread * rng.standard_normal((rows, 2)), labels


def all_outcomes(features: Array, labels: Integers, epsilon: float, *, debiased: bool) -> tuple[Array, Array]:
    """Every row with every output of randomized response, its weights times the probability of that output."""
    law = RandomizedResponse(CLASSES, epsilon).law()
    outputs = np.tile(np.arange(CLASSES), len(labels))
    weights = debiased_weights(outputs, classes=CLASSES, epsilon=epsilon) if debiased else np.eye(CLASSES)[outputs]
    chances = law[np.repeat(labels, CLASSES), outputs]
    return np.repeat(features, CLASSES, axis=0), CLASSES * chances[:, None] * weights


def test_logistic_regression_is_scikit_learns() -> None:
    features, labels = blobs(200)
    rows = np.column_stack([features, np.ones(200)])  # our intercepts are penalised like any coefficient
    expected = LogisticRegression(C=1 / (200 * 0.05), fit_intercept=False, tol=1e-10, max_iter=2000).fit(rows, labels)
    found = fit_logistic(features, np.eye(CLASSES)[labels], regularisation=0.05)
    assert found.coefficients == pytest.approx(expected.coef_[:, :2].T, abs=1e-5)
    assert found.intercepts == pytest.approx(expected.coef_[:, 2], abs=1e-5)
    assert (found.predict(features) == expected.predict(rows)).all()


@pytest.mark.parametrize("debiased", [True, False])
def test_debiased_logistic_regression_is_the_non_private_fit_in_expectation(debiased: bool) -> None:
    """Over all outputs, weighted by their probabilities; the plain loss on the outputs is the control."""
    features, labels = blobs(120)
    clean = fit_logistic(features, np.eye(CLASSES)[labels], regularisation=0.1)
    noisy = fit_logistic(*all_outcomes(features, labels, 0.7, debiased=debiased), regularisation=0.1)
    assert np.allclose(noisy.coefficients, clean.coefficients, atol=1e-4) == debiased


@pytest.mark.parametrize("debiased", [True, False])
def test_debiased_training_is_the_non_private_one_in_expectation(debiased: bool) -> None:
    features, labels = blobs(60)
    recipe = Recipe(epochs=20, step_size=0.5, batch_size=1000, schedule=constant, weight_decay=0.01)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, CLASSES))

    def fitted(rows: Array, weights: Array) -> Array:
        trained = fit_weighted(model, torch.tensor(rows, dtype=torch.float32), weights, recipe, rng=seeded(2))
        return outputs_of(trained, torch.tensor(features, dtype=torch.float32))

    clean = fitted(features, np.eye(CLASSES)[labels])
    noisy = fitted(*all_outcomes(features, labels, 0.7, debiased=debiased))
    assert np.allclose(noisy, clean, atol=1e-3) == debiased
    assert not np.allclose(clean, outputs_of(model, torch.tensor(features, dtype=torch.float32)), atol=0.1)


def test_one_noisy_data_set_is_enough_for_a_good_fit() -> None:
    features, labels = blobs(6000)
    noisy = RandomizedResponse(CLASSES, 1.0)(labels, rng=seeded(3, "noise"))
    found = fit_logistic(features, debiased_weights(noisy, classes=CLASSES, epsilon=1.0), regularisation=0.01)
    clean = fit_logistic(features, np.eye(CLASSES)[labels], regularisation=0.01)
    accuracy = [(model.predict(features) == labels).mean() for model in (found, clean)]
    assert accuracy[0] > accuracy[1] - 0.02


@pytest.mark.parametrize(
    ("weights", "regularisation", "words"),
    [(np.ones((3, 2)), 0.1, "found"), (-np.ones((4, 2)), 0.1, "less than 0"), (np.ones((4, 2)), 0.0, "regularisation")],
)
def test_logistic_regression_refuses(weights: Array, regularisation: float, words: str) -> None:
    with pytest.raises(CoterieError, match=words):
        fit_logistic(np.ones((4, 2)), weights, regularisation=regularisation)


class Recorder(nn.Module):
    """Passes its inputs on, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seen: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append(inputs)
        return inputs * self.scale

    def __deepcopy__(self, _: object) -> "Recorder":
        return self


def test_rows_without_weight_are_left_out() -> None:
    model = Recorder()
    weights = np.array([[1.0, 0], [0, 0], [0, -1.0]])
    recipe = Recipe(epochs=1, step_size=0.0, batch_size=10)
    fit_weighted(model, torch.tensor([[0.0, 0], [1, 1], [2, 2]]), weights, recipe, rng=seeded(1))
    assert sorted(model.seen[0][:, 0].tolist()) == [0.0, 2.0]


def test_mixup_averages_rows_and_weights_alike() -> None:
    """Inputs that equal their weights still do after mixup, with one share a batch and the reversed batch."""
    model, rows = Recorder(), np.eye(4, dtype=np.float32)
    kept: list[torch.Tensor] = []

    def losses(outputs: torch.Tensor) -> torch.Tensor:
        kept.append(outputs)
        return outputs

    recipe = Recipe(epochs=1, step_size=0.5, batch_size=4, momentum=0, mixup=2.0, schedule=constant)
    fit_weighted(model, torch.tensor(rows), rows, recipe, rng=seeded(4), losses=losses)
    mixed = model.seen[0]
    assert mixed.sum(dim=1).tolist() == pytest.approx([1.0] * 4)
    share = mixed.max(dim=1).values
    assert share.tolist() == pytest.approx([share[0].item()] * 4)
    assert 0 < share[0] < 1
    # The gradient of Σ w·x·scale is Σ w·x, so the step shows that the weights were mixed by the same share.
    assert model.scale.item() == pytest.approx(1 - 0.5 * float((mixed**2).sum(dim=1).mean()), rel=1e-5)


def test_the_schedules() -> None:
    assert [ramp_then_linear(p) for p in (0, 0.075, 0.15, 0.575, 1)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert [ramp_then_steps(p) for p in (0, 0.15, 0.3, 0.6, 0.95)] == pytest.approx([0, 1, 0.1, 0.01, 0.001])


def test_a_tasks_loss_is_taken_at_every_class() -> None:
    outputs = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.5, 0.1]])

    def loss(found: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(found, targets, reduction="none")

    assert torch.allclose(class_losses(loss, 3)(outputs), cross_entropy(outputs))


@dataclass
class FakeLearner:
    """Remembers what it was given; a model is the number of its stage."""

    logits_of: Callable[[int, Integers], Array]
    calls: list[tuple[int, list[int], list[int], int | None]] = field(default_factory=list)

    def fit(self, stage: int, examples: Integers, outputs: Integers, start: int | None) -> int:
        self.calls.append((stage, examples.tolist(), outputs.tolist(), start))
        return stage

    def logits(self, model: int, examples: Integers) -> Array:
        return self.logits_of(model, examples)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Integers, Array]]:
    calls: list[tuple[Integers, Array]] = []
    original = RandomizedResponseWithPrior.__call__

    def spy(self: RandomizedResponseWithPrior, labels: Integers, priors: Array, **rest: object) -> object:
        calls.append((np.array(labels), np.array(priors)))
        return original(self, labels, priors, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(RandomizedResponseWithPrior, "__call__", spy)
    return calls


def test_two_stages_use_each_label_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example has a label of its own here, so that what the randomizer sees names it."""
    calls = spied(monkeypatch)
    learner = FakeLearner(lambda _, examples: np.zeros((examples.size, 40)))
    done = train_in_stages(learner, np.arange(40), classes=40, epsilon=1.0, shares=(0.6, 0.4), rng=seeded(6))
    assert [labels.size for labels, _ in calls] == [24, 16]
    assert sorted(np.concatenate([labels for labels, _ in calls])) == list(range(40))
    assert done.state.privacy_loss() == 1.0
    assert done.models == (0, 1)
    assert done.model == 1


def test_the_prior_is_the_last_models_at_its_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spied(monkeypatch)
    table = seeded(8).standard_normal((30, CLASSES))
    learner = FakeLearner(lambda model, examples: table[examples] + model)
    labels = np.zeros(30, np.int64)
    done = train_in_stages(
        learner, labels, classes=CLASSES, epsilon=2.0, shares=(0.5, 0.5), temperature=0.5, rng=seeded(9)
    )
    second = np.flatnonzero(done.state.stages == 1)
    assert (calls[0][1] == 1).all()
    assert calls[1][1] == pytest.approx(temperature_softmax(table[second], 0.5))


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("warm_start", [True, False])
def test_filter_and_warm_start(filtered: bool, warm_start: bool) -> None:
    """The model is sure of class 0, so that k* = 1 and earlier outputs other than 0 are unlikely."""
    learner = FakeLearner(lambda _, examples: np.tile([50.0, 0.0, 0.0], (examples.size, 1)))
    labels = np.arange(60) % CLASSES
    train_in_stages(
        learner,
        labels,
        classes=CLASSES,
        epsilon=1.0,
        shares=(0.5, 0.5),
        filtered=filtered,
        warm_start=warm_start,
        rng=seeded(10),
    )
    (_, _, first, start), (_, _, outputs, second_start) = learner.calls
    assert start is None
    assert second_start == (0 if warm_start else None)
    assert len(outputs) == 30 + (first.count(0) if filtered else 30)


def test_a_network_learns_in_two_stages() -> None:
    features, labels = blobs(1500, spread=0.5)
    inputs = torch.tensor(features, dtype=torch.float32)

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return nn.Linear(2, CLASSES)

    recipe = Recipe(epochs=4, step_size=0.2, batch_size=50)
    learner = NetworkLearner(build, inputs, CLASSES, (recipe, recipe), seeded(11))
    done = train_in_stages(learner, labels, classes=CLASSES, epsilon=1.0, shares=(0.6, 0.4), rng=seeded(12))
    assert (outputs_of(done.model, inputs).argmax(axis=1) == labels).mean() > 0.95
    second = done.state.stages == 1
    agree = done.state.labels == labels
    # With a good prior more outputs are right than randomized response on all classes gives.
    assert agree[second].mean() > RandomizedResponse(CLASSES, 1.0).keep_probability + 0.1


def test_least_squares_on_sums_finds_a_linear_function() -> None:
    rng = seeded(13)
    rows = np.column_stack([rng.standard_normal((400, 3)), np.ones(400)])
    truth = np.array([1.0, -2.0, 0.5, 3.0])
    bags = AggregateFeaturesAndLabels(8, 50)(rows, rows @ truth, rng=rng)
    assert fit_aggregates(bags) == pytest.approx(truth, abs=1e-9)


def test_the_ridge_has_its_closed_form() -> None:
    rng = seeded(14)
    x, y = rng.standard_normal((20, 3)), rng.standard_normal(20)
    expected = np.linalg.solve(x.T @ x + 0.7 * np.eye(3), x.T @ y)
    assert fit_aggregates(AggregatedBags(x, y), ridge=0.7) == pytest.approx(expected, abs=1e-9)
    with pytest.raises(CoterieError, match="ridge"):
        fit_aggregates(AggregatedBags(x, y), ridge=-1.0)


def test_bags_of_weighted_labels_teach_a_network() -> None:
    """Noiseless sums of a linear function: the exact minimum of the bag loss is that function."""
    rng = seeded(15)
    rows = rng.standard_normal((200, 2))
    targets = rows @ np.array([1.5, -0.5]) + 0.25
    members = rng.permutation(200).reshape(40, 5)
    weights = rng.standard_normal((40, 5))
    bags = WeightedBags(members, weights, (weights * targets[members]).sum(axis=1))
    recipe = Recipe(epochs=60, step_size=0.02, batch_size=10)
    trained = fit_bags(nn.Linear(2, 1), torch.tensor(rows, dtype=torch.float32), bags, recipe, rng=seeded(16))
    found = outputs_of(trained, torch.tensor(rows, dtype=torch.float32))[:, 0]
    assert found == pytest.approx(targets, abs=0.02)
    with pytest.raises(CoterieError, match="mixup"):
        fit_bags(trained, torch.zeros(1), bags, Recipe(1, 0.1, 1, mixup=1.0), rng=seeded(1))
