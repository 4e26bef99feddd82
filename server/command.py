"""``flower-server``: the options. Everything heavy is imported only once they are sound."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.config import INTERRUPTED, Assignment, Reseed, RunSettings, Start, Weighting, load_settings
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.terminal import one_command, say, terminable


def flower_server(
    config: Annotated[Path | None, typer.Option(help="A TOML file with these settings; a flag overrides it.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port for the clients. (default: 127.0.0.1:9092)")] = None,
    task: Annotated[str | None, typer.Option(help="A built-in task, or package.module:attribute.")] = None,
    hypotheses: Annotated[int | None, typer.Option(help="k, how many models are kept. (default: 3)")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds at most. (default: 20)")] = None,
    clients_per_round: Annotated[int | None, typer.Option(help="Clients sampled each round. (default: 10)")] = None,
    min_clients: Annotated[int | None, typer.Option(help="Clients to wait for before round 1. (default: 2)")] = None,
    round_timeout: Annotated[
        float | None, typer.Option(help="Seconds a round waits for replies. (default: 120)")
    ] = None,
    assignment: Annotated[
        Assignment | None,
        typer.Option(
            help="Who groups updates: the client sends its index, or the server goes by distance. (default: client)"
        ),
    ] = None,
    weighting: Annotated[
        Weighting | None, typer.Option(help="An update's weight: equal, or its row count. (default: equal)")
    ] = None,
    start: Annotated[
        Start | None,
        typer.Option(help="Hypotheses of round 1: independent draws, one shared, or far apart. (default: independent)"),
    ] = None,
    reseed: Annotated[
        Reseed | None,
        typer.Option(help="Whether an idle hypothesis becomes a copy of the largest; off as published. (default: on)"),
    ] = None,
    reseed_after: Annotated[
        int | None,
        typer.Option(help="Rounds with under 1 % of the choices that make a hypothesis idle. (default: 5)"),
    ] = None,
    validation_fraction: Annotated[
        float | None, typer.Option(help="Share of the clients held out for validation. (default: 0.2)")
    ] = None,
    validate_every: Annotated[int | None, typer.Option(help="Rounds between validations. (default: 5)")] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many validations without a better one; 0 never. (default: 0)")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of models, sampling and held-out split (not of noise). (default: 0)")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Local passes over the data. (default: the task's)")] = None,
    step_size: Annotated[float | None, typer.Option(help="Local step size. (default: the task's)")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Local batch size. (default: the task's)")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="ν to propose; a client with a larger one refuses. (default: none)")
    ] = None,
    neighbourhood: Annotated[
        Neighbourhood | None, typer.Option(help="Neighbourhood to propose. (default: none)")
    ] = None,
    clipping_norm: Annotated[
        float | None, typer.Option(help="Clipping norm of every layer to propose. (default: none)")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for models, history and summary. (default: runs/latest)")
    ] = None,
) -> None:
    """Run one federation: wait for the clients, train k hypotheses, write them to --out, and end."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    settings = load_settings(RunSettings, config, flags)
    from coterie.server.app import describe, serve

    with terminable():
        summary = serve(settings, log=say)
    print(describe(summary))
    if summary.stopped == INTERRUPTED:
        raise typer.Exit(130)
    if not summary.updates:
        raise CoterieError("Expected updates to average, found none: see the refusals and failures above")


def main() -> None:
    """The entry point."""
    one_command("flower-server", flower_server)
