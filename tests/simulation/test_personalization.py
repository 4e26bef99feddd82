"""Fine-tuning in the end and the honest loss, against the deployed client's functions on the same halves."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.client.assembly import data_holder
from coterie.client.participation import MODEL_FILE, Draws, keep_model
from coterie.client.selection import best_hypothesis, hypothesis_losses, mean_loss, mean_score
from coterie.config import ClientSettings
from coterie.models import load_model
from coterie.parameters import layout_of, to_vector
from coterie.protocol import HypothesesMessage
from coterie.rng import seeded
from coterie.simulation import SimulatedRun, engines, simulate
from coterie.simulation.engines import BatchedEngine, Judgement
from coterie.simulation.rows import Rows
from coterie.simulation.server_side import Sampler, honest_loss, honest_score
from coterie.simulation.workers import workers
from coterie.tasks import ClientData, Task, TrainingSettings
from tests.simulation.conftest import RAGGED, ReplayedOrder, hospital_rows

BRISK = TrainingSettings(epochs=3, step_size=0.05, batch_size=4)
HELD_OUT = np.array([[9, 0, 4, 2, 7, 1, 3]])  # the largest, and one with a single row


def hypotheses_of(task: Task, k: int = 3) -> NDArray[np.float32]:
    n = layout_of(task.build()).size
    return 0.3 * seeded(1).standard_normal((1, k, n)).astype(np.float32)


def rows_at(data: ClientData, places: NDArray[np.integer]) -> ClientData:
    return replace(data, inputs=data.inputs[places], targets=data.targets[places])


def kept_model(
    task: Task, data: ClientData, hypotheses: NDArray[np.float32], order: np.random.Generator, folder: Path
) -> NDArray[np.float32]:
    """What a deployed ``flower-client --fine-tune`` keeps at the end of a run, with ``data`` as all of its rows."""
    settings = ClientSettings(
        task=task.name, state=folder, noise_multiplier=1.0, budget=1e9, fine_tune=task.training.epochs
    )
    with data_holder(settings, task, data, lambda _: Draws(seeded(0), order)) as holder:
        keep_model(holder, HypothesesMessage("any", 1, task.name, hypotheses))
        _, model = load_model(holder.folder / MODEL_FILE)
        return to_vector(model)


def test_each_held_out_client_keeps_what_the_deployed_one_keeps(
    brisk_each: tuple[Task, list[ClientData]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, clients = brisk_each
    task = replace(task, training=BRISK)
    hypotheses, rows, model = hypotheses_of(task), Rows.of(clients), task.build()
    layout = layout_of(model)
    engine = BatchedEngine(task, rows, replace(BRISK, step_size=9.0))  # not the run's training, but its own
    monkeypatch.setattr(engines, "_CLIENTS_AT_ONCE", 3)  # three at a time, and the last one alone
    in_first = engine._first_halves(HELD_OUT, [seeded(5)])[0]
    found = engine.fine_tune(hypotheses, HELD_OUT, [seeded(5)], [seeded(6)], BRISK)
    with workers(task, model, layout, rows, replace(BRISK, step_size=9.0), k=3, sampled=2) as by_workers:
        one_by_one = by_workers.fine_tune(hypotheses, HELD_OUT, [seeded(5)], [seeded(6)], BRISK)
    order, gained = seeded(6), 0
    half_seeds, order_seeds = (seeded(seed).integers(2**63 - 1, size=HELD_OUT.size) for seed in (5, 6))
    for begin in range(0, HELD_OUT.size, 3):
        places = range(begin, min(begin + 3, HELD_OUT.size))
        # The orders as the engine draws them: of first halves, three clients at a time, anew each epoch.
        counts = np.array([max(1, RAGGED[HELD_OUT[0, place]] // 2) for place in places])
        drawing = BatchedEngine.__new__(BatchedEngine)
        drawing._rows = Rows.of([rows_at(clients[9], np.arange(count)) for count in counts])
        own_orders = (
            [drawing._draw_orders(np.arange(len(counts))[None], [order])[0] for _ in range(BRISK.epochs)]
            if counts.max() > BRISK.batch_size
            else [np.tile(np.arange(counts.max()), (len(counts), 1))] * BRISK.epochs
        )
        for row, place in enumerate(places):
            data = clients[HELD_OUT[0, place]]
            if data.rows == 1:
                assert np.isnan(found[0, place])
                assert np.isnan(one_by_one[0, place])
                continue
            first = np.flatnonzero(in_first[place, : data.rows])
            second = np.flatnonzero(~in_first[place, : data.rows])
            replayed = ReplayedOrder([own[row, : len(first)] for own in own_orders])
            kept = kept_model(task, rows_at(data, first), hypotheses[0], replayed, tmp_path / f"b{place}")  # type: ignore[arg-type]
            expected = mean_score(task, model, kept, layout, rows_at(data, second))
            assert found[0, place] == pytest.approx(expected, rel=1e-4)
            best = best_hypothesis(hypothesis_losses(task, model, hypotheses[0], layout, rows_at(data, first)))
            before = mean_score(task, model, hypotheses[0, best], layout, rows_at(data, second))
            gained += abs(expected - before) > 1e-3 * abs(before)
            # Client by client: exactly the deployed functions.
            shuffled = np.random.default_rng(half_seeds[place]).permutation(data.rows)
            first, second = shuffled[: data.rows // 2], shuffled[data.rows // 2 :]
            own = np.random.default_rng(order_seeds[place])
            kept = kept_model(task, rows_at(data, first), hypotheses[0], own, tmp_path / f"w{place}")
            assert one_by_one[0, place] == pytest.approx(
                mean_score(task, model, kept, layout, rows_at(data, second)), rel=1e-6
            )
    assert gained >= 2  # an accuracy moves in steps


@pytest.mark.parametrize("engine_of", ["batched", "workers"])
def test_training_that_diverges_keeps_the_hypothesis(brisk: tuple[Task, list[ClientData]], engine_of: str) -> None:
    task, clients = brisk
    rows, hypotheses, model = Rows.of(clients), hypotheses_of(task), task.build()
    wild = TrainingSettings(epochs=3, step_size=1e30, batch_size=4)
    with workers(task, model, layout_of(model), rows, BRISK, k=3, sampled=2) as by_workers:
        engine = BatchedEngine(task, rows, BRISK) if engine_of == "batched" else by_workers
        judged = engine.judge(hypotheses, HELD_OUT, [seeded(5)])
        found = engine.fine_tune(hypotheses, HELD_OUT, [seeded(5)], [seeded(6)], wild)[0]
    halved = np.array([RAGGED[client] > 1 for client in HELD_OUT[0]])
    best = np.argmin(judged.first_half_losses[0, halved], axis=-1)
    expected = judged.second_half_scores[0, halved, best]
    np.testing.assert_allclose(found[halved], expected, rtol=1e-5)
    assert found[halved].mean() == pytest.approx(honest_score(judged, halved), rel=1e-5)


def test_a_run_says_what_fine_tuning_adds_to_the_honest_metric(brisk: tuple[Task, list[ClientData]]) -> None:
    task, _ = brisk
    # Many rows a client, and each with a level of its own that a few shared hypotheses cannot have.
    clients = hospital_rows([1, 1, *[40] * 14])
    clients = [replace(data, targets=data.targets + 0.3 * index) for index, data in enumerate(clients)]
    run = SimulatedRun(seed=2, rounds=5, clients_per_round=4, hypotheses=1, validation_fraction=0.5)
    plain, tuned, other = (
        simulate(task, clients, [one])[0]
        for one in (
            run,
            replace(run, fine_tune_epochs=20),
            replace(run, fine_tune_epochs=20, fine_tune_step_size=1e-9),
        )
    )
    assert plain.fine_tuned_metric is None
    assert plain.summary()["fine_tuned_metric"] is None
    for found in (tuned, other):  # fine-tuning changes nothing else
        assert np.array_equal(found.hypotheses, plain.hypotheses)
        assert (found.metric, found.honest_metric) == (plain.metric, plain.honest_metric)
        assert (found.price, found.honest_left_out) == (plain.price, plain.honest_left_out)
    assert tuned.fine_tuned_metric is not None
    assert plain.honest_metric is not None
    assert tuned.fine_tuned_metric < 0.8 * plain.honest_metric
    assert tuned.summary()["fine_tuned_metric"] == tuned.fine_tuned_metric
    # Steps too small to change anything: the same clients and rows as the honest metric's.
    assert other.fine_tuned_metric == pytest.approx(plain.honest_metric, rel=1e-5)
    few = replace(run, clients_per_round=2, fine_tune_epochs=1)
    (nobody,) = simulate(task, hospital_rows([1] * 6), [few])
    assert (nobody.fine_tuned_metric, nobody.honest_metric, nobody.honest_loss) == (None, None, None)


def test_honest_losses_and_scores_are_of_second_halves_by_what_first_halves_chose(
    shaped: tuple[Task, Callable[..., list[ClientData]]],
) -> None:
    task, make = shaped
    clients = make()
    # Ten that lie close together: halves of a client's rows do not agree on which is best.
    hypotheses, rows, model = 0.1 * hypotheses_of(task, 10) + hypotheses_of(task, 1), Rows.of(clients), task.build()
    layout = layout_of(model)
    engine = BatchedEngine(task, rows, task.training)
    in_first = engine._first_halves(HELD_OUT, [seeded(5)])[0]
    losses, scores, otherwise = [], [], 0
    for place, client in enumerate(HELD_OUT[0]):
        data = clients[client]
        if data.rows == 1:
            continue
        first = rows_at(data, np.flatnonzero(in_first[place, : data.rows]))
        second = rows_at(data, np.flatnonzero(~in_first[place, : data.rows]))
        best = best_hypothesis(hypothesis_losses(task, model, hypotheses[0], layout, first))
        otherwise += best != best_hypothesis(hypothesis_losses(task, model, hypotheses[0], layout, data))
        losses.append(mean_loss(task, model, hypotheses[0, best], layout, second))
        scores.append(mean_score(task, model, hypotheses[0, best], layout, second))
    assert otherwise >= 1
    judged = engine.judge(hypotheses, HELD_OUT, [seeded(5)])
    counts = np.array([RAGGED[client] for client in HELD_OUT[0]])
    assert honest_loss(judged, counts) == pytest.approx(np.mean(losses), rel=1e-5)
    assert honest_score(judged, counts > 1) == pytest.approx(np.mean(scores), rel=1e-5)
    # What is not finite is told as float32's largest number, by clients that take part all the same.
    everywhere = np.full_like(judged.losses, np.inf)
    broken = Judgement(everywhere, everywhere, everywhere, everywhere * np.nan)
    limit = float(np.finfo(np.float32).max)
    assert honest_loss(broken, counts) == pytest.approx(limit)
    assert honest_score(broken, counts > 1) == pytest.approx(limit)
    assert honest_loss(judged, np.ones(7, np.int64)) is None


def test_a_run_has_its_honest_loss(brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    run = SimulatedRun(seed=2, rounds=2, clients_per_round=4, validation_fraction=0.5)
    (found,) = simulate(task, clients, [run])
    rows = Rows.of(clients)
    held_out = Sampler(rows.names, run).held_out
    engine = BatchedEngine(task, rows, task.training)
    judged = engine.judge(found.hypotheses[None], held_out[None], [seeded(2, "simulation", "halves")])
    assert found.honest_loss == pytest.approx(honest_loss(judged, rows.counts[held_out]), rel=1e-6)
    assert found.summary()["honest_loss"] == found.honest_loss


def test_fine_tuning_is_with_the_tasks_own_settings_as_in_the_deployed_client(
    brisk: tuple[Task, list[ClientData]],
) -> None:
    task, _ = brisk
    run = SimulatedRun(epochs=9, step_size=5.0, batch_size=1, fine_tune_epochs=2)
    assert run.fine_tuning(task) == replace(task.training, epochs=2)
    stepping = replace(run, fine_tune_step_size=0.25)
    assert stepping.fine_tuning(task) == replace(task.training, epochs=2, step_size=0.25)
