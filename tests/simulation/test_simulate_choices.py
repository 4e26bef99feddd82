"""``coterie simulate``: assignment, private choices, fine-tuning and the suggested k, as their user meets them."""

import json
import sys
from pathlib import Path

import pytest

from coterie.cli import main

SMALL = ("--task", "synthetic", "--rounds", "4", "--clients-per-round", "7", "--validate-every", "2")


def simulated(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status, in this process: a second for each interpreter would add up."""
    monkeypatch.setattr(sys, "argv", ["coterie", "simulate", *SMALL, *map(str, arguments)])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_a_private_choice_is_in_the_printed_price_and_its_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    private = ("--selection", "exponential", "--selection-epsilon", 0.5, "--selection-loss-bound", 9)
    assert simulated(monkeypatch, "--noise-multiplier", 5, "--assignment", "server", *private, "--json") == 0
    (one,) = json.loads(capsys.readouterr().out)
    # Two parameters at ν = 5, and ε_s = 0.5, for each release.
    assert one["price"]["pure"] == pytest.approx((0.4 + 0.5) * one["price"]["releases"])
    note = " ".join(one["price"]["notes"])
    assert one["price"]["local_pure"] == pytest.approx((0.8 + 0.5) * one["price"]["releases"])
    assert "and of its private choices of a hypothesis" in note
    assert "which hypothesis was chosen" not in note
    assert simulated(monkeypatch, "--noise-multiplier", 5, "--assignment", "server", "--json") == 0
    (plain,) = json.loads(capsys.readouterr().out)
    assert plain["price"]["pure"] == pytest.approx(0.4 * plain["price"]["releases"])
    assert "which hypothesis was chosen" in plain["price"]["notes"][1]
    assert plain["metric"] != one["metric"]


def test_fine_tuning_has_a_column_and_k_is_suggested_under_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sweep = ("--sweep", "k=1,2", "--seeds", 3, "--out", tmp_path, "--fine-tune-epochs", 2)
    assert simulated(monkeypatch, *sweep) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "honest tuned rounds" in said
    assert "tuned: the same, after training on" in said
    assert said.count("take k = ") == 1
    assert "That rests on the losses of held-out clients, which no price covers." in said
    assert simulated(monkeypatch, *sweep, "--json") == 0
    printed = capsys.readouterr()
    for record in json.loads(printed.out):
        assert record["fine_tuned_metric"] > 0
        assert record["honest_loss"] > 0
    assert printed.err.count("take k = ") == 1


def test_without_them_there_is_neither(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert simulated(monkeypatch, "--sweep", "nu=1,2", "--seeds", 2, "--out", tmp_path / "nu") == 0
    said = capsys.readouterr().out
    assert "tuned" not in said
    assert "take k" not in said
    assert "No k is suggested" not in said
    assert simulated(monkeypatch, "--sweep", "k=1,2", "--out", tmp_path / "k") == 0
    assert "No k is suggested: for that, two values need two --seeds" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--selection", "randomized"), "Expected a --selection-epsilon with --selection randomized, found none"),
        (("--selection-epsilon", 1), "Expected no --selection-epsilon with --selection argmin, found 1.0"),
        (("--fine-tune-epochs", -1), "Expected --fine-tune-epochs to be at least 0, found -1"),
        (("--assignment", "nobody"), "'nobody' is not one of 'client', 'server'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[object, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulated(monkeypatch, *arguments) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("coterie: error: ")
    assert words in said[-1]
