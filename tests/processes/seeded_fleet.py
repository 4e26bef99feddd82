"""A fleet whose noise a test can draw again: ADDRESS STATE CLIENTS."""

import sys
from pathlib import Path

from coterie.client.fleet import single_threaded

single_threaded()

from coterie.client.app import take_part_as
from coterie.client.assembly import read_dataset
from coterie.client.fleet import run_fleet
from coterie.client.participation import Draws
from coterie.config import ClientSettings, Selection
from coterie.rng import seeded
from coterie.tasks import ClientData, load_task


def settings_for(address: str, state: Path, clients: int) -> ClientSettings:
    """The settings that both sides of the comparison use."""
    return ClientSettings(
        server=address,
        task="digits",
        state=state,
        fleet=clients,
        noise_multiplier=4.0,
        budget=1e6,
        selection=Selection.RANDOMIZED,
        selection_epsilon=3.0,
    )


def draws_of(name: str, round_number: int) -> Draws:
    """The randomness of one client's round."""
    return Draws(seeded(7, "noise", name, round_number), seeded(7, "order", name, round_number))


if __name__ == "__main__":
    settings = settings_for(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    task = load_task(settings.task)

    def take_part(data: ClientData) -> None:
        take_part_as(settings, task, data, log=print, draws=lambda number: draws_of(data.name, number))

    fleet = read_dataset(settings, task).clients
    sys.exit(run_fleet(fleet, take_part, name=lambda data: data.name, log=print))
