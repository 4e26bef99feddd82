"""Whole simulated runs against the deployed client's and server's functions, fed the same draws."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from coterie.client.assembly import data_holder
from coterie.client.participation import Draws, answer_train, answer_validation
from coterie.config import Assignment, ClientSettings, Reseed, RunSettings, Selection, Start, Weighting
from coterie.errors import CoterieError
from coterie.mechanisms.accounting import price
from coterie.mechanisms.events import Neighbourhood, ReleaseEvent
from coterie.protocol import HypothesesMessage, PrivacyProposal, TrainRequest, UpdateReply, ValidationReply, Vector
from coterie.rng import seeded
from coterie.server.hypotheses import average, initial_hypotheses, mean_validation, nearest
from coterie.server.reseeding import Choices, ReseedSettings, draws_of_round, reseed
from coterie.server.roster import Roster
from coterie.simulation import SimulatedRun, simulate
from coterie.simulation.engines import BatchedEngine
from coterie.simulation.rows import Rows
from coterie.simulation.sanitizing import draw
from coterie.simulation.server_side import Sampler, average_all, nearest_all
from coterie.simulation.settings import LARGEST_SELECTION_EPSILON, LARGEST_STEP_SIZE, MOST, MOST_HYPOTHESES
from coterie.tasks import ClientData, Task
from tests.simulation.conftest import RAGGED, ReplayedNoise, ReplayedOrder, hospital_rows

K, SAMPLED, ROUNDS = 3, 6, 2


class DeployedRounds:
    """The rounds of one run by the deployed functions: a data holder with a ledger each, and the server's average."""

    def __init__(self, run: SimulatedRun, task: Task, clients: list[ClientData], state: Path) -> None:
        self.run, self.task, self.state = run, task, state
        self.clients = {client.name: client for client in clients}
        self.roster = Roster.split(self.clients, run.validation_fraction, run.seed)
        self.trainers = [name for name in self.clients if not self.roster.validates(name)]
        self.hypotheses, layout = initial_hypotheses(task, run.hypotheses, run.seed)
        self.sizes = [layer.size for layer in layout.layers]
        self.noise = seeded(run.seed, "simulation", "noise")
        self.order = seeded(run.seed, "simulation", "order")
        self.choosing = seeded(run.seed, "simulation", "choice")
        self.draws: dict[str, Draws] = {}
        self.ledgers: list[list[ReleaseEvent]] = []  # of each client

    def play(self) -> tuple[Vector, ValidationReply | None, int]:
        """The hypotheses after all rounds, the validation's mean, and how many updates were sent."""
        with ExitStack() as stack:
            settings = ClientSettings(
                task=self.task.name,
                state=self.state,
                noise_multiplier=self.run.noise_multiplier,
                budget=1e9,
                neighbourhood=self.run.neighbourhood,
                clipping_norm=self.run.clipping_norm,
                selection=self.run.selection,
                selection_epsilon=self.run.selection_epsilon,
                selection_loss_bound=self.run.selection_loss_bound,
            )
            holders = {
                name: stack.enter_context(
                    data_holder(
                        settings.model_copy(update={"state": self.state / name}),
                        self.task,
                        data,
                        partial(self._draws_of, name),
                    )
                )
                for name, data in self.clients.items()
            }
            sent, choices = 0, Choices()
            reseeding = ReseedSettings(reseed=self.run.reseed, after=self.run.reseed_after)
            for number in range(1, self.run.rounds + 1):
                names = self.roster.sample(self.trainers, self.run.clients_per_round, number)
                self._prepare(names)
                request = TrainRequest(
                    *("any", number, self.task.name, self.hypotheses, self.run.assignment, Weighting.EQUAL),
                    *(self.task.training, PrivacyProposal()),
                )
                replies = [answer_train(holders[name], request, is_stale=lambda: False) for name in names]
                updates = [reply for reply in replies if isinstance(reply, UpdateReply)]
                sent += len(updates)
                averaged = average(self.hypotheses, updates, self.run.assignment, Weighting.EQUAL)
                renewed = reseed(
                    averaged.hypotheses,
                    averaged.counts,
                    choices,
                    reseeding,
                    rng=partial(draws_of_round, self.run.seed, number),
                )
                self.hypotheses, choices = renewed.hypotheses, renewed.choices
            self.ledgers = [holder.gate.ledger.events() for holder in holders.values()]
            message = HypothesesMessage("any", self.run.rounds, self.task.name, self.hypotheses)
            held_out = [name for name in self.clients if self.roster.validates(name)]
            answers = [answer_validation(holders[name], message) for name in held_out]
            validation = mean_validation([answer for answer in answers if isinstance(answer, ValidationReply)])
        return self.hypotheses, validation, sent  # type: ignore[return-value]

    def _draws_of(self, name: str, _round: int) -> Draws:
        return self.draws.get(name, Draws(seeded(0), seeded(0)))

    def _prepare(self, names: list[str]) -> None:
        """The same draws as the simulation's, dealt to the clients of a round in their order."""
        normals, gammas = draw(self.sizes, len(names), rng=self.noise)
        rows = Rows.of([self.clients[name] for name in names])
        engine = BatchedEngine.__new__(BatchedEngine)
        engine._rows = rows
        orders: list[NDArray[np.int64]] = [
            engine._draw_orders(np.arange(len(names))[None], [self.order])[0] for _ in range(self.task.training.epochs)
        ]
        private = self.run.selection is not Selection.ARGMIN
        uniforms = self.choosing.random(len(names)) if private else None
        for place, name in enumerate(names):
            own = [order[place, : rows.counts[place]] for order in orders]
            self.draws[name] = Draws(
                ReplayedNoise(normals[place], gammas[place], () if uniforms is None else (uniforms[place],)),
                ReplayedOrder(own),  # type: ignore[arg-type]
            )


