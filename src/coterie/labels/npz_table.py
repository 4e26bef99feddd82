"""npz tables: one array is the label, the others are copied without being loaded."""

import zipfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import CoterieError
from coterie.labels.tables import Table, new_file, text_of
from coterie.mechanisms.labels.arguments import Array, Integers

_PIECE = 1 << 20


class NpzTable(Table):
    """Arrays whose first axis is the rows; the label is a vector. Arrays of Python objects are not loaded.

    Memory is what the label array takes, and the feature arrays when clusters are made of them.
    """

    @cached_property
    def columns(self) -> tuple[str, ...]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                return tuple(name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy"))
        except (zipfile.BadZipFile, OSError) as error:
            raise CoterieError(f"Expected an npz file at {self.path}, found: {error}") from error

    def coded(self, column: str) -> tuple[Integers, list[str]]:
        values, codes = np.unique(self._vector(column), return_inverse=True)
        return codes.astype(np.int64, copy=False), [text_of(value) for value in values]

    def numbers(self, columns: Sequence[str]) -> Array:
        blocks = []
        for column in columns:
            array = self._array(column)
            if array.dtype.kind not in "biuf" or array.ndim == 0:
                raise CoterieError(f"Expected numbers in {column!r}, found dtype {array.dtype}, shape {array.shape}")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise CoterieError(f"Expected finite numbers in {column!r}, found NaN or infinity")
            blocks.append(array.reshape(len(array), -1).astype(np.float64))
        if len({len(block) for block in blocks}) > 1:
            raise CoterieError(f"Expected as many rows in each of {', '.join(columns)}, found different numbers")
        return np.concatenate(blocks, axis=1)

    def copies(self, column: str) -> tuple[str, ...]:
        label = self._vector(column)
        with zipfile.ZipFile(self.path) as archive:
            alike = [name for name in self.columns if name != column and _shape(archive, name) == label.shape]
        return tuple(name for name in alike if np.array_equal(self._array(name), label))

    def write(self, out: Path, column: str, codes: Integers, names: Sequence[str]) -> None:
        label = self._vector(column)
        # The width of a text array is that of the longest label in the data, so it is made anew from the public list.
        texts = np.asarray(names)
        if label.dtype.kind == "U":
            values: NDArray[Any] = texts
        elif label.dtype.kind == "S":
            values = np.char.encode(texts)
        else:
            values = (texts.astype(np.int64) if label.dtype.kind in "biu" else texts).astype(label.dtype)
        member = f"{column}.npy"
        with (
            new_file(out) as temporary,
            zipfile.ZipFile(self.path) as source,
            zipfile.ZipFile(temporary, "w", allowZip64=True) as target,
        ):
            for item in source.infolist():
                # Sizes and check sums of the old label stay behind, its place in the file does not.
                entry = zipfile.ZipInfo(item.filename, item.date_time)
                entry.compress_type, entry.external_attr = item.compress_type, item.external_attr
                with target.open(entry, "w", force_zip64=True) as written:
                    if item.filename == member:
                        np.lib.format.write_array(written, values[codes], allow_pickle=False)
                    else:
                        with source.open(item) as read:
                            _copy(read, written)

    def _vector(self, column: str) -> NDArray[Any]:
        array = self._array(column)
        if array.ndim != 1 or array.dtype.kind not in "biufSU":
            raise CoterieError(
                f"Expected {column!r} to be a vector of numbers or texts, found dtype {array.dtype}, shape "
                f"{array.shape}: one-hot or multiple labels are not supported"
            )
        return array

    def _array(self, column: str) -> NDArray[Any]:
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                return np.asarray(arrays[column])
        except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise CoterieError(f"Expected {column!r} in {self.path} to be a plain array, found: {error}") from error


def _shape(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    with archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    return () if dtype.hasobject else tuple(shape)


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    while piece := source.read(_PIECE):
        target.write(piece)
