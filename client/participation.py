"""What one data holder does with each request. Flower-free; the deployed client and the simulator share it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn

from coterie.client.sanitize import Gate
from coterie.client.selection import best_hypothesis, hypothesis_losses, mean_loss, mean_score
from coterie.client.training import RoundOver, train
from coterie.errors import CoterieError
from coterie.mechanisms.accounting import pure_loss
from coterie.mechanisms.randomness import NoiseSource
from coterie.models import save_model
from coterie.parameters import Layout
from coterie.protocol import (
    Acknowledgement,
    HypothesesMessage,
    Refusal,
    TrainRequest,
    UpdateReply,
    ValidationReply,
)
from coterie.storage import write_atomically
from coterie.tasks import ClientData, Task

MODEL_FILE = "model.safetensors"
CARD_FILE = "model.json"


@dataclass(frozen=True)
class Draws:
    """The randomness of one round: noise (OS entropy when deployed) and the order of the rows."""

    noise: NoiseSource
    order: np.random.Generator


@dataclass(frozen=True)
class DataHolder:
    """One data holder: its rows, its model, its gate and its folder."""

    name: str
    task: Task
    model: nn.Module
    layout: Layout
    data: ClientData
    gate: Gate
    folder: Path
    fine_tune: int
    draws: Callable[[int], Draws]  # round -> its randomness
    notes: tuple[str, ...] = ()  # one line each, for the data holder


def answer_train(
    holder: DataHolder, request: TrainRequest, *, is_stale: Callable[[], bool]
) -> UpdateReply | Refusal | None:
    """Choose, train, sanitize, record, and only then reply. None when the round was over before the ledger was
    charged: nothing is recorded and nothing leaves.
    """
    if (problem := _problem(holder, request)) is not None:
        return holder.gate.refuse(request, problem)
    mechanism = holder.gate.admit(request)
    if isinstance(mechanism, Refusal):
        return mechanism
    draws = holder.draws(request.round)
    losses = hypothesis_losses(holder.task, holder.model, request.hypotheses, holder.layout, holder.data)
    hypothesis = holder.gate.choose(losses, rng=draws.noise)
    try:
        trained = train(
            holder.task,
            holder.model,
            request.hypotheses[hypothesis],
            holder.layout,
            holder.data,
            request.training,
            rng=draws.order,
            is_over=is_stale,
        )
    except RoundOver:
        return None
    return holder.gate.release(
        request, mechanism, hypothesis=hypothesis, trained=trained, rows=holder.data.rows, rng=draws.noise
    )


def answer_validation(holder: DataHolder, message: HypothesesMessage) -> ValidationReply | Refusal:
    """The loss and score of the hypothesis that fits best, from a client that consents and does not train."""
    if (problem := _problem(holder, message)) is not None:
        return holder.gate.refuse(message, problem)
    if (refusal := holder.gate.admit_validation(message)) is not None:
        return refusal
    losses = hypothesis_losses(holder.task, holder.model, message.hypotheses, holder.layout, holder.data)
    best = best_hypothesis(losses)
    score = mean_score(holder.task, holder.model, message.hypotheses[best], holder.layout, holder.data)
    return holder.gate.disclose_validation(message, loss=float(losses[best]), score=score)


def keep_model(holder: DataHolder, message: HypothesesMessage) -> Acknowledgement | Refusal:
    """Keep the final hypothesis that fits best, fine-tuned on the own rows if wished: nothing leaves, no cost."""
    if (problem := _problem(holder, message)) is not None:
        return holder.gate.refuse(message, problem)
    if not message.trained:
        return Refusal("the run trained nothing: no model is kept, an earlier one stays")
    losses = hypothesis_losses(holder.task, holder.model, message.hypotheses, holder.layout, holder.data)
    best = best_hypothesis(losses)
    kept = message.hypotheses[best]
    if holder.fine_tune:
        settings = replace(holder.task.training, epochs=holder.fine_tune)
        order = holder.draws(message.round).order
        tuned = train(holder.task, holder.model, kept, holder.layout, holder.data, settings, rng=order)
        tuned_loss = mean_loss(holder.task, holder.model, tuned, holder.layout, holder.data)
        kept = tuned if tuned_loss < losses[best] else kept
    gate, task = holder.gate, holder.task
    score = mean_score(task, holder.model, kept, holder.layout, holder.data)
    releases = gate.ledger.releases()
    card = {
        "task": task.name,
        "client": holder.name,
        "run": message.run,
        "hypothesis": best,
        "hypotheses": len(message.hypotheses),
        "loss_before": _finite(losses[best]),
        "loss_after": _finite(mean_loss(task, holder.model, kept, holder.layout, holder.data)),
        "fine_tune_epochs": holder.fine_tune,
        "metric_name": task.metric,
        "metric": _finite(task.report(score)),
        "metric_is": "on the rows that chose the hypothesis: an optimistic figure",
        "rows": holder.data.rows,
        "releases": len(releases),
        "pure_epsilon": pure_loss(gate.ledger.events()),
        "budget": gate.budget,
        "neighbourhoods": sorted({str(release.update.neighbourhood) for release in releases}),
        "validations_told": len(gate.ledger.disclosures()),
        "row_counts_sent": sum(release.rows_sent for release in releases),
        "indices_sent": sum(release.index_sent and release.selection is None for release in releases),
    }
    save_model(holder.folder / MODEL_FILE, task.name, kept, holder.layout, {"run": message.run})
    try:
        write_atomically(holder.folder / CARD_FILE, (json.dumps(card, indent=2) + "\n").encode())
    except OSError as error:
        raise CoterieError(f"Expected to write {holder.folder / CARD_FILE}, found: {error}") from error
    return Acknowledgement()


def _finite(value: float) -> float | None:
    """A number that JSON has, or None."""
    return float(value) if np.isfinite(value) else None


def _problem(holder: DataHolder, message: TrainRequest | HypothesesMessage) -> str | None:
    """Why this request cannot be meant for this client, or None."""
    if message.task != holder.task.name:
        return f"the server runs task {message.task!r}, this client was started for {holder.task.name!r}"
    if message.hypotheses.shape[1] != holder.layout.size:
        return f"hypotheses of {message.hypotheses.shape[1]} parameters sent, the model has {holder.layout.size}"
    if not np.isfinite(message.hypotheses).all():
        return "hypotheses with non-finite numbers sent"
    return None
