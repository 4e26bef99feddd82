"""The engine for models that batching does not speed up: client by client, by the deployed functions, in processes.

Each process computes in one thread: threads of one small convolution mostly wait for each other. The processes are
forked after everything is read, so that they share the rows, and the parameters pass through memory that both sides
map, so that nothing of a model's size is ever copied into a pipe. Every client's draws have seeds of their own: the
results do not depend on how many processes there are.
"""

import ctypes
import mmap
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from coterie.client.selection import best_hypothesis, hypothesis_losses, outputs
from coterie.client.training import train
from coterie.errors import CoterieError
from coterie.mechanisms.layerwise import LayerwiseLaplace
from coterie.orphans import signal_when_parent_ends
from coterie.parameters import Layout
from coterie.simulation.channels_last import ChannelsLast, has_convolutions
from coterie.simulation.engines import Floats, Judgement, Vectors
from coterie.simulation.personalization import fine_tuned_score
from coterie.simulation.private_choice import PrivateChoice
from coterie.simulation.rows import Counts, Rows
from coterie.simulation.sanitizing import BatchSanitizer, draw_for_one, finite_updates, sent_vectors
from coterie.tasks import ClientData, Task, TrainingSettings

Answer = TypeVar("Answer")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's numbers for them


@dataclass(frozen=True)
class _Work:
    """What every process holds. ``hypotheses`` (k, n) and ``sent`` (U, n) are memory that all of them share."""

    task: Task
    model: nn.Module
    layout: Layout
    rows: Rows
    training: TrainingSettings
    bfloat16_selection: bool
    hypotheses: Vectors
    sent: Vectors

    def memory_format(self) -> AbstractContextManager[object]:
        """In which the model is computed: what is fastest, with the same results up to rounding."""
        return ChannelsLast() if has_convolutions(self.layout) else nullcontext()


_held: list[_Work] = []  # in a worker process: its one piece of work, from the moment it starts


class WorkersEngine:
    """One run at a time (S = 1), its clients dealt to processes. See ``Engine``."""

    def __init__(self, pool: ProcessPoolExecutor, work: _Work) -> None:
        """Made by ``workers``, which also ends the processes."""
        self._pool = pool
        self._work = work

    def losses(self, hypotheses: Vectors, clients: Counts) -> Floats:
        """See ``Engine.losses``."""
        return np.array(self._ask(hypotheses, _losses, clients[0].tolist()))[None]

    def choose_and_train(
        self,
        hypotheses: Vectors,
        clients: Counts,
        orders: Sequence[np.random.Generator],
        choice: PrivateChoice | None = None,
    ) -> tuple[Counts, Vectors]:
        """See ``Engine.choose_and_train``; each client's order of rows and dropout have a seed from the run's."""
        chosen, trained = self.choose_and_send(hypotheses, clients, orders[0], choice, None, orders[0])
        return chosen, trained.copy()

    def choose_and_send(
        self,
        hypotheses: Vectors,
        clients: Counts,
        order: np.random.Generator,
        choice: PrivateChoice | None,
        mechanism: LayerwiseLaplace | None,
        noise: np.random.Generator,
    ) -> tuple[Counts, Vectors]:
        """Each client's hypothesis (1, U), and what it sends after training from it (1, U, n): sanitized by
        ``mechanism``, if there is one. The second is overwritten by the next call.

        Each client has a seed for its order of rows and dropout from ``order``, and one for its noise from ``noise``.
        """
        places = range(clients.size)
        seeds = order.integers(2**63 - 1, size=clients.size).tolist()
        noise_seeds = [0] * clients.size if mechanism is None else noise.integers(2**63 - 1, size=clients.size).tolist()
        choices = [None if choice is None else choice.of(place) for place in places]
        work = partial(_choose_and_send, mechanism)
        chosen = self._ask(hypotheses, work, places, clients[0].tolist(), seeds, choices, noise_seeds)
        return np.array(chosen)[None], self._work.sent[None, : clients.size]

    def judge(self, hypotheses: Vectors, clients: Counts, halves: Sequence[np.random.Generator]) -> Judgement:
        """See ``Engine.judge``."""
        seeds = halves[0].integers(2**63 - 1, size=clients.size)
        judged = np.array(self._ask(hypotheses, _judge, clients[0].tolist(), seeds.tolist()))  # (V, 4, k)
        losses, scores, first, second = (judged[None, :, part] for part in range(4))
        return Judgement(losses, scores, first, second)

    def fine_tune(
        self,
        hypotheses: Vectors,
        clients: Counts,
        halves: Sequence[np.random.Generator],
        orders: Sequence[np.random.Generator],
        training: TrainingSettings,
    ) -> Floats:
        """See ``Engine.fine_tune``."""
        seeds = [rngs[0].integers(2**63 - 1, size=clients.size).tolist() for rngs in (halves, orders)]
        return np.array(self._ask(hypotheses, _fine_tune, clients[0].tolist(), *seeds, [training] * clients.size))[None]

    def _ask(self, hypotheses: Vectors, work: Callable[..., Answer], *arguments: Sequence[object]) -> list[Answer]:
        self._work.hypotheses[:] = hypotheses[0]
        try:
            return list(self._pool.map(work, *arguments))
        except BrokenProcessPool as error:
            raise CoterieError(
                "Expected the simulation's processes to live, found one ended from outside: was memory short?"
            ) from error