@pytest.mark.parametrize(
    ("neighbourhood", "nu"), [(Neighbourhood.FIXED, 3.0), (Neighbourhood.FIXED, 0.01), (Neighbourhood.RELATIVE, 0.5)]
)
def test_rounds_are_those_of_the_deployed_functions(
    brisk_each: tuple[Task, list[ClientData]], tmp_path: Path, neighbourhood: Neighbourhood, nu: float
) -> None:
    task, clients = brisk_each
    run = SimulatedRun(
        seed=4,
        hypotheses=K,
        noise_multiplier=nu,
        rounds=ROUNDS,
        clients_per_round=SAMPLED,
        validate_every=ROUNDS,
        neighbourhood=neighbourhood,
        reseed_after=1,
    )
    deployed = DeployedRounds(run, task, clients, tmp_path)
    expected, validation, sent = deployed.play()
    beside = replace(run, seed=9, noise_multiplier=2 * nu)
    found = simulate(task, clients, [beside, run])[1]
    assert sent == ROUNDS * SAMPLED == found.participations.sum()
    assert np.abs(expected - initial_hypotheses(task, K, run.seed)[0]).max() > 1e-3
    # float32 sums in another order: a bit here and there, which a few steps carry on.
    np.testing.assert_allclose(found.hypotheses, expected, rtol=2e-5, atol=2e-6)
    assert validation is not None
    assert found.history[-1].loss == pytest.approx(validation.loss, rel=1e-5)
    assert found.metric == pytest.approx(task.report(validation.score), rel=1e-5)


PRIVATE: dict[str, object] = {"selection": Selection.RANDOMIZED, "selection_epsilon": 0.8}


