"""Whatever the bytes, a reader answers with data or with a ``CoterieError`` of one line: never another exception."""

import gzip
import io
import json
import lzma
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coterie.datasets import femnist, hospital, mnist
from coterie.errors import CoterieError
from coterie.models import load_model
from coterie.tasks import DataSource

CSV = (
    b"DRG Definition,Provider Id,Provider Zip Code, Average Total Payments \n"
    b'194 - "A",10001,36301,$5777.24\n"292 - B, C",102,1040,5\n'
)
LEAF = json.dumps({"users": ["a"], "user_data": {"a": {"x": [[1] * 784], "y": [3]}}}).encode()


def _npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, image=np.zeros((1, 28, 28), np.uint8), label=[1], writer=["a"])
    return file.getvalue()


IDX = b"\x00\x00\x08\x03" + bytes([0, 0, 0, 1, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(784)

READERS: dict[str, tuple[bytes, str, Callable[[Path], object]]] = {
    "csv": (CSV, "x.csv", lambda path: hospital.read(DataSource(path, "provider"))),
    "csv for prediction": (CSV, "x.csv", hospital.read_inputs),
    "csv.gz": (gzip.compress(CSV), "x.csv.gz", lambda path: hospital.read(DataSource(path))),
    "csv.xz": (lzma.compress(CSV), "x.csv.xz", lambda path: hospital.read(DataSource(path))),
    "leaf": (LEAF, "x.json", lambda path: femnist.read(DataSource(path, "writer"))),
    "npz": (_npz(), "x.npz", lambda path: femnist.read(DataSource(path, "writer"))),
    "idx": (IDX, "x", lambda path: mnist.read_idx(path, 3)),
    "model": (b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", "x.safetensors", load_model),
}


def read(kind: str, content: bytes) -> None:
    _, name, reader = READERS[kind]
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            reader(path)
        except CoterieError as error:
            assert "\n" not in str(error)  # noqa: PT017 (reading without an error is allowed too)
            assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize("kind", READERS)
@given(content=st.binary(max_size=200))
@example(content=b"")
@example(content=b"\x00" * 100)
@example(content=b"PK\x03\x04" + b"\xff" * 60)
@example(content=b"\x93NUMPY\x01\x00\x10\x00{'descr': '|O'")
@settings(max_examples=60, deadline=None)
def test_any_bytes(kind: str, content: bytes) -> None:
    read(kind, content)


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_sound_bytes_with_a_few_changed_cut_or_inserted(kind: str, data: st.DataObject) -> None:
    content = bytearray(READERS[kind][0])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        change = data.draw(st.sampled_from(["replace", "insert", "cut", "drop"]))
        new = data.draw(st.binary(min_size=1, max_size=3))
        if change == "replace":
            content[place : place + len(new)] = new
        elif change == "insert":
            content[place:place] = new
        elif change == "drop":
            del content[place : place + len(new)]
        else:
            del content[place:]
    read(kind, bytes(content))


@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "model"])
def test_the_sound_bytes_are_read(kind: str) -> None:
    content, name, reader = READERS[kind]
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        reader(path)
