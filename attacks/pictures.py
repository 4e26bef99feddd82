"""The audit's pictures: originals beside reconstructions, and measures against ν and T beside what guesses reach."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.attacks.cells import Record, reconstruction_of
from coterie.attacks.plan import Condition, Material

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, made to be told apart with any kind of colour vision.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#B8A900")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_MOST_ROWS = 6  # images in a picture of reconstructions
_MOST_DECIBEL = 60.0
_MEASURES = {
    "psnr": "PSNR in dB (at most 60)",
    "ssim": "SSIM",
    "correlation": "correlation",
    "error": "error in standard deviations",
}

Cells = Mapping[tuple[str, Condition], Sequence[Record]]


@dataclass(frozen=True)
class Picture:
    """A PNG with the words for those who do not see it, and a caption."""

    file: str
    png: bytes
    alt: str
    caption: str


def pictures_of(results: Mapping[str, Any], cells: Cells, material: Material) -> list[Picture]:
    """All pictures that the results give."""
    import matplotlib as mpl

    mpl.use("Agg")
    found = list(_grids(cells, material)) if material.shape is not None else []
    rounds = list(dict.fromkeys(c["rounds"] for c in results["conditions"] if c["noise_multiplier"] > 0))
    for t in rounds or [1]:
        found += [*_measures(results, t), *_rates(results, t)]
    if len(rounds) > 1 and (picture := _against_rounds(results)) is not None:
        found.append(picture)
    return found


def _grids(cells: Cells, material: Material) -> list[Picture]:
    """For each attack that reconstructs and each T: originals, and what it made of them at each ν."""
    series: dict[tuple[str, int], dict[Condition, list[NDArray[np.float64]]]] = {}
    for (attack, condition), records in cells.items():
        made = [reconstruction_of(record, material) for record in records]
        if not any(images is None for images in made):
            images = [image for batch in made if batch is not None for image in batch][:_MOST_ROWS]
            series.setdefault((attack, condition.rounds), {})[condition] = images
    originals = [x.double().numpy() for batch in material.batches for x in batch.inputs][:_MOST_ROWS]
    found = []
    for (attack, rounds), columns in series.items():
        control = series.get((attack, 1), {})
        shown = {**{c: images for c, images in control.items() if c.is_control}, **columns}
        if not any(not condition.is_control for condition in shown) and rounds != 1:
            continue
        found.append(_grid(attack, rounds, originals, shown, material))
    return found


def _grid(
    attack: str,
    rounds: int,
    originals: Sequence[NDArray[np.float64]],
    columns: Mapping[Condition, Sequence[NDArray[np.float64]]],
    material: Material,
) -> Picture:
    from matplotlib.figure import Figure

    shape = material.shape
    assert shape is not None
    ordered = sorted(columns, key=lambda condition: condition.noise_multiplier)
    sheet = [[_pixels(image, shape) for image in originals]]
    sheet += [[_pixels(image, shape) for image in columns[condition]] for condition in ordered]
    gap = max(1, shape[1] // 10)
    padded = [[np.pad(x, ((gap, gap), (gap, gap), (0, 0)), constant_values=0.5) for x in column] for column in sheet]
    whole = np.concatenate([np.concatenate(column, axis=0) for column in padded], axis=1)
    figure = Figure(figsize=(0.95 * len(sheet) + 0.3, 0.95 * len(originals) + 0.7), layout="constrained")
    axes = figure.subplots()
    axes.imshow(whole, vmin=0, vmax=1, interpolation="nearest")
    width = shape[2] + 2 * gap
    names = ["original", *(f"ν = {_short(condition)}" for condition in ordered)]
    axes.xaxis.tick_top()
    axes.set_xticks([width * (i + 0.5) for i in range(len(names))], labels=names, fontsize=8)
    axes.set_yticks([])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    when = _when(rounds)
    return Picture(
        f"images-{attack}-T{rounds}.png",
        _png(figure),
        f"A grid of {len(originals)} images, one a row: the original, then what {attack} made of {when} at "
        f"{', '.join(names[1:])}. How near each is stands in the tables.",
        f"{attack}, {when}: originals and reconstructions",
    )


def _pixels(image: NDArray[np.float64], shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """(height, width, 3) in [0, 1]."""
    planes = np.clip(np.nan_to_num(image), 0, 1).reshape(shape)
    return np.repeat(planes[:1], 3, axis=0).transpose(1, 2, 0) if shape[0] != 3 else planes.transpose(1, 2, 0)


def _short(condition: Condition) -> str:
    if condition.local_epsilon is not None:
        return f"{condition.noise_multiplier:.2g}\n(ε {condition.local_epsilon:g})"
    return f"{condition.noise_multiplier:g}"


def _label(cell: Mapping[str, Any]) -> str:
    epsilon = cell["local_epsilon"]
    return f"{cell['noise_multiplier']:.3g}" + ("" if epsilon is None else f"\nε {epsilon:g}")


def _cells_at(results: Mapping[str, Any], rounds: int) -> list[Mapping[str, Any]]:
    """The cells with T rounds, and the control, by ν."""
    own = [c for c in results["cells"] if c["rounds"] == rounds or c["noise_multiplier"] == 0]
    return sorted(own, key=lambda cell: cell["noise_multiplier"])


def _lines(
    axes: "Axes",
    cells: Sequence[Mapping[str, Any]],
    value: Callable[[Mapping[str, Any]], tuple[float, float, float] | None],
) -> None:
    """A line per attack over the ν in equal steps. ``value`` gives (y, low, high) of a cell, or None."""
    places = {nu: i for i, nu in enumerate(dict.fromkeys(cell["noise_multiplier"] for cell in cells))}
    labels = {cell["noise_multiplier"]: _label(cell) for cell in cells}
    everyone = list(dict.fromkeys(cell["attack"] for cell in cells))
    for attack in everyone:
        values = [(places[c["noise_multiplier"]], value(c)) for c in cells if c["attack"] == attack]
        own = [(place, found) for place, found in values if found is not None]
        if not own:
            continue
        # Side by side, so that intervals do not hide each other.
        shift = 0.24 * ((everyone.index(attack) + 0.5) / len(everyone) - 0.5)
        x = np.array([place for place, _ in own]) + shift
        y = np.array([found for _, (found, _, _) in own])
        errors = np.abs(np.array([[y_ - low, high - y_] for y_, (_, (_, low, high)) in zip(y, own, strict=True)]).T)
        index = everyone.index(attack) % len(_COLOURS)
        axes.errorbar(
            x, y, errors if errors.max() > 0 else None, label=attack, color=_COLOURS[index], marker=_MARKERS[index],
            markersize=5, capsize=2, linewidth=1.4, elinewidth=0.8,
        )  # fmt: skip
    axes.set_xticks(range(len(places)), labels=[labels[nu] for nu in places])
    axes.set_xlabel("ν (noise's mean norm, in units of the neighbourhood's radius)")
    axes.grid(alpha=0.3)


def _measures(results: Mapping[str, Any], rounds: int) -> list[Picture]:
    """Medians of the measures against ν, with the band that guesses reach."""
    from matplotlib.figure import Figure

    cells = _cells_at(results, rounds)
    names = [name for name in _MEASURES if any(name in cell["medians"] for cell in cells)]
    if not names:
        return []
    figure = Figure(figsize=(7, 2.9 * len(names) + 0.6), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(len(names))), names, strict=True):
        _lines(axes, cells, partial(_median, name=name))
        _band(axes, results["controls"], name)
        axes.set_ylabel(f"{_MEASURES[name]}, median")
    _legend(figure, axes)
    said = "; ".join(_said(cell, names[0]) for cell in cells if names[0] in cell["medians"])
    guess = "band is the class-mean image" if "class_mean" in results["controls"] else "line is the mean row"
    return [
        Picture(
            f"measures-T{rounds}.png",
            _png(figure),
            f"Lines of the median {', '.join(_MEASURES[name] for name in names)} against ν. {said}.",
            f"How near reconstructions are after {_when(rounds)}, against ν; the grey {guess}, which needs no attack",
        )
    ]


def _median(cell: Mapping[str, Any], name: str) -> tuple[float, float, float] | None:
    """Without an interval. PSNR above 60 dB is drawn there: nobody sees the difference."""
    return None if name not in cell["medians"] else (_drawn(cell, name),) * 3


def _drawn(cell: Mapping[str, Any], name: str) -> float:
    value: float = cell["medians"][name]
    return min(value, _MOST_DECIBEL) if name == "psnr" else value


def _when(rounds: int) -> str:
    return "one round" if rounds == 1 else f"{rounds} rounds"


def _legend(figure: "Figure", axes: "Axes") -> None:
    """One for all panels, below them, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)


