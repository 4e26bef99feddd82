"""``coterie …``: everything that is neither the server nor a client."""

import typer

from coterie.commands.account import account, calibrate
from coterie.commands.data import app as data
from coterie.commands.ledger import ledger
from coterie.commands.predict import predict
from coterie.terminal import run

application = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Personalized federated learning with d-privacy: ledgers, prices, data and predictions.",
)
application.command()(ledger)
application.command()(predict)
application.command()(account)
application.command()(calibrate)
application.add_typer(data, name="data")


def main() -> None:
    """The entry point."""
    run("coterie", application)
