"""The pre-forked fleet, as a real process tree."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from coterie.address import Address
from coterie.client.fleet import run_fleet
from coterie.server.engine import superlink

FLEET = Path(__file__).parent / "processes" / "fleet.py"
PATIENCE = 60.0
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    fleets: list[subprocess.Popen[str]] = []

    def start_one(*members: str, server: str = "-") -> subprocess.Popen[str]:
        command = [sys.executable, str(FLEET), str(tmp_path), server, *members]
        fleets.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        )
        return fleets[-1]

    yield start_one
    for fleet in fleets:
        fleet.kill()
        fleet.communicate()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE:.0f} s in vain for {what}")
        time.sleep(0.02)


def waiting(marks: list[Path]) -> list[int]:
    """The process ids of members that wait, once all of them do."""
    until(lambda: all(mark.exists() and mark.read_text().isdigit() for mark in marks), "the members to start")
    return [int(mark.read_text()) for mark in marks]


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_member_that_fails_is_named_in_one_line_and_the_others_go_on(start: Start, tmp_path: Path) -> None:
    fleet = start("raise:1", "die:2", "refuse:3", "work:4", "work:5", "work:6")
    output, _ = fleet.communicate(timeout=PATIENCE)
    assert fleet.returncode == 1
    raised, died, refused = sorted(output.splitlines(), key=lambda line: line.partition(":")[2])
    assert raised.startswith("raise:1 failed: ValueError: bad luck (fleet.py:")
    assert died == "die:2 was killed by SIGKILL; the others go on"
    assert refused == "refuse:3: no data for this client"
    losses = [float((tmp_path / f"work-{i}").read_text()) for i in (4, 5, 6)]
    assert len(set(losses)) == 3  # one inherited seed would give the same loss three times


@pytest.mark.parametrize("terminal", [True, False])
def test_a_signal_ends_every_member_and_all_are_reaped(start: Start, tmp_path: Path, terminal: bool) -> None:
    fleet = start("wait:1", "wait:2")
    marks = [tmp_path / "wait-1", tmp_path / "wait-2"]
    members = waiting(marks)
    if terminal:
        os.killpg(fleet.pid, signal.SIGINT)  # Ctrl-C in a terminal goes to every process
    else:
        fleet.send_signal(signal.SIGTERM)
    output, _ = fleet.communicate(timeout=PATIENCE)
    assert (fleet.returncode, output) == (130, "")
    assert [mark.read_text() for mark in marks] == ["left", "left"]
    assert not any(alive(member) for member in members)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl(PR_SET_PDEATHSIG)")
def test_members_end_when_the_fleet_is_killed(start: Start, tmp_path: Path) -> None:
    fleet = start("wait:1", "wait:2")
    marks = [tmp_path / "wait-1", tmp_path / "wait-2"]
    members = waiting(marks)
    fleet.kill()
    until(lambda: not any(alive(member) for member in members), "the orphans to end")
    assert [mark.read_text() for mark in marks] == ["left", "left"]


def test_a_fleet_takes_part_in_a_run_in_little_memory(start: Start, tmp_path: Path) -> None:
    names = [f"serve:{number}" for number in range(8)]
    with superlink(Address("127.0.0.1", 0)) as grid:
        fleet = start(*names, server=str(grid.address))
        until(lambda: len(grid.get_node_ids()) == len(names), "the fleet to join")
        assert len(set(grid.identities().values())) == len(names)
        content = RecordDict({"config": ConfigRecord({"number": 1})})
        for kind in ("train", "train", "query"):
            messages = [Message(content, node, kind, ttl=PATIENCE) for node in grid.get_node_ids()]
            replies = grid.send_and_receive(messages, timeout=PATIENCE)
            assert [reply.has_error() for reply in replies] == [False] * len(names)
        output, _ = fleet.communicate(timeout=PATIENCE)
    assert (fleet.returncode, output) == (0, "")
    sizes = [int((tmp_path / name.replace(":", "-")).read_text()) for name in names]
    print("kB a member, shared pages divided:", sizes)
    # Seen: 35 MB with 8 members, 26 MB with 20. A process of its own with torch and flwr imported holds about 250.
    assert max(sizes) < 100_000


def test_what_does_not_survive_a_fork_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_fork() -> int:
        raise AssertionError

    monkeypatch.setattr(os, "fork", must_not_fork)
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    with pytest.raises(RuntimeError, match="one thread before the fork"):
        run_fleet(["x"], print, name=str, log=print)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(RuntimeError, match="torch on one thread"):
        run_fleet(["x"], print, name=str, log=print)


def test_a_machine_that_cannot_fork_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    lines: list[str] = []
    monkeypatch.setattr(os, "fork", full)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert run_fleet(["x", "y"], print, name=str, log=lines.append) == 1
    assert lines == ["only 0 of 2 clients could be started: Resource temporarily unavailable"]
