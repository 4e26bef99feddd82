"""What a data holder answers, and that nothing but declared fields is in it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie.client.participation import (
    CARD_FILE,
    MODEL_FILE,
    DataHolder,
    answer_train,
    answer_validation,
    keep_model,
)
from coterie.client.selection import hypothesis_losses, mean_loss
from coterie.client.training import train
from coterie.config import Assignment, Selection, Weighting
from coterie.errors import CoterieError
from coterie.mechanisms.accounting import pure_loss
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
from coterie.rng import seeded
from coterie.tasks import ClientData, Task, TrainingSettings

Holder = Callable[..., DataHolder]
Request = Callable[..., TrainRequest]


def fresh() -> bool:
    return False


def the_message(request: TrainRequest, **changes: object) -> HypothesesMessage:
    values = {"run": request.run, "round": request.round, "task": request.task, "hypotheses": request.hypotheses}
    return HypothesesMessage(**{**values, **changes})  # type: ignore[arg-type]


def test_a_round_is_choose_train_sanitize_in_that_order(open_holder: Holder, train_request: Request) -> None:
    """The reply again from the parts, with the draws in the same order."""
    holder, request = open_holder(), train_request()
    reply = answer_train(holder, request, is_stale=fresh)
    assert isinstance(reply, UpdateReply)
    losses = hypothesis_losses(holder.task, holder.model, request.hypotheses, holder.layout, holder.data)
    best = int(np.argmin(losses))
    start = request.hypotheses[best]
    trained = train(
        holder.task, holder.model, start, holder.layout, holder.data, request.training, rng=seeded(7, "order", 1)
    )
    mechanism = holder.gate.policy.accept(PrivacyProposal())
    assert not isinstance(mechanism, Refusal)
    sanitized = mechanism.release(trained.astype(np.float64) - start, rng=seeded(7, "noise", 1))
    np.testing.assert_array_equal(reply.vector, (start + sanitized.update).astype(np.float32))
    assert reply.hypothesis == best
    assert not np.allclose(trained, start)


def test_the_servers_training_settings_are_followed(open_holder: Holder, train_request: Request) -> None:
    holder = open_holder(noise_multiplier=1e-6, budget=1e12, clipping_norm=1e3)  # as good as no noise
    request = train_request(training=TrainingSettings(epochs=7, step_size=0.01, batch_size=3))
    reply = answer_train(holder, request, is_stale=fresh)
    assert isinstance(reply, UpdateReply)
    assert reply.hypothesis is not None
    start = request.hypotheses[reply.hypothesis]
    trained = train(
        holder.task, holder.model, start, holder.layout, holder.data, request.training, rng=seeded(7, "order", 1)
    )
    np.testing.assert_allclose(reply.vector, trained, atol=0.02)


def test_a_stale_round_is_not_charged_and_gets_no_answer(open_holder: Holder, train_request: Request) -> None:
    holder, asked = open_holder(), []

    def stale() -> bool:
        asked.append(len(holder.gate.ledger.releases()))
        return True

    assert answer_train(holder, train_request(), is_stale=stale) is None
    assert asked == [0]  # asked once, before anything was charged
    assert holder.gate.ledger.releases() == []
    assert holder.gate.ledger.refusals() == []
    assert isinstance(answer_train(holder, train_request(), is_stale=fresh), UpdateReply)


def test_freshness_is_asked_after_the_training_not_before(
    open_holder: Holder, train_request: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def watched(*arguments: object, **keywords: object) -> object:
        seen.append("trained")
        return train(*arguments, **keywords)  # type: ignore[arg-type]

    def stale() -> bool:
        seen.append("asked")
        return False

    monkeypatch.setattr("coterie.client.participation.train", watched)
    answer_train(open_holder(), train_request(), is_stale=stale)
    assert seen[0] == "trained"
    assert set(seen[1:]) == {"asked"}


def test_training_that_nobody_waits_for_is_given_up(open_holder: Holder, train_request: Request) -> None:
    """A server may ask for two thousand million epochs; the client stops when the round is over, and pays nothing."""
    answers = iter([False] * 3 + [True] * 10)
    endless = replace(train_request(), training=TrainingSettings(epochs=2**31 - 1, step_size=0.01, batch_size=5))
    holder = open_holder()
    assert answer_train(holder, endless, is_stale=lambda: next(answers)) is None
    assert holder.gate.ledger.releases() == []


def test_a_run_that_trained_nothing_leaves_an_earlier_model_alone(
    open_holder: Holder, train_request: Request, tmp_path: Path
) -> None:
    holder = open_holder()
    keep_model(holder, the_message(train_request(), run="good"))
    before = (tmp_path / "state" / MODEL_FILE).read_bytes()
    reply = keep_model(holder, replace(the_message(train_request(), run="empty"), trained=False))
    assert isinstance(reply, Refusal)
    assert (tmp_path / "state" / MODEL_FILE).read_bytes() == before


WRONG = [
    ({"task": "hospital"}, "task 'hospital', this client was started for 'tiny'"),
    ({"hypotheses": np.zeros((3, 12), np.float32)}, "12 parameters sent, the model has 13"),
    ({"hypotheses": np.full((3, 13), np.nan, np.float32)}, "non-finite"),
    ({"hypotheses": np.array([[0] * 13, [0] * 12 + [np.inf]], np.float32)}, "non-finite"),
]


@pytest.mark.parametrize(("changes", "reason"), WRONG)
def test_a_request_for_another_model_is_refused_and_recorded(
    open_holder: Holder, train_request: Request, changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    holder, request = open_holder(), train_request(**changes)
    answers = [
        answer_train(holder, request, is_stale=fresh),
        answer_validation(holder, the_message(request)),
        keep_model(holder, the_message(request)),
    ]
    for answer in answers:
        assert isinstance(answer, Refusal)
        assert reason in answer.reason
    assert [row.reason for row in holder.gate.ledger.refusals()] == [a.reason for a in answers]  # type: ignore[union-attr]
    assert holder.gate.ledger.releases() == []
    assert holder.gate.ledger.disclosures() == []
    assert not (tmp_path / "state" / MODEL_FILE).exists()


def test_a_refused_request_is_not_trained(
    open_holder: Holder, train_request: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object, **keywords: object) -> object:
        raise AssertionError("the private rows were used for a round that is refused")

    monkeypatch.setattr("coterie.client.participation.hypothesis_losses", never)
    monkeypatch.setattr("coterie.client.participation.train", never)
    holder = open_holder(budget=1.0, validation=False)
    answer = answer_train(holder, train_request(), is_stale=fresh)
    assert isinstance(answer, Refusal)
    assert answer.exhausted
    assert isinstance(answer_validation(holder, the_message(train_request())), Refusal)


def test_six_rounds_of_the_budget_and_not_seven(open_holder: Holder, train_request: Request) -> None:
    holder = open_holder(budget=6 * 13 / 3)
    answers = [answer_train(holder, train_request(round=t), is_stale=fresh) for t in range(1, 9)]
    assert [type(answer) for answer in answers] == [UpdateReply] * 6 + [Refusal] * 2
    assert answers[6] is not None
    assert isinstance(answers[6], Refusal)
    assert answers[6].exhausted
    assert pure_loss(holder.gate.ledger.events()) == pytest.approx(26)


def test_validation_tells_the_best_hypothesis_loss_and_its_score(
    open_holder: Holder, train_request: Request, tiny_task: Task
) -> None:
    task = replace(tiny_task, score=lambda outputs, targets: (outputs - targets).abs().sum(dim=-1))
    holder, message = open_holder(task=task), the_message(train_request())
    reply = answer_validation(holder, message)
    assert isinstance(reply, ValidationReply)
    losses = hypothesis_losses(holder.task, holder.model, message.hypotheses, holder.layout, holder.data)
    assert reply.loss == pytest.approx(losses.min())
    w = message.hypotheses[int(losses.argmin())]
    hidden = np.maximum(holder.data.inputs.numpy() @ w[:6].reshape(3, 2).T + w[6:9], 0)
    errors = hidden @ w[9:12].reshape(1, 3).T + w[12] - holder.data.targets.numpy()
    assert reply.score == pytest.approx(float(np.abs(errors).mean()), rel=1e-4)
    assert len(holder.gate.ledger.disclosures()) == 1


DECLARED = {
    UpdateReply: ({"kind", "release"}, {"hypothesis", "rows"}),
    ValidationReply: ({"kind", "loss", "score"}, set()),
    Refusal: ({"kind", "reason", "exhausted"}, set()),
    Acknowledgement: ({"kind"}, set()),
}


@pytest.mark.parametrize("assignment", list(Assignment))
@pytest.mark.parametrize("weighting", list(Weighting))
@pytest.mark.parametrize("consent", [False, True])
@pytest.mark.parametrize("mode", list(Neighbourhood))
@pytest.mark.parametrize("selection", [Selection.ARGMIN, Selection.RANDOMIZED])
def test_a_reply_holds_declared_fields_and_nothing_else(
    open_holder: Holder,
    train_request: Request,
    assignment: Assignment,
    weighting: Weighting,
    consent: bool,
    mode: Neighbourhood,
    selection: Selection,
) -> None:
    epsilon = 0.5 if selection is Selection.RANDOMIZED else None
    holder = open_holder(
        share_sample_count=consent, neighbourhood=mode, selection=selection, selection_epsilon=epsilon, budget=5.0
    )
    request = train_request(assignment=assignment, weighting=weighting)
    replies = [
        answer_train(holder, request, is_stale=fresh),
        answer_train(holder, replace(request, round=2), is_stale=fresh),  # the budget is spent
        answer_validation(holder, the_message(request)),
        answer_validation(holder, the_message(request, run="another")),
        keep_model(holder, the_message(request)),
    ]
    for reply in replies:
        assert reply is not None
        fields = reply.to_fields()
        required, optional = DECLARED[type(reply)]
        assert required <= set(fields.scalars) <= required | optional
        if isinstance(reply, UpdateReply):
            assert ("hypothesis" in fields.scalars) == (assignment is Assignment.CLIENT)
            assert ("rows" in fields.scalars) == (weighting is Weighting.SAMPLES and consent)
            assert list(fields.arrays) == ["vector"]
            assert fields.arrays["vector"].dtype == np.float32
            assert fields.arrays["vector"].shape == (13,)
            # No memory beyond the vector hangs on it (a view of the trained one would, and serialisers may keep it).
            assert fields.arrays["vector"].base is None
            assert len(str(fields.scalars["release"])) == 32
        else:
            assert fields.arrays == {}
    assert isinstance(replies[0], Refusal) == (weighting is Weighting.SAMPLES and not consent)


# --- the model at the end


def card_in(folder: Path) -> dict[str, object]:
    def no_constant(name: str) -> object:
        raise AssertionError(f"{name} is not JSON")

    found: dict[str, object] = json.loads((folder / CARD_FILE).read_text(), parse_constant=no_constant)
    return found


def kept_in(folder: Path) -> np.ndarray:
    found = load_file(folder / MODEL_FILE)
    return np.concatenate([found[n].reshape(-1) for n in ("hidden.weight", "hidden.bias", "out.weight", "out.bias")])


def test_who_never_trained_keeps_the_hypothesis_that_fits_best(
    open_holder: Holder, train_request: Request, tmp_path: Path
) -> None:
    holder, message = open_holder(), the_message(train_request(round=9))
    assert keep_model(holder, message) == Acknowledgement()
    losses = hypothesis_losses(holder.task, holder.model, message.hypotheses, holder.layout, holder.data)
    best = int(losses.argmin())
    np.testing.assert_array_equal(kept_in(tmp_path / "state"), message.hypotheses[best])
    card = card_in(tmp_path / "state")
    assert card["task"] == "tiny"
    assert card["client"] == "ward 7"
    assert (card["hypothesis"], card["hypotheses"], card["rows"]) == (best, 3, 20)
    assert card["loss_before"] == card["loss_after"] == pytest.approx(losses[best])
    assert card["metric"] == pytest.approx(losses[best] ** 0.5)
    assert (card["releases"], card["pure_epsilon"], card["budget"]) == (0, 0.0, 100.0)
    assert holder.gate.ledger.releases() == []
    assert holder.gate.ledger.disclosures() == []


def test_the_card_has_the_ledgers_totals(open_holder: Holder, train_request: Request, tmp_path: Path) -> None:
    holder = open_holder(neighbourhood=Neighbourhood.RELATIVE)
    for number in (1, 2):
        answer_train(holder, train_request(round=number), is_stale=fresh)
    answer_validation(holder, the_message(train_request(run="another")))
    keep_model(holder, the_message(train_request(round=3)))
    card = card_in(tmp_path / "state")
    assert card["releases"] == 2
    assert card["pure_epsilon"] == pytest.approx(26 / 3)
    assert card["neighbourhoods"] == ["relative"]
    assert card["validations_told"] == 1


def test_fine_tuning_costs_nothing_and_is_in_the_file(
    open_holder: Holder, train_request: Request, tmp_path: Path
) -> None:
    holder, message = open_holder(fine_tune=5), the_message(train_request())
    keep_model(holder, message)
    card = card_in(tmp_path / "state")
    assert card["fine_tune_epochs"] == 5
    assert card["loss_after"] < card["loss_before"]  # type: ignore[operator]
    kept = kept_in(tmp_path / "state")
    assert mean_loss(holder.task, holder.model, kept, holder.layout, holder.data) == pytest.approx(card["loss_after"])
    assert pure_loss(holder.gate.ledger.events()) == 0


@pytest.mark.parametrize("epochs", [1, 5])  # to huge numbers, and on to numbers that are not finite
@pytest.mark.parametrize("step_size", [1e2, 1e6, 1e10, 1e30])
def test_fine_tuning_that_diverges_leaves_a_sound_file_and_card(
    open_holder: Holder, train_request: Request, tiny_task: Task, tmp_path: Path, step_size: float, epochs: int
) -> None:
    wild = replace(tiny_task, training=TrainingSettings(epochs=1, step_size=step_size, batch_size=20))
    holder, message = open_holder(task=wild, fine_tune=epochs), the_message(train_request())
    assert keep_model(holder, message) == Acknowledgement()
    assert np.isfinite(kept_in(tmp_path / "state")).all()
    assert card_in(tmp_path / "state")["fine_tune_epochs"] == epochs


def test_a_model_that_fits_no_row_still_has_a_card_in_json(
    open_holder: Holder, train_request: Request, rows: ClientData, tmp_path: Path
) -> None:
    holder = open_holder()
    message = the_message(train_request(hypotheses=np.full((2, 13), 1e30, np.float32)))
    assert keep_model(holder, message) == Acknowledgement()
    assert card_in(tmp_path / "state")["hypothesis"] == 0


def test_a_second_model_replaces_the_first(open_holder: Holder, train_request: Request, tmp_path: Path) -> None:
    holder = open_holder()
    for run in ("first", "second"):
        keep_model(holder, the_message(train_request(), run=run))
        assert card_in(tmp_path / "state")["run"] == run
    assert sorted(path.name for path in (tmp_path / "state").glob("*model*")) == [CARD_FILE, MODEL_FILE]


def test_a_card_that_cannot_be_written_is_one_line(open_holder: Holder, train_request: Request, tmp_path: Path) -> None:
    # Any other exception is taken for a bad message, and the client waits on for a server that has gone.
    holder = open_holder()
    (tmp_path / "state" / CARD_FILE).mkdir()
    with pytest.raises(CoterieError) as caught:
        keep_model(holder, the_message(train_request()))
    assert "\n" not in str(caught.value)
