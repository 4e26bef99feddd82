"""Tasks with ragged clients, and draws that can be replayed to the deployed functions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from coterie.rng import seeded
from coterie.tasks import ClientData, Task, load_task

RAGGED = (1, 2, 3, 7, 10, 11, 25, 41, 4, 150)


def hospital_rows(counts: Sequence[int] = RAGGED, dtype: torch.dtype = torch.float32) -> list[ClientData]:
    """Synthetic rows in the shape of the hospital task: three inputs, one target, two price levels."""
    rng = seeded(5, "hospital-shaped")
    clients = []
    for index, count in enumerate(counts):
        inputs = rng.uniform(-1, 1, (count, 3))
        targets = (
            0.6 + 0.5 * (index % 2) + inputs @ np.array([[0.1], [0.2], [-0.1]]) + 0.05 * rng.normal(size=(count, 1))
        )
        clients.append(ClientData(f"h{index}", torch.tensor(inputs, dtype=dtype), torch.tensor(targets, dtype=dtype)))
    return clients


def digit_rows(counts: Sequence[int] = RAGGED, dtype: torch.dtype = torch.float32) -> list[ClientData]:
    """Synthetic rows in the shape of the digits task: 64 inputs, a class."""
    rng = seeded(5, "digit-shaped")
    return [
        ClientData(
            f"d{index}",
            torch.tensor(rng.uniform(0, 1, (count, 64)), dtype=dtype),
            torch.tensor(rng.integers(0, 10, count)),
        )
        for index, count in enumerate(counts)
    ]


@pytest.fixture(params=["hospital", "digits"])
def shaped(request: pytest.FixtureRequest) -> tuple[Task, Callable[..., list[ClientData]]]:
    """A task, and what makes rows in its shape."""
    return load_task(request.param), hospital_rows if request.param == "hospital" else digit_rows


def _brisk(task: Task) -> Task:
    return replace(task, training=replace(task.training, epochs=3, batch_size=4))


@pytest.fixture
def brisk_each(shaped: tuple[Task, Callable[..., list[ClientData]]]) -> tuple[Task, list[ClientData]]:
    """Each task, training 3 epochs in batches of 4, and its ragged clients."""
    task, make = shaped
    return _brisk(task), make()


@pytest.fixture
def brisk() -> tuple[Task, list[ClientData]]:
    """The hospital task, training 3 epochs in batches of 4, and its ragged clients."""
    return _brisk(load_task("hospital")), hospital_rows()


class ReplayedNoise:
    """Prepared draws, handed out in the order in which a mechanism asks: normals and a gamma for each layer.

    Before them, for a private choice, one uniform.
    """

    def __init__(
        self, normals: NDArray[np.float64], gammas: NDArray[np.float64], uniforms: Sequence[float] = ()
    ) -> None:
        self._uniforms = iter(uniforms)
        self._normals = normals
        self._gammas: Iterator[float] = iter(gammas.tolist())
        self._at = 0

    def random(self, size: int | None = None) -> Any:
        assert size is None
        return next(self._uniforms)

    def standard_normal(self, *, out: NDArray[np.float64]) -> NDArray[np.float64]:
        out[:] = self._normals[self._at : self._at + out.size]
        self._at += out.size
        return out

    def standard_gamma(self, shape: float) -> float:
        return next(self._gammas)


class ReplayedOrder:
    """Prepared permutations, one an epoch, in place of a generator."""

    def __init__(self, permutations: Sequence[NDArray[np.int64]]) -> None:
        self._permutations = iter(permutations)

    def integers(self, high: int) -> int:
        return 0

    def permutation(self, rows: int) -> Any:
        found = next(self._permutations)
        assert sorted(found) == list(range(rows))
        return found
