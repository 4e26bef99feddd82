"""A run from settings to files, on a grid in memory."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from safetensors.numpy import load_file

from coterie.config import RunSettings
from coterie.errors import CoterieError
from coterie.protocol import Acknowledgement, Refusal, UpdateReply, ValidationReply
from coterie.server.app import describe, run
from coterie.server.roster import Roster
from coterie.tasks import Task

NODES = {2**63 + j: f"fingerprint {j}" for j in range(10)}


def settings(out: Path, **changes: object) -> RunSettings:
    values = {
        "task": "tiny",
        "hypotheses": 2,
        "rounds": 2,
        "min_clients": 10,
        "validate_every": 1,
        "round_timeout": 5.0,
        "validation_fraction": 0.3,
        "out": out,
        **changes,
    }
    return RunSettings.model_validate(values)


def script(message: Message) -> Any:
    number, kind = int(message.metadata.group_id), message.metadata.message_type
    validators = [name for name in NODES.values() if Roster.split(NODES.values(), 0.3, 0).validates(name)]
    name = NODES[message.metadata.dst_node_id]
    if kind == "evaluate":
        return ValidationReply(3.0 - number, 4.0 * number) if name == validators[0] else Refusal("validation is off")
    if kind == "query":
        return Acknowledgement()
    return UpdateReply("r", np.full(13, number, np.float32), number % 2, None)


def test_a_run_leaves_models_history_settings_and_summary(scripted_grid: Any, tiny_task: Task, tmp_path: Path) -> None:
    out, said = tmp_path / "out", list[str]()
    summary = run(settings(out), tiny_task, scripted_grid(script), lambda: dict(NODES), log=said.append)
    told = json.loads((out / "summary.json").read_text())
    assert told["task"] == "tiny"
    assert (told["hypotheses"], told["rounds"], told["best_round"]) == (2, 2, 2)
    assert (told["validation_loss"], told["metric"], told["metric_name"]) == (1.0, pytest.approx(8**0.5), "RMSE")
    assert told["clients_per_hypothesis"] == [7, 0]
    assert (told["updates"], told["models_delivered"]) == (14, 10)
    assert told["refusals"] == {"validation is off": 4}
    assert told["models"] == list(summary.models)
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    assert [line["refusals"] for line in lines] == [{"validation is off": 2}] * 2
    assert json.loads((out / "run.json").read_text())["rounds"] == 2
    for path, value in zip(summary.models, (2, 1), strict=True):  # round 1 trained θ_1, round 2 θ_0
        np.testing.assert_array_equal(load_file(path)["out.bias"], [value])
    assert any(line.startswith("round 2/2") and "refused 2" in line for line in said)


def test_the_figure_is_said_to_be_over_those_who_told_theirs(
    scripted_grid: Any, tiny_task: Task, tmp_path: Path
) -> None:
    """Three are held out, and one tells its loss: the mean is over one client."""
    summary = run(
        settings(tmp_path / "o"), tiny_task, scripted_grid(script), lambda: dict(NODES), log=lambda line: None
    )
    text = describe(summary)
    assert "over 1 held-out client" in text, text


def test_without_validation_no_figure_is_claimed(scripted_grid: Any, tiny_task: Task, tmp_path: Path) -> None:
    silent = scripted_grid(lambda m: script(m) if m.metadata.message_type == "train" else None)
    summary = run(settings(tmp_path / "o"), tiny_task, silent, lambda: dict(NODES), log=lambda line: None)
    text = describe(summary)
    assert "RMSE" not in text
    assert "last round" in text
    assert "failed 6 times: no reply in time" in text
    assert summary.models_delivered == 0


def test_equal_seeds_start_from_equal_hypotheses(scripted_grid: Any, tiny_task: Task, tmp_path: Path) -> None:
    made = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        grid = scripted_grid(lambda message: None)
        run(settings(tmp_path / name, seed=seed), tiny_task, grid, lambda: dict(NODES), log=lambda line: None)
        made.append(grid.hypotheses("train", 1))
    np.testing.assert_array_equal(made[0], made[1])
    assert not np.array_equal(made[0], made[2])


def test_an_earlier_run_stops_the_next_before_any_client_is_asked(
    scripted_grid: Any, tiny_task: Task, tmp_path: Path
) -> None:
    grid = scripted_grid(script)
    run(settings(tmp_path / "o"), tiny_task, grid, lambda: dict(NODES), log=lambda line: None)
    asked = len(grid.batches)
    with pytest.raises(CoterieError, match="--out"):
        run(settings(tmp_path / "o"), tiny_task, grid, lambda: dict(NODES), log=lambda line: None)
    assert len(grid.batches) == asked


def test_ctrl_c_while_the_models_are_handed_out_still_leaves_a_summary(
    scripted_grid: Any, tiny_task: Task, tmp_path: Path
) -> None:
    def interrupted(message: Message) -> Any:
        if message.metadata.message_type == "query":
            raise KeyboardInterrupt
        return script(message)

    run(settings(tmp_path / "o"), tiny_task, scripted_grid(interrupted), lambda: dict(NODES), log=lambda line: None)
    assert json.loads((tmp_path / "o" / "summary.json").read_text())["models_delivered"] == 0
    assert len(list((tmp_path / "o").glob("*.safetensors"))) == 2


def test_a_folder_that_is_lost_in_mid_run_is_one_line(scripted_grid: Any, tiny_task: Task, tmp_path: Path) -> None:
    out = tmp_path / "o"

    def losing(message: Message) -> Any:
        shutil.rmtree(out, ignore_errors=True)
        return script(message)

    with pytest.raises(CoterieError) as caught:
        run(settings(out), tiny_task, scripted_grid(losing), lambda: dict(NODES), log=lambda line: None)
    assert "\n" not in str(caught.value)
