"""A loss specification read back: the per-class weights that any learner can use."""

import json
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from coterie.errors import CoterieError
from coterie.mechanisms.labels.arguments import Array
from coterie.mechanisms.labels.losses import cluster_weights, debiased_weights, subset_debiased_weights

FORMAT = "coterie-labels-1"


def specification_path(table: Path) -> Path:
    """Where the loss specification of a noisy table is."""
    return table.with_name(f"{table.name}.labels.json")


def arrays_path(table: Path) -> Path:
    """Where its arrays are: the noisy labels as class numbers, and what the weights need of each row."""
    return table.with_name(f"{table.name}.labels.npz")


def read_specification(path: Path) -> dict[str, Any]:
    """The specification at ``path``. Raises ``CoterieError`` for a missing file and one of another format."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CoterieError(f"Expected a label specification at {path}, found: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CoterieError(f"Expected a label specification (format {FORMAT}) at {path}, found another file")
    return found


def class_weights(table: Path, *, correction: float | None = None) -> Array:
    """Weights w (n, K) of the noisy ``table`` that ``coterie labels sanitize`` wrote: minimize Σ_z w_z·l(x, z).

    ``correction`` β is for cluster mechanisms, in place of the unbiased β = λ. Weights may be negative: regularise.
    Raises ``CoterieError`` for files that are missing or do not fit.
    """
    found = read_specification(specification_path(table))
    loss, classes = found["loss"], len(found["classes"])
    try:
        with np.load(arrays_path(table), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, EOFError, ValueError, BadZipFile) as error:
        raise CoterieError(f"Expected the arrays of {table} beside it, found: {error}") from error
    labels = arrays["labels"]
    match loss["kind"]:
        case "debiased":
            return debiased_weights(labels, classes=classes, epsilon=loss["epsilon"])
        case "subset":
            return subset_debiased_weights(labels, arrays["subsets"][arrays["groups"]], epsilon=loss["epsilon"])
        case "cluster":
            beta = loss["beta"] if correction is None else correction
            return cluster_weights(labels, arrays["distributions"], arrays["clusters"], correction=beta)
        case "flip":
            p = loss["flip_probability"]
            if p >= 0.5:
                raise CoterieError(
                    "Expected labels that were flipped with probability below 1/2, found 1/2: no content"
                )
            return np.asarray((np.eye(2)[labels] - p) / (1 - 2 * p))
        case kind:
            raise CoterieError(f"Expected a loss that this version knows, found {kind!r}")
