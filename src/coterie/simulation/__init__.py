"""Federated runs without a network: a round for every sampled client of every run at once.

The functions are the deployed client's and server's, or batched twins of them that the tests hold equal. Runs that
differ in nothing but seed, noise multiplier and clipping norm share their tensors, as dispatch is what a small model
costs. **Noise here is seeded: a simulation protects nobody's data.**
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from coterie.config import Assignment
from coterie.errors import CoterieError
from coterie.parameters import Layout, layout_of
from coterie.rng import seeded
from coterie.server.hypotheses import BestSoFar, initial_hypotheses
from coterie.server.reseeding import Choices, ReseedSettings, collapsed, draws_of_round, reseed
from coterie.simulation.engines import BatchedEngine, Engine, Floats, Vectors, best_hypotheses
from coterie.simulation.first_rows import losses_and_scores
from coterie.simulation.privacy import PLANNED_NOTE, SimulatedPrice, choice_for, mechanism_for, price_of
from coterie.simulation.private_choice import PrivateChoice
from coterie.simulation.programs import programs_of, torch_seeded
from coterie.simulation.results import SimulatedResult, ValidationRecord
from coterie.simulation.rows import Counts, Rows
from coterie.simulation.sanitizing import BatchSanitizer, draw, finite_updates, sent_vectors
from coterie.simulation.server_side import (
    Sampler,
    average_all,
    honest_loss,
    honest_score,
    mean_told,
    nearest_all,
    validations,
)
from coterie.simulation.settings import SimulatedRun, check_stack
from coterie.simulation.workers import WorkersEngine, workers
from coterie.tasks import ClientData, Task

__all__ = ["SimulatedResult", "SimulatedRun", "simulate"]

# Parameters. Measured with dense networks of two layers on two cores: batched 1.8 times as fast as two processes at
# 307,000, 0.4 times at 614,000, and 0.25 times at 1.2 million with two convolutions.
MOST_BATCHED = 400_000
_CLIENTS_AT_ONCE = 4096  # in the last count of who takes which hypothesis


def simulate(
    task: Task,
    clients: Sequence[ClientData] | Rows,
    runs: Sequence[SimulatedRun],
    *,
    on_round: Callable[[int], None] = lambda _: None,
) -> list[SimulatedResult]:
    """The results of ``runs``, in their order; they may differ in seed, noise multiplier and clipping norm only.

    Each run is the same alone as beside others, up to the last bits of sums, except on an accelerator for a model
    whose training draws random numbers (dropout): there the draws are of all clients at once, from a seed made of
    those of all ``runs``, so that the same ``runs`` in the same order give the same results, and a run alone gives
    others. ``on_round`` is told, after a round, how many runs had it: a model that is not batched has its runs one
    after another. Torch works in one thread meanwhile, on the device of the rows (``Rows.on``), and its global
    generators are left as they were; noise, averages and everything else of the server stay on the CPU. Raises
    ``CoterieError`` for settings that the data or the model do not allow, and for a loss or score of another shape than
    (rows,).
    """
    check_stack(runs)
    rows = clients if isinstance(clients, Rows) else Rows.of(clients)
    together = int(seeded(0, "simulation", "torch", *(run.seed for run in runs)).integers(2**63 - 1))
    with one_thread(), torch_seeded(together, rows.inputs.device):
        return _simulate(task, rows, runs, on_round)


def _simulate(
    task: Task, rows: Rows, runs: Sequence[SimulatedRun], on_round: Callable[[int], None]
) -> list[SimulatedResult]:
    losses_and_scores(task, rows)  # or it raises: wrong shapes would go unnoticed in means and batches
    model = task.build()
    layout = layout_of(model)
    samplers = {seed: Sampler(rows.names, run) for seed, run in {run.seed: run for run in runs}.items()}
    states = [_RunState(run, task, layout, samplers[run.seed]) for run in runs]
    like = runs[0]
    training = like.training(task)
    if is_batched(task, layout, rows):
        if like.bfloat16_selection:
            raise CoterieError(
                "Expected --bfloat16-selection for a model that is simulated client by client, found task "
                f"{task.name!r}, whose clients are simulated together: leave it out"
            )
        engine = BatchedEngine(task, rows, training)
        _Simulation(task, engine, on_round).play(states)
        return [_result(task, rows, engine, state) for state in states]
    with workers(
        task,
        model,
        layout,
        rows,
        training,
        k=like.hypotheses,
        sampled=like.clients_per_round,
        bfloat16_selection=like.bfloat16_selection,
    ) as one_by_one:
        for state in states:
            _Simulation(task, one_by_one, on_round).play([state])
        return [_result(task, rows, one_by_one, state) for state in states]


def is_batched(task: Task, layout: Layout, rows: Rows) -> bool:
    """Whether all clients go in one tensor, or client by client in worker processes.

    Batched are models of up to ``MOST_BATCHED`` parameters that ``torch.func`` can batch, which is to say that
    ``forward`` does not branch on the values of its inputs, unless training draws random numbers, as dropout does: a
    client's draws have a seed of their own only where it is alone. On an accelerator neither size nor dropout matters,
    and a model that cannot be batched raises ``CoterieError``.
    """
    device = rows.inputs.device
    programs = programs_of(task, device)
    can_batch = programs.can_batch(*rows.at(rows.starts[:2, None]))
    if device.type == "cpu":
        return can_batch and not programs.draws and layout.size <= MOST_BATCHED
    if not can_batch:
        raise CoterieError(
            f"Expected a model that torch.func can batch on {device}, found {task.name!r}'s: use the CPU"
        )
    return True


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch in one thread: many small operations would only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _RunState:
    """What changes in the course of one run."""

    def __init__(self, run: SimulatedRun, task: Task, layout: Layout, sampler: Sampler) -> None:
        self.run = run
        self.sampler = sampler
        self.mechanism = mechanism_for(run, task, layout)
        self.choice = choice_for(run)
        self.choosing = seeded(run.seed, "simulation", "choice")
        self.noise = seeded(run.seed, "simulation", "noise")
        self.order = seeded(run.seed, "simulation", "order")
        self.hypotheses, _ = initial_hypotheses(task, run.hypotheses, run.seed, run.start)
        self.reseeding = ReseedSettings(reseed=run.reseed, after=run.reseed_after)
        self.choices = Choices()
        self.reseeded = 0
        self.best = BestSoFar()
        self.history: list[ValidationRecord] = []
        self.participations = np.zeros(sampler.clients, np.int32)
        self.rounds = 0

    @property
    def is_over(self) -> bool:
        return self.rounds == self.run.rounds or self.best.is_over(self.run.patience)

    @property
    def kept(self) -> Vectors:
        return self.hypotheses if self.best.hypotheses is None else self.best.hypotheses

    def halves(self) -> np.random.Generator:
        """How held-out clients' rows are halved: the same at every validation."""
        return seeded(self.run.seed, "simulation", "halves")


