"""Many clients: memory is the rows', and what grows with the clients of one round."""

import subprocess
import sys
from pathlib import Path

import pytest

# Prints how many MB the peak of a simulation is above what the process held with the rows.
_PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import torch
from coterie.parameters import layout_of
from coterie.simulation import SimulatedRun, simulate
from coterie.simulation.privacy import mechanism_for, prices_of_all
from coterie.simulation.rows import Rows
from coterie.tasks import load_task

def megabytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

clients, sampled = map(int, sys.argv[1:])
torch.set_num_threads(1)
task, counts = load_task("hospital"), np.full(clients, 4)
generator = torch.Generator().manual_seed(1)
inputs, targets = (torch.rand((4 * clients, width), generator=generator) for width in (3, 1))
rows = Rows(tuple(f"h{i}" for i in range(clients)), inputs, targets, np.cumsum(counts) - counts, counts)
run = SimulatedRun(rounds=3, clients_per_round=sampled, validation_fraction=0.0, epochs=1)
simulate(task, rows.part(np.arange(9), np.ones((9, 4), bool)), [replace(run, clients_per_round=9)])  # imports
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
held = megabytes("VmRSS")
(result,) = simulate(task, rows, [run])
prices = prices_of_all(mechanism_for(run, task, layout_of(task.build())), result.participations)
assert result.participations.sum() == 3 * sampled
assert prices.tight.shape == (clients,)
assert (prices.tight[result.participations == 0] == 0).all()
assert (prices.tight[result.participations > 0] > 0).all()
print(megabytes("VmHWM") - held)
"""


def _peak_mb(clients: int, sampled: int) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(clients), str(sampled)], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of memory")
def test_memory_grows_with_a_rounds_clients_and_not_with_all() -> None:
    few, many, more_a_round = _peak_mb(10_000, 1_000), _peak_mb(400_000, 1_000), _peak_mb(400_000, 50_000)
    # Of each client 30 to 45 bytes: its place in the order that rounds are sampled from, and its count of releases. One
    # vector of parameters of each would be 44 more.
    assert many - few < 390_000 * 60 / 2**20
    # The measure sees memory: 49,000 more clients a round have parameters, batches and noise, 1,000 bytes each.
    assert more_a_round - many > 25
