"""What a user gets wrong: one clear line on standard error, exit status 2, and nothing lost or begun."""

import lzma
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.cli import main as coterie
from coterie.client.command import main as flower_client
from coterie.server.command import main as flower_server

HEADER = (
    "DRG Definition,Provider Id,Provider Name,Provider Street Address,Provider City,Provider State,Provider Zip Code,"
    "Hospital Referral Region Description, Total Discharges , Average Covered Charges , Average Total Payments ,"
    "Average Medicare Payments"
)
ROW = "194 - SIMPLE PNEUMONIA & PLEURISY W CC,{provider},A,S,C,AL,{zip},AL - D,91,$32963.07,{payment},$4763.93"
GOOD = ROW.format(provider="10001", zip="36301", payment="$5777.24")

Command = Callable[[], None]
Say = Callable[..., str]


@pytest.fixture
def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Say:
    """The one line that a command ends with."""
    monkeypatch.chdir(tmp_path)

    def run(command: Command, *options: object) -> str:
        name = command.__module__.replace("coterie.server.command", "flower-server")
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        with pytest.raises(SystemExit) as ended:
            command()
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        last = error.splitlines()[-1]
        assert "error: " in last
        return last.partition("error: ")[2]

    return run


@pytest.fixture
def client(error_of: Say, tmp_path: Path) -> Say:
    """The error of ``flower-client --task hospital`` on a file of these lines."""

    def run(*lines: str, options: tuple[object, ...] = ()) -> str:
        file = tmp_path / "charges.csv"
        file.write_text("\n".join(lines) + "\n")
        required = ("--state", "state", "--noise-multiplier", 3, "--budget", 20)
        said = error_of(flower_client, "--task", "hospital", "--data", file, *required, *options)
        assert not (tmp_path / "state" / "ledger.sqlite").exists()
        return said

    return run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "Expected --task (or task in the file), found neither"),
        (("--task", "hospitl"), "did you mean 'hospital'?"),
        (("--task", "digits", "--hypotheses", 0), "Expected another value of hypotheses"),
        (("--task", "digits", "--hypotheses", "many"), "'many' is not a valid integer"),
        (("--task", "digits", "--noise-multiplier", -1), "Expected another value of noise_multiplier"),
        (("--task", "digits", "--round-timeout", "nan"), "Expected another value of round_timeout"),
        (("--task", "digits", "--listen", "nowhere"), "found 'nowhere'"),
        (("--task", "digits", "--assignment", "server", "--weighting", "samples"), "weighting = equal"),
        (("--task", "digits", "--config", "none.toml"), "none.toml"),
        (("--task", "no.such.module:task"), "no.such.module"),
    ],
)
def test_server_settings_that_make_no_sense(error_of: Say, options: tuple[object, ...], said: str) -> None:
    assert said in error_of(flower_server, *options)


def test_an_unknown_key_in_a_file_names_the_nearest(error_of: Say, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('task = "digits"\nhypothesis = 3\n')
    assert "did you mean 'hypotheses'?" in error_of(flower_server, "--config", "run.toml")


def test_a_port_in_use_is_found_before_anything_is_written(error_of: Say, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = error_of(flower_server, "--task", "digits", "--listen", f"127.0.0.1:{port}", "--out", "out")
    assert said.startswith(f"Expected port {port} free")
    assert not (tmp_path / "out").exists()


def test_an_earlier_run_is_not_written_over(error_of: Say, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "history.jsonl").write_text("precious\n")
    said = error_of(flower_server, "--task", "digits", "--listen", "127.0.0.1:0", "--out", "out")
    assert "found out/history.jsonl: name another" in said
    assert (tmp_path / "out" / "history.jsonl").read_text() == "precious\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "Expected --task"),
        (("--task", "digits"), "Expected --state"),
        (("--task", "digits", "--state", "s"), "Expected --noise-multiplier"),
        (("--task", "digits", "--state", "s", "--noise-multiplier", 3), "Expected --budget"),
        (("--task", "digits", "--state", "s", "--noise-multiplier", 0, "--budget", 1), "noise_multiplier"),
        (("--task", "digits", "--state", "s", "--noise-multiplier", 3, "--budget", -1), "budget"),
        (("--task", "digits", "--state", "s", "--noise-multiplier", 3, "--budget", 1, "--delta", 1), "delta"),
        (("--task", "digits", "--state", "s", "--noise-multiplier", 3, "--budget", 1, "--fleet", 0), "fleet"),
        (
            ("--task", "digits", "--state", "s", "--noise-multiplier", 3, "--budget", 1, "--selection", "randomized"),
            "Expected selection_epsilon set",
        ),
        (("--task", "hospital", "--state", "s", "--noise-multiplier", 3, "--budget", 1), "Expected --data FILE"),
        (
            ("--task", "hospital", "--state", "s", "--noise-multiplier", 3, "--budget", 1, "--data", "none.csv"),
            "none.csv",
        ),
        (
            ("--task", "digits", "--state", "s", "--noise-multiplier", 3, "--budget", 1, "--partition-by", "zip"),
            "Expected --partition-by to be one of index, found 'zip'",
        ),
    ],
)
def test_client_settings_that_make_no_sense(
    error_of: Say, tmp_path: Path, options: tuple[object, ...], said: str
) -> None:
    assert said in error_of(flower_client, *options)
    assert not (tmp_path / "s" / "ledger.sqlite").exists()


