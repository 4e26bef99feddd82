"""Choosing by loss and local SGD, against direct computations."""

import numpy as np
import pytest
import torch
from torch import nn

from coterie.client.selection import best_hypothesis, hypothesis_losses, mean_loss, mean_score, outputs
from coterie.client.training import train
from coterie.parameters import layout_of
from coterie.rng import seeded
from coterie.tasks import ClientData, Task, TrainingSettings


def test_losses_are_the_models_own(tiny_task: Task, rows: ClientData) -> None:
    hypotheses = seeded(2).standard_normal((3, 13)).astype(np.float32)
    model = tiny_task.build()
    losses = hypothesis_losses(tiny_task, model, hypotheses, layout_of(model), rows)
    for vector, loss in zip(hypotheses, losses, strict=True):
        w1, b1, w2, b2 = vector[:6].reshape(3, 2), vector[6:9], vector[9:12].reshape(1, 3), vector[12:]
        hidden = np.maximum(rows.inputs.numpy() @ w1.T + b1, 0)
        expected = float(((hidden @ w2.T + b2 - rows.targets.numpy()) ** 2).mean())
        assert loss == pytest.approx(expected, rel=1e-5)
        assert mean_score(tiny_task, model, vector, layout_of(model), rows) == pytest.approx(expected, rel=1e-5)


def test_rows_in_several_chunks_are_weighted_by_rows_and_not_by_chunks(tiny_task: Task) -> None:
    inputs = torch.zeros(101, 2)
    targets = torch.cat([torch.zeros(100, 1), torch.full((1, 1), 101.0)])
    data = ClientData("x", inputs, targets)
    model = tiny_task.build()
    zero = np.zeros(13, np.float32)
    assert outputs(model, zero, layout_of(model), inputs).shape == (101, 1)
    assert mean_loss(tiny_task, model, zero, layout_of(model), data) == pytest.approx(101.0)


@pytest.mark.parametrize(
    ("losses", "best"),
    [([3, 1, 2], 1), ([1, 1, 1], 0), ([2, 1, 1], 1), ([np.nan, 5, np.inf], 1), ([-np.inf, 5], 1), ([np.nan] * 3, 0)],
)
def test_best_is_the_least_finite_loss_and_the_lowest_index(losses: list[float], best: int) -> None:
    assert best_hypothesis(np.array(losses, np.float64)) == best


def test_dropout_is_off_when_choosing_and_on_when_training(tiny_task: Task, rows: ClientData) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    layout = layout_of(model)
    vector = np.ones(3, np.float32)
    expected = rows.inputs.sum(dim=1, keepdim=True) + 1
    torch.testing.assert_close(outputs(model, vector, layout, rows.inputs), expected)
    settings = TrainingSettings(epochs=1, step_size=0.1, batch_size=20)
    with_dropout = train(tiny_task, model, vector, layout, rows, settings, rng=seeded(1))
    without = train(tiny_task, nn.Sequential(nn.Linear(2, 1)), vector, layout, rows, settings, rng=seeded(1))
    assert not np.allclose(with_dropout, without)


@pytest.mark.parametrize(("epochs", "batch_size"), [(1, 20), (3, 20), (2, 7)])
def test_training_is_plain_sgd_over_shuffled_batches(
    tiny_task: Task, rows: ClientData, epochs: int, batch_size: int
) -> None:
    """A linear model, whose gradient is 2·mean(error·x): computed in numpy beside the test."""
    model = nn.Linear(2, 1)
    start = np.array([0.5, -0.5, 0.1], np.float32)
    settings = TrainingSettings(epochs=epochs, step_size=0.05, batch_size=batch_size)
    trained = train(tiny_task, model, start, layout_of(model), rows, settings, rng=seeded(4))
    rng = seeded(4)
    rng.integers(2**63 - 1)  # torch's seed is drawn first
    x, y = rows.inputs.numpy().astype(np.float64), rows.targets.numpy()[:, 0].astype(np.float64)
    w, b = start[:2].astype(np.float64), float(start[2])
    for _ in range(epochs):
        order = rng.permutation(20)
        for first in range(0, 20, batch_size):
            batch = order[first : first + batch_size]
            error = x[batch] @ w + b - y[batch]
            w, b = w - 0.05 * 2 * (error[:, None] * x[batch]).mean(axis=0), b - 0.05 * 2 * error.mean()
    np.testing.assert_allclose(trained, [*w, b], atol=1e-5)
    assert trained.dtype == np.float32


def test_training_leaves_its_input_and_the_global_generators_as_they_were(tiny_task: Task, rows: ClientData) -> None:
    model, start = tiny_task.build(), seeded(2).standard_normal(13).astype(np.float32)
    before, parameters = start.copy(), [p.detach().clone() for p in model.parameters()]
    torch_state = torch.get_rng_state()
    train(tiny_task, model, start, layout_of(model), rows, TrainingSettings(), rng=seeded(1))
    np.testing.assert_array_equal(start, before)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), parameters, strict=True))


def test_equal_seeds_train_equally(tiny_task: Task, rows: ClientData) -> None:
    model, start = tiny_task.build(), seeded(2).standard_normal(13).astype(np.float32)
    made = [
        train(tiny_task, model, start, layout_of(model), rows, TrainingSettings(), rng=seeded(s)) for s in (1, 1, 2)
    ]
    np.testing.assert_array_equal(made[0], made[1])
    assert not np.array_equal(made[0], made[2])


def test_divergence_comes_back_as_numbers_that_are_not_finite(tiny_task: Task, rows: ClientData) -> None:
    settings = TrainingSettings(epochs=20, step_size=1e6, batch_size=5)
    model, start = tiny_task.build(), np.ones(13, np.float32)
    assert not np.isfinite(train(tiny_task, model, start, layout_of(model), rows, settings, rng=seeded(1))).all()
