"""What the experiments share: many simulated runs over this machine's processors, and their results as rows."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from _results import price

from coterie.errors import CoterieError
from coterie.mechanisms.accounting import Accountant
from coterie.mechanisms.events import UpdateRelease
from coterie.parameters import layout_of
from coterie.rng import seeded
from coterie.simulation import SimulatedResult, SimulatedRun, simulate
from coterie.simulation.privacy import mechanism_for
from coterie.simulation.rows import Rows
from coterie.tasks import DataSource, Task, load_task

DELTA = 1e-5
_AT_ONCE = 30  # runs in one tensor: beyond it stacking gains little

Record = dict[str, Any]


@dataclass(frozen=True)
class Simulator:
    """A task with its data, and the number of processes that runs are dealt to."""

    task: Task
    rows: Rows
    processes: int = 1

    @classmethod
    def of(cls, task: str, data: Path | None = None, *, clients: int = 1, processes: int = 1) -> "Simulator":
        """A built-in task: one client a provider of the hospital file, or ``clients`` of a task with its own data."""
        found = load_task(task)
        dataset = found.read(DataSource(data, found.partitions[0], clients))
        return cls(found, Rows.of(dataset.clients), processes)

    def __call__(self, runs: Sequence[SimulatedRun]) -> list[SimulatedResult]:
        """The results in the order of ``runs``; those that may share tensors do."""
        alike: dict[SimulatedRun, list[int]] = {}
        for index, run in enumerate(runs):
            alike.setdefault(replace(run, seed=0, noise_multiplier=0.0, clipping_norm=None), []).append(index)
        stacks = [own[first : first + _AT_ONCE] for own in alike.values() for first in range(0, len(own), _AT_ONCE)]
        found: dict[int, SimulatedResult] = {}
        for done, (stack, results) in enumerate(zip(stacks, self._dealt(runs, stacks), strict=True), 1):
            found |= zip(stack, results, strict=True)
            _say(f"\r{len(found)} of {len(runs)} runs", end="" if done < len(stacks) else "\n")
        return [found[index] for index in range(len(runs))]

    def _dealt(self, runs: Sequence[SimulatedRun], stacks: Sequence[list[int]]) -> Iterator[list[SimulatedResult]]:
        work = [[runs[index] for index in stack] for stack in stacks]
        if self.processes == 1 or len(work) == 1:
            yield from (simulate(self.task, self.rows, own) for own in work)
            return
        # Forked: the rows are inherited, not sent.
        with ProcessPoolExecutor(
            self.processes, get_context("fork"), initializer=_begin, initargs=(self.task, self.rows)
        ) as pool:
            try:
                yield from pool.map(_simulate, work)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def prices(self, run: SimulatedRun, releases: int) -> Record:
        """What ``releases`` of one client cost, rounded up; empty for runs without noise.

        ``pure`` and ``tight`` for updates within the radius of each other, ``local_tight`` for
        any two data sets that choose the same hypotheses.
        """
        mechanism = mechanism_for(run, self.task, layout_of(self.task.build()))
        if mechanism is None:
            return {}
        # The event of any release will do: within the radius each costs n/ν.
        event = mechanism.release(np.zeros(sum(mechanism.sizes)), rng=seeded(0, "event")).event
        return dict(_prices(event, releases))


@lru_cache(maxsize=4096)
def _prices(event: UpdateRelease, releases: int) -> Record:
    accountant = Accountant()
    accountant.add([event], times=releases)
    found = accountant.price(delta=DELTA)
    return {
        "pure": price(found.pure),
        "tight": price(found.tight),
        "local_tight": price(found.local_tight),
        "formal": found.formal,
    }


_held: list[tuple[Task, Rows]] = []  # in a worker process


def _begin(task: Task, rows: Rows) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its processes
    _held[:] = [(task, rows)]


def _simulate(runs: Sequence[SimulatedRun]) -> list[SimulatedResult]:
    ((task, rows),) = _held
    return simulate(task, rows, runs)


def columns(records: Sequence[Mapping[str, Any]]) -> Record:
    """Records that have the same names, as one list of names and one list a record."""
    names = list(records[0])
    return {"columns": names, "rows": [[record[name] for name in names] for record in records]}


def records(table: Mapping[str, Any]) -> list[Record]:
    """The inverse of ``columns``."""
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def where(found: Sequence[Record], **values: Any) -> list[Record]:
    """The records that have these values."""
    return [record for record in found if all(record[name] == value for name, value in values.items())]


@contextmanager
def command_line(doc: str | None, *, data: bool) -> Iterator[argparse.Namespace]:
    """The options of an experiment; tells how long it took, and turns our errors into one line."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", maxsplit=1)[0])
    if data:
        parser.add_argument("--data", type=Path, required=True, help="the CMS IPPS file (coterie data list)")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each setting (default: 10)")
    parser.add_argument("--out", type=Path, help="a folder (default: the committed results)")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: as many as processors"
    )
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.processes < 1:
        parser.error("Expected --seeds and --processes to be at least 1")
    begun = time.perf_counter()
    try:
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)  # a bad folder is found before the runs, not after
        yield arguments
    except (CoterieError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    _say(f"{time.perf_counter() - begun:.0f} seconds")


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
