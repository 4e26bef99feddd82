"""Shared fixtures: a small task of two layers, its rows, and a data holder opened with any settings."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie.client.assembly import data_holder
from coterie.client.participation import DataHolder, Draws
from coterie.config import Assignment, ClientSettings, Weighting
from coterie.protocol import PrivacyProposal, TrainRequest
from coterie.rng import seeded
from coterie.tasks import ClientData, Dataset, DataSource, Task, TrainingSettings, seeded_module


class TinyModel(nn.Module):
    """13 parameters in two layers: ``hidden`` (9) and ``out`` (4)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 3)
        self.out = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """(rows, 2) -> (rows, 1)."""
        outputs: Tensor = self.out(torch.relu(self.hidden(inputs)))
        return outputs


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(dim=-1)


def _nothing_to_read(source: DataSource) -> Dataset:
    raise AssertionError(f"no test reads {source}")


@pytest.fixture
def tiny_task() -> Task:
    """Two layers with different public radii, so that mixing them up shows."""
    return Task(
        name="tiny",
        build=TinyModel,
        loss=_squared,
        score=_squared,
        metric="RMSE",
        higher_is_better=False,
        read=_nothing_to_read,
        initialise=lambda rng: seeded_module(TinyModel, rng),
        clipping_norm={"hidden": 0.5, "out": 0.25},
        training=TrainingSettings(epochs=2, step_size=0.05, batch_size=5),
        report=lambda mean: float(mean**0.5),
    )


@pytest.fixture
def rows() -> ClientData:
    """20 rows of one data holder."""
    rng = seeded(1, "rows")
    inputs = rng.standard_normal((20, 2))
    targets = inputs @ np.array([[1.0], [-2.0]]) + 0.5
    return ClientData("ward 7", torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets, dtype=torch.float32))


def seeded_draws(round_number: int) -> Draws:
    """Noise that a test can draw again: never for real data."""
    return Draws(noise=seeded(7, "noise", round_number), order=seeded(7, "order", round_number))


@pytest.fixture
def open_holder(tmp_path: Path, tiny_task: Task, rows: ClientData) -> Iterator[Callable[..., DataHolder]]:
    """``open_holder(budget=…)``: a data holder under ``tmp_path/state``, closed when the test is over."""
    with ExitStack() as stack:

        def open_one(*, task: Task = tiny_task, data: ClientData = rows, **changes: object) -> DataHolder:
            values: dict[str, object] = {
                "task": task.name,
                "state": tmp_path / "state",
                "noise_multiplier": 3.0,
                "budget": 100.0,
                **changes,
            }
            settings = ClientSettings.model_validate(values)
            return stack.enter_context(data_holder(settings, task, data, seeded_draws))

        yield open_one


@pytest.fixture
def train_request() -> Callable[..., TrainRequest]:
    """``train_request(round=2)``: three hypotheses of 13 parameters for the tiny task."""

    def make(**changes: object) -> TrainRequest:
        values: dict[str, object] = {
            "run": "run-1",
            "round": 1,
            "task": "tiny",
            "hypotheses": seeded(3, "hypotheses").standard_normal((3, 13)).astype(np.float32),
            "assignment": Assignment.CLIENT,
            "weighting": Weighting.EQUAL,
            "training": TrainingSettings(epochs=2, step_size=0.05, batch_size=5),
            "proposal": PrivacyProposal(),
            **changes,
        }
        return TrainRequest(**values)  # type: ignore[arg-type]

    return make
