"""A grid of simulated runs that can be interrupted: each finished grid point is a file, and is not run again."""

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.simulation import SimulatedRun, simulate
from coterie.simulation.points import ELSEWHERE, SWEPT, Point, Record, SweepFolder, fingerprint, writing
from coterie.simulation.privacy import mechanism_for
from coterie.simulation.rows import Rows
from coterie.simulation.server_side import Sampler
from coterie.storage import write_atomically
from coterie.tasks import Task

MOST_SEEDS = 10_000
_NUMBERS_AT_ONCE = 4_000_000  # parameters of all sampled clients of a stack, unless one run has more
_RUNS_AT_ONCE = 30  # beyond it stacking gains little, and an interruption loses more
# How stacks of runs are simulated: from the task, its rows, the stacks, and what is told a stack's place and how many
# rounds of its runs are done so far, to each stack's place and its runs' summaries, as they are finished in any order.
Runner = Callable[
    [Task, Rows, Sequence[Sequence[SimulatedRun]], Callable[[int, int], None]],
    Generator[tuple[int, list[Record]], None, None],
]


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
            near = _near(name)
            hint = f"; did you mean {near}?" if near else ""
            names = ", ".join(SWEPT)
            raise CoterieError(f"Expected --sweep NAME=VALUE,… with NAME one of {names}, found {sweep!r}{hint}")
        if name in axes:
            raise CoterieError(f"Expected each --sweep name once, found {name!r} twice: give all its values in one")
        try:
            axes[name] = list(dict.fromkeys(SWEPT[name][1](value) for value in values.split(",")))
        except ValueError as error:
            raise CoterieError(f"Expected numbers such as {name}=1,3, found --sweep {sweep!r}") from error
    return tuple(dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def _near(name: str) -> str | None:
    """The letter that was meant: in the other case, by its setting's name or option, or by its Greek letter."""
    words = {letter.lower(): letter for letter in SWEPT} | {setting: letter for letter, (setting, _) in SWEPT.items()}
    words["ν"] = "nu"
    near = get_close_matches(
        name.strip().strip("-").replace("-", "_").lower(), words, n=1, cutoff=0.5
    )  # half: nv is close enough to nu
    return words[near[0]] if near else None


def in_this_process(
    task: Task, rows: Rows, stacks: Sequence[Sequence[SimulatedRun]], tell: Callable[[int, int], None]
) -> Generator[tuple[int, list[Record]], None, None]:
    """A ``Runner``: one stack after another, here."""
    for place, stack in enumerate(stacks):
        told = adding(partial(tell, place))
        yield place, [result.summary() for result in simulate(task, rows, stack, on_round=told)]


def adding(tell: Callable[[int], None]) -> Callable[[int], None]:
    """What is called with numbers and tells their sum so far."""
    total = 0

    def more(number: int) -> None:
        nonlocal total
        total += number
        tell(total)

    return more


def run_sweep(
    task: Task,
    rows: Rows,
    sweep: Sweep,
    *,
    runner: Runner = in_this_process,
    on_found: Callable[[int], None] = lambda _: None,
    on_rounds: Callable[[int], None] = lambda _: None,
) -> list[Record]:
    """The records of every point and seed, in the grid's order; points whose file is there are not run again.

    ``on_found`` is told once, before anything runs, how many rounds of runs need not be; ``on_rounds`` how many more
    are done. In ``sweep.folder`` there is a file for each point as soon as it is finished, and at the end
    ``results.parquet`` and, of more than one point, ``sweep.png``. Raises ``CoterieError`` for a point that cannot be
    run and a folder that cannot be written, before anything runs, for a folder that holds another sweep, and when a
    file cannot be written: finished points are kept.
    """
    plan = {index: sweep.runs(point) for index, point in enumerate(sweep.points)}  # bad settings end it here
    Sampler(rows.names, sweep.base)  # and here, a round that takes more clients than train
    layout = layout_of(task.build())
    for runs in plan.values():
        mechanism_for(runs[0], task, layout)
    content = fingerprint(task, rows)  # and here, a loss or score of another shape
    found: dict[int, dict[int, Record]] = {index: {} for index in plan}  # by point and seed
    folder = None
    if sweep.folder is not None:
        _make(sweep.folder)
        folder = SweepFolder(sweep.folder, sweep.base, list(sweep.points[0]), sweep.seeds, content)
        for index, runs in plan.items():
            found[index] = dict(enumerate(folder.read(sweep.points[index], runs)))
    on_found(sum(run.rounds for index, runs in plan.items() if found[index] for run in runs))
    stacks = list(_stacks(plan, found, layout.size))
    told = _Told([sum(run.rounds for _, run in stack) for stack in stacks], on_rounds)
    # Closed at once when a file cannot be written, which ends what a runner has started elsewhere.
    with closing(runner(task, rows, [[run for _, run in stack] for stack in stacks], told.so_far)) as finished:
        for place, summaries in finished:
            told.finished(place)
            for (index, run), summary in zip(stacks[place], summaries, strict=True):
                found[index][run.seed] = {**sweep.points[index], **summary}
            for index in {index: None for index, _ in stacks[place]}:
                if folder is not None and len(found[index]) == sweep.seeds:
                    folder.write(sweep.points[index], plan[index], _by_seed(found[index]))
    everything = [record for index in plan for record in _by_seed(found[index])]
    if sweep.folder is not None and folder is not None:
        settings = [
            {"point": point, "settings": folder.settings(plan[index])} for index, point in enumerate(sweep.points)
        ]
        _write_results(sweep.folder, everything, {"task": task.name, "points": settings})
    return everything


def check_folder(folder: Path) -> None:
    """Whether results can be written in ``folder``, which need not exist, before anything is made or read.

    Raises ``CoterieError`` where it, or the nearest folder above it that exists, is no folder or cannot be written.
    """
    with writing(folder, ELSEWHERE):
        above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise CoterieError(f"Expected --out to be a folder, found a file: {above}; {ELSEWHERE}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise CoterieError(f"Expected to write to --out {folder}, found that {above} is read-only: {ELSEWHERE}")


class _Told:
    """Turns what a runner tells of its stacks into how many more rounds are done."""

    def __init__(self, totals: Sequence[int], on_rounds: Callable[[int], None]) -> None:
        self._totals = totals
        self._known = [0] * len(totals)
        self._on_rounds = on_rounds

    def so_far(self, place: int, rounds: int) -> None:
        """All rounds of a stack until now. Fewer than before, from a stack begun anew, count as none."""
        if (more := rounds - self._known[place]) > 0:
            self._known[place] = rounds
            self._on_rounds(more)

    def finished(self, place: int) -> None:
        """Also the rounds that patience saved."""
        self.so_far(place, self._totals[place])


def _by_seed(records: Mapping[int, Record]) -> list[Record]:
    return [records[seed] for seed in sorted(records)]


def _stacks(
    plan: Mapping[int, list[SimulatedRun]], found: Mapping[int, Mapping[int, Record]], parameters: int
) -> Iterator[list[tuple[int, SimulatedRun]]]:
    """The runs still to make, each with its point, together where they may share tensors."""
    alike: dict[SimulatedRun, list[tuple[int, SimulatedRun]]] = {}
    for index, runs in plan.items():
        if not found[index]:
            like = replace(runs[0], noise_multiplier=0.0, clipping_norm=None)
            alike.setdefault(like, []).extend((index, run) for run in runs)
    for like, stack in alike.items():
        at_once = max(1, min(_RUNS_AT_ONCE, _NUMBERS_AT_ONCE // (like.clients_per_round * parameters)))
        yield from (stack[first : first + at_once] for first in range(0, len(stack), at_once))


def _make(folder: Path) -> None:
    """The folder, and proof that files can be written in it."""
    check_folder(folder)
    with writing(folder, ELSEWHERE):
        (folder / "points").mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder / "points"):
            pass


def _write_results(folder: Path, records: Sequence[Record], about: Any) -> None:
    from coterie.simulation.plot import sweep_plot
    from coterie.simulation.table import as_parquet

    with writing(folder):
        write_atomically(folder / "results.parquet", as_parquet(records, about))
        if len(about["points"]) > 1:
            write_atomically(folder / "sweep.png", sweep_plot(records, about["task"]))
