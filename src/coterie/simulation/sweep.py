"""A grid of simulated runs that can be interrupted: each finished grid point is a file, and is not run again."""

import csv
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.simulation import SimulatedRun, simulate
from coterie.simulation.rows import Rows
from coterie.storage import write_atomically
from coterie.tasks import Task

# What can be swept, by the paper's letters: the setting, and the kind of number it is.
SWEPT: Mapping[str, tuple[str, type[int] | type[float]]] = {
    "k": ("hypotheses", int),
    "nu": ("noise_multiplier", float),
    "C": ("clipping_norm", float),
    "T": ("rounds", int),
}
MOST_SEEDS = 10_000
_NUMBERS_AT_ONCE = 4_000_000  # parameters of all sampled clients of a stack, unless one run has more
_RUNS_AT_ONCE = 30  # beyond it stacking gains little, and an interruption loses more

Point = dict[str, int | float]  # a value for each swept letter
Record = dict[str, Any]  # what ``SimulatedResult.summary`` says, and the point


@dataclass(frozen=True)
class Sweep:
    """Grid points and the seeds that each is run with; ``folder`` is None where nothing is kept."""

    base: SimulatedRun
    points: tuple[Point, ...]
    seeds: int
    folder: Path | None

    def runs(self, point: Point) -> list[SimulatedRun]:
        """One run a seed, from 0."""
        settings = {SWEPT[letter][0]: value for letter, value in point.items()}
        return [replace(self.base, seed=seed, **settings) for seed in range(self.seeds)]  # type: ignore[arg-type]


def grid(sweeps: Sequence[str]) -> tuple[Point, ...]:
    """All combinations of the values of ``k=1,3`` and the like; the one empty point for none.

    Raises ``CoterieError`` for an unknown or repeated name and for what is no number.
    """
    axes: dict[str, list[int | float]] = {}
    for sweep in sweeps:
        name, _, values = sweep.partition("=")
        if name not in SWEPT:
            raise CoterieError(f"Expected --sweep NAME=VALUE,… with NAME one of {', '.join(SWEPT)}, found {sweep!r}")
        if name in axes:
            raise CoterieError(f"Expected each --sweep name once, found {name!r} twice: give all its values in one")
        try:
            axes[name] = list(dict.fromkeys(SWEPT[name][1](value) for value in values.split(",")))
        except ValueError as error:
            raise CoterieError(f"Expected numbers such as {name}=1,3, found --sweep {sweep!r}") from error
    return tuple(dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def run_sweep(task: Task, rows: Rows, sweep: Sweep, *, advance: Callable[[int], None] = lambda _: None) -> list[Record]:
    """The records of every point and seed, in the grid's order; points whose file is there are not run again.

    ``advance`` is told how many rounds of runs are done or need not be. In ``sweep.folder`` there is a file for each
    point as soon as it is finished, and at the end ``results.csv``, ``results.json`` and, of more than one point,
    ``sweep.png``. Raises ``CoterieError`` for a point that cannot be run, before anything runs, for a folder that
    holds another sweep, and when a file cannot be written: finished points are kept.
    """
    plan = {index: sweep.runs(point) for index, point in enumerate(sweep.points)}  # bad settings end it here
    folder, content = sweep.folder, _fingerprint(task, rows)
    found: dict[int, list[Record]] = {}
    if folder is not None:
        with _writing(folder):
            (folder / "points").mkdir(parents=True, exist_ok=True)
        for index, runs in plan.items():
            if (records := _read_point(_point_file(folder, sweep.points[index]), runs, content)) is not None:
                found[index] = records
                advance(sum(run.rounds for run in runs))
    for stack in _stacks(plan, found, layout_of(task.build()).size):
        runs = [run for _, run in stack]
        told = _Told(advance)
        for (index, _), result in zip(stack, simulate(task, rows, runs, on_round=told), strict=True):
            records = found.setdefault(index, [])
            records.append({**sweep.points[index], **result.summary()})
            if folder is not None and len(records) == sweep.seeds:
                _write_point(_point_file(folder, sweep.points[index]), plan[index], content, records)
        advance(sum(run.rounds for run in runs) - told.rounds)  # what patience saved
    everything = [record for index in plan for record in found[index]]
    if folder is not None:
        with _writing(folder):
            write_atomically(folder / "results.json", _json(everything))
            write_atomically(folder / "results.csv", _csv(everything))
            if len(sweep.points) > 1:
                from coterie.simulation.plot import sweep_plot

                write_atomically(folder / "sweep.png", sweep_plot(everything))
    return everything


class _Told:
    """Adds up what it passes on."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self.rounds = 0

    def __call__(self, rounds: int) -> None:
        self.rounds += rounds
        self._advance(rounds)


def _stacks(
    plan: Mapping[int, list[SimulatedRun]], found: Mapping[int, Any], parameters: int
) -> Iterator[list[tuple[int, SimulatedRun]]]:
    """The runs still to make, each with its point, together where they may share tensors."""
    alike: dict[SimulatedRun, list[tuple[int, SimulatedRun]]] = {}
    for index, runs in plan.items():
        if index not in found:
            like = replace(runs[0], noise_multiplier=0.0, clipping_norm=None)
            alike.setdefault(like, []).extend((index, run) for run in runs)
    for like, stack in alike.items():
        at_once = max(1, min(_RUNS_AT_ONCE, _NUMBERS_AT_ONCE // (like.clients_per_round * parameters)))
        yield from (stack[first : first + at_once] for first in range(0, len(stack), at_once))


def _fingerprint(task: Task, rows: Rows) -> str:
    digest = hashlib.sha256(json.dumps([task.name, rows.names, rows.counts.tolist()]).encode())
    for tensor in (rows.inputs, rows.targets):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _point_file(folder: Path, point: Point) -> Path:
    name = ",".join(f"{letter}={value!r}" for letter, value in point.items()) or "point"
    return folder / "points" / f"{name}.json"


def _settings(runs: Sequence[SimulatedRun], content: str) -> dict[str, Any]:
    like = {**asdict(runs[0]), "seeds": len(runs), "data": content}
    return {name: value for name, value in like.items() if name != "seed"}


def _write_point(file: Path, runs: Sequence[SimulatedRun], content: str, records: list[Record]) -> None:
    with _writing(file.parent.parent):
        write_atomically(file, _json({"settings": _settings(runs, content), "records": records}))


def _read_point(file: Path, runs: Sequence[SimulatedRun], content: str) -> list[Record] | None:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        settings, records = known["settings"], known["records"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CoterieError(f"Expected a finished grid point in {file}, found: {error!r}; remove it") from error
    wanted = json.loads(json.dumps(_settings(runs, content)))
    if settings != wanted:
        other = next((name for name in wanted if settings.get(name) != wanted[name]), "its settings")
        raise CoterieError(f"Expected {file} to be of this sweep, found another {other}: give another --out")
    found: list[Record] = records
    return found


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns a file system's refusal into one line."""
    try:
        yield
    except OSError as error:
        raise CoterieError(
            f"Expected to write to --out {folder}, found: {error}; finished grid points are kept: "
            "run the same command again to go on"
        ) from error


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _csv(records: Sequence[Record]) -> bytes:
    text = io.StringIO()
    flat = []
    for record in records:
        price = record["price"] or {}
        row = {name: value for name, value in record.items() if name != "price"}
        row["clients_per_hypothesis"] = " ".join(map(str, record["clients_per_hypothesis"]))
        row |= {f"price_{name}": price.get(name) for name in ("releases", "pure", "tight", "delta", "formal")}
        flat.append(row)
    writer = csv.DictWriter(text, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().encode()
