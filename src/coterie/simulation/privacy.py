"""The deployed client's privacy, for a simulated run: its mechanism by its policy, and what its releases cost."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from coterie.client.policy import policy_for
from coterie.config import ClientSettings
from coterie.errors import CoterieError
from coterie.mechanisms.accounting import Accountant
from coterie.mechanisms.events import UpdateRelease
from coterie.mechanisms.layerwise import LayerwiseLaplace
from coterie.parameters import Layout
from coterie.protocol import PrivacyProposal, Refusal
from coterie.rng import seeded
from coterie.simulation.settings import SimulatedRun
from coterie.tasks import Task

DELTA = 1e-5

UNCOVERED_NOTE = (
    "the price is of the updates that one client sends, had the run been a deployed one: which hypothesis was chosen "
    "and the losses of held-out clients are not covered, and this simulation's own noise is seeded and protects nobody"
)


@dataclass(frozen=True)
class SimulatedPrice:
    """What the updates of the most active client would cost: ``mechanisms.accounting.Price`` within the radius."""

    releases: int
    pure: float
    tight: float
    delta: float
    formal: bool
    notes: tuple[str, ...]


def mechanism_for(run: SimulatedRun, task: Task, layout: Layout) -> LayerwiseLaplace | None:
    """What a client of this run sanitizes with, by the deployed policy; None for a noise multiplier of 0."""
    if run.noise_multiplier == 0:
        return None
    settings = ClientSettings(
        task=task.name,
        state=Path("unused"),
        budget=1.0,
        noise_multiplier=float(run.noise_multiplier),
        neighbourhood=run.neighbourhood,
        clipping_norm=None if run.clipping_norm is None else float(run.clipping_norm),
    )
    found = policy_for(settings, layout, task.clipping_norm).accept(PrivacyProposal())
    if isinstance(found, Refusal):
        raise CoterieError(f"Expected privacy settings that can be used, found: {found.reason}")
    return found


def price_of(mechanism: LayerwiseLaplace | None, releases: int) -> SimulatedPrice | None:
    """The price of ``releases`` of one client at δ = 1e-5; None where there is no noise, which no price describes."""
    if mechanism is None:
        return None
    # The event of any release will do: within the radius each costs n/ν.
    event = mechanism.release(np.zeros(sum(mechanism.sizes)), rng=seeded(0, "event")).event
    return _price(event, releases)


@lru_cache(maxsize=1024)
def _price(event: UpdateRelease, releases: int) -> SimulatedPrice:
    accountant = Accountant()
    accountant.add([event], times=releases)
    price = accountant.price(delta=DELTA)
    return SimulatedPrice(releases, price.pure, price.tight, DELTA, price.formal, (*price.notes, UNCOVERED_NOTE))
