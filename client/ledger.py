"""A data holder's durable privacy ledger: what left, one immutable row a release, synced before it leaves.

The ledger belongs to the data, not to a run: every run on the same data adds to the same total. Rows say what was
released; prices are computed from rows (``coterie.mechanisms.accounting``) and never stored.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from coterie.errors import CoterieError
from coterie.mechanisms.accounting import pure_loss
from coterie.mechanisms.events import Neighbourhood, Noise, ReleaseEvent, SelectionRelease, UpdateRelease

LEDGER_FILE = "ledger.sqlite"
_APPLICATION_ID = 0x636F7465  # "cote"
_VERSION = 1
# A total may pass the budget by this relative rounding alone: 22 allows six releases of 11/3.
ROUNDING = 1e-12

_SCHEMA = """
CREATE TABLE sessions (
    time REAL NOT NULL, client TEXT NOT NULL, task TEXT NOT NULL, data_fingerprint TEXT NOT NULL,
    budget REAL NOT NULL, delta REAL NOT NULL, noise_multiplier REAL NOT NULL
) STRICT;
CREATE TABLE releases (
    id TEXT PRIMARY KEY, time REAL NOT NULL, run TEXT NOT NULL, round INTEGER NOT NULL,
    hypothesis INTEGER NOT NULL, index_sent INTEGER NOT NULL, rows_sent INTEGER NOT NULL,
    neighbourhood TEXT NOT NULL, selection TEXT, selection_hypotheses INTEGER, selection_epsilon REAL,
    UNIQUE (run, round)
) STRICT;
CREATE TABLE noises (
    release TEXT NOT NULL REFERENCES releases (id), position INTEGER NOT NULL, layer TEXT NOT NULL,
    dimension INTEGER NOT NULL, epsilon REAL NOT NULL, radius REAL NOT NULL,
    PRIMARY KEY (release, position)
) STRICT;
CREATE TABLE disclosures (
    time REAL NOT NULL, run TEXT NOT NULL, round INTEGER NOT NULL, what TEXT NOT NULL,
    UNIQUE (run, round, what)
) STRICT;
CREATE TABLE refusals (
    time REAL NOT NULL, run TEXT NOT NULL, round INTEGER NOT NULL, reason TEXT NOT NULL
) STRICT;
"""
_KEYS = {
    "releases": "id = NEW.id OR (run = NEW.run AND round = NEW.round)",
    "noises": "release = NEW.release AND position = NEW.position",
    "disclosures": "run = NEW.run AND round = NEW.round AND what = NEW.what",
}
_TABLES = ("sessions", "releases", "noises", "disclosures", "refusals")


class BudgetExceeded(CoterieError):  # noqa: N818  (it names what happened)
    """The release would bring the composed pure loss above the budget."""


class AlreadyReleased(CoterieError):  # noqa: N818
    """A release for this run and round is in the ledger: a second one would average the noise away."""


@dataclass(frozen=True)
class Release:
    """One sanitized update that left, or was about to leave when its client died."""

    id: str
    time: float
    run: str
    round: int
    hypothesis: int
    index_sent: bool
    rows_sent: bool
    layer_names: tuple[str, ...]
    update: UpdateRelease
    selection: SelectionRelease | None

    @property
    def events(self) -> tuple[ReleaseEvent, ...]:
        """What an accountant prices."""
        return (self.update,) if self.selection is None else (self.update, self.selection)


@dataclass(frozen=True)
class Session:
    """One start of a client on this ledger, with the settings it held to."""

    client: str
    task: str
    data_fingerprint: str
    budget: float
    delta: float
    noise_multiplier: float


@dataclass(frozen=True)
class Disclosure:
    """Something that left without protection, by the data holder's consent: a validation loss."""

    time: float
    run: str
    round: int
    what: str


@dataclass(frozen=True)
class RefusalRow:
    """One request that was turned down."""

    time: float
    run: str
    round: int
    reason: str


