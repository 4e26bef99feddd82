"""``coterie …``: everything that is neither the server nor a client."""

import typer

from coterie.terminal import run


def application() -> typer.Typer:
    """The commands. Imported here, not above, so that Ctrl-C meets ``run`` also while they load."""
    from coterie.attacks.command import attack
    from coterie.commands.account import account, calibrate
    from coterie.commands.data import app as data
    from coterie.commands.labels import app as labels
    from coterie.commands.ledger import ledger
    from coterie.commands.predict import predict
    from coterie.commands.simulate import simulate

    commands = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Personalized federated learning with d-privacy: ledgers, prices, data, labels, predictions, simulation, "
        "attacks.",
    )
    for command in (ledger, predict, account, calibrate, simulate, attack):
        commands.command()(command)
    commands.add_typer(data, name="data")
    commands.add_typer(labels, name="labels")
    return commands


def main() -> None:
    """The entry point."""
    run("coterie", application)
