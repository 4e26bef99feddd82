"""What the server received, made by the product's own client: choosing, training, the gate and its ledger.

This is the one file of ``attacks`` that imports ``client``: an audit must attack what the gate lets out, not a copy
of it that may be weaker or stronger. The ledger is in memory, and the noise is **seeded**, so that an audit
can be repeated; a deployed client's noise comes from the operating system and has the same law.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.attacks.models import AuditedModel
from coterie.attacks.threat_model import ThreatModel
from coterie.client.ledger import Ledger
from coterie.client.participation import DataHolder, Draws, answer_train
from coterie.client.policy import PrivacyPolicy
from coterie.client.sanitize import Gate
from coterie.client.selection import best_hypothesis, hypothesis_losses
from coterie.client.training import train
from coterie.config import Assignment, Weighting
from coterie.errors import CoterieError
from coterie.protocol import PrivacyProposal, Refusal, TrainRequest, Vector
from coterie.rng import seeded
from coterie.tasks import ClientData, TrainingSettings


@dataclass(frozen=True)
class Evidence:
    """All rounds that trained from the same start: ``update`` (n,) is the mean of ``rounds`` received updates."""

    start: Vector
    update: NDArray[np.float64]
    rounds: int


@dataclass(frozen=True)
class Observation:
    """What the server sent and received in T rounds with one client.

    ``hypotheses`` (T, k, n) were sent and ``received`` (T, n) came back, both float32; ``chosen`` holds the index of
    the trained hypothesis of each round where the client tells it, and None where it does not.
    """

    hypotheses: Vector
    received: Vector
    chosen: tuple[int | None, ...]

    @property
    def rounds(self) -> int:
        """T."""
        return len(self.received)

    @property
    def starts(self) -> Vector:
        """The hypothesis each round trained, (T, n). A server that is not told takes the nearest to what it got."""
        indices = [
            nearest(self.hypotheses[t], self.received[t]) if told is None else told
            for t, told in enumerate(self.chosen)
        ]
        if self.hypotheses.strides[0] == 0 and len(set(indices)) == 1:  # the same weights every round: no copies
            return np.broadcast_to(self.hypotheses[0, indices[0]], self.received.shape)
        return np.stack([self.hypotheses[t, j] for t, j in enumerate(indices)])

    def evidence(self) -> tuple[Evidence, ...]:
        """The received updates θ̃ − θ_j in float64, averaged over the rounds that trained from equal weights.

        Averaging T updates from one start divides the noise's standard deviation by √T. Several starts are several
        pieces of evidence about the same rows, whose log-likelihoods add up.
        """
        starts = self.starts
        firsts: list[int] = []
        members: list[list[int]] = []
        for t in range(self.rounds):
            for group, first in enumerate(firsts):
                if starts[t] is starts[first] or np.array_equal(starts[t], starts[first]):
                    members[group].append(t)
                    break
            else:
                firsts.append(t)
                members.append([t])
        return tuple(
            Evidence(
                np.ascontiguousarray(starts[first]),
                np.mean(self.received[own], axis=0, dtype=np.float64) - starts[first].astype(np.float64),
                len(own),
            )
            for first, own in zip(firsts, members, strict=True)
        )


def nearest(hypotheses: Vector, received: Vector) -> int:
    """argmin_j ‖θ̃ − θ_j‖₂ over the k hypotheses (k, n)."""
    return int(np.argmin([np.square(received.astype(np.float64) - h).sum() for h in hypotheses]))


def observe(
    model: AuditedModel,
    rows: ClientData,
    hypotheses: Vector,
    threat: ThreatModel,
    *,
    seed: int,
    rounds: int = 1,
    index_sent: bool = True,
) -> Observation:
    """What the server receives from a client with ``rows`` (B of them) in ``rounds`` rounds.

    ``hypotheses`` is (n,) for one model that is sent every round, (k, n) for k of them, or (rounds, k, n) when the
    weights move. The client is ``client.participation.answer_train`` as deployed, behind ``client.sanitize.Gate``,
    with the threat's mechanism and training; the noise is drawn from ``seed``. With ν = 0, which no gate offers,
    the trained vector is taken as ``client.training.train`` returns it: the audit's own control.

    Raises ``CoterieError`` for no rows or another number of them than the threat's batch size, rows of another
    shape, and a refusal of the gate.
    """
    check_rows(model, rows, threat)
    sent = np.asarray(hypotheses, dtype=np.float32)
    if sent.ndim < 3:
        sent = np.broadcast_to(np.atleast_2d(sent), (rounds, *np.atleast_2d(sent).shape))
    if sent.shape[0] != rounds or sent.shape[2] != model.layout.size:
        raise CoterieError(
            f"Expected hypotheses of shape ({rounds}, k, {model.layout.size}), found {sent.shape}: "
            f"are the weights of this model?"
        )
    received = np.empty((rounds, model.layout.size), np.float32)
    chosen: list[int | None] = []
    replies = (
        _without_gate(model, rows, sent, threat, seed)
        if threat.noise_multiplier == 0
        else _through_gate(model, rows, sent, threat, seed, index_sent=index_sent)
    )
    for t, (vector, index) in enumerate(replies):
        received[t] = vector
        chosen.append(index if index_sent else None)
    return Observation(sent, received, tuple(chosen))


def check_rows(model: AuditedModel, rows: ClientData, threat: ThreatModel) -> None:
    """Raise ``CoterieError`` unless ``rows`` are one batch of the model's inputs."""
    if rows.rows == 0:
        raise CoterieError("Expected at least one row to attack, found an empty set")
    if tuple(rows.inputs.shape[1:]) != model.input_shape:
        raise CoterieError(
            f"Expected inputs of shape {model.input_shape} for model {model.name!r}, found "
            f"{tuple(rows.inputs.shape[1:])}: choose the model that was built for these rows"
        )
    if rows.rows != threat.batch_size:
        raise CoterieError(f"Expected {threat.batch_size} rows (one batch), found {rows.rows}")


