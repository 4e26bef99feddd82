"""What recorded label releases cost: composition under label differential privacy, and nothing else."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from coterie.mechanisms.arguments import expect_count
from coterie.mechanisms.events import LabelRelease

NO_GUARANTEE_NOTE = (
    "a release without a label guarantee (weighted sums without noise, wtd-LBA) is among the label releases: what is "
    "computed about its privacy depends on the labels and is no differential privacy"
)


@dataclass(frozen=True, slots=True)
class LabelPrice:
    """What some label releases cost together: (``epsilon``, ``delta``) label differential privacy.

    Bounds what they all show about the label of any one example, features being public. ``formal`` is False, and
    ``epsilon`` infinite, when one of them has no guarantee; ``notes`` say so.
    """

    releases: int
    epsilon: float
    delta: float
    formal: bool
    notes: tuple[str, ...]


def label_price(events: Iterable[LabelRelease]) -> LabelPrice | None:
    """The price of ``events``; None for no events. Raises ``ValueError`` for one with impossible numbers."""
    accountant = LabelAccountant()
    accountant.add(events)
    return accountant.price()


class LabelAccountant:
    """A growing ledger's label price, by basic composition.

    Within one part of a partition (ε, δ) add up, releases being allowed to depend on earlier ones. One label is in
    one part of each partition, so a partition costs what its most expensive part does: the largest sum of ε and the
    largest sum of δ over its parts (adaptive parallel composition). Different partitions may put a label into the most
    expensive part of each, so partitions add up. The sums are exact before the last rounding.
    """

    def __init__(self) -> None:
        """An empty ledger."""
        self._releases = 0
        self._unbounded = False
        self._parts: dict[str, dict[int, tuple[Fraction, Fraction]]] = defaultdict(dict)

    def add(self, events: Iterable[LabelRelease], *, times: int = 1) -> None:
        """Count ``events``, ``times`` times over. Raises ``ValueError`` for a bad one, and has then counted none."""
        expect_count("times", times, least=0)
        for event in [check(event) for event in events]:
            self._releases += times
            if times and math.isinf(event.epsilon):
                self._unbounded = True
                continue
            epsilon, delta = self._parts[event.partition].get(event.part, (Fraction(0), Fraction(0)))
            self._parts[event.partition][event.part] = (
                epsilon + times * Fraction(event.epsilon),
                delta + times * Fraction(event.delta),
            )

    def price(self) -> LabelPrice | None:
        """The price of what was added; None if nothing was."""
        if not self._releases:
            return None
        dearest = [
            (max(epsilon for epsilon, _ in parts.values()), max(delta for _, delta in parts.values()))
            for parts in self._parts.values()
        ]
        epsilon = float(sum((epsilon for epsilon, _ in dearest), Fraction(0)))
        delta = float(min(sum((delta for _, delta in dearest), Fraction(0)), Fraction(1)))
        if self._unbounded:
            return LabelPrice(self._releases, math.inf, delta, False, (NO_GUARANTEE_NOTE,))
        return LabelPrice(self._releases, epsilon, delta, True, ())


def check(event: LabelRelease) -> LabelRelease:
    """``event`` itself. Raises ``ValueError``, naming argument and value, if its type or numbers are impossible."""
    if not isinstance(event, LabelRelease):
        raise ValueError(f"Expected a label release, found {type(event).__name__}")
    expect_count("examples", event.examples, least=0)
    if not event.epsilon >= 0:
        raise ValueError(f"Expected epsilon >= 0, found {event.epsilon}")
    if not 0 <= event.delta < 1:
        raise ValueError(f"Expected delta from 0 to below 1, found {event.delta}")
    expect_count("part", event.part, least=0)
    if not event.partition and event.part:
        raise ValueError(f"Expected part 0 of the division into all examples, found {event.part}")
    return event
