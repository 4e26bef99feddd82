"""Tables whose label column is replaced and nothing else: what every format offers, and how one is opened."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from coterie.errors import CoterieError
from coterie.mechanisms.labels.arguments import Array, Integers
from coterie.storage import sync_folder

FORMATS = (".csv", ".tsv", ".npz", ".parquet")


class Table(ABC):
    """A file of rows with named columns. Reading and writing go through it piece by piece wherever the format lets."""

    def __init__(self, path: Path) -> None:
        """Of the file at ``path``."""
        self.path = path

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in order."""

    @abstractmethod
    def coded(self, column: str) -> tuple[Integers, list[str]]:
        """A column as codes (n,) into its distinct texts. A whole number is ``3``, also as a float; true is ``1``."""

    @abstractmethod
    def numbers(self, columns: Sequence[str]) -> Array:
        """Columns as numbers (n, d). Raises ``CoterieError`` for one that is not numeric and finite."""

    @abstractmethod
    def copies(self, column: str) -> tuple[str, ...]:
        """Other columns that hold the same value in every row."""

    @abstractmethod
    def write(self, out: Path, column: str, codes: Integers, names: Sequence[str]) -> None:
        """Write the table to ``out`` with ``names[codes]`` (n,) in place of ``column``, in the column's own type."""

    def expect_column(self, name: str, option: str) -> str:
        """``name`` itself. Raises ``CoterieError``, with the nearest name, for a column that is not there."""
        columns = self.columns
        if columns.count(name) == 1:
            return name
        if name in columns:
            raise CoterieError(f"Expected one column {name!r} in {self.path}, found {columns.count(name)}")
        near = get_close_matches(name, columns, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f": it has {', '.join(columns[:10])}"
        raise CoterieError(f"Expected {option} to be a column of {self.path}, found {name!r}{hint}")


def open_table(path: Path) -> Table:
    """The table at ``path``, by the ending of its name. Raises ``CoterieError`` for another ending or no file."""
    if path.suffix.lower() not in FORMATS:
        raise CoterieError(f"Expected a table that ends in {', '.join(FORMATS)}, found {str(path)!r}")
    if not path.is_file():
        raise CoterieError(f"Expected a table at {path}, found {'a folder' if path.is_dir() else 'none'}")
    if path.suffix.lower() == ".npz":
        from coterie.labels.npz_table import NpzTable

        return NpzTable(path)
    if path.suffix.lower() == ".parquet":
        from coterie.labels.parquet_table import ParquetTable

        return ParquetTable(path)
    from coterie.labels.csv_table import CsvTable

    return CsvTable(path)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder that becomes ``path`` if all goes well, and goes away if not."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def text_of(value: object) -> str:
    """How a value is written in a list of labels: ``3`` for 3 and 3.0, ``1`` for true, nothing for a missing one."""
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return str(int(value)) if np.isfinite(value) and value == int(value) else str(value)
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    return str(value)
