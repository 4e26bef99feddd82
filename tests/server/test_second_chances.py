"""Re-seeding and the warning of collapse in whole runs of the server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from coterie.config import Reseed, RunSettings, Start
from coterie.protocol import Acknowledgement, Refusal, UpdateReply, ValidationReply
from coterie.server.app import describe, run
from coterie.server.history import RoundRecord, Summary
from coterie.server.hypotheses import initial_hypotheses
from coterie.server.reseeding import ReseedSettings, draws_of_round
from coterie.tasks import Task

NODES = {2**63 + j: f"fingerprint {j}" for j in range(10)}
Script = Callable[[Message], Any]


def settings(out: Path, **changes: Any) -> RunSettings:
    return RunSettings(
        **{
            **{"task": "tiny", "hypotheses": 3, "rounds": 6, "clients_per_round": 10, "min_clients": 10},
            **{"validate_every": 1, "reseed_after": 2, "seed": 5, "out": out, **changes},
        }
    )


def choosing(by_round: Callable[[int], int], loss: float = 1.0, reason: str = "no") -> Script:
    """Clients that send their round's number and all take ``by_round(number)``; some validate, one refuses."""

    def script(message: Message) -> Any:
        number, kind = int(message.metadata.group_id), message.metadata.message_type
        if kind == "query":
            return Acknowledgement()
        if message.metadata.dst_node_id == 2**63:
            return Refusal(reason)
        if kind == "evaluate":
            return ValidationReply(loss / number, loss)
        return UpdateReply("r", np.full(13, number, np.float32), by_round(number), None)

    return script


class Played:
    """A finished run: what was sent, said and written."""

    def __init__(self, grid: Any, task: Task, out: Path, **changes: Any) -> None:
        self.grid, self.said, self.out = grid, list[str](), out
        self.summary: Summary = run(settings(out, **changes), task, grid, lambda: dict(NODES), log=self.said.append)

    def sent(self, number: int) -> Any:
        return self.grid.hypotheses("train", number)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "history.jsonl").read_text().splitlines()]

    @property
    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return told


def test_idle_hypotheses_become_copies_of_the_average_that_was_just_made(
    scripted_grid: Any, tiny_task: Task, tmp_path: Path
) -> None:
    made = Played(scripted_grid(choosing(lambda number: 1)), tiny_task, tmp_path / "o")
    start, _ = initial_hypotheses(tiny_task, 3, 5)
    for number in (1, 2):  # the second round's averages are what the third is sent
        np.testing.assert_array_equal(made.sent(number)[[0, 2]], start[[0, 2]])
    draws, spread = draws_of_round(5, 2), ReseedSettings().perturbation * 2.0  # a vector of twos: its RMS is 2
    np.testing.assert_array_equal(made.sent(3)[1], [2.0] * 13)
    for j in (0, 2):
        np.testing.assert_allclose(made.sent(3)[j], 2.0 + spread * draws.standard_normal(13), rtol=1e-6)
    # What held-out clients are asked is what is sent next.
    np.testing.assert_array_equal(made.grid.hypotheses("evaluate", 2), made.sent(3))
    assert [line["reseeded"] for line in made.lines] == [[], [0, 2], [], [0, 2], [], [0, 2]]
    assert made.told["reseeded"] == made.summary.reseeded == 6
    lines = [line for line in made.said if line.startswith("round")]
    assert ["re-seeded 0/2" in line for line in lines] == [False, True] * 3
    assert "re-seeded from the most populated one: 6 times" in describe(made.summary)


def test_off_sends_idle_hypotheses_as_they_were(scripted_grid: Any, tiny_task: Task, tmp_path: Path) -> None:
    made = Played(scripted_grid(choosing(lambda number: 1)), tiny_task, tmp_path / "o", reseed=Reseed.OFF)
    start, _ = initial_hypotheses(tiny_task, 3, 5)
    for number in range(1, 7):
        np.testing.assert_array_equal(made.sent(number)[[0, 2]], start[[0, 2]])
    assert made.told["reseeded"] == 0
    assert not any("re-seeded" in line for line in [*made.said, describe(made.summary)])


@pytest.mark.parametrize("mode", list(Reseed))
def test_collapsed_clusters_are_warned_of_in_the_round_and_in_the_summary(
    scripted_grid: Any, tiny_task: Task, tmp_path: Path, mode: Reseed
) -> None:
    made = Played(scripted_grid(choosing(lambda number: 1)), tiny_task, tmp_path / "o", reseed=mode)
    assert [line["collapsed"] for line in made.lines] == [False] + [True] * 5
    assert ["collapsed" in line for line in made.said if line.startswith("round")] == [False] + [True] * 5
    assert made.told["collapsed"] is True
    assert "warning: the clusters had collapsed by round 6" in describe(made.summary)


def test_clusters_that_are_in_use_are_not_warned_of(scripted_grid: Any, tiny_task: Task, tmp_path: Path) -> None:
    made = Played(scripted_grid(choosing(lambda number: number % 3)), tiny_task, tmp_path / "o", reseed_after=3)
    assert made.told["collapsed"] is False
    assert made.told["reseeded"] == 0
    assert not any("collapsed" in line for line in [*made.said, describe(made.summary)])


def test_the_summary_warns_of_the_round_that_was_kept(scripted_grid: Any, tiny_task: Task, tmp_path: Path) -> None:
    """Two hypotheses in use in rounds 1 to 4 and one after that; the best validation is round 6's or round 3's."""

    def play(name: str, best: int) -> Played:
        def script(message: Message) -> Any:
            answer = choosing(lambda number: number % 2 if number <= 4 else 1)(message)
            if isinstance(answer, ValidationReply):
                return ValidationReply(0.5 if int(message.metadata.group_id) == best else 1.0, 1.0)
            return answer

        return Played(scripted_grid(script), tiny_task, tmp_path / name, hypotheses=2)

    assert [line["collapsed"] for line in play("a", 6).lines] == [False] * 5 + [True]
    assert (play("b", 6).told["collapsed"], play("c", 3).told["collapsed"]) == (True, False)


def test_copies_depend_on_counts_hypotheses_and_the_seed_alone(
    scripted_grid: Any, tiny_task: Task, tmp_path: Path
) -> None:
    """Whatever held-out clients lose or those who refuse say: nothing but the updates reaches the next round."""

    def sent(name: str, script: Script, **changes: Any) -> Any:
        made = Played(scripted_grid(script), tiny_task, tmp_path / name, **changes)
        return [made.sent(number) for number in range(1, 7)]

    plain = sent("a", choosing(lambda number: 1))
    np.testing.assert_array_equal(plain, sent("b", choosing(lambda number: 1, loss=1e6, reason="budget")))
    np.testing.assert_array_equal(plain, sent("c", choosing(lambda number: 1), validate_every=6))
    other = sent("d", choosing(lambda number: 1), seed=6)
    assert not np.array_equal(plain[2][0], other[2][0])


@pytest.mark.parametrize("start", list(Start))
def test_the_run_starts_as_asked(scripted_grid: Any, tiny_task: Task, tmp_path: Path, start: Start) -> None:
    made = Played(scripted_grid(choosing(lambda number: 1)), tiny_task, tmp_path / "o", start=start, rounds=1)
    np.testing.assert_array_equal(made.sent(1), initial_hypotheses(tiny_task, 3, 5, start)[0])
    assert (len(np.unique(made.sent(1), axis=0)) == 1) is (start is Start.SHARED)


def test_a_record_of_before_reads_as_neither() -> None:
    record = RoundRecord(1, 0.5, 4, (3, 0))
    assert (record.reseeded, record.collapsed) == ((), False)
