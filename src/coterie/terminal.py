"""How coterie's commands speak: lines on the terminal, one line for an error, no traceback for a user's mistake."""

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import click
import typer

from coterie.errors import CoterieError


def say(line: str) -> None:
    """One line of progress, with the time of day, on standard error: standard output is for results."""
    # One write: a fleet's processes share the terminal, and print would write the line's end on its own.
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


def say_item(text: str) -> None:
    """One paragraph of a list, wrapped for a terminal, on standard error."""
    print(textwrap.fill(text, width=110, initial_indent="  • ", subsequent_indent="    "), file=sys.stderr, flush=True)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, for as long as the context is open (in a process's main thread)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def one_command(name: str, command: Callable[..., None]) -> NoReturn:
    """Run a program that is one command."""
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command(name)(command)
    run(name, lambda: application)


def run(name: str, application: Callable[[], typer.Typer]) -> NoReturn:
    """Run a command line and end the process.

    A ``CoterieError`` or a wrong option ends it with one line and exit status 2, Ctrl-C with one line and 130.
    """
    try:
        status = application()(prog_name=name, standalone_mode=False)
    except (CoterieError, ValueError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except click.ClickException as error:
        print(f"{name}: error: {error.format_message()} (see {name} --help)", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Nobody reads what is left in the buffer either; without this the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    if status == 130:  # how typer hands on a Ctrl-C
        print(f"{name}: interrupted", file=sys.stderr)
    sys.exit(status if isinstance(status, int) else 0)
