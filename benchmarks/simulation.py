"""How fast the simulator is, beside a loop over the deployed functions and Apple's pfl. Run it on a quiet machine:

    python benchmarks/simulation.py --data charges.csv.xz --pfl-python pfl-environment/bin/python

It writes benchmarks/simulation.json and, from it, simulation.md; ``--only h f`` measures some cases and keeps the
others. A client-round is one client's choice among k hypotheses, its training, sanitizing and averaging; it is counted
between the end of a simulation's first round and of its last, so that reading, recording and final metrics are
outside. Nobody is held out, and the count of each client's releases is included. ``pfl-requirements.txt`` says how to
make the environment for pfl.

- h: 2,947 clients of 3 to 5 rows of three features, the hospital model (11 parameters), k = 3, U = 100, one epoch in
  batches of 10; everything on one core, the repeats of all rows interleaved. The loop is the deployed client's
  functions, client by client with seeded noise and without a ledger. pfl runs its own simulation of the same rows, with
  a custom algorithm for the choice among k and Gaussian noise on every user's change.
- f: 200 clients of 100 images 28×28, the femnist model (1,206,590 parameters), k = 2, U = 10, one epoch in batches of
  32, on all cores; the loop is in one process and one thread.
- million: 1,000,000 clients of workload h, U = 10,000, 50 rounds, each simulation in a process of its own; seconds are
  of the whole simulation, with the final metrics.
- grid: ``coterie simulate`` on the CMS charges, 4 k × 6 ν × 10 seeds × 150 rounds, with everything that the command
  does.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from simulation_cases import characters_case, hospitals_case
from simulation_tables import page

HERE = Path(__file__).resolve().parent
SIMULATIONS = ((1_000_000, 10_000, 0.2), (1_000_000, 10_000, 0.0), (1_000_000, 1_000, 0.0), (100_000, 10_000, 0.0))
NOISE_MULTIPLIERS = "0,1,2,3,5,10"


def million_case(rounds: int) -> dict[str, Any]:
    """Seconds and memory of simulations of many clients; the first is the workload, the others say what grows."""
    found = []
    for clients, sampled, held_out in SIMULATIONS:
        numbers = ("--clients", clients, "--sampled", sampled, "--rounds", rounds, "--held-out", held_out)
        command = [sys.executable, str(HERE / "simulation_scale.py"), *map(str, numbers)]
        found.append({**json.loads(subprocess.run(command, check=True, capture_output=True).stdout), "held": held_out})
    return {"simulations": found}


def grid_case(data: Path) -> dict[str, Any]:
    """Seconds of the whole command for the paper's hospital grid."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *("simulate", "--task", "hospital", "--data", str(data), "--rounds", "150", "--seeds", "10"),
            *("--sweep", "k=1,3,5,7", "--sweep", f"nu={NOISE_MULTIPLIERS}", "--json", "--out", f"{folder}/grid"),
        ]
        start = time.perf_counter()
        done = subprocess.run(
            [Path(sysconfig.get_path("scripts")) / "coterie", *arguments], check=True, capture_output=True
        )
        seconds = time.perf_counter() - start
    records = json.loads(done.stdout)
    shown = ["coterie", *arguments[:4], "charges.csv.xz", *arguments[5:-1], "DIR"]
    return {"seconds": seconds, "runs": len(records), "command": shlex.join(shown)}


def machine() -> dict[str, Any]:
    """What was measured on."""
    information = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    described = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in information)}
    flags = described.get("flags", "").split()
    return {
        "processor": described.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "bfloat16": [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=("h", "f", "million", "grid"))
    parser.add_argument("--data", type=Path, help="the CMS hospital charges, for grid")
    parser.add_argument("--pfl-python", type=Path, help="a Python that has pfl 0.6.0, for h")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "h": lambda: hospitals_case(options.repeats, options.pfl_python),
        "f": lambda: characters_case(options.repeats),
        "million": lambda: million_case(rounds=50),
        "grid": lambda: grid_case(options.data),
    }
    chosen = options.only or list(cases)
    if "grid" in chosen and options.data is None:
        parser.error("grid needs --data; or leave it out by --only h f million")
    if options.pfl_python is not None and not options.pfl_python.is_file():
        parser.error(f"--pfl-python: no file {options.pfl_python}; benchmarks/pfl-requirements.txt says how to make it")
    file = HERE / "simulation.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in chosen:
        before, start = os.getloadavg()[0], time.perf_counter()
        found[name] = cases[name]()
        found[name] |= {"date": time.strftime("%Y-%m-%d"), "load_before": before, "machine": machine()}
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    text = page(found)
    (HERE / "simulation.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
