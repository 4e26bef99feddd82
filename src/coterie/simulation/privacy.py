"""The deployed client's privacy, for a simulated run: its mechanism by its policy, and what its releases cost."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.client.policy import policy_for
from coterie.config import ClientSettings, Selection
from coterie.errors import CoterieError
from coterie.mechanisms.accounting import Accountant
from coterie.mechanisms.events import ReleaseEvent, SelectionRelease
from coterie.mechanisms.layerwise import LayerwiseLaplace
from coterie.mechanisms.selection import ExponentialSelection, RandomizedArgmin
from coterie.parameters import Layout
from coterie.protocol import PrivacyProposal, Refusal
from coterie.rng import seeded
from coterie.simulation.private_choice import Mechanism
from coterie.simulation.settings import SimulatedRun
from coterie.tasks import Task

DELTA = 1e-5
_MOST_COMPOSED = 1_000_000  # releases: a plan of more takes gigabytes, for hardly less than the pure price

_UNPROTECTED = "this simulation's own noise is seeded and protects nobody"
UNCOVERED_NOTE = (
    "the price is of the updates that one client sends, had the run been a deployed one: which hypothesis was chosen "
    f"and the losses of held-out clients are not covered, and {_UNPROTECTED}"
)
COVERED_NOTE = (
    "the price is of the updates that one client sends and of its private choices of a hypothesis, had the run been a "
    f"deployed one: the losses of held-out clients are not covered, and {_UNPROTECTED}"
)


_NEAR = "their updates are within the clipping norm C of each other in every layer, in each release"
SAME_HYPOTHESIS_NOTE = (
    "pure and tight compare two data sets of one client that choose the same hypothesis in each release, where "
    f"{_NEAR}; local_pure and local_tight compare any two that choose the same hypothesis, at a distance of 2C"
)
ANY_HYPOTHESIS_NOTE = (
    "pure and tight compare two data sets of one client where, from the hypothesis that the private choice took, "
    f"{_NEAR}; local_pure and local_tight compare any two data sets of one client, at a distance of 2C"
)
HEURISTIC_NOTE = (
    "pure and tight are here the number that the paper's heuristic gives, and no guarantee for any two data sets; "
    "local_pure and local_tight have no bound"
)
PLANNED_NOTE = (
    "the run stopped early, on what held-out clients said: the price is of the most releases that one client would "
    "have made in all planned rounds, as the (epsilon, delta) price holds for a number fixed beforehand"
)
MANY_NOTE = f"of more than {_MOST_COMPOSED:,} releases the (epsilon, delta) price is not computed: it is the pure price"


@dataclass(frozen=True)
class SimulatedPrice:
    """What the releases of the most active client would cost: the prices of ``mechanisms.accounting.Price``.

    ``releases`` counts the updates of the client that the seed samples most often in the run's planned rounds, T,
    which may be another client than the most active one of a run that stopped early: when a run stops depends on
    data, and ``tight`` holds for a number of releases that was fixed beforehand (docs/privacy.md). Beyond 20,000
    rounds, of a run that stopped early, each further planned round counts as one of its. A private choice of the
    hypothesis before each update is in the price.

    ``pure`` and ``tight`` compare data sets whose updates stay within the clipping norm C of each other, in every
    layer of every release, ``local_pure`` and ``local_tight`` any two (distance 2C): from the same hypothesis, which
    a private choice sees to and a plain one does not. Unless ``formal``, none of them is a guarantee. Infinite means:
    no bound. ``notes`` say all of this that applies.
    """

    releases: int
    pure: float
    tight: float
    local_pure: float
    local_tight: float
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


def choice_for(run: SimulatedRun) -> Mechanism | None:
    """How a client of this run chooses a hypothesis in private, None for the plain choice of the best."""
    epsilon, bound = run.selection_epsilon, run.selection_loss_bound
    if run.selection is Selection.RANDOMIZED and epsilon is not None:
        return RandomizedArgmin(float(epsilon))
    if run.selection is Selection.EXPONENTIAL and epsilon is not None and bound is not None:
        return ExponentialSelection(float(epsilon), float(bound))
    return None


def price_of(
    mechanism: LayerwiseLaplace | None, releases: int, choice: SelectionRelease | None = None
) -> SimulatedPrice | None:
    """The prices of ``releases`` of one client at δ = 1e-5; None where there is no noise, which no price describes.

    ``choice`` is the record of the private choice of a hypothesis that comes before each update, None for the plain
    one, which no price covers.
    """
    return None if mechanism is None else _price(_events(mechanism, choice), releases)


@dataclass(frozen=True)
class ParticipantPrices:
    """What each of N clients' releases cost, by how often it took part: the prices of ``SimulatedPrice``, (N,) each,
    and 0 for a client that never did. ``formal`` and ``notes`` are those of the most active client.
    """

    pure: NDArray[np.float64]
    tight: NDArray[np.float64]
    local_pure: NDArray[np.float64]
    local_tight: NDArray[np.float64]
    delta: float
    formal: bool
    notes: tuple[str, ...]


def prices_of_all(
    mechanism: LayerwiseLaplace | None, participations: NDArray[np.integer], choice: SelectionRelease | None = None
) -> ParticipantPrices | None:
    """``price_of`` for every client, from how many times each released, ``participations`` (N,), N ≥ 1.

    Clients with the same count pay the same, so that each distinct count is priced once: a million clients take
    little longer than the few counts among them. None where there is no noise. Of a run's result:
    ``prices_of_all(mechanism_for(run, task, layout), result.participations)``, with ``choice_for(run).event(k)``
    where the run's choices are private. Of a run that stopped early the two tight prices are then no guarantee, as
    they hold for numbers fixed beforehand: ``server_side.Sampler.planned_participations`` has those.
    """
    if mechanism is None:
        return None
    events = _events(mechanism, choice)
    counts, kinds = np.unique(participations, return_inverse=True)
    prices = [_price(events, count) for count in counts.tolist()]
    return ParticipantPrices(
        pure=np.array([price.pure for price in prices])[kinds],
        tight=np.array([price.tight for price in prices])[kinds],
        local_pure=np.array([price.local_pure for price in prices])[kinds],
        local_tight=np.array([price.local_tight for price in prices])[kinds],
        delta=DELTA,
        formal=prices[-1].formal,
        notes=prices[-1].notes,
    )


def _events(mechanism: LayerwiseLaplace, choice: SelectionRelease | None) -> tuple[ReleaseEvent, ...]:
    """What one release adds to a ledger. The update's event of any release will do: each costs n/ν in its radius."""
    update = mechanism.release(np.zeros(sum(mechanism.sizes)), rng=seeded(0, "event")).event
    return (update,) if choice is None else (choice, update)


@lru_cache(maxsize=1024)
def _price(events: tuple[ReleaseEvent, ...], releases: int) -> SimulatedPrice:
    accountant = Accountant()
    many = releases > _MOST_COMPOSED
    accountant.add(events, times=1 if many else releases)
    price = accountant.price(delta=DELTA)
    if many:
        pure, local_pure = price.pure * releases, price.local_pure * releases
        notes = (*price.notes, MANY_NOTE)
        price = replace(price, pure=pure, tight=pure, local_pure=local_pure, local_tight=local_pure, notes=notes)
    private = len(events) > 1
    compared = HEURISTIC_NOTE if not price.formal else ANY_HYPOTHESIS_NOTE if private else SAME_HYPOTHESIS_NOTE
    return SimulatedPrice(
        releases=releases,
        pure=price.pure,
        tight=price.tight,
        local_pure=price.local_pure,
        local_tight=price.local_tight,
        delta=DELTA,
        formal=price.formal,
        notes=(*price.notes, compared, COVERED_NOTE if private else UNCOVERED_NOTE),
    )
