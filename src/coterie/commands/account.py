"""``coterie account`` and ``coterie calibrate``: what a plan of releases costs, and what plan meets a target."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coterie.errors import CoterieError
from coterie.rounding import rounded_up

_LIMIT_NOTE = (
    "The Gaussian limit is what very many parameters would cost. It is no bound: at few parameters the true ε may be "
    "above or below it."
)

Dimension = Annotated[int | None, typer.Option(help="n, the number of parameters of a whole-vector release.")]
Layers = Annotated[str | None, typer.Option(help="Layer sizes in place of --dimension, for example 8,3.")]
Delta = Annotated[float, typer.Option(help="δ of the (ε, δ) prices, above 0 and below 1.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; null stands for infinite.")]

_MOST_ROUNDS = 10_000_000


def account(
    noise_multiplier: Annotated[float, typer.Option(help="ν: the noise's mean norm over the radius of the update.")],
    dimension: Dimension = None,
    layers: Layers = None,
    rounds: Annotated[int, typer.Option(help="How many releases one client makes.")] = 1,
    delta: Delta = 1e-5,
    as_json: AsJson = False,
) -> None:
    """Show what releases at a noise multiplier cost: pure and (ε, δ), within the radius and for any two values."""
    from coterie.mechanisms.calibration import planned_ledger

    sizes = _sizes(dimension, layers)
    _check_rounds(rounds)
    plan = planned_ledger(layers=sizes, noise_multiplier=noise_multiplier, rounds=rounds)
    price, limit = plan.price(delta=delta), plan.gaussian_limit(delta=delta)
    answer = {
        "dimension": sum(sizes),
        "layers": sizes,
        "noise_multiplier": noise_multiplier,
        "rounds": rounds,
        "delta": delta,
        "pure": price.pure,
        "tight": price.tight,
        "local_pure": price.local_pure,
        "local_tight": price.local_tight,
        "gaussian_limit": limit,
        "formal": price.formal,
        "notes": [*price.notes, _LIMIT_NOTE],
    }
    if as_json:
        _print_json(answer)
        return
    table = Table(title=f"{_times(rounds)} of {_parameters(sizes)} at ν = {noise_multiplier:g}")
    table.add_column("data sets compared")
    table.add_column("pure ε", justify="right")
    table.add_column(f"ε at δ = {delta:g}", justify="right")
    table.add_row("updates within the radius of each other", rounded_up(price.pure), rounded_up(price.tight))
    table.add_row("any two, from the same hypothesis", rounded_up(price.local_pure), rounded_up(price.local_tight))
    table.add_row("within the radius, Gaussian limit: no bound", "", rounded_up(limit), style="dim")
    console = Console()
    console.print(table)
    console.print(
        "The radius is the clipping norm C of each layer. Pure ε bounds the log-ratio of the probabilities of all that "
        f"was sent. ε at δ is the smallest, rounded up, at which all of it is (ε, δ) indistinguishable. {_LIMIT_NOTE}",
        style="dim",
    )
    for note in price.notes:
        console.print(f"Note: {note}.")


def calibrate(
    epsilon: Annotated[float, typer.Option(help="ε that all rounds together may cost.")],
    rounds: Annotated[int, typer.Option(help="How many releases one client makes.")],
    dimension: Dimension = None,
    layers: Layers = None,
    delta: Delta = 1e-5,
    compare: Annotated[
        bool, typer.Option("--compare", help="Set Gaussian noise of equal mean norm beside it.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw ε against rounds into this image file (.png, .svg).")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the noise multiplier ν that keeps releases within ε, rounded up to the safe side."""
    from coterie.mechanisms.calibration import compare_with_gaussian, noise_multipliers

    sizes = _sizes(dimension, layers)
    if plot is not None:
        _check_plot(plot)
    _check_rounds(rounds)
    found = noise_multipliers(epsilon=epsilon, delta=delta, rounds=rounds, layers=sizes)
    answer: dict[str, Any] = {
        "dimension": sum(sizes),
        "layers": sizes,
        "epsilon": epsilon,
        "delta": delta,
        "rounds": rounds,
        "noise_multiplier": found.tight,
        "noise_multipliers": {
            "pure": found.pure,
            "tight": found.tight,
            "local_pure": found.local_pure,
            "local_tight": found.local_tight,
        },
    }
    if compare:
        comparison = compare_with_gaussian(noise_multiplier=found.tight, delta=delta, rounds=rounds, layers=sizes)
        answer["comparison"] = {
            "l2_laplace": comparison.laplace,
            "gaussian": comparison.gaussian,
            "gaussian_noise_multiplier": comparison.gaussian_noise_multiplier,
            "better": "l2_laplace" if comparison.laplace < comparison.gaussian else "gaussian",
        }
    if plot is not None:
        _plot(plot, sizes, found.tight, rounds, delta, epsilon)
        answer["plot"] = str(plot)
    if as_json:
        _print_json(answer)
    else:
        _print_calibration(answer)


