"""One attack on one batch under one condition: run it, measure it, keep it in a file of its own."""

import base64
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.attacks import metrics
from coterie.attacks.attack import Attack, Reconstruction, check_applies
from coterie.attacks.observation import Observation, observe
from coterie.attacks.plan import HYPOTHESES, Condition, Material
from coterie.attacks.predictor import predict, sensitivities
from coterie.attacks.priors import fit_gaussian
from coterie.attacks.registry import attack_named
from coterie.attacks.threat_model import Knowledge, ThreatModel
from coterie.errors import CoterieError
from coterie.rng import seeded
from coterie.storage import write_atomically

Record = dict[str, Any]
PREDICTOR = "predictor"  # kept like an attack, though it is none
FULL_COLUMNS = 0.1  # standard deviations: the error of every column of a fully reconstructed table row


@dataclass(frozen=True)
class Cell:
    """A place in the grid."""

    attack: str
    condition: Condition
    batch: int

    def file(self, folder: Path) -> Path:
        """Where it is kept in the audit's folder."""
        return folder / "cells" / self.attack / f"{self.condition.name},batch={self.batch}.json"


def observation_for(material: Material, condition: Condition, batch: int, *, hypotheses: int = 1) -> Observation:
    """What the server received from the client of ``batch``, with the same noise for every attack."""
    threat = material.threat(condition, batch)
    seed = int(seeded(material.settings.seed, "audit", "noise", condition.name, batch).integers(2**62))
    starts = np.stack([material.start(batch, j) for j in range(hypotheses)])
    return observe(material.model, material.batches[batch], starts, threat, seed=seed, rounds=condition.rounds)


def check_attack(attack: Attack, material: Material, condition: Condition) -> None:
    """Raise ``CoterieError`` in one line when the attack needs what is not there under a condition."""
    hypotheses = np.empty((1, HYPOTHESES, 0), np.float32)
    shown = Observation(hypotheses, np.empty((1, 0), np.float32), (0,))
    check_applies(attack, material.model, shown, material.threat(condition, 0))


def run_cell(material: Material, cell: Cell, observation: Observation | None = None) -> Record:
    """The measured attack. ``observation`` is ``observation_for`` of the same place, if it is already there."""
    attack = attack_named(cell.attack)
    guesses_choice = Knowledge.HYPOTHESES in attack.needs
    threat = material.threat(cell.condition, cell.batch)
    if guesses_choice or observation is None:
        count = HYPOTHESES if guesses_choice else 1
        observation = observation_for(material, cell.condition, cell.batch, hypotheses=count)
    truth = observation.chosen[0]
    if guesses_choice:
        observation = replace(observation, chosen=(None,) * observation.rounds)
    rng = seeded(material.settings.seed, "audit", "attack", cell.attack, cell.condition.name, cell.batch)
    began = time.process_time()
    found = attack(material.model, observation, threat, rng=rng)
    record = _record(material, cell, time.process_time() - began, found.evaluations)
    if guesses_choice:
        return {**record, "rows": [{"cluster": _is_least(found.ranking, truth)}]}
    if found.ranking is not None:
        _, place = material.candidates(cell.batch)
        return {**record, "rows": [{"identified": _is_least(found.ranking, place)}]}
    rows = _rows(material, cell.batch, found, threat, record)
    return {**record, "rows": rows}


def _record(material: Material, cell: Cell, cpu_seconds: float, evaluations: int) -> Record:
    return {
        "settings": material.fingerprint,
        "attack": cell.attack,
        "effort": _effort(cell.attack),
        "noise_multiplier": cell.condition.noise_multiplier,
        "rounds": cell.condition.rounds,
        "batch": cell.batch,
        "cpu_seconds": cpu_seconds,
        "evaluations": evaluations,
        "reconstruction": None,
    }


