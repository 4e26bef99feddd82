"""What a round asks of the clients, and the engine that does it for all of them in one tensor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.simulation.private_choice import PrivateChoice
from coterie.simulation.programs import programs_of
from coterie.simulation.rows import Counts, Rows
from coterie.tasks import Task, TrainingSettings

Floats = NDArray[np.float64]
Vectors = NDArray[np.float32]
Epoch = int
# The order of one epoch: for each client of (S, U), a permutation of its row numbers and then anything, (S, U, most).
Orders = Callable[[Epoch], NDArray[np.int64]]

_ROWS_AT_ONCE = 128  # of one client in an evaluation
# Clients of a run that are fine-tuned side by side, and parameters of theirs.
_CLIENTS_AT_ONCE = 1024
_NUMBERS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Judgement:
    """k hypotheses on held-out clients (S, V): mean losses and scores over all rows and over halves, (S, V, k).

    A client's first half is its first ⌊rows/2⌋ rows in a fixed shuffled order. With a single row the first half is
    empty, and what is said of halves is NaN.
    """

    losses: Floats
    scores: Floats
    first_half_losses: Floats
    second_half_scores: Floats


class Engine(Protocol):
    """How the clients' work is done. ``hypotheses`` is (S, k, n): S runs side by side, k hypotheses each."""

    def losses(self, hypotheses: Vectors, clients: Counts) -> Floats:
        """The mean loss of each hypothesis on the rows of each of ``clients`` (S, U); (S, U, k)."""

    def choose_and_train(
        self,
        hypotheses: Vectors,
        clients: Counts,
        orders: Sequence[np.random.Generator],
        choice: PrivateChoice | None = None,
    ) -> tuple[Counts, Vectors]:
        """Each client's hypothesis (S, U), and what it trained from it (S, U, n); one order of rows a run.

        Without ``choice`` the hypothesis is the best one.
        """

    def judge(self, hypotheses: Vectors, clients: Counts, halves: Sequence[np.random.Generator]) -> Judgement:
        """The hypotheses on held-out clients (S, V); ``halves`` deals each run's rows to halves."""

    def fine_tune(
        self,
        hypotheses: Vectors,
        clients: Counts,
        halves: Sequence[np.random.Generator],
        orders: Sequence[np.random.Generator],
        training: TrainingSettings,
    ) -> Floats:
        """Held-out clients' mean scores (S, V) on second halves, of what ``client.participation.keep_model`` keeps on
        first halves. With the same ``halves`` they are those of ``judge``. NaN for a client with a single row.
        """


def best_hypotheses(losses: Floats) -> Counts:
    """``client.selection.best_hypothesis`` over the last axis: (…, k) → (…)."""
    found: Counts = np.argmin(np.where(np.isfinite(losses), losses, np.inf), axis=-1)
    return found


