"""What a run leaves on disk."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from coterie.errors import CoterieError
from coterie.parameters import layout_of
from coterie.server.history import (
    HISTORY_FILE,
    Outcome,
    RoundRecord,
    append_round,
    open_folder,
    save_hypotheses,
    summarize,
    write_json,
)
from coterie.server.hypotheses import BestSoFar, Validation
from coterie.tasks import Task


def outcome(best: BestSoFar, *rounds: RoundRecord) -> Outcome:
    return Outcome(np.zeros((2, 13), np.float32), best, rounds, "all rounds done", 5, 2, 6.0)


def test_every_round_is_one_line_that_reads_back(tmp_path: Path) -> None:
    open_folder(tmp_path / "out")
    records = [
        RoundRecord(1, 0.5, 4, (3, 0), {"too little noise": 2}, {"no reply in time": 1}, {"a": 3}),
        RoundRecord(2, 0.25, 4, (1, 2), validation_loss=0.5, metric=0.7, validators=2),
    ]
    for record in records:
        append_round(tmp_path / "out", record)
    first, second = map(json.loads, (tmp_path / "out" / HISTORY_FILE).read_text().splitlines())
    assert first["refusals"] == {"too little noise": 2}
    assert first["failures"] == {"no reply in time": 1}
    assert first["dropped"] == {"a": 3}
    assert first["clients_per_hypothesis"] == [3, 0]
    assert (second["round"], second["validation_loss"], second["metric"], second["validators"]) == (2, 0.5, 0.7, 2)
    assert second["refusals"] == {}


def test_an_earlier_run_is_never_overwritten(tmp_path: Path) -> None:
    open_folder(tmp_path / "out")
    append_round(tmp_path / "out", RoundRecord(1, 0.5, 4, (3, 0)))
    before = (tmp_path / "out" / HISTORY_FILE).read_bytes()
    with pytest.raises(CoterieError, match="--out without an earlier run"):
        open_folder(tmp_path / "out")
    assert (tmp_path / "out" / HISTORY_FILE).read_bytes() == before


def test_a_place_that_cannot_be_a_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CoterieError, match="--out to be a writable folder") as caught:
        open_folder(tmp_path / "file" / "out")
    assert "\n" not in str(caught.value)


def test_models_are_saved_with_their_task_run_and_index(tmp_path: Path, tiny_task: Task) -> None:
    hypotheses = np.arange(26, dtype=np.float32).reshape(2, 13)
    paths = save_hypotheses(tmp_path, "tiny", "run 9", hypotheses, layout_of(tiny_task.build()))
    assert paths == (str(tmp_path / "hypothesis-0.safetensors"), str(tmp_path / "hypothesis-1.safetensors"))
    with safe_open(paths[1], framework="numpy") as file:
        assert file.metadata() == {"format": "coterie-model-1", "task": "tiny", "run": "run 9", "hypothesis": "1"}
        np.testing.assert_array_equal(file.get_tensor("out.bias"), [25])
        np.testing.assert_array_equal(file.get_tensor("hidden.weight"), np.arange(13, 19).reshape(3, 2))


def test_the_summary_is_of_the_round_that_was_kept(tiny_task: Task) -> None:
    rounds = [
        RoundRecord(1, 1.0, 4, (4, 0), {"a": 1}, {"f": 1}),
        RoundRecord(2, 1.0, 4, (2, 2), {"a": 2, "b": 1}, {}, {"d": 1}),
        RoundRecord(3, 1.0, 4, (0, 3)),
    ]
    best = BestSoFar(2, Validation(0.25, 4.0, 2), np.ones((2, 13), np.float32), 1)
    summary = summarize(outcome(best, *rounds), task=tiny_task, run="r", hypotheses=2, delivered=7, models=("m",))
    assert (summary.best_round, summary.clients_per_hypothesis) == (2, (2, 2))
    assert (summary.validation_loss, summary.metric, summary.metric_name) == (0.25, 2.0, "RMSE")
    assert (summary.rounds, summary.updates, summary.models_delivered) == (3, 11, 7)
    assert summary.refusals == {"a": 3, "b": 1}
    assert (summary.failures, summary.dropped) == ({"f": 1}, {"d": 1})
    assert (summary.seconds, summary.seconds_per_round) == (6.0, 2.0)


def test_a_run_without_validation_is_summarized_by_its_last_round(tiny_task: Task) -> None:
    rounds = [RoundRecord(1, 1.0, 4, (4, 0)), RoundRecord(2, 1.0, 4, (1, 3))]
    summary = summarize(outcome(BestSoFar(), *rounds), task=tiny_task, run="r", hypotheses=2, delivered=0, models=())
    assert (summary.best_round, summary.clients_per_hypothesis) == (2, (1, 3))
    assert summary.validation_loss is None
    assert summary.metric is None


def test_a_run_that_never_had_a_round_has_a_summary(tiny_task: Task) -> None:
    summary = summarize(outcome(BestSoFar()), task=tiny_task, run="r", hypotheses=2, delivered=0, models=())
    assert (summary.rounds, summary.best_round, summary.seconds_per_round) == (0, 0, 0.0)
    assert summary.clients_per_hypothesis == (0, 0)


def test_json_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    write_json(path, {"b": [1, 2]})
    assert json.loads(path.read_text()) == {"b": [1, 2]}
    assert list(tmp_path.iterdir()) == [path]