def _print_calibration(answer: dict[str, Any]) -> None:
    delta, found = answer["delta"], answer["noise_multipliers"]
    table = Table(
        title=f"ν for ε = {answer['epsilon']:g}: {_times(answer['rounds'])} of {_parameters(answer['layers'])}"
    )
    table.add_column("data sets compared")
    table.add_column("as pure ε", justify="right")
    table.add_column(f"as ε at δ = {delta:g}", justify="right")
    table.add_row("updates within the radius of each other", rounded_up(found["pure"]), rounded_up(found["tight"]))
    table.add_row(
        "any two, from the same hypothesis", rounded_up(found["local_pure"]), rounded_up(found["local_tight"])
    )
    console = Console()
    console.print(table)
    console.print(
        f"--noise-multiplier {rounded_up(found['tight'])}: noise whose mean norm is so many times the clipping norm C "
        "of each layer, in every release.",
        style="dim",
    )
    if "comparison" in answer:
        console.print(_comparison_line(answer["comparison"], delta))
    if "plot" in answer:
        console.print(f"ε against rounds: {answer['plot']}")


def _comparison_line(comparison: dict[str, Any], delta: float) -> str:
    words = {"l2_laplace": "L2 Laplace is better here", "gaussian": "Gaussian is better here"}
    return (
        f"At the same mean noise norm, and δ = {delta:g}: L2 Laplace ε = {rounded_up(comparison['l2_laplace'])}, "
        f"Gaussian ε = {rounded_up(comparison['gaussian'])}. {words[comparison['better']]}. Gaussian noise would need "
        f"the noise multiplier {rounded_up(comparison['gaussian_noise_multiplier'])} for the same ε, and has no pure ε "
        "at all."
    )


def _plot(path: Path, sizes: Sequence[int], noise_multiplier: float, rounds: int, delta: float, target: float) -> None:
    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from coterie.mechanisms.calibration import planned_ledger

    steps = sorted({round(step) for step in np.geomspace(1, rounds, 30)} | {1, rounds})
    plans = [planned_ledger(layers=sizes, noise_multiplier=noise_multiplier, rounds=step) for step in steps]
    prices = [plan.price(delta=delta) for plan in plans]
    limits = [plan.gaussian_limit(delta=delta) for plan in plans]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(steps, [price.pure for price in prices], label="pure ε", color="tab:red", marker=".")
    axes.plot(steps, [price.tight for price in prices], label=f"ε at δ = {delta:g}", color="tab:blue", marker=".")
    axes.plot(steps, limits, label="Gaussian limit (no bound)", color="tab:gray", linestyle=":")
    axes.axhline(target, color="black", linewidth=0.8, linestyle="--", label=f"target ε = {target:g}")
    axes.set(xlabel="releases of one client", ylabel="ε, updates within the radius", xscale="log", yscale="log")
    axes.set_title(f"{_parameters(sizes)}, ν = {rounded_up(noise_multiplier)}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _check_plot(path: Path) -> None:
    if path.suffix not in {".png", ".svg", ".pdf"}:
        raise CoterieError(f"Expected --plot to end in .png, .svg or .pdf, found {str(path)!r}")
    if not path.parent.is_dir():
        raise CoterieError(f"Expected --plot in a folder that exists, found {str(path.parent)!r}: make it first")


def _sizes(dimension: int | None, layers: str | None) -> list[int]:
    if dimension is not None and layers is not None:
        raise CoterieError("Expected one of --dimension and --layers, found both: leave one out")
    if dimension is not None:
        return [dimension]
    if layers is None:
        raise CoterieError("Expected one of --dimension and --layers, found neither: give one")
    try:
        return [int(size) for size in layers.split(",")]
    except ValueError as error:
        raise CoterieError(f"Expected --layers to be sizes such as 8,3, found {layers!r}") from error


def _times(rounds: int) -> str:
    return "1 release" if rounds == 1 else f"{rounds:,} releases"


def _parameters(sizes: Sequence[int]) -> str:
    if len(sizes) == 1:
        return f"{sizes[0]:,} parameters" if sizes[0] > 1 else "1 parameter"
    return f"{sum(sizes):,} parameters in {len(sizes)} layers"


def _print_json(answer: dict[str, Any]) -> None:
    print(json.dumps(_finite(answer), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_rounds(rounds: int) -> None:
    """Tables of composed losses grow with the rounds: beyond this they would fill the memory."""
    if rounds > _MOST_ROUNDS:
        raise CoterieError(f"Expected at most {_MOST_ROUNDS:,} rounds, found {rounds:,}")