@pytest.mark.parametrize(
    "changes",
    [
        {"assignment": Assignment.SERVER},
        {"assignment": Assignment.SERVER, **PRIVATE},
        PRIVATE,
        {"selection": Selection.EXPONENTIAL, "selection_epsilon": 2.0, "selection_loss_bound": 0.7},
    ],
)
def test_assignments_and_choices_are_those_of_the_deployed_functions(
    brisk: tuple[Task, list[ClientData]], tmp_path: Path, changes: dict[str, object]
) -> None:
    task, clients = brisk
    plain = SimulatedRun(
        seed=4,
        hypotheses=K,
        noise_multiplier=4.0,
        clipping_norm=1.0,  # so much noise that the nearest hypothesis is often not the chosen one
        rounds=ROUNDS,
        clients_per_round=SAMPLED,
        validate_every=ROUNDS,
    )
    run = replace(plain, **changes)  # type: ignore[arg-type]
    deployed = DeployedRounds(run, task, clients, tmp_path)
    expected, validation, sent = deployed.play()
    beside, found = simulate(task, clients, [replace(run, seed=9), run])
    assert sent == ROUNDS * SAMPLED
    np.testing.assert_allclose(found.hypotheses, expected, rtol=2e-5, atol=5e-6)
    assert validation is not None
    assert found.history[-1].loss == pytest.approx(validation.loss, rel=1e-4)
    # The most active client's price is its ledger's, choices and all.
    assert found.price is not None
    prices = [price(events, delta=1e-5) for events in deployed.ledgers]
    assert found.price.pure == pytest.approx(max(own.pure for own in prices), rel=1e-9)
    assert found.price.tight == pytest.approx(max(own.tight for own in prices), rel=1e-9)
    # And the setting makes a difference, in both runs.
    for other, one in zip(simulate(task, clients, [replace(plain, seed=9), plain]), (beside, found), strict=True):
        assert np.abs(other.hypotheses - one.hypotheses).max() > 1e-2


def test_the_nearest_hypothesis_is_the_servers_to_the_last_bit() -> None:
    rng = seeded(8)
    hypotheses = rng.standard_normal((2, 4, 7)).astype(np.float32)
    hypotheses[0, 3] = hypotheses[0, 1]  # ties go to the lowest
    vectors = rng.standard_normal((2, 300, 7)).astype(np.float32)
    vectors[1, :4] = hypotheses[1]
    found = nearest_all(hypotheses, vectors)
    for run in range(2):
        assert found[run].tolist() == [nearest(hypotheses[run], vector) for vector in vectors[run]]
    assert set(found[0].tolist()) == {0, 1, 2}
    assert set(found[1].tolist()) == {0, 1, 2, 3}


def hospital_run(**changes: object) -> SimulatedRun:
    values = {"rounds": 4, "clients_per_round": SAMPLED, "validate_every": 2, **changes}
    return SimulatedRun(**values)  # type: ignore[arg-type]


