"""What ``simulation.py`` measures of workloads H and F."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from simulation_workloads import (
    F_HYPOTHESES,
    F_SAMPLED,
    H_CLIENTS,
    H_HYPOTHESES,
    H_SAMPLED,
    characters,
    hospitals,
)

from coterie.client.selection import best_hypothesis, hypothesis_losses
from coterie.client.training import train
from coterie.mechanisms.layerwise import FixedNeighbourhood
from coterie.parameters import layout_of
from coterie.rng import seeded
from coterie.server.hypotheses import initial_hypotheses
from coterie.simulation import SimulatedRun, simulate
from coterie.simulation.engines import Vectors
from coterie.simulation.privacy import mechanism_for
from coterie.simulation.rows import Rows
from coterie.tasks import Task

HERE = Path(__file__).resolve().parent
H_ROUNDS, PFL_ROUNDS, F_ROUNDS = 300, 30, 12


def hospitals_case(repeats: int, pfl_python: Path | None) -> dict[str, Any]:
    """Client-rounds a second on one core, row by row."""
    task, rows = hospitals(H_CLIENTS)
    with _one_core(), tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "workload.npz"
        hypotheses, _ = initial_hypotheses(task, H_HYPOTHESES, 0, SimulatedRun().start)
        np.savez(
            workload,
            inputs=rows.inputs.numpy(),
            targets=rows.targets.numpy(),
            counts=rows.counts,
            hypotheses=hypotheses,
        )
        cases: dict[str, Callable[[], float]] = {
            "loop over the deployed functions": lambda: _loop(task, rows, H_HYPOTHESES, 300),
            "one run": lambda: _hospital_runs(task, rows, 1),
            "10 seeds in the same tensors": lambda: _hospital_runs(task, rows, 10),
            "30 runs in the same tensors": lambda: _hospital_runs(task, rows, 30),
        }
        if pfl_python is not None:
            cases["pfl 0.6.0"] = lambda: _pfl(task, workload, pfl_python)
        return {"client_rounds_a_second": _interleaved(cases, repeats)}


def characters_case(repeats: int) -> dict[str, Any]:
    """Client-rounds a second on all cores, and how often a choice in bfloat16 is another one."""
    task, rows = characters()
    ends: dict[bool, Vectors] = {}

    def run(bfloat16: bool) -> float:
        settings = SimulatedRun(
            hypotheses=F_HYPOTHESES,
            rounds=F_ROUNDS,
            clients_per_round=F_SAMPLED,
            validation_fraction=0.0,
            bfloat16_selection=bfloat16,
        )
        times: list[float] = []
        (result,) = simulate(task, rows, [settings], on_round=lambda _: times.append(time.perf_counter()))
        ends[bfloat16] = result.hypotheses
        return F_SAMPLED * (len(times) - 1) / (times[-1] - times[0])

    cases: dict[str, Callable[[], float]] = {
        "loop over the deployed functions, one thread": lambda: _loop(task, rows, F_HYPOTHESES, 20),
        "a process a core, float32": lambda: run(False),
        "a process a core, choices in bfloat16": lambda: run(True),
    }
    found = _interleaved(cases, repeats, warm=False)
    start, _ = initial_hypotheses(task, F_HYPOTHESES, 0, SimulatedRun().start)
    return {
        "client_rounds_a_second": found,
        "other_choices": {
            "the hypotheses of the start": _other_choices(task, rows, start),
            f"after {F_ROUNDS} rounds": _other_choices(task, rows, ends[False]),
        },
    }


def _interleaved(
    cases: Mapping[str, Callable[[], float]], repeats: int, *, warm: bool = True
) -> dict[str, list[float]]:
    if warm:
        for case in cases.values():
            case()  # recording, and caches
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            found[name].append(case())
            print(f"  {name}: {found[name][-1]:,.1f} client-rounds/s", flush=True)
    return found


@contextmanager
def _one_core() -> Iterator[None]:
    """This process, and those that it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _hospital_runs(task: Task, rows: Rows, seeds: int) -> float:
    runs = [
        SimulatedRun(seed=seed, rounds=H_ROUNDS, clients_per_round=H_SAMPLED, validation_fraction=0.0)
        for seed in range(seeds)
    ]
    times: list[float] = []
    simulate(task, rows, runs, on_round=lambda _: times.append(time.perf_counter()))
    return seeds * H_SAMPLED * (len(times) - 1) / (times[-1] - times[0])


def _pfl(task: Task, workload: Path, python: Path) -> float:
    training, mechanism = task.training, mechanism_for(SimulatedRun(), task, layout_of(task.build()))
    assert mechanism is not None
    assert isinstance(mechanism.neighbourhood, FixedNeighbourhood)
    numbers = {
        "rounds": PFL_ROUNDS,
        "sampled": H_SAMPLED,
        "step-size": training.step_size,
        "batch-size": training.batch_size,
        "noise-multiplier": SimulatedRun().noise_multiplier,
    }
    command = [str(python), str(HERE / "pfl_program.py"), str(workload)]
    command += [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
    command += ["--radii", *map(str, mechanism.neighbourhood.radii)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return float(json.loads(done.stdout)["client_rounds_a_second"])


def _loop(task: Task, rows: Rows, k: int, clients: int) -> float:
    model = task.build()
    layout = layout_of(model)
    mechanism = mechanism_for(SimulatedRun(), task, layout)
    assert mechanism is not None
    hypotheses, _ = initial_hypotheses(task, k, 0, SimulatedRun().start)
    rng = seeded(2)
    start = time.perf_counter()
    for index in range(clients):
        data = rows.client(index)
        chosen = hypotheses[best_hypothesis(hypothesis_losses(task, model, hypotheses, layout, data))]
        trained = train(task, model, chosen, layout, data, task.training, rng=rng)
        mechanism.release(trained - chosen, rng=rng)
    return clients / (time.perf_counter() - start)


def _other_choices(task: Task, rows: Rows, hypotheses: Vectors) -> dict[str, Any]:
    """Of how many clients bfloat16 takes another hypothesis, and by how much its float32 loss is the larger."""
    model = task.build()
    layout = layout_of(model)
    excess: list[float] = []
    losses = np.empty((len(rows.names), len(hypotheses)))
    for index in range(len(rows.names)):
        data = rows.client(index)
        losses[index] = hypothesis_losses(task, model, hypotheses, layout, data)
        with torch.autocast("cpu", torch.bfloat16):
            other = best_hypothesis(hypothesis_losses(task, model, hypotheses, layout, data))
        best = best_hypothesis(losses[index])
        if other != best:
            excess.append(float(losses[index, other] / losses[index, best] - 1))
    gaps = np.sort(losses, axis=1)
    return {
        "clients": len(losses),
        "other": len(excess),
        "largest_excess_loss": max(excess, default=0.0),
        "median_gap": float(np.median(gaps[:, 1] / gaps[:, 0] - 1)),
    }
