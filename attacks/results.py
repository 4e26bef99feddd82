"""``results.json``: an audit's figures, from its cells."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.attacks import metrics
from coterie.attacks.cells import Record, bar_of, guesses
from coterie.attacks.metrics import Rate, rate
from coterie.attacks.plan import HYPOTHESES, Condition, Material, fixed_settings
from coterie.attacks.verdict import LEVELS, Findings, Summary, chance_of, findings
from coterie.errors import CoterieError
from coterie.mechanisms.accounting import Price
from coterie.mechanisms.calibration import planned_ledger
from coterie.mechanisms.events import Neighbourhood

FORMAT = "coterie-audit-1"
_DELTA = 1e-5
_MEDIANS = ("mse", "psnr", "ssim", "correlation", "error")
_BY_RANKING = ("identified", "cluster")

Cells = Mapping[tuple[str, Condition], Sequence[Record]]  # the records of all batches, in their order


def summarise(attack: str, condition: Condition, records: Sequence[Record]) -> Summary:
    """One attack under one condition."""
    rows = [row for record in records for row in record["rows"]]
    rates = {level: rate([row[level] for row in rows]) for level in LEVELS if all(level in row for row in rows)}
    if "psnr" in rows[0]:
        converged = rate([row["psnr"] >= metrics.CONVERGED_PSNR for row in rows])
    else:
        converged = rates["full" if "full" in rates else next(iter(rates))]
    columns = [row["columns"] for row in rows if "columns" in row]
    return Summary(
        attack=attack,
        noise_multiplier=condition.noise_multiplier,
        rounds=condition.rounds,
        local_epsilon=condition.local_epsilon,
        rates=rates,
        converged=converged,
        medians={name: statistics.median(row[name] for row in rows) for name in _MEDIANS if name in rows[0]},
        columns=tuple(np.median(columns, axis=0).tolist()) if columns else (),
        cpu_seconds=sum(record["cpu_seconds"] for record in records) / len(rows),
    )


def results_of(
    material: Material, cells: Cells, notes: Iterable[str], layers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of ``results.json``, plain data. ``layers`` is what the predictor says, a row per condition and
    layer.
    """
    summaries = [summarise(attack, condition, records) for (attack, condition), records in cells.items()]
    candidates = 1 + min(
        len(material.others(i, r)) for i, batch in enumerate(material.batches) for r in range(batch.rows)
    )
    share = _classes_share(material)
    chances = {
        level: chance_of(level, classes_share=share, candidates=candidates, hypotheses=HYPOTHESES) for level in LEVELS
    }
    noun = "images" if material.shape is not None else "rows"
    verdict = findings(summaries, chances, noun=noun)
    model = material.model
    return {
        "format": FORMAT,
        "settings": fixed_settings(material.settings),
        "noun": noun,
        "model": {
            "name": model.name,
            "parameters": model.layout.size,
            "layers": [{"name": layer.name, "parameters": layer.size} for layer in model.layout.layers],
            "start": "trained weights" if material.trained is not None else f"{material.settings.init} initialisation",
        },
        "notes": list(dict.fromkeys(notes)),
        "candidates": candidates,
        "chances": chances,
        "controls": _controls(material),
        "verdict": _verdict(verdict),
        "conditions": [_condition(condition, material) for condition in material.conditions()],
        "cells": [_summary(summary) for summary in summaries],
        "rows": [
            {
                "attack": attack,
                "noise_multiplier": condition.noise_multiplier,
                "rounds": condition.rounds,
                "row": material.settings.batch_size * record["batch"] + place,
                **row,
            }
            for (attack, condition), records in cells.items()
            for record in records
            for place, row in enumerate(record["rows"])
        ],
        "layers": [dict(layer) for layer in layers],
    }


def layers_of(predictions: Mapping[Condition, Sequence[Record]], material: Material) -> list[dict[str, Any]]:
    """What the predictor says: for each condition and layer, the PSNR of the median error over the images.

    ``layer`` is ``"all"`` for all together and ``"none"`` for the prior without any update.
    """
    sizes = {layer.name: layer.size for layer in material.threat(material.conditions()[0], 0).noised}
    found = []
    for condition, records in predictions.items():
        rows = [row for record in records for row in record["rows"]]
        errors = {name: [row["layers"][name] for row in rows] for name in sizes}
        errors |= {"all": [row["mse"] for row in rows], "none": [row["prior"] for row in rows]}
        found += [
            {
                "layer": name,
                "parameters": sizes.get(name, material.model.layout.size if name == "all" else 0),
                "noise_multiplier": condition.noise_multiplier,
                "rounds": condition.rounds,
                "local_epsilon": condition.local_epsilon,
                "psnr": metrics.psnr(statistics.median(values)),
                "images": len(rows),
            }
            for name, values in errors.items()
        ]
    return found


