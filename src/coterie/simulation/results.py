"""What a simulated run ends with."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.simulation.privacy import SimulatedPrice
from coterie.simulation.settings import SimulatedRun


@dataclass(frozen=True)
class ValidationRecord:
    """One validation: its round, the mean least loss of the held-out clients, and the task's figure."""

    round: int
    loss: float
    metric: float


@dataclass(frozen=True)
class SimulatedResult:
    """One run's end.

    ``hypotheses`` (k, n) are those of the best validation, or the last ones when nobody is held out. ``metric`` is
    the paper's: each held-out client is scored by the hypothesis that fits best the very rows it is scored on.
    ``honest_metric`` chooses on half of a client's rows and scores on the other half, and ``honest_loss`` is the mean
    loss there, by which k can be chosen; ``honest_left_out`` clients have a single row and take no part. (Which
    validation was best, the same clients' rows have told.) ``fine_tuned_metric`` is ``honest_metric`` on the same
    clients and rows, where each has first trained its hypothesis on with the half that it chose on, and kept the
    hypothesis itself if its loss there was no less. All four are None when nobody is held out, and the last when
    nothing was fine-tuned. ``clients_per_hypothesis``
    counts, over all clients, trained and held out, who takes which of the ``hypotheses``; ``collapsed`` says that all
    but one of several are taken by fewer than 1 % of them. ``reseeded`` counts the hypotheses that were re-seeded.
    ``participations`` (N,) counts each client's releases; ``price`` is of the planned ones, where a run stopped early.
    """

    run: SimulatedRun
    metric_name: str
    metric: float | None
    honest_metric: float | None
    honest_loss: float | None
    honest_left_out: int
    fine_tuned_metric: float | None
    clients_per_hypothesis: tuple[int, ...]
    collapsed: bool
    rounds: int
    best_round: int
    reseeded: int
    price: SimulatedPrice | None
    history: tuple[ValidationRecord, ...]
    hypotheses: NDArray[np.float32]
    participations: NDArray[np.int32]

    def summary(self) -> dict[str, Any]:
        """What ``coterie simulate --json`` prints; null stands for a number that is not finite, or not there."""
        return {
            "seed": self.run.seed,
            "metric": _finite(self.metric),
            "honest_metric": _finite(self.honest_metric),
            "honest_loss": _finite(self.honest_loss),
            "honest_left_out": self.honest_left_out,
            "fine_tuned_metric": _finite(self.fine_tuned_metric),
            "metric_name": self.metric_name,
            "clients_per_hypothesis": list(self.clients_per_hypothesis),
            "collapsed": self.collapsed,
            "rounds": self.rounds,
            "best_round": self.best_round,
            "reseeded": self.reseeded,
            "price": None if self.price is None else {k: _finite(v) for k, v in asdict(self.price).items()},
        }


def _finite(value: Any) -> Any:
    """As JSON reads it back."""
    if isinstance(value, tuple):
        return list(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
