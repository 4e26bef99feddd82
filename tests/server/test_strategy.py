"""Whole runs of the strategy against scripted clients."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message

from coterie.config import RunSettings
from coterie.flower import from_record
from coterie.mechanisms.events import Neighbourhood
from coterie.protocol import (
    Acknowledgement,
    HypothesesMessage,
    PrivacyProposal,
    Refusal,
    TrainRequest,
    UpdateReply,
    ValidationReply,
)
from coterie.server.history import Outcome, RoundRecord
from coterie.server.roster import Roster
from coterie.server.strategy import KHypotheses
from coterie.tasks import Task, TrainingSettings

# Above 2^63 and next to each other: any float in between makes two of them one.
NODES = {2**63 + 2**40 + j: f"fingerprint {j}" for j in range(10)}
START = np.array([[0] * 13, [10] * 13], np.float32)


def update(value: float, hypothesis: int | None = 0, **changes: Any) -> UpdateReply:
    values = {"release": "r", "vector": np.full(13, value, np.float32), "hypothesis": hypothesis, "rows": None}
    return UpdateReply(**{**values, **changes})


def settings(**changes: object) -> RunSettings:
    values = {
        "task": "tiny",
        "hypotheses": 2,
        "rounds": 3,
        "clients_per_round": 10,
        "min_clients": 10,
        "validation_fraction": 0.2,
        "validate_every": 1,
        "round_timeout": 5.0,
        "seed": 4,
        **changes,
    }
    return RunSettings.model_validate(values)


def roles(run: RunSettings, nodes: dict[int, str] = NODES) -> tuple[list[int], list[int]]:
    """The node ids that train and that validate, in a fixed order."""
    roster = Roster.split(nodes.values(), run.validation_fraction, run.seed)
    validators = [node for node, name in nodes.items() if roster.validates(name)]
    return [node for node in nodes if node not in validators], validators


class Run:
    """A strategy, what it said and what it recorded."""

    def __init__(
        self, run: RunSettings, task: Task, identities: Callable[[], dict[int, str]] = lambda: dict(NODES)
    ) -> None:
        self.said: list[str] = []
        self.rounds: list[RoundRecord] = []
        self.strategy = KHypotheses(
            run, task, "run-1", identities=identities, log=self.said.append, on_round=self.rounds.append
        )

    def train(self, grid: Any) -> Outcome:
        return self.strategy.train(grid, START)


@pytest.fixture(autouse=True)
def _no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    naps = Counter[str]()

    def nap(seconds: float) -> None:
        naps["taken"] += 1
        assert naps["taken"] < 10_000, "the strategy waits for ever"

    monkeypatch.setattr(time, "sleep", nap)


def test_three_rounds_with_every_kind_of_answer(scripted_grid: Any, tiny_task: Task) -> None:
    run = settings()
    trainers, validators = roles(run)
    assert (len(trainers), len(validators)) == (8, 2)
    sound, weighty, refusing, spent, failing, silent, poisoned, odd = trainers

    def script(message: Message) -> Any:
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        number = int(message.metadata.group_id)
        if kind == "evaluate":
            return ValidationReply(1.0 / number, 4.0) if node == validators[0] else Refusal("not me")
        if kind == "query":
            return Acknowledgement()
        return {
            sound: update(2.0 * number),
            weighty: update(4.0 * number),
            refusing: Refusal("too little noise"),
            spent: Refusal("budget 5 would be passed", exhausted=True),
            failing: Error(0, "out of memory"),
            silent: None,
            poisoned: update(float("nan")),
            odd: [update(1.0, vector=np.ones(12, np.float32)), ValidationReply(1.0, 1.0), update(1.0, 7)][number - 1],
        }[node]

    grid, made = scripted_grid(script), Run(run, tiny_task)
    outcome = made.train(grid)

    assert [record.clients_per_hypothesis for record in made.rounds] == [(2, 0)] * 3
    for number, record in enumerate(made.rounds, 1):
        assert record.round == number
        assert record.failures == {"error: out of memory": 1, "no reply in time": 1}
        assert record.validators == 1
        assert record.validation_loss == pytest.approx(1 / number)
        assert record.metric == 2.0  # √4: the task's report of the mean score
    assert [record.sampled for record in made.rounds] == [8, 7, 7]
    told = {"too little noise": 1, "not me": 1}
    assert made.rounds[0].refusals == {**told, "budget 5 would be passed": 1}
    assert made.rounds[1].refusals == made.rounds[2].refusals == told
    dropped = [
        "update of 12 numbers, expected 13",
        "ValidationReply sent, UpdateReply expected",
        "hypothesis 7, expected 0 to 1",
    ]
    for record, odd_one in zip(made.rounds, dropped, strict=True):
        assert record.dropped == {"update with non-finite numbers": 1, odd_one: 1}

    # θ_0 is the mean of the two sound updates, and θ_1, whom nobody chose, is as it was.
    np.testing.assert_array_equal(grid.hypotheses("evaluate", 1), [[3] * 13, [10] * 13])
    np.testing.assert_array_equal(grid.hypotheses("train", 2), [[3] * 13, [10] * 13])
    np.testing.assert_array_equal(outcome.hypotheses, [[9] * 13, [10] * 13])
    assert outcome.rounds == tuple(made.rounds)
    assert (outcome.stopped, outcome.trainers, outcome.validators) == ("all rounds done", 8, 2)

    for number in (1, 2, 3):
        asked = {message.metadata.dst_node_id for message in grid.sent("train", number)}
        assert asked == set(trainers) - ({spent} if number > 1 else set())
        assert {m.metadata.dst_node_id for m in grid.sent("evaluate", number)} == set(validators)
    # Every refusal, failure and drop names its node, with the reason.
    log = "\n".join(made.said)
    for node, reason in [(refusing, "too little noise"), (failing, "out of memory"), (silent, "no reply in time")]:
        assert any(str(node) in line and reason in line for line in made.said), log


def test_a_request_carries_settings_proposal_and_time_to_live(scripted_grid: Any, tiny_task: Task) -> None:
    run = settings(
        rounds=1,
        epochs=7,
        noise_multiplier=2.5,
        neighbourhood="fixed",
        clipping_norm=0.5,
        assignment="server",
        round_timeout=7.0,
    )
    grid = scripted_grid(lambda message: None)
    Run(run, tiny_task).train(grid)
    (message, *_), (question, *_) = grid.sent("train"), grid.sent("evaluate")
    assert message.metadata.ttl == question.metadata.ttl == 7.0
    request = TrainRequest.parse(from_record(message.content))
    assert (request.run, request.round, request.task) == ("run-1", 1, "tiny")
    assert request.training == TrainingSettings(epochs=7, step_size=0.05, batch_size=5)  # the task's, but the epochs
    assert request.proposal == PrivacyProposal(2.5, Neighbourhood.FIXED, 0.5)
    assert (request.assignment, request.weighting) == (run.assignment, run.weighting)
    np.testing.assert_array_equal(request.hypotheses, START)
    assert HypothesesMessage.parse(from_record(question.content)).run == "run-1"


def test_a_sample_is_of_different_clients_each_round(scripted_grid: Any, tiny_task: Task) -> None:
    grid = scripted_grid(lambda message: None)
    Run(settings(clients_per_round=3, rounds=6), tiny_task).train(grid)
    asked = [frozenset(m.metadata.dst_node_id for m in grid.sent("train", t)) for t in range(1, 7)]
    assert all(len(sample) == 3 and sample <= set(NODES) for sample in asked)
    assert len(set(asked)) > 1


def test_a_round_without_a_single_update_keeps_the_hypotheses(scripted_grid: Any, tiny_task: Task) -> None:
    grid = scripted_grid(lambda message: None)
    outcome = Run(settings(rounds=1), tiny_task).train(grid)
    np.testing.assert_array_equal(outcome.hypotheses, START)
    assert outcome.rounds[0].clients_per_hypothesis == (0, 0)
    assert outcome.rounds[0].failures == {"no reply in time": 10}  # 8 trainers and 2 validators
    assert outcome.rounds[0].validation_loss is None


def test_counts_are_in_the_order_of_the_hypotheses_beyond_ten(scripted_grid: Any, tiny_task: Task) -> None:
    run = settings(hypotheses=12, rounds=1)
    trainers, _ = roles(run)

    def script(message: Message) -> Any:
        if message.metadata.message_type != "train":
            return None
        return update(1.0, {trainers[0]: 2, trainers[1]: 10, trainers[2]: 10}.get(message.metadata.dst_node_id, 11))

    made = Run(run, tiny_task)
    made.strategy.train(scripted_grid(script), np.zeros((12, 13), np.float32))
    assert made.rounds[0].clients_per_hypothesis == (0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 5)


def test_the_run_ends_when_every_budget_is_spent(scripted_grid: Any, tiny_task: Task) -> None:
    run = settings(rounds=50, clients_per_round=3)
    grid = scripted_grid(
        lambda m: Refusal("spent", exhausted=True) if m.metadata.message_type == "train" else ValidationReply(1.0, 1.0)
    )
    outcome = Run(run, tiny_task).train(grid)
    assert outcome.stopped == "every client that is left has spent its budget"
    asked = [message.metadata.dst_node_id for message in grid.sent("train")]
    assert sorted(asked) == sorted(roles(run)[0])  # each once, in 3 rounds of at most 3
    assert len(outcome.rounds) == 3


def test_the_run_ends_when_the_only_client_with_a_budget_is_gone_for_good(
    scripted_grid: Any, tiny_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the others, whose budgets are spent, never get their models."""
    run, online, clock = settings(rounds=5), dict(NODES), [0.0]
    crashing = roles(run)[0][0]

    def nap(seconds: float) -> None:
        clock[0] += seconds
        assert clock[0] < 100 * run.round_timeout, "the strategy waits for ever"

    def script(message: Message) -> Any:
        if message.metadata.dst_node_id == crashing:
            online.pop(crashing, None)
            return None
        return Refusal("spent", exhausted=True) if message.metadata.message_type == "train" else None

    monkeypatch.setattr(time, "sleep", nap)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    outcome = Run(run, tiny_task, lambda: dict(online)).train(scripted_grid(script))
    assert len(outcome.rounds) == 1


