"""The experiments are programs beside the package: their folder goes where imports are looked for."""

import re
import sys
from pathlib import Path

import pytest
import torch

from coterie.rng import seeded
from coterie.simulation.rows import Rows
from coterie.tasks import ClientData

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

if not EXPERIMENTS.is_dir():
    pytest.skip("the experiments are in the source tree, and this is not one", allow_module_level=True)
sys.path.insert(0, str(EXPERIMENTS))

DOCUMENT = EXPERIMENTS.parent / "docs" / "experiments.md"
LEVELS = (0.4, 1.4)  # two price levels, in units of 10,000 dollars


@pytest.fixture(scope="session")
def hospitals() -> Rows:
    """40 hospitals of 1 to 4 rows in the hospital task's shape: even ones at one price level, odd ones at another."""
    rng = seeded(3, "hospitals")
    clients = []
    for index in range(40):
        count = 1 + index // 2 % 4
        inputs = rng.uniform(-1, 1, (count, 3))
        targets = LEVELS[index % 2] + 0.02 * rng.normal(size=(count, 1))
        clients.append(
            ClientData(
                f"h{index}", torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets, dtype=torch.float32)
            )
        )
    return Rows.of(clients)


def marked(name: str) -> set[str]:
    """The blocks of an experiment that have a place in docs/experiments.md."""
    return set(re.findall(rf"<!-- {name}/([\w-]+): begin -->", DOCUMENT.read_text(encoding="utf-8")))
