"""How coterie's commands speak: lines on the terminal, one line for an error, no traceback for a user's mistake."""

import sys
import textwrap
import time
from collections.abc import Callable
from typing import NoReturn

import click
import typer

from coterie.errors import CoterieError


def say(line: str) -> None:
    """One line of progress, with the time of day, on standard error: standard output is for results."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def say_item(text: str) -> None:
    """One paragraph of a list, wrapped for a terminal, on standard error."""
    print(textwrap.fill(text, width=110, initial_indent="  • ", subsequent_indent="    "), file=sys.stderr, flush=True)


def one_command(name: str, command: Callable[..., None]) -> NoReturn:
    """Run a program that is one command."""
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command(name)(command)
    run(name, application)


def run(name: str, application: typer.Typer) -> NoReturn:
    """Run a command line; a ``CoterieError`` or a wrong option ends it with one line and exit status 2."""
    try:
        status = application(prog_name=name, standalone_mode=False)
    except (CoterieError, ValueError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except click.ClickException as error:
        print(f"{name}: error: {error.format_message()} (see {name} --help)", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)
