"""The server's part of a round, for S runs at once, on ``server``'s own functions or twins of them."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.errors import CoterieError
from coterie.server.hypotheses import Validation
from coterie.server.roster import Roster, position, sampled
from coterie.simulation.engines import Floats, Judgement, Vectors, best_hypotheses
from coterie.simulation.rows import Counts
from coterie.simulation.settings import SimulatedRun

_MOST_COUNTED = 20_000  # planned rounds whose samples are drawn to count them: half a second
_NUMBERS_AT_ONCE = 1 << 17  # of all clients in an average: 1 MB in float64 stays in the cache


class Sampler:
    """``Roster``'s split and samples, with the order that it sorts anew each round kept."""

    def __init__(self, names: Sequence[str], run: SimulatedRun) -> None:
        """Raises ``CoterieError`` when fewer clients train than a round takes."""
        self.clients = len(names)
        roster = Roster.split(names, run.validation_fraction, run.seed)
        places = np.array([position(name, run.seed) for name in names])
        in_order = np.argsort(places, kind="stable")
        held_out = places[in_order] < roster.threshold
        self.held_out: Counts = in_order[held_out]
        self._trainers: Counts = in_order[~held_out]
        self._run = run
        self._last: tuple[int, Counts] = (0, self._trainers[:0])
        if run.clients_per_round > len(self._trainers):
            raise CoterieError(
                f"Expected --clients-per-round to be at most {len(self._trainers)}, the clients that train of "
                f"{len(names)}, found {run.clients_per_round}"
            )

    def sample(self, round_number: int) -> Counts:
        """The clients of a round (U,), as ``Roster.sample`` takes them. The last one is remembered: runs of one seed
        share their sampler.
        """
        if self._last[0] != round_number:
            places = sampled(len(self._trainers), self._run.clients_per_round, self._run.seed, round_number)
            self._last = round_number, self._trainers[places]
        return self._last[1]

    @cached_property
    def most_planned(self) -> int:
        """How often one client trains, at most, in all T rounds of the plan, wherever the run stops.

        Fixed by names and settings alone: no data has a part in it. Of more than 20,000 rounds the first so many are
        counted, and each later one once for the most active client: never too few.
        """
        counted = min(self._run.rounds, _MOST_COUNTED)
        return int(self._planned(counted).max()) + self._run.rounds - counted

    def planned_participations(self) -> Counts:
        """How often each client (N,) trains in all T rounds of the plan; draws every round's sample, 25 µs each."""
        return self._planned(self._run.rounds)

    def _planned(self, rounds: int) -> Counts:
        times = np.zeros(len(self._trainers), np.int64)
        for number in range(1, rounds + 1):
            times[sampled(len(times), self._run.clients_per_round, self._run.seed, number)] += 1
        found: Counts = np.zeros(self.clients, np.int64)
        found[self._trainers] = times
        return found


def nearest_all(hypotheses: Vectors, vectors: Vectors) -> Counts:
    """``server.hypotheses.nearest`` of every update of S runs: (S, k, n) and (S, U, n) → (S, U)."""
    distances = np.empty((*vectors.shape[:2], hypotheses.shape[1]))
    for j in range(hypotheses.shape[1]):  # one at a time: all gaps together would be k times the updates' memory
        gaps = hypotheses[:, j, None] - vectors.astype(np.float64)
        distances[..., j] = np.einsum("sun,sun->su", gaps, gaps)
    found: Counts = np.argmin(distances, axis=-1)
    return found


def average_all(hypotheses: Vectors, belongs: Counts, vectors: Vectors) -> tuple[Vectors, Counts]:
    """``server.hypotheses.average`` of S runs with equal weights, and the counts (S, k).

    ``hypotheses`` (S, k, n), the hypothesis each update belongs to (S, U), and the updates (S, U, n). Sums in float64
    in the order of the clients.
    """
    runs, k, n = hypotheses.shape
    cluster = (belongs + k * np.arange(runs)[:, None]).reshape(-1)
    counts: Counts = np.bincount(cluster, minlength=runs * k)
    taken = counts > 0
    averaged, sent = hypotheses.reshape(-1, n).copy(), torch.from_numpy(vectors.reshape(-1, n))
    width = max(1, _NUMBERS_AT_ONCE // len(cluster))
    for first in range(0, n, width):
        columns = slice(first, min(first + width, n))
        sums = torch.zeros((runs * k, columns.stop - first), dtype=torch.float64)
        sums.index_add_(0, torch.from_numpy(cluster), sent[:, columns].double())
        averaged[taken, columns] = sums.numpy()[taken] / counts[taken, None]
    return averaged.reshape(hypotheses.shape), counts.reshape(runs, k)


def told(values: Floats) -> NDArray[np.float64]:
    """A loss or score as ``client.sanitize`` tells it: in float32, and what is not finite as float32's largest."""
    limit = float(np.finfo(np.float32).max)
    return np.clip(np.nan_to_num(values, nan=limit), -limit, limit).astype(np.float32).astype(np.float64)


def validations(judgement: Judgement) -> list[Validation]:
    """``server.hypotheses.mean_validation`` of each run's held-out clients, every one by its best hypothesis."""
    best = best_hypotheses(judgement.losses)[..., None]
    losses = told(np.take_along_axis(judgement.losses, best, axis=-1)[..., 0])
    scores = told(np.take_along_axis(judgement.scores, best, axis=-1)[..., 0])
    return [
        Validation(float(loss.mean()), float(score.mean()), len(loss))
        for loss, score in zip(losses, scores, strict=True)
    ]


def honest_score(judgement: Judgement, halved: NDArray[np.bool_]) -> float | None:
    """The first run's mean score on second halves, chosen by the loss on first halves; None when nobody has two rows.

    ``halved`` (V,): who has two rows or more.
    """
    best = best_hypotheses(judgement.first_half_losses[0, halved])[:, None]
    return mean_told(np.take_along_axis(judgement.second_half_scores[0, halved], best, axis=-1)[:, 0])


def honest_loss(judgement: Judgement, counts: Counts) -> float | None:
    """As ``honest_score``, of the loss: what is in a client's mean over all rows and not in that of its first half.

    ``counts`` (V,) of the clients' rows.
    """
    halved = counts > 1
    first = judgement.first_half_losses[0, halved]
    best = best_hypotheses(first)[:, None]
    total, half = (np.take_along_axis(losses, best, axis=-1)[:, 0] for losses in (judgement.losses[0, halved], first))
    rows, in_first = counts[halved], counts[halved] // 2
    with np.errstate(invalid="ignore"):  # infinite losses, told as the largest number
        return mean_told((total * rows - half * in_first) / (rows - in_first))


def mean_told(scores: Floats) -> float | None:
    """The mean of clients' scores (V,) as they tell them; None for no clients."""
    return float(told(scores).mean()) if scores.size else None