def _band(axes: "Axes", controls: Mapping[str, Any], name: str) -> None:
    if "class_mean" in controls and name in controls["class_mean"]:
        low, middle, high = controls["class_mean"][name]
        axes.axhspan(low, high, color="gray", alpha=0.25, linewidth=0, label="class-mean image, 5 % to 95 %")
        axes.axhline(middle, color="gray", linewidth=1)
        axes.axhline(controls["black"][name][1], color="gray", linestyle=":", label="black image, median")
    elif "mean_row" in controls and name in controls["mean_row"]:
        axes.axhline(controls["mean_row"][name], color="gray", label="the mean row, median")


def _said(cell: Mapping[str, Any], name: str) -> str:
    return f"{cell['attack']} at ν = {cell['noise_multiplier']:g}: {cell['medians'][name]:.3g}"


_RATE_TITLES = {
    "full": "fully reconstructed",
    "recognisable": "recognisable",
    "identified": "identified among others of the class",
    "label": "class inferred",
    "cluster": "chosen hypothesis guessed",
}


def _rates(results: Mapping[str, Any], rounds: int) -> list[Picture]:
    """One picture of the rates of each level that any attack speaks of."""
    from matplotlib.figure import Figure

    cells = _cells_at(results, rounds)
    found = []
    for level, title in _RATE_TITLES.items():
        if not any(level in cell["rates"] for cell in cells):
            continue
        figure = Figure(figsize=(7, 3.8), layout="constrained")
        axes = figure.subplots()
        _lines(axes, cells, partial(_rate, level=level))
        if (chance := results["chances"][level]) > 0:
            axes.axhline(chance, color="gray", linestyle="--", linewidth=1, label=f"chance, {chance:.1%}")
        axes.set(ylabel=f"share {title}", ylim=(-0.04, 1.04))
        _legend(figure, axes)
        said = "; ".join(
            f"{cell['attack']} at ν = {cell['noise_multiplier']:g}: {cell['rates'][level]['hits']} of "
            f"{cell['rates'][level]['trials']}"
            for cell in cells
            if level in cell["rates"]
        )
        found.append(
            Picture(
                f"rate-{level}-T{rounds}.png",
                _png(figure),
                f"Share {title} against ν. {said}.",
                f"Share {title} after {_when(rounds)}, against ν, with 95 % intervals",
            )
        )
    return found


