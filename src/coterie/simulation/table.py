"""A sweep's records as a Parquet file."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import parquet

# Given, not inferred: a column keeps its type where all of its values are missing.
COLUMN_TYPES: Mapping[str, pa.DataType] = {
    "k": pa.int64(),
    "nu": pa.float64(),
    "C": pa.float64(),
    "T": pa.int64(),
    "seed": pa.int64(),
    "metric": pa.float64(),
    "honest_metric": pa.float64(),
    "honest_loss": pa.float64(),
    "honest_left_out": pa.int64(),
    "fine_tuned_metric": pa.float64(),
    "metric_name": pa.string(),
    "clients_per_hypothesis": pa.list_(pa.int64()),
    "collapsed": pa.bool_(),
    "rounds": pa.int64(),
    "best_round": pa.int64(),
    "reseeded": pa.int64(),
    "price_releases": pa.int64(),
    "price_pure": pa.float64(),
    "price_tight": pa.float64(),
    "price_local_pure": pa.float64(),
    "price_local_tight": pa.float64(),
    "price_delta": pa.float64(),
    "price_formal": pa.bool_(),
    "price_notes": pa.list_(pa.string()),
}
_BOUNDS = ("pure", "tight", "local_pure", "local_tight")
_PRICES = [name for name in COLUMN_TYPES if name.startswith("price_")]


def as_parquet(records: Sequence[Mapping[str, Any]], about: Any) -> bytes:
    """A Parquet file with a row for each of ``records``, and ``about`` as JSON under ``coterie`` in its metadata.

    A record's price becomes the columns ``price_…``: all null where there is no price, and infinite where
    there is one but no bound.
    """
    rows = [_row(record) for record in records]
    columns = {name: pa.array([row[name] for row in rows], COLUMN_TYPES[name]) for name in rows[0]}
    table = pa.table(columns).replace_schema_metadata({"coterie": json.dumps(about, allow_nan=False)})
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    row = {name: value for name, value in record.items() if name != "price"}
    if (price := record["price"]) is None:
        return row | dict.fromkeys(_PRICES)
    # A record holds null for what JSON cannot say.
    bounds = {name: math.inf if price[name] is None else price[name] for name in _BOUNDS}
    return row | {f"price_{name}": value for name, value in {**price, **bounds}.items()}