def _classes_share(material: Material) -> float:
    """How often the most frequent class is right."""
    if material.model.classes is None:
        return 0.0
    return float(torch.bincount(material.pool.targets).max() / len(material.pool))


def _controls(material: Material) -> dict[str, Any]:
    """What guesses reach on the audited rows: the class's mean, and for images the black one."""
    bar = bar_of(material)
    if material.shape is None:
        errors = guesses(material)
        return {"mean_row": {"error": float(np.median(errors))}, "bar": bar} if len(errors) else {"bar": bar}
    shape = material.shape
    rows = [(x, y) for batch in material.batches for x, y in zip(batch.inputs, batch.targets, strict=True)]
    found: dict[str, Any] = {"bar": bar}
    for name in ("class_mean", "black"):
        scores = []
        for x, y in rows:
            image = x.double().numpy().reshape(shape)
            mean = material.class_means.get(material.class_of(y))
            guess = np.zeros(shape) if name == "black" or mean is None else mean.numpy().reshape(shape)
            scores.append(metrics.image_score(guess, image))
        found[name] = {
            measure: np.quantile([getattr(score, measure) for score in scores], [0.05, 0.5, 0.95]).tolist()
            for measure in ("mse", "psnr", "ssim", "correlation")
        }
    return found


def _verdict(verdict: Findings) -> dict[str, Any]:
    return {
        "valid": verdict.valid,
        "control_met": dict(verdict.control_met),
        "validity": verdict.validity,
        "found": list(verdict.found),
        "stopped": list(verdict.stopped),
    }


def _condition(condition: Condition, material: Material) -> dict[str, Any]:
    """The condition with its price: null where there is no guarantee to price."""
    price: Price | None = None
    settings = material.settings
    if settings.neighbourhood is Neighbourhood.FIXED and not condition.is_control:
        sizes = [layer.size for layer in material.threat(condition, 0).noised]
        ledger = planned_ledger(layers=sizes, noise_multiplier=condition.noise_multiplier, rounds=condition.rounds)
        price = ledger.price(delta=_DELTA)
    return {
        "noise_multiplier": condition.noise_multiplier,
        "rounds": condition.rounds,
        "local_epsilon": condition.local_epsilon,
        "price": None
        if price is None
        else {
            "local_pure": _finite(price.local_pure),
            "local_tight": _finite(price.local_tight),
            "delta": _DELTA,
            "most_identified": most_identified(price.local_pure),
        },
    }


def most_identified(epsilon: float, candidates: int = 100) -> float:
    """The largest rate at which anybody can pick the true one of m equally likely candidates: e^ε/(e^ε + m − 1).

    For an ε-local guarantee between any two of them, by Bayes' rule.
    """
    return 1 / (1 + (candidates - 1) * math.exp(-min(epsilon, 700.0)))


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        "attack": summary.attack,
        "noise_multiplier": summary.noise_multiplier,
        "rounds": summary.rounds,
        "local_epsilon": summary.local_epsilon,
        "rates": {level: _rate(found) for level, found in summary.rates.items()},
        "converged": _rate(summary.converged),
        "medians": dict(summary.medians),
        "columns": list(summary.columns),
        "cpu_seconds": summary.cpu_seconds,
    }


def _rate(found: Rate) -> dict[str, float]:
    return {"hits": found.hits, "trials": found.trials, "low": found.low, "high": found.high}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def as_json(results: Mapping[str, Any]) -> str:
    """The file's text."""
    return json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_results(path: Path) -> dict[str, Any]:
    """The content of a ``results.json``. Raises ``CoterieError`` when it is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = found["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CoterieError(f"Expected an audit's results.json at {path}, found: {error!r}") from error
    if known != FORMAT:
        raise CoterieError(f"Expected an audit's results of format {FORMAT} at {path}, found {known!r}")
    return found
