"""A user's own task, named package.module:attribute, on both sides: requests, replies and saved models."""

import sys
import types
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from coterie.client.assembly import data_holder
from coterie.client.participation import MODEL_FILE, answer_train, answer_validation, keep_model
from coterie.config import ClientSettings, RunSettings
from coterie.flower import from_record
from coterie.models import load_model
from coterie.protocol import HypothesesMessage, TrainRequest
from coterie.server.app import run
from coterie.tasks import ClientData, Task, load_task

NAME = "a_users_module:my_task"


@pytest.fixture
def own_task(monkeypatch: pytest.MonkeyPatch, tiny_task: Task) -> Task:
    """``load_task`` finds it; its own name is another than the one it is loaded by."""
    module = types.ModuleType("a_users_module")
    module.my_task = replace(tiny_task, name="mine")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_module", module)
    return load_task(NAME)


def test_a_run_with_the_users_own_task(scripted_grid: Any, own_task: Task, rows: ClientData, tmp_path: Path) -> None:
    with ExitStack() as stack:
        nodes, holders = {}, {}
        for node in (1, 2, 3):
            settings = ClientSettings(task=NAME, state=tmp_path / str(node), noise_multiplier=3.0, budget=100.0)
            holders[node] = stack.enter_context(data_holder(settings, own_task, rows))
            nodes[node] = f"fingerprint {node}"

        def script(message: Message) -> Any:
            fields, holder = from_record(message.content), holders[message.metadata.dst_node_id]
            if message.metadata.message_type == "train":
                return answer_train(holder, TrainRequest.parse(fields), is_stale=lambda: False)
            asked = HypothesesMessage.parse(fields)
            if message.metadata.message_type == "evaluate":
                return answer_validation(holder, asked)
            return keep_model(holder, asked)

        run_settings = RunSettings(
            task=NAME, rounds=2, min_clients=3, validate_every=1, validation_fraction=0.4, out=tmp_path / "out"
        )
        summary = run(run_settings, own_task, scripted_grid(script), lambda: nodes, log=lambda line: None)
    assert summary.refusals == {}
    assert (summary.updates, summary.models_delivered) == (4, 3)
    for path in (Path(summary.models[0]), tmp_path / "1" / MODEL_FILE):
        task, _ = load_model(path, task_name=NAME)
        assert task.name == own_task.name
