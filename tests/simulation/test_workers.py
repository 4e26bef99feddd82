"""Client by client in processes: the deployed functions, and which models they are for."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import gamma, kstest
from torch import Tensor, nn

from coterie import simulation
from coterie.client.selection import outputs
from coterie.client.training import train
from coterie.datasets.femnist import CharacterNetwork
from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.rng import seeded
from coterie.simulation import SimulatedRun, channels_last, is_batched, server_side, simulate
from coterie.simulation.channels_last import ChannelsLast, has_convolutions
from coterie.simulation.engines import BatchedEngine
from coterie.simulation.privacy import mechanism_for
from coterie.simulation.rows import Rows
from coterie.simulation.sanitizing import draw_for_one
from coterie.simulation.server_side import average_all
from coterie.simulation.workers import workers
from coterie.tasks import ClientData, Task, load_task, seeded_module
from tests.simulation.conftest import RAGGED, ReplayedNoise, hospital_rows


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


def test_what_is_sent_is_the_mechanisms_release_whatever_the_number_of_processes(
    brisk: tuple[Task, list[ClientData]],
) -> None:
    task, clients = brisk
    model, rows, layout = task.build(), Rows.of(clients), layout_of(task.build())
    mechanism = mechanism_for(SimulatedRun(clipping_norm=0.05), task, layout)
    assert mechanism is not None
    hypotheses = 0.3 * seeded(1).standard_normal((1, 3, layout.size)).astype(np.float32)
    sampled = np.array([[9, 0, 4, 2, 7]])
    sent = []
    for processes in (1, 2, 3):
        with workers(task, model, layout, rows, task.training, k=3, sampled=5, processes=processes) as engine:
            _, trained = engine.choose_and_train(hypotheses, sampled, [seeded(6)])
            chosen, noisy = engine.choose_and_send(hypotheses, sampled, seeded(6), None, mechanism, seeded(8))
            sent.append(noisy.copy())
    assert np.array_equal(sent[0], sent[1])
    assert np.array_equal(sent[0], sent[2])
    seeds = seeded(8).integers(2**63 - 1, size=5)
    assert len(set(seeds.tolist())) == 5
    for place in range(5):
        start = hypotheses[0, chosen[0, place]].astype(np.float64)
        update = trained[0, place] - start
        (normals,), (gammas,) = draw_for_one(mechanism.sizes, int(seeds[place]))
        released = mechanism.release(update, rng=ReplayedNoise(normals, gammas)).update  # type: ignore[arg-type]
        assert np.array_equal(sent[0][0, place], (start + released).astype(np.float32))
        assert not np.allclose(released, update, atol=1e-3)


def test_the_draws_of_one_client_have_their_laws() -> None:
    sizes = (100_000, 5)
    normals, gammas = draw_for_one(sizes, 3)
    assert normals.shape == (1, 100_005)
    assert kstest(normals[0], "norm").pvalue > 1e-9
    assert kstest(normals[0] * 1.05, "norm").pvalue < 1e-9  # what the test sees
    small = np.array([draw_for_one(sizes[1:], seed)[1][0, 0] for seed in range(2000)])
    assert kstest(small, gamma(5).cdf).pvalue > 1e-9
    assert kstest(small, gamma(6).cdf).pvalue < 1e-9
    assert abs(gammas[0, 0] / 100_000 - 1) < 6.2 / np.sqrt(100_000)  # of its standard deviations, 1e-9 lies outside
    assert np.array_equal(draw_for_one(sizes, 3)[0], normals)
    assert not np.array_equal(draw_for_one(sizes, 4)[0], normals)


@pytest.fixture
def images() -> ClientData:
    """Images of the femnist task, in float64: in float32 the order of a sum can decide what a ReLU lets by."""
    rng = seeded(4, "images")
    return ClientData("f", torch.tensor(rng.uniform(0, 1, (21, 1, 28, 28))), torch.tensor(rng.integers(0, 62, 21)))


def _convolutional(data: ClientData) -> tuple[NDArray[np.float64], NDArray[np.float64], bool]:
    """The femnist task's outputs and what it trains, dropout included, in float64; whether channels were innermost."""
    task = load_task("femnist")
    model = CharacterNetwork().double()
    layout = layout_of(model)
    innermost: list[bool] = []
    model.convolution2.register_forward_hook(lambda *call: innermost.append(call[2].stride()[1] == 1))
    vector: Any = seeded(2).uniform(-0.05, 0.05, layout.size)
    trained = train(task, model, vector, layout, data, replace(task.training, batch_size=8), rng=seeded(3))
    found = outputs(model, vector, layout, data.inputs).numpy()
    assert len(set(innermost)) == 1
    return found, trained - vector, innermost[0]