def test_a_run_is_the_same_alone_as_beside_others(brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    runs = [
        hospital_run(seed=1, noise_multiplier=3.0),
        hospital_run(seed=2, noise_multiplier=0.0),
        hospital_run(seed=1, noise_multiplier=1.0, clipping_norm=0.3),
    ]
    together = simulate(task, clients, runs)
    for run, beside in zip(runs, together, strict=True):
        (alone,) = simulate(task, clients, [run])
        np.testing.assert_allclose(alone.hypotheses, beside.hypotheses, rtol=1e-4, atol=1e-5)
        assert np.array_equal(alone.participations, beside.participations)
        assert alone.price == beside.price
        assert alone.rounds == beside.rounds


def test_no_noise_is_plain_federated_learning_without_a_price(brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    # All train, in one hypothesis, and once: the mean of what each trained, neither clipped nor noised.
    run = hospital_run(hypotheses=1, noise_multiplier=0.0, rounds=1, clients_per_round=10, validation_fraction=0.0)
    (found,) = simulate(task, clients, [run])
    start, _ = initial_hypotheses(task, 1, run.seed)
    rows = Rows.of(clients)
    engine = BatchedEngine(task, rows, task.training)
    order = seeded(run.seed, "simulation", "order")
    sampled = Sampler(rows.names, run).sample(1)[None]
    _, trained = engine.choose_and_train(start[None], sampled, [order])
    np.testing.assert_allclose(found.hypotheses[0], trained[0].mean(axis=0), rtol=1e-5, atol=1e-6)
    assert found.price is None
    assert found.metric is None
    assert found.honest_metric is None
    assert found.history == ()


def test_patience_ends_each_run_by_itself_and_keeps_its_best(brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    # So much noise that it only gets worse: the first validation is best, and patience ends the run at the third.
    runs = [
        hospital_run(seed=seed, rounds=40, patience=2, clipping_norm=c, noise_multiplier=9.0)
        for seed, c in ((1, 50.0), (2, 1e-4))
    ]
    wild, calm = simulate(task, clients, runs)
    for found in (wild, calm):
        losses = [record.loss for record in found.history]
        best = int(np.argmin(losses))
        assert found.best_round == found.history[best].round
        assert found.rounds == found.history[-1].round
        assert len(losses) == best + 3 or (found.rounds == 40 and len(losses) < best + 3)
        assert found.metric == pytest.approx(found.history[best].metric, rel=1e-6)
    assert len({wild.rounds, calm.rounds}) == 2  # one went on alone
    assert wild.participations.sum() == wild.rounds * SAMPLED


def test_a_run_that_is_over_beside_others_that_go_on_is_as_it_is_alone(
    brisk: tuple[Task, list[ClientData]],
) -> None:
    task, clients = brisk
    # One of three stops: it is less than half of them, and stays in their tensors.
    runs = [
        hospital_run(seed=seed, rounds=24, patience=2, clipping_norm=c, noise_multiplier=9.0)
        for seed, c in ((3, 50.0), (5, 1e-4), (7, 1e-4))
    ]
    told: list[int] = []
    together = simulate(task, clients, runs, on_round=told.append)
    assert together[0].rounds < 12
    assert min(together[1].rounds, together[2].rounds) > 12
    assert sum(told) == sum(found.rounds for found in together)
    for run, beside in zip(runs, together, strict=True):
        (alone,) = simulate(task, clients, [run])
        assert (alone.rounds, alone.best_round, alone.reseeded) == (beside.rounds, beside.best_round, beside.reseeded)
        assert np.array_equal(alone.participations, beside.participations)
        assert beside.participations.sum() == beside.rounds * SAMPLED
        assert alone.price == beside.price
        assert [record.round for record in alone.history] == [record.round for record in beside.history]
        np.testing.assert_allclose(alone.hypotheses, beside.hypotheses, rtol=1e-4, atol=1e-5)


def test_a_run_that_stops_early_pays_for_the_planned_rounds(
    brisk: tuple[Task, list[ClientData]], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, clients = brisk
    names = [client.name for client in clients]
    stopping = hospital_run(seed=1, rounds=40, patience=2, clipping_norm=50.0, noise_multiplier=9.0)
    (found,) = simulate(task, clients, [stopping])
    assert found.rounds < 40
    assert found.participations.sum() == found.rounds * SAMPLED
    roster = Roster.split(names, stopping.validation_fraction, 1)
    trainers = [name for name in names if not roster.validates(name)]
    planned = Counter(name for number in range(1, 41) for name in roster.sample(trainers, SAMPLED, number))
    assert found.price is not None
    assert found.participations.max() < found.price.releases == max(planned.values()) < 40
    assert any("stopped early" in note for note in found.price.notes)
    by_client = Sampler(names, stopping).planned_participations()
    assert by_client.tolist() == [planned[name] for name in names]
    # It is the price of the same run that goes on to its end, whatever the data said.
    (whole,) = simulate(task, clients, [replace(stopping, patience=0)])
    assert whole.price is not None
    assert replace(found.price, notes=()) == replace(whole.price, notes=())
    assert not any("stopped early" in note for note in whole.price.notes)
    # Very long plans are counted in part, and never too low.
    monkeypatch.setattr("coterie.simulation.server_side._MOST_COUNTED", 25)
    part = Counter(name for number in range(1, 26) for name in roster.sample(trainers, SAMPLED, number))
    assert Sampler(names, stopping).most_planned == max(part.values()) + 15 >= max(planned.values())


def test_the_price_is_of_the_most_active_client(brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    (found,) = simulate(task, clients, [hospital_run(noise_multiplier=5.0, rounds=7, validate_every=7)])
    assert found.price is not None
    n = found.hypotheses.shape[1]
    assert found.price.releases == found.participations.max() <= 7
    assert found.price.pure == pytest.approx(found.price.releases * n / 5.0)
    assert 0 < found.price.tight <= found.price.pure
    assert found.price.formal
    assert any("not covered" in note for note in found.price.notes)
    (relative,) = simulate(task, clients, [hospital_run(neighbourhood=Neighbourhood.RELATIVE)])
    assert relative.price is not None
    assert not relative.price.formal


def test_idle_hypotheses_come_back_and_with_reseeding_off_stay(brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    # From one shared start all clients take the first hypothesis, so that the other two are idle in round 1.
    run = hospital_run(rounds=1, start=Start.SHARED, reseed_after=1, noise_multiplier=0.0)
    start = initial_hypotheses(task, K, run.seed)[0][0]
    on, off = (simulate(task, clients, [replace(run, reseed=choice)])[0] for choice in (Reseed.ON, Reseed.OFF))
    assert (on.reseeded, off.reseeded) == (2, 0)
    assert [np.array_equal(vector, start) for vector in off.hypotheses] == [False, True, True]
    assert not any(np.array_equal(vector, start) for vector in on.hypotheses)
    assert np.array_equal(on.hypotheses[0], off.hypotheses[0])


def test_collapsed_says_that_one_hypothesis_has_everybody(brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    # Steps too small to move anything: three equal hypotheses, and ties go to the first.
    run = hospital_run(rounds=1, start=Start.SHARED, reseed=Reseed.OFF, noise_multiplier=0.0, step_size=1e-30)
    (found,) = simulate(task, clients, [run])
    assert found.clients_per_hypothesis == (10, 0, 0)
    assert found.collapsed
    (single,) = simulate(task, clients, [replace(run, hypotheses=1)])
    assert single.clients_per_hypothesis == (10,)
    assert not single.collapsed


def test_samples_and_roles_are_the_rosters() -> None:
    names = tuple(f"client {index}" for index in range(50))
    run = SimulatedRun(seed=3, clients_per_round=8, validation_fraction=0.3)
    sampler, roster = Sampler(names, run), Roster.split(names, 0.3, 3)
    held_out = {names[index] for index in sampler.held_out}
    assert held_out == {name for name in names if roster.validates(name)}
    trainers = [name for name in names if name not in held_out]
    for number in (1, 2, 77):
        assert [names[index] for index in sampler.sample(number)] == roster.sample(trainers, 8, number)


def test_the_average_is_the_servers_to_the_last_bit() -> None:
    rng = seeded(8)
    hypotheses = rng.standard_normal((2, 4, 7)).astype(np.float32)
    vectors = (10.0 ** rng.uniform(-6, 6, (2, 30, 1)) * rng.standard_normal((2, 30, 7))).astype(np.float32)
    chosen = rng.integers(0, 3, (2, 30))  # nobody takes the last hypothesis
    found, counts = average_all(hypotheses, chosen, vectors)
    for run in range(2):
        updates = [UpdateReply("id", vector, int(j), None) for vector, j in zip(vectors[run], chosen[run], strict=True)]
        expected = average(hypotheses[run], updates, Assignment.CLIENT, Weighting.EQUAL)
        assert np.array_equal(found[run], expected.hypotheses)
        assert tuple(counts[run]) == expected.counts


@pytest.mark.parametrize("step_size", [1e30, LARGEST_STEP_SIZE])
def test_diverging_training_leaves_finite_hypotheses(brisk: tuple[Task, list[ClientData]], step_size: float) -> None:
    task, clients = brisk
    (found,) = simulate(task, clients, [hospital_run(step_size=step_size)])
    assert np.isfinite(found.hypotheses).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hypotheses": 0}, "--hypotheses to be at least 1, found 0"),
        ({"hypotheses": 1001}, "--hypotheses to be at most 1000, found 1001"),
        ({"rounds": 2**31}, "--rounds to be at most 2147483647"),
        ({"patience": 10**400}, "--patience to be at most 2147483647, found more"),
        ({"epochs": 2**31}, "--epochs to be at most 2147483647"),
        ({"clients_per_round": 9}, "at most 8, the clients that train of 10, found 9"),
        ({"noise_multiplier": -1.0}, "--noise-multiplier"),
        ({"noise_multiplier": float("nan")}, "--noise-multiplier"),
        ({"validation_fraction": 1.0}, "--validation-fraction"),
        ({"step_size": 0.0}, "--step-size"),
        ({"step_size": 1e300}, "--step-size to be at most 1.70141e.38, found 1e.300"),
        ({"fine_tune_epochs": 1, "fine_tune_step_size": 1e39}, "--fine-tune-step-size to be at most 1.70141e.38"),
        ({"patience": -1}, "--patience"),
        ({"selection": Selection.RANDOMIZED}, "Expected a --selection-epsilon with --selection randomized, found none"),
        ({"selection_epsilon": 1.0}, "Expected no --selection-epsilon with --selection argmin, found 1.0"),
        (
            {"selection": Selection.EXPONENTIAL, "selection_epsilon": 1.0},
            "Expected a --selection-loss-bound with --selection exponential, found none",
        ),
        ({**PRIVATE, "selection_loss_bound": 1.0}, "no --selection-loss-bound with --selection randomized, found 1.0"),
        ({**PRIVATE, "selection_epsilon": 0.0}, "--selection-epsilon to be above 0"),
        ({**PRIVATE, "selection_epsilon": 1e300}, "--selection-epsilon to be at most 1e.12, found 1e.300: --selection"),
        ({"fine_tune_epochs": -1}, "--fine-tune-epochs to be at least 0, found -1"),
        ({"fine_tune_step_size": 0.1}, "--fine-tune-epochs of at least 1 with --fine-tune-step-size, found 0"),
        ({"fine_tune_epochs": 1, "fine_tune_step_size": float("nan")}, "--fine-tune-step-size to be above 0"),
    ],
)
def test_bad_settings_are_one_line(
    brisk: tuple[Task, list[ClientData]], changes: dict[str, object], words: str
) -> None:
    task, clients = brisk
    with pytest.raises(CoterieError, match=words) as caught:
        simulate(task, clients, [hospital_run(**changes)])
    assert "\n" not in str(caught.value)


def test_the_largest_settings_are_those_of_a_deployed_run() -> None:
    """``RunSettings`` takes them and nothing larger."""
    counts = ("rounds", "clients_per_round", "validate_every", "patience", "reseed_after", "epochs", "batch_size")
    for name, most in (("hypotheses", MOST_HYPOTHESES), *((name, MOST) for name in counts)):
        SimulatedRun(**{name: most})  # type: ignore[arg-type]
        RunSettings(task="any", **{name: most})  # type: ignore[arg-type]
        with pytest.raises(CoterieError, match="at most"):
            SimulatedRun(**{name: most + 1})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="less than or equal"):
            RunSettings(task="any", **{name: most + 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("epsilon", [1e-300, LARGEST_SELECTION_EPSILON])
@pytest.mark.parametrize("bound", [1e-300, 5e-324, 1e300])
@pytest.mark.filterwarnings("error")
def test_extreme_private_choices_have_a_price_and_no_warnings(
    brisk: tuple[Task, list[ClientData]], epsilon: float, bound: float
) -> None:
    task, clients = brisk
    private = {"selection": Selection.EXPONENTIAL, "selection_epsilon": epsilon, "selection_loss_bound": bound}
    (found,) = simulate(task, clients, [hospital_run(rounds=1, step_size=1e30, **private)])
    assert found.price is not None
    assert 0 < found.price.tight <= found.price.pure < np.inf
    assert found.price.pure >= epsilon


def test_runs_that_cannot_share_a_stack_are_refused(brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    with pytest.raises(CoterieError, match="differ in seed"):
        simulate(task, clients, [hospital_run(), hospital_run(hypotheses=2)])
    with pytest.raises(CoterieError, match="at least one run"):
        simulate(task, clients, [])
    empty = ClientData("nothing", torch.zeros(0, 3), torch.zeros(0, 1))
    with pytest.raises(CoterieError, match="'nothing' to have rows"):
        simulate(task, [*clients, empty], [hospital_run()])


def test_single_row_clients_are_left_out_of_the_honest_metric_and_counted(
    brisk: tuple[Task, list[ClientData]],
) -> None:
    task, _ = brisk
    clients = hospital_rows([1, 1, 1, *RAGGED])
    (found,) = simulate(task, clients, [hospital_run(validation_fraction=0.5, seed=2, clients_per_round=4)])
    held_out = Sampler(tuple(client.name for client in clients), found.run).held_out
    assert found.honest_left_out == sum(clients[index].rows == 1 for index in held_out) > 0
    assert found.honest_metric is not None
    (nobody,) = simulate(task, hospital_rows([1] * 6), [hospital_run(validation_fraction=0.5, clients_per_round=2)])
    assert (nobody.honest_metric, nobody.honest_left_out) == (None, 3)
    assert nobody.metric is not None
    assert sum(nobody.clients_per_hypothesis) == 6
