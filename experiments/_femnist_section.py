"""What experiments/femnist.py's result says: its picture, and the measured parts of its section."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from _results import COLOURS, MARKERS, new_figure, rounded_up, table, write_figure

from coterie.config import Reseed
from coterie.mechanisms.events import Neighbourhood

NAME = "femnist"
LOSS_NAMES = ("cross entropy", "RMSE")
COLUMNS = {
    "accuracy": "the paper's metric",
    "honest_accuracy": "honest metric",
    "fine_tuned_accuracy": "honest, fine-tuned",
}
KINDS = ("", "k = 1", "no re-seeding", "fixed neighbourhood")  # what is different about a run

Record = dict[str, Any]


def draw(result: Mapping[str, Any], folder: Path | None) -> None:
    """Accuracy over ν: the table's runs as lines, the others' honest metric as single marks."""
    figure, axes = new_figure(2, height=4.2, share_y=True)
    multipliers = sorted({record["nu"] for record in result["runs"]})
    for axis, loss in zip(axes, LOSS_NAMES, strict=True):
        own = by_multiplier(result["runs"], loss)
        for index, (name, label) in enumerate(COLUMNS.items()):
            places, heights = [multipliers.index(nu) for nu in own], [mean(found, name) for found in own.values()]
            axis.plot(places, heights, color=COLOURS[index], marker=MARKERS[index], label=label)
        for index, (label, found) in enumerate(others(result["runs"], loss).items(), len(COLUMNS)):
            places = [multipliers.index(nu) for nu in found]
            heights = [mean(records, "honest_accuracy") for records in found.values()]
            axis.scatter(places, heights, s=60, color=COLOURS[index], marker=MARKERS[index], label=f"honest, {label}")
        axis.set_xticks(range(len(multipliers)), [f"{nu:g}" for nu in multipliers])
        axis.set(xlabel="noise multiplier ν", title=f"{loss}: k = 2, relative neighbourhood")
        axis.legend(fontsize=8)
    axes[0].set_ylabel("accuracy of held-out writers in %")
    write_figure(NAME, "accuracy.png", figure, folder)


def by_multiplier(found: Sequence[Record], loss: str, different: str = "") -> dict[float, list[Record]]:
    """The runs of a loss by ν: those of the paper's table, or of another kind."""
    own = [record for record in found if record["loss"] == loss and kind(record) == different]
    return {nu: [record for record in own if record["nu"] == nu] for nu in sorted({record["nu"] for record in own})}


def others(found: Sequence[Record], loss: str) -> dict[str, dict[float, list[Record]]]:
    """The other runs of a loss, by what is different about them and by ν."""
    groups = {different: by_multiplier(found, loss, different) for different in KINDS[1:]}
    return {different: own for different, own in groups.items() if own}


def kind(record: Record) -> str:
    """What is different about a run; empty for those of the paper's table."""
    if record["k"] == 1:
        return "k = 1"
    if record["neighbourhood"] == Neighbourhood.FIXED.value:
        return "fixed neighbourhood"
    return "no re-seeding" if record["reseed"] == Reseed.OFF.value else ""


def mean(found: Sequence[Record], name: str) -> float:
    """The mean over seeds of a figure; NaN where a run has none."""
    return float(np.mean([math.nan if record[name] is None else record[name] for record in found]))


def unrest(found: Sequence[Record]) -> float:
    """The most that accuracy moves between two validations of the last third of a run, in points."""
    steps = [0.0]
    for record in found:
        late = [accuracy for number, _, accuracy in record["history"] if number >= record["rounds"] * 2 / 3]
        steps += [abs(after - before) for before, after in pairwise(late)]
    return max(steps)


def blocks(result: Mapping[str, Any]) -> dict[str, str]:
    """The measured parts of the section."""
    found = result["runs"]
    return {
        "extent": _extent(result),
        "table": _table(found),
        "clusters": _clusters(found),
        "price": _price(result),
        "verdict": _verdict(found),
    }


def _extent(result: Mapping[str, Any]) -> str:
    data, found = result["data"], result["runs"]
    seeds = len({record["seed"] for record in found})
    missing = result["planned"] - len(found)
    cut = f", {missing} of them not run for want of time" if missing else ""
    return (
        f"{data['images']:,} images of {data['classes']} classes by {data['writers']} writers, of whom "
        f"{data['turned']} are turned. {result['planned']} runs were planned{cut}; {seeds} "
        f"seed{'s' if seeds > 1 else ''} each, at most {result['rounds']} rounds (the paper: 500), "
        f"U = {result['clients_per_round']}."
    )


