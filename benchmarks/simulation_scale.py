"""One simulation of many clients, and the price of all of them, in a process of its own. Prints JSON:

python benchmarks/simulation_scale.py --clients 1000000 --sampled 10000 --rounds 50
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
from simulation_workloads import hospitals

from coterie.parameters import layout_of
from coterie.simulation import SimulatedRun, simulate
from coterie.simulation.privacy import mechanism_for, prices_of_all


def resident_mb() -> float:
    """What this process holds now, in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--sampled", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--held-out", type=float, default=0.2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task, rows = hospitals(options.clients)
    run = SimulatedRun(
        rounds=options.rounds,
        clients_per_round=options.sampled,
        validation_fraction=options.held_out,
        validate_every=10,
    )
    with_data = resident_mb()
    start = time.perf_counter()
    (result,) = simulate(task, rows, [run])
    simulated = time.perf_counter() - start
    start = time.perf_counter()
    prices = prices_of_all(mechanism_for(run, task, layout_of(task.build())), result.participations)
    priced = time.perf_counter() - start
    assert prices is not None
    assert result.participations.sum() == options.sampled * options.rounds
    json.dump(
        {
            "clients": options.clients,
            "sampled": options.sampled,
            "rounds": options.rounds,
            "seconds": simulated,
            "seconds_for_prices": priced,
            "prices": len(prices.tight),
            "participated": int((result.participations > 0).sum()),
            "most_releases": int(result.participations.max()),
            "largest_tight": float(prices.tight.max()),
            "mean_tight": float(np.mean(prices.tight)),
            "mb_with_data": with_data,
            "mb_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
