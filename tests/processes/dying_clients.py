"""Clients that die by SIGKILL at the N-th line of the path from "trained" to "sent": ADDRESS FOLDER [forgetful].

A line "NAME N" on standard input forks a client with its state in FOLDER/NAME that takes part in one round and kills
itself right before the N-th line of coterie's client code that runs after training has finished. The process prints
"NAME killed", or "NAME finished" where the path has fewer lines. A forgetful client, for the negative control, writes
its ledger only after its reply was sent.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from coterie.client.fleet import single_threaded

single_threaded()

import coterie.client
from coterie.client import app, participation
from coterie.client.assembly import data_holder, read_dataset
from coterie.client.engine import serve
from coterie.client.keys import load_or_create_key
from coterie.client.ledger import Ledger
from coterie.config import ClientSettings
from coterie.tasks import load_task

CLIENT_CODE = str(Path(coterie.client.__file__).parent)


def die_at(line: int) -> None:
    """Have this process kill itself before the ``line``-th line of client code that follows training."""
    train = participation.train
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(CLIENT_CODE):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    def train_then_trace(*arguments: Any, **options: Any) -> Any:
        trained = train(*arguments, **options)
        sys.settrace(trace)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # the frames that are open already: the path goes on in them
            frame.f_trace = trace
            frame = frame.f_back
        return trained

    participation.train = train_then_trace


def live(address: str, folder: Path, line: int, *, forgetful: bool) -> None:
    """One client, one round."""
    record, late = Ledger.record_release, []
    if forgetful:
        Ledger.record_release = lambda *release, **options: late.append((release, options))  # type: ignore[method-assign]
    settings = ClientSettings(server=address, task="synthetic", state=folder, noise_multiplier=2, budget=1)
    task = load_task("synthetic")
    answered = []

    def handle(message: Any) -> Any:
        answered.append(message)
        return app.answer(holder, message)

    die_at(line)
    with data_holder(settings, task, read_dataset(settings, task).clients[0]) as holder:
        key = load_or_create_key(folder / "key.pem")
        serve(address, key, handle, retry_for=60, log=lambda said: None, stop=lambda: bool(answered))
        for release, options in late:
            record(*release, **options)


def main(address: str, folder: Path, *, forgetful: bool) -> None:
    """Fork a client for each line of input, and say how each one ended."""
    names: dict[int, str] = {}
    for order in sys.stdin:
        if order.strip():
            name, line = order.split()
            process = os.fork()
            if process == 0:
                live(address, folder / name, int(line), forgetful=forgetful)
                os._exit(0)
            names[process] = name
            continue
        while names:  # an empty line: wait for all
            process, status = os.wait()
            print(names.pop(process), "killed" if os.waitstatus_to_exitcode(status) == -signal.SIGKILL else "finished")
        print("", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), forgetful=sys.argv[3:] == ["forgetful"])
