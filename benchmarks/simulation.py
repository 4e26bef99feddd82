"""Client-rounds a second of the simulator on workload H. Run by hand on a quiet machine, in one core:

    taskset -c 0 python benchmarks/simulation.py

Workload H: 2,947 clients of 3 to 5 rows with three features, the hospital model (11 parameters), k = 3, U = 100, one
epoch in batches of 10, noise and the count of each client's releases included, no validation. A client-round is one
client's choice among k, training, sanitizing and averaging. Each line is the median of several simulations of the
rounds alone: reading, recording and the final metrics are outside. The loop is the deployed client's functions, called
client by client with seeded noise and without a ledger, on the same rows.
"""

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from coterie.client.selection import best_hypothesis, hypothesis_losses
from coterie.client.training import train
from coterie.parameters import layout_of
from coterie.rng import seeded
from coterie.simulation import SimulatedRun, simulate
from coterie.simulation.privacy import mechanism_for
from coterie.simulation.rows import Rows
from coterie.tasks import ClientData, Task, load_task

CLIENTS, U = 2947, 100


def workload() -> tuple[Task, Rows]:
    """The hospital task in one epoch, and synthetic rows in its shape."""
    rng = seeded(1, "workload H")
    clients = []
    for index in range(CLIENTS):
        rows = int(rng.integers(3, 6))
        inputs = rng.uniform(-1, 1, (rows, 3))
        targets = (
            0.6 + 0.5 * (index % 3) + inputs @ np.array([[0.1], [0.2], [-0.1]]) + 0.05 * rng.normal(size=(rows, 1))
        )
        clients.append(
            ClientData(
                f"h{index}", torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets, dtype=torch.float32)
            )
        )
    task = load_task("hospital")
    return replace(task, training=replace(task.training, epochs=1)), Rows.of(clients)


def rounds_per_second(task: Task, rows: Rows, seeds: int, rounds: int) -> float:
    """Client-rounds a second between the first and the last round of a simulation."""
    runs = [
        SimulatedRun(seed=seed, rounds=rounds, clients_per_round=U, validation_fraction=0.0) for seed in range(seeds)
    ]
    times: list[float] = []
    simulate(task, rows, runs, on_round=lambda _: times.append(time.perf_counter()))
    return seeds * U * (len(times) - 1) / (times[-1] - times[0])


def loop_per_second(task: Task, rows: Rows, clients: int) -> float:
    """Client-rounds a second of the deployed functions in a Python loop."""
    model = task.build()
    layout = layout_of(model)
    mechanism = mechanism_for(SimulatedRun(), task, layout)
    assert mechanism is not None
    hypotheses = 0.3 * seeded(1).standard_normal((3, layout.size)).astype(np.float32)
    rng = seeded(2)
    start = time.perf_counter()
    for index in range(clients):
        data = rows.client(index)
        chosen = hypotheses[best_hypothesis(hypothesis_losses(task, model, hypotheses, layout, data))]
        trained = train(task, model, chosen, layout, data, task.training, rng=rng)
        mechanism.release(trained - chosen, rng=rng)
    return clients / (time.perf_counter() - start)


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description="Client-rounds a second of the simulator on workload H.")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task, rows = workload()
    cases = {
        "loop over the deployed functions": lambda: loop_per_second(task, rows, 300),
        "one run": lambda: rounds_per_second(task, rows, 1, options.rounds),
        "10 seeds stacked": lambda: rounds_per_second(task, rows, 10, options.rounds),
        "30 runs stacked": lambda: rounds_per_second(task, rows, 30, options.rounds),
    }
    first = None
    for name, case in cases.items():
        case()  # recording, and caches
        found = statistics.median(case() for _ in range(options.repeats))
        first = first or found
        print(f"{name:34} {found:10,.0f} client-rounds/s  {found / first:7.1f} x")


if __name__ == "__main__":
    main()
