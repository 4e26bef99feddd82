"""Children that end with their parent."""

import os
import signal
import subprocess
import sys
import time

import pytest

from coterie.orphans import signal_when_parent_ends

# Two children that wait, the first of which asked for a signal; their parent tells who they are and waits too.
PROGRAM = """
import os, signal, time
from coterie.orphans import signal_when_parent_ends
parent = os.getpid()
for asks in (True, False):
    child = os.fork()
    if child == 0:
        if asks:
            assert signal_when_parent_ends(parent, signal.SIGKILL)
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


def alive(process: int) -> bool:
    """Whether it runs: what has ended and waits to be collected does not."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl(PR_SET_PDEATHSIG)")
def test_a_child_that_asked_ends_with_its_parent_and_another_does_not() -> None:
    children: list[int] = []
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            children = [int(parent.stdout.readline()) for _ in range(2)]
            assert all(map(alive, children))
            parent.kill()
            parent.wait()
            deadline = time.monotonic() + 30
            while sum(map(alive, children)) > 1 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert sum(map(alive, children)) == 1
        finally:
            for child in children:
                if alive(child):
                    os.kill(child, signal.SIGKILL)


def test_a_parent_that_has_ended_is_seen() -> None:
    assert not signal_when_parent_ends(os.getpid(), signal.SIGTERM)  # its own parent is another process
    assert signal_when_parent_ends(os.getppid(), signal.Signals(signal.SIGCHLD))  # ignored, should it come
