"""The main job in the words of its user: real commands, real files, real data."""

import csv
import json
import signal
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.federation.conftest import PATIENCE, Run

HOSPITAL = ("--task", "hospital")


def ledgers(run: Run, state: Path) -> list[dict[str, float]]:
    listed = run("coterie", "ledger", state, "--json")
    output, errors = listed.communicate(timeout=PATIENCE)
    assert listed.returncode == 0, errors
    found: list[dict[str, float]] = json.loads(output)
    return found


def test_hospitals_train_know_what_it_cost_and_leave_with_a_model(
    run: Run, address: str, hospital_file: Path, tmp_path: Path
) -> None:
    server = run(
        *("flower-server", "--listen", address, *HOSPITAL, "--hypotheses", 3, "--rounds", 4),
        *("--clients-per-round", 5, "--min-clients", 12, "--validate-every", 2, "--out", "runs/hospital"),
    )
    fleet = run(
        *("flower-client", "--server", address, *HOSPITAL, "--data", hospital_file, "--partition-by", "provider"),
        *("--fleet", 12, "--state", "state", "--noise-multiplier", 3, "--budget", 200, "--fine-tune", 2),
    )
    _, said_by_server = server.communicate(timeout=PATIENCE)
    _, said_by_fleet = fleet.communicate(timeout=PATIENCE)
    assert server.returncode == 0, said_by_server
    assert fleet.returncode == 0, said_by_fleet
    assert "NOT covered: which hypothesis was chosen" in " ".join(said_by_fleet.split())

    rows = ledgers(run, tmp_path / "state")
    assert len(rows) == 12
    assert sum(row["releases"] for row in rows) == 4 * 5
    for row in rows:
        assert row["pure_epsilon"] == pytest.approx(row["releases"] * 11 / 3, rel=1e-12)
        assert row["pure_epsilon"] <= row["budget"] == 200
    held_out = [row for row in rows if row["disclosures"]]
    assert len(held_out) == round(0.2 * 12)
    assert all(row["disclosures"] == 2 and row["releases"] == 0 for row in held_out)

    summary = json.loads((tmp_path / "runs/hospital/summary.json").read_text())
    assert summary["task"] == "hospital"
    assert (summary["hypotheses"], summary["rounds"], summary["models_delivered"]) == (3, 4, 12)
    assert sum(summary["clients_per_hypothesis"]) == 5
    assert summary["metric_name"] == "RMSE in dollars"
    assert 0 < summary["validation_loss"] < summary["metric"]
    history = [json.loads(line) for line in (tmp_path / "runs/hospital/history.jsonl").read_text().splitlines()]
    assert [record["round"] for record in history] == [1, 2, 3, 4]
    assert [record["validation_loss"] is not None for record in history] == [False, True, False, True]

    # Every client, trained or not, leaves with a model of its own and a card.
    for row in rows:
        folder = tmp_path / "state" / str(row["client"])
        card = json.loads((folder / "model.json").read_text())
        assert card["loss_after"] <= card["loss_before"] * 1.5
        assert card["pure_epsilon"] == row["pure_epsilon"]
        assert sum(array.size for array in load_file(folder / "model.safetensors").values()) == 11
    predict = run("coterie", "predict", folder / "model.safetensors", hospital_file, "--out", "predictions.csv")
    _, errors = predict.communicate(timeout=PATIENCE)
    assert predict.returncode == 0, errors
    with (tmp_path / "predictions.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) > 10_000


def test_a_second_run_on_the_same_data_goes_on_from_the_same_total_until_the_budget_ends_it(
    run: Run, address: str, tmp_path: Path
) -> None:
    """Two numbers a release at ν = 2 cost 1: of a budget of 3, the first run of 2 rounds leaves one release."""
    for number, rounds in enumerate((2, 5)):
        server = run(
            *("flower-server", "--listen", address, "--task", "synthetic", "--hypotheses", 2, "--rounds", rounds),
            *("--min-clients", 3, "--clients-per-round", 3, "--validation-fraction", 0, "--out", f"out{number}"),
        )
        fleet = run(
            *("flower-client", "--server", address, "--task", "synthetic", "--fleet", 3, "--state", "state"),
            *("--noise-multiplier", 2, "--budget", 3),
        )
        _, said = server.communicate(timeout=PATIENCE)
        fleet.communicate(timeout=PATIENCE)
        assert (server.returncode, fleet.returncode) == (0, 0), said
    summary = json.loads((tmp_path / "out1/summary.json").read_text())
    assert summary["stopped"] == "every client that is left has spent its budget"
    assert summary["refusals"] == {"budget 3 would be passed": 3}
    assert summary["validation_loss"] is None  # nobody was held out
    for row in ledgers(run, tmp_path / "state"):
        assert (row["releases"], row["pure_epsilon"], row["left"], row["runs"]) == (3, 3.0, 0.0, 2)


def test_a_server_that_proposes_less_noise_is_refused_with_a_reason_that_it_logs(
    run: Run, address: str, tmp_path: Path
) -> None:
    server = run(
        *("flower-server", "--listen", address, "--task", "synthetic", "--hypotheses", 2, "--rounds", 1),
        *("--min-clients", 2, "--noise-multiplier", 1.5, "--validation-fraction", 0, "--out", "out"),
    )
    fleet = run(
        *("flower-client", "--server", address, "--task", "synthetic", "--fleet", 2, "--state", "state"),
        *("--noise-multiplier", 2, "--budget", 3),
    )
    _, said = server.communicate(timeout=PATIENCE)
    fleet.communicate(timeout=PATIENCE)
    assert server.returncode == 2
    assert "error: Expected updates to average, found none" in said
    reason = "noise multiplier 1.5 proposed, at least 2 accepted"
    assert said.count(f"refused: {reason}") == 2
    assert json.loads((tmp_path / "out/summary.json").read_text())["refusals"] == {reason: 2}
    assert [(row["releases"], row["refused"]) for row in ledgers(run, tmp_path / "state")] == [(0, 1), (0, 1)]
    assert not list((tmp_path / "state").glob("*/model.safetensors"))  # a random start is nobody's model


def test_ctrl_c_keeps_what_there_is_and_the_clients_hear_of_it(run: Run, address: str, tmp_path: Path) -> None:
    server = run(
        *("flower-server", "--listen", address, "--task", "synthetic", "--hypotheses", 2, "--rounds", 100_000),
        *("--min-clients", 3, "--out", "out"),
    )
    fleet = run(
        *("flower-client", "--server", address, "--task", "synthetic", "--fleet", 3, "--state", "state"),
        *("--noise-multiplier", 2, "--budget", 100_000),
    )
    history = tmp_path / "out/history.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not (history.exists() and history.read_text().count("\n") > 2):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    server.send_signal(signal.SIGINT)
    _, said = server.communicate(timeout=PATIENCE)
    _, said_by_fleet = fleet.communicate(timeout=PATIENCE)
    assert "Traceback" not in said + said_by_fleet
    assert fleet.returncode == 0
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["stopped"] == "interrupted"
    assert summary["models_delivered"] == 3
    assert all(
        (tmp_path / "state" / str(row["client"]) / "model.safetensors").exists()
        for row in ledgers(run, tmp_path / "state")
    )