class BatchedEngine:
    """All sampled clients of all runs in one tensor of shape (S·U, n)."""

    def __init__(self, task: Task, rows: Rows, training: TrainingSettings) -> None:
        """``training`` in place of the task's own."""
        self._task = task
        self._programs = programs_of(task, rows.inputs.device)
        self._rows = rows
        self._training = training
        self._most = int(rows.counts.max())
        self._device = rows.inputs.device

    def losses(self, hypotheses: Vectors, clients: Counts) -> Floats:
        """See ``Engine.losses``."""
        (found,) = self._means(hypotheses, clients, lambda *block: (self._programs.losses(*block),))
        return found

    def choose_and_train(
        self,
        hypotheses: Vectors,
        clients: Counts,
        orders: Sequence[np.random.Generator],
        choice: PrivateChoice | None = None,
    ) -> tuple[Counts, Vectors]:
        """See ``Engine.choose_and_train``."""
        losses = self.losses(hypotheses, clients)
        chosen = best_hypotheses(losses) if choice is None else choice(losses)
        starts = hypotheses[np.arange(len(hypotheses))[:, None], chosen]
        return chosen, self.train(starts, clients, lambda _: self._draw_orders(clients, orders))

    def train(self, starts: Vectors, clients: Counts, orders: Orders) -> Vectors:
        """``client.training.train`` for every client of (S, U), each from its own start (S, U, n)."""
        settings = self._training
        vectors = self._there(starts.reshape(-1, starts.shape[-1]).copy())
        flat = clients.reshape(-1)
        if self._most <= settings.batch_size:
            # One batch of all rows, whose order changes nothing but the last bits of a sum.
            places, real = self._rows.block(flat, 0, self._most)
            inputs, targets = self._rows.at(places)
            weights = self._weights(real)
            for _ in range(settings.epochs):
                gradients = self._programs.gradients(vectors, inputs, targets, weights)
                vectors.sub_(gradients, alpha=settings.step_size)
        else:
            # The clients with the most rows first: those that still have a batch are then a prefix.
            by_rows = np.argsort(-self._rows.counts[flat], kind="stable")
            vectors = vectors[self._there(by_rows)]
            for epoch in range(settings.epochs):
                order = orders(epoch)
                order = order.reshape(-1, order.shape[-1])[by_rows]
                self._epoch(vectors, flat[by_rows], order)
            vectors = vectors[self._there(np.argsort(by_rows))]
        return vectors.cpu().numpy().reshape(starts.shape)

    def judge(self, hypotheses: Vectors, clients: Counts, halves: Sequence[np.random.Generator]) -> Judgement:
        """See ``Engine.judge``."""
        in_first = self._first_halves(clients, halves)
        losses, scores, first, second = self._means(hypotheses, clients, self._programs.losses_and_scores, in_first)
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
        in_first = self._first_halves(clients, halves)
        single = self._rows.counts[clients] < 2
        n = hypotheses.shape[-1]
        at_once = max(1, min(_CLIENTS_AT_ONCE, _NUMBERS_AT_ONCE // (len(clients) * n)))
        scores = np.empty(clients.shape)
        for begin in range(0, clients.shape[1], at_once):
            own = slice(begin, begin + at_once)
            flat, count = clients[:, own].reshape(-1), clients[:, own].size
            kept = in_first[:, own].reshape(count, -1)
            alone = single[:, own].reshape(-1, 1)  # whose one row stands for both halves, so that neither is empty
            first = BatchedEngine(self._task, self._rows.part(flat, kept | alone), training)
            second = BatchedEngine(self._task, self._rows.part(flat, ~kept), training)
            places = np.arange(count)
            together = places.reshape(len(clients), -1)
            chosen, tuned = first.choose_and_train(hypotheses, together, orders)
            starts = hypotheses[np.arange(len(clients))[:, None], chosen].reshape(count, 1, n)
            tuned = tuned.reshape(count, 1, n)
            # From here on each client is a stack of its own, with one hypothesis.
            before, after = (first.losses(vectors, places[:, None]) for vectors in (starts, tuned))
            final = np.where(after < before, tuned, starts)
            _, found = second._means(final, places[:, None], second._programs.losses_and_scores)
            scores[:, own] = found.reshape(together.shape)
        scores[single] = np.nan
        return scores

    def _epoch(self, vectors: Tensor, flat: Counts, order: NDArray[np.int64]) -> None:
        size, counts = self._training.batch_size, self._rows.counts[flat]
        for first in range(0, int(counts[0]), size):
            active = _rounded_up(int((counts > first).sum()), len(flat))
            within = np.arange(first, first + size)
            real = within < counts[:active, None]
            # Padding repeats the batch's own first row: with a weight of 0 it changes nothing, and it is finite if
            # the batch is.
            within = np.where(real, within, np.where(real[:, :1], first, 0))
            within = np.take_along_axis(order[:active], within, axis=1)
            inputs, targets = self._rows.at(self._rows.starts[flat[:active], None] + within)
            gradients = self._programs.gradients(vectors[:active], inputs, targets, self._weights(real))
            if not real[:, 0].all():
                gradients = torch.where(self._there(real[:, :1]), gradients, 0.0)
            vectors[:active].sub_(gradients, alpha=self._training.step_size)

    def _there(self, array: NDArray[Any]) -> Tensor:
        """A tensor on the device that the rows are on."""
        return torch.from_numpy(array).to(self._device)

    def _weights(self, real: NDArray[np.bool_]) -> Tensor:
        weights = real / np.maximum(real.sum(axis=1, keepdims=True), 1)
        return self._there(weights).to(self._rows.inputs.dtype)

    def _draw_orders(self, clients: Counts, orders: Sequence[np.random.Generator]) -> NDArray[np.int64]:
        """A random permutation of each client's rows, then its padding: the rows' places by a random key."""
        width = int(self._rows.counts[clients].max())
        drawn = np.tile(np.arange(width), (*clients.shape, 1))
        for run, (own, rng) in enumerate(zip(clients, orders, strict=True)):
            counts = self._rows.counts[own]
            most = int(counts.max())  # by the run's own clients: what a run draws does not depend on its neighbours
            keys = rng.random((len(own), most))
            keys[np.arange(most) >= counts[:, None]] = 2.0
            drawn[run, :, :most] = np.argsort(keys, axis=1)
        return drawn

    def _first_halves(self, clients: Counts, halves: Sequence[np.random.Generator]) -> NDArray[np.bool_]:
        """Which row numbers of each client are in its first half, (S, V, most)."""
        order = self._draw_orders(clients, halves)
        ranks = np.argsort(order, axis=-1)
        return ranks < (self._rows.counts[clients] // 2)[..., None]

    def _means(
        self,
        hypotheses: Vectors,
        clients: Counts,
        program: Callable[..., Sequence[Tensor]],
        in_first: NDArray[np.bool_] | None = None,
    ) -> list[Floats]:
        """Means (S, V, k) over each client's rows of what ``program`` gives, and over halves if there are any:
        of the first result over the first half and of the last over the second.
        """
        stacks, sampled = clients.shape
        most = int(self._rows.counts[clients].max())
        width = min(self._most, _ROWS_AT_ONCE)
        by_rows = None
        if most > width:
            # The clients with the most rows first: those that a later block has rows of are then a prefix.
            by_rows = np.argsort(-self._rows.counts[clients], axis=1, kind="stable")
            clients = np.take_along_axis(clients, by_rows, axis=1)
            if in_first is not None:
                in_first = np.take_along_axis(in_first, by_rows[..., None], axis=1)
        counts = self._rows.counts[clients]
        sums: list[Floats] = []
        stacked = self._there(hypotheses)
        for first in range(0, most, width):
            active = _rounded_up(int((counts > first).sum(axis=1).max()), sampled)
            places, real = self._rows.block(clients[:, :active], first, width)
            inputs, targets = self._rows.at(places.reshape(stacks, -1))
            results = [
                result.double().cpu().numpy().reshape(stacks, -1, active, width)  # (S, k, active, width)
                for result in program(stacked, inputs, targets)
            ]
            masks = [real] * len(results)
            if in_first is not None:
                half = np.zeros_like(real)
                own = in_first[:, :active, first : first + width]
                half[..., : own.shape[-1]] = own
                results += [results[0], results[-1]]
                masks += [real & half, real & ~half]
            if not sums:
                sums = [np.zeros((stacks, sampled, result.shape[1])) for result in results]
            for total, result, mask in zip(sums, results, masks, strict=True):
                # The rows of the other half may be infinite.
                own_rows = result if mask is real else np.where(mask[:, None], result, 0.0)
                # Padding is as finite as the client's own first row (see ``Rows.block``), so that 0 times it is 0, or
                # the client's sum is not finite anyway.
                total[:, :active] += np.einsum("skaw,saw->sak", own_rows, mask.astype(np.float64))
        divisors = [counts] * len(sums)
        if in_first is not None:
            # With a single row the first half is empty and both halves' means are NaN.
            single = counts < 2
            divisors[-2:] = [np.where(single, 0, counts // 2), np.where(single, 0, counts - counts // 2)]
        with np.errstate(invalid="ignore", divide="ignore"):
            means = [total / divisor[..., None] for total, divisor in zip(sums, divisors, strict=True)]
        if in_first is not None:
            for mean in means[-2:]:
                mean[single] = np.nan
        if by_rows is None:
            return means
        back = np.argsort(by_rows, axis=1)[..., None]
        return [np.take_along_axis(mean, back, axis=1) for mean in means]


def _rounded_up(active: int, most: int) -> int:
    """The next power of two, at most ``most``: each new shape is recorded anew, which takes far longer than to run."""
    return min(most, 1 << (active - 1).bit_length())