def _settings(threat: ThreatModel) -> TrainingSettings:
    # One batch holds all rows, so that an epoch is one step and the order of rows does not matter.
    return TrainingSettings(epochs=threat.local_steps, step_size=threat.step_size, batch_size=threat.batch_size)


def _request(model: AuditedModel, hypotheses: Vector, threat: ThreatModel, t: int, *, index_sent: bool) -> TrainRequest:
    return TrainRequest(
        run="audit",
        round=t + 1,
        task=model.task.name,
        hypotheses=hypotheses.copy(),  # torch wants to own what it reads
        assignment=Assignment.CLIENT if index_sent else Assignment.SERVER,
        weighting=Weighting.EQUAL,
        training=_settings(threat),
        proposal=PrivacyProposal(),
    )


def _through_gate(
    model: AuditedModel,
    rows: ClientData,
    sent: Vector,
    threat: ThreatModel,
    seed: int,
    *,
    index_sent: bool,
) -> Iterator[tuple[Vector, int | None]]:
    policy = PrivacyPolicy(
        names=tuple(layer.name for layer in threat.noised),
        sizes=tuple(layer.size for layer in threat.noised),
        radii=threat.lengths,
        layers_in_each=1,
        noise_multiplier=threat.noise_multiplier,
        neighbourhood=threat.neighbourhood,
        relative_floor=1.0,  # ``lengths`` are the floors themselves in the relative mode
    )
    with Ledger(Path(":memory:"), create=True) as ledger:
        gate = Gate(policy, None, ledger, budget=math.inf, validation=False, share_sample_count=False)
        holder = DataHolder(
            name="audited",
            task=model.task,
            model=model.task.build(),
            layout=model.layout,
            data=rows,
            gate=gate,
            folder=Path(),  # only for what is kept at a run's end
            fine_tune=0,
            draws=lambda t: Draws(noise=seeded(seed, "noise", t), order=seeded(seed, "order", t)),
        )
        for t, hypotheses in enumerate(sent):
            request = _request(model, hypotheses, threat, t, index_sent=index_sent)
            reply = answer_train(holder, request, is_stale=lambda: False)
            if reply is None or isinstance(reply, Refusal):
                raise CoterieError(f"Expected the gate to answer, found a refusal: {reply and reply.reason}")
            yield reply.vector, reply.hypothesis


def _without_gate(
    model: AuditedModel, rows: ClientData, sent: Vector, threat: ThreatModel, seed: int
) -> Iterator[tuple[Vector, int | None]]:
    module = model.task.build()
    for t, unowned in enumerate(sent):
        hypotheses = unowned.copy()
        chosen = best_hypothesis(hypothesis_losses(model.task, module, hypotheses, model.layout, rows))
        order = seeded(seed, "order", t + 1)
        start = hypotheses[chosen]
        yield train(model.task, module, start, model.layout, rows, _settings(threat), rng=order), chosen
