"""The rows of a CMS IPPS provider summary (FY2011) in its original form, checked field by field."""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from coterie.datasets.files import read_text
from coterie.errors import CoterieError

DRG = "DRG Definition"
PROVIDER = "Provider Id"
ZIP_CODE = "Provider Zip Code"
PAYMENT = "Average Total Payments"

Coordinates = tuple[float, float]  # longitude, latitude in degrees


@dataclass(frozen=True)
class Row:
    """One line of the file: its number, and its fields by cleaned header name."""

    path: Path
    line: int
    fields: Mapping[str, str]

    def text(self, column: str) -> str:
        """The field's text without padding."""
        return self.fields[column].strip()

    def error(self, column: str, expected: str) -> CoterieError:
        """What is wrong, and where: file, line, column and the value found."""
        return CoterieError(
            f"Expected {expected} in column {column!r} at line {self.line} of {self.path}, "
            f"found {self.fields[column]!r}"
        )

    def drg(self) -> int:
        """The code before the dash: ``194 - SIMPLE PNEUMONIA …`` → 194."""
        code = re.match(r"\s*(\d{1,3})\b", self.fields[DRG], re.ASCII)
        if code is None:
            raise self.error(DRG, "a DRG such as '194 - SIMPLE PNEUMONIA & PLEURISY W CC'")
        return int(code[1])

    def payment(self) -> float:
        """Dollars: ``$32963.07``, with or without the sign, padding and thousands separators."""
        try:
            amount = float(self.text(PAYMENT).removeprefix("$").replace(",", ""))
        except ValueError:
            amount = math.nan
        if not math.isfinite(amount):
            raise self.error(PAYMENT, "a finite amount such as $5777.24")
        return amount

    def provider(self) -> str:
        """The provider id as CMS writes it, six characters: ``10001`` → ``010001``."""
        provider = self.text(PROVIDER)
        if not re.fullmatch(r"[0-9A-Za-z]{1,6}", provider):
            raise self.error(PROVIDER, "a provider id of up to 6 letters and digits")
        return provider.zfill(6)

    def zip_code(self) -> str:
        """The ZIP code with its leading zeros: ``1040`` → ``01040``; the text itself when it is none."""
        text = self.text(ZIP_CODE)
        found = re.fullmatch(r"(\d{1,5})(?:-\d{4})?", text, re.ASCII)
        return found[1].zfill(5) if found else text


def read_rows(path: Path, required: tuple[str, ...]) -> tuple[tuple[str, ...], Iterator[Row]]:
    """The cleaned header and the rows of ``path``; the rows are checked while they are read.

    Header names lose their padding. Raises ``CoterieError`` for a file that cannot be read, is no CSV,
    lacks a required column (naming it and those found) or names any twice, and for a row with another
    number of fields.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = tuple(" ".join(name.split()) for name in next(reader, ()))
    except csv.Error as error:
        raise CoterieError(f"Expected a CSV file at {path}, found: {error} at line {reader.line_num}") from error
    found = ", ".join(repr(column[:40]) for column in header[:30]) or "no header line"
    for name in required:
        if name not in header:
            raise CoterieError(f"Expected a column {name!r} in {path}, found {found}")
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise CoterieError(f"Expected different column names in {path}, found {twice!r} twice")

    def checked() -> Iterator[Row]:
        while True:
            try:
                fields = next(reader, None)
            except csv.Error as error:
                raise CoterieError(f"Expected a CSV row at line {reader.line_num} of {path}, found: {error}") from error
            if fields is None:
                return
            if not fields:  # an empty line, as at the end of many files
                continue
            if len(fields) != len(header):
                raise CoterieError(
                    f"Expected {len(header)} fields at line {reader.line_num} of {path}, found {len(fields)}"
                )
            yield Row(path, reader.line_num, dict(zip(header, fields, strict=True)))

    return header, checked()


@cache
def zip_coordinates() -> dict[str, Coordinates]:
    """Longitude and latitude of every US ZIP code in the ``zipcodes`` package, built once a process."""
    import zipcodes

    return {
        place["zip_code"]: (float(place["long"]), float(place["lat"]))
        for place in zipcodes.list_all()  # type: ignore[no-untyped-call]
        if place["long"] and place["lat"]
    }
