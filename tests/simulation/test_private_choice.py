"""Batched private choices: the deployed mechanisms' law and, for the same draws, their numbers."""

from dataclasses import replace

import numpy as np
import pytest

from coterie.mechanisms.selection import ExponentialSelection, RandomizedArgmin
from coterie.parameters import layout_of
from coterie.rng import seeded
from coterie.simulation.engines import BatchedEngine
from coterie.simulation.private_choice import Mechanism, PrivateChoice, probabilities
from coterie.simulation.rows import Rows
from coterie.simulation.workers import workers
from coterie.tasks import ClientData, Task

MECHANISMS = (RandomizedArgmin(1.5), ExponentialSelection(4.0, 2.0))


class OneUniform:
    """A noise source with a single prepared uniform."""

    def __init__(self, uniform: float) -> None:
        self._uniform = uniform

    def random(self) -> float:
        return self._uniform


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_choices_are_the_deployed_mechanisms_for_the_same_draws(mechanism: Mechanism, k: int) -> None:
    losses = 3 * seeded(1).standard_normal((2, 3000, k))  # below 0, inside, and above the bound
    losses[0, 0], losses[0, 1, 0], losses[1, 0, -1] = np.nan, np.inf, -np.inf
    losses[1, 1] = 0.5  # ties
    uniforms = seeded(2).random((2, 3000))
    uniforms[0, :2] = 0.0, 1 - 2.0**-53
    found = PrivateChoice(mechanism, uniforms)(losses)
    laws = probabilities(mechanism, losses)
    for run in range(2):
        for place in range(3000):
            own = losses[run, place]
            expected = mechanism(own, rng=OneUniform(uniforms[run, place]))  # type: ignore[arg-type]
            assert found[run, place] == expected
            np.testing.assert_allclose(laws[run, place], mechanism.probabilities(own), rtol=1e-14)
    assert len(np.unique(found)) == k
    assert k == 1 or (found != np.argmin(losses, axis=-1)).any()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_both_engines_train_from_the_private_choice(mechanism: Mechanism, brisk: tuple[Task, list[ClientData]]) -> None:
    task, clients = brisk
    task = replace(task, training=replace(task.training, step_size=1e-3))  # stays near where it started
    model, rows = task.build(), Rows.of(clients)
    layout = layout_of(model)
    hypotheses = seeded(1).standard_normal((1, 3, layout.size)).astype(np.float32)
    sampled = np.arange(10)[None]
    choice = PrivateChoice(mechanism, seeded(2).random((1, 10)))
    batched = BatchedEngine(task, rows, task.training)
    losses = batched.losses(hypotheses, sampled)
    expected = choice(losses)
    assert (expected != np.argmin(losses, axis=-1)).any()
    with workers(task, model, layout, rows, task.training, k=3, sampled=10) as by_workers:
        for engine in (batched, by_workers):
            chosen, trained = engine.choose_and_train(hypotheses, sampled, [seeded(3)], choice)
            assert np.array_equal(chosen, expected)
            gaps = np.linalg.norm(trained[0, :, None] - hypotheses[0], axis=-1)
            assert np.array_equal(np.argmin(gaps, axis=-1), expected[0])
