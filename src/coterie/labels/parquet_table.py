"""Parquet tables, read and written one row group at a time."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from coterie.errors import CoterieError
from coterie.labels.tables import Table, new_file, text_of
from coterie.mechanisms.labels.arguments import Array, Integers


class ParquetTable(Table):
    """Columns of a parquet file; nested labels are not supported. Memory is that of the largest row group."""

    @cached_property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._file.schema_arrow.names)

    @cached_property
    def _file(self) -> Any:
        try:
            return pq.ParquetFile(self.path)
        except (pa.ArrowException, OSError) as error:
            raise CoterieError(f"Expected a parquet file at {self.path}, found: {error}") from error

    def coded(self, column: str) -> tuple[Integers, list[str]]:
        seen: dict[str, int] = {}
        parts = [np.empty(0, np.int64)]
        for batch in self._file.iter_batches(columns=[column]):
            values = batch.column(0)
            if pa.types.is_nested(values.type):
                raise CoterieError(f"Expected {column!r} to hold one value a row, found {values.type}")
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            encoded = values.dictionary_encode(null_encoding="encode")
            own = [seen.setdefault(text_of(value), len(seen)) for value in encoded.dictionary.to_pylist()]
            parts.append(np.asarray(own, np.int64)[encoded.indices.to_numpy(zero_copy_only=False)])
        return np.concatenate(parts), list(seen)

    def numbers(self, columns: Sequence[str]) -> Array:
        table = self._file.read(columns=list(columns))
        blocks = []
        for column in columns:
            kind = table.schema.field(column).type
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
                raise CoterieError(f"Expected numbers in {column!r}, found {kind}")
            values = table[column].to_numpy().astype(np.float64)
            if not np.isfinite(values).all():
                raise CoterieError(f"Expected finite numbers in {column!r}, found NaN, infinity or a missing one")
            blocks.append(values)
        return np.stack(blocks, axis=1)

    def copies(self, column: str) -> tuple[str, ...]:
        same = [name for name in self.columns if name != column]
        for group in range(self._file.num_row_groups):
            table = self._file.read_row_group(group)
            same = [name for name in same if table[name].equals(table[column])]
        return tuple(same)

    def write(self, out: Path, column: str, codes: Integers, names: Sequence[str]) -> None:
        schema = self._file.schema_arrow
        place = schema.get_field_index(column)
        kind = schema.field(place).type
        schema = schema.with_metadata(_without_counts(schema.metadata, column, len(names)))
        values = _values(names, kind)
        groups = self._file.num_row_groups
        codec = self._file.metadata.row_group(0).column(0).compression.lower() if groups else "snappy"
        start = 0
        with (
            new_file(out) as temporary,
            pq.ParquetWriter(temporary, schema, compression="none" if codec == "uncompressed" else codec) as writer,
        ):
            for group in range(groups):
                table = self._file.read_row_group(group)
                own = codes[start : start + len(table)]
                start += len(own)
                if pa.types.is_dictionary(kind):
                    indices = pa.array(own).cast(kind.index_type)
                    labels = pa.DictionaryArray.from_arrays(indices, values, ordered=kind.ordered)
                else:
                    labels = values.take(pa.array(own))
                table = table.set_column(place, schema.field(place), labels).replace_schema_metadata(schema.metadata)
                writer.write_table(table, row_group_size=max(1, len(table)))


def _values(names: Sequence[str], kind: Any) -> Any:
    """The possible labels in the column's own type; of a dictionary, its values' type."""
    own = kind.value_type if pa.types.is_dictionary(kind) else kind
    try:
        return pa.array(names).cast(own) if not pa.types.is_boolean(own) else pa.array([name == "1" for name in names])
    except pa.ArrowException as error:
        raise CoterieError(f"Expected possible labels of type {own}, found others: {error}") from error


def _without_counts(metadata: dict[bytes, bytes] | None, column: str, classes: int) -> dict[bytes, bytes] | None:
    """Pandas notes how many categories a column had: those of the private data. They become the public list's."""
    if not metadata or b"pandas" not in metadata:
        return metadata
    notes = json.loads(metadata[b"pandas"])
    for entry in notes.get("columns", []):
        if entry.get("field_name") == column and "num_categories" in (entry.get("metadata") or {}):
            entry["metadata"]["num_categories"] = classes
    return {**metadata, b"pandas": json.dumps(notes).encode()}
