"""What privacy costs in accuracy: the error after a run against what the run cost its most active client.

    python experiments/utility.py --data hospital_charges_fy2011_10drgs.csv.xz

Hospital (k = 5, after 20, 50 and 150 rounds) and synthetic (k = 2, 300 rounds), relative and fixed neighbourhood, over
ν. Nothing is tuned for a ν: radii, step size and epochs are the same at all. Writes experiments/results/utility/; then
run ``experiments/report.py``.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hospital
import synthetic
from _results import COLOURS, MARKERS, new_figure, rounded_up, table, write_figure, write_result
from _simulations import Record, Simulator, columns, command_line, records, where

from coterie.config import Reseed
from coterie.mechanisms.events import Neighbourhood
from coterie.simulation import SimulatedResult, SimulatedRun

NAME = "utility"
MULTIPLIERS = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0, 100.0, 200.0, 300.0)
HOSPITAL = replace(hospital.BASE, hypotheses=5)
ROUNDS = (20, 50, 150)
SYNTHETIC = replace(synthetic.PAPER, patience=0, reseed=Reseed.ON)
DIVERGED = 100_000  # an error that no digits are worth
LEVELS = (100.0, 30.0, 10.0, 3.0, 1.0)  # of ε, for the table


def hospital_runs(seeds: int) -> list[SimulatedRun]:
    """The fixed neighbourhood after each number of rounds, the relative one after the most; and k = 1."""
    plans = [(Neighbourhood.FIXED, rounds, HOSPITAL.hypotheses) for rounds in ROUNDS]
    plans += [(Neighbourhood.RELATIVE, ROUNDS[-1], HOSPITAL.hypotheses), (Neighbourhood.FIXED, ROUNDS[-1], 1)]
    return [
        replace(HOSPITAL, neighbourhood=kind, rounds=rounds, hypotheses=k, noise_multiplier=nu, seed=seed)
        for kind, rounds, k in plans
        for nu in MULTIPLIERS
        for seed in range(seeds)
    ]


def synthetic_runs(seeds: int) -> list[SimulatedRun]:
    """Both neighbourhoods, two hypotheses; and one model for all with the fixed neighbourhood."""
    plans = [(Neighbourhood.FIXED, 2), (Neighbourhood.RELATIVE, 2), (Neighbourhood.FIXED, 1)]
    return [
        replace(
            SYNTHETIC,
            neighbourhood=kind,
            clipping_norm=synthetic.RADIUS if kind is Neighbourhood.FIXED else None,
            hypotheses=k,
            noise_multiplier=nu,
            seed=seed,
        )
        for kind, k in plans
        for nu in MULTIPLIERS
        for seed in range(seeds)
    ]


def _record(simulator: Simulator, result: SimulatedResult) -> Record:
    run, releases = result.run, int(result.participations.max())
    prices = simulator.prices(run, releases)
    formal = run.neighbourhood is Neighbourhood.FIXED
    return {
        "neighbourhood": run.neighbourhood.value,
        "k": run.hypotheses,
        "rounds": run.rounds,
        "nu": run.noise_multiplier,
        "seed": run.seed,
        "metric": result.metric,
        "honest": result.honest_metric,
        "loss": min(record.loss for record in result.history),
        "releases": releases,
        "heuristic": prices.get("pure"),
        "tight": prices.get("tight") if formal else None,
        "local_tight": prices.get("local_tight") if formal else None,
    }


def measure(hospitals: Simulator, users: Simulator, seeds: int) -> dict[str, Any]:
    """Everything that result.json holds."""
    return {
        "hospital": columns([_record(hospitals, result) for result in hospitals(hospital_runs(seeds))]),
        "synthetic": columns([_record(users, result) for result in users(synthetic_runs(seeds))]),
    }


def curve(found: Sequence[Record], value: str, *, first: int = 1) -> list[Record]:
    """For each ν from number ``first``: median and range of ``value`` over seeds, and the largest price of a seed."""
    points = []
    for multiplier in MULTIPLIERS[first:]:
        own = where(found, nu=multiplier)
        values = [record[value] for record in own]
        point: Record = {"nu": multiplier, "median": statistics.median(values), "low": min(values), "high": max(values)}
        for name in ("heuristic", "tight", "local_tight", "releases"):
            prices = [record[name] for record in own if record[name] is not None]
            point[name] = max(prices) if prices else None
        points.append(point)
    return points


def draw(result: dict[str, Any], folder: Path | None) -> None:
    """One picture a task."""
    found = records(result["hospital"])
    figure, panels = new_figure(2, height=4.6, share_y=True)
    lines = [
        (f"k = 5, {rounds} rounds", where(found, neighbourhood="fixed", k=5, rounds=rounds)) for rounds in ROUNDS[::-1]
    ]
    lines.append((f"k = 1, {ROUNDS[-1]} rounds", where(found, neighbourhood="fixed", k=1)))
    _panels(panels, lines, where(found, neighbourhood="relative"), lines[0][1], "metric")
    panels[0].set_ylabel("RMSE, the paper's metric (dollars)")
    write_figure(NAME, "hospital.png", figure, folder)
    found = records(result["synthetic"])
    figure, panels = new_figure(2, height=4.6, share_y=True)
    lines = [(f"k = {k}, 300 rounds", where(found, neighbourhood="fixed", k=k)) for k in (2, 1)]
    _panels(panels, lines, where(found, neighbourhood="relative"), lines[0][1], "loss")
    panels[0].set_ylabel("least validation loss (mean squared error)")
    write_figure(NAME, "synthetic.png", figure, folder)


def _panels(
    panels: Sequence[Any],
    lines: Sequence[tuple[str, Sequence[Record]]],
    relative: Sequence[Record],
    fixed: Sequence[Record],
    value: str,
) -> None:
    """Left: error against tight ε, fixed neighbourhood. Right: both neighbourhoods against ν."""
    for index, (label, own) in enumerate(lines):
        _line(panels[0], curve(own, value), "tight", index, label)
    panels[0].set(xlabel="tight ε at δ = 1e-5 of the most active client", title="fixed neighbourhood: a guarantee")
    panels[0].axvline(10, color="black", linewidth=1, linestyle=":")
    panels[0].annotate(
        "ε = 10", (10, 0.5), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points"
    )
    _line(panels[1], curve(fixed, value), "nu", 0, f"fixed, {lines[0][0]}")
    _line(panels[1], curve(relative, value), "nu", len(lines), f"relative, {lines[0][0]}")
    middle = statistics.median(record[value] for record in where(fixed, nu=0.0))
    panels[1].set(xlabel="noise multiplier ν", title="by ν: the relative neighbourhood has no guarantee")
    for axes in panels:
        axes.set(xscale="log", yscale="log")
        axes.axhline(middle, color="black", linewidth=1, linestyle="--", label=f"{lines[0][0]}, no noise, no clipping")
        axes.legend(fontsize=8)
    if value == "metric":
        ticks = [600, 800, 1000, 1500, 2000, 3000, 5000, 10000]
        panels[0].set_ylim(550, ticks[-1])  # beyond it the relative runs have diverged
        panels[0].set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        panels[0].minorticks_off()


def _line(axes: Any, points: Sequence[Record], across: str, index: int, label: str) -> None:
    places = [point[across] for point in points]
    axes.plot(
        places,
        [point["median"] for point in points],
        color=COLOURS[index],
        marker=MARKERS[index],
        markersize=5,
        label=label,
    )
    low, high = ([point[end] for point in points] for end in ("low", "high"))
    axes.fill_between(places, low, high, color=COLOURS[index], alpha=0.15, linewidth=0)


def blocks(result: dict[str, Any]) -> dict[str, str]:
    """The measured parts of the section."""
    hospitals, users = records(result["hospital"]), records(result["synthetic"])
    return {
        "hospital": _cost_table(hospitals, ROUNDS[-1], 5, "metric", ",.0f"),
        "hospital-levels": _levels(hospitals),
        "synthetic": _cost_table(users, SYNTHETIC.rounds, 2, "loss", ".3g"),
    }


def _cost_table(found: Sequence[Record], rounds: int, k: int, value: str, shown: str) -> str:
    fixed = curve(where(found, neighbourhood="fixed", rounds=rounds, k=k), value, first=0)
    relative = curve(where(found, neighbourhood="relative", rounds=rounds, k=k), value, first=0)
    rows = [
        (
            f"{ours['nu']:g}",
            _with_range(ours, shown),
            *(rounded_up(ours[name]) if ours["nu"] else "none" for name in ("heuristic", "tight", "local_tight")),
            _with_range(paper, shown),
        )
        for ours, paper in zip(fixed, relative, strict=True)
    ]
    return table(
        (
            *(
                "ν",
                "fixed: median (range)",
                "pure ε = Σ n/ν",
                "tight ε at δ = 1e-5",
                "for any two that choose the same hypotheses",
            ),
            "relative, no guarantee: median (range)",
        ),
        rows,
    )


def _with_range(point: Record, shown: str) -> str:
    median, low, high = (
        f"{point[name]:{shown}}" if point[name] < DIVERGED else f"> {DIVERGED:,}" for name in ("median", "low", "high")
    )
    return f"**{median}** ({low} to {high})"


def _levels(found: Sequence[Record]) -> str:
    """At each ε the best median among ν and rounds that cost no more."""
    rows = []
    for level in LEVELS:
        cells = [f"≤ {level:g}"]
        for price in ("tight", "local_tight"):
            points = [
                {**point, "rounds": rounds}
                for rounds in ROUNDS
                for point in curve(where(found, neighbourhood="fixed", k=5, rounds=rounds), "metric")
            ]
            within = [point for point in points if point[price] is not None and point[price] <= level]
            best = min(within, key=lambda point: point["median"], default=None)
            cells.append(
                "none" if best is None else f"{best['median']:,.0f} (ν = {best['nu']:g}, {best['rounds']} rounds)"
            )
        rows.append(cells)
    return table(("ε at δ = 1e-5", "updates within C of each other", "any two that choose the same hypotheses"), rows)


def main() -> None:
    """Run everything and write the result."""
    with command_line(__doc__, data=True) as arguments:
        hospitals = Simulator.of("hospital", arguments.data, processes=arguments.processes)
        users = Simulator.of("synthetic", clients=synthetic.USERS, processes=arguments.processes)
        result = measure(hospitals, users, arguments.seeds)
        write_result(NAME, result, arguments.out)
        draw(result, arguments.out)


if __name__ == "__main__":
    main()
