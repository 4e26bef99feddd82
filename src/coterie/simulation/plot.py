"""The picture of a sweep."""

import io
import statistics
from collections.abc import Sequence
from typing import Any

from coterie.simulation.sweep import SWEPT

_WORDS = {"k": "hypotheses k", "nu": "noise multiplier ν", "C": "clipping norm C", "T": "rounds T"}


def sweep_plot(records: Sequence[dict[str, Any]]) -> bytes:
    """A PNG: the metric's median over seeds with its range, and the honest metric's median dashed beside it.

    The horizontal axis is the swept letter with most values (ties: ν first), a line for each combination of the
    others.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    values = {letter: sorted({record[letter] for record in records}) for letter in SWEPT if letter in records[0]}
    across = max(values, key=lambda letter: (len(values[letter]), letter == "nu"))
    others = [letter for letter in values if letter != across]
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        lines.setdefault(tuple(record[letter] for letter in others), []).append(record)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for index, (key, own) in enumerate(sorted(lines.items())):
        label = ", ".join(f"{letter} = {value:g}" for letter, value in zip(others, key, strict=True)) or "median"
        places = [value for value in values[across] if _all(own, across, value, "metric")]
        metrics = [_all(own, across, value, "metric") for value in places]
        middle = [statistics.median(found) for found in metrics]
        axes.plot(places, middle, label=label, marker="o", color=f"C{index}")
        axes.fill_between(places, list(map(min, metrics)), list(map(max, metrics)), alpha=0.15, color=f"C{index}")
        honest = [(value, _all(own, across, value, "honest_metric")) for value in places]
        honest = [(value, found) for value, found in honest if found]
        axes.plot(
            [value for value, _ in honest],
            [statistics.median(found) for _, found in honest],
            color=f"C{index}",
            linestyle="--",
            linewidth=1,
        )
    seeds = len({record["seed"] for record in records})
    axes.set(xlabel=_WORDS[across], ylabel=records[0]["metric_name"])
    axes.set_title(f"median and range of {seeds} seeds; dashed: honest metric")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format="png")
    plt.close(figure)
    return image.getvalue()


def _all(records: Sequence[dict[str, Any]], letter: str, value: float, name: str) -> list[float]:
    return [record[name] for record in records if record[letter] == value and record[name] is not None]
