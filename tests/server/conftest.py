"""A Flower grid in memory: what clients answer is a function, and no server runs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from flwr.app import Error, Message
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from coterie.flower import from_record, to_record
from coterie.protocol import Reply

Answer = Reply | Error | None


@dataclass
class ScriptedGrid(Grid):
    """Answers each message by ``script(message)``; None is a client that stays silent."""

    script: Callable[[Message], Answer]
    batches: list[list[Message]] = field(default_factory=list)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """The replies, in reverse: their order means nothing."""
        batch = list(messages)
        self.batches.append(batch)
        replies = []
        for message in batch:
            answer = self.script(message)
            if isinstance(answer, Error):
                replies.append(Message(answer, reply_to=message))
            elif answer is not None:
                replies.append(Message(to_record(answer.to_fields()), reply_to=message))
        return replies[::-1]

    def sent(self, kind: str, number: int | None = None) -> list[Message]:
        """The messages of a kind, of one round or of all."""
        return [
            message
            for batch in self.batches
            for message in batch
            if message.metadata.message_type == kind and number in (None, int(message.metadata.group_id))
        ]

    def hypotheses(self, kind: str, number: int) -> Any:
        """The hypotheses in the first message of a kind and round."""
        return from_record(self.sent(kind, number)[0].content).arrays["hypotheses"]

    def _unused(self, *arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("the strategy needs send_and_receive only")

    run = property(_unused)
    set_run = create_message = get_node_ids = push_messages = pull_messages = _unused


ScriptedGrid.__abstractmethods__ = frozenset()


@pytest.fixture
def scripted_grid(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedGrid]:
    """The class; messages can be made as inside a server."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    return ScriptedGrid