class _Simulation:
    """The rounds of some runs side by side."""

    def __init__(
        self,
        task: Task,
        engine: Engine,
        on_round: Callable[[int], None],
    ) -> None:
        self._task = task
        self._engine = engine
        self._on_round = on_round

    def play(self, states: Sequence[_RunState]) -> None:
        """Every round, until each run has had all of its rounds or run out of patience."""
        live, number = list(states), 0
        while live := [state for state in live if not state.is_over]:
            sanitize = _sanitizer(live)
            hypotheses = np.stack([state.hypotheses for state in live])
            # Runs that are over stay in the tensors until they are half of them: a new shape is recorded anew.
            while 2 * sum(not state.is_over for state in live) > len(live):
                number += 1
                hypotheses = self._round(live, hypotheses, sanitize, number)
                self._on_round(sum(state.rounds == number for state in live))

    def _round(self, live: Sequence[_RunState], hypotheses: Vectors, sanitize: "_Sanitize", number: int) -> Vectors:
        sampled = np.stack([state.sampler.sample(number) for state in live])
        chosen, sent = self._clients_part(live, hypotheses, sampled, sanitize)
        by_client = live[0].run.assignment is Assignment.CLIENT
        belongs = chosen if by_client else nearest_all(hypotheses, sent)
        hypotheses, counts = average_all(hypotheses, belongs, sent)
        for index, state in enumerate(live):
            if state.is_over:
                continue
            state.rounds = number
            state.participations[sampled[index]] += 1
            renewed = reseed(
                hypotheses[index],
                counts[index].tolist(),
                state.choices,
                state.reseeding,
                rng=partial(draws_of_round, state.run.seed, number),
            )
            hypotheses[index], state.choices = renewed.hypotheses, renewed.choices
            state.reseeded += len(renewed.indices)
            state.hypotheses = hypotheses[index]
        run = live[0].run
        if number % run.validate_every == 0 or number == run.rounds:
            self._validate(live, hypotheses, number)
        return hypotheses

    def _clients_part(
        self, live: Sequence[_RunState], hypotheses: Vectors, sampled: Counts, sanitize: "_Sanitize"
    ) -> tuple[Counts, Vectors]:
        """Each sampled client's hypothesis (S, U), and what it sends (S, U, n)."""
        orders, choice = [state.order for state in live], _choice(live)
        if isinstance(self._engine, WorkersEngine):
            (state,) = live
            return self._engine.choose_and_send(hypotheses, sampled, state.order, choice, state.mechanism, state.noise)
        chosen, trained = self._engine.choose_and_train(hypotheses, sampled, orders, choice)
        n = hypotheses.shape[-1]
        starts = hypotheses[np.arange(len(live))[:, None], chosen].reshape(-1, n)
        sent = sent_vectors(starts, sanitize(finite_updates(starts, trained.reshape(-1, n))))
        return chosen, sent.reshape(trained.shape)

    def _validate(self, live: Sequence[_RunState], hypotheses: Vectors, number: int) -> None:
        if not len(live[0].sampler.held_out):
            return
        held_out = np.stack([state.sampler.held_out for state in live])
        judgement = self._engine.judge(hypotheses, held_out, [state.halves() for state in live])
        for state, validation in zip(live, validations(judgement), strict=True):
            if state.rounds != number:
                continue
            state.history.append(ValidationRecord(number, validation.loss, self._task.report(validation.score)))
            state.best = state.best.observe(number, validation, state.hypotheses.copy())


