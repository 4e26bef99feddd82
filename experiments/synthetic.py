"""The paper's synthetic experiment (arXiv 2206.03396, section 5.1, Figures 1 and 2): two groups of users, two laws.

    python experiments/synthetic.py

The paper's settings are in ``PAPER``; ours are said to be ours. Writes experiments/results/synthetic/ and, by
``experiments/report.py``, the section of docs/experiments.md.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _results import COLOURS, new_figure, rounded_up, table, wrapped, write_figure, write_result
from _simulations import Record, Simulator, columns, command_line, records, where
from numpy.typing import NDArray

from coterie.config import Reseed
from coterie.datasets.synthetic import NOISE_SD, TRUTHS
from coterie.mechanisms.events import Neighbourhood
from coterie.simulation import SimulatedResult, SimulatedRun
from coterie.simulation.server_side import Sampler

NAME = "synthetic"
USERS = 200  # 100 that train, and as many that are held out
# k, U, E, s, B and ν of the paper; it validates every round and stops after 6 without a better loss.
PAPER = SimulatedRun(
    hypotheses=2,
    noise_multiplier=5.0,
    rounds=300,
    clients_per_round=7,
    validation_fraction=0.5,
    validate_every=1,
    patience=6,
    neighbourhood=Neighbourhood.RELATIVE,
    epochs=1,
    step_size=0.1,
    batch_size=10,
    reseed=Reseed.OFF,
)
REACHED = 0.3  # how near each hypothesis must come to its optimum
MULTIPLIERS = (0.0, 1.0, 2.0, 3.0, 5.0)
RADIUS = 0.1  # C of the fixed neighbourhood: ours, by a trial of RADII at ν = 5 on these seeds
RADII = (0.03, 0.05, 0.1, 0.2, 0.4, 1.0)
# Settings by the name that the result gives them.
MODES: dict[str, SimulatedRun] = {
    "relative, early stopping": PAPER,
    "relative, 300 rounds": replace(PAPER, patience=0),
    f"fixed C = {RADIUS:g}, 300 rounds": replace(
        PAPER, patience=0, neighbourhood=Neighbourhood.FIXED, clipping_norm=RADIUS
    ),
}
FIXED = list(MODES)[2]
FIGURE_CASES = {  # Figure 1's, and the same with re-seeding
    "sanitized, k = 2": PAPER,
    "not sanitized, k = 2": replace(PAPER, noise_multiplier=0.0),
    "sanitized, k = 1": replace(PAPER, hypotheses=1),
}
LEAKAGE_ROUNDS = 60
PLANE_CENTRE, PLANE_SPAN = (3.0, 0.75), 9.0  # of the picture of hypotheses


def distances(hypotheses: NDArray[np.float32]) -> tuple[float, ...]:
    """How far the hypotheses are from the optima, each optimum with a hypothesis of its own, matched at best."""
    optima = np.array(TRUTHS)
    far = np.linalg.norm(hypotheses[:, None].astype(np.float64) - optima, axis=-1)  # (k, 2)
    matchings = itertools.permutations(range(len(hypotheses)), len(optima))
    return min((tuple(float(far[j, i]) for i, j in enumerate(own)) for own in matchings), key=max)


def convergence(simulator: Simulator, seeds: int) -> list[Record]:
    """Every mode, with re-seeding and without, at every ν: how far the two hypotheses end from the optima."""
    plan = [
        (mode, replace(run, reseed=reseed, noise_multiplier=nu, seed=seed))
        for mode, run in MODES.items()
        for reseed in (Reseed.OFF, Reseed.ON)
        for nu in MULTIPLIERS
        for seed in range(seeds)
    ]
    results = simulator([run for _, run in plan])
    return [_record(simulator, mode, result) for (mode, _), result in zip(plan, results, strict=True)]


def radii(simulator: Simulator, seeds: int) -> list[Record]:
    """The fixed neighbourhood at other clipping norms, with re-seeding, at ν = 2 and 5."""
    runs = [
        replace(MODES[FIXED], reseed=Reseed.ON, noise_multiplier=nu, clipping_norm=radius, seed=seed)
        for radius in RADII
        for nu in (2.0, 5.0)
        for seed in range(seeds)
    ]
    return [{"radius": result.run.clipping_norm, **_record(simulator, "fixed", result)} for result in simulator(runs)]


def figure_one(simulator: Simulator, seeds: int) -> list[Record]:
    """The validation loss of every round, and where the hypotheses end."""
    plan = [(case, replace(run, seed=seed)) for case, run in FIGURE_CASES.items() for seed in range(seeds)]
    plan += [
        (f"{case}, fixed", replace(run, seed=seed, neighbourhood=Neighbourhood.FIXED, clipping_norm=RADIUS, patience=0))
        for case, run in FIGURE_CASES.items()
        for seed in range(seeds)
    ]
    results = simulator([run for _, run in plan])
    return [
        {
            "case": case,
            "seed": result.run.seed,
            "loss": min(record.loss for record in result.history),
            "losses": [record.loss for record in result.history],
            "hypotheses": result.hypotheses.astype(float).tolist(),
        }
        for (case, _), result in zip(plan, results, strict=True)
    ]


def leakage(simulator: Simulator, seeds: int) -> list[Record]:
    """The most releases of one user, by group and round, and what they cost at ν = 5.

    Who is sampled depends on the seed only, not on the training. A user's cluster is its group, which it is in every
    run whose hypotheses separate.
    """
    names = simulator.rows.names
    group = np.array([int(name.startswith("group2")) for name in names])
    found = []
    for seed in range(seeds):
        run = replace(PAPER, seed=seed)
        sampler, counts = Sampler(names, run), np.zeros(len(names), int)
        most: list[list[int]] = [[], []]
        for number in range(1, LEAKAGE_ROUNDS + 1):
            counts[sampler.sample(number)] += 1
            for own in range(2):
                most[own].append(int(counts[group == own].max()))
        found.append({"seed": seed, "cluster_1": most[0], "cluster_2": most[1]})
    return found


def _record(simulator: Simulator, mode: str, result: SimulatedResult) -> Record:
    near = distances(result.hypotheses)
    prices = simulator.prices(result.run, int(result.participations.max()))
    return {
        "mode": mode,
        "reseed": result.run.reseed.value,
        "nu": result.run.noise_multiplier,
        "seed": result.run.seed,
        "distance_1": near[0],
        "distance_2": near[1],
        "loss": min(record.loss for record in result.history),
        "rounds": result.rounds,
        "collapsed": result.collapsed,
        "releases": int(result.participations.max()),
        "pure": prices.get("pure"),
        "tight": prices.get("tight"),
    }


def measure(simulator: Simulator, seeds: int) -> dict[str, Any]:
    """Everything that result.json holds."""
    fixed = replace(PAPER, neighbourhood=Neighbourhood.FIXED, clipping_norm=RADIUS)
    most = LEAKAGE_ROUNDS // 2
    return {
        "label_noise": NOISE_SD,
        "convergence": columns(convergence(simulator, seeds)),
        "radii": columns(radii(simulator, seeds)),
        "figure_1": columns(figure_one(simulator, seeds)),
        "leakage": columns(leakage(simulator, seeds)),
        "prices": [{"releases": n, **simulator.prices(fixed, n)} for n in range(1, most)],
    }


def draw(result: dict[str, Any], folder: Path | None) -> None:
    """Figures 1 and 2."""
    _draw_figure_one(records(result["figure_1"]), folder)
    _draw_figure_two(records(result["leakage"]), result["prices"], folder)


def _draw_figure_one(found: Sequence[Record], folder: Path | None) -> None:
    figure, (left, middle, right) = new_figure(3, height=4.6)
    for axes, suffix in ((left, ""), (middle, ", fixed")):
        for index, case in enumerate(FIGURE_CASES):
            for number, own in enumerate(where(found, case=case + suffix)):
                losses = own["losses"]
                axes.plot(
                    range(1, len(losses) + 1),
                    losses,
                    color=COLOURS[index],
                    alpha=0.6,
                    linewidth=1,
                    label=case if number == 0 else None,
                )
                if not suffix:
                    axes.plot(len(losses), losses[-1], color=COLOURS[index], marker=".", markersize=6)
        axes.set(yscale="log", xlabel="round", ylabel="validation loss (mean squared error)")
    left.set_title("the paper's settings: relative, ν = 5\na dot where early stopping ends a run")
    middle.set_title(f"fixed neighbourhood, C = {RADIUS:g}, ν = 5\nno early stopping")
    left.legend(loc="upper right")
    outside = 0
    for index, (case, marker) in enumerate(zip(FIGURE_CASES, "osD", strict=True)):
        points = np.array([theta for own in where(found, case=case) for theta in own["hypotheses"]])
        shown = (np.abs(points - PLANE_CENTRE) <= PLANE_SPAN).all(axis=1)
        outside += int((~shown).sum())
        right.scatter(*points.T, s=28, marker=marker, facecolors="none", edgecolors=COLOURS[index], label=case)
    right.scatter(*np.array(TRUTHS).T, marker="+", s=160, color="black", linewidths=2, label="optima θ*")
    right.set(xlabel="θ₁", ylabel="θ₂")
    right.set(**{f"{axis}lim": (at - PLANE_SPAN, at + PLANE_SPAN) for axis, at in zip("xy", PLANE_CENTRE, strict=True)})
    right.set_title(f"where the hypotheses end, all seeds, the paper's settings\n{outside} lie outside the picture")
    right.legend(loc="center left")
    write_figure(NAME, "figure1.png", figure, folder)


def _draw_figure_two(found: Sequence[Record], prices: Sequence[Record], folder: Path | None) -> None:
    figure, (axes,) = new_figure(height=4.2)
    of = {0: (0.0, 0.0), **{entry["releases"]: (entry["pure"], entry["tight"]) for entry in prices}}
    rounds = range(1, LEAKAGE_ROUNDS + 1)
    for index, cluster in enumerate(("cluster_1", "cluster_2")):
        releases = np.median([own[cluster] for own in found], axis=0)
        lowest, highest = (pick([own[cluster] for own in found], axis=0) for pick in (np.min, np.max))
        steps = {"where": "post", "color": COLOURS[index]}
        axes.step(rounds, 0.4 * releases, label=f"cluster {index + 1}: the paper's n/ν, summed", **steps)
        axes.fill_between(
            rounds, 0.4 * lowest, 0.4 * highest, step="post", alpha=0.15, color=COLOURS[index], linewidth=0
        )
        tight = [of[int(count)][1] for count in np.floor(releases)]
        axes.step(rounds, tight, linestyle="--", label=f"cluster {index + 1}: tight ε at δ = 1e-5", **steps)
    axes.axhline(2.4, color="black", linewidth=1, linestyle=":")
    axes.text(1, 2.45, "the paper's largest, 2.4", fontsize=9)
    axes.set(xlabel="round", ylabel="largest privacy leakage of a user")
    axes.set_title(f"ν = 5, median and range of {len(found)} seeds")
    axes.legend(loc="lower right", fontsize=9)
    write_figure(NAME, "figure2.png", figure, folder)


def blocks(result: dict[str, Any]) -> dict[str, str]:
    """The measured parts of the section."""
    found = records(result["convergence"])
    return {
        "convergence": _convergence_table(found),
        "prices": _price_table(found),
        "radii": _radii_table(records(result["radii"])),
        "ablation": _ablation(records(result["figure_1"])),
        "leakage": _leakage(records(result["leakage"]), result["prices"]),
        "verdict": _verdict(found),
    }


def worst(record: Record) -> float:
    """The larger of the two distances."""
    return float(max(record["distance_1"], record["distance_2"]))


def reached(found: Sequence[Record]) -> int:
    """In how many runs both hypotheses come within ``REACHED`` of their optima."""
    return sum(worst(record) <= REACHED for record in found)


def _convergence_table(found: Sequence[Record]) -> str:
    rows = []
    for mode, reseed in itertools.product(MODES, ("off", "on")):
        cells = [mode, reseed]
        for nu in MULTIPLIERS:
            own = where(found, mode=mode, reseed=reseed, nu=nu)
            far = sorted(map(worst, own))
            cells.append(f"**{reached(own)}** ({statistics.median(far):.2f}; {far[-1]:.2f})")
        rows.append(cells)
    return table(("neighbourhood", "re-seeding", *(f"ν = {nu:g}" for nu in MULTIPLIERS)), rows)


def _price_table(found: Sequence[Record]) -> str:
    rows = []
    for mode, nu in itertools.product(MODES, MULTIPLIERS[1:]):
        own = where(found, mode=mode, reseed="on", nu=nu)
        rounds = sorted(record["rounds"] for record in own)
        rows.append(
            (
                *(mode, f"{nu:g}", f"{rounds[0]} to {rounds[-1]}" if rounds[0] < rounds[-1] else f"{rounds[0]}"),
                str(max(record["releases"] for record in own)),
                rounded_up(max(record["pure"] for record in own)),
                rounded_up(max(record["tight"] for record in own)) if "fixed" in mode else "no guarantee",
            )
        )
    head = ("neighbourhood, re-seeding on", "ν", "rounds", "most releases of a user", "their n/ν, summed")
    return table((*head, "ε at δ = 1e-5"), rows)


def _radii_table(found: Sequence[Record]) -> str:
    rows = []
    for radius in RADII:
        cells = [f"{radius:g}"]
        for nu in (2.0, 5.0):
            own = where(found, radius=radius, nu=nu)
            cells += [f"{reached(own)} of {len(own)}", f"{statistics.median(map(worst, own)):.2f}"]
        rows.append(tuple(cells))
    return table(("C", "ν = 2: both within", "median distance", "ν = 5: both within", "median distance"), rows)


def _ablation(found: Sequence[Record]) -> str:
    rows = []
    for case in FIGURE_CASES:
        cells = [case]
        for suffix in ("", ", fixed"):
            losses = sorted(own["loss"] for own in where(found, case=case + suffix))
            cells.append(f"{statistics.median(losses):.3g} ({losses[0]:.3g} to {losses[-1]:.3g})")
        rows.append(cells)
    return table(("least validation loss, median (range)", "the paper's settings", f"fixed, C = {RADIUS:g}"), rows)


def _leakage(found: Sequence[Record], prices: Sequence[Record]) -> str:
    most = [np.maximum(own["cluster_1"], own["cluster_2"]) for own in found]
    six = [int(np.argmax(own >= 6)) + 1 for own in most if own.max() >= 6]
    last = sorted(int(own[-1]) for own in most)
    of = {entry["releases"]: entry for entry in prices}
    return wrapped(
        f"One release costs {rounded_up(of[1]['pure'])}, and six cost {rounded_up(of[6]['pure'])}, the paper's largest "
        f"value. In our {len(found)} seeds some user has its sixth release in round {min(six)} to {max(six)} (median "
        f"{statistics.median(six):g}; {len(six)} seeds have one within {LEAKAGE_ROUNDS} rounds). After "
        f"{LEAKAGE_ROUNDS} rounds the most active user has {last[0]} to {last[-1]} releases. With the fixed "
        f"neighbourhood the tight price of six releases at δ = 1e-5 is {rounded_up(of[6]['tight'])}, and of "
        f"{last[-1]} releases {rounded_up(of[last[-1]]['tight'])} instead of {rounded_up(of[last[-1]]['pure'])}."
    )


def _verdict(found: Sequence[Record]) -> str:
    def count(mode: str, reseed: str, nu: float) -> str:
        own = where(found, mode=mode, reseed=reseed, nu=nu)
        return f"{reached(own)} of {len(own)}"

    early, late, fixed = MODES
    return wrapped(
        f"**Both optima within {REACHED:g} at ν = 2:** {count(early, 'on', 2.0)} seeds with the paper's settings and "
        f"re-seeding, {count(early, 'off', 2.0)} with the paper's algorithm as it is; {count(fixed, 'on', 2.0)} and "
        f"{count(fixed, 'off', 2.0)} with the fixed neighbourhood. **At ν = 5**, the paper's value: "
        f"{count(early, 'off', 5.0)} with the paper's settings, {count(early, 'on', 5.0)} when re-seeding is added, "
        f"{count(late, 'off', 5.0)} when early stopping is left away, {count(late, 'on', 5.0)} with both changes; "
        f"{count(fixed, 'on', 5.0)} with the fixed neighbourhood and re-seeding ({count(fixed, 'off', 5.0)} without)."
    )


def main() -> None:
    """Run everything and write the result."""
    with command_line(__doc__, data=False) as arguments:
        result = measure(Simulator.of(NAME, clients=USERS, processes=arguments.processes), arguments.seeds)
        write_result(NAME, result, arguments.out)
        draw(result, arguments.out)


if __name__ == "__main__":
    main()
