"""What label releases cost together, and the numbers that a mechanism needs for a price."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.labels.sanitizing import flip_probability
from coterie.labels.weights import read_specification
from coterie.mechanisms.events import LabelRelease
from coterie.mechanisms.labels.accounting import LabelPrice, label_price
from coterie.mechanisms.labels.aggregation import AggregateFeaturesAndLabels, AggregateNoisyLabels
from coterie.mechanisms.labels.clustering import ClusterResponse
from coterie.mechanisms.labels.peer_to_peer import PeerToPeer
from coterie.mechanisms.labels.randomized_response import (
    RandomizedResponse,
    RandomizedResponseWithPrior,
    TopKRandomizedResponse,
)
from coterie.rounding import rounded_up

MECHANISMS = ("rr", "rr-top-k", "rr-with-prior", "uniform-rr", "cluster-rr", "p2p", "noisy-wtd-llp", "wtd-lba")


@dataclass(frozen=True)
class Planned:
    """A release to be priced before it is made; the numbers that its mechanism does not use stay None."""

    mechanism: str
    epsilon: float | None = None
    delta: float | None = None
    classes: int | None = None
    floor: float | None = None
    cluster_size: int | None = None
    rows: int | None = None
    bag_size: int | None = None
    bags: int | None = None
    noisy: int | None = None
    label_bound: float | None = None

    def release(self) -> tuple[LabelRelease, dict[str, float]]:
        """The event, and what the mechanism must be set to.

        Raises ``CoterieError`` for a mechanism that is not there, and a number that is missing or not used, and
        ``ValueError`` for one out of range.
        """
        match self.mechanism:
            case "rr" | "rr-top-k" | "rr-with-prior" | "uniform-rr" | "cluster-rr":
                return self._response()
            case "p2p":
                self._expect("epsilon", "cluster_size", optional=("delta",))
                flip, delta = flip_probability(self.epsilon or 0.0, self.delta, [self.cluster_size or 0])
                event = LabelRelease("peer-to-peer", 0, self.epsilon or 0.0, delta)
                return event, {"flip_probability": flip, "epsilon_towards_the_asked": PeerToPeer(flip).local_loss}
            case "noisy-wtd-llp":
                self._expect("epsilon", "rows", "bag_size", "bags", "noisy", "label_bound")
                bags = AggregateNoisyLabels(
                    self.rows or 0, self.bag_size or 0, self.bags or 0, self.noisy or 0, self.label_bound or 0.0
                )
                return bags.event(self.epsilon or 0.0), {}
            case "wtd-lba":
                self._expect()
                return AggregateFeaturesAndLabels(1, 1).event(0), {}
        raise CoterieError(f"Expected --mechanism to be one of {', '.join(MECHANISMS)}, found {self.mechanism!r}")

    def _response(self) -> tuple[LabelRelease, dict[str, float]]:
        self._expect("epsilon", "classes", *(["floor"] if self.mechanism == "cluster-rr" else []))
        epsilon, classes = self.epsilon or 0.0, self.classes or 0
        match self.mechanism:
            case "rr":
                plain = RandomizedResponse(classes, epsilon)
                return plain.event(0), {"keep_probability": plain.keep_probability}
            case "rr-top-k":
                return TopKRandomizedResponse(classes, epsilon).event(0), {}
            case "rr-with-prior":
                return RandomizedResponseWithPrior(classes, epsilon).event(0), {}
            case "uniform-rr":
                uniform = ClusterResponse.uniform(epsilon, classes=classes)
                return uniform.event(0), {"resampling": uniform.resampling}
        response = ClusterResponse.for_epsilon(epsilon, classes=classes, floor=self.floor or 0.0)
        return response.event(0), {
            "resampling": response.resampling,
            "histogram_noise_scale": response.noise_scale,
            "histogram_epsilon": response.histogram_epsilon,
            "response_epsilon": response.response_epsilon,
        }

    def _expect(self, *needed: str, optional: Sequence[str] = ()) -> None:
        for name, value in vars(self).items():
            if name == "mechanism" or name in optional or (value is not None) == (name in needed):
                continue
            found = "none" if value is None else f"{value}"
            wanted = f"--{name.replace('_', '-')} with" if value is None else f"no --{name.replace('_', '-')} with"
            raise CoterieError(f"Expected {wanted} --mechanism {self.mechanism}, found {found}")


def price_of_tables(tables: Sequence[Path], *, disjoint: bool) -> LabelPrice:
    """The price of released tables, by the specifications at ``tables`` (``…labels.json``).

    They add up, as the same person may be in all of them; with ``disjoint`` rows of different people, the dearest
    counts (parallel composition). Copies of one release count once. Raises ``CoterieError`` for an unreadable one.
    """
    events: list[LabelRelease] = []
    seen: set[str | None] = set()
    for part, path in enumerate(tables):
        found = read_specification(path)
        if found.get("identifier") in seen - {None}:
            continue
        seen.add(found.get("identifier"))
        try:
            event = LabelRelease(**found["release"])
        except (KeyError, TypeError) as error:
            raise CoterieError(f"Expected a release in {path}, found none that can be read: {error}") from error
        events.append(replace(event, partition="tables", part=part) if disjoint else event)
    return _priced(events)


def price_of_plan(planned: Planned, *, releases: int) -> tuple[LabelPrice, dict[str, float]]:
    """What ``releases`` of the same labels cost together, and the settings of each."""
    if releases < 1:
        raise CoterieError(f"Expected --releases of 1 or more, found {releases}")
    event, settings = planned.release()
    price = _priced([event])
    delta = min(1.0, releases * price.delta)
    return replace(price, releases=releases, epsilon=releases * price.epsilon, delta=delta), settings


def words(price: LabelPrice) -> str:
    """A price in a sentence."""
    if not math.isfinite(price.epsilon):
        return "No guarantee: " + "; ".join(price.notes) + "."
    delta = f", δ = {rounded_up(price.delta, 6)}" if price.delta else ""
    times = "1 release costs" if price.releases == 1 else f"{price.releases:,} releases together cost"
    return f"{times} ε = {rounded_up(price.epsilon, 6)}{delta} in label differential privacy (one row's label changes)."


def as_json(price: LabelPrice, settings: dict[str, float]) -> dict[str, Any]:
    """A price for programs; null is no bound."""
    return {
        "releases": price.releases,
        "epsilon": price.epsilon if math.isfinite(price.epsilon) else None,
        "delta": price.delta,
        "formal": price.formal,
        "notes": list(price.notes),
        "settings": settings,
    }


def _priced(events: list[LabelRelease]) -> LabelPrice:
    price = label_price(events)
    if price is None:
        raise CoterieError("Expected specifications (…labels.json) or --mechanism, found neither")
    return price
