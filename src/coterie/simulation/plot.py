"""The picture of a sweep."""

import io
import statistics
from collections.abc import Sequence
from typing import Any

from coterie.simulation.points import SWEPT, Record

_WORDS = {"k": "hypotheses k", "nu": "noise multiplier ν", "C": "clipping norm C", "T": "most rounds T"}
_SYMBOLS = {"nu": "ν"}
_MOST_TICKS = 12
_FAR_APART = 30  # a largest value so many times the least asks for a logarithmic axis
_MOST_INSIDE = 6  # lines whose legend fits in the picture


def sweep_plot(records: Sequence[Record], title: str) -> bytes:
    """A PNG: over the seeds, the metric's median with the range of all of them, and the honest metric's median dashed.

    The horizontal axis is the swept letter with most values (ties: ν first), a line for each combination of the
    others.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    values = {letter: sorted({record[letter] for record in records}) for letter in SWEPT if letter in records[0]}
    across = max(values, key=lambda letter: (len(values[letter]), letter == "nu"))
    others = [letter for letter in values if letter != across]
    lines: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        lines.setdefault(tuple(record[letter] for letter in others), []).append(record)
    colors = mpl.colormaps["viridis"]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    labelled: list[Any] = []
    for index, (key, own) in enumerate(sorted(lines.items())):
        color = colors(0.85 * index / max(1, len(lines) - 1))
        places, found = _by_value(own, across, values[across], "metric")
        axes.fill_between(places, list(map(min, found)), list(map(max, found)), alpha=0.15, color=color, linewidth=0)
        axes.plot(places, list(map(statistics.median, found)), marker="o", markersize=4, color=color)
        places, found = _by_value(own, across, values[across], "honest_metric")
        axes.plot(places, list(map(statistics.median, found)), marker="s", markersize=3, color=color, ls="--", lw=1)
        if others:
            named = zip(others, key, strict=True)
            label = ", ".join(f"{_SYMBOLS.get(letter, letter)} = {value:g}" for letter, value in named)
            labelled.append(Line2D([], [], color=color, label=label))
    seeds = len({record["seed"] for record in records})
    labelled += [
        Line2D([], [], color="gray", marker="o", markersize=4, label=f"metric, median of {seeds} seeds"),
        Patch(color="gray", alpha=0.3, linewidth=0, label="metric, least to largest of the seeds"),
        Line2D(
            [], [], color="gray", marker="s", markersize=3, ls="--", lw=1, label="honest metric, median of the seeds"
        ),
    ]
    least, largest = values[across][0], values[across][-1]
    if least > 0 and largest >= _FAR_APART * least:
        axes.set_xscale("log")
    if len(values[across]) <= _MOST_TICKS:
        axes.set_xticks(values[across], labels=[f"{value:g}" for value in values[across]], minor=False)
        axes.minorticks_off()
    axes.set(xlabel=_WORDS[across], ylabel=records[0]["metric_name"], title=title)
    axes.grid(alpha=0.3)
    if len(lines) <= _MOST_INSIDE:
        axes.legend(handles=labelled, fontsize=8)
    else:
        figure.legend(handles=labelled, fontsize=8, loc="outside right upper")
    figure.text(
        0.01,
        -0.01,
        "metric: each held-out client by the hypothesis that fits best the rows it is scored on; "
        "honest: chosen on half of its rows, scored on the other half",
        fontsize=7,
        color="dimgray",
        va="top",
    )
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format="png", bbox_inches="tight")
    plt.close(figure)
    return image.getvalue()


def _by_value(
    records: Sequence[Record], letter: str, values: Sequence[float], name: str
) -> tuple[list[float], list[list[float]]]:
    """The values of ``letter`` at which any seed has a figure called ``name``, and the seeds' figures there."""
    known = {
        value: [record[name] for record in records if record[letter] == value and record[name] is not None]
        for value in values
    }
    return [value for value in values if known[value]], [known[value] for value in values if known[value]]
