"""Sweeps over a Ray that is started on this machine: the same results, points kept, workers that die."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import CoterieError
from coterie.simulation import SimulatedRun
from coterie.simulation.cluster import over_ray
from coterie.simulation.points import Record
from coterie.simulation.rows import Rows
from coterie.simulation.sweep import Sweep, grid, run_sweep
from coterie.tasks import ClientData, Task

if find_spec("ray") is None:  # not imported here: coterie must say first what it is to listen on
    pytest.skip("needs coterie[ray]", allow_module_level=True)

Brisk = tuple[Task, list[ClientData]]
BASE = SimulatedRun(rounds=2, clients_per_round=4, validate_every=1)


# 127.0.0.1, ::1 and ::ffff:127.0.0.1 as the kernel writes them.
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def descendants(process: int) -> list[int]:
    """A process's children, theirs, and so on."""
    found = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, thread.read_text().split()):
            found += [child, *descendants(child)]
    return found


def listening(processes: list[int]) -> set[str]:
    """The addresses, as ADDRESS:PORT in the kernel's hexadecimal, on which ``processes`` listen for TCP."""
    inodes = set()
    for process in processes:
        for file in Path(f"/proc/{process}/fd").glob("*"):
            try:
                inodes.add(file.readlink().name)
            except OSError:
                continue  # closed meanwhile
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}


def swept(task: Task, clients: list[ClientData], folder: Path | None, *sweeps: str, **rest: Any) -> list[Record]:
    return run_sweep(task, Rows.of(clients), Sweep(BASE, grid(sweeps), 2, folder), **rest)


@pytest.mark.slow
def test_over_ray_a_sweep_has_the_same_bits_and_goes_on_where_it_was(brisk: Brisk, tmp_path: Path) -> None:
    task, clients = brisk
    told: list[int] = []
    here = swept(task, clients, tmp_path / "here", "k=1,2", "nu=0,3")
    swept(task, clients, tmp_path / "there", "k=2", "nu=0,3")
    there = swept(task, clients, tmp_path / "there", "k=1,2", "nu=0,3", runner=over_ray("local"), on_rounds=told.append)
    assert there == here
    assert sum(told) == 2 * 2 * 2  # of k = 1: two values of ν, two seeds, two rounds
    names = [file.name for file in (tmp_path / "here" / "points").iterdir()]
    assert len(names) == 4
    for name in names:
        assert (tmp_path / "there" / "points" / name).read_bytes() == (tmp_path / "here" / "points" / name).read_bytes()


@pytest.mark.slow
def test_a_stack_whose_worker_dies_is_tried_again(brisk: Brisk, tmp_path: Path) -> None:
    task, clients = brisk
    here, died, loss = os.getpid(), tmp_path / "died", task.loss

    def dies_once(outputs: Any, targets: Any) -> Any:
        if os.getpid() != here and not died.exists():
            died.touch()
            os._exit(1)
        return loss(outputs, targets)

    expected = swept(task, clients, None, "k=2")
    assert swept(replace(task, loss=dies_once), clients, None, "k=2", runner=over_ray("local")) == expected
    assert died.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("death", "Expected Ray's workers to live, found WorkerCrashedError"),
        ("error", "found ArithmeticError: of my own making; the same without --ray shows where"),
    ],
)
def test_a_stack_that_cannot_be_simulated_is_one_line(brisk: Brisk, ending: str, words: str) -> None:
    task, clients = brisk
    here, loss = os.getpid(), task.loss

    def fails(outputs: Any, targets: Any) -> Any:
        if os.getpid() != here and ending == "death":
            os._exit(1)
        if os.getpid() != here:
            raise ArithmeticError("of my own\nmaking")
        return loss(outputs, targets)

    with pytest.raises(CoterieError, match=words) as caught:
        swept(replace(task, loss=fails), clients, None, "k=2", runner=over_ray("local"))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_local_ray_listens_on_loopback_only_and_leaves_nothing_behind(brisk: Brisk) -> None:
    task, clients = brisk
    seen: list[set[str]] = []

    def look(_: int) -> None:
        seen.append(listening(descendants(os.getpid())))

    swept(task, clients, None, "k=2", runner=over_ray("local"), on_rounds=look)
    addresses = set().union(*seen)
    assert len(addresses) > 3
    assert {address.rpartition(":")[0] for address in addresses} <= LOOPBACK
    assert not listening(descendants(os.getpid()))


@pytest.mark.parametrize(
    "address", ["", "far", "far:", ":1", "http://far:1", "ray://far:10001", "far:1x", "far:123456"]
)
def test_another_address_is_one_line(address: str) -> None:
    with pytest.raises(CoterieError, match="Expected --ray local or HOST:PORT of a Ray cluster, found"):
        over_ray(address)


def test_a_cluster_that_is_not_there_is_one_line_at_once(brisk: Brisk) -> None:
    task, clients = brisk
    for address in ("127.0.0.1:9", "127.0.0.1:99999", "no.such.host.invalid:6379"):
        with pytest.raises(CoterieError, match=f"Expected to start or reach Ray for --ray {address}, found"):
            swept(task, clients, None, "k=2", runner=over_ray(address))


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.simulation.cluster.find_spec", lambda _: None)
    with pytest.raises(CoterieError, match=r"pip install 'coterie\[ray\]'"):
        over_ray("local")
