"""The server as one process (``flower-server``), and as a stock Flower ServerApp."""

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from coterie.address import Address
from coterie.config import RunSettings, load_settings
from coterie.errors import CoterieError
from coterie.server.engine import superlink
from coterie.server.history import (
    SETTINGS_FILE,
    SUMMARY_FILE,
    RoundRecord,
    Summary,
    append_round,
    open_folder,
    save_hypotheses,
    summarize,
    write_json,
)
from coterie.server.hypotheses import initial_hypotheses
from coterie.server.strategy import KHypotheses
from coterie.tasks import Task, load_task
from coterie.terminal import say


def serve(settings: RunSettings, *, log: Callable[[str], None]) -> Summary:
    """One whole run with an embedded SuperLink. Raises ``CoterieError`` for settings that cannot work."""
    address, task = Address.parse(settings.listen, option="--listen"), load_task(settings.task)
    with superlink(address) as grid:
        log(f"listening on {grid.address}")
        return run(settings, task, grid, grid.identities, log=log)


def run(
    settings: RunSettings,
    task: Task,
    grid: Grid,
    identities: Callable[[], dict[int, str]],
    *,
    log: Callable[[str], None],
) -> Summary:
    """Run the strategy on any grid and write ``settings.out``."""
    out = settings.out
    initial, layout = initial_hypotheses(task, settings.hypotheses, settings.seed, settings.start)
    open_folder(out)
    run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    write_json(out / SETTINGS_FILE, {"run": run_id, **settings.model_dump(mode="json")})

    def on_round(record: RoundRecord) -> None:
        log(_line(record, settings.rounds, task.metric))
        try:
            append_round(out, record)
        except CoterieError as error:  # the run is worth more than its history
            log(f"warning: {error}")

    strategy = KHypotheses(settings, task, run_id, identities=identities, log=log, on_round=on_round)
    outcome = strategy.train(grid, initial)
    try:
        models = save_hypotheses(out, task.name, run_id, outcome.hypotheses, layout)
    finally:  # a full disk here must not keep the models from the clients
        try:
            delivered = strategy.deliver(grid, outcome)
        except KeyboardInterrupt:
            delivered = 0
    summary = summarize(
        outcome, task=task, run=run_id, hypotheses=settings.hypotheses, delivered=delivered, models=models
    )
    write_json(out / SUMMARY_FILE, asdict(summary))
    return summary


def describe(summary: Summary) -> str:
    """The summary in a few lines for people."""
    counts = " / ".join(map(str, summary.clients_per_hypothesis))
    lines = [
        f"{summary.rounds} rounds in {summary.seconds:.1f} s ({summary.stopped}), {summary.updates} updates",
        f"clients per hypothesis in round {summary.best_round}: {counts}",
    ]
    if summary.reseeded:
        lines.append(f"idle hypotheses re-seeded from the most populated one: {summary.reseeded} times")
    if summary.collapsed:
        lines.append(
            f"warning: the clusters had collapsed by round {summary.best_round}: nearly all updates went to one "
            "hypothesis; try --reseed on, another --start or --seed, and compare with --hypotheses 1"
        )
    if summary.metric is not None:
        lines.append(
            f"{summary.metric_name}: {summary.metric:.6g} over {summary.validators} held-out clients "
            f"(each under the hypothesis that fits its own rows best; the same clients chose round "
            f"{summary.best_round} as the best, so the figure is optimistic)"
        )
    else:
        lines.append("no held-out client told its loss: the hypotheses are those of the last round")
    for name, counted in (
        ("refused", summary.refusals),
        ("failed", summary.failures),
        ("dropped", summary.dropped),
    ):
        lines.extend(f"{name} {count} times: {reason}" for reason, count in counted.items())
    lines.append(f"models handed to {summary.models_delivered} clients, and kept as {', '.join(summary.models)}")
    return "\n".join(lines)


def _line(record: RoundRecord, rounds: int, metric: str) -> str:
    parts = [
        f"round {record.round}/{rounds}  {record.seconds:.1f} s",
        "clients " + "/".join(map(str, record.clients_per_hypothesis)),
    ]
    for name, counted in (
        ("refused", record.refusals),
        ("failed", record.failures),
        ("dropped", record.dropped),
    ):
        if counted:
            parts.append(f"{name} {sum(counted.values())}")
    if record.collapsed:
        parts.append("warning: collapsed, nearly all updates go to one hypothesis")
    if record.reseeded:
        parts.append("re-seeded " + "/".join(map(str, record.reseeded)))
    if record.metric is not None:
        parts.append(f"validation loss {record.validation_loss:.5g}, {metric} {record.metric:.6g}")
    return "  ".join(parts)


app = ServerApp()


@app.main()
def stock(grid: Grid, context: Context) -> None:
    """The stock path: ``flwr run`` gives the settings as run config, and any Flower grid does."""
    settings = load_settings(
        RunSettings, None, {key.replace("-", "_"): value for key, value in context.run_config.items()}
    )

    def identities() -> dict[int, str]:
        # The stock grid does not show the clients' keys, so an identity lasts only as long as its node.
        return {node: str(node) for node in grid.get_node_ids()}

    print(describe(run(settings, load_task(settings.task), grid, identities, log=say)))
