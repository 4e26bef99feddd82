"""``dlg-eval``, also ``coterie attack``: what a curious server could rebuild from what a data holder sends."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.config import Granularity
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.terminal import one_command, say

_DATA_HELP = "The data file, for tasks that need one."
_SHORT = {"full": "full", "recognisable": "recog.", "identified": "ident.", "label": "class", "cluster": "hypoth."}


def attack(
    task: Annotated[str, typer.Option(help="A built-in task, or package.module:attribute.")],
    out: Annotated[
        Path,
        typer.Option(
            help="A folder for report.html, pictures and results.json. Run the same again to go on after an interruption; more --nu, --rounds or --attacks are added."
        ),
    ],
    data: Annotated[Path | None, typer.Option(help=_DATA_HELP)] = None,
    model: Annotated[
        str,
        typer.Option(
            help="task: its own. twin: its own, with sigmoids and averaging in place of what is not twice differentiable. lenet, cnn: the networks of the literature."
        ),
    ] = "twin",
    init: Annotated[
        str,
        typer.Option(help="Weights of each row's client: default (the task's random start) or dlg (uniform in ±½)."),
    ] = "default",
    trained: Annotated[Path | None, typer.Option(help="A saved model (.safetensors) as the weights instead.")] = None,
    images: Annotated[int, typer.Option(help="How many images, or rows of a table, are attacked.")] = 20,
    nu: Annotated[
        str | None,
        typer.Option(
            help="Noise multipliers ν, such as 0,1,10. ν = 0, the audit's control, is always run. (default: 0.1,1,3,10; none with --local-epsilon)"
        ),
    ] = None,
    local_epsilon: Annotated[
        str | None,
        typer.Option(help="Local budgets ε of one release, such as 1,2,4, with --neighbourhood fixed: ν is then 2n/ε."),
    ] = None,
    attacks: Annotated[str | None, typer.Option(help="Names such as idlg,map-pca. (default: all that apply)")] = None,
    rounds: Annotated[
        str,
        typer.Option(
            help="T, numbers of rounds in which the same rows are sent from the same weights, such as 1,10,100."
        ),
    ] = "1",
    batch: Annotated[int, typer.Option(help="B, rows in the client's batch.")] = 1,
    local_steps: Annotated[int, typer.Option(help="Local SGD steps on that batch.")] = 1,
    step_size: Annotated[float | None, typer.Option(help="Of local SGD. (default: the task's)")] = None,
    granularity: Annotated[
        Granularity, typer.Option(help="What is clipped and noised by itself: each layer, or the whole update.")
    ] = Granularity.LAYER,
    layers: Annotated[
        bool, typer.Option(help="Predict, without an attack, what each layer gives away of an image.")
    ] = True,
    neighbourhood: Annotated[
        Neighbourhood,
        typer.Option(help="relative: the paper's, no guarantee. fixed: clipped to public radii, d-private."),
    ] = Neighbourhood.RELATIVE,
    clipping_norm: Annotated[
        float | None, typer.Option(help="Radius C of every layer, with --neighbourhood fixed. (default: the task's)")
    ] = None,
    prior: Annotated[
        str | None,
        typer.Option(
            help="A file of rows that the server knows, for priors; none: it knows none. (default: the other rows of --data)"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes. The figures do not depend on it. (default: one per core)")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of rows, weights, noise and attacks. Seeded noise is for audits only.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json on standard output.")] = False,
) -> None:
    """Attack what a client's own gate lets out, and report what comes back. Nothing is sent anywhere.

    A leak that is found is real. One that is not says what these attacks did not do, and nothing about better ones.
    """
    if workers is not None and workers < 1:
        raise CoterieError(f"Expected --workers to be at least 1, found {workers}")
    budgets = _numbers("--local-epsilon", local_epsilon or "")
    default = "" if budgets else "0.1,1,3,10"
    values = _numbers("--nu", default if nu is None else nu)
    if nu is not None and not values:
        raise CoterieError("Expected --nu to hold numbers such as 0,1,10, found none")
    counts = _numbers("--rounds", rounds)
    if any(t != int(t) for t in counts):
        raise CoterieError(f"Expected --rounds to hold whole numbers, found {rounds!r}")
    names = tuple(name.strip() for name in (attacks or "").split(",") if name.strip())
    if attacks is not None and not names:
        raise CoterieError("Expected --attacks to hold names such as idlg,label, found none")

    from coterie.attacks.audit import run_audit
    from coterie.attacks.plan import AuditSettings
    from coterie.attacks.results import as_json as text_of

    settings = AuditSettings(
        task=task,
        data=data,
        model=model,
        init=init,
        trained=trained,
        prior=prior,
        images=images,
        noise_multipliers=values,
        local_epsilons=budgets,
        attacks=names,
        rounds=tuple(int(t) for t in counts),
        batch_size=batch,
        local_steps=local_steps,
        step_size=step_size,
        granularity=granularity,
        layers=layers,
        neighbourhood=neighbourhood,
        clipping_norm=clipping_norm,
        seed=seed,
    )
    results = _with_bar(run_audit, settings, out, workers or len(os.sched_getaffinity(0)))
    if as_json:
        print(text_of(results), end="")
    else:
        _print(results)
    for note in results["notes"]:
        say(f"note: {note}")
    say(f"report: {out / 'report.html'}")


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """``1,3`` as numbers. Raises ``CoterieError`` for anything else."""
    try:
        return tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError as error:
        raise CoterieError(f"Expected {option} to hold numbers such as 1,10, found {text!r}") from error


def _with_bar(run: Any, settings: Any, out: Path, processes: int) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("attacks", total=None)

        def planned(total: int, found: int) -> None:
            if found:
                bars.console.print(f"{found} of {total} attacks were finished before")
            bars.reset(bar, total=total, completed=found)

        found: dict[str, Any] = run(
            settings, out, processes=processes, on_plan=planned, on_cell=lambda: bars.advance(bar)
        )
    return found


def _print(results: Mapping[str, Any]) -> None:
    """The table and the verdict, for people."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from coterie.attacks.report import noise_of
    from coterie.attacks.verdict import LEVELS

    console = Console()
    cells = results["cells"]
    levels = [level for level in LEVELS if any(level in cell["rates"] for cell in cells)]
    measures = {"psnr": "PSNR, dB", "ssim": "SSIM", "correlation": "corr.", "error": "error"}
    measures = {m: name for m, name in measures.items() if any(m in cell["medians"] for cell in cells)}
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1),
        title=f"{results['settings']['images']} {results['noun']} of {results['settings']['task']}",
    )
    for name in ("attack", "ν", "T", *(_SHORT[level] for level in levels), *measures.values()):
        table.add_column(name, justify="left" if name == "attack" else "right")
    for cell in cells:
        table.add_row(
            cell["attack"],
            noise_of(cell),
            str(cell["rounds"]),
            *(_share(cell["rates"].get(level)) for level in levels),
            *(_median(cell["medians"].get(m), m) for m in measures),
        )
    for key, name in (("class_mean", "class mean"), ("black", "black")):
        if measures and key in results["controls"]:
            medians = results["controls"][key]
            blank = [""] * (2 + len(levels))
            shown = [_median(medians[m][1] if m in medians else None, m) for m in measures]
            table.add_row(name, *blank, *shown, style="dim")
    console.print(table)
    console.print("Shares with 95 % intervals (Wilson); medians over rows.", style="dim")
    verdict = results["verdict"]
    console.print(verdict["validity"], style="" if verdict["valid"] else "bold red")
    for sentence in verdict["found"]:
        console.print(f"Leak: {sentence}", style="bold")
    for sentence in verdict["stopped"]:
        console.print(f"Not found: {sentence}")
    if not verdict["found"]:
        console.print("No leak was found by these attacks; that says nothing about better ones.")


def _median(value: float | None, measure: str) -> str:
    return "–" if value is None else f"{value:{'.1f' if measure == 'psnr' else '.2f'}}"


def _share(rate: Mapping[str, Any] | None) -> str:
    if rate is None:
        return "–"
    return f"{rate['hits']}/{rate['trials']}\n[dim]{100 * rate['low']:.0f}–{rate['high']:.0%}[/dim]"


def main() -> None:
    """The entry point."""
    one_command("dlg-eval", attack)
