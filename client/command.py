"""``flower-client``: the options. Everything heavy is imported only once they are sound."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.config import ClientSettings, Granularity, Selection, load_settings
from coterie.mechanisms.events import Neighbourhood
from coterie.terminal import one_command, say


def flower_client(
    config: Annotated[Path | None, typer.Option(help="A TOML file with these settings; a flag overrides it.")] = None,
    server: Annotated[str | None, typer.Option(help="host:port of flower-server. (default: 127.0.0.1:9092)")] = None,
    task: Annotated[str | None, typer.Option(help="A built-in task, or package.module:attribute.")] = None,
    data: Annotated[Path | None, typer.Option(help="This data holder's file; it never leaves.")] = None,
    state: Annotated[Path | None, typer.Option(help="Folder for key, ledger and model. Keep it with the data.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="The most pure privacy loss ε, over all runs on this data.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ at which the tight price is shown. (default: 1e-5)")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="ν: a release of n numbers costs n/ν.")] = None,
    neighbourhood: Annotated[
        Neighbourhood | None,
        typer.Option(help="fixed is d-private; relative is the paper's and is not. (default: fixed)"),
    ] = None,
    granularity: Annotated[
        Granularity | None, typer.Option(help="Clip and noise by layer, or as a whole. (default: layer)")
    ] = None,
    clipping_norm: Annotated[
        float | None, typer.Option(help="Public radius C of every layer. (default: the task's)")
    ] = None,
    relative_floor: Annotated[
        float | None,
        typer.Option(help="Relative mode: least noise scale, as a share of the clipping norm. (default: 0.001)"),
    ] = None,
    selection: Annotated[
        Selection | None,
        typer.Option(help="Choice of hypothesis: argmin is not private, the others are. (default: argmin)"),
    ] = None,
    selection_epsilon: Annotated[float | None, typer.Option(help="ε of a private choice, each round.")] = None,
    selection_loss_bound: Annotated[
        float | None, typer.Option(help="Losses are clipped to this (exponential).")
    ] = None,
    validation: Annotated[
        bool | None,
        typer.Option(
            "--validation/--no-validation", help="Tell losses, unprotected, when held out. (default: validation)"
        ),
    ] = None,
    share_sample_count: Annotated[
        bool | None,
        typer.Option(
            "--share-sample-count/--no-share-sample-count", help="Send the row count, unprotected. (default: no)"
        ),
    ] = None,
    fine_tune: Annotated[
        int | None, typer.Option(help="Epochs on the own rows at the end; nothing leaves. (default: 0)")
    ] = None,
    fleet: Annotated[int | None, typer.Option(help="Run N clients of one data file from one process.")] = None,
    partition_by: Annotated[str | None, typer.Option(help="What makes a client: provider, zip, writer, index.")] = None,
    strict: Annotated[
        bool | None,
        typer.Option("--strict/--no-strict", help="An unusable row is an error, not skipped. (default: no)"),
    ] = None,
    retry_for: Annotated[
        float | None, typer.Option(help="Seconds to look for an absent server. (default: 600)")
    ] = None,
) -> None:
    """Take part in a federation as one data holder (or a fleet of them) until the run is over."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    settings = load_settings(ClientSettings, config, flags)
    from coterie.client.fleet import single_threaded

    single_threaded()
    from coterie.client.app import take_part

    raise typer.Exit(take_part(settings, log=say))


def main() -> None:
    """The entry point."""
    one_command("flower-client", flower_client)
