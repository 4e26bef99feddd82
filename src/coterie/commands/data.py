"""``coterie data``: the public data sets, fetched to a cache folder and checked."""

from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from coterie.datasets.sources import SOURCES, cache_folder, source_named

app = typer.Typer(
    no_args_is_help=True,
    help="Fetch and check the public data sets. They are kept in $COTERIE_DATA, or else in ~/.cache/coterie.",
)

Name = Annotated[str, typer.Argument(help=f"One of {', '.join(SOURCES)}.")]


@app.command("list")
def list_data() -> None:
    """List the data sets, where they come from, and whether they are on this machine."""
    for source in SOURCES.values():
        folder = cache_folder() / source.name
        here = all((folder / file).is_file() for file in source.files)
        print(f"{source.name}: {f'here, {source.data_path(folder)}' if here else 'not here'}")
        print(f"  {source.title}")
        print(f"  {source.size}, from")
        for item in source.downloads:
            print(f"    {item.url}")
        if source.remark:
            print(f"  Note: {source.remark}.")


@app.command()
def fetch(name: Name) -> None:
    """Download the data set NAME (hospital, femnist or mnist) from its public source; run it again to resume."""
    from coterie.datasets.download import open_client
    from coterie.datasets.store import fetch as fetch_source

    source = source_named(name)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with open_client() as client, Progress(*columns, console=Console(stderr=True)) as bars:

        def bar(file: str) -> Callable[[int, int | None], None]:
            task = bars.add_task(file, total=None, visible=False)
            return lambda done, total: bars.update(task, completed=done, total=total, visible=True)

        found = fetch_source(source, cache_folder() / name, client=client, progress=bar)
    print(f"{name}: {_counts(found.rows, found.holders)}; use it with --data {found.path}")


@app.command()
def check(name: Name) -> None:
    """Check the fetched data set NAME (hospital, femnist or mnist): its checksums, and that it can be read."""
    from coterie.datasets.store import check as check_source

    found = check_source(source_named(name), cache_folder() / name)
    print(f"{name}: {_counts(found.rows, found.holders)} in {found.path}; SHA-256 compared with {found.checksums}")


def _counts(rows: int, holders: int) -> str:
    return f"{rows:,} rows of {holders:,} data holders" if holders > 1 else f"{rows:,} rows"
