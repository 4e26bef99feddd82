"""``coterie account`` and ``coterie calibrate`` as their user meets them, and every number of docs/privacy.md."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from coterie.commands.account import account, calibrate
from coterie.mechanisms.privacy_loss import relative_noise_leak
from coterie.terminal import run

PAGE = (Path(__file__).parent.parent / "docs" / "privacy.md").read_text(encoding="utf-8")
ACCOUNT_ROWS = re.findall(r"^\| `coterie (account [^`]+)` \| (.+) \|$", PAGE, re.MULTILINE)
CALIBRATE_ROWS = re.findall(r"^\| `coterie (calibrate [^`]+)` \| (.+) \|$", PAGE, re.MULTILINE)
LEAK_ROWS = re.findall(r"^\| (\d+) \| ([\d.]+) \| (0\.\d+) \|$", PAGE, re.MULTILINE)


@pytest.fixture
def coterie(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    application = typer.Typer(pretty_exceptions_enable=False)
    application.command()(account)
    application.command()(calibrate)

    def call(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["coterie", *line.split()])
        with pytest.raises(SystemExit) as ended:
            run("coterie", lambda: application)
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return call


def as_shown(value: float, digits: str) -> bool:
    """Whether ``digits`` is ``value`` rounded up to four digits."""
    shown = float(digits)
    return value * (1 - 1e-9) <= shown <= value * (1 + 1.001e-3)


def test_account_answers_with_the_agreed_keys(coterie: Any) -> None:
    status, out, _ = coterie("account --dimension 11 --noise-multiplier 5 --rounds 10 --delta 1e-5 --json")
    answer = json.loads(out)
    assert status == 0
    assert answer["pure"] == pytest.approx(22.0)
    assert 9.965 <= answer["tight"] <= 9.971 * 1.005
    assert answer["local_pure"] == pytest.approx(44.0)
    assert answer["tight"] < answer["local_tight"] < answer["local_pure"]
    assert answer["gaussian_limit"] == pytest.approx(10.60, abs=0.01)
    assert answer["formal"] is True
    assert "no bound" in answer["notes"][-1]


def test_account_shows_a_table_in_words(coterie: Any) -> None:
    status, out, _ = coterie("account --layers 8,3 --noise-multiplier 5 --rounds 10")
    assert status == 0
    for words in ("11 parameters in 2 layers", "within the radius", "any two", "no bound"):
        assert words in out


def test_calibrate_finds_a_multiplier_that_account_confirms(coterie: Any) -> None:
    _, out, _ = coterie("calibrate --epsilon 10 --delta 1e-5 --rounds 10 --dimension 11 --json")
    found = json.loads(out)
    assert found["noise_multiplier"] == found["noise_multipliers"]["tight"]
    for key, multiplier in found["noise_multipliers"].items():
        _, out, _ = coterie(f"account --dimension 11 --noise-multiplier {multiplier!r} --rounds 10 --json")
        assert 9.9 < json.loads(out)[key] <= 10


def test_what_calibrate_shows_is_not_less_than_what_it_found(coterie: Any) -> None:
    _, out, _ = coterie("calibrate --epsilon 10 --rounds 10 --dimension 11")
    shown = re.search(r"--noise-multiplier ([\d.]+)", out)
    assert shown is not None
    _, out, _ = coterie(f"account --dimension 11 --noise-multiplier {shown[1]} --rounds 10 --json")
    assert json.loads(out)["tight"] <= 10


def test_calibrate_compares_with_gaussian_noise(coterie: Any) -> None:
    few = json.loads(coterie("calibrate --epsilon 10 --rounds 1 --dimension 11 --compare --json")[1])
    many = json.loads(coterie("calibrate --epsilon 10 --rounds 100 --dimension 11 --compare --json")[1])
    assert few["comparison"]["better"] == "l2_laplace"
    assert many["comparison"]["better"] == "gaussian"
    _, out, _ = coterie("calibrate --epsilon 10 --rounds 1 --dimension 11 --compare")
    assert "L2 Laplace is better here" in " ".join(out.split())


def test_calibrate_draws_a_picture(coterie: Any, tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    status, _, _ = coterie(f"calibrate --epsilon 10 --rounds 10 --dimension 11 --plot {picture}")
    assert status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_infinite_prices_are_null_in_json(coterie: Any) -> None:
    _, out, _ = coterie("account --dimension 11 --noise-multiplier 1e-300 --json")
    assert json.loads(out)["gaussian_limit"] is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("account --noise-multiplier 3", "Expected one of --dimension and --layers, found neither: give one"),
        ("account --noise-multiplier 3 --dimension 11 --layers 8,3", "found both: leave one out"),
        ("account --noise-multiplier 3 --layers 8,x", "Expected --layers to be sizes such as 8,3, found '8,x'"),
        ("account --noise-multiplier 3 --dimension 0", "layer size to be a whole number >= 1, found 0"),
        ("account --noise-multiplier -3 --dimension 11", "noise_multiplier > 0 and finite, found -3.0"),
        ("account --noise-multiplier nan --dimension 11", "noise_multiplier > 0 and finite, found nan"),
        ("account --noise-multiplier 3 --dimension 11 --delta 0", "delta above 0 and below 1, found 0.0"),
        ("account --noise-multiplier 3 --dimension 11 --rounds 0", "rounds to be a whole number >= 1, found 0"),
        ("account --dimension 11", "Missing option '--noise-multiplier'"),
        ("calibrate --epsilon 0 --rounds 3 --dimension 11", "epsilon > 0 and finite, found 0.0"),
        ("calibrate --epsilon 1 --rounds 3 --dimension 11 --plot no/such/x.png", "in a folder that exists"),
        ("calibrate --epsilon 1 --rounds 3 --dimension 11 --plot x.txt", "end in .png, .svg or .pdf"),
    ],
)
def test_bad_input_is_one_line_and_status_two(coterie: Any, line: str, message: str) -> None:
    status, out, err = coterie(line)
    assert status == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_the_privacy_page_has_the_numbers_to_check() -> None:
    assert len(ACCOUNT_ROWS) >= 9
    assert len(CALIBRATE_ROWS) >= 5
    assert len(LEAK_ROWS) == 5


@pytest.mark.parametrize(("line", "numbers"), ACCOUNT_ROWS)
def test_prices_on_the_privacy_page_are_what_the_command_prints(coterie: Any, line: str, numbers: str) -> None:
    answer = json.loads(coterie(f"{line} --json")[1])
    keys = ("pure", "tight", "local_pure", "local_tight", "gaussian_limit")
    for key, shown in zip(keys, numbers.split(" | "), strict=True):
        assert as_shown(answer[key], shown), (key, answer[key], shown)


@pytest.mark.parametrize(("line", "numbers"), CALIBRATE_ROWS)
def test_multipliers_on_the_privacy_page_are_what_the_command_prints(coterie: Any, line: str, numbers: str) -> None:
    answer = json.loads(coterie(f"{line} --json")[1])
    found = [answer["noise_multipliers"][key] for key in ("pure", "tight", "local_pure", "local_tight")]
    found.append(answer["comparison"]["gaussian_noise_multiplier"])
    for value, shown in zip(found, numbers.split(" | "), strict=True):
        assert as_shown(value, shown), (value, shown)


@pytest.mark.parametrize(("dimension", "ratio", "shown"), LEAK_ROWS)
def test_leaks_on_the_privacy_page_are_what_the_function_returns(dimension: str, ratio: str, shown: str) -> None:
    assert relative_noise_leak(int(dimension), float(ratio)) == pytest.approx(float(shown), abs=5.1e-5)
