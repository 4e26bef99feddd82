"""Cells dealt to processes of one thread each: their results do not depend on how many there are.

The processes are started anew (not forked), since torch's threads do not survive a fork. Each ends by itself when
the process that started it is gone, however that ended: its end of the pipe then closes.
"""

import signal
import traceback
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from coterie.attacks.cells import PREDICTOR, Cell, observation_for, predict_cells, run_cell, write_cell
from coterie.attacks.plan import AuditSettings, Condition, Material, prepare
from coterie.errors import CoterieError

Task = tuple[tuple[Condition, ...], int, tuple[str, ...]]  # attacks on a batch under one condition, or predictions


def here(material: Material, tasks: Sequence[Task], folder: Path) -> Generator[int, None, None]:
    """Do the tasks one after another in this process; yields 1 for each cell."""
    with _one_thread():
        for task in tasks:
            yield from _do(material, task, folder)


def in_processes(
    settings: AuditSettings, tasks: Sequence[Task], folder: Path, processes: int
) -> Generator[int, None, None]:
    """Do the tasks in ``processes`` others; yields 1 for each finished cell.

    Raises ``CoterieError`` as a process did, and when one ends from outside.
    """
    context = SpawnContext()
    left = list(reversed(tasks))
    workers: dict[Connection, SpawnProcess] = {}
    try:
        for _ in range(min(processes, len(tasks))):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(settings, folder, theirs), daemon=True)
            worker.start()
            theirs.close()
            workers[ours] = worker
            ours.send(left.pop())
        while workers:
            for ready in wait(list(workers)):
                assert isinstance(ready, Connection)
                try:
                    answer = ready.recv()
                except (EOFError, ConnectionResetError) as error:
                    raise CoterieError(
                        "Expected the audit's processes to live, found one ended from outside: was memory short? "
                        "Finished cells are kept: run the same command again"
                    ) from error
                if isinstance(answer, CoterieError):
                    raise answer
                if isinstance(answer, str):
                    raise RuntimeError(f"An attack failed:\n{answer}")
                if answer > 0:
                    yield answer
                elif left:
                    ready.send(left.pop())
                else:
                    ready.close()
                    workers.pop(ready).join()
    finally:
        for connection, worker in workers.items():
            connection.close()
            worker.terminate()
            worker.join()


def _work(settings: AuditSettings, folder: Path, connection: Connection) -> None:
    """One process: answers 1 for each cell, and 0 when it wants another task."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its processes
    with _one_thread(), suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            material = prepare(settings)
            while True:
                for done in _do(material, connection.recv(), folder):
                    connection.send(done)
                connection.send(0)
        except CoterieError as error:
            connection.send(error)
        except Exception as error:
            if isinstance(error, EOFError | OSError):
                raise
            connection.send(traceback.format_exc())


def _do(material: Material, task: Task, folder: Path) -> Iterator[int]:
    conditions, batch, attacks = task
    if attacks == (PREDICTOR,):
        for cell, record in predict_cells(material, batch, conditions):
            write_cell(folder, cell, record)
            yield 1
        return
    (condition,) = conditions
    observation = observation_for(material, condition, batch)
    for name in attacks:
        cell = Cell(name, condition, batch)
        write_cell(folder, cell, run_cell(material, cell, observation))
        yield 1


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)
