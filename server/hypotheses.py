"""The k hypotheses: averaging per cluster, assigning by distance, early stopping. Pure functions on arrays."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coterie.config import Assignment, Start, Weighting
from coterie.parameters import Layout, layout_of, to_vector
from coterie.protocol import UpdateReply, ValidationReply, Vector
from coterie.rng import seeded
from coterie.server.reseeding import starting
from coterie.tasks import Task


@dataclass(frozen=True)
class Averaged:
    """Hypotheses after a round, and how many updates went into each."""

    hypotheses: Vector  # (k, n)
    counts: tuple[int, ...]  # (k,)


def initial_hypotheses(task: Task, count: int, seed: int, start: Start = Start.INDEPENDENT) -> tuple[Vector, Layout]:
    """The ``count`` hypotheses of round 1, shape (k, n), and their layout: see ``starting``."""

    def draw(j: int) -> Vector:
        return to_vector(task.initialise(seeded(seed, "hypothesis", j)))

    hypotheses = starting(draw, count, start, rng=seeded(seed, "start"))
    return hypotheses, layout_of(task.build())


def problem_with(update: UpdateReply, hypotheses: Vector, assignment: Assignment, weighting: Weighting) -> str | None:
    """Why an update must be dropped before it meets the average, or None when it is sound."""
    k, n = hypotheses.shape
    if update.vector.shape != (n,):
        return f"update of {update.vector.size} numbers, expected {n}"
    if not np.isfinite(update.vector).all():
        return "update with non-finite numbers"
    if assignment is Assignment.CLIENT and (update.hypothesis is None or not 0 <= update.hypothesis < k):
        return f"hypothesis {update.hypothesis}, expected 0 to {k - 1}"
    if weighting is Weighting.SAMPLES and update.rows is None:
        return "no row count, expected one with weighting = samples"
    return None


def nearest(hypotheses: Vector, vector: Vector) -> int:
    """The index of the hypothesis nearest to a sanitized vector (n,), in Euclidean distance; ties to the lowest.

    The L2 Laplace density falls with distance, so nearest is most likely. This is the assignment step of k-means
    started from the current hypotheses; with the averaging step it makes one Lloyd iteration a round. It only
    post-processes what was released.
    """
    gaps = hypotheses - vector.astype(np.float64)
    return int(np.argmin(np.einsum("kn,kn->k", gaps, gaps)))


def average(
    hypotheses: Vector, updates: Sequence[UpdateReply], assignment: Assignment, weighting: Weighting
) -> Averaged:
    """θ_j ← the mean of the updates of cluster j; an empty cluster keeps its hypothesis (IFCA).

    The mean is plain, or weighted by row counts. Sums are in float64, in the order of the updates, one at a time:
    memory does not grow with their number. Updates must have passed ``problem_with``.
    """
    sums = np.zeros(hypotheses.shape)
    weights = np.zeros(len(hypotheses))
    counts = [0] * len(hypotheses)
    for update in updates:
        j = update.hypothesis if assignment is Assignment.CLIENT else None
        if j is None:
            j = nearest(hypotheses, update.vector)
        weight = float(update.rows or 1) if weighting is Weighting.SAMPLES else 1.0
        sums[j] += weight * update.vector.astype(np.float64)
        weights[j] += weight
        counts[j] += 1
    averaged = hypotheses.copy()
    for j, weight in enumerate(weights):
        if weight:
            averaged[j] = sums[j] / weight
    return Averaged(averaged, tuple(counts))


@dataclass(frozen=True)
class Validation:
    """Mean over held-out clients of their least loss, and of the score under that hypothesis."""

    loss: float
    score: float
    clients: int


@dataclass(frozen=True)
class BestSoFar:
    """The hypotheses of the best validation, and how many validations have passed without a better one."""

    round: int = 0
    validation: Validation | None = None
    hypotheses: Vector | None = None
    without_improvement: int = 0

    def observe(self, round_number: int, validation: Validation, hypotheses: Vector) -> "BestSoFar":
        """The state after one more validation; an equal loss is no improvement."""
        if self.validation is None or validation.loss < self.validation.loss:
            return BestSoFar(round_number, validation, hypotheses)
        return replace(self, without_improvement=self.without_improvement + 1)

    def is_over(self, patience: int) -> bool:
        """Whether ``patience`` validations in a row brought nothing better; 0 means never."""
        return 0 < patience <= self.without_improvement


def problem_with_validation(reply: ValidationReply) -> str | None:
    """Why a held-out client's answer must be dropped before it meets the mean, or None when it is sound."""
    if not (np.isfinite(reply.loss) and np.isfinite(reply.score)):
        return "validation with non-finite numbers"
    return None


def problem_with_score(score: float, report: Callable[[float], float]) -> str | None:
    """Why the task cannot turn a peer's score into its figure (a negative squared error), or None when it can."""
    try:
        sound = math.isfinite(report(score))
    except Exception:  # a user's task meets a peer's number here: neither may end the run
        sound = False
    return None if sound else "validation with an impossible score"


def mean_validation(replies: Sequence[ValidationReply]) -> Validation | None:
    """The plain mean over held-out clients, or None for no reply."""
    if not replies:
        return None
    return Validation(
        loss=float(np.mean([reply.loss for reply in replies])),
        score=float(np.mean([reply.score for reply in replies])),
        clients=len(replies),
    )
