"""The gate: sanitize, then commit, then hand out; nothing else leaves."""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

from coterie.client.ledger import LEDGER_FILE, Ledger, Release
from coterie.client.participation import DataHolder
from coterie.client.sanitize import Gate
from coterie.config import Assignment, Granularity, Selection, Weighting
from coterie.errors import CoterieError
from coterie.mechanisms.accounting import pure_loss
from coterie.mechanisms.events import Neighbourhood, SelectionRelease
from coterie.mechanisms.layerwise import FixedNeighbourhood, LayerwiseLaplace, Sanitized
from coterie.mechanisms.randomness import NoiseSource
from coterie.protocol import HypothesesMessage, PrivacyProposal, Refusal, TrainRequest, UpdateReply, ValidationReply
from coterie.rng import seeded

Holder = Callable[..., DataHolder]
Request = Callable[..., TrainRequest]
FLOAT32_MAX = float(np.finfo(np.float32).max)


def admitted(gate: Gate, request: TrainRequest) -> LayerwiseLaplace:
    mechanism = gate.admit(request)
    assert isinstance(mechanism, LayerwiseLaplace), mechanism
    return mechanism


def release(gate: Gate, request: TrainRequest, trained: np.ndarray, *, hypothesis: int = 1) -> UpdateReply | Refusal:
    mechanism = admitted(gate, request)
    return gate.release(
        request, mechanism, hypothesis=hypothesis, trained=trained, rows=20, rng=seeded(11, "noise", request.round)
    )


def validation_message(request: TrainRequest, **changes: object) -> HypothesesMessage:
    values = {"run": request.run, "round": request.round, "task": request.task, "hypotheses": request.hypotheses}
    return HypothesesMessage(**{**values, **changes})  # type: ignore[arg-type]


def test_released_vector_is_the_hypothesis_plus_clipped_update_plus_noise(
    open_holder: Holder, train_request: Request
) -> None:
    gate, request = open_holder().gate, train_request()
    start = request.hypotheses[1].astype(np.float64)
    update = np.concatenate([np.full(9, 1.0), np.full(4, 0.01)])  # norms 3 and 0.02, radii 0.5 and 0.25
    trained = (start + update).astype(np.float32)
    reply = release(gate, request, trained)
    assert isinstance(reply, UpdateReply)
    exact = trained.astype(np.float64) - start
    mechanism = LayerwiseLaplace((9, 4), 3.0, FixedNeighbourhood((0.5, 0.25)))
    expected = start + mechanism.release(exact, rng=seeded(11, "noise", 1)).update
    np.testing.assert_array_equal(reply.vector, expected.astype(np.float32))
    # And by hand, with the noise taken from a zero update; the grid and float32 round at about 1e-6.
    noise = mechanism.release(np.zeros(13), rng=seeded(11, "noise", 1)).update
    clipped = np.concatenate([update[:9] * 0.5 / 3, update[9:]])
    np.testing.assert_allclose(reply.vector, start + clipped + noise, atol=1e-5)
    assert reply.vector.dtype == np.float32
    assert np.linalg.norm(noise) > 0.1


@dataclass(frozen=True)
class Watched:
    """A mechanism that notes when it is used."""

    inner: LayerwiseLaplace
    seen: list[str]

    def release(self, update: ArrayLike, *, rng: NoiseSource) -> Sanitized:
        self.seen.append("sanitized")
        return self.inner.release(update, rng=rng)


def test_sanitized_then_committed_then_handed_out(
    open_holder: Holder, train_request: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, request = open_holder().gate, train_request()
    seen: list[str] = []
    commit = Ledger.record_release

    def watched_commit(self: Ledger, made: Release, *, budget: float) -> None:
        commit(self, made, budget=budget)
        seen.append("committed")

    def watched_reply(**values: object) -> UpdateReply:
        seen.append("reply made")
        return UpdateReply(**values)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "record_release", watched_commit)
    monkeypatch.setattr("coterie.client.sanitize.UpdateReply", watched_reply)
    mechanism = Watched(admitted(gate, request), seen)
    gate.release(
        request,
        mechanism,  # type: ignore[arg-type]
        hypothesis=0,
        trained=request.hypotheses[0],
        rows=20,
        rng=seeded(1),
    )
    assert seen == ["sanitized", "committed", "reply made"]


