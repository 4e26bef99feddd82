"""Child processes that must not outlive the one that forked them."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def signal_when_parent_ends(parent: int, number: signal.Signals) -> bool:
    """Have the kernel send this process ``number`` when its parent dies, where it can (Linux).

    ``parent`` is the process id that the parent had when it forked. False when it has ended already, in which case
    no signal will come.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent
