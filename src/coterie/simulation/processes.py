"""A sweep's stacks in processes of this machine, as many at a time as it has processors."""

import mmap
import os
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.simulation import SimulatedRun, is_batched, simulate
from coterie.simulation.points import Record
from coterie.simulation.rows import Rows
from coterie.simulation.sweep import adding, in_this_process
from coterie.tasks import Task

_SECONDS = 0.2  # between two looks at how far the stacks are


def in_processes(
    task: Task, rows: Rows, stacks: Sequence[Sequence[SimulatedRun]], tell: Callable[[int, int], None]
) -> Generator[tuple[int, list[Record]], None, None]:
    """A ``Runner`` with the results of ``in_this_process``: each stack in a process of its own, in one thread.

    The processes are forked, so that they share the rows. A single stack, and models that are not batched, whose
    clients have processes already, are simulated here. Raises ``CoterieError`` where a process is ended from outside.
    """
    at_once = min(len(stacks), len(os.sched_getaffinity(0)))
    if at_once < 2 or not is_batched(task, layout_of(task.build()), rows):
        yield from in_this_process(task, rows, stacks, tell)
        return
    rounds = np.frombuffer(mmap.mmap(-1, 8 * len(stacks)), np.int64)  # so far, of each stack; written by its process
    waiting = list(enumerate(stacks))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    with ExitStack() as ends:
        while waiting or running:
            while waiting and len(running) < at_once:
                place, stack = waiting.pop(0)
                answer, process = _start(task, rows, stack, rounds[place : place + 1])
                ends.callback(_end, process)
                running[answer] = place, process
            done = wait(list(running), _SECONDS)
            for place, _ in running.values():
                tell(place, int(rounds[place]))
            for answer in list(running):
                if answer in done:
                    place, process = running.pop(answer)
                    yield place, _records(answer)
                    process.join()


def _start(
    task: Task, rows: Rows, stack: Sequence[SimulatedRun], rounds: NDArray[np.int64]
) -> tuple[Connection, BaseProcess]:
    context = get_context("fork")
    answer, end = context.Pipe(duplex=False)
    process = context.Process(target=_simulate, args=(task, rows, stack, rounds, end), daemon=True)
    process.start()
    end.close()  # here: when the process's own end closes, the answer ends
    return answer, process


def _simulate(
    task: Task, rows: Rows, stack: Sequence[SimulatedRun], rounds: NDArray[np.int64], end: Connection
) -> None:
    """In a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its processes
    found: list[Record] | CoterieError
    on_round = adding(partial(_note, rounds, os.getppid()))
    try:
        found = [result.summary() for result in simulate(task, rows, stack, on_round=on_round)]
    except CoterieError as error:
        found = error
    except Exception as error:  # whatever a task's own functions raise
        found = CoterieError(
            f"Expected task {task.name!r} to be simulated, found {one_line(error)}; "
            "with --seeds 1 and no --sweep Python shows where"
        )
    end.send(found)


def _note(rounds: NDArray[np.int64], parent: int, so_far: int) -> None:
    rounds[0] = so_far
    if os.getppid() != parent:
        raise SystemExit  # a parent that was killed could not end its processes


def _records(answer: Connection) -> list[Record]:
    try:
        found: list[Record] | CoterieError = answer.recv()
    except EOFError:
        raise CoterieError(
            "Expected the sweep's processes to live, found one ended: was memory short? Finished grid points are kept: "
            "run the same command again to go on"
        ) from None
    if isinstance(found, CoterieError):
        raise found
    return found


def one_line(error: BaseException) -> str:
    """What an error says, as one line that is not too long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'…' if len(text) > 300 else ''}"


def _end(process: BaseProcess) -> None:
    if process.is_alive():
        process.terminate()
    process.join()
    process.close()
