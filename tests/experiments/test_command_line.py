"""What every experiment's command line has in common."""

from pathlib import Path

import pytest
from _simulations import command_line

from coterie.errors import CoterieError


def _options(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr("sys.argv", ["experiment.py", *options])


def test_a_folder_that_cannot_be_made_ends_it_before_the_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _options(monkeypatch, "--out", str(tmp_path / "file" / "under"))
    with pytest.raises(SystemExit, match=r"error: .*file"), command_line("An experiment.", data=False):
        pytest.fail("the runs began")


def test_our_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _options(monkeypatch, "--data", "charges.csv")
    with pytest.raises(SystemExit, match=r"^error: Expected a file$"), command_line("An experiment.", data=True):
        raise CoterieError("Expected a file")


@pytest.mark.parametrize("options", [("--seeds", "0"), ("--processes", "0"), ("--seeds", "many")])
def test_bad_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    _options(monkeypatch, *options)
    with pytest.raises(SystemExit) as end, command_line("An experiment.", data=False):
        pytest.fail("the runs began")
    assert end.value.code == 2