def test_a_file_that_lacks_a_column_names_it_and_those_found(client: Say) -> None:
    said = client(HEADER.replace(" Average Total Payments ", "Payments"), GOOD)
    assert "Average Total Payments" in said
    assert "Provider Zip Code" in said


def test_a_number_that_is_none_names_its_place(client: Say) -> None:
    said = client(HEADER, GOOD, ROW.format(provider="10001", zip="36301", payment="NaN"))
    assert "line 3" in said
    assert "Average Total Payments" in said


def test_a_zip_that_does_not_resolve_is_an_error_when_strict(client: Say) -> None:
    said = client(HEADER, GOOD, ROW.format(provider="10001", zip="00000", payment="$1.00"), options=("--strict",))
    assert "00000" in said


def test_a_data_holder_without_a_usable_row(client: Say) -> None:
    assert "row" in client(HEADER, ROW.format(provider="10001", zip="00000", payment="$1.00"))


def test_more_clients_than_the_file_has(client: Say) -> None:
    said = client(HEADER, GOOD, options=("--partition-by", "provider", "--fleet", 2))
    assert "Expected at least 2 data holders" in said
    assert said.endswith("found 1")


def test_a_truncated_archive(error_of: Say, tmp_path: Path) -> None:
    whole = lzma.compress(f"{HEADER}\n{GOOD}\n".encode() * 50)
    (tmp_path / "charges.csv.xz").write_bytes(whole[: len(whole) // 2])
    required = ("--state", "s", "--noise-multiplier", 3, "--budget", 1)
    assert "charges.csv.xz" in error_of(flower_client, "--task", "hospital", "--data", "charges.csv.xz", *required)


def test_a_server_that_cannot_be_reached_is_tried_again_and_then_named(
    error_of: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    options = ("--task", "synthetic", "--state", "s", "--noise-multiplier", 3, "--budget", 1, "--retry-for", 2)
    said = error_of(flower_client, *options, "--server", "127.0.0.1:9")
    assert said.startswith("Expected a server at 127.0.0.1:9, found none for 2 s")
    assert time.monotonic() - began >= 2  # it did try for as long as it was told to


def test_a_state_folder_in_use(error_of: Say, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "s").mkdir()
    with (tmp_path / "s" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = ("--task", "synthetic", "--state", "s", "--noise-multiplier", 3, "--budget", 1)
        assert "one client at a time" in error_of(flower_client, *options, "--server", "127.0.0.1:9")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("ledger", "nowhere"), "Expected ledger.sqlite in nowhere"),
        (("predict", "none.safetensors", "none.csv"), "none.safetensors"),
        (("nonsense",), "No such command 'nonsense'"),
    ],
)
def test_coterie_commands(error_of: Say, options: tuple[object, ...], said: str) -> None:
    assert said in error_of(coterie, *options)


def test_a_budget_below_one_release_is_an_error_at_once(error_of: Say) -> None:
    options = ("--task", "synthetic", "--state", "s", "--noise-multiplier", 2, "--budget", 0.9)
    assert error_of(flower_client, *options).startswith("Expected --budget of at least 1, the cost of one release")


def test_a_payment_beyond_single_precision(client: Say) -> None:
    assert "finite" in client(HEADER, GOOD, ROW.format(provider="10001", zip="36301", payment="$1e300"))