def _rate(cell: Mapping[str, Any], level: str) -> tuple[float, float, float] | None:
    rate = cell["rates"].get(level)
    return None if rate is None else (rate["hits"] / rate["trials"], rate["low"], rate["high"])


def _against_rounds(results: Mapping[str, Any]) -> Picture | None:
    """The best attack's measure against T, a line for each ν."""
    from matplotlib.figure import Figure

    name = next((name for name in _MEASURES if any(name in cell["medians"] for cell in results["cells"])), None)
    cells = [c for c in results["cells"] if name in c["medians"] and c["noise_multiplier"] > 0]
    if name is None or not cells:
        return None
    better = min if name == "error" else max
    figure = Figure(figsize=(7, 4.0), layout="constrained")
    axes = figure.subplots()
    said = []
    levels = sorted({cell["noise_multiplier"] for cell in cells})
    for i, nu in enumerate(levels):
        own = [cell for cell in cells if cell["noise_multiplier"] == nu]
        rounds = sorted({cell["rounds"] for cell in own})
        best = [better(_drawn(cell, name) for cell in own if cell["rounds"] == t) for t in rounds]
        index = i % len(_COLOURS)
        axes.plot(rounds, best, label=f"ν = {nu:.3g}", color=_COLOURS[index], marker=_MARKERS[index], markersize=5)
        said += [f"ν = {nu:g}, T = {t}: {value:.3g}" for t, value in zip(rounds, best, strict=True)]
    _band(axes, results["controls"], name)
    axes.set_xscale("log")
    every = sorted({cell["rounds"] for cell in cells})
    axes.set_xticks(every, labels=[str(t) for t in every])
    axes.minorticks_off()
    axes.set(xlabel="T, rounds of the same rows at the same weights", ylabel=f"{_MEASURES[name]}, median")
    axes.grid(alpha=0.3)
    _legend(figure, axes)
    return Picture(
        "rounds.png",
        _png(figure),
        f"The best attack's median {_MEASURES[name]} against the number of rounds. {'; '.join(said)}.",
        "The best attack against the number of rounds: averaging T releases divides the noise by √T",
    )


def _png(figure: "Figure") -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
    return image.getvalue()