def _order(record: Record) -> tuple[Any, ...]:
    return LOSS_NAMES.index(record["loss"]), KINDS.index(kind(record)), record["nu"], record["seed"]


def _table(found: Sequence[Record]) -> str:
    rows = []
    for record in sorted(found, key=_order):
        rows.append(
            (
                record["loss"],
                kind(record) or "k = 2, relative",
                f"{record['nu']:g}",
                *(_shown(record[name], ".1f") for name in COLUMNS),
                _shown(record["held_out_loss"], ".3f"),
                f"{record['best_round']} of {record['rounds']}",
            )
        )
    head = ("loss", "run", "ν", *COLUMNS.values(), "held-out loss", "best round")
    return table(head, rows)


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _clusters(found: Sequence[Record]) -> str:
    rows = []
    for record in sorted(found, key=_order):
        if record["k"] > 1:
            rows.append(
                (
                    record["loss"],
                    kind(record) or "k = 2, relative",
                    f"{record['nu']:g}",
                    " / ".join(map(str, record["upright"])),
                    " / ".join(map(str, record["turned"])),
                    f"{record['purity']:.2f}",
                    "yes" if record["collapsed"] else "no",
                    str(record["reseeded"]),
                )
            )
    head = ("loss", "run", "ν", "upright writers by hypothesis", "turned writers", "purity", "collapsed", "re-seeded")
    return table(head, rows)


def _price(result: Mapping[str, Any]) -> str:
    rows = [
        (
            record["loss"],
            f"{record['nu']:g}",
            str(record["releases"]),
            rounded_up(record["pure"]),
            rounded_up(record["tight"]),
        )
        for record in sorted(result["runs"], key=_order)
        if record["formal"]
    ]
    if not rows:
        return "No run with the fixed neighbourhood is finished, and no other has a guarantee."
    n = result["parameters"]
    return (
        table(("loss", "ν", "most releases of a writer", "pure ε within the radius", "tight ε, δ = 1e-5"), rows)
        + f"\n\nWith n = {n:,} parameters one release is about as private as a Gaussian mechanism of μ = √n/ν: "
        f"{math.sqrt(n):,.0f} at ν = 1. A μ of 1 would take ν = {math.sqrt(n):,.0f}."
    )


def _verdict(found: Sequence[Record]) -> str:
    sentences = []
    for loss in LOSS_NAMES:
        own = by_multiplier(found, loss)
        if not own:
            continue
        accuracy = {nu: mean(records, "honest_accuracy") for nu, records in own.items()}
        gain = {nu: mean(records, "fine_tuned_accuracy") - accuracy[nu] for nu, records in own.items()}
        best, worst = max(accuracy, key=accuracy.__getitem__), min(accuracy, key=accuracy.__getitem__)
        mixed = [f"{nu:g}" for nu, records in own.items() if any(record["purity"] < 1 for record in records)]
        sentences.append(
            f"**{loss}:** best at ν = {best:g} with an honest accuracy of {accuracy[best]:.1f} %, worst at "
            f"ν = {worst:g} with {accuracy[worst]:.1f} %. Fine-tuning changes it by {min(gain.values()):+.1f} to "
            f"{max(gain.values()):+.1f} points. Clusters that mix upright and turned writers: "
            f"{'at ν = ' + ', '.join(mixed) if mixed else 'none'}. Late in a run the accuracy moves by up to "
            f"{unrest([record for records in own.values() for record in records]):.1f} points from one validation to "
            "the next, so small differences between single runs say little."
        )
        for label, others_own in others(found, loss).items():
            for nu, records in others_own.items():
                at, tuned = mean(records, "honest_accuracy"), mean(records, "fine_tuned_accuracy")
                beside = f" in place of {accuracy[nu]:.1f} %" if nu in accuracy else ""
                beside_tuned = f" in place of {accuracy[nu] + gain[nu]:.1f} %" if nu in accuracy else ""
                sentences.append(
                    f"With {label} at ν = {nu:g} it is {at:.1f} %{beside}, and fine-tuned {tuned:.1f} %{beside_tuned}."
                )
    return " ".join(sentences)
