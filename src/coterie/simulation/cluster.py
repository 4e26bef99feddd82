"""A sweep's stacks as tasks of a Ray cluster, or of a Ray that is started on this machine for them."""

import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from ipaddress import ip_address
from tempfile import TemporaryDirectory
from typing import Any

from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.simulation import SimulatedRun, is_batched, simulate
from coterie.simulation.points import Record
from coterie.simulation.processes import one_line
from coterie.simulation.rows import Rows
from coterie.simulation.sweep import Runner, adding
from coterie.tasks import Task

LOCAL = "local"
_RETRIES = 3  # of a stack whose worker died
_SECONDS = 0.5  # between two looks at how far the stacks are
# Read by Ray when it is imported or started. On Linux it would listen on every interface, and it runs whatever code
# whoever connects sends it.
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1"}
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anyone
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns of a change to come
}


def over_ray(address: str) -> Runner:
    """A ``Runner`` that has each stack simulated by a Ray task, in one thread, with the results of ``in_this_process``.

    ``address`` is ``local``, for a Ray on this machine's loopback that lives as long as the sweep, or HOST:PORT of a
    cluster that this machine is part of and whose machines all have this coterie. The rows are shipped once. A stack
    whose worker dies is tried again, three times. A model that is not batched takes a machine's processors for
    itself, as it has processes of its own. Raises ``CoterieError`` for another address and where Ray is not
    installed; the runner does for a cluster that cannot be reached or used, and for a stack that fails.
    """
    if address != LOCAL and not re.fullmatch(r"[\w.-]+:\d{1,5}", address):
        raise CoterieError(f"Expected --ray {LOCAL} or HOST:PORT of a Ray cluster, found {address!r}")
    if find_spec("ray") is None:
        raise CoterieError("Expected Ray for --ray, found none: pip install 'coterie[ray]'")

    def run(
        task: Task, rows: Rows, stacks: Sequence[Sequence[SimulatedRun]], tell: Callable[[int, int], None]
    ) -> Generator[tuple[int, list[Record]], None, None]:
        if not stacks:
            return
        with _connected(address) as ray:
            try:
                yield from _run(ray, task, rows, stacks, tell)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, CoterieError):
                    raise error.cause from error
                raise CoterieError(
                    f"Expected a Ray task to simulate, found {one_line(error.cause)}; "
                    "the same without --ray shows where"
                ) from error
            except ray.exceptions.RayError as error:
                raise CoterieError(
                    f"Expected Ray's workers to live, found {one_line(error)}; finished grid points are kept: "
                    "run the same command again to go on"
                ) from error

    return run


def _run(
    ray: Any,
    task: Task,
    rows: Rows,
    stacks: Sequence[Sequence[SimulatedRun]],
    tell: Callable[[int, int], None],
) -> Iterator[tuple[int, list[Record]]]:
    processors = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    usable = [count for count in processors if count >= 1]
    if not usable:
        raise CoterieError("Expected a Ray cluster with processors, found none: start its workers first")
    each = 1 if is_batched(task, layout_of(task.build()), rows) else min(usable)
    tally = _tally(ray)
    work = ray.remote(num_cpus=each, max_retries=_RETRIES)(_simulate_stack)
    held = ray.put((task, rows))
    waiting = {
        work.remote(held, list(stack), place, tally, version("coterie")): place for place, stack in enumerate(stacks)
    }
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=_SECONDS)
        for place, rounds in ray.get(tally.read.remote()).items():
            tell(place, rounds)
        for answer in done:
            yield waiting.pop(answer), ray.get(answer)


def _simulate_stack(
    held: tuple[Task, Rows], stack: Sequence[SimulatedRun], place: int, tally: Any, wanted: str
) -> list[Record]:
    """In a worker."""
    if (found := version("coterie")) != wanted:
        raise CoterieError(f"Expected coterie {wanted} on every machine of the Ray cluster, found {found}")
    last = time.monotonic()

    def told(rounds: int) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= _SECONDS:
            last = now
            tally.write.remote(place, rounds)

    return [result.summary() for result in simulate(*held, stack, on_round=adding(told))]


def _tally(ray: Any) -> Any:
    """A process of the cluster that is told how far each stack is."""

    class Tally:
        """Defined here, Ray ships it by value: its process need not import torch, as this module does."""

        def __init__(self) -> None:
            self._rounds: dict[int, int] = {}

        def write(self, place: int, rounds: int) -> None:
            self._rounds[place] = rounds

        def read(self) -> dict[int, int]:
            return self._rounds

    return ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Tally).remote()


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Ray, connected for as long as the context is open."""
    local = address == LOCAL
    with _environment(_QUIET | (_ALONE | {"RAY_AUTH_TOKEN": _token()} if local else {})):
        ray = import_module("ray")
        if ray.is_initialized():
            raise CoterieError("Expected no Ray connection in this process, found one: call ray.shutdown() first")
        with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as logs:
            options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
            if local:
                own = len(os.sched_getaffinity(0))
                options |= {"num_cpus": own, "include_dashboard": False, "_temp_dir": logs}
            try:
                try:
                    if not local:
                        _knock(address)
                    ray.init(**options)
                except (OSError, OverflowError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                    raise CoterieError(
                        f"Expected to start or reach Ray for --ray {address}, found {one_line(error)}"
                        + ("" if local else "; HOST:PORT must be of a cluster that this machine is part of")
                    ) from error
                if local and not ip_address(ray.util.get_node_ip_address()).is_loopback:
                    raise CoterieError(
                        "Expected Ray to listen on loopback only, found other interfaces: import coterie before ray"
                    )
                yield ray
            finally:
                ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself looks for minutes, in silence, for a cluster that is not there. Raises ``OSError``."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=10).close()


@cache
def _token() -> str:
    """It keeps out the machine's other users. One for this process, as Ray reads its token once."""
    return secrets.token_hex(32)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