def test_an_exhausted_client_is_known_by_its_key_and_not_by_its_node(scripted_grid: Any, tiny_task: Task) -> None:
    """A client that reconnects has a new node id."""
    run, online = settings(rounds=2), dict(NODES)
    spent = roles(run)[0][0]

    def script(message: Message) -> Any:
        if message.metadata.dst_node_id == spent:
            online[17] = online.pop(spent)
            return Refusal("spent", exhausted=True)
        return None

    grid = scripted_grid(script)
    Run(run, tiny_task, lambda: dict(online)).train(grid)
    assert 17 not in {message.metadata.dst_node_id for message in grid.sent("train", 2)}


def test_validation_every_v_rounds_and_after_the_last(scripted_grid: Any, tiny_task: Task) -> None:
    grid = scripted_grid(lambda m: None if m.metadata.message_type == "train" else ValidationReply(1.0, 1.0))
    Run(settings(rounds=8, validate_every=3), tiny_task).train(grid)
    assert sorted({int(m.metadata.group_id) for m in grid.sent("evaluate")}) == [3, 6, 8]


def test_early_stopping_keeps_the_best_hypotheses_and_everyone_gets_them(scripted_grid: Any, tiny_task: Task) -> None:
    run = settings(rounds=20, patience=2)
    losses = [3.0, 1.0, 2.0, 1.0, 0.0]

    def script(message: Message) -> Any:
        number, kind = int(message.metadata.group_id), message.metadata.message_type
        if kind == "evaluate":
            return ValidationReply(losses[number - 1], number)
        return Acknowledgement() if kind == "query" else update(number, 1)

    grid, made = scripted_grid(script), Run(run, tiny_task)
    outcome = made.train(grid)
    assert len(outcome.rounds) == 4  # an equal loss is no improvement
    assert outcome.stopped == "no better validation in 2 validations"
    np.testing.assert_array_equal(outcome.hypotheses, [[0] * 13, [2] * 13])
    assert outcome.best.round == 2

    assert made.strategy.deliver(grid, outcome) == 10
    final = grid.sent("query")
    assert sorted(message.metadata.dst_node_id for message in final) == sorted(NODES)
    for message in final:
        sent = HypothesesMessage.parse(from_record(message.content))
        np.testing.assert_array_equal(sent.hypotheses, outcome.hypotheses)


