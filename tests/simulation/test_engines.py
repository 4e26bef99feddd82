"""The batched losses, choices and training are the deployed client's, on ragged clients, in float64."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.client.selection import best_hypothesis, mean_loss, mean_score
from coterie.client.training import train
from coterie.parameters import layout_of
from coterie.rng import seeded
from coterie.simulation.engines import BatchedEngine, best_hypotheses
from coterie.simulation.programs import CPU, torch_seeded
from coterie.simulation.rows import Rows
from coterie.tasks import ClientData, Task, TrainingSettings, seeded_module
from tests.simulation.conftest import RAGGED, ReplayedOrder

Shaped = tuple[Task, Callable[..., list[ClientData]]]
# Two runs side by side with different clients, among them the largest and the smallest.
SAMPLED = np.array([[9, 0, 4, 2, 7], [3, 8, 1, 5, 6]])


def engine_of(task: Task, clients: list[ClientData], training: TrainingSettings) -> tuple[BatchedEngine, int]:
    model = task.build().double()
    layout = layout_of(model)
    return BatchedEngine(task, Rows.of(clients), training), layout.size


def hypotheses_of(n: int, k: int = 3) -> np.ndarray:  # type: ignore[type-arg]
    return 0.3 * seeded(2, "hypotheses").standard_normal((2, k, n))


def test_losses_and_halves_are_those_of_the_deployed_client(shaped: Shaped) -> None:
    task, make = shaped
    clients = make(dtype=torch.float64)
    engine, n = engine_of(task, clients, task.training)
    hypotheses, model = hypotheses_of(n), task.build().double()
    layout = layout_of(model)
    losses = engine.losses(hypotheses, SAMPLED)
    judged = engine.judge(hypotheses, SAMPLED, [seeded(1), seeded(2)])
    halves = engine._first_halves(SAMPLED, [seeded(1), seeded(2)])
    for run in range(2):
        for place, client in enumerate(SAMPLED[run]):
            data = clients[client]
            first = torch.tensor(halves[run, place, : data.rows])
            assert int(first.sum()) == data.rows // 2
            for j in range(3):
                vector = hypotheses[run, j]
                own = (run, place, j)
                assert losses[own] == pytest.approx(mean_loss(task, model, vector, layout, data), rel=1e-12)
                assert judged.losses[own] == losses[own]
                assert judged.scores[own] == pytest.approx(mean_score(task, model, vector, layout, data), rel=1e-12)
                if data.rows == 1:
                    assert np.isnan(judged.first_half_losses[own])
                    assert np.isnan(judged.second_half_scores[own])
                    continue
                chosen_on = replace(data, inputs=data.inputs[first], targets=data.targets[first])
                scored_on = replace(data, inputs=data.inputs[~first], targets=data.targets[~first])
                assert judged.first_half_losses[own] == pytest.approx(
                    mean_loss(task, model, vector, layout, chosen_on), rel=1e-12
                )
                assert judged.second_half_scores[own] == pytest.approx(
                    mean_score(task, model, vector, layout, scored_on), rel=1e-12
                )


@pytest.mark.parametrize("batch_size", [4, 10, 300])
def test_training_is_the_deployed_clients_for_the_same_order(shaped: Shaped, batch_size: int) -> None:
    task, make = shaped
    clients = make(dtype=torch.float64)
    settings = TrainingSettings(epochs=2, step_size=0.1, batch_size=batch_size)
    engine, n = engine_of(task, clients, settings)
    model = task.build().double()
    starts = 0.3 * seeded(3, "starts").standard_normal((2, 5, n))
    orders = [engine._draw_orders(SAMPLED, [seeded(7, epoch), seeded(8, epoch)]) for epoch in range(2)]
    found = engine.train(starts, SAMPLED, lambda epoch: orders[epoch])
    for run in range(2):
        for place, client in enumerate(SAMPLED[run]):
            own = [order[run, place, : RAGGED[client]] for order in orders]
            expected = train(
                task,
                model,
                starts[run, place],
                layout_of(model),
                clients[client],
                settings,
                rng=ReplayedOrder(own),  # type: ignore[arg-type]
            )
            assert np.abs(expected - starts[run, place]).max() > 1e-3
            np.testing.assert_allclose(found[run, place], expected, rtol=0, atol=1e-12)


def test_orders_are_permutations_and_every_one_is_as_likely() -> None:
    clients = [
        ClientData(f"c{index}", torch.zeros(rows, 1), torch.zeros(rows, 1)) for index, rows in enumerate([3] * 3000)
    ]
    rows = Rows.of(clients)
    engine = BatchedEngine.__new__(BatchedEngine)
    engine._rows = rows
    drawn = engine._draw_orders(np.arange(3000)[None], [seeded(4)])[0]
    kinds, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(kinds) == 6
    # Chi-squared with 5 degrees of freedom passes 50.9 with probability 1e-9.
    assert ((counts - 500) ** 2 / 500).sum() < 50.9


def test_the_choice_is_the_deployed_clients_on_ties_and_non_finite_losses() -> None:
    losses = np.array([[1.0, 1.0, 2.0], [np.nan, 3.0, 3.0], [np.inf, np.nan, -np.inf], [np.nan, np.nan, np.nan]])
    assert best_hypotheses(losses).tolist() == [best_hypothesis(row) for row in losses]


class Dropping(nn.Module):
    """One linear layer behind dropout of a half."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """(rows, 8) -> (rows, 1)."""
        outputs: Tensor = self.linear(nn.functional.dropout(inputs, 0.5, self.training))
        return outputs


def test_each_client_has_its_own_dropout_in_each_batch_and_none_in_the_losses(tiny_task: Task) -> None:
    task = replace(tiny_task, build=Dropping, initialise=lambda rng: seeded_module(Dropping, rng))
    data = ClientData("same", torch.ones(2, 8), torch.ones(2, 1))
    model = Dropping()
    layout = layout_of(model)
    settings = TrainingSettings(epochs=1, step_size=0.1, batch_size=2)
    engine = BatchedEngine(task, Rows.of([data, data]), settings)
    starts = np.zeros((1, 2, layout.size), np.float32)

    def trained() -> NDArray[np.float32]:
        return engine.train(starts, np.array([[0, 1]]), lambda _: np.zeros((1, 2, 2), np.int64))

    with torch_seeded(3, CPU):
        once, again = trained(), trained()
    assert not np.array_equal(once[0, 0], once[0, 1])
    assert not np.array_equal(once, again)
    with torch_seeded(3, CPU):  # nor does it matter that the first call has recorded the operations
        assert np.array_equal(trained(), once)
    losses = engine.losses(np.ones((1, 1, layout.size), np.float32), np.array([[0, 1]]))
    assert losses.tolist() == [[[64.0], [64.0]]]
