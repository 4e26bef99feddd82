"""Where a simulation computes: on the device of its rows.

The meta device has shapes and no numbers: it runs wherever there is no accelerator, and an operation that mixes it with
the CPU raises. What it cannot do is hand numbers back, which is where every one of these calls must end.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from coterie.errors import CoterieError
from coterie.rng import seeded
from coterie.simulation import SimulatedRun, simulate
from coterie.simulation.engines import BatchedEngine
from coterie.simulation.rows import Rows
from coterie.tasks import ClientData, Task, TrainingSettings


def some_rows(tiny_task: Task) -> Rows:
    shape = tuple(next(tiny_task.build().parameters()).shape[1:])
    rng = seeded(0)
    return Rows.of(
        [
            ClientData(
                f"c{index}",
                torch.tensor(rng.normal(size=(rows, *shape)), dtype=torch.float32),
                torch.tensor(rng.normal(size=(rows, 1)), dtype=torch.float32),
            )
            for index, rows in enumerate((3, 5, 9, 2))
        ]
    )


Call = Callable[[BatchedEngine, np.ndarray, np.ndarray], object]
CALLS: dict[str, Call] = {
    "losses": lambda engine, hypotheses, clients: engine.losses(hypotheses, clients),
    "train": lambda engine, hypotheses, clients: engine.train(
        hypotheses[:, [0] * 4], clients, lambda _: engine._draw_orders(clients, [seeded(1)])
    ),
    "judge": lambda engine, hypotheses, clients: engine.judge(hypotheses, clients, [seeded(2)]),
}


@pytest.mark.parametrize("batch_size", [4, 100])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_everything_is_on_the_device_of_the_rows(tiny_task: Task, call: Call, batch_size: int) -> None:
    rows = some_rows(tiny_task)
    there = replace(rows, inputs=rows.inputs.to("meta"), targets=rows.targets.to("meta"))
    hypotheses = np.zeros((1, 2, sum(p.numel() for p in tiny_task.build().parameters())), np.float32)
    clients = np.arange(4)[None]
    training = TrainingSettings(epochs=2, batch_size=batch_size)
    call(BatchedEngine(tiny_task, rows, training), hypotheses, clients)  # here it works
    with pytest.raises(NotImplementedError, match=r"[Cc]annot copy out of meta tensor"):
        call(BatchedEngine(tiny_task, there, training), hypotheses, clients)


@pytest.mark.parametrize("name", ["meta", "gpu", "cuda:x", "", "cuda:99"])
def test_a_device_that_is_not_there_is_one_line(tiny_task: Task, name: str) -> None:
    with pytest.raises(CoterieError, match="Expected --device to be") as error:
        some_rows(tiny_task).on(name)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_cpus_results(tiny_task: Task) -> None:
    rows = some_rows(tiny_task)
    runs = [SimulatedRun(seed=seed, hypotheses=2, rounds=3, clients_per_round=2) for seed in range(2)]
    for one, other in zip(simulate(tiny_task, rows, runs), simulate(tiny_task, rows.on("cuda"), runs), strict=True):
        np.testing.assert_allclose(one.hypotheses, other.hypotheses, rtol=1e-4, atol=1e-5)
