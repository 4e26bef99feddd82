import lzma
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from coterie.datasets import femnist
from coterie.datasets.federated_emnist import convert, parse_example
from coterie.errors import CoterieError
from coterie.tasks import DataSource


def _example_class() -> type:
    """``tf.train.Example``'s published schema, for Google's own encoder: independent of the parser under test."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> None:
        added = file.message_type.add(name=name)
        for field_name, number, kind, label, type_name in fields:
            added.field.add(name=field_name, number=number, type=kind, label=label, type_name=type_name or None)

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    message("FloatList", ("value", 1, field.TYPE_FLOAT, many, ""))
    message("Int64List", ("value", 1, field.TYPE_INT64, many, ""))
    message(
        "Feature",
        ("float_list", 2, field.TYPE_MESSAGE, one, ".t.FloatList"),
        ("int64_list", 3, field.TYPE_MESSAGE, one, ".t.Int64List"),
    )
    message("Entry", ("key", 1, field.TYPE_STRING, one, ""), ("value", 2, field.TYPE_MESSAGE, one, ".t.Feature"))
    message("Features", ("feature", 1, field.TYPE_MESSAGE, many, ".t.Entry"))
    message("Example", ("features", 1, field.TYPE_MESSAGE, one, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


Example = _example_class()


def encoded(pixels: Sequence[float], label: int) -> bytes:
    example = Example()
    entry = example.features.feature.add(key="label")
    entry.value.int64_list.value.append(label)
    entry = example.features.feature.add(key="pixels")
    entry.value.float_list.value.extend(pixels)
    return bytes(example.SerializeToString())


def paper(row: int, column: int) -> list[float]:
    image = np.ones((28, 28))
    image[row, column] = 0.2
    return image.ravel().tolist()


def database(folder: Path, rows: list[tuple[str, str, bytes]]) -> Path:
    plain, packed = folder / "x.sqlite", folder / "emnist_all.sqlite.lzma"
    plain.unlink(missing_ok=True)
    connection = sqlite3.connect(plain)
    connection.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
    connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()
    packed.write_bytes(lzma.compress(plain.read_bytes(), format=lzma.FORMAT_ALONE))
    return packed


def run(packed: Path) -> Path:
    target = packed.with_name("femnist.npz")
    convert(packed, target, progress=lambda done, total: None, unpacked_bytes=1)
    return target


def test_pixels_and_labels() -> None:
    image, label = parse_example(encoded(paper(3, 4), 61))
    assert label == 61
    assert image[3, 4] == 204  # 255·(1 − 0.2)
    assert image.sum() == 204


@given(st.integers(0, 2**62))
def test_labels_of_any_size(label: int) -> None:
    assert parse_example(encoded(paper(0, 0), label))[1] == label


def test_converted_database_is_read_by_the_task(tmp_path: Path) -> None:
    packed = database(
        tmp_path,
        [
            ("all_train", "f0004_03", encoded(paper(2, 5), 10)),
            ("all_train", "f0001_41", encoded(paper(0, 0), 3)),
            ("all_test", "f0004_03", encoded(paper(1, 1), 61)),
            ("digits_only_train", "f0001_41", encoded(paper(0, 0), 3)),  # the same image once more
        ],
    )
    clients = {c.name: c for c in femnist.read(DataSource(run(packed), "writer")).clients}
    assert {name: client.rows for name, client in clients.items()} == {"upright-f0004_03": 2, "turned-f0001_41": 1}
    assert clients["upright-f0004_03"].targets.tolist() == [10, 61]
    assert clients["upright-f0004_03"].inputs[0, 0, 2, 5].item() == pytest.approx(0.8)
    assert {path.name for path in tmp_path.iterdir()} == {"x.sqlite", "emnist_all.sqlite.lzma", "femnist.npz"}


@pytest.mark.parametrize(
    "example",
    [
        b"",
        encoded(paper(0, 0), 3)[:-1],
        encoded([1.0] * 783, 3),
        encoded([1.0] * 783 + [float("nan")], 3),
        encoded([1.0] * 783 + [2.0], 3),
        b"\x08\x01",
        b"\x0a\xff",
        b"\xff" * 20,
    ],
)
def test_examples_that_are_none(tmp_path: Path, example: bytes) -> None:
    packed = database(tmp_path, [("all_train", "w", example)])
    with pytest.raises(CoterieError, match=f"Expected TensorFlow Federated's EMNIST in {packed}"):
        run(packed)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="no example of the splits all_train, all_test"):
        run(database(tmp_path, [("digits_only_train", "w", encoded(paper(0, 0), 3))]))
    packed = database(tmp_path, [])
    for content in (b"", b"nonsense", packed.read_bytes()[:-50], lzma.compress(b"no database" * 100)):
        packed.write_bytes(content)
        with pytest.raises(CoterieError, match="Expected TensorFlow Federated's EMNIST"):
            run(packed)


@given(st.binary(max_size=100))
def test_any_bytes_are_an_example_or_a_value_error(example: bytes) -> None:
    with pytest.raises(ValueError, match=r"message|example|image|integer|wire|number|pixel"):
        parse_example(example)


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    packed = database(tmp_path, [])
    with pytest.raises(CoterieError, match=r"Expected 1000000000\.0 GB free .* found .* COTERIE_DATA"):
        convert(packed, tmp_path / "x.npz", progress=lambda done, total: None, unpacked_bytes=10**18)
