"""``coterie ledger``: what left a data holder, and what it cost."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coterie.client.ledger import Ledger, find_ledgers
from coterie.mechanisms.accounting import pure_loss
from coterie.mechanisms.events import Neighbourhood


def ledger(
    folder: Annotated[Path, typer.Argument(help="A client's state folder, or the one of a fleet.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a list with one object a client.")] = False,
) -> None:
    """Show the privacy ledger of each client in FOLDER."""
    rows = [summary_of(path) for path in find_ledgers(folder)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(title="Privacy ledgers")
    columns = {
        "client": "client",
        "releases": "releases",
        "pure_epsilon": "pure ε spent",
        "budget": "budget",
        "left": "left",
        "refused": "refused",
        "disclosures": "told unprotected",
    }
    for title in columns.values():
        table.add_column(title, justify="left" if title == "client" else "right")
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in columns))
    console = Console()
    console.print(table)
    console.print(
        "pure ε spent: the sum over releases of ε·r, a bound on the log-ratio of probabilities for data sets whose "
        "updates stay within the radius r in every layer of every release (docs/privacy.md). Told unprotected: "
        "validation losses of a client that was held out.",
        style="dim",
    )
    if any(not row["formal"] for row in rows):
        console.print(
            "Some releases used the RELATIVE neighbourhood: their figure is no formal guarantee.", style="bold"
        )
    if any(row["index_sent"] for row in rows):
        console.print("The index of the chosen hypothesis was sent in the clear in some releases: not covered.")


def summary_of(path: Path) -> dict[str, Any]:
    """One client's totals, priced from the rows of its ledger file."""
    with Ledger(path, create=False) as opened:
        releases, session = opened.releases(), opened.latest_session()
        spent = pure_loss(opened.events())
        return {
            "client": session.client if session else path.parent.name,
            "releases": len(releases),
            "pure_epsilon": spent,
            "budget": session.budget if session else None,
            "left": max(session.budget - spent, 0.0) if session else None,
            "refused": len(opened.refusals()),
            "disclosures": len(opened.disclosures()),
            "index_sent": sum(release.index_sent and release.selection is None for release in releases),
            "formal": all(release.update.neighbourhood is Neighbourhood.FIXED for release in releases),
            "runs": len({release.run for release in releases}),
        }


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