def _choice(live: Sequence[_RunState]) -> PrivateChoice | None:
    """The clients' private choices of one round, None for the plain ones; runs side by side choose alike."""
    if live[0].choice is None:
        return None
    each = live[0].run.clients_per_round
    return PrivateChoice(live[0].choice, np.stack([state.choosing.random(each) for state in live]))


_Sanitize = Callable[[Floats], Floats]


def _sanitizer(live: Sequence[_RunState]) -> _Sanitize:
    """The clients' sanitizing of one round: U updates of each run, end to end, (S·U, n)."""
    each = live[0].run.clients_per_round
    noisy = [index for index, state in enumerate(live) if state.mechanism is not None]
    mechanisms = [state.mechanism for state in live if state.mechanism is not None]
    if not mechanisms:
        return lambda updates: updates
    sizes = mechanisms[0].sizes
    batch = BatchSanitizer([mechanism for mechanism in mechanisms for _ in range(each)])

    def sanitize(updates: Floats) -> Floats:
        draws = [draw(sizes, each, rng=live[index].noise) for index in noisy]
        by_run = updates.reshape(len(live), each, -1)
        normals, gammas = (np.concatenate(parts) for parts in zip(*draws, strict=True))
        if len(noisy) == len(live):
            return batch(updates, normals, gammas)
        by_run[noisy] = batch(by_run[noisy].reshape(len(mechanisms) * each, -1), normals, gammas).reshape(
            len(mechanisms), each, -1
        )
        return by_run.reshape(updates.shape)

    return sanitize


def _result(task: Task, rows: Rows, engine: Engine, state: _RunState) -> SimulatedResult:
    kept = state.kept[None]
    run, held_out = state.run, state.sampler.held_out[None]
    halved = rows.counts[held_out[0]] > 1
    metric = honest = loss = tuned = None
    if held_out.size:
        judgement = engine.judge(kept, held_out, [state.halves()])
        metric = task.report(validations(judgement)[0].score)
        honest = honest_score(judgement, halved)
        loss = honest_loss(judgement, rows.counts[held_out[0]])
        if run.fine_tune_epochs:
            orders = [seeded(run.seed, "simulation", "fine-tuning")]
            scores = engine.fine_tune(kept, held_out, [state.halves()], orders, run.fine_tuning(task))
            tuned = mean_told(scores[0, halved])
    counts = _takers(rows, engine, kept)
    return SimulatedResult(
        run=run,
        metric_name=task.metric,
        metric=metric,
        honest_metric=None if honest is None else task.report(honest),
        honest_loss=loss,
        honest_left_out=int((~halved).sum()),
        fine_tuned_metric=None if tuned is None else task.report(tuned),
        clients_per_hypothesis=tuple(counts.tolist()),
        collapsed=collapsed([counts.tolist()], ReseedSettings(after=1)),
        rounds=state.rounds,
        best_round=state.best.round or state.rounds,
        reseeded=state.reseeded,
        price=_price(state),
        history=tuple(state.history),
        hypotheses=state.kept,
        participations=state.participations,
    )


def _price(state: _RunState) -> SimulatedPrice | None:
    """Of the planned releases: see ``SimulatedPrice``."""
    choice = None if state.choice is None else state.choice.event(state.run.hypotheses)
    if state.rounds == state.run.rounds or state.mechanism is None:
        return price_of(state.mechanism, int(state.participations.max()), choice)
    price = price_of(state.mechanism, state.sampler.most_planned, choice)
    return None if price is None else replace(price, notes=(*price.notes, PLANNED_NOTE))


def _takers(rows: Rows, engine: Engine, kept: Vectors) -> Counts:
    """How many of all clients take each hypothesis, (k,)."""
    counts: Counts = np.zeros(kept.shape[1], np.int64)
    for first in range(0, len(rows.names), _CLIENTS_AT_ONCE):
        some = np.arange(first, min(first + _CLIENTS_AT_ONCE, len(rows.names)))[None]
        counts += np.bincount(best_hypotheses(engine.losses(kept, some))[0], minlength=kept.shape[1])
    return counts
