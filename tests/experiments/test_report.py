"""docs/experiments.md says what the committed results say."""

import json
from pathlib import Path

import pytest
import report
from _results import DOCUMENT, price, read_result, rounded_up, write_result

BEGIN, END = "<!-- sample/one: begin -->\n", "<!-- sample/one: end -->"


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A results folder with one experiment, ``sample``, of one block."""
    monkeypatch.setattr("_results.RESULTS", tmp_path)
    monkeypatch.setattr("report.RESULTS", tmp_path)
    monkeypatch.setattr("report.blocks_of", lambda name: {"one": f"{read_result(name)['x']} measured"})
    write_result("sample", {"x": 1.23456789})
    return tmp_path


def test_the_committed_document_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert report.render(text) == text


def test_a_block_is_filled_in_and_the_prose_stays(sample: Path) -> None:
    assert report.render(f"before\n{BEGIN}old\n{END}\nafter") == f"before\n{BEGIN}1.23457 measured\n{END}\nafter"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nothing", "Expected a marker of results/sample"),
        (f"{BEGIN}{END}\n<!-- sample/two: begin -->\n<!-- sample/two: end -->", "found 'two'"),
        (f"{BEGIN}{END}\n<!-- sample/one: begin -->\n", "alone"),
    ],
)
def test_markers_and_results_must_match(sample: Path, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        report.render(text)


def test_a_block_without_a_place_is_an_error(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("report.blocks_of", lambda _: {"one": "", "other": ""})
    with pytest.raises(ValueError, match="sample/other"):
        report.render(BEGIN + END)


def test_a_stored_price_is_not_below_the_true_one() -> None:
    assert price(103.0000004) == 103.001
    assert price(2.4) == 2.4
    assert price(None) is None


def test_a_result_is_plain_json_with_null_for_infinity(tmp_path: Path) -> None:
    write_result("any", {"rows": [{"a": float("inf"), "b": [1, 2.0000001]}], "c": ()}, tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == {"rows": [{"a": None, "b": [1, 2.0]}], "c": []}


@pytest.mark.parametrize(
    ("value", "shown"),
    [(2.4, "2.40"), (103.217, "104"), (3.0001, "3.01"), (1234.5, "1,240"), (None, "no bound"), (0.0, "0")],
)
def test_prices_are_rounded_up(value: float | None, shown: str) -> None:
    assert rounded_up(value) == shown