class Ledger:
    """The rows of one data holder. Use as a context manager; one process at a time may write."""

    def __init__(self, path: Path, *, create: bool) -> None:
        """Open (or create) the ledger file at ``path``.

        Raises ``CoterieError`` for a missing, corrupt, foreign or unwritable file, before anything is trained.
        """
        self.path = path
        self._writes = create
        self._read: list[Release] = []
        self._last_row = 0
        if not create and not path.is_file():
            raise CoterieError(f"Expected a ledger at {path}, found none")
        try:
            self._connection = sqlite3.connect(path, timeout=10, isolation_level=None)
            if create:
                # EXTRA also syncs the folder after the journal is gone: a committed row survives a power cut.
                self._connection.execute("PRAGMA journal_mode = DELETE")
                self._connection.execute("PRAGMA synchronous = EXTRA")
                self._create()
            else:
                self._connection.execute("PRAGMA query_only = ON")
            self._check()
            if create:
                # Writing the same number finds a read-only file or a full disk now, before anything is trained.
                self._connection.execute(f"PRAGMA user_version = {_VERSION}")
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def _failure(self, error: sqlite3.Error) -> CoterieError:
        unsent = "; nothing was sent" if self._writes else ""
        return CoterieError(
            f"Expected a usable ledger at {self.path}, found: {_line(error)}{unsent}: "
            f"free the disk, or restore the file from a backup"
        )

    def _create(self) -> None:
        with self._transaction() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version != 0:
                return
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] != 0:
                return  # somebody else's database: _check says so
            for statement in _SCHEMA.split(";\n"):
                connection.execute(statement)
            for table in _TABLES:
                for action in ("UPDATE", "DELETE"):
                    connection.execute(
                        f"CREATE TRIGGER {table}_no_{action.lower()} BEFORE {action} ON {table} "
                        f"BEGIN SELECT RAISE(ABORT, 'rows of the ledger are immutable'); END"
                    )
            # REPLACE would delete the old row without meeting the trigger above.
            for table, same in _KEYS.items():
                connection.execute(
                    f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} "
                    f"WHEN EXISTS (SELECT 1 FROM {table} WHERE {same}) "
                    f"BEGIN SELECT RAISE(ABORT, 'rows of the ledger are immutable'); END"
                )
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")

    def _check(self) -> None:
        application = self._connection.execute("PRAGMA application_id").fetchone()[0]
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if application != _APPLICATION_ID:
            raise CoterieError(f"Expected a coterie ledger at {self.path}, found another database")
        if version != _VERSION:
            raise CoterieError(
                f"Expected ledger version {_VERSION} at {self.path}, found {version}: use the coterie that wrote it"
            )
        found = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise CoterieError(
                f"Expected a sound ledger at {self.path}, found: {_line(found)}; restore it from a backup"
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def record_release(self, release: Release, *, budget: float) -> None:
        """Commit one release and sync it to disk, or raise and change nothing.

        Raises ``BudgetExceeded`` when the composed pure loss would pass ``budget``, ``AlreadyReleased`` for a
        second release in a run's round, ``CoterieError`` when the disk refuses.
        """
        try:
            with self._transaction() as connection:
                self.check(release.run, release.round, planned=pure_loss(release.events), budget=budget)
                chosen = release.selection
                connection.execute(
                    "INSERT INTO releases VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(release.id, release.time, release.run, release.round, release.hypothesis),
                        *(int(release.index_sent), int(release.rows_sent), str(release.update.neighbourhood)),
                        chosen.mechanism if chosen else None,
                        chosen.hypotheses if chosen else None,
                        chosen.epsilon if chosen else None,
                    ),
                )
                layers = zip(release.layer_names, release.update.layers, strict=True)
                connection.executemany(
                    "INSERT INTO noises VALUES (?, ?, ?, ?, ?, ?)",
                    [
                        (release.id, position, name, noise.dimension, noise.epsilon, noise.radius)
                        for position, (name, noise) in enumerate(layers)
                    ],
                )
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def check(self, run: str, round_number: int, *, planned: float, budget: float) -> None:
        """Raise ``AlreadyReleased`` or ``BudgetExceeded`` if a release of loss ``planned`` may not be made now."""
        found = self._rows("SELECT 1 FROM releases WHERE run = ? AND round = ?", (run, round_number))
        if found:
            raise AlreadyReleased(f"an update for round {round_number} of run {run} has already been released")
        spent = pure_loss(self.events())
        if spent + planned > budget * (1 + ROUNDING):
            raise BudgetExceeded(f"budget {budget:g} would be passed")

    def record_session(self, session: Session) -> None:
        """Note a start of the client, with the settings that it holds to."""
        self._append(
            "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *(time.time(), session.client, session.task, session.data_fingerprint),
                *(session.budget, session.delta, session.noise_multiplier),
            ),
        )

    def record_disclosure(self, run: str, round_number: int, what: str) -> None:
        """Commit that something is about to leave unprotected."""
        self._append("INSERT INTO disclosures VALUES (?, ?, ?, ?)", (time.time(), run, round_number, what))

    def record_refusal(self, run: str, round_number: int, reason: str) -> None:
        """Commit a refusal."""
        self._append("INSERT INTO refusals VALUES (?, ?, ?, ?)", (time.time(), run, round_number, reason))

    def _append(self, statement: str, values: Sequence[object]) -> None:
        try:
            with self._transaction() as connection:
                connection.execute(statement, values)
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[object, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def events(self) -> list[ReleaseEvent]:
        """Everything that was released, oldest first: what accountants price."""
        return [event for release in self.releases() for event in release.events]

    def releases(self) -> list[Release]:
        """The releases, oldest first. As rows never change, only those that are new since the last call are read."""
        noises: dict[object, list[tuple[str, Noise]]] = {}
        for owner, name, *noise in self._rows(
            "SELECT release, layer, dimension, epsilon, radius FROM releases JOIN noises ON release = id "
            "WHERE releases.rowid > ? ORDER BY release, position",
            (self._last_row,),
        ):
            noises.setdefault(owner, []).append((str(name), Noise(*noise)))  # type: ignore[arg-type]
        for row in self._rows("SELECT rowid, * FROM releases WHERE rowid > ? ORDER BY rowid", (self._last_row,)):
            place, key, when, run, number, hypothesis, index_sent, rows_sent, neighbourhood, *selection = row
            layers = noises[key]
            self._read.append(
                Release(
                    id=str(key),
                    time=float(when),  # type: ignore[arg-type]
                    run=str(run),
                    round=int(number),  # type: ignore[call-overload]
                    hypothesis=int(hypothesis),  # type: ignore[call-overload]
                    index_sent=bool(index_sent),
                    rows_sent=bool(rows_sent),
                    layer_names=tuple(name for name, _ in layers),
                    update=UpdateRelease(Neighbourhood(str(neighbourhood)), tuple(noise for _, noise in layers)),
                    selection=None if selection[0] is None else SelectionRelease(*selection),  # type: ignore[arg-type]
                )
            )
            self._last_row = int(place)  # type: ignore[call-overload]
        return list(self._read)

    def has_released(self, run: str) -> bool:
        """Whether an update was released in this run."""
        return bool(self._rows("SELECT 1 FROM releases WHERE run = ? LIMIT 1", (run,)))

    def has_disclosed(self, run: str, round_number: int | None = None) -> bool:
        """Whether something was disclosed in this run, or in this round of it."""
        query = "SELECT 1 FROM disclosures WHERE run = ? AND round = coalesce(?, round) LIMIT 1"
        return bool(self._rows(query, (run, round_number)))

    def latest_session(self) -> Session | None:
        """The settings of the latest start, or None before the first."""
        rows = self._rows(
            "SELECT client, task, data_fingerprint, budget, delta, noise_multiplier FROM sessions "
            "ORDER BY rowid DESC LIMIT 1"
        )
        return Session(*rows[0]) if rows else None  # type: ignore[arg-type]

    def disclosures(self) -> list[Disclosure]:
        """What left unprotected, oldest first."""
        rows = self._rows("SELECT * FROM disclosures ORDER BY rowid")
        return [Disclosure(*row) for row in rows]  # type: ignore[arg-type]

    def refusals(self) -> list[RefusalRow]:
        """The refusals, oldest first."""
        return [RefusalRow(*row) for row in self._rows("SELECT * FROM refusals ORDER BY rowid")]  # type: ignore[arg-type]


def _line(found: object) -> str:
    return " ".join(str(found).split())


def find_ledgers(folder: Path) -> list[Path]:
    """The ledger files of a state folder: its own, or those of a fleet's clients right below it.

    Raises ``CoterieError`` when there is none.
    """
    own = folder / LEDGER_FILE
    found = [own] if own.is_file() else sorted(folder.glob(f"*/{LEDGER_FILE}"))
    if not found:
        raise CoterieError(f"Expected {LEDGER_FILE} in {folder} or in its folders, found none")
    return found
