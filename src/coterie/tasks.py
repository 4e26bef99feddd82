"""A task: a model, its loss and metric, and how one data holder's file is read. Nothing else is task-specific."""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from coterie.errors import CoterieError


@dataclass(frozen=True)
class ClientData:
    """The rows of one data holder. ``inputs`` is (rows, …) float32; ``targets`` is (rows, …) float32 or int64."""

    name: str
    inputs: Tensor
    targets: Tensor

    @property
    def rows(self) -> int:
        """How many rows the data holder has."""
        return int(self.inputs.shape[0])


@dataclass(frozen=True)
class DataSource:
    """Where a data holder's rows come from, as the command line gave it."""

    path: Path | None = None  # None: a task that brings its own data
    partition_by: str | None = None  # None: the whole file is one data holder
    parts: int = 1  # how many data holders to deal to, for tasks that deal by index
    strict: bool = False  # a row that cannot be used is an error instead of counted and skipped


@dataclass(frozen=True)
class Dataset:
    """Data holders in a fixed order that does not depend on how many are asked for, and what was skipped."""

    clients: tuple[ClientData, ...]
    notes: tuple[str, ...] = ()  # one line each, for people: "12 rows skipped: ZIP 00000 does not resolve"


@dataclass(frozen=True)
class TrainingSettings:
    """Local SGD: ``epochs`` passes in shuffled batches of ``batch_size`` rows with step size ``step_size``."""

    epochs: int = 1
    step_size: float = 0.1
    batch_size: int = 10


@dataclass(frozen=True)
class PredictionTable:
    """Rows of a file that a saved model is asked about: ``columns`` are repeated beside the predictions."""

    inputs: Tensor
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """Everything that coterie must know about a learning problem.

    ``loss`` and ``score`` map (outputs, targets) to one value per row, shape (rows,). The loss is what is minimised
    and what a hypothesis is chosen by. The score's mean over a client's rows, then over clients, is turned into the
    figure that people read by ``report`` (an RMSE takes the root there). ``clipping_norm`` is the proposed public
    radius C_l of a layer's update: one number for every layer, or one per layer name.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], Tensor]
    metric: str  # for people, with its unit: "RMSE in dollars"
    higher_is_better: bool
    read: Callable[[DataSource], Dataset]
    initialise: Callable[[np.random.Generator], nn.Module]  # one random hypothesis
    clipping_norm: float | Mapping[str, float]
    training: TrainingSettings = TrainingSettings()
    report: Callable[[float], float] = float
    partitions: tuple[str, ...] = ("index",)
    needs_data: bool = False  # whether --data must name a file
    read_inputs: Callable[[Path], PredictionTable] | None = None  # for `coterie predict`
    decode: Callable[[Tensor], Sequence[object]] | None = None  # outputs -> one prediction per row
    output_name: str = "prediction"


BUILT_IN = {
    "synthetic": "coterie.datasets.synthetic:task",
    "digits": "coterie.datasets.digits:task",
    "hospital": "coterie.datasets.hospital:task",
    "femnist": "coterie.datasets.femnist:task",
    "mnist": "coterie.datasets.mnist:task",
}


def load_task(name: str) -> Task:
    """The built-in task called ``name``, or a user's own as ``package.module:attribute``."""
    target = BUILT_IN.get(name, name)
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", target):
        near = get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise CoterieError(
            f"Expected task to be one of {', '.join(BUILT_IN)} or package.module:attribute, found {name!r}{hint}"
        )
    module_name, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise CoterieError(
            f"Expected an importable task at {target!r}, found: {error}; is its folder on PYTHONPATH?"
        ) from error
    if not isinstance(found, Task):
        raise CoterieError(f"Expected {target!r} to be a coterie.tasks.Task, found {type(found).__name__}")
    # A user's task goes by the name it is loaded by: servers, clients and saved models then mean the same one.
    return found if name in BUILT_IN else replace(found, name=target)


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def seeded_module(build: Callable[[], AnyModule], rng: np.random.Generator) -> AnyModule:
    """A module with torch's default initial weights, drawn from ``rng`` without touching torch's global state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**63 - 1)))
        return build()