@contextmanager
def workers(
    task: Task,
    model: nn.Module,
    layout: Layout,
    rows: Rows,
    training: TrainingSettings,
    *,
    k: int,
    sampled: int,
    bfloat16_selection: bool = False,
    processes: int | None = None,
) -> Iterator[WorkersEngine]:
    """``processes``, or as many as this one may use processors, for as long as the context lasts."""
    hypotheses, sent = _shared((k, layout.size)), _shared((sampled, layout.size))
    work = _Work(task, model, layout, rows, training, bfloat16_selection, hypotheses, sent)
    processes = processes or len(os.sched_getaffinity(0))
    pool = ProcessPoolExecutor(processes, get_context("fork"), initializer=_begin, initargs=(work, os.getpid()))
    try:
        yield WorkersEngine(pool, work)
    finally:
        pool.shutdown(cancel_futures=True)


def _shared(shape: tuple[int, int]) -> Vectors:
    # Anonymous and inherited by fork: /dev/shm, which named shared memory lives in, is often small.
    memory = mmap.mmap(-1, 4 * shape[0] * shape[1])
    return np.frombuffer(memory, np.float32).reshape(shape)


def _begin(work: _Work, parent: int) -> None:
    if not signal_when_parent_ends(parent, signal.SIGKILL):  # nothing here needs an orderly end
        raise SystemExit
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its processes
    torch.set_num_threads(1)
    _keep_freed_memory()
    _held[:] = [work]


def _keep_freed_memory() -> None:
    """By default glibc gives a freed tensor of some MB back to the system, and each next one is mapped in page by page.

    Evaluating the femnist task's 100 images then took 39 ms in place of 28. Another C library may have no ``mallopt``.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        most = 2**31 - 1
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(parameter, most)


def _losses(client: int) -> NDArray[np.float64]:
    (work,) = _held
    with work.memory_format():
        return hypothesis_losses(work.task, work.model, work.hypotheses, work.layout, work.rows.client(client))


def _choose_and_send(
    mechanism: LayerwiseLaplace | None,
    place: int,
    client: int,
    seed: int,
    choice: PrivateChoice | None,
    noise_seed: int,
) -> int:
    (work,) = _held
    with torch.autocast("cpu", torch.bfloat16, enabled=work.bfloat16_selection):
        losses = _losses(client)
    chosen = best_hypothesis(losses) if choice is None else int(choice(losses))
    start, data = work.hypotheses[chosen], work.rows.client(client)
    with work.memory_format():
        order = np.random.default_rng(seed)
        trained = train(work.task, work.model, start, work.layout, data, work.training, rng=order)
    update = finite_updates(start[None], trained[None])
    if mechanism is not None:
        update = BatchSanitizer([mechanism])(update, *draw_for_one(mechanism.sizes, noise_seed))
    work.sent[place] = sent_vectors(start, update[0])
    return chosen


def _judge(client: int, seed: int) -> NDArray[np.float64]:
    """Losses, scores, first halves' losses and second halves' scores of the k hypotheses, (4, k)."""
    (work,) = _held
    data = work.rows.client(client)
    first, second = _halves(data.rows, seed)
    judged = np.full((4, len(work.hypotheses)), np.nan)
    for j, vector in enumerate(work.hypotheses):
        with work.memory_format():
            found = outputs(work.model, vector, work.layout, data.inputs)
        losses = work.task.loss(found, data.targets).double().numpy()
        scores = work.task.score(found, data.targets).double().numpy()
        judged[:2, j] = losses.mean(), scores.mean()
        if data.rows > 1:
            judged[2:, j] = losses[first].mean(), scores[second].mean()
    return judged


def _fine_tune(client: int, half_seed: int, order_seed: int, training: TrainingSettings) -> float:
    (work,) = _held
    data = work.rows.client(client)
    if data.rows < 2:
        return float("nan")
    first, second = (
        ClientData(data.name, data.inputs[own], data.targets[own]) for own in _halves(data.rows, half_seed)
    )
    rng = np.random.default_rng(order_seed)
    with work.memory_format():
        return fine_tuned_score(work.task, work.model, work.layout, work.hypotheses, (first, second), training, rng=rng)


def _halves(rows: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    order = np.random.default_rng(seed).permutation(rows)
    return order[: rows // 2], order[rows // 2 :]
