"""Models whose training draws random numbers: the same seed gives the same run, alone and beside others."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie import simulation
from coterie.parameters import layout_of
from coterie.simulation import SimulatedRun, is_batched, simulate
from coterie.simulation.rows import Rows
from coterie.tasks import ClientData, Task, seeded_module
from tests.simulation.conftest import hospital_rows


class Dropping(nn.Module):
    """Dropout called as a function, as no scan of modules would see it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """(rows, 3) -> (rows, 1)."""
        outputs: Tensor = self.linear(nn.functional.dropout(inputs, 0.5, self.training))
        return outputs


def layered() -> nn.Module:
    """Dropout as a module."""
    return nn.Sequential(nn.Linear(3, 4), nn.AlphaDropout(0.3), nn.Linear(4, 1))


def plain() -> nn.Module:
    """The same without dropout that drops anything."""
    return nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 1))


def task_of(build: Callable[[], nn.Module], brisk: tuple[Task, list[ClientData]]) -> Task:
    return replace(brisk[0], clipping_norm=0.05, build=build, initialise=lambda rng: seeded_module(build, rng))


RUNS = [
    SimulatedRun(seed=seed, hypotheses=2, rounds=3, clients_per_round=4, noise_multiplier=nu)
    for seed, nu in ((1, 3.0), (2, 0.0), (1, 0.0))
]


@pytest.mark.parametrize("build", [Dropping, layered])
def test_a_run_with_dropout_is_the_same_twice_and_alone(
    build: Callable[[], nn.Module], brisk: tuple[Task, list[ClientData]]
) -> None:
    task, rows = task_of(build, brisk), Rows.of(hospital_rows())
    assert not is_batched(task, layout_of(build()), rows)
    before = torch.get_rng_state()
    together = simulate(task, rows, RUNS)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)  # what else the process draws plays no part
    for first, again in zip(together, simulate(task, rows, RUNS), strict=True):
        assert np.array_equal(first.hypotheses, again.hypotheses)
    (alone,) = simulate(task, rows, RUNS[2:])
    assert np.array_equal(alone.hypotheses, together[2].hypotheses)


def test_without_dropout_clients_are_batched(brisk: tuple[Task, list[ClientData]]) -> None:
    assert is_batched(task_of(plain, brisk), layout_of(plain()), Rows.of(hospital_rows()))


def test_where_dropout_must_be_batched_the_same_stack_is_repeatable(
    brisk: tuple[Task, list[ClientData]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator."""
    task, rows = task_of(Dropping, brisk), Rows.of(hospital_rows())
    monkeypatch.setattr(simulation, "is_batched", lambda *_: True)
    before = torch.get_rng_state()
    first = simulate(task, rows, RUNS)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    for one, again in zip(first, simulate(task, rows, RUNS), strict=True):
        assert np.array_equal(one.hypotheses, again.hypotheses)
    (other,) = simulate(task, rows, [replace(RUNS[0], seed=5)])
    assert not np.array_equal(other.hypotheses, first[0].hypotheses)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_repeats_a_stack_with_dropout_and_keeps_its_generator(brisk: tuple[Task, list[ClientData]]) -> None:
    task, rows = task_of(Dropping, brisk), Rows.of(hospital_rows()).on("cuda")
    before = torch.cuda.get_rng_state()
    first = simulate(task, rows, RUNS)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.rand(7, device="cuda")
    for one, again in zip(first, simulate(task, rows, RUNS), strict=True):
        np.testing.assert_allclose(one.hypotheses, again.hypotheses, rtol=1e-4, atol=1e-5)
