"""Client by client in processes: the deployed functions, and which models they are for."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie import simulation
from coterie.client.training import train
from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.rng import seeded
from coterie.simulation import SimulatedRun, is_batched, simulate
from coterie.simulation.engines import BatchedEngine
from coterie.simulation.rows import Rows
from coterie.simulation.workers import workers
from coterie.tasks import ClientData, Task, load_task, seeded_module
from tests.simulation.conftest import RAGGED, hospital_rows


def test_the_work_is_the_batched_engines(brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    model, rows = task.build(), Rows.of(clients)
    layout = layout_of(model)
    hypotheses = 0.3 * seeded(1).standard_normal((1, 3, layout.size)).astype(np.float32)
    sampled = np.array([[9, 0, 4, 2, 7]])
    batched = BatchedEngine(task, rows, task.training)
    with workers(task, model, layout, rows, task.training, k=3, sampled=5) as engine:
        np.testing.assert_allclose(engine.losses(hypotheses, sampled), batched.losses(hypotheses, sampled), rtol=1e-5)
        chosen, trained = engine.choose_and_train(hypotheses, sampled, [seeded(6)])
        judged = engine.judge(hypotheses, sampled, [seeded(7)])
    expected = batched.judge(hypotheses, sampled, [seeded(7)])
    np.testing.assert_allclose(judged.scores, expected.scores, rtol=1e-5)
    assert np.array_equal(np.isnan(judged.second_half_scores), np.isnan(expected.second_half_scores))
    seeds = seeded(6).integers(2**63 - 1, size=5)
    for place, client in enumerate(sampled[0]):
        start = hypotheses[0, chosen[0, place]]
        order = np.random.default_rng(seeds[place])
        own = train(task, model, start, layout, clients[client], task.training, rng=order)
        assert np.array_equal(trained[0, place], own)
        # The two halves of a client's rows make the whole.
        half = RAGGED[client] // 2
        if half:
            losses = judged.losses[0, place]
            assert (judged.first_half_losses[0, place] * half < losses * RAGGED[client]).all()


class Branching(nn.Module):
    """A model that torch.func cannot batch: it looks at its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """(rows, 3) -> (rows, 1)."""
        outputs: Tensor = self.linear(inputs)
        return outputs if float(outputs.detach().sum()) > 0 else 2 * outputs


def test_small_models_are_batched_and_large_or_branching_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows.of(hospital_rows())
    task = load_task("hospital")
    branching = replace(task, build=Branching, initialise=lambda rng: seeded_module(Branching, rng))
    assert is_batched(task, layout_of(task.build()), rows)
    assert not is_batched(branching, layout_of(Branching()), rows)
    monkeypatch.setattr(simulation, "MOST_BATCHED", 10)
    assert not is_batched(task, layout_of(task.build()), rows)


def test_a_branching_model_is_simulated_all_the_same() -> None:
    task = load_task("hospital")
    branching = replace(
        task,
        build=Branching,
        initialise=lambda rng: seeded_module(Branching, rng),
        clipping_norm=0.1,
        training=replace(task.training, epochs=1),
    )
    runs = [SimulatedRun(seed=seed, rounds=2, clients_per_round=3, validate_every=1) for seed in (1, 2)]
    found = simulate(branching, hospital_rows(), runs)
    assert [result.rounds for result in found] == [2, 2]
    assert all(result.metric is not None and len(result.history) == 2 for result in found)
    assert not np.array_equal(found[0].hypotheses, found[1].hypotheses)
    again = simulate(branching, hospital_rows(), runs[1:])
    assert np.array_equal(again[0].hypotheses, found[1].hypotheses)


class Dying(Branching):
    """Ends its process, as the kernel does where memory is short."""

    parent = os.getpid()

    def forward(self, inputs: Tensor) -> Tensor:
        """Nothing, in a worker process."""
        if os.getpid() != self.parent:
            os._exit(9)
        raise RuntimeError("not batched")


def test_a_process_that_dies_is_one_line() -> None:
    dying = replace(
        load_task("hospital"), build=Dying, clipping_norm=0.1, initialise=lambda rng: seeded_module(Dying, rng)
    )
    with pytest.raises(CoterieError, match="was memory short"):
        simulate(dying, hospital_rows(), [SimulatedRun(clients_per_round=3, rounds=1)])


def test_torch_has_its_threads_back(brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    before = torch.get_num_threads()
    simulate(task, clients, [SimulatedRun(clients_per_round=3, rounds=1)])
    assert torch.get_num_threads() == before
