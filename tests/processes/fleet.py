"""A fleet whose members do what their names say. Arguments: a folder for marks, a server or -, the members."""

import os
import signal
import sys
import time
from pathlib import Path

from coterie.client.fleet import run_fleet, single_threaded

single_threaded()

import torch
from flwr.app import Message

from coterie.client.engine import serve
from coterie.client.keys import load_or_create_key
from coterie.errors import CoterieError

FOLDER = Path(sys.argv[1])
SERVER = sys.argv[2]


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def proportional_set_size(process: int) -> int:
    """Memory in kB, shared pages divided among those who share them (Linux)."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    return int(text.split("\nPss:")[1].split()[0])


def work() -> float:
    """A little of what a client does with torch."""
    layer = torch.nn.Linear(30, 2)
    loss = (layer(torch.randn(100, 30)) ** 2).sum()
    loss.backward()
    return float(loss.detach())


def run_one(member: str) -> None:
    """One member: the part of its name before the colon says what to do."""
    mark = FOLDER / member.replace(":", "-")
    action = member.partition(":")[0]
    if action == "work":
        mark.write_text(repr(work()))
    elif action == "raise":
        raise ValueError("bad luck")
    elif action == "refuse":
        raise CoterieError("no data for this client")
    elif action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "wait":
        mark.write_text(str(os.getpid()))
        try:
            time.sleep(120)
        finally:
            mark.write_text("left")
    elif action == "serve":
        done = False

        def handle(message: Message) -> Message:
            nonlocal done
            work()
            done = message.metadata.message_type == "query"
            mark.write_text(str(proportional_set_size(os.getpid())))
            return Message(message.content, reply_to=message)

        serve(SERVER, load_or_create_key(mark.with_suffix(".key")), handle, retry_for=60, log=say, stop=lambda: done)


if __name__ == "__main__":
    sys.exit(run_fleet(sys.argv[3:], run_one, name=str, log=say))
