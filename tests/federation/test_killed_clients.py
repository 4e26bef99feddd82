"""A client that dies anywhere between "trained" and "sent" has released nothing that its ledger lacks."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message

from coterie.address import Address
from coterie.client.ledger import LEDGER_FILE, Ledger
from coterie.config import Assignment, Weighting
from coterie.flower import from_record, to_record
from coterie.protocol import PrivacyProposal, TrainRequest, UpdateReply, parse_reply
from coterie.server.engine import EmbeddedGrid, superlink
from coterie.server.hypotheses import initial_hypotheses
from coterie.tasks import load_task
from tests.federation.conftest import PATIENCE
from tests.processes import dying_clients

TOGETHER = 10


@dataclass(frozen=True)
class End:
    """How one client ended: by a kill or by itself, what its ledger holds, and what the server got from it."""

    line: int
    killed: bool
    recorded: frozenset[str]
    received: str | None

    @property
    def is_missing_a_row(self) -> bool:
        """The one thing that must never be. A row without a reply is what a crash may cost."""
        return self.received is not None and self.received not in self.recorded


def test_no_release_is_missing_from_the_ledger_wherever_the_client_is_killed(tmp_path: Path) -> None:
    ends = list(walk(tmp_path))
    assert [end.line for end in ends if end.is_missing_a_row] == []
    assert max(len(end.recorded) for end in ends) == 1
    # The path was really walked: deaths before the row, between the row and the reply, and after the reply.
    assert sum(not end.recorded for end in ends) > 10
    assert sum(bool(end.recorded) and end.received is None for end in ends) > 10
    assert sum(end.killed and end.received is not None for end in ends) > 0
    assert all(end.received for end in ends if not end.killed)


def test_a_client_that_sends_before_it_records_is_found_out(tmp_path: Path) -> None:
    """The negative control, by the same walk and the same look at the ledgers."""
    assert any(end.is_missing_a_row for end in walk(tmp_path, "forgetful"))


def walk(folder: Path, *mode: str) -> Iterator[End]:
    """Kill a client before each line of the path in turn, a batch at a time, until the path has no such line."""
    with superlink(Address("127.0.0.1", 0)) as grid:
        zygote = subprocess.Popen(
            [sys.executable, dying_clients.__file__, str(grid.address), str(folder), *mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            first, finished = 1, False
            while not finished:
                lines = range(first, first + TOGETHER)
                ends, replies = _one_batch(grid, zygote, [f"line-{number}" for number in lines])
                for number, (name, end) in zip(lines, sorted(ends.items(), key=_number), strict=True):
                    recorded = _recorded(folder / name / LEDGER_FILE)
                    yield End(number, end == "killed", recorded, replies.get(name))
                    finished = finished or end == "finished"
                first += TOGETHER
        finally:
            zygote.kill()
            zygote.communicate()


def _number(item: tuple[str, str]) -> int:
    return int(item[0].split("-")[1])


def _one_batch(
    grid: EmbeddedGrid, zygote: subprocess.Popen[str], names: list[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """How each client ended, and the release id of each whole reply that the server got."""
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    before = set(grid.get_node_ids())
    nodes: dict[int, str] = {}
    for name in names:
        zygote.stdin.write(f"{name} {name.split('-')[1]}\n")
        zygote.stdin.flush()
        deadline = time.monotonic() + PATIENCE
        while not (new := set(grid.get_node_ids()) - before - nodes.keys()):
            assert time.monotonic() < deadline, f"{name} did not come"
            time.sleep(0.01)
        nodes[new.pop()] = name
    hypotheses, _ = initial_hypotheses(load_task("synthetic"), 2, 0)
    request = TrainRequest(
        *("run", 1, "synthetic", hypotheses, Assignment.CLIENT, Weighting.EQUAL),
        *(load_task("synthetic").training, PrivacyProposal()),
    )
    content = to_record(request.to_fields())
    ids = grid.push_messages([Message(content, node, "train", ttl=PATIENCE) for node in nodes])
    zygote.stdin.write("\n")
    zygote.stdin.flush()
    ends = dict(line.split() for line in iter(zygote.stdout.readline, "\n"))
    replies = {}
    for message in grid.pull_messages(ids):
        if not message.has_error():
            reply = parse_reply(from_record(message.content))
            assert isinstance(reply, UpdateReply)
            replies[nodes[message.metadata.src_node_id]] = reply.release
    return ends, replies


def _recorded(path: Path) -> frozenset[str]:
    with Ledger(path, create=False) as ledger:
        return frozenset(release.id for release in ledger.releases())
