"""Many clients on one machine: one process that imports everything, then forks a child per client.

Children share the parent's memory until they write to it: with torch imported, a child costs its own working set
and not the libraries again. The price is care about what a fork copies; ``run_fleet`` checks what it can.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from coterie.errors import CoterieError
from coterie.orphans import signal_when_parent_ends

FAILED = 1
INTERRUPTED = 130
FORWARDED = (signal.SIGINT, signal.SIGTERM)

Job = TypeVar("Job")
Log = Callable[[str], None]


def single_threaded() -> None:
    """Keep the numerical libraries of this process and its children to one thread each.

    To be called before numpy and torch are imported. N clients with a thread pool each only get in each other's
    way, and a pool that the parent has started does not survive a fork: a child that uses it waits for ever.
    """
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    import torch

    torch.set_num_threads(1)


def run_fleet(jobs: Sequence[Job], run_one: Callable[[Job], None], *, name: Callable[[Job], str], log: Log) -> int:
    """Run ``run_one(job)`` for every job, each in a child process of its own; 0 when all of them returned.

    A child that raises or is killed is reported in one line with its job's name, and the others go on; the result
    is then 1. SIGINT and SIGTERM reach the children as ``KeyboardInterrupt``; a second one kills them. The result
    is then 130, once all have ended. Children also end when this process is killed (Linux).

    Everything heavy must be imported before, and nothing may run but this thread: ``RuntimeError`` when there are
    other Python threads or torch may use several. What must differ between clients must be made in ``run_one``,
    after the fork: connections, and above all generators of noise. Two children that inherit one generator would
    draw the same noise. (torch's default generator is seeded afresh in each child.)
    """
    import torch

    import coterie.client.engine  # noqa: F401  (once, for all children)

    if threading.active_count() > 1:
        raise RuntimeError(f"Expected one thread before the fork, found {threading.active_count()}")
    if torch.get_num_threads() > 1:
        raise RuntimeError("Expected torch on one thread before the fork: call single_threaded() first")
    names: dict[int, str] = {}
    failures = 0
    gc.collect()
    gc.freeze()  # the collector would write to every object, and so copy all of the parent's memory
    try:
        with _forwarding(names) as interrupted:
            try:
                for job in jobs:
                    if interrupted:
                        break
                    # A signal between the fork and the note of it would miss the child.
                    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
                    try:
                        names[_fork(job, run_one, name(job), log)] = name(job)
                    finally:
                        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            except OSError as error:
                _signal_all(names, signal.SIGTERM)
                log(f"only {len(names)} of {len(jobs)} clients could be started: {error.strerror}")
                failures += 1
            while names:
                process, status = os.wait()
                who = names.pop(process, None)
                code = os.waitstatus_to_exitcode(status)
                if who is None or code == 0 or (interrupted and code in (INTERRUPTED, -signal.SIGKILL)):
                    continue
                failures += 1
                if code < 0:
                    log(f"{who} was killed by {signal.Signals(-code).name}; the others go on")
    finally:
        gc.unfreeze()
    if interrupted:
        return INTERRUPTED
    return FAILED if failures else 0


def _fork(job: Job, run_one: Callable[[Job], None], name: str, log: Log) -> int:
    """Start a child. Returns its process id, in the parent; in the child it does not return."""
    sys.stdout.flush()  # else the child would print what is buffered here once more
    sys.stderr.flush()
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    code = FAILED
    try:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the parent passes it on
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            code = _run_child(parent, lambda: run_one(job), name, log)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)  # whatever happens, a child never goes on as its parent


def _run_child(parent: int, run: Callable[[], None], name: str, log: Log) -> int:
    try:
        if not signal_when_parent_ends(parent, signal.SIGTERM):
            raise KeyboardInterrupt
        import torch

        torch.seed()
        run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except CoterieError as error:
        log(f"{name}: {error}")
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        log(f"{name} failed: {type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})")
    else:
        return 0
    return FAILED


@contextmanager
def _forwarding(names: dict[int, str]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to the children, the second time as SIGKILL. Yields the signals seen so far."""
    seen: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        _signal_all(names, signal.SIGTERM if len(seen) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_all(names: dict[int, str], number: int) -> None:
    for process in list(names):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
