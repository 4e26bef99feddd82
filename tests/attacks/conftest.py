"""Digits of 8×8 pixels, which need no download, and helpers to attack them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from coterie.attacks.models import AuditedModel, audited_model
from coterie.attacks.observation import Observation, observe
from coterie.attacks.threat_model import Rows, ThreatModel, threat_for
from coterie.rng import seeded
from coterie.tasks import ClientData, load_task

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits() -> Rows:
    """1,797 rows of 64 pixels in [0, 1]; the first 800 are attacked, the others are public."""
    bunch = load_digits()
    inputs = torch.tensor(bunch.images.reshape(-1, 64) / 16, dtype=torch.float32)
    return Rows(inputs, torch.tensor(bunch.target, dtype=torch.int64))


@pytest.fixture(scope="session")
def public(digits: Rows) -> Rows:
    return Rows(digits.inputs[800:], digits.targets[800:])


@pytest.fixture(scope="session")
def rows(digits: Rows) -> Callable[..., ClientData]:
    """``rows(3, 2)``: two rows from the third pair on, of one data holder."""

    def take(index: int, count: int = 1) -> ClientData:
        own = slice(index * count, (index + 1) * count)
        return ClientData("someone", digits.inputs[own], digits.targets[own])

    return take


@pytest.fixture(scope="session")
def model(digits: Rows) -> Callable[[str], AuditedModel]:
    """``model("lenet")`` or ``model("twin")`` (softmax regression) for digits."""
    sample = ClientData("sample", digits.inputs[:1], digits.targets[:1])
    built = {name: audited_model(load_task("digits"), sample, name) for name in ("lenet", "twin")}
    return built.__getitem__


@pytest.fixture(scope="session")
def see(public: Rows) -> Callable[..., tuple[Observation, ThreatModel]]:
    """``see(model, rows, ν, …)``: what the server received, and its threat model with public rows."""

    def look(
        model: AuditedModel,
        data: ClientData,
        nu: float,
        *,
        init: str = "dlg",
        rounds: int = 1,
        moving: bool = False,
        seed: int = 0,
        **settings: object,
    ) -> tuple[Observation, ThreatModel]:
        starts = [model.initial(init, rng=seeded(seed, "start", t)) for t in range(rounds if moving else 1)]
        threat = threat_for(model, nu, public=public, batch_size=data.rows, **settings)  # type: ignore[arg-type]
        sent = np.stack(starts)[:, None] if moving else starts[0]
        return observe(model, data, sent, threat, seed=seed, rounds=rounds), threat

    return look


@pytest.fixture(scope="session")
def femnist_digits() -> Path:
    """Handwritten digits of 28×28 pixels, when they are there."""
    folder = Path(os.environ.get("COTERIE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
    path = folder / "femnist_digits.npz"
    if not path.is_file():
        pytest.skip(f"no femnist_digits.npz in {folder} (COTERIE_TEST_DATA names another folder)")
    return path
