"""``coterie ledger``: the same figures as the rows, for people and for programs."""

import json
import re
import sqlite3
from pathlib import Path

import pytest

from coterie.client.ledger import LEDGER_FILE, Ledger, Release, Session
from coterie.commands.ledger import ledger, summary_of
from coterie.errors import CoterieError
from coterie.mechanisms.accounting import price
from coterie.mechanisms.events import Neighbourhood, Noise, SelectionRelease, UpdateRelease


def fill(
    folder: Path,
    releases: int,
    *,
    client: str = "ward 7",
    budget: float = 22.0,
    mode: Neighbourhood = Neighbourhood.FIXED,
    index_sent: bool = False,
    selection: SelectionRelease | None = None,
    refusals: int = 0,
    disclosures: int = 0,
    run: str = "run",
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with Ledger(folder / LEDGER_FILE, create=True) as opened:
        opened.record_session(Session(client, "t", "f", budget, 1e-5, 3.0))
        for number in range(1, releases + 1):
            update = UpdateRelease(mode, (Noise(11, 11 / (3 * 0.5), 0.5),))
            opened.record_release(
                Release(f"{run}{number}", 0.0, run, number, 0, index_sent, False, ("all",), update, selection),
                budget=budget,
            )
        for number in range(refusals):
            opened.record_refusal(run, number, "no")
        for number in range(disclosures):
            opened.record_disclosure(run, number, "validation loss and score")


def as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    ledger(folder, True)
    captured = capsys.readouterr()
    found: list[dict[str, object]] = json.loads(captured.out)
    return found


def test_json_has_one_object_a_client_with_the_fixed_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "b", 6, client="b", refusals=2)
    fill(tmp_path / "a", 2, client="a", budget=100.0, disclosures=3)
    fill(tmp_path / "c", 0, client="c")
    a, b, c = as_json(tmp_path, capsys)
    assert (a["client"], a["releases"], a["budget"], a["refused"], a["disclosures"]) == ("a", 2, 100.0, 0, 3)
    assert a["pure_epsilon"] == pytest.approx(22 / 3, rel=1e-14)
    assert a["left"] == pytest.approx(100 - 22 / 3)
    assert (b["client"], b["releases"], b["refused"], b["left"]) == ("b", 6, 2, pytest.approx(0, abs=1e-12))
    assert b["pure_epsilon"] == pytest.approx(22, rel=1e-14)
    assert (c["client"], c["releases"], c["pure_epsilon"], c["left"]) == ("c", 0, 0, 22.0)


def test_the_total_is_over_all_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 2, run="first")
    fill(tmp_path, 1, run="second")
    (row,) = as_json(tmp_path, capsys)
    assert (row["releases"], row["runs"]) == (3, 2)
    assert row["pure_epsilon"] == pytest.approx(11)


def test_selection_is_in_the_total(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 2, selection=SelectionRelease("randomized-argmin", 3, 0.5), index_sent=True)
    (row,) = as_json(tmp_path, capsys)
    assert row["pure_epsilon"] == pytest.approx(22 / 3 + 1)
    assert row["index_sent"] == 0  # a private index is covered


def test_a_table_for_people_has_the_figures_and_what_they_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "a", 2, client="ward 7", refusals=4)
    ledger(tmp_path, False)
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "ward 7" in line)
    tight = price([UpdateRelease(Neighbourhood.FIXED, (Noise(11, 11 / (3 * 0.5), 0.5),))] * 2, delta=1e-5).tight
    assert re.findall(r"[\d.]+", row.replace("ward 7", "")) == ["2", "7.333", "22", "14.67", f"{tight:.4g}", "4", "0"]
    assert "radius" in out
    assert "RELATIVE" not in out


def test_relative_releases_and_open_indices_are_called_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path, 1, mode=Neighbourhood.RELATIVE, index_sent=True)
    ledger(tmp_path, False)
    text = " ".join(capsys.readouterr().out.split())
    assert "RELATIVE" in text
    assert "no formal guarantee" in text
    assert "Not covered: which hypothesis was chosen" in text
    (row,) = as_json(tmp_path, capsys)
    assert row["formal"] is False
    assert row["index_sent"] == 1


def test_an_open_choice_is_told_also_where_the_index_was_not_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With assignment = server the vector lies near the chosen hypothesis: the same choice leaves."""
    fill(tmp_path, 1, index_sent=False)
    ledger(tmp_path, False)
    assert "Not covered: which hypothesis was chosen" in " ".join(capsys.readouterr().out.split())
    covered = tmp_path / "covered"
    fill(covered, 1, selection=SelectionRelease("randomized-argmin", 3, 0.5))
    ledger(covered, False)
    assert "Not covered" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["St. Mary [/]", "[bold]ward[/bold]", "a[/b]c", "Ward [7]"])
def test_a_name_with_brackets_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    fill(tmp_path, 1, client=name)
    ledger(tmp_path, False)
    assert name in capsys.readouterr().out


def test_a_narrow_terminal_cuts_no_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    fill(tmp_path, 3, client="050123 SAINT ELISABETH MEDICAL CENTER OF NORTHERN SOMEWHERE", budget=123456.789)
    ledger(tmp_path, False)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "050123" in line)
    assert "1.235e+05" in line
    assert line.count("11") >= 1


def test_a_client_that_never_started_has_no_budget_to_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ward").mkdir()
    with Ledger(tmp_path / "ward" / LEDGER_FILE, create=True):
        pass
    (row,) = as_json(tmp_path, capsys)
    assert (row["client"], row["budget"], row["left"], row["pure_epsilon"]) == ("ward", None, None, 0)
    ledger(tmp_path, False)
    assert "-" in capsys.readouterr().out


def test_no_ledger_is_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(CoterieError, match="found none") as caught:
            ledger(folder, False)
        assert "\n" not in str(caught.value)


def test_one_bad_ledger_is_named_and_not_skipped(tmp_path: Path) -> None:
    # A total without it would be too small.
    fill(tmp_path / "a", 1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / LEDGER_FILE).write_text("not a ledger" * 100)
    with pytest.raises(CoterieError, match="/b/"):
        ledger(tmp_path, True)


def test_looking_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, 2)
    before = (tmp_path / LEDGER_FILE).read_bytes()
    as_json(tmp_path, capsys)
    assert (tmp_path / LEDGER_FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [LEDGER_FILE]


def test_a_ledger_is_readable_while_its_client_writes(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    with sqlite3.connect(tmp_path / LEDGER_FILE, isolation_level=None) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO refusals VALUES (0, 'run', 9, 'no')")
        assert summary_of(tmp_path / LEDGER_FILE)["refused"] == 0
        writer.execute("ROLLBACK")


def test_row_counts_that_left_are_told(tmp_path: Path) -> None:
    with Ledger(tmp_path / LEDGER_FILE, create=True) as opened:
        update = UpdateRelease(Neighbourhood.FIXED, (Noise(11, 22 / 3, 0.5),))
        opened.record_release(Release("i", 0.0, "r", 1, 0, False, True, ("all",), update, None), budget=22)
    summary = summary_of(tmp_path / LEDGER_FILE)
    assert any(value == 1 for key, value in summary.items() if "row" in key), summary
