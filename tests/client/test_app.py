"""From Flower message to Flower message."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from coterie.client.app import _Warm, answer
from coterie.client.participation import MODEL_FILE, DataHolder
from coterie.flower import from_record, to_record
from coterie.protocol import (
    Acknowledgement,
    Fields,
    HypothesesMessage,
    Refusal,
    TrainRequest,
    UpdateReply,
    ValidationReply,
    parse_reply,
)

Holder = Callable[..., DataHolder]
Request = Callable[..., TrainRequest]


@pytest.fixture(autouse=True)
def _a_server_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def message(fields: Fields, kind: str, ttl: float = 60.0) -> Message:
    return Message(to_record(fields), 2**63 + 5, kind, ttl=ttl)


def final(request: TrainRequest) -> Fields:
    return HypothesesMessage(request.run, request.round, request.task, request.hypotheses).to_fields()


def test_each_kind_of_message_has_its_answer(open_holder: Holder, train_request: Request) -> None:
    holder, request = open_holder(), train_request()
    kinds = []
    for fields, kind in [
        (request.to_fields(), "train"),
        (final(train_request(run="another")), "evaluate"),
        (final(request), "query"),
    ]:
        asked = message(fields, kind)
        reply = answer(holder, asked)
        assert reply is not None
        assert reply.metadata.dst_node_id == asked.metadata.src_node_id
        kinds.append(type(parse_reply(from_record(reply.content))))
    assert kinds == [UpdateReply, ValidationReply, Acknowledgement]


def test_a_round_that_is_over_gets_silence_and_costs_nothing(open_holder: Holder, train_request: Request) -> None:
    holder = open_holder()
    late = message(train_request().to_fields(), "train", ttl=60.0)
    late.metadata.created_at -= 61.0
    assert answer(holder, late) is None
    assert holder.gate.ledger.releases() == []


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
@pytest.mark.parametrize(
    "content",
    [
        RecordDict({}),
        RecordDict({"scalars": ConfigRecord({}), "arrays": ArrayRecord({})}),
        to_record(Fields({"run": "r", "round": 1, "task": "tiny"}, {"hypotheses": np.zeros(13, np.float32)})),
    ],
    ids=["empty", "no fields", "flat hypotheses"],
)
def test_a_malformed_message_is_refused(open_holder: Holder, kind: str, content: RecordDict) -> None:
    reply = answer(open_holder(), Message(content, 5, kind))
    assert reply is not None
    refusal = parse_reply(from_record(reply.content))
    assert isinstance(refusal, Refusal)
    assert "malformed" in refusal.reason


def test_a_round_number_beyond_the_ledgers_integers_is_refused(open_holder: Holder, train_request: Request) -> None:
    # Flower carries uint64, SQLite int64: an exception here would leave no reason at the server.
    reply = answer(open_holder(), message(train_request(round=2**63).to_fields(), "train"))
    assert reply is not None
    assert isinstance(parse_reply(from_record(reply.content)), Refusal)


def test_the_end_of_the_run_is_announced_with_the_models_place(
    open_holder: Holder, train_request: Request, tmp_path: Path
) -> None:
    said: list[str] = []
    warm = _Warm(open_holder(), log=said.append)
    warm.handle(message(train_request().to_fields(), "train"))
    assert not warm.over
    warm.handle(message(final(train_request()), "query"))
    assert warm.over
    assert str(tmp_path / "state" / MODEL_FILE) in said[-1]


def test_no_model_is_announced_where_none_was_kept(open_holder: Holder, train_request: Request, tmp_path: Path) -> None:
    said: list[str] = []
    warm = _Warm(open_holder(), log=said.append)
    warm.handle(message(final(train_request(task="hospital")), "query"))
    assert not (tmp_path / "state" / MODEL_FILE).exists()
    assert MODEL_FILE not in "".join(said)
