"""CSV tables, read line by line, and written with every byte outside the label column as it was."""

import re
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TextIO

import numpy as np

from coterie.errors import CoterieError
from coterie.labels.tables import Table, new_file
from coterie.mechanisms.labels.arguments import Array, Integers

_DELIMITERS = ",;\t"


class CsvTable(Table):
    """A header and a row a line, separated by commas, semicolons or tabs, quoted as RFC 4180 says.

    Memory is 8 bytes a row for a column, whatever the size of the file. Lines end as they did; bytes that are not
    UTF-8 stay as they are.
    """

    @cached_property
    def columns(self) -> tuple[str, ...]:
        for fields, _, _ in self._records():
            return tuple(_unquoted(field.removeprefix("\ufeff")) for field in fields)
        raise CoterieError(f"Expected a header line in {self.path}, found an empty file")

    def coded(self, column: str) -> tuple[Integers, list[str]]:
        place = self.columns.index(column)
        seen: dict[str, int] = {}
        codes = array("q", (seen.setdefault(_unquoted(fields[place]), len(seen)) for fields, _ in self._rows()))
        return np.frombuffer(codes, np.int64) if codes else np.empty(0, np.int64), list(seen)

    def numbers(self, columns: Sequence[str]) -> Array:
        places = [self.columns.index(column) for column in columns]
        values = array("d")
        for row, (fields, _) in enumerate(self._rows(), 1):
            for place in places:
                text = _unquoted(fields[place])
                try:
                    values.append(float(text))
                except ValueError:
                    raise CoterieError(
                        f"Expected numbers in {self.columns[place]!r}, found {text[:40]!r} in row {row} of {self.path}"
                    ) from None
        table = np.frombuffer(values, np.float64).reshape(-1, len(places)) if values else np.empty((0, len(places)))
        return _expect_finite(table, columns)

    def copies(self, column: str) -> tuple[str, ...]:
        place = self.columns.index(column)
        same = [other for other in range(len(self.columns)) if other != place]
        for fields, _ in self._rows():
            own = _unquoted(fields[place])
            same = [other for other in same if _unquoted(fields[other]) == own]
            if not same:
                break
        return tuple(self.columns[other] for other in same)

    def write(self, out: Path, column: str, codes: Integers, names: Sequence[str]) -> None:
        place = self.columns.index(column)
        quoted = [self._quoted(name) for name in names]
        delimiter = self._delimiter
        with new_file(out) as temporary, self._open(temporary, "w") as file:
            rows = iter(codes.tolist())
            for number, (fields, ending, is_row) in enumerate(self._records()):
                if number and is_row:
                    fields[place] = quoted[next(rows)]
                file.write(delimiter.join(fields) + ending)

    def _rows(self) -> Iterator[tuple[list[str], str]]:
        for number, (fields, ending, is_row) in enumerate(self._records()):
            if number and is_row:
                yield fields, ending

    def _records(self) -> Iterator[tuple[list[str], str, bool]]:
        """The raw fields of each line, how it ends, and whether it is a row (an empty line is not)."""
        delimiter = self._delimiter
        width = 0
        pattern = re.compile(rf'("(?:[^"]|"")*"|[^"{delimiter}]*)(?:{delimiter}|$)')
        with self._open(self.path, "r") as file:
            for number, line in enumerate(_logical_lines(file), 1):
                body = line.rstrip("\r\n")
                fields = body.split(delimiter) if '"' not in body else _split_quoted(body, delimiter, pattern)
                is_row = bool(body) or width == 1
                width = width or len(fields)
                if is_row and len(fields) != width:
                    raise CoterieError(
                        f"Expected {width} fields in every line of {self.path}, found {len(fields)} in record {number}"
                    )
                yield fields, line[len(body) :], is_row

    @cached_property
    def _delimiter(self) -> str:
        if self.path.suffix.lower() == ".tsv":
            return "\t"
        with self._open(self.path, "r") as file:
            header = file.readline()
        return max(_DELIMITERS, key=header.count)

    def _quoted(self, name: str) -> str:
        special = any(character in name for character in (self._delimiter, '"', "\n", "\r"))
        return '"' + name.replace('"', '""') + '"' if special else name

    @staticmethod
    def _open(path: Path, mode: str) -> TextIO:
        return path.open(mode, newline="", encoding="utf-8", errors="surrogateescape")  # type: ignore[return-value]


def _logical_lines(file: TextIO) -> Iterator[str]:
    """Lines, joined where a quoted field goes over the end of one."""
    open_text, quotes = "", 0
    for line in file:
        open_text += line
        quotes += line.count('"')
        if quotes % 2 == 0:
            yield open_text
            open_text, quotes = "", 0
    if open_text:
        raise CoterieError(f"Expected every quote in {file.name} to be closed, found one that is not")


def _split_quoted(body: str, delimiter: str, pattern: re.Pattern[str]) -> list[str]:
    fields, start = [], 0
    while True:
        found = pattern.match(body, start)
        if found is None:
            raise CoterieError("Expected quotes around whole fields of a CSV line, found one inside a field")
        fields.append(found[1])
        start = found.end()
        if not found[0].endswith(delimiter) or found[0] == found[1]:
            return fields


def _unquoted(field: str) -> str:
    text = field.strip()
    return text[1:-1].replace('""', '"').strip() if len(text) > 1 and text[0] == text[-1] == '"' else text


def _expect_finite(table: Array, columns: Sequence[str]) -> Array:
    bad = ~np.isfinite(table).all(axis=0)
    if bad.any():
        raise CoterieError(f"Expected finite numbers in {columns[int(np.argmax(bad))]!r}, found NaN or infinity")
    return table