def test_nothing_is_handed_out_when_the_commit_fails(
    open_holder: Holder, train_request: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, request = open_holder().gate, train_request()

    def full(self: Ledger, made: Release, *, budget: float) -> None:
        raise CoterieError("the disk is full")

    monkeypatch.setattr(Ledger, "record_release", full)
    with pytest.raises(CoterieError, match="the disk is full"):
        release(gate, request, request.hypotheses[1])
    assert gate.ledger.releases() == []


def test_the_row_is_on_disk_when_the_reply_is_handed_out(
    open_holder: Holder, train_request: Request, tmp_path: Path
) -> None:
    gate, request = open_holder().gate, train_request()
    reply = release(gate, request, request.hypotheses[1])
    assert isinstance(reply, UpdateReply)
    with sqlite3.connect(tmp_path / "state" / LEDGER_FILE) as other:
        assert other.execute("SELECT id, run, round, hypothesis FROM releases").fetchall() == [
            (reply.release, "run-1", 1, 1)
        ]


@pytest.mark.parametrize("mode", list(Neighbourhood))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_diverged_training_leaves_as_the_zero_update_at_full_price(
    open_holder: Holder, train_request: Request, bad: float, mode: Neighbourhood
) -> None:
    gate, request = open_holder(neighbourhood=mode).gate, train_request()
    trained = request.hypotheses[1].copy()
    trained[5] = bad
    reply = release(gate, request, trained)
    assert isinstance(reply, UpdateReply)
    zero = admitted(gate, train_request(round=2)).release(np.zeros(13), rng=seeded(11, "noise", 1))
    np.testing.assert_array_equal(
        reply.vector, (request.hypotheses[1].astype(np.float64) + zero.update).astype(np.float32)
    )
    assert pure_loss(gate.ledger.events()) == pytest.approx(13 / 3)


@pytest.mark.parametrize("assignment", list(Assignment))
def test_the_index_leaves_only_where_the_client_assigns(
    open_holder: Holder, train_request: Request, assignment: Assignment
) -> None:
    gate, request = open_holder().gate, train_request(assignment=assignment)
    reply = release(gate, request, request.hypotheses[1])
    assert isinstance(reply, UpdateReply)
    asked = assignment is Assignment.CLIENT
    assert reply.hypothesis == (1 if asked else None)
    (row,) = gate.ledger.releases()
    assert (row.hypothesis, row.index_sent) == (1, asked)


@pytest.mark.parametrize(
    ("weighting", "consent", "sent"),
    [(Weighting.EQUAL, False, None), (Weighting.EQUAL, True, None), (Weighting.SAMPLES, True, 20)],
)
def test_the_row_count_leaves_only_when_asked_and_consented(
    open_holder: Holder, train_request: Request, weighting: Weighting, consent: bool, sent: int | None
) -> None:
    gate, request = open_holder(share_sample_count=consent).gate, train_request(weighting=weighting)
    reply = release(gate, request, request.hypotheses[1])
    assert isinstance(reply, UpdateReply)
    assert reply.rows == sent
    assert [row.rows_sent for row in gate.ledger.releases()] == [sent is not None]


def test_the_row_count_does_not_leave_without_consent(open_holder: Holder, train_request: Request) -> None:
    gate = open_holder(share_sample_count=False).gate
    refusal = gate.admit(train_request(weighting=Weighting.SAMPLES))
    assert isinstance(refusal, Refusal)
    assert "sample counts" in refusal.reason


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_leaves_fits_in_float32(open_holder: Holder, train_request: Request, sign: float) -> None:
    hypotheses = np.full((2, 13), sign * FLOAT32_MAX, np.float32)
    gate = open_holder(clipping_norm=1e38, noise_multiplier=50.0).gate
    reply = release(gate, train_request(hypotheses=hypotheses), -hypotheses[1])
    assert isinstance(reply, UpdateReply)
    assert np.isfinite(reply.vector).all()
    assert np.abs(reply.vector).max() == FLOAT32_MAX  # else the noise never reached the edge


def test_private_selection_is_recorded_and_charged(open_holder: Holder, train_request: Request) -> None:
    gate = open_holder(selection=Selection.RANDOMIZED, selection_epsilon=0.5).gate
    request = train_request()
    release(gate, request, request.hypotheses[1])
    (row,) = gate.ledger.releases()
    assert row.selection == SelectionRelease("randomized-argmin", 3, 0.5)
    assert pure_loss(gate.ledger.events()) == pytest.approx(13 / 3 + 0.5)


def test_a_budget_short_of_the_selections_share_is_refused_before_training(
    open_holder: Holder, train_request: Request
) -> None:
    gate = open_holder(selection=Selection.RANDOMIZED, selection_epsilon=0.5, budget=13 / 3 + 0.4).gate
    refusal = gate.admit(train_request())
    assert isinstance(refusal, Refusal)
    assert refusal.exhausted


def test_choice_is_plain_or_by_the_mechanism(open_holder: Holder) -> None:
    gate = open_holder(selection=Selection.EXPONENTIAL, selection_epsilon=0.1, selection_loss_bound=1.0).gate
    losses = np.array([0.9, 0.1, 0.5])
    assert replace(gate, selection=None).choose(losses, rng=seeded(0)) == 1
    rng = seeded(5, "choices")
    assert {gate.choose(losses, rng=rng) for _ in range(100)} == {0, 1, 2}  # P(all in two) < 1e-16


MODES = [
    {"neighbourhood": mode, "granularity": granularity, **selection}
    for mode in Neighbourhood
    for granularity in Granularity
    for selection in ({}, {"selection": Selection.RANDOMIZED, "selection_epsilon": 0.25})
]


@pytest.mark.parametrize("settings", MODES, ids=lambda s: "-".join(str(v) for v in s.values()))
@pytest.mark.parametrize("size", [0.0, 1e-9, 0.1, 1e6])
def test_planned_loss_is_the_recorded_loss(
    open_holder: Holder, train_request: Request, settings: dict[str, object], size: float
) -> None:
    # If the row could cost more than was planned, a client would train for a release that the budget then refuses.
    gate, request = open_holder(**settings).gate, train_request()
    mechanism = admitted(gate, request)
    planned = mechanism.planned_loss + (gate.selection.epsilon if gate.selection else 0.0)
    release(gate, request, request.hypotheses[1] + np.float32(size))
    assert pure_loss(gate.ledger.events()) == pytest.approx(planned, rel=1e-13)
    (row,) = gate.ledger.releases()
    assert row.layer_names == gate.policy.names
    assert [noise.dimension for noise in row.update.layers] == list(gate.policy.sizes)
    assert row.update.neighbourhood is settings["neighbourhood"]


def test_a_stronger_proposal_is_recorded_with_the_stronger_numbers(open_holder: Holder, train_request: Request) -> None:
    gate = open_holder().gate
    request = train_request(proposal=PrivacyProposal(6.5, Neighbourhood.FIXED, 2.0))
    release(gate, request, request.hypotheses[1])
    (row,) = gate.ledger.releases()
    assert [(noise.radius, noise.epsilon) for noise in row.update.layers] == [
        (2.0, pytest.approx(9 / (6.5 * 2.0))),
        (2.0, pytest.approx(4 / (6.5 * 2.0))),
    ]
    assert pure_loss(gate.ledger.events()) == pytest.approx(13 / 6.5)


def test_a_budget_spent_meanwhile_is_found_at_the_release(
    open_holder: Holder, train_request: Request, tmp_path: Path
) -> None:
    gate, request = open_holder(budget=5.0).gate, train_request()
    mechanism = admitted(gate, request)
    with Ledger(tmp_path / "state" / LEDGER_FILE, create=True) as other:
        release(replace(gate, ledger=other), train_request(run="elsewhere"), request.hypotheses[1])
    reply = gate.release(request, mechanism, hypothesis=1, trained=request.hypotheses[1], rows=20, rng=seeded(1))
    assert isinstance(reply, Refusal)
    assert reply.exhausted
    assert [row.run for row in gate.ledger.releases()] == ["elsewhere"]


def _refused(gate: Gate, answer: object) -> None:
    assert isinstance(answer, Refusal)
    assert [row.reason for row in gate.ledger.refusals()][-1] == answer.reason


def test_every_refusal_of_the_gate_is_recorded(open_holder: Holder, train_request: Request) -> None:
    gate = open_holder(budget=5.0, validation=False).gate
    refused = [
        lambda: gate.admit(train_request(weighting=Weighting.SAMPLES)),
        lambda: gate.admit(train_request(proposal=PrivacyProposal(noise_multiplier=1.0))),
        lambda: gate.admit(train_request(proposal=PrivacyProposal(neighbourhood=Neighbourhood.RELATIVE))),
        lambda: gate.admit(train_request(proposal=PrivacyProposal(clipping_norm=0.1))),
        lambda: gate.admit_validation(validation_message(train_request())),
    ]
    for number, ask in enumerate(refused, 1):
        _refused(gate, ask())
        assert len(gate.ledger.refusals()) == number
    request = train_request()
    release(gate, request, request.hypotheses[1])
    again, over = gate.admit(request), gate.admit(train_request(round=2))
    assert isinstance(again, Refusal)
    assert isinstance(over, Refusal)
    assert "already been released" in again.reason
    assert not again.exhausted
    assert over.exhausted
    assert [row.reason for row in gate.ledger.refusals()][-2:] == [again.reason, over.reason]
    last = gate.ledger.refusals()[-1]
    assert (last.run, last.round) == ("run-1", 2)


def test_who_validates_does_not_train_in_that_run(open_holder: Holder, train_request: Request) -> None:
    gate = open_holder().gate
    message = validation_message(train_request())
    assert gate.admit_validation(message) is None
    gate.disclose_validation(message, loss=0.5, score=0.25)
    refusal = gate.admit(train_request(round=2))
    _refused(gate, refusal)
    assert "validates" in str(refusal)
    assert gate.admit_validation(validation_message(train_request(), round=2)) is None
    assert isinstance(gate.admit(train_request(run="another")), LayerwiseLaplace)


def test_who_trains_does_not_validate_in_that_run(open_holder: Holder, train_request: Request) -> None:
    gate, request = open_holder().gate, train_request()
    release(gate, request, request.hypotheses[1])
    refusal = gate.admit_validation(validation_message(request, round=2))
    _refused(gate, refusal)
    assert "trains" in str(refusal)
    assert gate.ledger.disclosures() == []
    assert gate.admit_validation(validation_message(request, run="another")) is None


def test_a_validation_is_recorded_before_it_is_handed_out(
    open_holder: Holder, train_request: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, message = open_holder().gate, validation_message(train_request())
    reply = gate.disclose_validation(message, loss=0.5, score=0.25)
    assert reply == ValidationReply(0.5, 0.25)
    (row,) = gate.ledger.disclosures()
    assert (row.run, row.round, row.what) == ("run-1", 1, "validation loss and score")

    def full(self: Ledger, run: str, round_number: int, what: str) -> None:
        raise CoterieError("the disk is full")

    monkeypatch.setattr(Ledger, "record_disclosure", full)
    with pytest.raises(CoterieError, match="full"):
        gate.disclose_validation(message, loss=0.5, score=0.25)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_validation_is_finite_and_fits_in_float32(open_holder: Holder, train_request: Request, bad: float) -> None:
    # Two of them must still have a finite mean at the server.
    reply = open_holder().gate.disclose_validation(validation_message(train_request()), loss=bad, score=bad)
    assert 1e38 < abs(reply.loss) <= FLOAT32_MAX
    assert 1e38 < abs(reply.score) <= FLOAT32_MAX