def is_predictable(material: Material) -> bool:
    """Whether the predictor applies: single images, one local step, a smooth model, and public images."""
    settings, model = material.settings, material.model
    single = settings.batch_size == 1 and settings.local_steps == 1
    return single and material.shape is not None and not model.kinks and material.public is not None


def predict_cells(material: Material, batch: int, conditions: Sequence[Condition]) -> Iterator[tuple[Cell, Record]]:
    """What the attack-free predictor says of one image under each condition; its Jacobians are found once."""
    assert material.public is not None
    own = material.batches[batch]
    began = time.process_time()
    threat = material.threat(conditions[0], batch)
    found = sensitivities(material.model, material.start(batch), own.inputs, own.targets, threat)
    prior = fit_gaussian(material.public.inputs)
    for condition in conditions:
        cell = Cell(PREDICTOR, condition, batch)
        told = predict(found, material.threat(condition, batch), prior, rounds=condition.rounds)
        row = {"mse": told.mse, "layers": dict(told.by_layer), "prior": told.prior_mse}
        yield cell, {**_record(material, cell, time.process_time() - began, 0), "rows": [row]}


def _is_least(ranking: NDArray[np.float64] | None, place: int | None) -> bool:
    """Whether the true place alone has the lowest score: a tie counts against the attack."""
    if ranking is None or place is None or not np.isfinite(ranking[place]):
        return False
    return bool((ranking <= ranking[place]).sum() == 1)


def _rows(material: Material, batch: int, found: Reconstruction, threat: ThreatModel, record: Record) -> list[Record]:
    """One measurement per row of the batch, in the batch's order."""
    own = material.batches[batch]
    rows: list[Record] = [{} for _ in range(own.rows)]
    if found.inputs is not None:
        truth = own.inputs.double().numpy()
        guess = found.inputs.detach().double().numpy().reshape(truth.shape)
        guess = guess[metrics.assign(guess, truth)]
        record["reconstruction"] = base64.b64encode(np.nan_to_num(guess).astype("<f4").tobytes()).decode()
        for r in range(own.rows):
            rows[r].update(_measure(material, batch, r, guess[r]))
    if found.targets is not None and threat.classes is not None:
        for row, right in zip(rows, labels_found(found.targets, own.targets), strict=True):
            row["label"] = right
    return rows


def labels_found(found: Tensor, true: Tensor) -> list[bool]:
    """For each true label (B,), whether the found ones (B,), which have no order, hold it; each counts once."""
    left = Counter(int(label) for label in found.reshape(-1))
    right = []
    for label in true.tolist():
        right.append(left[label] > 0)
        left[label] -= 1
    return right


def _measure(material: Material, batch: int, row: int, guess: NDArray[np.float64]) -> Record:
    own = material.batches[batch].inputs[row].double().numpy()
    others = material.others(batch, row).inputs.double().numpy()
    if material.shape is None:
        return measure_columns(guess, own, others, scales_of(material), bar_of(material))
    shape = material.shape
    image, truth = guess.reshape(shape), own.reshape(shape)
    score = metrics.image_score(image, truth)
    identified = len(others) > 0 and metrics.is_nearest(image, truth, others.reshape(-1, *shape))
    levels = metrics.verdict(score, identified=identified, correlation_bar=bar_of(material))
    return {
        "mse": score.mse,
        "psnr": score.psnr,
        "ssim": score.ssim,
        "correlation": score.correlation,
        "full": levels.full,
        "recognisable": levels.recognisable,
        "identified": levels.identified,
    }


