"""What one simulated run is: the deployed run's settings, a seed, and noise that may be left away."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coterie.config import Assignment, Reseed, Selection, Start
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.tasks import Task, TrainingSettings

# Those of ``config.RunSettings``, which the tests compare: what no deployed run accepts is not simulated either.
MOST_HYPOTHESES = 1000
MOST = 2**31 - 1
LARGEST_STEP_SIZE = 2.0**127  # float32, in which clients compute, holds nothing twice as large
# Beyond it a choice is the plain one in all but name, and its price would leave what floating point holds.
LARGEST_SELECTION_EPSILON = 1e12


@dataclass(frozen=True)
class SimulatedRun:
    """One run. The names mean what they mean for ``flower-server`` and ``flower-client``; None takes the task's value.

    ``noise_multiplier`` is ν; 0, which no deployed client accepts, lets updates leave as they are: neither clipped
    nor noised, and without a privacy price. The server weighs updates equally. ``fine_tune_epochs`` above 0 has each
    held-out client train the final hypothesis on in the end, with the task's step size or ``fine_tune_step_size``
    and the task's batches: nothing leaves. ``bfloat16_selection`` has clients choose by losses computed in bfloat16,
    which no deployed client does: faster where the processor has instructions for it, and where two hypotheses are
    nearly as good, sometimes another choice (``benchmarks/simulation.md`` counts them).

    Raises ``CoterieError`` for a value that cannot be used.
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
    assignment: Assignment = Assignment.CLIENT
    selection: Selection = Selection.ARGMIN
    selection_epsilon: float | None = None
    selection_loss_bound: float | None = None
    fine_tune_epochs: int = 0
    fine_tune_step_size: float | None = None
    bfloat16_selection: bool = False

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
            if value is not None:
                _expect_between(name, value, 1, MOST_HYPOTHESES if name == "hypotheses" else MOST)
        for name in ("patience", "fine_tune_epochs"):
            _expect_between(name, getattr(self, name), 0, MOST)
        if not 0 <= self.noise_multiplier < math.inf:
            raise CoterieError(
                f"Expected --noise-multiplier to be 0 or more, and finite, found {self.noise_multiplier}"
            )
        if not 0 <= self.validation_fraction < 1:
            raise CoterieError(f"Expected --validation-fraction from 0 to below 1, found {self.validation_fraction}")
        for name in (
            "clipping_norm",
            "step_size",
            "selection_epsilon",
            "selection_loss_bound",
            "fine_tune_step_size",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise CoterieError(f"Expected {_flag(name)} to be above 0, and finite, found {value}")
        for name in ("step_size", "fine_tune_step_size"):
            if (value := getattr(self, name)) is not None and value > LARGEST_STEP_SIZE:
                raise CoterieError(f"Expected {_flag(name)} to be at most {LARGEST_STEP_SIZE:g}, found {value}")
        if self.selection_epsilon is not None and self.selection_epsilon > LARGEST_SELECTION_EPSILON:
            raise CoterieError(
                f"Expected --selection-epsilon to be at most {LARGEST_SELECTION_EPSILON:g}, found "
                f"{self.selection_epsilon}: --selection argmin is the choice without privacy"
            )
        self._expect_with("selection_epsilon", self.selection is not Selection.ARGMIN)
        self._expect_with("selection_loss_bound", self.selection is Selection.EXPONENTIAL)
        if self.fine_tune_step_size is not None and not self.fine_tune_epochs:
            raise CoterieError("Expected --fine-tune-epochs of at least 1 with --fine-tune-step-size, found 0")

    def _expect_with(self, name: str, needed: bool) -> None:
        """A setting of the private choice is there exactly where the choice needs it."""
        value = getattr(self, name)
        if needed != (value is not None):
            wanted, found = "a" if needed else "no", "none" if value is None else value
            raise CoterieError(f"Expected {wanted} {_flag(name)} with --selection {self.selection}, found {found}")

    def training(self, task: Task) -> TrainingSettings:
        """The local training: this run's values, and the task's for those it leaves open."""
        return TrainingSettings(
            epochs=self.epochs or task.training.epochs,
            step_size=self.step_size or task.training.step_size,
            batch_size=self.batch_size or task.training.batch_size,
        )

    def fine_tuning(self, task: Task) -> TrainingSettings:
        """The local training of the end, as ``flower-client --fine-tune`` does it: the task's, but for epochs."""
        return replace(
            task.training,
            epochs=self.fine_tune_epochs,
            step_size=self.fine_tune_step_size or task.training.step_size,
        )


def check_stack(runs: Sequence[SimulatedRun]) -> None:
    """Runs share tensors only if they differ in nothing but seed, noise multiplier and clipping norm."""
    if not runs:
        raise CoterieError("Expected at least one run to simulate, found none: ask for --seeds 1 or more")
    like = {replace(run, seed=0, noise_multiplier=0.0, clipping_norm=None) for run in runs}
    if len(like) > 1:
        raise CoterieError("Expected stacked runs to differ in seed, noise multiplier and clipping norm only")


def _expect_between(name: str, value: int, least: int, most: int) -> None:
    if value < least:
        raise CoterieError(f"Expected {_flag(name)} to be at least {least}, found {value}")
    if value > most:
        found = value if value < 2**63 else "more"  # of very many digits Python prints none
        raise CoterieError(f"Expected {_flag(name)} to be at most {most}, found {found}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
