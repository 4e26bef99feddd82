"""The k hypotheses as a Flower strategy: messages out, replies in; the arithmetic is in ``hypotheses.py``."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from coterie.config import INTERRUPTED, RunSettings
from coterie.flower import from_record, to_record
from coterie.protocol import (
    Acknowledgement,
    Fields,
    HypothesesMessage,
    MalformedMessage,
    PrivacyProposal,
    Refusal,
    TrainRequest,
    UpdateReply,
    ValidationReply,
    Vector,
    parse_reply,
    printable,
)
from coterie.server.history import Outcome, RoundRecord
from coterie.server.hypotheses import (
    BestSoFar,
    Validation,
    average,
    mean_validation,
    problem_with,
    problem_with_score,
    problem_with_validation,
)
from coterie.server.reseeding import Choices, ReseedSettings, collapsed, draws_of_round, reseed
from coterie.server.roster import Roster
from coterie.tasks import Task, TrainingSettings

_HYPOTHESES = "hypotheses"
_POLL_SECONDS = 0.25

Wanted = TypeVar("Wanted", UpdateReply, ValidationReply, Acknowledgement)


@dataclass
class _Tally:
    """What came back in a round, by outcome; the keys are reasons."""

    refusals: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


class KHypotheses(Strategy):
    """k hypotheses, U sampled clients a round, an average per cluster, validation on held-out clients.

    ``identities`` names the online nodes: their node ids, each with an identity that outlives a reconnect.
    ``log`` gets one line for people at a time; ``on_round`` gets each finished round.
    """

    def __init__(
        self,
        settings: RunSettings,
        task: Task,
        run: str,
        *,
        identities: Callable[[], dict[int, str]],
        log: Callable[[str], None],
        on_round: Callable[[RoundRecord], None],
    ) -> None:
        self._settings = settings
        self._task = task
        self._run = run
        self._identities = identities
        self._log = log
        self._on_round = on_round
        self._roster: Roster | None = None
        self._known: set[str] = set()
        self._exhausted: set[str] = set()
        self._asked: dict[int, str] = {}
        self._tally = _Tally()
        self._validation: Validation | None = None
        self._choices = Choices()
        self._reseeded: tuple[int, ...] = ()

    def summary(self) -> None:
        """Log the run in one line."""
        s = self._settings
        self._log(
            f"run {self._run}: task {s.task}, k = {s.hypotheses}, up to {s.rounds} rounds of "
            f"{s.clients_per_round} clients, assignment by the {s.assignment}"
        )

    def train(self, grid: Grid, initial: Vector) -> Outcome:
        """Wait for clients, then train and validate until the rounds, the patience or the budgets are over."""
        self.summary()
        arrays, best, rounds = _pack(initial), BestSoFar(), list[RoundRecord]()
        began, stopped = time.monotonic(), "all rounds done"
        try:
            self._wait_for_clients()
            began = time.monotonic()
            for number in range(1, self._settings.rounds + 1):
                if (reason := self._nobody_trains()) is not None:
                    stopped = reason
                    break
                arrays, record = self._one_round(grid, number, arrays)
                rounds.append(record)
                self._on_round(record)
                if self._validation is not None:
                    best = best.observe(number, self._validation, _unpack(arrays))
                if best.is_over(self._settings.patience):
                    stopped = f"no better validation in {self._settings.patience} validations"
                    break
            if rounds and rounds[-1].validation_loss is None and not best.is_over(self._settings.patience):
                # Budgets ended the run between two validations: the last rounds were paid for, so look at them.
                rounds[-1] = self._validate(grid, rounds[-1], arrays)
                if self._validation is not None:
                    best = best.observe(rounds[-1].round, self._validation, _unpack(arrays))
        except KeyboardInterrupt:
            stopped = INTERRUPTED
        seconds = time.monotonic() - began
        final = _unpack(arrays) if best.hypotheses is None else best.hypotheses
        held_out = sum(self._roster.validates(name) for name in self._known) if self._roster else 0
        return Outcome(
            hypotheses=final,
            best=best,
            rounds=tuple(rounds),
            stopped=stopped,
            trainers=len(self._known) - held_out,
            validators=held_out,
            seconds=seconds,
        )

    def deliver(self, grid: Grid, outcome: Outcome) -> int:
        """Tell every online client, trained or not, that the run is over, with the models; how many have them."""
        number = max(len(outcome.rounds), 1)
        trained = any(sum(record.clients_per_hypothesis) for record in outcome.rounds)
        message = HypothesesMessage(self._run, number, self._task.name, outcome.hypotheses, trained)
        questions = self._messages(message.to_fields(), self._online(), "query", number)
        what = "handing the models to" if trained else "nothing was trained: telling so to"
        self._log(f"{what} {len(questions)} clients")
        replies = grid.send_and_receive(questions, timeout=self._settings.round_timeout)
        return len(self._sort_out(replies, Acknowledgement))

    def _one_round(self, grid: Grid, number: int, arrays: ArrayRecord) -> tuple[ArrayRecord, RoundRecord]:
        began, timeout, config = time.monotonic(), self._settings.round_timeout, ConfigRecord()
        self._tally, self._validation = _Tally(), None
        requests = self.configure_train(number, arrays, config, grid)
        replies = grid.send_and_receive(requests, timeout=timeout)
        averaged, metrics = self.aggregate_train(number, replies)
        record = RoundRecord(
            round=number,
            seconds=0.0,
            sampled=len(requests),
            clients_per_hypothesis=tuple(int(metrics[name]) for name in metrics),  # type: ignore[arg-type]
            reseeded=self._reseeded,
            collapsed=collapsed(self._choices.recent, ReseedSettings.of(self._settings)),
        )
        if self._is_validation_due(number):
            record = self._validate(grid, record, averaged)
        return averaged, replace(
            record,
            seconds=time.monotonic() - began,
            refusals=dict(self._tally.refusals),
            failures=dict(self._tally.failures),
            dropped=dict(self._tally.dropped),
        )

    def _validate(self, grid: Grid, record: RoundRecord, arrays: ArrayRecord) -> RoundRecord:
        """The record with what the held-out clients tell, if any do."""
        questions = self._validation_requests(record.round, arrays)
        self.aggregate_evaluate(record.round, grid.send_and_receive(questions, timeout=self._settings.round_timeout))
        if self._validation is None:
            return record
        return replace(
            record,
            validation_loss=self._validation.loss,
            metric=self._task.report(self._validation.score),
            validators=self._validation.clients,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """One request to each of U sampled trainers, all carrying the k hypotheses in one array."""
        self._arrays = arrays
        settings, defaults = self._settings, self._task.training
        request = TrainRequest(
            run=self._run,
            round=server_round,
            task=self._task.name,
            hypotheses=_unpack(arrays),
            assignment=settings.assignment,
            weighting=settings.weighting,
            training=TrainingSettings(
                epochs=settings.epochs or defaults.epochs,
                step_size=settings.step_size or defaults.step_size,
                batch_size=settings.batch_size or defaults.batch_size,
            ),
            proposal=PrivacyProposal(settings.noise_multiplier, settings.neighbourhood, settings.clipping_norm),
        )
        trainers = self._online_trainers()
        roster = self._split(trainers.values())
        chosen = set(roster.sample(trainers.values(), settings.clients_per_round, server_round))
        nodes = {node: name for node, name in trainers.items() if name in chosen}
        return self._messages(request.to_fields(), nodes, "train", server_round)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """The hypotheses averaged over the sound updates, idle ones re-seeded, and how many updates each one had."""
        settings, hypotheses = self._settings, _unpack(self._arrays)
        updates = []
        for node, update in self._sort_out(replies, UpdateReply):
            problem = problem_with(update, hypotheses, settings.assignment, settings.weighting)
            if problem is None:
                updates.append(update)
            else:
                self._drop(node, problem)
        averaged = average(hypotheses, updates, settings.assignment, settings.weighting)
        counts = {f"clients-{j}": count for j, count in enumerate(averaged.counts)}
        renewed = reseed(
            *(averaged.hypotheses, averaged.counts, self._choices, ReseedSettings.of(settings)),
            rng=lambda: draws_of_round(settings.seed, server_round),
        )
        self._choices, self._reseeded = renewed.choices, renewed.indices
        return _pack(renewed.hypotheses), MetricRecord(dict(counts))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """The hypotheses to every held-out client, every ``validate_every`` rounds and after the last."""
        return self._validation_requests(server_round, arrays) if self._is_validation_due(server_round) else []

    def _is_validation_due(self, server_round: int) -> bool:
        return server_round % self._settings.validate_every == 0 or server_round == self._settings.rounds

    def _validation_requests(self, server_round: int, arrays: ArrayRecord) -> list[Message]:
        message = HypothesesMessage(self._run, server_round, self._task.name, _unpack(arrays))
        return self._messages(message.to_fields(), self._online_validators(), "evaluate", server_round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean over held-out clients of their least loss, or None when nobody answered."""
        sound = []
        for node, reply in self._sort_out(replies, ValidationReply):
            problem = problem_with_validation(reply) or problem_with_score(reply.score, self._task.report)
            if problem is None:
                sound.append(reply)
            else:
                self._drop(node, problem)
        self._validation = mean_validation(sound)
        if self._validation is None:
            return None
        return MetricRecord({"validation-loss": self._validation.loss, "score": self._validation.score})

    def _messages(self, fields: Fields, nodes: dict[int, str], kind: str, number: int) -> list[Message]:
        self._asked = dict(nodes)
        content = to_record(fields)
        # The time to live is the round's timeout: later work would be charged to a ledger and never read.
        return [Message(content, node, kind, ttl=self._settings.round_timeout, group_id=str(number)) for node in nodes]

    def _sort_out(self, replies: Iterable[Message], wanted: type[Wanted]) -> list[tuple[int, Wanted]]:
        """The replies of the wanted kind; everything else is counted by reason, and named in the log."""
        missing, found = dict(self._asked), list[tuple[int, Wanted]]()
        for message in replies:
            node = message.metadata.src_node_id
            missing.pop(node, None)
            if message.has_error():
                self._fail(node, f"error: {printable(message.error.reason or 'no reason given')}")
                continue
            try:
                reply = parse_reply(from_record(message.content))
            except MalformedMessage as error:
                self._drop(node, str(error))
                continue
            if isinstance(reply, Refusal):
                self._tally.refusals[reply.reason] += 1
                self._log(f"{self._name(node)} refused: {reply.reason}")
                if reply.exhausted:
                    self._exhausted.add(self._asked.get(node, ""))
            elif isinstance(reply, wanted):
                found.append((node, reply))
            else:
                self._drop(node, f"{type(reply).__name__} sent, {wanted.__name__} expected")
        for node in missing:
            self._fail(node, "no reply in time")
        # Replies come in any order, and sums in floating point depend on it.
        return sorted(found, key=lambda item: self._asked.get(item[0], ""))

    def _name(self, node: int) -> str:
        return f"node {node} ({self._asked.get(node, 'unknown')[:12]})"

    def _drop(self, node: int, problem: str) -> None:
        self._tally.dropped[problem] += 1
        self._log(f"{self._name(node)} dropped: {problem}")

    def _fail(self, node: int, problem: str) -> None:
        self._tally.failures[problem] += 1
        self._log(f"{self._name(node)} failed: {problem}")

    def _wait_for_clients(self) -> None:
        settings, said = self._settings, -1
        while (here := len(online := self._online())) < settings.min_clients:
            if here != said:
                self._log(f"waiting for {settings.min_clients} clients, {here} here")
                said = here
            time.sleep(_POLL_SECONDS)
        roster = self._split(online.values())
        trainers = sum(not roster.validates(name) for name in online.values())
        self._log(f"{here} clients here: {trainers} train, {here - trainers} are held out for validation")
        if settings.clients_per_round > trainers:
            self._log(
                f"clients_per_round is {settings.clients_per_round}, but only {trainers} clients train: a round "
                f"takes all of them (validation_fraction is {settings.validation_fraction:g})"
            )

    def _nobody_trains(self) -> str | None:
        """None once a client that may train is online; the reason to stop when none is left, or none comes back.

        Once some budgets are spent, the others are waited for as long as a round takes at most; otherwise, as after
        a network failure, ten times as long.
        """
        said, began, timeout = False, time.monotonic(), self._settings.round_timeout
        while not self._online_trainers():
            trainers = {name for name in self._known if not self._split(self._known).validates(name)}
            waited = time.monotonic() - began
            if self._exhausted and (trainers <= self._exhausted or waited > timeout):
                return "every client that is left has spent its budget"
            if waited > 10 * timeout:
                return f"no client that trains came back in {waited:.0f} s"
            if not said:
                self._log("no client that trains is online: waiting")
                said = True
            time.sleep(_POLL_SECONDS)
        return None

    def _split(self, names: Iterable[str]) -> Roster:
        if self._roster is None:
            self._roster = Roster.split(set(names), self._settings.validation_fraction, self._settings.seed)
        return self._roster

    def _online(self) -> dict[int, str]:
        online = self._identities()
        self._known.update(online.values())
        return online

    def _online_trainers(self) -> dict[int, str]:
        online = self._online()
        roster = self._split(online.values())
        return {
            node: name for node, name in online.items() if not roster.validates(name) and name not in self._exhausted
        }

    def _online_validators(self) -> dict[int, str]:
        online = self._online()
        roster = self._split(online.values())
        return {node: name for node, name in online.items() if roster.validates(name)}


def _pack(hypotheses: Vector) -> ArrayRecord:
    return ArrayRecord({_HYPOTHESES: Array(hypotheses)})


def _unpack(arrays: ArrayRecord) -> Vector:
    packed: Vector = arrays[_HYPOTHESES].numpy()
    return packed
