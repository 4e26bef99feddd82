"""``coterie simulate``: runs without a network, many seeds and settings at once."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Task as Bar
from rich.table import Table
from rich.text import Text

from coterie.config import Assignment, Reseed, Selection, Start
from coterie.errors import CoterieError
from coterie.mechanisms.events import Neighbourhood
from coterie.rounding import rounded_up
from coterie.terminal import say

if TYPE_CHECKING:
    from coterie.tasks import ClientData, Task

_OWN_DATA_CLIENTS = 100  # of a task that brings its own data, as many as the paper's synthetic experiment has


def simulate(
    task: Annotated[str, typer.Option(help="A built-in task, or package.module:attribute.")],
    data: Annotated[Path | None, typer.Option(help="The data file, for tasks that need one.")] = None,
    partition_by: Annotated[str | None, typer.Option(help="What makes a client, such as provider or zip.")] = None,
    clients: Annotated[
        int | None, typer.Option(help="N, the first so many clients (default: all; 100 of a task with its own data).")
    ] = None,
    hypotheses: Annotated[int, typer.Option(help="k, the number of hypotheses.")] = 3,
    noise_multiplier: Annotated[float, typer.Option(help="ν; 0 is no clipping and no noise, and has no price.")] = 3.0,
    rounds: Annotated[int, typer.Option(help="T, the most rounds.")] = 150,
    seeds: Annotated[int, typer.Option(help="How many runs, with seeds from 0; they run together.")] = 1,
    clients_per_round: Annotated[int, typer.Option(help="U, the clients that train in a round.")] = 100,
    validation_fraction: Annotated[float, typer.Option(help="The part of the clients that is held out.")] = 0.2,
    validate_every: Annotated[int, typer.Option(help="Rounds from one validation to the next.")] = 5,
    patience: Annotated[int, typer.Option(help="End after so many validations without a better one; 0: never.")] = 0,
    neighbourhood: Annotated[
        Neighbourhood, typer.Option(help="fixed: d-private. relative: the paper's heuristic, no guarantee.")
    ] = Neighbourhood.FIXED,
    clipping_norm: Annotated[float | None, typer.Option(help="C of every layer (default: the task's).")] = None,
    epochs: Annotated[int | None, typer.Option(help="E, local passes (default: the task's).")] = None,
    step_size: Annotated[float | None, typer.Option(help="Of local SGD (default: the task's).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Of local SGD (default: the task's).")] = None,
    bfloat16_selection: Annotated[
        bool,
        typer.Option(
            "--bfloat16-selection",
            help="Choose hypotheses by losses in bfloat16: faster for convolutions, not always the same choice, and in "
            "simulations only.",
        ),
    ] = False,
    start: Annotated[Start, typer.Option(help="Where the hypotheses start.")] = Start.INDEPENDENT,
    reseed: Annotated[Reseed, typer.Option(help="off: the published algorithm.")] = Reseed.ON,
    reseed_after: Annotated[int, typer.Option(help="Rounds without a choice after which one is re-seeded.")] = 5,
    assignment: Annotated[
        Assignment, typer.Option(help="client: it says which hypothesis it trained. server: the nearest to its vector.")
    ] = Assignment.CLIENT,
    selection: Annotated[
        Selection,
        typer.Option(
            help="Choice of hypothesis: argmin is not private; the others are, and priced where ν is above 0."
        ),
    ] = Selection.ARGMIN,
    selection_epsilon: Annotated[float | None, typer.Option(help="ε of a private choice, each round.")] = None,
    selection_loss_bound: Annotated[
        float | None, typer.Option(help="Losses are clipped to this (exponential).")
    ] = None,
    fine_tune_epochs: Annotated[
        int, typer.Option(help="In the end, local passes of each held-out client from its hypothesis, which it keeps.")
    ] = 0,
    fine_tune_step_size: Annotated[float | None, typer.Option(help="Of these passes (default: the task's).")] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE,… with NAME one of k, nu, C, T; several make a grid.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for results.parquet and, of a sweep, a plot; run the same again to go on."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="local, or HOST:PORT of a Ray cluster that this machine is in: grid points become its tasks."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where clients are computed: cpu, cuda or cuda:N.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, one object a run.")] = False,
) -> None:
    """Simulate federated runs on this machine: for choosing k, ν, C and T. The noise is seeded and protects nobody."""
    from coterie.simulation.processes import in_processes
    from coterie.simulation.rows import Rows
    from coterie.simulation.settings import SimulatedRun
    from coterie.simulation.sweep import MOST_SEEDS, Runner, Sweep, check_folder, grid, in_this_process, run_sweep
    from coterie.tasks import load_task

    points = grid(sweep or [])
    if sweep and out is None:
        raise CoterieError("Expected --out DIR with --sweep, found none: finished grid points are kept there")
    if not 1 <= seeds <= MOST_SEEDS:
        raise CoterieError(f"Expected --seeds to be from 1 to {MOST_SEEDS}, found {seeds}")
    base = SimulatedRun(
        hypotheses=hypotheses,
        noise_multiplier=noise_multiplier,
        rounds=rounds,
        clients_per_round=clients_per_round,
        validation_fraction=validation_fraction,
        validate_every=validate_every,
        patience=patience,
        neighbourhood=neighbourhood,
        clipping_norm=clipping_norm,
        epochs=epochs,
        step_size=step_size,
        batch_size=batch_size,
        bfloat16_selection=bfloat16_selection,
        start=start,
        reseed=reseed,
        reseed_after=reseed_after,
        assignment=assignment,
        selection=selection,
        selection_epsilon=selection_epsilon,
        selection_loss_bound=selection_loss_bound,
        fine_tune_epochs=fine_tune_epochs,
        fine_tune_step_size=fine_tune_step_size,
    )
    plan = Sweep(base, points, seeds, out)
    total = sum(run.rounds for point in points for run in plan.runs(point))
    found = load_task(task)
    # An accelerator is not shared by processes, and its rows are not sent to other machines.
    runner: Runner = in_processes if device == "cpu" else in_this_process
    if ray is not None and device != "cpu":
        raise CoterieError(f"Expected --ray or --device, found both: --ray {ray} --device {device}")
    if ray is not None:
        from coterie.simulation.cluster import over_ray

        runner = over_ray(ray)
    if out is not None:
        check_folder(out)
    rows = Rows.of(_clients(found, data, partition_by, clients)).on(device)
    console = Console(stderr=True)
    with Progress(*_columns(), console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(f"{len(points) * seeds} runs", total=total, found=0)
        records = run_sweep(
            found,
            rows,
            plan,
            runner=runner,
            on_found=lambda rounds: bars.update(bar, completed=rounds, found=rounds),
            on_rounds=lambda rounds: bars.update(bar, advance=rounds),
        )
    if as_json:
        print(json.dumps(records, indent=2, allow_nan=False))
    else:
        _print_table(records, list(points[0]), seeds)
    if len({point.get("k") for point in points}) > 1:
        _suggest(records, list(points[0]), say if as_json else Console().print)
    for point, own in _by_point(records, list(points[0])).items():
        if together := sum(record["collapsed"] for record in own):
            where = f" at {point}" if point else ""
            say(f"warning: in {together} of {len(own)} runs{where} (nearly) all clients take the same hypothesis")
    if out is not None:
        say(f"results: {out / 'results.parquet'}")


class _TimeLeft(ProgressColumn):
    """By the average pace since the start, in which points that were found finished have no part."""

    def render(self, task: Bar) -> Text:
        """``about 0:01:30 left``."""
        done = task.completed - task.fields["found"]
        if task.total is None or task.elapsed is None or done <= 0:
            return Text("time left unknown")
        left = task.elapsed * (task.total - task.completed) / done
        return Text(f"about {timedelta(seconds=math.ceil(left))} left")


def _columns() -> tuple[ProgressColumn, ...]:
    return TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), _TimeLeft()


def _clients(task: "Task", data: Path | None, partition_by: str | None, clients: int | None) -> "Sequence[ClientData]":
    from coterie.tasks import DataSource

    if task.needs_data and data is None:
        raise CoterieError(f"Expected --data FILE for task {task.name!r}, found none")
    if partition_by is not None and partition_by not in task.partitions:
        raise CoterieError(f"Expected --partition-by to be one of {', '.join(task.partitions)}, found {partition_by!r}")
    if clients is not None and clients < 1:
        raise CoterieError(f"Expected --clients to be at least 1, found {clients}")
    parts = clients or (1 if task.needs_data else _OWN_DATA_CLIENTS)
    dataset = task.read(DataSource(data, partition_by or task.partitions[0], parts))
    for note in dataset.notes:
        say(note)
    if clients is not None and clients > len(dataset.clients):
        raise CoterieError(f"Expected --clients to be at most {len(dataset.clients)}, found {clients}")
    return dataset.clients[:clients] if clients is not None else dataset.clients


def _by_point(records: Sequence[dict[str, Any]], letters: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(", ".join(f"{letter} = {record[letter]:g}" for letter in letters), []).append(record)
    return found


def _suggest(records: Sequence[dict[str, Any]], letters: Sequence[str], tell: Callable[[str], None]) -> None:
    """Which k to take."""
    from coterie.simulation.choosing import suggest

    for suggestion in (suggestions := suggest(records, letters)):
        tell(f"{suggestion}.")
    if suggestions:
        tell("That rests on the losses of held-out clients, which no price covers.")
    else:
        tell("No k is suggested: for that, two values need two --seeds each with held-out clients of two rows or more.")


def _print_table(records: Sequence[dict[str, Any]], letters: Sequence[str], seeds: int) -> None:
    console = Console()
    table = Table(title=records[0]["metric_name"], box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    tuned = any(record["fine_tuned_metric"] is not None for record in records)
    metrics = ("metric", "honest", *(("tuned",) if tuned else ()))
    for name in (*letters, *(("runs",) if letters else ("seed",)), *metrics, "rounds", "collapsed"):
        table.add_column(name, justify="right")
    for name in ("pure ε", "ε at δ = 1e-5", "any two"):
        table.add_column(name, justify="right", overflow="fold")  # a price is never cut short
    groups = _by_point(records, letters).values() if letters else [[record] for record in records]
    for own in groups:
        prices = [record["price"] for record in own if record["price"]]
        table.add_row(
            *(f"{own[0][letter]:g}" for letter in letters),
            str(seeds) if letters else str(own[0]["seed"]),
            _median([record["metric"] for record in own]),
            _median([record["honest_metric"] for record in own]),
            *([_median([record["fine_tuned_metric"] for record in own])] if tuned else []),
            _median([record["rounds"] for record in own]),
            str(sum(record["collapsed"] for record in own)),
            _most(prices, "pure"),
            _most(prices, "tight"),
            _most(prices, "local_tight"),
        )
    console.print(table)
    console.print(
        ("Medians over seeds; prices are the largest. " if letters else "")
        + "metric: each held-out client by the hypothesis that fits best the rows it is scored on; honest: chosen on "
        "half of its rows, scored on the other half"
        + ("; tuned: the same, after training on with the half that chose." if tuned else ".")
        + " The last three columns are the notes' pure, tight and local_tight.",
        style="dim",
    )
    for note in dict.fromkeys(note for record in records for note in (record["price"] or {}).get("notes", ())):
        console.print(f"Note: {note}.")


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.5g}" if known else "-"


def _most(prices: Sequence[dict[str, Any]], name: str) -> str:
    """The largest of some prices. The paper's heuristic has numbers too, which guarantee nothing and are not shown."""
    if not prices:
        return "none"
    if not all(price["formal"] for price in prices):
        return "no guarantee"
    return rounded_up(max(math.inf if price[name] is None else price[name] for price in prices))