def test_delivery_counts_those_who_have_the_models(scripted_grid: Any, tiny_task: Task) -> None:
    some = sorted(NODES)[:4]

    def script(message: Message) -> Any:
        if message.metadata.message_type != "query":
            return None
        return Acknowledgement() if message.metadata.dst_node_id in some else Refusal("another task")

    grid, made = scripted_grid(script), Run(settings(rounds=1), tiny_task)
    outcome = made.train(grid)
    before = dict(outcome.rounds[-1].refusals)
    assert made.strategy.deliver(grid, outcome) == 4
    # The last round is in the history by then: its record must not grow.
    assert outcome.rounds[-1].refusals == before == {}


def test_validators_never_train_and_trainers_never_validate(scripted_grid: Any, tiny_task: Task) -> None:
    """Also with clients that come later, on either side of the split."""
    run, online = settings(rounds=6), dict(NODES)

    def script(message: Message) -> Any:
        online[1000 + len(online)] = f"late {len(online)}"
        return ValidationReply(1.0, 1.0) if message.metadata.message_type == "evaluate" else update(1.0)

    grid = scripted_grid(script)
    Run(run, tiny_task, lambda: dict(online)).train(grid)
    asked = {kind: {m.metadata.dst_node_id for m in grid.sent(kind)} for kind in ("train", "evaluate")}
    assert not asked["train"] & asked["evaluate"]
    assert len(asked["train"] | asked["evaluate"]) > len(NODES)


