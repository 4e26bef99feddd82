"""The public data sets on this machine: fetched, checked, and remembered by checksum."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from coterie.datasets.download import Progress, download, sha256_of
from coterie.datasets.federated_emnist import convert
from coterie.datasets.sources import Download, PublicSource
from coterie.errors import CoterieError
from coterie.storage import write_atomically
from coterie.tasks import DataSource, load_task

SUMS = "SHA256SUMS"  # in sha256sum's own format
INCOMING = "incoming"  # where files are until they are complete and readable


@dataclass(frozen=True)
class Checked:
    """What was found in a data set that is as it should be."""

    path: Path  # for --data
    holders: int
    rows: int
    checksums: str  # for people: what the files were compared with


def is_present(source: PublicSource, folder: Path) -> bool:
    """Whether every file of the data set is in ``folder``."""
    return all((folder / file).is_file() for file in source.files)


def fetch(source: PublicSource, folder: Path, *, client: httpx.Client, progress: Callable[[str], Progress]) -> Checked:
    """Download what is missing, check it, read it once, and only then move it to ``folder``.

    A download that is already complete in ``folder``/incoming (put there by hand, or by a run that ended
    early) is taken as it is, once its checksum agrees. ``progress(file)`` makes the progress function of a
    file.

    Where no checksum is known beforehand, the first fetch is trusted: its checksum is recorded beside the
    files, and ``check`` compares with it from then on. Raises ``CoterieError`` with what to download from
    where when the source cannot be reached.
    """
    if is_present(source, folder):
        found = check(source, folder)
        _record(source, folder)
        return found
    incoming = folder / INCOMING
    try:
        incoming.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CoterieError(f"Expected to make the folder {incoming}, found: {error}") from error
    for item in source.downloads:
        _obtain(source, item, incoming / item.file, client, progress(item.file))
    if source.name == "femnist" and not (incoming / source.files[0]).exists():
        convert(incoming / source.downloads[0].file, incoming / source.files[0], progress=progress("unpacking"))
    try:
        holders, rows = _read(source, incoming)
    except CoterieError:
        _reject(source, incoming)
        raise
    for file in source.files:
        (incoming / file).replace(folder / file)
    for leftover in incoming.iterdir():
        leftover.unlink()
    incoming.rmdir()
    _record(source, folder)
    return Checked(source.data_path(folder), holders, rows, _compare(source, folder))


def check(source: PublicSource, folder: Path) -> Checked:
    """Compare the files' checksums with the published or recorded ones, and read the data set.

    Raises ``CoterieError`` for a missing file, another checksum, and a file that its reader refuses.
    """
    for file in source.files:
        if not (folder / file).is_file():
            raise CoterieError(f"Expected {file} in {folder}, found none; coterie data fetch {source.name} gets it")
    checksums = _compare(source, folder)
    holders, rows = _read(source, folder)
    return Checked(source.data_path(folder), holders, rows, checksums)


def _compare(source: PublicSource, folder: Path) -> str:
    """Compare every file with its published or recorded checksum; what was compared with, for people."""
    published = {item.file: item.sha256 for item in source.downloads if item.sha256}
    recorded = _recorded(folder)
    against = set()
    for file in source.files:
        kind, expected = ("published", published[file]) if file in published else ("recorded", recorded.get(file))
        if expected is None:
            against.add("nothing, as none is known (fetch records it)")
            continue
        found = sha256_of(folder / file)
        if found != expected:
            raise CoterieError(
                f"Expected the {kind} SHA-256 {expected} for {folder / file}, found {found}; delete and fetch it again"
            )
        against.add("the published ones" if kind == "published" else "those recorded at the first fetch")
    return " and ".join(sorted(against))


def _reject(source: PublicSource, incoming: Path) -> None:
    """Put aside what came without a checksum and cannot be read, so that the next fetch starts anew."""
    for item in source.downloads:
        if item.sha256 is None:
            (incoming / item.file).replace(incoming / f"{item.file}.rejected")


def by_hand(source: PublicSource, folder: Path) -> str:
    """What a person without a network on this machine must do."""
    items = " and ".join(f"{item.url} as {folder / INCOMING / item.file}" for item in source.downloads)
    return f"elsewhere, download {source.title}: save {items}, then run coterie data fetch {source.name} again"


def _obtain(source: PublicSource, item: Download, target: Path, client: httpx.Client, progress: Progress) -> None:
    if target.exists():
        if item.sha256 is not None and (found := sha256_of(target)) != item.sha256:
            raise CoterieError(f"Expected SHA-256 {item.sha256} for {target}, found {found}; delete it and fetch again")
        return
    try:
        download(item, target, client=client, progress=progress)
    except CoterieError as error:
        raise CoterieError(f"{error}; {by_hand(source, target.parent.parent)}") from error


def _read(source: PublicSource, folder: Path) -> tuple[int, int]:
    """Data holders and rows that the task's reader finds."""
    task = load_task(source.name)
    natural = task.partitions[0]
    data = task.read(DataSource(source.data_path(folder), partition_by=natural))
    return len(data.clients), sum(client.rows for client in data.clients)


def _recorded(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / SUMS).read_text().splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise CoterieError(f"Expected checksums in {folder / SUMS}, found: {error}") from error
    pairs = (line.split(maxsplit=1) for line in lines)
    return {pair[1].strip(): pair[0] for pair in pairs if len(pair) == 2}


def _record(source: PublicSource, folder: Path) -> None:
    """Record the checksums of files that have none yet."""
    known = _recorded(folder)
    missing = {file: sha256_of(folder / file) for file in source.files if file not in known}
    if missing:
        lines = "".join(f"{checksum}  {file}\n" for file, checksum in (known | missing).items())
        try:
            write_atomically(folder / SUMS, lines.encode())
        except OSError as error:
            raise CoterieError(f"Expected to record checksums in {folder / SUMS}, found: {error}") from error
