"""``flower-server``: the options. Everything heavy is imported only once they are sound."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.config import Assignment, RunSettings, Weighting, load_settings
from coterie.mechanisms.events import Neighbourhood
from coterie.terminal import one_command, say


def flower_server(
    config: Annotated[Path | None, typer.Option(help="A TOML file with these settings; a flag overrides it.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port for the clients. [127.0.0.1:9092]")] = None,
    task: Annotated[str | None, typer.Option(help="A built-in task, or package.module:attribute.")] = None,
    hypotheses: Annotated[int | None, typer.Option(help="k, how many models are kept. [3]")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds at most. [20]")] = None,
    clients_per_round: Annotated[int | None, typer.Option(help="Clients sampled each round. [10]")] = None,
    min_clients: Annotated[int | None, typer.Option(help="Clients to wait for before round 1. [2]")] = None,
    round_timeout: Annotated[float | None, typer.Option(help="Seconds a round waits for replies. [120]")] = None,
    assignment: Annotated[
        Assignment | None,
        typer.Option(help="Who groups updates: the client sends its index, or the server goes by distance. [client]"),
    ] = None,
    weighting: Annotated[
        Weighting | None, typer.Option(help="An update's weight: equal, or its row count. [equal]")
    ] = None,
    validation_fraction: Annotated[
        float | None, typer.Option(help="Share of the clients held out for validation. [0.2]")
    ] = None,
    validate_every: Annotated[int | None, typer.Option(help="Rounds between validations. [5]")] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many validations without a better one; 0 never. [0]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of models, sampling and held-out split (not of noise). [0]")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Local passes over the data. [the task's]")] = None,
    step_size: Annotated[float | None, typer.Option(help="Local step size. [the task's]")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Local batch size. [the task's]")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="ν to propose; a client with a larger one refuses. [none]")
    ] = None,
    neighbourhood: Annotated[Neighbourhood | None, typer.Option(help="Neighbourhood to propose. [none]")] = None,
    clipping_norm: Annotated[float | None, typer.Option(help="Clipping norm of every layer to propose. [none]")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for models, history and summary. [runs/latest]")] = None,
) -> None:
    """Run one federation: wait for the clients, train k hypotheses, write them to --out, and end."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    settings = load_settings(RunSettings, config, flags)
    from coterie.server.app import describe, serve

    print(describe(serve(settings, log=say)))


def main() -> None:
    """The entry point."""
    one_command("flower-server", flower_server)
