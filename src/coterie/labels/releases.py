"""The data holder's private record of labels that were released, so that none is randomized twice.

Every release is stored whole before anything of it is written elsewhere: a run that was interrupted, or whose output
was lost, gives the same noisy labels again, which costs nothing. Records belong beside the private table: they hold a
hash of the true labels, which would give them away to somebody who tries all the possibilities.
"""

import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4
from zipfile import BadZipFile

import numpy as np

from coterie.errors import CoterieError
from coterie.labels.sanitizing import Sanitized
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels.arguments import Integers
from coterie.storage import write_atomically

FOLDER = "coterie-label-releases"
_FORMAT = "coterie-label-release-1"


@dataclass(frozen=True)
class Source:
    """Labels on this machine: a file and its column, and the SHA-256 of the labels in their order."""

    file: Path
    column: str
    digest: str


@dataclass(frozen=True)
class Earlier:
    """A release that was made: of what, by which plan, where its table was written to, and the release itself."""

    file: str
    column: str
    digest: str
    plan: dict[str, Any]
    out: str
    when: str
    identifier: str
    sanitized: Sanitized


class Releases:
    """The records in one folder, which is locked for as long as this object is used in ``opened``."""

    def __init__(self, folder: Path) -> None:
        """Of the folder, which exists."""
        self._folder = folder

    def find(self, source: Source) -> Earlier | None:
        """The release of this file's column, or of equal labels in another place; None if there is none.

        The same labels win over the same column, as they may be given again for free.
        """
        found = [(path, self._read(path)) for path in sorted(self._folder.glob("*.json"))]
        column = (self._name(source.file), source.column)
        same = [item for item in found if item[1]["digest"] == source.digest]
        alike = [item for item in found if (item[1]["file"], item[1]["column"]) == column]
        for path, record in [*same, *alike]:
            with _readable(path):
                return _earlier(path, record)
        return None

    def store(self, source: Source, plan: dict[str, Any], out: Path, sanitized: Sanitized) -> str:
        """Put a release on the disk; its random identifier. It counts as made once this returns."""
        identifier = str(uuid4())
        number = 1 + max([int(path.stem) for path in self._folder.glob("*.json") if path.stem.isdigit()], default=0)
        path = self._folder / f"{number:06}.json"
        record = {
            "format": _FORMAT,
            "private": "keep this file with the true labels: it holds a hash of them",
            "file": self._name(source.file),
            "column": source.column,
            "digest": source.digest,
            "plan": plan,
            "out": str(out.absolute()),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "identifier": identifier,
            "event": asdict(sanitized.event),
            "loss": sanitized.loss,
            "notes": list(sanitized.notes),
        }
        try:
            write_atomically(path.with_suffix(".npz"), packed(sanitized))
            write_atomically(path, json.dumps(record, indent=2).encode())  # from here on the release is made
        except OSError as error:
            raise CoterieError(f"Expected to record the release in {self._folder}, found: {error}") from error
        return identifier

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        record: dict[str, Any] = {}
        with _readable(path):
            record |= json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != _FORMAT or not {"digest", "file", "column"} <= record.keys():
                raise ValueError("another format")
        return record

    def _name(self, file: Path) -> str:
        """Relative to the folder, so that both can be moved together."""
        return os.path.relpath(file.resolve(), self._folder.resolve())


def _earlier(path: Path, record: dict[str, Any]) -> Earlier:
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    labels = arrays.pop("labels")
    sanitized = Sanitized(labels, LabelRelease(**record["event"]), record["loss"], arrays, tuple(record["notes"]))
    names = ("file", "column", "digest", "plan", "out", "when", "identifier")
    return Earlier(**{name: record[name] for name in names}, sanitized=sanitized)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """A record that cannot be read is never taken for none."""
    try:
        yield
    except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise CoterieError(
            f"Expected a readable record of an earlier release at {path}, found: {error}; restore it: without it "
            "labels could be released twice"
        ) from error


@contextmanager
def opened(folder: Path) -> Iterator[Releases]:
    """The records in ``folder``, which is made if needed; a second process waits until the context is left."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise CoterieError(
            f"Expected to keep records of releases in {folder}, found: {error}; name another one with --records, and "
            "always the same"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Releases(folder)


def packed(sanitized: Sanitized) -> bytes:
    """An npz file with the noisy labels and the arrays of the loss."""
    file = io.BytesIO()
    arrays: dict[str, Any] = {"labels": sanitized.labels, **sanitized.arrays}
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def digest_of(codes: Integers, values: list[str]) -> str:
    """SHA-256 of a column's texts in their order, however they are coded. A function of private labels: keep it."""
    order = sorted(range(len(values)), key=values.__getitem__)
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values))
    hashed = hashlib.sha256(json.dumps([values[number] for number in order]).encode())
    hashed.update((place[codes] if values else codes).astype("<i8").tobytes())
    return hashed.hexdigest()
