"""What one simulated run is: the deployed run's settings, a seed, and noise that may be left away."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coterie.config import Reseed, Start
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.tasks import Task, TrainingSettings


@dataclass(frozen=True)
class SimulatedRun:
    """One run. The names mean what they mean for ``flower-server``; None takes the task's value.

    ``noise_multiplier`` is ν; 0, which no deployed client accepts, lets updates leave as they are: neither clipped
    nor noised, and without a privacy price. The server is told each update's hypothesis (assignment = client) and
    weighs updates equally. Raises ``CoterieError`` for a value that cannot be used.
    """

    seed: int = 0
    hypotheses: int = 3
    noise_multiplier: float = 3.0
    rounds: int = 20
    clients_per_round: int = 10
    validation_fraction: float = 0.2
    validate_every: int = 5
    patience: int = 0
    neighbourhood: Neighbourhood = Neighbourhood.FIXED
    clipping_norm: float | None = None
    epochs: int | None = None
    step_size: float | None = None
    batch_size: int | None = None
    start: Start = Start.INDEPENDENT
    reseed: Reseed = Reseed.ON
    reseed_after: int = 5

    def __post_init__(self) -> None:
        for name in (
            "hypotheses",
            "rounds",
            "clients_per_round",
            "validate_every",
            "epochs",
            "batch_size",
            "reseed_after",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CoterieError(f"Expected {_flag(name)} to be at least 1, found {value}")
        if self.patience < 0:
            raise CoterieError(f"Expected --patience to be at least 0, found {self.patience}")
        if not 0 <= self.noise_multiplier < math.inf:
            raise CoterieError(
                f"Expected --noise-multiplier to be 0 or more, and finite, found {self.noise_multiplier}"
            )
        if not 0 <= self.validation_fraction < 1:
            raise CoterieError(f"Expected --validation-fraction from 0 to below 1, found {self.validation_fraction}")
        for name in ("clipping_norm", "step_size"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise CoterieError(f"Expected {_flag(name)} to be above 0, and finite, found {value}")

    def training(self, task: Task) -> TrainingSettings:
        """The local training: this run's values, and the task's for those it leaves open."""
        return TrainingSettings(
            epochs=self.epochs or task.training.epochs,
            step_size=self.step_size or task.training.step_size,
            batch_size=self.batch_size or task.training.batch_size,
        )


def check_stack(runs: Sequence[SimulatedRun]) -> None:
    """Runs share tensors only if they differ in nothing but seed, noise multiplier and clipping norm."""
    if not runs:
        raise CoterieError("Expected at least one run to simulate, found none: ask for --seeds 1 or more")
    like = {replace(run, seed=0, noise_multiplier=0.0, clipping_norm=None) for run in runs}
    if len(like) > 1:
        raise CoterieError("Expected stacked runs to differ in seed, noise multiplier and clipping norm only")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