def test_ctrl_c_in_a_round_keeps_the_finished_ones(scripted_grid: Any, tiny_task: Task) -> None:
    def script(message: Message) -> Any:
        if message.metadata.group_id == "2":
            raise KeyboardInterrupt
        return update(5.0, 0) if message.metadata.message_type == "train" else None

    outcome = Run(settings(), tiny_task).train(scripted_grid(script))
    assert (outcome.stopped, len(outcome.rounds)) == ("interrupted", 1)
    np.testing.assert_array_equal(outcome.hypotheses, [[5] * 13, [10] * 13])


def test_the_run_waits_for_enough_clients_and_says_so(scripted_grid: Any, tiny_task: Task) -> None:
    calls = Counter[str]()

    def identities() -> dict[int, str]:
        calls["asked"] += 1
        return dict(list(NODES.items())[: min(calls["asked"], 10)])

    grid, made = scripted_grid(lambda message: None), Run(settings(rounds=1), tiny_task, identities)
    made.train(grid)
    assert "waiting for 10 clients, 1 here" in "\n".join(made.said)
    assert len(grid.sent("train")) == 8


@pytest.mark.parametrize("score", [-1.0, -3.4e38])
def test_a_score_that_the_task_cannot_report_does_not_end_the_run(
    scripted_grid: Any, tiny_task: Task, score: float
) -> None:
    # A peer's -1 under a square root: whatever one held-out client sends, the others' run goes on.
    grid = scripted_grid(lambda m: update(1.0) if m.metadata.message_type == "train" else ValidationReply(1.0, score))
    assert len(Run(settings(), tiny_task).train(grid).rounds) == 3


@pytest.mark.parametrize("text", ["x" * 10_000, "two\nlines", "\x1b[31mred"])
@pytest.mark.parametrize("kind", [Refusal, lambda text: Error(0, text)], ids=["refusal", "error"])
def test_a_peers_text_is_bounded_and_printable_in_the_log(
    scripted_grid: Any, tiny_task: Task, kind: Callable[[str], Any], text: str
) -> None:
    made = Run(settings(rounds=1), tiny_task)
    made.train(scripted_grid(lambda message: kind(text)))
    assert all(line.isprintable() and len(line) < 1000 for line in made.said)


def test_fewer_trainers_than_a_round_asks_for_is_said(scripted_grid: Any, tiny_task: Task) -> None:
    made = Run(settings(clients_per_round=9), tiny_task)
    made.train(scripted_grid(lambda message: None))
    assert any("only 8 clients train" in line for line in made.said)
