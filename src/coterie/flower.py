"""Plain fields as Flower records and back: the one translation that server and client share."""

from typing import cast

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from coterie.protocol import Fields, MalformedMessage, Scalar

_SCALARS = "scalars"
_ARRAYS = "arrays"


def to_record(fields: Fields) -> RecordDict:
    """The Flower content that carries ``fields``."""
    arrays = ArrayRecord({name: Array(array) for name, array in fields.arrays.items()})
    return RecordDict({_SCALARS: ConfigRecord(dict(fields.scalars)), _ARRAYS: arrays})


def from_record(record: RecordDict) -> Fields:
    """The fields in Flower content. Raises ``MalformedMessage`` for content that coterie did not write.

    Flower reads arrays with ``allow_pickle=False``: a peer's bytes are never executed.
    """
    scalars, arrays = record.get(_SCALARS), record.get(_ARRAYS)
    if not isinstance(scalars, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise MalformedMessage(f"Expected records {_SCALARS!r} and {_ARRAYS!r}, found {sorted(record)}")
    for name, value in scalars.items():
        if not isinstance(value, bool | int | float | str):
            raise MalformedMessage(f"Expected {name!r} to be one scalar, found {type(value).__name__}")
    try:
        # Array(…) of an unreadable byte string fails in numpy in several ways; none may end a round.
        plain = {name: array.numpy() for name, array in arrays.items()}
    except Exception as error:
        raise MalformedMessage(f"Expected readable arrays, found: {error}") from error
    return Fields(cast(dict[str, Scalar], dict(scalars)), plain)
