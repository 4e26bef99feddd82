"""The paper's FEMNIST experiment (arXiv 2206.03396, section 5.3, Table 4): turned images, two losses, over ν.

    python experiments/femnist.py --data femnist_digits.npz     # or LEAF's json, or a folder of it: all 62 classes

Each run is kept in results/femnist/runs as soon as it is finished; the same command goes on where it was stopped. At
the end it writes results/femnist/result.json and accuracy.png; then run ``experiments/report.py``. ``--finished`` runs
nothing and writes the result of the runs that there are.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from _femnist_section import NAME, Record, blocks, draw
from _results import RESULTS, price, write_result
from torch import Tensor, nn

from coterie.client.selection import best_hypothesis, hypothesis_losses
from coterie.config import Reseed
from coterie.datasets import femnist as characters
from coterie.datasets.losses import squared_error
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.parameters import layout_of
from coterie.simulation import SimulatedResult, SimulatedRun, simulate
from coterie.simulation.rows import Rows
from coterie.storage import write_atomically
from coterie.tasks import DataSource, Task

__all__ = ["blocks"]  # for report.py

# The paper's: 10 % held out, a validation every 5 rounds, an end after 5 without improvement, ν relative to the update.
# Ours, as the paper does not say: k, U, E, s, B and re-seeding. Its 500 rounds are cut to 60.
BASE = SimulatedRun(
    hypotheses=2,
    rounds=60,
    clients_per_round=10,
    validation_fraction=0.1,
    validate_every=5,
    patience=5,
    neighbourhood=Neighbourhood.RELATIVE,
    epochs=1,
    batch_size=10,
    reseed=Reseed.ON,
    fine_tune_epochs=5,
)


def squared_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    """‖output − one-hot(target)‖² of each row: (rows, classes) × (rows,) → (rows,).

    The outputs are the last layer's, without a softmax, as those of the other tasks that minimise a squared error.
    """
    return squared_error(outputs, nn.functional.one_hot(targets, outputs.shape[-1]))


@dataclass(frozen=True)
class Loss:
    """What a run minimises: the loss of a row, the local step size, and how a mean loss is shown."""

    row: Callable[[Tensor, Tensor], Tensor]
    step_size: float
    show: Callable[[float], float]


LOSSES = {
    "cross entropy": Loss(characters.task.loss, 0.3, float),
    "RMSE": Loss(squared_distance, 0.1, math.sqrt),
}


@dataclass(frozen=True)
class Point:
    """One run of the experiment."""

    loss: str
    run: SimulatedRun

    @property
    def task(self) -> Task:
        """The femnist task with this loss."""
        return replace(characters.task, loss=LOSSES[self.loss].row)

    @property
    def settings(self) -> Record:
        """What tells this point from another, and what a finished run must agree with to be taken."""
        run = self.run
        return {
            "loss": self.loss,
            "k": run.hypotheses,
            "nu": run.noise_multiplier,
            "neighbourhood": run.neighbourhood.value,
            "reseed": run.reseed.value,
            "seed": run.seed,
            "rounds": run.rounds,
            "patience": run.patience,
            "validate_every": run.validate_every,
            "validation_fraction": run.validation_fraction,
            "clients_per_round": run.clients_per_round,
            "epochs": run.epochs,
            "step_size": run.step_size,
            "batch_size": run.batch_size,
            "fine_tune_epochs": run.fine_tune_epochs,
        }

    @property
    def file(self) -> str:
        """The name of the file that keeps its record."""
        found = self.settings
        words = (found["loss"].replace(" ", "-"), f"k={found['k']}", f"nu={found['nu']:g}", found["neighbourhood"])
        return "_".join((*words, f"reseed-{found['reseed']}", f"seed={found['seed']}")) + ".json"


def plan(rounds: int, seeds: int) -> list[Point]:
    """Every run, the most telling ones first: whoever stops early has those."""
    paper = {"reseed": Reseed.OFF}
    fixed = {"neighbourhood": Neighbourhood.FIXED}
    cases: list[tuple[str, dict[str, Any]]] = [
        (loss, {"noise_multiplier": nu, **others})
        for others, multipliers in (
            ({}, (0.0, 3.0)),
            ({"hypotheses": 1}, (3.0,)),
            ({}, (1.0,)),
            (fixed, (1.0,)),
            (paper, (3.0,)),
            ({}, (0.1, 10.0, 1e-3)),
            (fixed, (3.0,)),
        )
        for nu in multipliers
        for loss in LOSSES
    ]
    return [
        Point(loss, replace(BASE, **changes, rounds=rounds, seed=seed, step_size=LOSSES[loss].step_size))
        for seed in range(seeds)
        for loss, changes in cases
    ]


def run_all(
    points: Sequence[Point], rows: Rows, folder: Path, *, say: Callable[[str], None] = lambda _: None
) -> list[Record]:
    """The points' records in order. Those with a file in ``folder`` are not run again; each other one gets its file.

    Raises ``CoterieError`` for a file that is not of this point and these data.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, found = description(rows), []
    for number, point in enumerate(points, 1):
        if (record := read_record(folder / point.file, point, data)) is None:
            told = _Told(say, f"run {number} of {len(points)}: {point.file.removesuffix('.json')}", point.run.rounds)
            (result,) = simulate(point.task, rows, [point.run], on_round=told)
            say("\n")
            record = record_of(point, result, rows)
            content = {"settings": point.settings, "data": data, "record": record}
            write_atomically(folder / point.file, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
        found.append(record)
    return found


class _Told:
    """Says how far a run is."""

    def __init__(self, say: Callable[[str], None], name: str, rounds: int) -> None:
        self._say, self._name, self._rounds = say, name, rounds
        self._done = 0

    def __call__(self, _: int) -> None:
        self._done += 1
        self._say(f"\r{self._name}, round {self._done} of {self._rounds}")


def finished(points: Sequence[Point], rows: Rows, folder: Path) -> list[Record]:
    """The records of those points that have a file."""
    data = description(rows)
    records = (read_record(folder / point.file, point, data) for point in points)
    return [record for record in records if record is not None]


def description(rows: Rows) -> Record:
    """The data: how many writers, images and classes, and how many writers are turned."""
    return {
        "writers": len(rows.names),
        "images": int(rows.counts.sum()),
        "classes": int(rows.targets.bincount().count_nonzero()),
        "turned": sum(map(is_turned, rows.names)),
    }


def is_turned(name: str) -> bool:
    """Whether the images of the data holder ``name`` were turned, by the name that the task gives it."""
    return name.startswith("turned-")


def read_record(file: Path, point: Point, data: Record) -> Record | None:
    """The kept record of a point; None if there is no file. Raises ``CoterieError`` for a file of something else."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        settings, kept_data, record = known["settings"], known["data"], known["record"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CoterieError(f"Expected a finished run in {file}, found: {error!r}; remove it") from error
    wanted = {**point.settings, **data}
    other = [name for name, value in {**settings, **kept_data}.items() if wanted.get(name) != value]
    if other or len(settings) + len(kept_data) != len(wanted):
        raise CoterieError(
            f"Expected {file} to be of this experiment, found another {', '.join(other) or 'version'}: "
            "give another --out, or remove it"
        )
    found: Record = record
    return found


def record_of(point: Point, result: SimulatedResult, rows: Rows) -> Record:
    """What is kept of a run. Raises ``CoterieError`` when nobody is held out: there is nothing to tell then."""
    if not result.history:
        raise CoterieError(f"Expected so many writers that some are held out, found {len(rows.names)}")
    groups = clusters(point.task, result.hypotheses, rows)
    paid = result.price if result.price is not None and result.price.formal else None  # else no price is a guarantee
    return {
        "accuracy": result.metric,
        "honest_accuracy": result.honest_metric,
        "fine_tuned_accuracy": result.fine_tuned_metric,
        "held_out_loss": LOSSES[point.loss].show(min(record.loss for record in result.history)),
        "upright": groups[0],
        "turned": groups[1],
        "purity": purity(groups),
        "collapsed": result.collapsed,
        "reseeded": result.reseeded,
        "rounds": result.rounds,
        "best_round": result.best_round,
        "releases": int(result.participations.max()),
        "pure": None if paid is None else price(paid.pure),
        "tight": None if paid is None else price(paid.tight),
        "formal": paid is not None,
        "history": [[record.round, round(record.loss, 5), round(record.metric, 3)] for record in result.history],
        **{name: point.settings[name] for name in ("loss", "k", "nu", "neighbourhood", "reseed", "seed")},
    }


def clusters(task: Task, hypotheses: np.ndarray[Any, np.dtype[np.float32]], rows: Rows) -> tuple[list[int], list[int]]:
    """How many upright writers, and how many turned ones, take each of the k hypotheses, by all their images."""
    model = task.build()
    layout = layout_of(model)
    counts = np.zeros((2, len(hypotheses)), int)
    for index, name in enumerate(rows.names):
        losses = hypothesis_losses(task, model, hypotheses, layout, rows.client(index))
        counts[int(is_turned(name)), best_hypothesis(losses)] += 1
    return counts[0].tolist(), counts[1].tolist()


def purity(groups: Sequence[Sequence[int]]) -> float:
    """The share of writers in the larger group of their cluster: 1 if no cluster mixes upright and turned writers."""
    counts = np.array(groups)
    return float(counts.max(axis=0).sum() / counts.sum())


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True, help=".npz, LEAF's json, or a folder of it")
    parser.add_argument("--rounds", type=int, default=BASE.rounds, help=f"at most; default: {BASE.rounds}, paper: 500")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each setting (default: 1)")
    parser.add_argument("--out", type=Path, default=RESULTS / NAME, help="a folder (default: the committed results)")
    parser.add_argument("--finished", action="store_true", help="run nothing: write the result of the runs there are")
    found = parser.parse_args(argv)
    if found.rounds < 1 or found.seeds < 1:
        parser.error("Expected --rounds and --seeds to be at least 1")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is not there yet, and write the result."""
    arguments = arguments_of(argv)
    points = plan(arguments.rounds, arguments.seeds)
    folder = arguments.out / "runs"
    try:
        rows = Rows.of(characters.read(DataSource(arguments.data, "writer")).clients)
        if arguments.finished:
            found = finished(points, rows, folder)
        else:
            found = run_all(points, rows, folder, say=lambda text: print(text, end="", file=sys.stderr, flush=True))
        if not found:
            raise CoterieError(f"Expected finished runs in {folder}, found none")
        result = {
            "data": description(rows),
            "parameters": layout_of(characters.task.build()).size,
            "rounds": arguments.rounds,
            "clients_per_round": BASE.clients_per_round,
            "planned": len(points),
            "runs": found,
        }
        write_result(NAME, result, arguments.out)
        draw(result, arguments.out)
    except (CoterieError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; finished runs are kept: the same command goes on")


if __name__ == "__main__":
    main()
