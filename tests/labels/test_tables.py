"""Tables whose label column is replaced: everything else stays as it is, and nothing of the old labels stays."""

import csv
import io
import json
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.errors import CoterieError
from coterie.labels.alphabet import Alphabet
from coterie.labels.releases import digest_of
from coterie.labels.tables import open_table

FIELDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)


def replace(source: Path, out: Path, column: str, names: list[str]) -> Path:
    """Write the table with label number i mod K in row i."""
    table = open_table(source)
    codes, _ = table.coded(column)
    table.write(out, column, np.arange(codes.size) % len(names), names)
    return out


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=6),
    delimiter=st.sampled_from(",;\t"),
    ending=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_a_csv_file_changes_in_the_label_column_only(
    tmp_path: Path, rows: list[tuple[str, str]], delimiter: str, ending: str, quoting: Literal[0, 1]
) -> None:
    """Byte by byte, against Python's own writer, whatever the other fields hold."""

    def written(labels: list[str]) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.writer(text, delimiter=delimiter, lineterminator=ending, quoting=quoting)
        writer.writerow(["left", "y", "right"])
        lines = text.getvalue()
        for (left, right), label in zip(rows, labels, strict=True):
            one, two = (_field(value, delimiter, quoting) for value in (left, right))
            lines += one + delimiter + label + delimiter + two + ending
        return lines.encode()

    (tmp_path / "a.csv").write_bytes(written(["old"] * len(rows)))
    out = replace(tmp_path / "a.csv", tmp_path / "b.csv", "y", ["0", "1"])
    assert out.read_bytes() == written([str(row % 2) for row in range(len(rows))])


def _field(value: str, delimiter: str, quoting: Literal[0, 1]) -> str:
    text = io.StringIO(newline="")
    # The writer quotes what is in its line's end: both characters, as readers need it.
    csv.writer(text, delimiter=delimiter, lineterminator="\r\n", quoting=quoting).writerow([value, "x"])
    return text.getvalue().rpartition(delimiter)[0]


def test_bytes_that_are_no_utf8_and_a_byte_order_mark_stay(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfname,y\r\nM\xfcller,old\r\n\r\n")
    out = replace(tmp_path / "a.csv", tmp_path / "b.csv", "y", ["a,b", "c"])
    assert out.read_bytes() == b'\xef\xbb\xbfname,y\r\nM\xfcller,"a,b"\r\n\r\n'
    assert open_table(out).columns == ("name", "y")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "header"),
        ("a,y\n1\n", "found 1 in record 2"),
        ('a,y\n"1,2\n', "quote"),
        ('a,y\n5" pipe,"2"\n', "quote"),
        ('a,y\n5" p"ipe,2\n', "inside a field"),
    ],
)
def test_a_damaged_csv_file_is_one_error(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(CoterieError, match=words):
        open_table(tmp_path / "a.csv").coded("y" if text else open_table(tmp_path / "a.csv").columns[0])


def test_an_npz_file_keeps_other_arrays_and_the_labels_type(tmp_path: Path) -> None:
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    np.savez_compressed(tmp_path / "a.npz", x=x, y=np.array([1, 0, 2, 1], np.uint8))
    with np.load(replace(tmp_path / "a.npz", tmp_path / "b.npz", "y", ["0", "1", "2"])) as found:
        assert found.files == ["x", "y"]
        assert found["x"].dtype == np.float32
        assert (found["x"] == x).all()
        assert found["y"].dtype == np.uint8
        assert found["y"].tolist() == [0, 1, 2, 0]


def test_the_width_of_text_labels_is_that_of_the_public_list(tmp_path: Path) -> None:
    """numpy keeps texts in the width of the longest: the old one would tell the longest private label."""
    np.savez(tmp_path / "a.npz", y=np.array(["flu", "flu"]))
    with np.load(replace(tmp_path / "a.npz", tmp_path / "b.npz", "y", ["flu", "influenza"])) as found:
        assert found["y"].dtype == np.dtype("<U9")


def parquet(path: Path, labels: pa.Array) -> Path:
    table = pa.table({"x": np.arange(5.0), "y": labels, "z": ["a", None, "c", "d", "e"]})
    notes = {"columns": [{"field_name": "y", "metadata": {"num_categories": 2, "ordered": False}}]}
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(notes)}), path, row_group_size=2)
    return path


