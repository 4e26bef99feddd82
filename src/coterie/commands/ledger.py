"""``coterie ledger``: what left a data holder, and what it cost."""

import json
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.client.ledger import Ledger, find_ledgers
from coterie.errors import CoterieError
from coterie.mechanisms.accounting import Accountant
from coterie.mechanisms.events import ReleaseEvent

_COLUMNS = {
    "client": "client",
    "releases": "releases",
    "pure_epsilon": "pure ε",
    "budget": "budget",
    "left": "left",
    "tight_epsilon": "ε at δ",
    "refused": "refused",
    "disclosures": "told",
}


def ledger(
    folder: Annotated[Path, typer.Argument(help="A client's state folder, or the one of a fleet.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a list with one object a client.")] = False,
) -> None:
    """Show the privacy ledger of each client in FOLDER."""
    rows, problems = [], []
    for path in find_ledgers(folder):
        try:
            rows.append(summary_of(path))
        except CoterieError as error:
            problems.append(str(error))
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _show(rows)
    if problems:
        raise CoterieError("; ".join(problems))


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Privacy ledgers", box=box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column(_COLUMNS["client"], overflow="fold", min_width=18)
    for title in list(_COLUMNS.values())[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_cell(row[key])) for key in _COLUMNS))
    console = Console()
    console.print(table)
    for line in _meaning(rows):
        console.print(Text(line))


def _meaning(rows: list[dict[str, Any]]) -> list[str]:
    """What the figures say, and what they do not cover."""
    deltas = ", ".join(sorted({f"{row['delta']:g}" for row in rows if row["delta"] is not None})) or "-"
    lines = [
        "pure ε: the sum over releases of ε·r (and of the ε of each private choice). It bounds the log-ratio of "
        "probabilities for two data sets that choose the same hypothesis and whose updates stay within the radius r of "
        "each other, in every layer of every release. The budget is on this figure.",
        f"ε at δ = {deltas}: the tight price of the same releases, for a plan of that many (docs/privacy.md).",
    ]
    if any(not row["formal"] for row in rows):
        lines.append("RELATIVE neighbourhood: some releases used it. Their figures are no formal guarantee.")
    if any(row["open_choices"] for row in rows):
        lines.append(
            "Not covered: which hypothesis was chosen. It was sent as an index, or can be guessed from the vector."
        )
    if any(row["disclosures"] for row in rows):
        lines.append("Not covered: what was told, the losses and scores of a client that was held out.")
    if any(row["row_counts_sent"] for row in rows):
        lines.append("Not covered: the number of rows, sent with some updates.")
    return lines


def summary_of(path: Path) -> dict[str, Any]:
    """One client's totals, priced from the rows of its ledger file."""
    with Ledger(path, create=False) as opened:
        releases, session, events = opened.releases(), opened.latest_session(), opened.events()
        pure, tight, formal = _prices(tuple(sorted(Counter(events).items(), key=repr)), session and session.delta)
        return {
            "client": session.client if session else path.parent.name,
            "releases": len(releases),
            "pure_epsilon": pure,
            "budget": session.budget if session else None,
            "left": max(session.budget - pure, 0.0) if session else None,
            "tight_epsilon": tight,
            "delta": session.delta if session else None,
            "refused": len(opened.refusals()),
            "disclosures": len(opened.disclosures()),
            "row_counts_sent": sum(release.rows_sent for release in releases),
            "index_sent": sum(release.index_sent and release.selection is None for release in releases),
            "open_choices": sum(release.selection is None for release in releases),
            "formal": formal,
            "runs": len({release.run for release in releases}),
        }


@lru_cache
def _prices(events: tuple[tuple[ReleaseEvent, int], ...], delta: float | None) -> tuple[float, float | None, bool]:
    """Pure and tight price and whether they are formal; cached, as the clients of a fleet often spend the same."""
    accountant = Accountant()
    for event, times in events:
        accountant.add([event], times=times)
    if delta is None:
        return accountant.pure, None, True
    price = accountant.price(delta=delta)
    return price.pure, price.tight if price.formal else None, price.formal


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
