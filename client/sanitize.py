"""The one gate: everything that leaves a client because of its data passes here, and is in the ledger before.

The order is the guarantee: check, sanitize, commit to disk, and only then hand the reply out. A client that dies
between any two of these has released nothing that its ledger lacks.
"""

import time
import uuid
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.client.ledger import AlreadyReleased, BudgetExceeded, Ledger, Release
from coterie.client.policy import PrivacyPolicy
from coterie.client.selection import best_hypothesis
from coterie.config import Assignment, Weighting
from coterie.mechanisms.layerwise import LayerwiseLaplace
from coterie.mechanisms.randomness import NoiseSource
from coterie.mechanisms.selection import ExponentialSelection, RandomizedArgmin
from coterie.protocol import (
    HypothesesMessage,
    Refusal,
    TrainRequest,
    UpdateReply,
    ValidationReply,
    Vector,
)


@dataclass(frozen=True)
class Gate:
    """A data holder's consent, and the ledger that keeps it honest."""

    policy: PrivacyPolicy
    selection: RandomizedArgmin | ExponentialSelection | None  # None: the plain argmin, which nothing protects
    ledger: Ledger
    budget: float
    validation: bool
    share_sample_count: bool

    def admit(self, request: TrainRequest) -> LayerwiseLaplace | Refusal:
        """The mechanism for this round, or the recorded refusal. Decided from counts and settings, not from data."""
        if request.weighting is Weighting.SAMPLES and not self.share_sample_count:
            return self.refuse(request, "sample counts asked for, not shared by this client")
        if self.ledger.has_disclosed(request.run):
            return self.refuse(request, "this client validates in this run and does not train in it")
        mechanism = self.policy.accept(request.proposal)
        if isinstance(mechanism, Refusal):
            return self.refuse(request, mechanism.reason)
        planned = mechanism.planned_loss + (self.selection.epsilon if self.selection else 0.0)
        try:
            self.ledger.check(request.run, request.round, planned=planned, budget=self.budget)
        except (AlreadyReleased, BudgetExceeded) as refusal:
            return self._refuse_by_ledger(request, refusal)
        return mechanism

    def choose(self, losses: NDArray[np.float64], *, rng: NoiseSource) -> int:
        """The hypothesis to train, from each one's loss on the private rows, shape (k,)."""
        return best_hypothesis(losses) if self.selection is None else self.selection(losses, rng=rng)

    def release(
        self,
        request: TrainRequest,
        mechanism: LayerwiseLaplace,
        *,
        hypothesis: int,
        trained: Vector,
        rows: int,
        rng: NoiseSource,
    ) -> UpdateReply | Refusal:
        """Sanitize the trained vector (n,), commit the release to the ledger, and only then return the reply.

        What leaves is θ_j + sanitized(θ − θ_j), in float32, held inside float32's range. Training that diverged
        (any non-finite number) is released as the zero update under the same noise and at the same price, so that
        whether this client answers never depends on its data.
        """
        start = request.hypotheses[hypothesis].astype(np.float64)
        update = trained.astype(np.float64) - start
        if not np.isfinite(update).all():
            update = np.zeros_like(start)
        sanitized = mechanism.release(update, rng=rng)
        limit = float(np.finfo(np.float32).max)
        vector = np.clip(start + sanitized.update, -limit, limit).astype(np.float32)
        index_sent = request.assignment is Assignment.CLIENT
        rows_sent = request.weighting is Weighting.SAMPLES and self.share_sample_count
        release = Release(
            id=uuid.uuid4().hex,
            time=time.time(),
            run=request.run,
            round=request.round,
            hypothesis=hypothesis,
            index_sent=index_sent,
            rows_sent=rows_sent,
            layer_names=self.policy.names,
            update=sanitized.event,
            selection=self.selection.event(len(request.hypotheses)) if self.selection else None,
        )
        try:
            self.ledger.record_release(release, budget=self.budget)
        except (AlreadyReleased, BudgetExceeded) as refusal:
            return self._refuse_by_ledger(request, refusal)
        return UpdateReply(
            release=release.id,
            vector=vector,
            hypothesis=hypothesis if index_sent else None,
            rows=rows if rows_sent else None,
        )

    def admit_validation(self, message: HypothesesMessage) -> Refusal | None:
        """None when this client may tell its loss now: it consents, has not trained in the run, and has not told yet
        in this round.
        """
        if not self.validation:
            return self.refuse(message, "validation losses are not shared by this client")
        if self.ledger.has_released(message.run):
            return self.refuse(message, "this client trains in this run and does not validate in it")
        if self.ledger.has_disclosed(message.run, message.round):
            return self.refuse(message, "a validation of this round has already been told")
        return None

    def disclose_validation(self, message: HypothesesMessage, *, loss: float, score: float) -> ValidationReply:
        """Commit that a loss and a score leave unprotected, then hand them out, in float32.

        Finite always: what is not a number leaves as float32's largest.
        """
        self.ledger.record_disclosure(message.run, message.round, "validation loss and score")
        limit = float(np.finfo(np.float32).max)
        told = np.clip(np.nan_to_num([loss, score], nan=limit), -limit, limit).astype(np.float32)
        finite_loss, finite_score = map(float, told)
        return ValidationReply(loss=finite_loss, score=finite_score)

    def refuse(self, request: TrainRequest | HypothesesMessage, reason: str, *, exhausted: bool = False) -> Refusal:
        """Record a refusal and return it."""
        self.ledger.record_refusal(request.run, request.round, reason)
        return Refusal(reason, exhausted=exhausted)

    def _refuse_by_ledger(self, request: TrainRequest, found: AlreadyReleased | BudgetExceeded) -> Refusal:
        return self.refuse(request, str(found), exhausted=isinstance(found, BudgetExceeded))