@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int8(), pa.string()), pa.int16(), pa.float64()])
def test_a_parquet_file_keeps_types_row_groups_and_other_columns(tmp_path: Path, kind: pa.DataType) -> None:
    source = parquet(tmp_path / "a.parquet", pa.array(["1", "0", "1", "1", "0"]).cast(kind))
    codes, values = open_table(source).coded("y")
    assert [values[code] for code in codes] == ["1", "0", "1", "1", "0"]
    out = replace(source, tmp_path / "b.parquet", "y", ["0", "1", "2"])
    before, after = pq.read_table(source), pq.read_table(out)
    assert after.schema.field("y").type == kind
    assert after.drop_columns("y").equals(before.drop_columns("y"))
    assert [int(float(label)) for label in after["y"].to_pylist()] == [0, 1, 2, 0, 1]
    assert pq.ParquetFile(out).num_row_groups == 3


def test_a_parquet_file_does_not_tell_which_categories_occurred(tmp_path: Path) -> None:
    """Neither the dictionary nor the note that pandas makes of its length."""
    labels = pa.array(["rare", "0", "0", "0", "0"]).dictionary_encode()
    out = replace(parquet(tmp_path / "a.parquet", labels), tmp_path / "b.parquet", "y", ["0", "1", "2"])
    assert b"rare" not in out.read_bytes()
    notes = json.loads(pq.read_schema(out).metadata[b"pandas"])
    assert notes["columns"][0]["metadata"]["num_categories"] == 3


def test_copies_of_the_label_column_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,y,b\n1,1,1\n"0",0,1\n')
    assert open_table(tmp_path / "a.csv").copies("y") == ("a",)
    np.savez(tmp_path / "a.npz", y=np.array([1, 0]), z=np.array([1.0, 0.0]), w=np.array([0, 0]))
    assert open_table(tmp_path / "a.npz").copies("y") == ("z",)
    pq.write_table(pa.table({"y": [1, 0], "z": [1, 0], "w": [0, 0]}), tmp_path / "a.parquet")
    assert open_table(tmp_path / "a.parquet").copies("y") == ("z",)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y\n0\n1\n")
    with pytest.raises(StopIteration):
        open_table(tmp_path / "a.csv").write(tmp_path / "b.csv", "y", np.zeros(1, np.int64), ["0"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_the_hash_of_labels_does_not_depend_on_their_coding() -> None:
    one = digest_of(np.array([0, 1, 0]), ["b", "a"])
    assert one == digest_of(np.array([1, 0, 1]), ["a", "b"])
    assert one != digest_of(np.array([0, 1, 1]), ["b", "a"])
    assert one != digest_of(np.array([0, 1, 0]), ["a", "b"])


def test_an_alphabet_is_public_and_does_not_repeat_private_values() -> None:
    alphabet = Alphabet.given(classes=None, labels="yes, no")
    assert alphabet.encode(np.array([1, 0]), ["no", "yes"], column="y").tolist() == [0, 1]
    with pytest.raises(CoterieError, match="one of yes, no, found another one") as caught:
        alphabet.encode(np.array([0, 1]), ["no", "secret"], column="y")
    assert "secret" not in str(caught.value)
    for classes, labels in [(None, None), (2, "a,b"), (1, None), (None, "a,a"), (None, "a,,b")]:
        with pytest.raises(CoterieError, match="Expected"):
            Alphabet.given(classes=classes, labels=labels)
