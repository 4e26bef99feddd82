"""TensorFlow Federated's copy of FEMNIST, ``emnist_all.sqlite.lzma``, turned into an .npz file that we read.

The file is an lzma-compressed SQLite database with a table ``examples(split_name, client_id,
serialized_example_proto)``. The splits ``all_train`` and ``all_test`` together have all 62 classes of 3,400
writers; each example is a serialized ``tf.train.Example`` with ``pixels`` (784 floats, 1 on paper, 0 in
ink) and ``label``.
"""

import lzma
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
from numpy.typing import NDArray

from coterie.datasets.download import Progress
from coterie.datasets.images import SIDE
from coterie.errors import CoterieError

SPLITS = ("all_train", "all_test")
UNPACKED_BYTES = 4_708_990_976  # published size of the database: for the free-space check and the progress bar
_CHUNK = 1 << 20

Field = tuple[int, int | bytes]  # number, and a varint or the bytes of a length-delimited or fixed-size field


def convert(compressed: Path, target: Path, *, progress: Progress, unpacked_bytes: int = UNPACKED_BYTES) -> None:
    """Write ``target`` (.npz: image uint8 with ink 255, label, writer) from the compressed database.

    The database is unpacked beside ``target`` for as long as it is read. Raises ``CoterieError`` when there
    is too little room for it, and for a file that is not what it should be.
    """
    free = shutil.disk_usage(target.parent).free
    if free < unpacked_bytes:
        raise CoterieError(
            f"Expected {unpacked_bytes / 1e9:.1f} GB free at {target.parent} to unpack {compressed.name}, "
            f"found {free / 1e9:.1f} GB; COTERIE_DATA names another folder"
        )
    try:
        with NamedTemporaryFile(dir=target.parent, suffix=".sqlite") as database:
            with lzma.open(compressed) as source:
                while chunk := source.read(_CHUNK):
                    database.write(chunk)
                    progress(database.tell(), unpacked_bytes)
            database.flush()
            images, labels, writers = _read_database(Path(database.name))
        partial = target.with_name(f".{target.name}")
        with partial.open("wb") as file:
            np.savez_compressed(file, image=images, label=labels, writer=writers)
        partial.replace(target)
    except (lzma.LZMAError, EOFError, sqlite3.Error, ValueError, OSError) as error:
        raise CoterieError(f"Expected TensorFlow Federated's EMNIST in {compressed}, found: {error}") from error


def _read_database(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int16], NDArray[np.str_]]:
    pixels, labels, writers = bytearray(), [], []
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT client_id, serialized_example_proto FROM examples WHERE split_name IN (?, ?)", SPLITS
        )
        for writer, example in rows:
            image, label = parse_example(example)
            pixels += image.tobytes()
            labels.append(label)
            writers.append(writer)
    if not labels:
        raise ValueError(f"no example of the splits {', '.join(SPLITS)}")
    images = np.frombuffer(pixels, dtype=np.uint8).reshape(-1, SIDE, SIDE)
    return images, np.array(labels, dtype=np.int16), np.array(writers, dtype=np.str_)


def parse_example(example: bytes) -> tuple[NDArray[np.uint8], int]:
    """The image (28, 28), ink 255 on paper 0, and the label of one serialized ``tf.train.Example``.

    The message is Example{1: Features{1: entries{1: key, 2: Feature{2: FloatList{1: packed floats}} or
    {3: Int64List{1: packed varints}}}}}. Raises ``ValueError`` for anything else.
    """
    features: dict[bytes, bytes] = {}
    for number, entries in _fields(example):
        for inner, entry in _fields(_as_bytes(entries)) if number == 1 else ():
            if inner == 1:
                pair = dict(_fields(_as_bytes(entry)))
                features[_as_bytes(pair.get(1, b""))] = _as_bytes(pair.get(2, b""))
    if not {b"pixels", b"label"} <= features.keys():
        raise ValueError(f"an example with features {sorted(features)}, expected label and pixels")
    floats = _as_bytes(dict(_fields(_as_bytes(dict(_fields(features[b"pixels"])).get(2, b"")))).get(1, b""))
    integers = _as_bytes(dict(_fields(_as_bytes(dict(_fields(features[b"label"])).get(3, b"")))).get(1, b""))
    if len(floats) != 4 * SIDE * SIDE:
        raise ValueError(f"an image of {len(floats) // 4} pixels, expected {SIDE * SIDE}")
    paper = np.frombuffer(floats, dtype="<f4")
    if not ((paper >= 0) & (paper <= 1)).all():
        raise ValueError("a pixel outside 0 to 1")
    label, _ = _varint(integers, 0)
    return np.rint(255 * (1 - paper)).astype(np.uint8).reshape(SIDE, SIDE), label


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where the message has a part")
    return value


def _fields(message: bytes) -> Iterator[Field]:
    """The fields of a protocol-buffers message, in order."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(message, position)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"wire type {wire} in a message")
        length = 8 if wire == 1 else 4
        if wire == 2:
            length, position = _varint(message, position)
        if position + length > len(message):
            raise ValueError("a message that ends early")
        yield number, message[position : position + length]
        position += length


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A base-128 integer at ``position``, and the position after it."""
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(message):
            raise ValueError("a message that ends early")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("an integer of more than 64 bits")