def measure_columns(
    guess: NDArray[np.float64],
    own: NDArray[np.float64],
    others: NDArray[np.float64],
    scales: NDArray[np.float64],
    bar: float,
) -> Record:
    """A table row's errors |x̂ − x| in standard deviations of each column, and the three levels.

    *full*: every column within 0.1; *identified*: nearer, in these units, to the true row than to any of the others;
    *recognisable*: identified, and the root mean square over columns is at most ``bar``, which one guess in twenty
    of the mean row reaches.
    """
    errors = metrics.column_errors(np.nan_to_num(guess)[None], own[None], scales).reshape(-1)
    own_distance = float(np.sqrt(np.mean(np.square(errors))))
    distances = np.sqrt(np.mean(np.square((others - np.nan_to_num(guess)) / scales).reshape(len(others), -1), axis=1))
    identified = len(others) > 0 and bool((distances > own_distance).all())
    return {
        "columns": errors.tolist(),
        "error": own_distance,
        "full": bool((errors <= FULL_COLUMNS).all()),
        "recognisable": identified and own_distance <= bar,
        "identified": identified,
    }


def scales_of(material: Material) -> NDArray[np.float64]:
    """The pool's standard deviation of each input, 1 where it is constant."""
    found = material.pool.inputs.double().std(dim=0).numpy()
    return np.where(found > 1e-9, found, 1.0)


_bars: dict[str, float] = {}  # by fingerprint: the same pool for every cell of a process


def bar_of(material: Material) -> float:
    """What a guess of the class's mean reaches once in twenty: of images the correlation's 95th percentile, of table
    rows the 5th percentile of the error.
    """
    if material.fingerprint not in _bars:
        errors = guesses(material)
        low = material.shape is None
        _bars[material.fingerprint] = float(np.quantile(errors, 0.05 if low else 0.95)) if len(errors) else 0.0
    return _bars[material.fingerprint]


def guesses(material: Material, most: int = 2_000) -> NDArray[np.float64]:
    """How near the class's mean is to each of the pool's first rows: correlations, or errors in standard deviations."""
    means, scales = material.class_means, scales_of(material)
    found = []
    for inputs, target in zip(material.pool.inputs[:most].double(), material.pool.targets[:most], strict=True):
        mean = means[material.class_of(target)].numpy()
        if material.shape is not None:
            found.append(metrics.correlation(mean, inputs.numpy()))
        else:
            found.append(float(np.sqrt(np.mean(np.square((mean - inputs.numpy()) / scales)))))
    return np.array(found)


def _effort(name: str) -> str:
    return PREDICTOR if name == PREDICTOR else effort_of(attack_named(name))


def effort_of(attack: Attack) -> str:
    """The attack with the fields that its result depends on: the same text in every process."""
    values = ((one.name, getattr(attack, one.name)) for one in fields(attack))  # type: ignore[arg-type]
    kept = ", ".join(f"{name}={value}" for name, value in values if name not in {"name", "needs"})
    return f"{type(attack).__name__}({kept})"


def write_cell(folder: Path, cell: Cell, record: Record) -> None:
    """Keep a measured cell: whole or not at all. Raises ``CoterieError`` when it cannot be written."""
    path = cell.file(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(record, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise CoterieError(
            f"Expected to write to --out {folder}, found: {error}; finished cells are kept: run the same command again"
        ) from error


def read_cell(folder: Path, cell: Cell, material: Material) -> Record | None:
    """The kept measurement, or None. Raises ``CoterieError`` for a damaged one and one of other settings."""
    path = cell.file(folder)
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        found = (record["settings"], record["effort"])
        _ = record["rows"], record["reconstruction"], record["cpu_seconds"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CoterieError(f"Expected a finished cell in {path}, found: {error!r}; remove it") from error
    if found != (material.fingerprint, _effort(cell.attack)):
        raise CoterieError(f"Expected {path} to be of this audit, found other settings: give another --out")
    return record


def reconstruction_of(record: Record, material: Material) -> NDArray[np.float64] | None:
    """The reconstructed rows (B, …) of a cell, or None for an attack that reconstructs nothing."""
    if record["reconstruction"] is None:
        return None
    flat = np.frombuffer(base64.b64decode(record["reconstruction"]), "<f4").astype(np.float64)
    return flat.reshape(-1, *material.model.input_shape)
