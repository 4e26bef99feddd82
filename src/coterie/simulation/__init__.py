"""Federated runs without a network: a round for every sampled client of every run at once.

The functions are the deployed client's and server's, or batched twins of them that the tests hold equal. Runs that
differ in nothing but seed, noise multiplier and clipping norm share their tensors, as dispatch is what a small model
costs. **Noise here is seeded: a simulation protects nobody's data.**
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from coterie.parameters import Layout
from coterie.rng import seeded
from coterie.server.hypotheses import BestSoFar, initial_hypotheses
from coterie.simulation.engines import BatchedEngine, Engine, Floats, Vectors, best_hypotheses
from coterie.simulation.privacy import mechanism_for, price_of
from coterie.simulation.results import SimulatedResult, ValidationRecord, is_collapsed
from coterie.simulation.rows import Counts, Rows
from coterie.simulation.sanitizing import BatchSanitizer, draw, finite_updates, sent_vectors
from coterie.simulation.server_side import AfterAveraging, Sampler, average_all, honest_scores, validations
from coterie.simulation.settings import SimulatedRun, check_stack
from coterie.tasks import ClientData, Task

__all__ = ["AfterAveraging", "SimulatedResult", "SimulatedRun", "simulate"]

_CLIENTS_AT_ONCE = 4096  # in the last count of who takes which hypothesis


def simulate(
    task: Task,
    clients: Sequence[ClientData] | Rows,
    runs: Sequence[SimulatedRun],
    *,
    after: AfterAveraging | None = None,
    on_round: Callable[[int], None] = lambda _: None,
) -> list[SimulatedResult]:
    """The results of ``runs``, in their order; they may differ in seed, noise multiplier and clipping norm only.

    Each run is the same alone as beside others, up to the last bits of sums. ``after`` is done to each run's
    hypotheses after averaging; ``on_round`` is told each finished round. Torch works in one thread meanwhile. Raises
    ``CoterieError`` for settings that the data or the model do not allow.
    """
    check_stack(runs)
    rows = clients if isinstance(clients, Rows) else Rows.of(clients)
    with one_thread():
        model = task.build()
        drawn = [initial_hypotheses(task, run.hypotheses, run.seed) for run in runs]
        layout = drawn[0][1]
        engine = BatchedEngine(task, model, layout, rows, runs[0].training(task))
        states = [_RunState(run, task, layout, rows, start) for run, (start, _) in zip(runs, drawn, strict=True)]
        _Simulation(task, rows, engine, after, on_round).play(states)
        return [_result(task, rows, engine, state) for state in states]


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

    def __init__(self, run: SimulatedRun, task: Task, layout: Layout, rows: Rows, start: Vectors) -> None:
        self.run = run
        self.sampler = Sampler(rows.names, run)
        self.mechanism = mechanism_for(run, task, layout)
        self.noise = seeded(run.seed, "simulation", "noise")
        self.order = seeded(run.seed, "simulation", "order")
        self.reseeding = seeded(run.seed, "simulation", "after averaging")
        self.hypotheses = start
        self.after_state: Any = None
        self.best = BestSoFar()
        self.history: list[ValidationRecord] = []
        self.participations = np.zeros(len(rows.names), np.int32)
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
        rows: Rows,
        engine: Engine,
        after: AfterAveraging | None,
        on_round: Callable[[int], None],
    ) -> None:
        self._task = task
        self._rows = rows
        self._engine = engine
        self._after = after
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
                self._on_round(number)

    def _round(self, live: Sequence[_RunState], hypotheses: Vectors, sanitize: "_Sanitize", number: int) -> Vectors:
        sampled = np.stack([state.sampler.sample(number) for state in live])
        chosen, trained = self._engine.choose_and_train(hypotheses, sampled, [state.order for state in live])
        n = hypotheses.shape[-1]
        starts = hypotheses[np.arange(len(live))[:, None], chosen].reshape(-1, n)
        sent = sent_vectors(starts, sanitize(finite_updates(starts, trained.reshape(-1, n))))
        hypotheses, counts = average_all(hypotheses, chosen, sent.reshape(trained.shape))
        for index, state in enumerate(live):
            if state.is_over:
                continue
            state.rounds = number
            state.participations[sampled[index]] += 1
            if self._after is not None:
                hypotheses[index], state.after_state = self._after(
                    hypotheses[index], tuple(map(int, counts[index])), state.after_state, state.reseeding
                )
            state.hypotheses = hypotheses[index]
        run = live[0].run
        if number % run.validate_every == 0 or number == run.rounds:
            self._validate(live, hypotheses, number)
        return hypotheses

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
    metric = honest = None
    left_out = 0
    if len(state.sampler.held_out):
        judgement = engine.judge(kept, state.sampler.held_out[None], [state.halves()])
        metric = task.report(validations(judgement)[0].score)
        score, left_out = honest_scores(judgement)[0]
        honest = None if score is None else task.report(score)
    counts = _takers(rows, engine, kept)
    return SimulatedResult(
        run=state.run,
        metric_name=task.metric,
        metric=metric,
        honest_metric=honest,
        honest_left_out=left_out,
        clients_per_hypothesis=tuple(map(int, counts)),
        collapsed=is_collapsed(tuple(map(int, counts))),
        rounds=state.rounds,
        best_round=state.best.round or state.rounds,
        price=price_of(state.mechanism, int(state.participations.max())),
        history=tuple(state.history),
        hypotheses=state.kept,
        participations=state.participations,
    )


def _takers(rows: Rows, engine: Engine, kept: Vectors) -> Counts:
    """How many of all clients take each hypothesis, (k,)."""
    counts: Counts = np.zeros(kept.shape[1], np.int64)
    for first in range(0, len(rows.names), _CLIENTS_AT_ONCE):
        some = np.arange(first, min(first + _CLIENTS_AT_ONCE, len(rows.names)))[None]
        counts += np.bincount(best_hypotheses(engine.losses(kept, some))[0], minlength=kept.shape[1])
    return counts