def test_channels_last_changes_nothing_but_the_order_of_sums(
    images: ClientData, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, updates, innermost = _convolutional(images)
    assert not innermost
    with ChannelsLast():
        again, same_updates, innermost = _convolutional(images)
    assert innermost
    np.testing.assert_allclose(again, found, rtol=0, atol=1e-13)
    assert np.abs(updates).max() > 1e-3
    np.testing.assert_allclose(same_updates, updates, rtol=0, atol=1e-13)
    # Dropout that draws in the order of memory drops others: the comparison sees it.
    monkeypatch.setattr(channels_last, "_DRAWING", set())
    with ChannelsLast():
        _, other_updates, _ = _convolutional(images)
    assert np.abs(other_updates - updates).max() > 1e-3


def test_which_models_have_convolutions() -> None:
    assert has_convolutions(layout_of(load_task("femnist").build()))
    assert not has_convolutions(layout_of(load_task("digits").build()))


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
        return super().forward(inputs)


def test_a_process_that_dies_is_one_line() -> None:
    dying = replace(
        load_task("hospital"), build=Dying, clipping_norm=0.1, initialise=lambda rng: seeded_module(Dying, rng)
    )
    with pytest.raises(CoterieError, match="was memory short"):
        simulate(dying, hospital_rows(), [SimulatedRun(clients_per_round=3, rounds=1)])


def test_a_choice_in_bfloat16_does_not_see_a_thousandth() -> None:
    # One input of 1, outputs w and a target of 2: 1.0009 is nearer to it, and is 1 in bfloat16.
    rows = Rows.of([ClientData("one", torch.ones(1, 3), torch.full((1, 1), 2.0))])
    task, model = load_task("hospital"), Branching()
    layout = layout_of(model)
    hypotheses = np.array([[[1, 0, 0, 0], [1.0009, 0, 0, 0]]], np.float32)
    chosen = []
    for bfloat16 in (False, True):
        with workers(
            task, model, layout, rows, task.training, k=2, sampled=1, bfloat16_selection=bfloat16, processes=1
        ) as engine:
            chosen.append(engine.choose_and_train(hypotheses, np.array([[0]]), [seeded(1)])[0].item())
            # Only the choice of who trains: what is measured is measured in float32.
            assert engine.losses(hypotheses, np.array([[0]])).argmin() == 1
    assert chosen == [1, 0]


def test_bfloat16_is_refused_where_it_does_nothing() -> None:
    with pytest.raises(CoterieError, match=r"^Expected --bfloat16-selection for a model .* 'hospital'.*leave it out$"):
        simulate(
            load_task("hospital"),
            hospital_rows(),
            [SimulatedRun(clients_per_round=3, rounds=1, bfloat16_selection=True)],
        )


def test_averages_in_blocks_are_the_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = seeded(9)
    hypotheses, sent = rng.standard_normal((2, 3, 50)), rng.standard_normal((2, 7, 50))
    belongs = np.array([[0, 1, 1, 0, 0, 1, 0], [2, 2, 2, 2, 2, 2, 2]])
    arguments = hypotheses.astype(np.float32), belongs, sent.astype(np.float32)
    whole, counts = average_all(*arguments)
    monkeypatch.setattr(server_side, "_NUMBERS_AT_ONCE", 14 * 8)  # eight parameters at a time, and two in the end
    blocks, _ = average_all(*arguments)
    assert np.array_equal(whole, blocks)
    assert counts.tolist() == [[4, 3, 0], [0, 0, 7]]
    np.testing.assert_allclose(blocks[0, 0], arguments[2][0, belongs[0] == 0].mean(axis=0), rtol=1e-6, atol=1e-7)
    assert np.array_equal(blocks[0, 2], arguments[0][0, 2])


def test_torch_has_its_threads_back(brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    before = torch.get_num_threads()
    simulate(task, clients, [SimulatedRun(clients_per_round=3, rounds=1)])
    assert torch.get_num_threads() == before
