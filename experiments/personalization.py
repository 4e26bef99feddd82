"""What training the received hypothesis on, at home and after the run, adds for a hospital that was held out.

    python experiments/personalization.py --data hospital_charges_fy2011_10drgs.csv.xz

Hospital, k × ν × seeds, fixed neighbourhood: each held-out hospital chooses and fine-tunes on half of its rows and is
scored on the other half. Beside it a hospital that uses nothing but that half: it predicts its rows' mean. Writes
experiments/results/personalization/; then run ``experiments/report.py``. The digits' part is in ``femnist.py``.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hospital
import numpy as np
from _results import COLOURS, MARKERS, new_figure, table, wrapped, write_figure, write_result
from _simulations import Record, Simulator, columns, command_line, records, where

from coterie.rng import seeded
from coterie.simulation import SimulatedResult
from coterie.simulation.server_side import Sampler

NAME = "personalization"
HYPOTHESES = hospital.HYPOTHESES
MULTIPLIERS = (0.0, 3.0, 10.0)
EPOCHS = (1, 5, 20, 100)  # of fine-tuning, with the task's step size and batches


def tuned_runs(simulator: Simulator, seeds: int) -> list[Record]:
    """The honest metric before fine-tuning and after, a record for each number of epochs."""
    runs = [
        replace(hospital.BASE, hypotheses=k, noise_multiplier=nu, seed=seed, fine_tune_epochs=epochs)
        for epochs in EPOCHS
        for k in HYPOTHESES
        for nu in MULTIPLIERS
        for seed in range(seeds)
    ]
    return [_record(result) for result in simulator(runs)]


def _record(result: SimulatedResult) -> Record:
    return {
        "k": result.run.hypotheses,
        "nu": result.run.noise_multiplier,
        "epochs": result.run.fine_tune_epochs,
        "seed": result.run.seed,
        "before": result.honest_metric,
        "after": result.fine_tuned_metric,
    }


def alone(simulator: Simulator, seed: int) -> float:
    """The honest metric, in dollars, of held-out hospitals that predict the mean payment of half of their rows.

    Halves are drawn at random, as those of the honest metric are; hospitals with a single row take no part.
    """
    rng, rows = seeded(seed, "alone"), simulator.rows
    errors = []
    for client in Sampler(rows.names, replace(hospital.BASE, seed=seed)).held_out.tolist():
        targets = rng.permutation(rows.client(client).targets[:, 0].double().numpy())
        half = len(targets) // 2
        if half:
            errors.append(float(np.mean((targets[half:] - targets[:half].mean()) ** 2)))
    return float(simulator.task.report(statistics.mean(errors)))


def measure(simulator: Simulator, seeds: int) -> dict[str, Any]:
    """Everything that result.json holds."""
    counts = simulator.rows.counts
    return {
        "rows_of_a_client": float(np.median(counts)),
        "most_rows_of_a_client": int(counts.max()),
        "tuned": columns(tuned_runs(simulator, seeds)),
        "alone": [alone(simulator, seed) for seed in range(seeds)],
    }


def draw(result: dict[str, Any], folder: Path | None) -> None:
    """Error by epochs of fine-tuning, a line for each k, a panel for each ν."""
    found = records(result["tuned"])
    figure, panels = new_figure(len(MULTIPLIERS), height=4.4, share_y=True)
    places = range(len(EPOCHS) + 1)
    for axes, nu in zip(panels, MULTIPLIERS, strict=True):
        for index, k in enumerate(HYPOTHESES):
            lines = _values(found, k, nu)
            middle = [statistics.median(values) for values in lines]
            axes.plot(places, middle, color=COLOURS[index], marker=MARKERS[index], markersize=5, label=f"k = {k}")
            axes.fill_between(
                places, [min(v) for v in lines], [max(v) for v in lines], color=COLOURS[index], alpha=0.15, linewidth=0
            )
        level = statistics.median(result["alone"])
        axes.axhline(level, color="black", linewidth=1, linestyle="--", label="alone: mean of own half")
        axes.set_xticks(places, ["0", *map(str, EPOCHS)])
        axes.set(xlabel="epochs of fine-tuning on half of the rows", title=f"ν = {nu:g}")
    panels[0].set_ylabel("RMSE on the other half (dollars)")
    panels[0].legend(fontsize=9)
    figure.suptitle(f"median and range of {len(result['alone'])} seeds", fontsize=10)
    write_figure(NAME, "hospital.png", figure, folder)


def _values(found: Sequence[Record], k: int, nu: float) -> list[list[float]]:
    """Honest metrics of all seeds: before, and after each number of epochs."""
    before = [record["before"] for record in where(found, k=k, nu=nu, epochs=EPOCHS[0])]
    return [before, *([record["after"] for record in where(found, k=k, nu=nu, epochs=own)] for own in EPOCHS)]


def blocks(result: dict[str, Any]) -> dict[str, str]:
    """The measured parts of the section."""
    found = records(result["tuned"])
    rows = []
    for k in HYPOTHESES:
        for nu in MULTIPLIERS:
            cells = [f"{statistics.median(v):,.0f} ({min(v):,.0f} to {max(v):,.0f})" for v in _values(found, k, nu)]
            rows.append((f"{k}", f"{nu:g}", *cells))
    head = ("k", "ν", "before", *(f"epochs = {epochs}" for epochs in EPOCHS))
    own = result["alone"]
    rows_of_one = result["rows_of_a_client"]
    text = (
        f"A hospital has {rows_of_one:g} rows in the median and at most {result['most_rows_of_a_client']}, so half of "
        f"them are {math.floor(rows_of_one / 2)}. Alone, by the mean of that half, the error is "
        f"{statistics.median(own):,.0f} ({min(own):,.0f} to {max(own):,.0f}) dollars."
    )
    return {"hospital": table(head, rows), "alone": wrapped(text)}


def main() -> None:
    """Run everything and write the result."""
    with command_line(__doc__, data=True) as arguments:
        simulator = Simulator.of("hospital", arguments.data, processes=arguments.processes)
        result = measure(simulator, arguments.seeds)
        write_result(NAME, result, arguments.out)
        draw(result, arguments.out)


if __name__ == "__main__":
    main()
