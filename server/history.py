"""What a run leaves behind: one line a round, a summary, and the k models."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.models import save_model
from coterie.parameters import Layout
from coterie.protocol import Vector
from coterie.server.hypotheses import BestSoFar
from coterie.storage import write_atomically
from coterie.tasks import Task

HISTORY_FILE = "history.jsonl"
SUMMARY_FILE = "summary.json"
SETTINGS_FILE = "run.json"


@dataclass(frozen=True)
class RoundRecord:
    """One round as the server saw it: only sanitized updates, refusals, and what held-out clients told."""

    round: int
    seconds: float
    sampled: int
    clients_per_hypothesis: tuple[int, ...]
    refusals: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    validation_loss: float | None = None
    metric: float | None = None
    validators: int = 0
    reseeded: tuple[int, ...] = ()  # the hypotheses that were idle, and are copies of the largest from here on
    collapsed: bool = False  # all but one hypothesis were idle up to this round


@dataclass(frozen=True)
class Outcome:
    """How training ended: the best validated hypotheses, or the last ones where nobody validates."""

    hypotheses: Vector
    best: BestSoFar
    rounds: tuple[RoundRecord, ...]
    stopped: str
    trainers: int
    validators: int
    seconds: float


@dataclass(frozen=True)
class Summary:
    """The end of a run, for people and programs."""

    task: str
    run: str
    hypotheses: int
    rounds: int
    stopped: str
    best_round: int
    validation_loss: float | None
    metric: float | None
    metric_name: str
    clients_per_hypothesis: tuple[int, ...]
    collapsed: bool  # at the round that was kept
    reseeded: int  # how often in the whole run
    trainers: int
    held_out: int
    validators: int
    updates: int
    refusals: Mapping[str, int]
    failures: Mapping[str, int]
    dropped: Mapping[str, int]
    models_delivered: int
    seconds: float
    seconds_per_round: float
    models: tuple[str, ...]


def open_folder(folder: Path) -> None:
    """Make the output folder. Raises ``CoterieError`` when it holds another run's history or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / HISTORY_FILE).exists():
            raise CoterieError(f"Expected --out without an earlier run, found {folder / HISTORY_FILE}: name another")
        (folder / HISTORY_FILE).touch()
    except OSError as error:
        raise CoterieError(f"Expected --out to be a writable folder, found: {error}") from error


def append_round(folder: Path, record: RoundRecord) -> None:
    """Add one line to the history, synced, so that a crash loses no finished round.

    Raises ``CoterieError`` when the disk refuses.
    """
    try:
        with (folder / HISTORY_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CoterieError(f"Expected to write {folder / HISTORY_FILE}, found: {error}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the whole new one. Raises ``CoterieError`` if it cannot."""
    try:
        write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    except OSError as error:
        raise CoterieError(f"Expected to write {path}, found: {error}") from error


def save_hypotheses(folder: Path, task: str, run: str, hypotheses: Vector, layout: Layout) -> tuple[str, ...]:
    """Write ``hypothesis-<j>.safetensors`` for each of the k hypotheses; their paths."""
    paths = [folder / f"hypothesis-{j}.safetensors" for j in range(len(hypotheses))]
    for j, path in enumerate(paths):
        save_model(path, task, hypotheses[j], layout, {"run": run, "hypothesis": str(j)})
    return tuple(map(str, paths))


def summarize(
    outcome: Outcome, *, task: Task, run: str, hypotheses: int, delivered: int, models: tuple[str, ...]
) -> Summary:
    """The summary of a run; the losses are those of the round whose hypotheses were kept."""
    rounds, validation = outcome.rounds, outcome.best.validation
    kept = next((record for record in rounds if record.round == outcome.best.round), rounds[-1] if rounds else None)
    return Summary(
        task=task.name,
        run=run,
        hypotheses=hypotheses,
        rounds=len(rounds),
        stopped=outcome.stopped,
        best_round=kept.round if kept else 0,
        validation_loss=validation.loss if validation else None,
        metric=task.report(validation.score) if validation else None,
        metric_name=task.metric,
        clients_per_hypothesis=kept.clients_per_hypothesis if kept else (0,) * hypotheses,
        collapsed=kept.collapsed if kept else False,
        reseeded=sum(len(record.reseeded) for record in rounds),
        trainers=outcome.trainers,
        held_out=outcome.validators,
        validators=validation.clients if validation else 0,
        updates=sum(sum(record.clients_per_hypothesis) for record in rounds),
        refusals=_total(record.refusals for record in rounds),
        failures=_total(record.failures for record in rounds),
        dropped=_total(record.dropped for record in rounds),
        models_delivered=delivered,
        seconds=outcome.seconds,
        seconds_per_round=outcome.seconds / len(rounds) if rounds else 0.0,
        models=models,
    )


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
